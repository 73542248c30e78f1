"""Write a model whose weights are another's with noise, for the original to teach: on-policy distillation on a CPU.

    python scripts/data/disturb.py models/SmolLM2-135M-Instruct models/disturbed [--noise 0.08]

Each matrix gets Gaussian noise with a standard deviation of --noise times the root mean square of its elements.
"""

import argparse
import shutil
from pathlib import Path


def disturb(model: Path, out: Path, noise: float) -> Path:
    """Copy `model`, a directory, to `out` with noise in its matrices."""
    import torch
    from safetensors.torch import load_file, save_file

    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary)
    generator = torch.Generator().manual_seed(1)
    for file in sorted(temporary.glob("*.safetensors")):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.ndim >= 2:
                deviation = noise * weight.float().square().mean().sqrt()
                noisy = weight.float() + deviation * torch.randn(weight.shape, generator=generator)
                weights[name] = noisy.to(weight.dtype)
        save_file(weights, file, {"format": "pt"})
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--noise", type=float, default=0.08)
    options = parser.parse_args()
    print(f"wrote {disturb(options.model, options.out, options.noise)}")


if __name__ == "__main__":
    main()
