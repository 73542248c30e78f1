"""GiB on a learner's GPU by model, pack length and number of learners: the memory table of scripts/README.md.

    python scripts/reports/memory_table.py            the public models below
    python scripts/reports/memory_table.py DIR ...    models with a config.json in DIR

The numbers are those of --dry_run (utils.memory_estimate) with --deepspeed_stage 3, --gradient_checkpointing and a
reference policy; * is above 75 GiB. The engine has its own GPU in grpo_fast.py and is in the last column.
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import grpo
import utils

LENGTHS, LEARNERS = (2048, 8192, 32768), (1, 2, 4, 8, 16)
SHAPES = {  # hidden, MLP, layers, heads, key-value heads, tied head (their config.json)
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, False),
}


def qwen(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool):
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


def row(name: str, config) -> str:
    """A model's row of the Markdown table."""
    cells = []
    for learners in LEARNERS:
        sizes = []
        for length in LENGTHS:
            args = grpo.Args(
                model_name_or_path=name, pack_length=length, deepspeed_stage=3, gradient_checkpointing=True
            )
            parts = utils.memory_estimate(args, config, learners, grpo.LOGPROB_CHUNK)
            weights, token = parts.pop("engine_weights") / 2**30, parts.pop("engine_token") / 2**10
            used = sum(parts.values()) / 2**30
            sizes.append(f"{used:.0f}{'*' * (used > 75)}")
        cells.append(" / ".join(sizes))
    return f"| {' | '.join([name, *cells, f'{weights:.1f} + {token:.0f} KiB a token'])} |"


def main() -> None:
    from transformers import AutoConfig

    models = {Path(name).name: AutoConfig.from_pretrained(name) for name in sys.argv[1:]}
    models = models or {name: qwen(*shape) for name, shape in SHAPES.items()}
    heads = [f"packs of {' / '.join(f'{n:,}' for n in LENGTHS)} tokens", *(f"{n} GPU" for n in LEARNERS), "engine"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * (len(LEARNERS) + 2) + "|")
    for name, config in models.items():
        print(row(name, config))


if __name__ == "__main__":
    main()
