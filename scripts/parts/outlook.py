"""What a run warns of before it begins: flags that are hardly meant, and a disk that cannot hold what it leaves."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from scripts.parts import checks

# Of a row of rollouts.jsonl, measured: its text, and more for each token of the prompt, of the response and of a dump
ROLLOUT_BYTES = 700
PROMPT_BYTES = 12
TOKEN_BYTES = 50
DUMP_BYTES = 70


def lines(args: Any) -> list[str]:
    """The warnings, and what the disk must hold."""
    return [*(f"WARNING: {mistake}" for mistake in checks.likely_mistakes(args)), disk_text(args)]


def disk_text(args: Any) -> str:
    """What the disk must hold at the end of the run and what is free, a line, with a warning where that is less."""
    shapes = weight_shapes(args.model_name_or_path)
    if not shapes:
        return f"disk     not estimated: no .safetensors of {args.model_name_or_path} on this machine"
    parts = disk_bytes(args, shapes)
    needed = sum(parts.values())
    directory = args.run_dir.absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    line = f"disk     GB: {sizes}: at most {needed / 1e9:.1f}; {free / 1e9:.1f} are free in {directory}"
    if needed > free:
        line += (
            "\nWARNING: the disk may get full. What helps: another --output_dir, a smaller --keep_last_n_checkpoints, "
            "a larger --save_freq, no --save_traces"
        )
    return line


def weight_shapes(name: str) -> list[list[int]]:
    """The shapes of a model's weights, from the heads of its files in a directory or in the hub's cache; [] where this
    machine has none."""
    directory = Path(name)
    if not directory.is_dir():
        import huggingface_hub

        if name.startswith(("/", ".", "~")):
            return []
        config = huggingface_hub.try_to_load_from_cache(name, "config.json")
        if not isinstance(config, str):
            return []
        directory = Path(config).parent
    shapes = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(length))
        shapes += [tensor["shape"] for key, tensor in head.items() if key != "__metadata__"]
    return shapes


def disk_bytes(args: Any, shapes: list[list[int]]) -> dict[str, float]:
    """Bytes of what a run leaves in its directory, at most: all responses have --response_length tokens.

    A weight takes 2 bytes in a model of bfloat16, 4 of float32; in a checkpoint 12: a float32 master weight and Adam's
    two moments. With --ref_policy_update_freq a checkpoint has the reference policy too, in float32. With --lora_rank r
    adapters, r (m + n) numbers for a matrix m x n, take the place of the weights, in float32. A checkpoint is written
    before the oldest is removed. A row of rollouts.jsonl has about ROLLOUT_BYTES, and more for each token.
    """
    weights = sum(math.prod(shape) for shape in shapes)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    steps = args.total_episodes // rollouts
    whole_model = (4 if args.model_dtype == "float32" else 2) * weights
    trained = weights
    model = whole_model
    if args.lora_rank:
        trained = sum(args.lora_rank * sum(shape) for shape in shapes if len(shape) == 2)
        model = 4 * trained + args.lora_merge * whole_model
    checkpoint = 12 * trained
    if args.ref_policy_update_freq is not None:
        checkpoint += 4 * weights

    parts = {"model": model}
    saved = steps // args.save_freq if args.save_freq > 0 else 0
    if saved:
        parts[f"{saved} of steps"] = saved * model
    if args.checkpoint_state_freq > 0:
        written = steps // args.checkpoint_state_freq
        kept = written if args.keep_last_n_checkpoints < 0 else min(written, args.keep_last_n_checkpoints + 1)
        parts[f"{kept} checkpoints"] = kept * checkpoint
    if args.save_traces or args.dump_steps:
        traced = steps
        row = ROLLOUT_BYTES + PROMPT_BYTES * args.max_prompt_token_length + TOKEN_BYTES * args.response_length
        if args.dump_steps:
            row += DUMP_BYTES * args.response_length
        if args.dump_steps.isdecimal() and not args.save_traces:
            traced = steps // int(args.dump_steps)
        parts["rollouts"] = traced * rollouts * row
    return parts
