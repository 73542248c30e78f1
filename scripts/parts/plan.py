"""What a run prints and refuses before it begins: its arithmetic, likely mistakes, what the disk must hold, models that
do not fit the flags. With --dry_run also dtype, sources and the estimate of estimate.py, without network or weights."""

import functools
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

import rewards
import utils
from scripts.parts import checks, packing, probe, run_files

MIXERS = ("dataset_mixer_list", "dataset_mixer_eval_list")
FIRST = 1000  # prompts of a data set that are looked at for a mistake of the template


# --- What is printed --------------------------------------------------------------------------------------------------


def print_plan(args: Any, fast: bool, learners: int, shared_gpu: bool, logprob_chunk: int) -> None:
    """Print the plan. `fast`: of grpo_fast.py, where packs, not prompts, are shared out over the learners."""
    print(arithmetic(args, None if fast else learners))
    if fast:
        print(roles(args, learners))
    for mistake in checks.likely_mistakes(args):
        print(f"WARNING: {mistake}")
    print(disk_text(args))
    if not args.dry_run:
        return
    from scripts.parts import estimate

    dtype, why = choose_dtype(args)
    print(f"dtype    {dtype} on this machine: {why}")
    print(sources_text(args, fast))
    setup = estimate.Setup(args, learners, shared_gpu, logprob_chunk)
    print(estimate.told(setup, fast and not shared_gpu))


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
        lines.append(f"ranks    {ranks}, each {own} prompts = {own * samples} rollouts")
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


def sources_text(args: utils.Flags, fast: bool) -> str:
    """Where model and data come from, a line each, and what a run would be refused for."""
    lines = [f"model    {args.model_name_or_path}: {source_of(args.model_name_or_path)}"]
    for flag in MIXERS:
        for name, amount in utils.parse_mixer(flag, getattr(args, flag)):
            lines.append(f"data     --{flag} {name} {amount}: {source_of(name)}")
    lines += [f"refused  {text}" for text in checks.refused_in_a_run(args, fast)]
    for flag in MIXERS:
        problem = refused_rows(args, flag)
        lines += [f"refused  {problem}"] if problem else []
    if args.llm_judge_model:
        from scripts.parts import judges

        problem = judges.missing_server(args)
        lines += [f"refused  {problem}"] if problem else []
    return "\n".join(lines)


def refused_rows(args: utils.Flags, flag: str) -> str:
    """What a run is refused for by the rows of a mixer flag that are on this machine, or ""."""
    pairs = getattr(args, flag)
    splits = getattr(args, f"{flag}_splits")
    here = []
    splits_here = []
    for i, (name, amount) in enumerate(zip(pairs[::2], pairs[1::2], strict=True)):
        if source_of(name) == "local" and not checks.problem_of_data(name):
            here += [name, amount]
            splits_here.append(splits[i % len(splits)])

    good = 0
    bad = []
    try:
        for row in utils.mixed_rows(flag, replace(args, **{flag: here, f"{flag}_splits": splits_here})):
            try:
                utils.checked_verifiers(row)
                good += 1
            except ValueError as error:
                bad.append(f"{row.where}: {rewards.printable(str(error))}")
        utils.tell_bad(flag, bad, good)
    except utils.UserError as error:
        return str(error)
    return ""


def short(number: float) -> str:
    """A number to three digits, for a person: 0.000376, 12.3, 234000."""
    return f"{float(f'{number:.3g}'):g}"


def source_of(name: str) -> str:
    """Where a model or a data set comes from."""
    if name.startswith("reasoning_gym:"):
        return "generated"
    if checks.is_missing_path(name):
        return "not here"
    return "local" if Path(name).exists() else "hub"


# --- The disk, and checkpoints by the clock ---------------------------------------------------------------------------


def disk_text(args: Any) -> str:
    """What the disk must hold at the end of the run and what is free, a line, with a warning where that is less."""
    shapes = weight_shapes(args.model_name_or_path, args.model_revision)
    if not shapes:
        return f"disk     not estimated: no .safetensors of {args.model_name_or_path} on this machine"
    parts = disk_bytes(args, shapes)
    needed = sum(parts.values())
    directory, free = free_bytes(args)
    _, by_the_clock = by_clock(args, shapes)
    sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    line = f"disk     GB: {sizes}: at most {needed / 1e9:.1f}; {free / 1e9:.1f} are free in {directory}; {by_the_clock}"
    if needed > free:
        line += "\nWARNING: the disk may get full: another --output_dir, or a smaller --keep_last_n_checkpoints, helps"
    return line


def free_bytes(args: Any) -> tuple[Path, int]:
    """The directory that exists of the run's, and what is free there."""
    directory = args.run_dir.absolute()
    while not directory.exists():
        directory = directory.parent
    return directory, shutil.disk_usage(directory).free


def by_clock(args: Any, shapes: list[list[int]]) -> tuple[bool, str]:
    """Whether checkpoints are written every --checkpoint_minutes, and what to say of it. The disk must have room for
    two beside all else that the run leaves; the host's memory for a copy of one."""
    if args.checkpoint_state_freq > 0 or not args.checkpoint_minutes:
        return False, "no checkpoints by the clock"
    size = checkpoint_bytes(args, shapes)
    needed = 2 * size + sum(disk_bytes(args, shapes).values())
    _, free = free_bytes(args)
    memory = psutil.virtual_memory().available
    if needed <= free and size <= memory:
        return True, f"a checkpoint of {size / 1e9:.1f} GB every {args.checkpoint_minutes:g} minutes; the last is kept"
    return False, (
        f"no checkpoints by the clock: {free / 1e9:.1f} GB of disk and {memory / 1e9:.1f} GB of memory are free, too "
        f"little for two of {size / 1e9:.1f} GB beside the rest. A run that is killed is lost"
    )


def go_by_clock(run: Any) -> None:
    """Have the checkpoints of a grpo.Run go by the clock, where there is room. Only the last one is kept."""
    if run.args.checkpoint_state_freq > 0:
        return
    weights = {id(weight): weight for _, weight in utils.named_weights(run.learner.policy.model)}  # a tied head once
    shapes = [list(weight.shape) for weight in weights.values()]
    fits, text = by_clock(run.args, shapes)
    run.logger.say(f"saving   {text}")
    run.checkpoints.keep = 1
    if fits and run.world.is_main:
        run.checkpoints.every_s = 60 * run.args.checkpoint_minutes


def weight_shapes(name: str, revision: str | None = None) -> list[list[int]]:
    """The shapes of a model's weights, from the heads of its files; [] where this machine has none."""
    directory = run_files.on_this_machine(name, revision)
    if directory is None:
        return []
    shapes = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(length))
        shapes += [tensor["shape"] for key, tensor in head.items() if key != "__metadata__"]
    return shapes


def trained_weights(args: Any, shapes: list[list[int]]) -> int:
    """How many numbers train; rank r of a matrix m x n are r (m + n)."""
    if args.lora_rank:
        return sum(args.lora_rank * sum(shape) for shape in shapes if len(shape) == 2)
    return sum(math.prod(shape) for shape in shapes)


def checkpoint_bytes(args: Any, shapes: list[list[int]]) -> int:
    """Bytes of a checkpoint: of each trained weight the float32 master and Adam's two moments; and the reference policy
    where it is refreshed."""
    size = 12 * trained_weights(args, shapes)
    if args.ref_policy_update_freq is not None:
        size += 4 * sum(math.prod(shape) for shape in shapes)
    return size


def disk_bytes(args: Any, shapes: list[list[int]]) -> dict[str, float]:
    """Bytes of the models and checkpoints that a run leaves in its directory, at most: a checkpoint is written before
    the oldest is removed. Adapters are in float32."""
    weights = sum(math.prod(shape) for shape in shapes)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    steps = args.total_episodes // rollouts
    whole_model = (4 if args.model_dtype == "float32" else 2) * weights
    model = whole_model
    if args.lora_rank:
        model = 4 * trained_weights(args, shapes) + args.lora_merge * whole_model
    checkpoint = checkpoint_bytes(args, shapes)

    parts = {"model": model}
    saved = steps // args.save_freq if args.save_freq > 0 else 0
    if saved:
        parts[f"{saved} of steps"] = saved * model
    if args.checkpoint_state_freq > 0:
        written = steps // args.checkpoint_state_freq
        kept = written if args.keep_last_n_checkpoints < 0 else min(written, args.keep_last_n_checkpoints + 1)
        parts[f"{kept} checkpoints"] = kept * checkpoint
    return parts


# --- Models that do not fit the flags ---------------------------------------------------------------------------------


def check_models(args: Any, prompts: Sequence[utils.Prompt]) -> None:
    """Refuse models that do not fit together or the flags, with UserError; on rank 0 print what is probably a mistake,
    of the prompts and, as probe.py finds it, of this copy's algorithm. Every run asks before a model loads."""
    from transformers import AutoConfig

    if utils.is_first_rank():
        problems = [] if args.load_batches else warnings_of(args, prompts)
        problems += [f"this copy of grpo.py: {found}; fine if you meant it" for found in probe.differences(args)]
        for problem in problems:
            utils.say(f"WARNING: {problem}")

    config = utils.pretrained(AutoConfig, args)
    check_model(args, args.model_name_or_path, config)
    if args.ref_model_name_or_path:
        teacher = utils.pretrained(AutoConfig, args.of_reference(), "ref_model_name_or_path")
        check_model(args, args.ref_model_name_or_path, teacher)
        check_vocabulary(args, config.get_text_config().vocab_size, teacher.get_text_config().vocab_size)


def warnings_of(args: Any, prompts: Sequence[utils.Prompt]) -> list[str]:
    """What is probably a mistake in the prompts, in words for a person."""
    problems = []
    starts = {prompt.token_ids[:2] for prompt in prompts[:FIRST]}  # one template writes them all
    first, *others = starts or [()]
    if not others and len(first) == 2 and first[0] == first[1]:
        problems.append(f"every prompt begins with token {first[0]} twice: template and tokenizer may both write it")
    bos = bos_of(args)
    if bos is not None and prompts and not any(start[:1] == (bos,) for start in starts):
        problems.append(f"no prompt begins with BOS, token {bos}, as the tokenizer begins its texts: --add_bos adds it")
    if len(prompts) < args.num_unique_prompts_rollout:
        fewer = args.with_value("num_unique_prompts_rollout")
        reason = "an amount without a dot is a number of rows, and 1.0 is all of them"
        problems.append(f"{len(prompts)} prompts for {fewer}: a step takes some of them several times; {reason}")
    if args.reward_file:
        from scripts.parts import user_files

        unused = set(user_files.FUNCTIONS)
        for prompt in prompts:
            unused.difference_update(prompt.verifiers)
        for name in sorted(unused):
            fix = f"name it in their column dataset, or with --remap_verifier OLD={name}"
            problems.append(f"--reward_file {args.reward_file}: {name} scores none of the prompts: {fix}")
    return problems


def bos_of(args: utils.Flags) -> int | None:
    """The BOS token with which the model's tokenizer begins a text, or None."""
    from transformers import AutoTokenizer

    tokenizer = utils.pretrained(AutoTokenizer, args)
    first = tokenizer("x")["input_ids"][:1]
    return first[0] if first and first[0] == tokenizer.bos_token_id else None


def check_model(args: utils.Flags, name: str, config: Any) -> None:
    """Raises UserError unless a model has what the flags ask for and what the learner can compute."""
    auto_class = utils.class_of(config, name)
    packing.check(args, name, config, auto_class)
    text_config = config.get_text_config()  # of a model whose config has parts
    heads = utils.attention_heads(config)[0].queries
    if heads % args.sequence_parallel_size:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        fix = f"one of {', '.join(divisors)} does"
        args.refuse(f"--sequence_parallel_size does not divide {name}'s {heads} attention heads: {fix}")

    longest_response = max(args.response_length, args.eval_response_length or 0)
    length = args.max_prompt_token_length + longest_response
    positions = getattr(text_config, "max_position_embeddings", length)  # a recurrent model has no limit
    if length > positions:
        sizes = f"= {length} tokens, but {name} has {positions} positions"
        args.refuse(f"--max_prompt_token_length + --response_length {sizes}")


def check_vocabulary(args: utils.Flags, rows: int, teacher_rows: int) -> None:
    """Raises UserError unless both sides have the same tokens. `rows` and `teacher_rows` are the sizes of the heads: a
    row without a token can be sampled too."""
    from transformers import AutoTokenizer

    tokenizer = utils.pretrained(AutoTokenizer, args)
    tokens = tokenizer.get_vocab()
    teacher = args.of_reference()
    teacher_tokenizer = utils.pretrained(AutoTokenizer, teacher, "ref_model_name_or_path")
    teacher_tokens = teacher_tokenizer.get_vocab()
    if tokens != teacher_tokens or rows > teacher_rows:
        args.refuse("--ref_model_name_or_path: other tokens than the policy's: take a teacher with its vocabulary")


# --- How fast this machine is, and the compute dtype that follows from it

MATRIX = 256  # rows and columns of the products that measure a core


def choose_dtype(args: utils.Flags) -> tuple[str, str]:
    """The compute dtype that --model_dtype means on this machine, and why, for a person. auto is bfloat16 on a GPU that
    has it, and on a CPU whose matrix products are faster in it than in float32; else float32. A resumed run keeps the
    dtype that it began with."""
    asked = args.model_dtype
    why = "as --model_dtype says"
    flags_before = args.run_dir / "args.json"
    if asked == "auto" and args.resume and flags_before.exists():
        asked = json.loads(flags_before.read_text())["model_dtype"]
        why = "as before --resume"
    if asked in ("float16", "float32"):
        return asked, why
    is_fast, reason = bfloat16_is_fast()
    if asked == "auto":
        return ("bfloat16" if is_fast else "float32"), reason
    if not is_fast:
        why += f"; WARNING: slow, {reason}: --model_dtype auto would take float32"
    return asked, why


def bfloat16_is_fast() -> tuple[bool, str]:
    """Whether this machine is fast in bfloat16, and the reason, for a person."""
    if torch.cuda.is_available():
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
        has = "has" if is_fast else "has no"
        return is_fast, f"{torch.cuda.get_device_name()} {has} bfloat16"
    bfloat16, float32 = core_speeds([torch.bfloat16, torch.float32])
    return bfloat16 > float32, f"a core reaches {bfloat16:.0f} GFLOP/s in bfloat16, {float32:.0f} in float32 here"


def core_speeds(dtypes: Sequence[torch.dtype]) -> list[float]:
    """GFLOP/s of a product of two matrices in each dtype, on one core, in processor time: others do not lengthen it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrices = [torch.randn(MATRIX, MATRIX, generator=torch.Generator()).to(dtype) for dtype in dtypes]
    best = [math.inf] * len(dtypes)  # seconds
    end = time.thread_time() + 0.1
    while time.thread_time() < end or math.inf in best:
        for i, x in enumerate(matrices):
            start = time.thread_time()
            torch.matmul(x, x)
            best[i] = min(best[i], time.thread_time() - start)
    torch.set_num_threads(threads)
    return [2 * MATRIX**3 / seconds / 1e9 for seconds in best]


def device_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured ceilings of a device: operations a second of a square matrix product, bytes a second of a copy."""
    n = 512
    num_bytes = 2**26
    if device.type == "cuda":
        n = 8192
        num_bytes = 2**28
    x = torch.randn(n, n, device=device, generator=torch.Generator(device))
    x = x.to(dtype)
    block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    product = best_seconds(functools.partial(torch.matmul, x, x))
    copied = best_seconds(block.clone)
    operations = 2 * n**3 / product
    return {"flops_per_second": operations, "bytes_per_second": num_bytes / copied, "itemsize": dtype.itemsize}


def best_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of the fastest of four calls."""
    found = []
    for _ in range(4):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return min(found)
