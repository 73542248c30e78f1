"""What a run prints before it begins: its arithmetic, and with --dry_run the dtype, where model and data come from and
how much memory it takes. Needs neither network nor weights."""

import os
from pathlib import Path
from typing import Any

import torch

import rewards
import utils
from scripts.parts import checks, outlook

ESTIMATED_BY = """model_revision model_dtype deepspeed_stage gradient_checkpointing gradient_checkpointing_part
    lora_rank load_ref_policy ref_model_name_or_path ref_policy_update_freq
    pack_length max_prompt_token_length response_length vllm_gpu_memory_utilization vllm_tensor_parallel_size
    vllm_sleep sequence_parallel_size attn_implementation fsdp_shard_size offload""".split()


def print_plan(args: Any, fast: bool, learners: int, shared_gpu: bool, logprob_chunk: int) -> None:
    """Print the plan. `fast`: of grpo_fast.py, where packs, not prompts, are shared out over the learners."""
    if fast:
        print(arithmetic(args, None))
        print(roles(args, learners))
    else:
        print(arithmetic(args, learners))
        ignored = checks.flags_of_fast(args)
        if ignored:
            print(f"WARNING: {ignored}: grpo.py samples on the learners' GPUs, strictly on-policy; start grpo_fast.py")
    for line in outlook.lines(args):
        print(line)
    if not args.dry_run:
        return
    from scripts.parts import machine
    from scripts.proof import memory

    if torch.cuda.is_available() or args.model_dtype != "auto":
        dtype, why = machine.choose_dtype(args)
        print(f"dtype    {dtype}: {why}")
    else:
        print("dtype    bfloat16 on a GPU; here, without one, a run measures which dtype is faster")
    print(sources_text(args))
    flags = {name: getattr(args, name) for name in ESTIMATED_BY}
    setup = memory.Setup(
        (args.model_name_or_path,),
        **flags,
        learners=learners,
        shared_gpu=shared_gpu,
        logprob_chunk=logprob_chunk,
        gpu=os.environ.get("PLAN_GPU", ""),
    )
    memory.tell(setup)


def arithmetic(args: Any, ranks: int | None) -> str:
    """The sizes of a step and of the run in a few lines; with `ranks` also what each rank samples."""
    prompts = args.num_unique_prompts_rollout
    samples = args.num_samples_per_prompt_rollout
    rollouts = prompts * samples
    tokens = rollouts * (args.max_prompt_token_length + args.response_length)
    updates = args.num_epochs * args.num_mini_batches
    steps = args.total_episodes // rollouts

    lines = [f"step     {prompts} prompts x {samples} samples = {rollouts} rollouts, at most {tokens:,} tokens"]
    if ranks:
        own = prompts // ranks
        line = f"ranks    {ranks}, each {own} prompts = {own * samples} rollouts"
        if args.sequence_parallel_size > 1:
            line += f"; {args.sequence_parallel_size} share the tokens of a pack"
        lines.append(line)
    lines.append(
        f"update   {args.num_epochs} epochs x {args.num_mini_batches} mini-batches = {updates} optimizer steps of "
        f"{rollouts // args.num_mini_batches} rollouts, in packs of at most {args.pack_length:,} tokens"
    )
    lines.append(
        f"run      {args.total_episodes:,} episodes // {rollouts} = {steps} steps, {steps * updates} optimizer steps"
    )
    return "\n".join(lines)


def roles(args: Any, learners: int) -> str:
    """The processes of grpo_fast.py."""
    engines = args.vllm_num_engines
    tp = args.vllm_tensor_parallel_size
    groups = args.num_unique_prompts_rollout * (args.async_steps + 1)
    return (
        f"roles    {learners} learners + {engines} engines x {tp} = {learners + engines * tp} processes, "
        f"{torch.cuda.device_count()} GPUs visible; async_steps {args.async_steps}: at most {groups} groups in flight"
    )


def sources_text(args: utils.Flags) -> str:
    """Where model, data and judge come from, a line each, and which of them a run would refuse."""
    lines = [f"model    {args.model_name_or_path}: {source_of(args.model_name_or_path)}"]
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, amount in utils.parse_mixer(flag, getattr(args, flag)):
            lines.append(f"data     --{flag} {name} {amount}: {source_of(name)}")
    lines += [f"missing  {text}, a run is refused" for text in checks.missing_paths(args)]
    judge = args.llm_judge_model
    if judge and not has_judge(args):
        lines.append(f"judge    {judge}: no --llm_judge_base_url and no $OPENAI_API_KEY, a run is refused")
    for pair in (args.remap_verifier or "").split(","):
        name = pair.partition("=")[2].strip().lower()
        needs = rewards.VERIFIERS[name].needs if name in rewards.VERIFIERS else None
        if needs and not getattr(args, needs):
            lines.append(f"judge    --remap_verifier {pair}: {name} needs --{needs}, a run is refused")
    return "\n".join(lines)


def has_judge(args: utils.Flags) -> bool:
    """Whether the flags or the environment name a server for the judge."""
    from scripts.parts import judges

    return bool(judges.judge_url(args) or os.environ.get("OPENAI_API_KEY"))


def source_of(name: str) -> str:
    """Where a model or a data set comes from."""
    if name.startswith("reasoning_gym:"):
        return "generated"
    if checks.is_missing_path(name):
        return "not here"
    return "local" if Path(name).exists() else "hub"
