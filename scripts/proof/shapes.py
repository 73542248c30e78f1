"""Shapes of public models and data sheets of GPUs, for the arithmetic of memory.py, roofline.py and simulate.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
SHAPES = {  # hidden, MLP, layers, heads, key-value heads, tied head (their config.json)
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, False),
}


@dataclass(frozen=True)
class GPU:
    """A data sheet: dense bfloat16 operations a second, bytes a second of memory and of links, GiB of memory."""

    flops: float
    bandwidth: float
    link: float  # NVLink, one direction, or PCIe
    network: float  # a GPU's share of the node's network: one port of 400 or 200 Gb/s
    memory: float


GPUName = Literal["h100", "h200", "h20", "a100", "4090"]
GPUS: dict[str, GPU] = {
    "h100": GPU(989e12, 3.35e12, 450e9, 50e9, 80),
    "h200": GPU(989e12, 4.8e12, 450e9, 50e9, 141),
    "h20": GPU(148e12, 4.0e12, 450e9, 50e9, 96),
    "a100": GPU(312e12, 2.04e12, 300e9, 25e9, 80),
    "4090": GPU(165e12, 1.01e12, 25e9, 12e9, 24),
}


def qwen(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Any:
    """The configuration of a Qwen2.5 model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen2",
        vocab_size=151936 if hidden < 3584 else 152064,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


def config_file(name: str, revision: str | None) -> Path:
    """The model's config.json. Raises ValueError where this machine does not have it."""
    if Path(name).is_dir():
        return Path(name) / "config.json"
    if name.startswith(("/", ".", "~")):
        raise ValueError(f"no directory {name}")
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise ValueError(f"no config.json of {name} on this machine (hf download {name} config.json)")
    return Path(cached)


def load_config(name: str, revision: str | None) -> Any:
    """The model's configuration. Raises ValueError where this machine does not have it."""
    config_file(name, revision)  # before transformers is imported, which takes seconds
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
