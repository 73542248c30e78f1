"""What happens to a command line before anything loads: open-instruct's flags are translated, and what cannot work is
refused. scripts/train/open_instruct.tsv has the kind of each flag of open-instruct's GRPO that is not ours:

alias      one of our flags has its meaning
same       every run here already does what it asks for
ignored    it needs nothing here
missing    nothing here does what it asks for, so the run would be another one

A row with a fourth column counts if the line has that flag too; of rows that count the first does.

A refusal names the flags, their values and the fix: `args.refuse(text)` raises UserError with the text, and adds the
values to the flags that stand before its first colon. The bound of a single number stands at its flag: rewards.Bound.
"""

import difflib
import heapq
import importlib.util
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import rewards
from rewards import need

ENDINGS = (".jsonl", ".parquet", ".csv", ".json")  # of files of rows that are read
COMPRESSED = (".gz", ".zst")  # after these endings, but .parquet
LARGE = 2**22  # bytes of data files: smaller ones are read sooner than pyarrow is imported
FIRST_STATES = ("checkpoints/step_1", "global_step_1/actor", "step_1", "checkpoint-1")  # of several systems
TOOLS = Path(__file__).parents[1] / "tools"
TABLE = Path(__file__).parents[1] / "train" / "open_instruct.tsv"
ENGINE_VARIABLES = {  # of vLLM: the only value with which an engine here works, and why
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine must be in the process of its rank"),
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP": ("0", "it wants process groups that are bound to a device"),
    "VLLM_SKIP_P2P_CHECK": ("1", "ranks of an engine would read a file that another rank writes elsewhere"),
}
TRACKERS = {"with_tracking": "wandb", "with_tensorboard": "tensorboard", "with_trackio": "trackio"}
PROCESSES = "--num_learners_per_node + --vllm_num_engines x --vllm_tensor_parallel_size"


@dataclass
class Translation:
    """A command line of our flags alone, and the other flags that it had: (kind, flag with values, words)."""

    line: list[str] = field(default_factory=list)
    others: list[tuple[str, str, str]] = field(default_factory=list)

    def text(self) -> str:
        """What became of the other flags, for a person."""
        lines = [f"  {kind:8} {flag}: {words}" for kind, flag, words in sorted(self.others)]
        return "\n".join(["open-instruct's flags:", *lines])

    def missing(self) -> str:
        """The flags without which a run would be another one, each with the reason."""
        return "; ".join(f"{flag}: {words}" for kind, flag, words in self.others if kind == "missing")


def names_of(cls: type) -> set[str]:
    """The flags of a dataclass, as they are typed."""
    negated = {f"no_{flag.name}" for flag in fields(cls) if flag.type is bool}
    return {flag.name for flag in fields(cls)} | negated


def read_table(given: set) -> dict[str, tuple[str, str]]:
    """The first column of TABLE -> the next two, for a line with the `given` flags."""
    rows = TABLE.read_text().splitlines()[1:]
    lines = [row.split("\t") for row in reversed(rows)]
    return {first: (second, third) for first, second, third, *other in lines if given.issuperset(other)}


def split(tokens: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A command line as (flag, values); values before the first flag have the flag ""."""
    line: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            line.append((name.replace("-", "_"), [value] if equals else []))
        elif line:
            line[-1][1].append(token)
        else:
            line.append(("", [token]))
    return line


def translate(argv: Sequence[str], known: set[str]) -> Translation:
    """Translate a command line for a script with the `known` flags. Raises UserError for a flag that nobody knows."""
    waiting = split(argv)
    given = set(dict(waiting))
    table = read_table(given)
    names = known | {key.partition("=")[0] for key in table}
    done = Translation()
    while waiting:
        name, values = waiting.pop(0)
        is_negated = name not in names  # then --no_x is x with the value false
        flag = name.removeprefix("no_") if is_negated else name
        text = "false" if is_negated else " ".join(values) or "true"
        kind, words = table.get(f"{flag}={text.lower()}") or table.get(flag) or ("", "")
        if not kind and name and name not in known:
            raise rewards.UserError(
                f"--{name}: there is no such flag. Perhaps {likely_flags(name, known)}? --help WORD"
            )
        if not kind:
            done.line += own_form(name, values, known)
            continue
        if kind == "alias":
            words = words.replace("{}", shlex.join(values or [text]))
            waiting = split(shlex.split(words)) + waiting
        done.others.append((kind, " ".join([f"--{name}", *values]), words))
    return done


def likely_flags(name: str, known: set[str]) -> str:
    """The two flags that look most like a name, or that begin like it."""

    def alike(flag: str) -> float:
        whole = difflib.SequenceMatcher(None, name, flag).ratio()
        start = difflib.SequenceMatcher(None, name, flag[: len(name)]).ratio()
        words = flag.split("_")
        initials = "".join(word[:1] for word in words)
        is_short_for_it = name == initials
        return max(whole, 0.95 * start, is_short_for_it)

    return " or ".join(f"--{flag}" for flag in heapq.nlargest(2, sorted(known), alike))


def own_form(name: str, values: list[str], known: set[str]) -> list[str]:
    """A flag of ours as the parser takes it: a yes/no flag without a value, and an equals sign before a single value,
    which may begin with a dash."""
    text = " ".join(values).lower()
    is_switch = {name, f"no_{name}"} <= known
    if is_switch and text in ("", "true", "false"):
        return [f"--no_{name}" if text == "false" else f"--{name}"]
    if name and len(values) == 1:
        return [f"--{name}={values[0]}"]
    return [f"--{name}", *values] if name else values


def check_args(args: Any, world_size: int, fast: bool) -> None:
    """All of a script's flags, on `world_size` ranks of grpo.py; with `fast` on one of grpo_fast.py."""
    rewards.RewardFlags.check(args)
    check_sources(args)
    args.more_engine_options()
    if not args.dry_run:
        problems = refused_in_a_run(args, fast)
        need(not problems, "; ".join(problems))
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != os.environ["LOCAL_WORLD_SIZE"]:
            from scripts.parts import addresses

            addresses.check_name_of_node()
    check_step(args, world_size)
    check_room(args, fast)
    if not fast:
        check_ranks(args, world_size)
    check_loss(args)
    check_reference(args)
    check_advantages(args)
    check_effects(args)


def check_sources(args: Any) -> None:
    """Model and data, and what the run continues, answers or takes from other runs."""
    need(args.model_name_or_path != "", "--model_name_or_path is required: a hub name or a directory")
    need(args.dataset_mixer_list != [], "--dataset_mixer_list is empty: give NAME AMOUNT pairs to train on")
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        args.mixer(flag)
    if args.resume and args.overwrite:
        args.refuse("--resume continues a run, --overwrite replaces it: give one of them")
    if not re.fullmatch("|all|0*[1-9][0-9]*", args.dump_steps):
        args.refuse("--dump_steps: all, or N for every N-th step")
    if args.load_states and args.lora_rank:
        args.refuse("--load_states with --lora_rank: other runs' states are whole models, drop --lora_rank")
    if args.load_batches and (args.dataset_mixer_eval_list or args.active_sampling):
        args.refuse("--load_batches: drop --dataset_mixer_eval_list --active_sampling: nothing is sampled")
    if args.env_file and args.tools:
        args.refuse("--env_file --tools: an environment answers or tools do: drop one, or call tools in the file")


def refused_in_a_run(args: Any, fast: bool) -> list[str]:
    """What a run is refused for, and a --dry_run, perhaps on another machine, only tells: a sentence for each, which
    begins with the flag and its value. First what is not on this machine, and not on the hub."""
    problems = []
    for flag in ("model_name_or_path", "ref_model_name_or_path"):
        if is_missing_path(getattr(args, flag)):
            problems.append(f"{args.with_value(flag)}: no such directory")
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name in getattr(args, flag)[::2]:
            problem = problem_of_data(name)
            problems += [f"--{flag} {name}: {problem}"] if problem else []
    for flag in ("system_prompt_override_file", "env_file"):
        path = getattr(args, flag)
        if path and not Path(path).is_file():
            problems.append(f"--{flag} {path}: no such file")
        elif flag == "env_file" and path and not re.search(r"\b(step|Env|agent)\b", Path(path).read_text()):
            problems.append(f"--{flag} {path}: it has neither step(episode), nor a class Env, nor agent(base_url, row)")
    if args.load_batches and not Path(args.load_batches).is_dir():
        problems.append(f"--load_batches {args.load_batches}: no such directory")
    states = args.load_states
    if states and not any(Path(states, name).is_dir() for name in FIRST_STATES):
        problems.append(f"--load_states {states}: no state of step 1, which would be {', '.join(FIRST_STATES)}")
    for tool in args.tools:
        path = Path(tool) if tool.endswith(".py") else TOOLS / f"{tool}.py"
        if not path.is_file():
            known = sorted(path.stem for path in TOOLS.glob("*.py") if "\nSCHEMA" in path.read_text("utf-8"))
            problems.append(f"--tools {tool}: no such tool. There are {', '.join(known)}, or give a .py file")
    if args.problem_of_template:
        problems.append(args.problem_of_template)
    if not is_object(args.chat_template_kwargs):
        problems.append(f"{args.with_value('chat_template_kwargs')}: not a JSON object")
    if args.max_steps != type(args).max_steps and not args.has_turns:  # TRL's word for the training steps
        problems.append(f"--max_steps {args.max_steps} bounds answers of --tools or --env_file: take --total_episodes")
    if args.vllm_tensor_parallel_size > 1 and not fast:
        flag = args.with_value("vllm_tensor_parallel_size")
        problems.append(f"{flag}: an engine of grpo.py has one GPU: start grpo_fast.py")
    samples_with_vllm = args.rollout_backend == "vllm" and not args.load_batches
    if samples_with_vllm and importlib.util.find_spec("vllm") is None:
        problems.append("--rollout_backend vllm: it is not installed: take --rollout_backend transformers")
    elif samples_with_vllm and args.vllm_kwargs and args.problem_of_engine:
        problems.append(args.problem_of_engine)
    if samples_with_vllm:
        for name, (works, why) in ENGINE_VARIABLES.items():
            value = os.environ.get(name, works)
            if value != works:
                problems.append(f"the variable {name} is {value}: unset it: {why}")
    for flag, package in TRACKERS.items():
        if getattr(args, flag) and importlib.util.find_spec(package) is None:
            problems.append(f"--{flag}: a package is not installed: pip install {package}")
    return problems


def is_object(text: str) -> bool:
    """Whether a flag's text is a JSON object, or empty."""
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def problem_of_data(name: str) -> str:
    """Why a data set cannot be read, as far as its name and this machine tell; "" where nothing speaks against it."""
    path = Path(name)
    ending = ending_of(path)
    if is_missing_path(name):
        return "no such file" if ending else "no such directory"
    if not path.is_file() or ending:
        return ""
    what = "".join(path.suffixes[-2:]) or "a file without an ending"
    return f"{what} is not read, but {', '.join(ENDINGS)} are, and with {' or '.join(COMPRESSED)} all but .parquet"


def is_large(mixer: Sequence[tuple[str, Any]]) -> bool:
    """Whether (name, amount) pairs are so many rows that scripts/parts/prepared.py keeps what becomes of them."""
    size = 0
    for name, _ in mixer:
        path = Path(name)
        if not path.exists() and not name.startswith("reasoning_gym:"):
            return True  # of the hub
        size += sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
    return size > LARGE


def ending_of(path: Path) -> str:
    """Which of ENDINGS a path has, without that of a compression; "" for another."""
    is_compressed = path.suffix in COMPRESSED
    ending = path.with_suffix("").suffix if is_compressed else path.suffix
    return ending if ending in ENDINGS and (ending, is_compressed) != (".parquet", True) else ""


def is_missing_path(name: str) -> bool:
    """Whether this is a path that leads nowhere, and no name of the hub, which is NAME or ORGANIZATION/NAME: it begins
    like a path, has several slashes or ends like a file of rows. A directory here may have an organization's name."""
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or ending_of(path) != ""
    return is_path and not path.exists()


def likely_mistakes(args: Any) -> list[str]:
    """What is allowed, and hardly meant: a sentence for each, which begins with the flag and its value."""
    mistakes = []
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, amount in zip(getattr(args, flag)[::2], getattr(args, flag)[1::2], strict=True):
            if amount == "1":
                mistakes.append(f"--{flag} {name} 1: that is one row; 1.0 is all of a data set")
    return mistakes


def check_step(args: Any, world_size: int) -> None:
    """The sizes of groups, packs, mini-batches and the run; the prompts of a step on each of grpo.py's ranks."""
    longest = args.max_prompt_token_length + args.response_length
    if args.pack_length < longest:
        args.refuse(f"--pack_length < --max_prompt_token_length + --response_length: raise --pack_length to {longest}")
    if args.overlong_buffer_length >= args.response_length:
        args.refuse("--overlong_buffer_length must be less than --response_length")
    samples = args.num_samples_per_prompt_rollout
    if samples == 1 and (args.advantage_normalization_type != "none" or args.filter_zero_std_samples):
        alone = "--advantage_normalization_type none --no_filter_zero_std_samples"
        args.refuse(f"--num_samples_per_prompt_rollout has nothing to compare with: raise it, or take {alone}")
    prompts = args.num_unique_prompts_rollout
    if args.total_episodes < prompts * samples:
        sizes = "--num_unique_prompts_rollout x --num_samples_per_prompt_rollout"
        args.refuse(f"--total_episodes is less than a step of {sizes} = {prompts * samples}")
    if prompts % world_size:
        more = prompts + -prompts % world_size
        args.refuse(f"--num_unique_prompts_rollout is not a multiple of the {world_size} ranks: take {more}")
    own = prompts // max(1, world_size // args.sequence_parallel_size)  # ranks of a group share their prompts
    if own % args.num_mini_batches:
        of_rank = f"on {world_size} ranks is {own} a rank"
        args.refuse(f"--num_unique_prompts_rollout {of_rank}, which --num_mini_batches does not divide")


def check_learners(args: Any, learners: int, fix: str) -> None:
    """How the tokens of a pack, and the model, are spread over the learners."""
    if learners % args.sequence_parallel_size:
        args.refuse(f"--sequence_parallel_size does not divide the {learners} learners: {fix}")
    if args.sequence_parallel_size > 1 and args.attn_implementation != "sdpa":
        args.refuse("--sequence_parallel_size with --attn_implementation: only our own attention, sdpa, can do it")
    if args.fsdp_shard_size and learners % args.fsdp_shard_size:
        args.refuse(f"--fsdp_shard_size does not divide the {learners} learners: take a number that does, or 0")


def check_room(args: Any, fast: bool) -> None:
    """The GPU memory that an engine leaves the learner on the same GPU. In grpo.py it may sleep during updates."""
    import torch

    most = 0.6 if fast or args.vllm_sleep == "off" else 0.8
    is_shared = args.single_gpu_mode or not fast
    on_gpu = torch.cuda.is_available() and args.rollout_backend == "vllm"
    if is_shared and on_gpu and args.vllm_gpu_memory_utilization > most:
        args.refuse(f"--vllm_gpu_memory_utilization leaves the learner on the same GPU no room: 0.3 to {most}")


def check_ranks(args: Any, world_size: int) -> None:
    """What grpo.py cannot do with the processes that were started."""
    check_learners(args, world_size, "start a multiple of it, or less")
    learners = args.num_learners_per_node
    if learners != [1] and sum(learners) != world_size:
        ranks = learners[0] if learners else 1
        fix = f"grpo.py with torchrun --nproc_per_node={ranks}, or grpo_fast.py, which has engines of its own"
        args.refuse(f"--num_learners_per_node but {world_size} ranks run: start {fix}")
    starts_servers = args.solver_model_name_or_path and not args.solver_base_url
    if starts_servers and world_size != int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.refuse("--solver_model_name_or_path: on several nodes start servers yourself and give --solver_base_url")


def check_fast(args: Any, world_size: int | None, ranks_per_node: int) -> None:
    """What only grpo_fast.py refuses: flags that grpo.py alone acts on, learners and engines on all nodes.
    `world_size` is None if the script starts its own processes, on one node."""
    import torch

    if args.load_batches or args.load_states:
        args.refuse("--load_batches --load_states: grpo.py trains on what others saved; grpo_fast.py only saves")
    timing_decides = args.inflight_updates or (args.active_sampling and args.async_steps)
    if args.deterministic and timing_decides:
        others = "--inflight_updates, or --active_sampling and --async_steps"
        args.refuse(f"--deterministic: timing would decide which weights make a token with {others}: drop one")
    if world_size is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fix = "start it with torchrun on each node, or unset WORLD_SIZE for a run on this node alone"
        raise rewards.UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']} without torchrun: {fix}")
    learners = sum(args.num_learners_per_node)
    ranks = learners + args.vllm_num_engines * args.vllm_tensor_parallel_size
    if learners < 1:
        args.refuse("--num_learners_per_node: a run needs a learner")
    check_learners(args, learners, "raise --num_learners_per_node")
    if world_size not in (None, ranks):
        args.refuse(f"{PROCESSES} = {ranks} processes, but {world_size} ranks run: start torchrun with {ranks} in all")
    if world_size is not None:  # an engine lies within a node, on ranks that do not learn
        tp = args.vllm_tensor_parallel_size
        nodes = world_size // ranks_per_node
        learners_of_nodes = (args.num_learners_per_node + [0] * nodes)[:nodes]
        engine_ranks = [ranks_per_node - min(n, ranks_per_node) for n in learners_of_nodes]
        is_split = any(n % tp for n in engine_ranks)
        if is_split or sum(engine_ranks) != args.vllm_num_engines * tp:
            args.refuse(f"{PROCESSES}: an engine would span two nodes")

    needed = ranks if world_size is None else ranks_per_node
    if args.single_gpu_mode:  # an engine may share a learner's GPU; NCCL refuses two learners on one
        needed = max(args.num_learners_per_node)
    visible = torch.cuda.device_count()
    if visible and needed > visible and not args.dry_run:
        fix = "lower them, or add --single_gpu_mode"
        args.refuse(f"{PROCESSES} need {needed} GPUs on a node, {visible} are visible: {fix}")


def check_loss(args: Any) -> None:
    """The optimizer, the loss, and the correction for the engine's numerics: where learner and engine agree, a response
    has rho 1 and a mean |rho - 1|, the divergence, of 0."""
    if not re.fullmatch(r"token|sequence|[1-9]\d*(\.\d+)?(e\d+)?", args.loss_denominator):
        args.refuse("--loss_denominator: token, sequence or a number of 1 or more")
    lower = args.rho_mask_lower_bound
    upper = args.rho_mask_upper_bound
    by_divergence = args.rho_mask_tv_divergence
    if not by_divergence and (lower >= 1 or 0 < upper <= 1):
        args.refuse("--rho_mask_lower_bound must be below 1, --rho_mask_upper_bound above 1, or 0 for off")
    if by_divergence and (args.rho_mask_sequence_level or lower or not upper):
        args.refuse("--rho_mask_tv_divergence goes with --rho_mask_upper_bound alone: give 2.0, for instance")
    if args.use_rho_correction and args.vllm_top_p != 1:
        args.refuse("--vllm_top_p biases --use_rho_correction: set --vllm_top_p 1.0 or --no_use_rho_correction")


def check_reference(args: Any) -> None:
    """The reference policy, and a teacher in its place."""
    if args.beta and not args.load_ref_policy:
        args.refuse("--beta needs a reference policy: drop --no_load_ref_policy or set --beta 0")
    stays = args.lora_rank or args.ref_model_name_or_path or "reference" in args.offload
    if args.ref_policy_update_freq is not None and stays:
        args.refuse("--ref_policy_update_freq clashes with --lora_rank --ref_model_name_or_path --offload: drop one")
    teaches = args.ref_model_name_or_path and args.beta > 0 and not args.kl_in_reward
    if teaches and args.filter_zero_std_samples:
        args.refuse("--ref_model_name_or_path teaches by the KL of all groups: add --no_filter_zero_std_samples")
    if teaches and args.kl_estimator in ("0", "kl1"):
        args.refuse("--kl_estimator with --ref_model_name_or_path has a gradient of zero on average: take kl2")


def check_advantages(args: Any) -> None:
    """The KL as a part of the score, and groups that are chosen by their scores."""
    kind = args.advantage_normalization_type
    if args.active_sampling and not args.filter_zero_std_samples:
        args.refuse("--active_sampling refills groups that --filter_zero_std_samples drops: it needs that flag")
    if args.kl_in_reward and args.mask_truncated_completions:
        args.refuse("--kl_in_reward needs the KL of whole groups, which --mask_truncated_completions cuts: drop one")
    if args.kl_in_reward and kind.startswith("standard") and not args.force_kl_in_reward:
        # Responses of equal outcome would get advantages of about 1, however small beta is
        fix = "take centered, or add --force_kl_in_reward"
        args.refuse(f"--kl_in_reward with --advantage_normalization_type divides KLs by their own deviation: {fix}")


def check_effects(args: Any) -> None:
    """Flags that would do nothing beside the others."""
    corrections = """rho_mask_lower_bound rho_mask_upper_bound rho_clamp_lower_bound rho_mask_sequence_level
        rho_mask_tv_divergence"""
    given = [f"--{name}" for name in corrections.split() if getattr(args, name)]
    if args.warmup_ratio and args.lr_scheduler_type == "constant":
        args.refuse("--warmup_ratio with --lr_scheduler_type warms nothing up: take constant_with_warmup")
    if args.clip_dual and (args.clip_dual <= 1 or args.loss_fn != "dapo"):
        args.refuse("--clip_dual with --loss_fn: it acts above 1, in dapo alone; 0 is off")
    if given and not args.use_rho_correction:
        args.refuse(f"{' '.join(given)} with --no_use_rho_correction: drop it, or take --use_rho_correction")
    if 0 < args.rho_clamp_upper_bound < 1 or args.rho_clamp_lower_bound > 1:
        args.refuse("--rho_clamp_lower_bound must be at most 1, --rho_clamp_upper_bound at least 1, or 0 for off")
    if args.ref_model_name_or_path and not args.load_ref_policy:
        args.refuse("--ref_model_name_or_path is the reference policy: drop --no_load_ref_policy")
    if args.kl_in_reward and args.beta == 0:
        args.refuse("--kl_in_reward subtracts beta * KL: it needs --beta above 0")
