"""Print the arithmetic of a run, and what it would do with this machine: dtype, where model and data come from, memory
on the GPUs.

    python scripts/parts/plan.py output/grpo/args.json  of a run that there is

The training scripts start it, with their flags as JSON, for the arithmetic and with --dry_run for the rest. Touches
neither network nor weights.
"""

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import rewards
import utils
from scripts.proof import memory

ESTIMATED_BY = """model_revision model_dtype deepspeed_stage gradient_checkpointing gradient_checkpointing_part
    lora_rank load_ref_policy ref_model_name_or_path ref_model_revision ref_model_dtype ref_policy_update_freq
    pack_length max_prompt_token_length response_length vllm_gpu_memory_utilization vllm_tensor_parallel_size
    vllm_sleep sequence_parallel_size""".split()
NOT_FLAGS = ["learners", "shared_gpu", "logprob_chunk"]  # which decide about memory too


def arithmetic(args: Any, ranks: int | None) -> str:
    """The resolved batch arithmetic in a few lines; without `ranks` none of what each samples."""
    p, g = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    updates, steps = args.num_epochs * args.num_mini_batches, args.total_episodes // (p * g)
    longest, share = args.max_prompt_token_length + args.response_length, args.sequence_parallel_size
    lines = [f"step     {p} prompts x {g} samples = {p * g} rollouts, at most {p * g * longest:,} tokens"]
    if ranks:
        together = f"; {share} share the tokens of a pack" if share > 1 else ""
        lines.append(f"ranks    {ranks}, each {p // ranks} prompts = {p // ranks * g} rollouts{together}")
    lines.append(
        f"update   {args.num_epochs} epochs x {args.num_mini_batches} mini-batches = {updates} optimizer steps of "
        f"{p * g // args.num_mini_batches} rollouts, in packs of at most {args.pack_length:,} tokens"
    )
    lines.append(
        f"run      {args.total_episodes:,} episodes // {p * g} = {steps} steps, {steps * updates} optimizer steps"
    )
    return "\n".join(lines)


def roles(args: Any, learners: int) -> str:
    """Who grpo_fast.py starts."""
    engines, tp = args.vllm_num_engines, args.vllm_tensor_parallel_size
    return (
        f"roles    {learners} learners + {engines} engines x {tp} = {learners + engines * tp} processes, "
        f"{torch.cuda.device_count()} GPUs visible; async_steps {args.async_steps}: at most "
        f"{args.num_unique_prompts_rollout * (args.async_steps + 1)} groups in flight"
    )


def on_hub(name: str) -> str:
    """What a name is that is no path of this machine: the hub's are two words at most."""
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return "no such path, a run is refused" if is_path else "hub"


def sources_text(args: utils.Flags) -> str:
    """Where model and data come from, a line each."""
    model = args.model_name_or_path
    lines = [f"model    {model}: {'directory' if Path(model).is_dir() else on_hub(model)}"]
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, amount in utils.parse_mixer(flag, getattr(args, flag)):
            kind = (
                "generated" if name.startswith("reasoning_gym:") else "local" if Path(name).exists() else on_hub(name)
            )
            lines.append(f"data     --{flag} {name} {amount}: {kind}")
    system, judge = args.system_prompt_override_file, args.llm_judge_model
    if system is not None and not Path(system).is_file():
        lines.append(f"data     --system_prompt_override_file {system}: no such file, a run is refused")
    if judge and not (rewards.judge_url(args) or os.environ.get("OPENAI_API_KEY")):
        lines.append(f"judge    {judge}: no --llm_judge_base_url and no $OPENAI_API_KEY, a run is refused")
    for pair in filter(None, (args.remap_verifier or "").split(",")):
        name = pair.partition("=")[2].strip().lower()
        needs = rewards.VERIFIERS[name].needs if name in rewards.VERIFIERS else None
        if needs and not getattr(args, needs):
            lines.append(f"judge    --remap_verifier {pair}: {name} needs --{needs}, a run is refused")
    return "\n".join(lines)


def of_run(path: Path) -> dict[str, Any]:
    """The flags in a run's args.json, which script it is of, how many learners it has, and whether engines are on their
    GPUs. Raises OSError or ValueError where one of its files is not there or is none."""
    values, facts = (json.loads(path.with_name(f"{name}.json").read_text()) for name in ("args", "environment"))
    fast = Path(facts["command"][1]).name == "grpo_fast.py"
    shared = not fast or values["single_gpu_mode"]
    return values | {"fast": fast, "learners": facts["world_size"], "shared_gpu": shared}


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    given = sys.argv[1]
    try:
        values = json.loads(given) if given.startswith("{") else of_run(Path(given))
    except (OSError, ValueError) as error:
        raise SystemExit(f"plan.py: {given}: {error}") from None
    plain = SimpleNamespace(**values)
    print(arithmetic(plain, None if values["fast"] else values["learners"]))
    if values["fast"]:  # where packs, not prompts, are shared out
        print(roles(plain, values["learners"]))
    if not values.get("dry_run", True):  # a run that starts
        return
    args = utils.Flags(**{f.name: values[f.name] for f in fields(utils.Flags) if f.name in values})
    print("dtype    {}: {}".format(*utils.choose_dtype(args)))
    print(sources_text(args))
    known = {name: values[name] for name in ESTIMATED_BY + NOT_FLAGS if name in values}
    memory.tell(memory.Setup((args.model_name_or_path,), **known))


if __name__ == "__main__":
    main()
