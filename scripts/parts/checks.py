"""What a run refuses before anything loads: flags that contradict each other, and arithmetic that cannot work.

A function for each subject. Each rule names the flags, their values and the fix: `args.refuse(text)` raises UserError
with the text, and adds the values to the flags that stand before its first colon. The bound of a single number stands
at its flag: see rewards.Bound.
"""

import importlib.util
import math
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import rewards
from rewards import need
from scripts.parts import rows

TOOLS = Path(__file__).resolve().parents[1] / "tools"
PROCESSES = "--num_learners_per_node + --vllm_num_engines x --vllm_tensor_parallel_size"


def check_args(args: Any, world_size: int, fast: bool) -> None:
    """All of a script's flags, on `world_size` ranks of grpo.py; with `fast` on one of grpo_fast.py."""
    check_bounds(args)
    check_run(args)
    check_tracking(args)
    check_model(args)
    check_data(args)
    check_engine(args)
    check_turns(args)
    if not args.dry_run:
        missing = missing_paths(args)
        need(not missing, "; ".join(missing))
        check_installation(args)
        check_nodes_meet()
    check_step(args)
    check_shares(args, world_size)
    if fast:
        check_room(args, args.single_gpu_mode, 0.6)
    else:
        check_ranks(args, world_size)
        check_room(args, True, 0.6 if args.vllm_sleep == "off" else 0.8)
    check_loss(args)
    check_rho(args)
    check_reference(args)
    if args.kl_in_reward:
        check_kl_in_reward(args)
    if args.turn_credit:
        check_turn_credit(args)
    check_sampling(args)


def check_bounds(args: Any) -> None:
    """Every number is one, and within the bound that its flag's type has."""
    for flag in fields(args):
        value = getattr(args, flag.name)
        need(value == value, f"--{flag.name} nan: must be a number")
        bounds = [mark for mark in getattr(flag.type, "__metadata__", ()) if isinstance(mark, rewards.Bound)]
        for bound in bounds:
            need(value is None or bound.holds(value), f"--{flag.name} {value}: must {bound.must}")


def check_run(args: Any) -> None:
    """The run's directory, and what it is to save and load."""
    run_dir = args.run_dir
    if args.resume and args.overwrite:
        args.refuse("--resume continues a run, --overwrite replaces it: give one of them")
    if args.resume_anyway and not args.resume:
        args.refuse("--resume_anyway continues a run whose flags differ: it needs --resume")
    if args.resume and not (run_dir / "args.json").exists():
        args.refuse(f"--resume: no run in {run_dir}")
    if args.resume and not any(run_dir.glob("checkpoints/step_*[0-9]")):
        args.refuse(f"--resume: {run_dir} has no checkpoint; was --checkpoint_state_freq set? --overwrite starts anew")
    is_number = args.dump_steps.isdecimal() and int(args.dump_steps) > 0
    if args.dump_steps not in ("", "all") and not is_number:
        args.refuse("--dump_steps: all, or N for every N-th step")
    if args.load_batches and not Path(args.load_batches).is_dir():
        args.refuse("--load_batches: no directory")
    if args.load_states:
        first_states = ("checkpoints/step_1", "global_step_1/actor", "step_1", "checkpoint-1")
        if not any((Path(args.load_states) / name).is_dir() for name in first_states):
            args.refuse(f"--load_states: no state of step 1, which would be {', '.join(first_states)}")


def check_tracking(args: Any) -> None:
    """Services that follow the run."""
    if args.with_tensorboard and importlib.util.find_spec("tensorboard") is None:
        args.refuse("--with_tensorboard needs a package that is not installed: pip install tensorboard")
    if args.hf_repo_id and not args.push_to_hub:
        args.refuse("--hf_repo_id: nothing is uploaded without --push_to_hub, off by default")


def check_model(args: Any) -> None:
    """The model, its adapters and how the learner computes it."""
    need(args.model_name_or_path != "", "--model_name_or_path is required: a hub name or a directory")
    if args.sequence_parallel_size > 1 and args.attn_implementation != "sdpa":
        args.refuse("--sequence_parallel_size with --attn_implementation: only our own attention, sdpa, can do it")
    if args.gradient_checkpointing_part != "layer" and not args.gradient_checkpointing:
        args.refuse("--gradient_checkpointing_part: it is a part of --gradient_checkpointing: add that flag")
    if args.lora_merge and not args.lora_rank:
        args.refuse("--lora_merge without --lora_rank: drop it, the model that is saved is whole")
    if args.lora_rank and (args.lora_alpha == 0 or args.lora_target_modules == []):
        args.refuse("--lora_rank with --lora_alpha and --lora_target_modules trains nothing: leave these two out")
    if args.lora_rank and args.load_states:
        args.refuse("--load_states with --lora_rank: other runs' states are whole models, drop --lora_rank")


def check_data(args: Any) -> None:
    """Data sets and the chat template."""
    import utils  # not at the top: rewards, which asks for check_rewards, must not load torch

    need(args.dataset_mixer_list != [], "--dataset_mixer_list is empty: give NAME AMOUNT pairs to train on")
    template = args.chat_template_name
    if template not in (None, *utils.CHAT_TEMPLATES) and not Path(template).is_file():
        names = " | ".join(utils.CHAT_TEMPLATES)
        args.refuse(f"--chat_template_name: no file, and none of this name: take one of {names}")
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, _ in utils.parse_mixer(flag, getattr(args, flag), getattr(args, f"{flag}_splits")):
            problem = rows.problem_of(name) if Path(name).is_file() else ""
            need(not problem, f"--{flag} {name}: {problem}")


def missing_paths(args: Any) -> list[str]:
    """What the flags name that is not on this machine, and that no hub has: a line for each, which begins with the
    flag and its value."""
    missing = []
    for flag in ("model_name_or_path", "ref_model_name_or_path"):
        if is_missing_path(getattr(args, flag)):
            missing.append(f"--{flag} {getattr(args, flag)}: no such directory")
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name in getattr(args, flag)[::2]:
            if is_missing_path(name) and not name.startswith("reasoning_gym:"):
                kind = "file" if Path(name).suffix in rows.ENDINGS else "directory"
                missing.append(f"--{flag} {name}: no such {kind}")
    if args.system_prompt_override_file is not None and not Path(args.system_prompt_override_file).is_file():
        missing.append(f"--system_prompt_override_file {args.system_prompt_override_file}: no such file")
    for tool in args.tools:
        path = Path(tool) if tool.endswith(".py") else TOOLS / f"{tool}.py"
        if not path.is_file():
            missing.append(f"--tools {tool}: no such tool. There are {', '.join(known_tools())}, or give a .py file")
    return missing


def is_missing_path(name: str) -> bool:
    """Whether this is a path that leads nowhere, and no name of the hub, which is NAME or ORGANIZATION/NAME: it begins
    like a path, has several slashes, ends like a file of rows, or all of it but the last part is a directory here."""
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.suffix in rows.ENDINGS
    is_beside_others = "/" in name and path.parent.is_dir()
    return (is_path or is_beside_others) and not path.exists()


def known_tools() -> list[str]:
    """The names of scripts/tools/ that --tools takes."""
    return sorted(path.stem for path in TOOLS.glob("*.py") if "\nSCHEMA" in path.read_text("utf-8"))


def check_engine(args: Any) -> None:
    """The engine."""
    import torch

    can_sleep = args.rollout_backend == "vllm" and torch.cuda.is_available()
    if args.vllm_sleep == "on" and not can_sleep:
        args.refuse("--vllm_sleep: only vLLM on a GPU can give memory back: take auto, which does where it can")


def check_turns(args: Any) -> None:
    """Environments and tools."""
    if args.env_file and not Path(args.env_file).is_file():
        args.refuse("--env_file: no such file")
    if args.env_file and args.tools:
        args.refuse("--env_file --tools: an environment answers or tools do: drop one, or call tools in the file")
    for flag in ("tool_call_names", "tool_configs"):
        values = getattr(args, flag)
        if values and len(values) != len(args.tools):
            args.refuse(f"--{flag} has {len(values)} values for {len(args.tools)} of --tools: give one for each")
    problem = problem_of_max_steps(args)
    need(not problem or args.dry_run, problem)


def problem_of_max_steps(args: Any) -> str:
    """Why --max_steps means nothing here, or "". It is the number of training steps to those who come from TRL."""
    if args.has_turns or args.max_steps == type(args).max_steps:
        return ""
    return (
        f"--max_steps {args.max_steps}: it bounds the answers of tools or of an environment, and there is neither "
        "--tools nor --env_file: leave it out. The training steps are --total_episodes / "
        "(--num_unique_prompts_rollout x --num_samples_per_prompt_rollout)"
    )


def check_installation(args: Any) -> None:
    """Programs and packages that a run needs and a --dry_run does not."""
    compiler = os.environ.get("CXX", "g++")
    if args.compile_layers and not shutil.which(compiler):
        fix = "install one, name yours in the variable CXX, or leave the flag out"
        args.refuse(f"--compile_layers: there is no C++ compiler {compiler}, which torch.compile calls: {fix}")
    samples_with_vllm = args.rollout_backend == "vllm" and not args.load_batches
    if samples_with_vllm and importlib.util.find_spec("vllm") is None:
        fix = "bash scripts/setup.sh installs it where it has a build; else take --rollout_backend transformers"
        args.refuse(f"--rollout_backend: vLLM is not installed: {fix}")


def check_nodes_meet() -> None:
    """On several nodes of torchrun: that they can reach each other by their names."""
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if by_torchrun and int(os.environ["WORLD_SIZE"]) > int(os.environ["LOCAL_WORLD_SIZE"]):
        from scripts.parts import addresses

        addresses.check_name_of_node()


def check_step(args: Any) -> None:
    """The sizes of groups, packs and the run."""
    longest = args.max_prompt_token_length + args.response_length
    if args.pack_length < longest:
        args.refuse(f"--pack_length < --max_prompt_token_length + --response_length: raise --pack_length to {longest}")
    if args.num_samples_per_prompt_rollout == 1 and args.advantage_normalization_type != "none":
        args.refuse(
            "--num_samples_per_prompt_rollout with --advantage_normalization_type is zero for all: raise it, or take "
            "--advantage_normalization_type none"
        )
    if args.num_samples_per_prompt_rollout == 1 and args.filter_zero_std_samples:
        args.refuse(
            "--num_samples_per_prompt_rollout with --filter_zero_std_samples drops all: raise it, or add "
            "--no_filter_zero_std_samples"
        )
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    if args.total_episodes < rollouts:
        args.refuse(
            "--total_episodes is less than a step of --num_unique_prompts_rollout x --num_samples_per_prompt_rollout "
            f"= {rollouts}"
        )


def check_shards(args: Any, learners: int) -> None:
    """How the model is spread over the learners."""
    if args.fsdp_shard_size and learners % args.fsdp_shard_size:
        args.refuse(f"--fsdp_shard_size does not divide the {learners} learners: take a number that does, or 0")
    if args.fsdp_shard_size and args.deepspeed_stage == 0:
        args.refuse("--fsdp_shard_size --deepspeed_stage shards nothing: add --deepspeed_stage 2 or 3")


def check_shares(args: Any, world_size: int) -> None:
    """The prompts of a step on each of grpo.py's ranks, in each mini-batch."""
    prompts = args.num_unique_prompts_rollout
    if prompts % world_size:
        fix = f"take {prompts + -prompts % world_size}"
        args.refuse(f"--num_unique_prompts_rollout is not a multiple of the {world_size} ranks: {fix}")
    groups_of_ranks = max(1, world_size // args.sequence_parallel_size)  # ranks of a group share their prompts
    own = prompts // groups_of_ranks
    if own % args.num_mini_batches:
        args.refuse(
            f"--num_unique_prompts_rollout on {world_size} ranks is {own} a rank, which --num_mini_batches does not "
            "divide"
        )


def check_room(args: Any, shares_gpu: bool, most: float) -> None:
    """The GPU memory that an engine leaves the learner on the same GPU."""
    import torch

    on_gpu = torch.cuda.is_available() and args.rollout_backend == "vllm"
    if shares_gpu and on_gpu and args.vllm_gpu_memory_utilization > most:
        args.refuse(f"--vllm_gpu_memory_utilization leaves the learner on the same GPU no room: 0.3 to {most}")


def flags_of_fast(args: Any) -> str:
    """The flags given that only grpo_fast.py acts on."""
    names = ("vllm_num_engines", "vllm_tensor_parallel_size", "async_steps", "inflight_updates")
    given = [name for name in names if getattr(args, name) > getattr(type(args), name)]
    return " ".join(f"--{name} {getattr(args, name)}" for name in given)


def likely_mistakes(args: Any) -> list[str]:
    """What is allowed, and hardly meant: a sentence for each, which begins with the flag and its value."""
    problem = problem_of_max_steps(args)
    mistakes = [f"{problem}; a run is refused"] if problem else []
    is_given = args.local_eval_every not in (-1, type(args).local_eval_every)
    if is_given and not args.dataset_mixer_eval_list:
        every = args.with_value("local_eval_every")
        mistakes.append(f"{every}: nothing is evaluated without --dataset_mixer_eval_list NAME AMOUNT")
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        names = getattr(args, flag)[::2]
        amounts = getattr(args, flag)[1::2]
        for name, amount in zip(names, amounts, strict=True):
            if amount == "1":
                mistakes.append(f"--{flag} {name} 1: that is one row; 1.0 is all of a data set")
    return mistakes


def check_ranks(args: Any, world_size: int) -> None:
    """What grpo.py cannot do with the processes that were started."""
    if world_size % args.sequence_parallel_size:
        fix = "start a multiple of it, or less"
        args.refuse(f"--sequence_parallel_size does not divide the {world_size} ranks: {fix}")
    check_shards(args, world_size)
    for_fast = flags_of_fast(args)
    learners = args.num_learners_per_node
    if learners != [1] and sum(learners) != world_size:
        ranks = learners[0] if learners else 1
        fix = f"grpo.py with torchrun --nproc_per_node={ranks}"
        if for_fast:
            fix = f"grpo_fast.py, which has {for_fast}, or {fix}"
        args.refuse(f"--num_learners_per_node but {world_size} ranks run: start {fix}")
    if args.vllm_tensor_parallel_size > 1 and not args.dry_run:
        raise rewards.UserError(f"{for_fast}: grpo.py has one GPU per engine; start grpo_fast.py")
    starts_servers = args.solver_model_name_or_path and not args.solver_base_url
    if starts_servers and world_size != int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.refuse("--solver_model_name_or_path: on several nodes start servers yourself and give --solver_base_url")


def check_processes(args: Any, world_size: int | None, ranks_per_node: int) -> None:
    """Learners and engines of grpo_fast.py on all nodes. `world_size` is None if the script starts its own processes,
    on one node."""
    import torch

    if world_size is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        number = os.environ["WORLD_SIZE"]
        raise rewards.UserError(
            f"WORLD_SIZE is {number}, but torchrun did not start this process: start it with torchrun on each node, or "
            "unset WORLD_SIZE for a run on this node alone"
        )
    learners = sum(args.num_learners_per_node)
    engine_ranks = args.vllm_num_engines * args.vllm_tensor_parallel_size
    ranks = learners + engine_ranks
    nodes = 1 if world_size is None else world_size // ranks_per_node
    is_plan = args.dry_run and world_size is None  # perhaps for other machines than this one

    fewest = min(args.num_learners_per_node, default=-1)
    if fewest < 0 or learners < 1 or args.vllm_num_engines < 1 or args.vllm_tensor_parallel_size < 1:
        args.refuse(f"{PROCESSES}: a run needs a learner and an engine")
    if learners % args.sequence_parallel_size:
        args.refuse(f"--sequence_parallel_size does not divide the {learners} learners: raise --num_learners_per_node")
    check_shards(args, learners)
    if world_size not in (None, ranks):
        args.refuse(f"{PROCESSES} = {ranks} processes, but {world_size} ranks run: start torchrun with {ranks} in all")
    given = len(args.num_learners_per_node)
    if given > nodes and not is_plan:
        args.refuse(f"--num_learners_per_node is for {given} nodes, but {nodes} run: give a number for each")
    if world_size is not None:
        check_nodes(args, nodes, ranks_per_node)

    needed = ranks if world_size is None else ranks_per_node
    if args.single_gpu_mode:  # an engine may share a learner's GPU; NCCL refuses two learners on one
        needed = max(args.num_learners_per_node)
    visible = torch.cuda.device_count()
    if visible and needed > visible and not args.dry_run:
        fix = "lower them, or add --single_gpu_mode"
        args.refuse(f"{PROCESSES} need {needed} GPUs on a node, {visible} are visible: {fix}")


def check_nodes(args: Any, nodes: int, ranks_per_node: int) -> None:
    """Every engine of grpo_fast.py lies within a node: the ranks of a node that do not learn make whole engines."""
    tp = args.vllm_tensor_parallel_size
    learners = args.num_learners_per_node + [0] * nodes
    engine_ranks = [ranks_per_node - min(n, ranks_per_node) for n in learners[:nodes]]
    is_split = any(n % tp for n in engine_ranks)
    if is_split or sum(engine_ranks) != args.vllm_num_engines * tp:
        args.refuse(f"{PROCESSES}: an engine would span two nodes")


def check_asynchronous(args: Any) -> None:
    """What grpo_fast.py cannot do that grpo.py can."""
    if args.rollout_backend != "vllm" and args.vllm_tensor_parallel_size > 1:
        args.refuse("--vllm_tensor_parallel_size: needs --rollout_backend vllm")
    if args.load_batches or args.load_states:
        args.refuse("--load_batches --load_states: grpo.py trains on what others saved; grpo_fast.py only saves")
    timing_decides = args.inflight_updates or (args.active_sampling and args.async_steps)
    if args.deterministic and timing_decides:
        others = "--inflight_updates, or with --active_sampling and --async_steps above 0"
        args.refuse(f"--deterministic: timing would decide which weights make a token with {others}: drop one of them")
    if args.vllm_sleep == "on":
        args.refuse("--vllm_sleep: engines of grpo_fast.py work while the learners do: drop it")


def check_loss(args: Any) -> None:
    """The loss and the optimizer."""
    if args.warmup_ratio and args.lr_scheduler_type == "constant":
        args.refuse("--warmup_ratio with --lr_scheduler_type warms nothing up: take constant_with_warmup")
    if args.clip_dual and (args.clip_dual <= 1 or args.loss_fn != "dapo"):
        args.refuse("--clip_dual: must be above 1, with --loss_fn dapo; 0 is off")
    if args.loss_denominator not in ("token", "sequence"):
        try:
            denominator = float(args.loss_denominator)
        except ValueError:
            denominator = math.nan
        if not 0 < denominator < math.inf:
            args.refuse("--loss_denominator: token, sequence or a positive number")


def check_rho(args: Any) -> None:
    """The correction for the engine's numerics."""
    lower = args.rho_mask_lower_bound
    upper = args.rho_mask_upper_bound
    clamp = args.rho_clamp_upper_bound
    kinds = args.rho_mask_sequence_level or args.rho_mask_tv_divergence
    if not args.use_rho_correction and (lower or upper or kinds):
        args.refuse("--rho_mask_* bounds act through --use_rho_correction: drop --no_use_rho_correction or the bounds")
    if not args.use_rho_correction and args.rho_clamp_lower_bound:
        args.refuse("--rho_clamp_lower_bound acts through --use_rho_correction: drop --no_use_rho_correction or it")
    if clamp and clamp < 1:
        args.refuse("--rho_clamp_upper_bound truncates exact agreement: at least 1, or 0 for off")
    if args.rho_clamp_lower_bound > 1:
        args.refuse("--rho_clamp_lower_bound raises exact agreement: at most 1, or 0 for off")
    if args.rho_mask_tv_divergence:
        check_tv_divergence(args)
    elif lower >= 1 or (upper and upper <= 1):
        args.refuse(
            "--rho_mask_lower_bound must be below 1 and --rho_mask_upper_bound above 1, to keep rho 1; 0 is off"
        )
    if args.use_rho_correction and args.vllm_top_p != 1:
        fix = "set --vllm_top_p 1.0 or --no_use_rho_correction"
        args.refuse(f"--vllm_top_p cuts the distribution, which biases --use_rho_correction: {fix}")


def check_tv_divergence(args: Any) -> None:
    """The mask by a response's mean |rho - 1|, which is 0 where learner and engine agree."""
    if args.rho_mask_sequence_level:
        args.refuse("--rho_mask_tv_divergence --rho_mask_sequence_level: the bounds are for one of the two, drop one")
    if args.rho_mask_lower_bound:
        args.refuse("--rho_mask_tv_divergence with --rho_mask_lower_bound drops exact agreement: leave the bound out")
    if not args.rho_mask_upper_bound:
        args.refuse(
            "--rho_mask_tv_divergence drops nothing without --rho_mask_upper_bound: set it, to 2.0 for instance"
        )


def check_reference(args: Any) -> None:
    """The reference policy, and a teacher in its place."""
    if args.lora_rank and args.ref_policy_update_freq is not None:
        args.refuse("--ref_policy_update_freq with --lora_rank has no second model to move: drop one of them")
    if args.beta and not args.load_ref_policy:
        args.refuse("--beta needs a reference policy: drop --no_load_ref_policy or set --beta 0")
    if args.ref_policy_update_freq is not None and not args.load_ref_policy:
        args.refuse("--ref_policy_update_freq needs a reference policy: drop --no_load_ref_policy")
    if "reference" in args.offload:
        check_offload(args)
    if not args.ref_model_name_or_path:
        return
    if args.ref_policy_update_freq is not None:
        args.refuse("--ref_policy_update_freq would mix the policy into --ref_model_name_or_path: drop one of them")
    if not args.load_ref_policy:
        args.refuse("--ref_model_name_or_path is the reference policy: drop --no_load_ref_policy")
    kl_in_loss = args.beta > 0 and not args.kl_in_reward
    if kl_in_loss and args.filter_zero_std_samples:
        args.refuse(
            "--filter_zero_std_samples with --ref_model_name_or_path drops groups of equal scores, whose KL teaches "
            "all the same: add --no_filter_zero_std_samples"
        )
    if kl_in_loss and args.kl_estimator in ("0", "kl1"):
        args.refuse(
            "--kl_estimator with --ref_model_name_or_path has a gradient of zero on average, from which nothing is "
            "learned: take kl2, the gradient of the KL"
        )


def check_offload(args: Any) -> None:
    """A reference policy in host memory."""
    has_another = bool(args.ref_model_name_or_path)
    if not args.load_ref_policy or (args.lora_rank and not has_another):
        args.refuse("--offload: there is no second model: leave reference out")
    if args.ref_policy_update_freq is not None:
        args.refuse("--offload with --ref_policy_update_freq, which moves it: drop one of them")


def check_kl_in_reward(args: Any) -> None:
    """The KL as a part of the score."""
    if args.beta == 0:
        args.refuse("--kl_in_reward subtracts beta * KL: it needs --beta above 0")
    if args.mask_truncated_completions:
        args.refuse("--kl_in_reward needs the KL of whole groups, which --mask_truncated_completions cuts: drop one")
    if args.advantage_normalization_type.startswith("standard") and not args.force_kl_in_reward:
        # Responses of equal outcome would get advantages of about 1, however small beta is
        args.refuse(
            "--kl_in_reward with --advantage_normalization_type divides KL differences by their own standard "
            "deviation: take --advantage_normalization_type centered, or add --force_kl_in_reward"
        )


def check_turn_credit(args: Any) -> None:
    """A baseline for each turn."""
    if not (args.env_file or args.tools):
        args.refuse("--turn_credit needs turns with rewards: add --env_file or --tools, or drop it")
    if args.advantage_normalization_type != "centered":
        args.refuse(
            "--turn_credit with --advantage_normalization_type divides by no deviation: take "
            "--advantage_normalization_type centered"
        )
    if args.filter_zero_std_samples or args.active_sampling:
        args.refuse(
            "--turn_credit: turns may differ where outcomes are equal, so groups must not be chosen by outcomes: add "
            "--no_filter_zero_std_samples and drop --active_sampling"
        )
    if args.kl_in_reward:
        args.refuse("--turn_credit --kl_in_reward: a turn would pay for KL of turns before it, drop one")


def check_sampling(args: Any) -> None:
    """What is sampled, scored and evaluated."""
    evaluates = args.dataset_mixer_eval_list != []
    if args.active_sampling and not args.filter_zero_std_samples:
        args.refuse("--active_sampling refills groups that --filter_zero_std_samples drops: it needs that flag")
    if args.overlong_buffer_length >= args.response_length:
        args.refuse("--overlong_buffer_length must be less than --response_length")
    if args.eval_on_step_0 and not evaluates:
        args.refuse("--eval_on_step_0 needs --dataset_mixer_eval_list")
    if args.load_batches and (evaluates or args.active_sampling or args.reward_file or args.audit_verifier):
        flags = "--dataset_mixer_eval_list --active_sampling --reward_file --audit_verifier"
        args.refuse(f"--load_batches: drop {flags}: nothing is sampled")


def check_rewards(args: Any) -> None:
    """The flags of the rewards, which scripts/score.py has too."""
    check_bounds(args)
    if not (args.apply_verifiable_reward or args.apply_r1_style_format_reward):
        args.refuse("--no_apply_verifiable_reward without --apply_r1_style_format_reward leaves no reward")
    if args.additive_format_reward and not args.apply_r1_style_format_reward:
        args.refuse("--additive_format_reward needs --apply_r1_style_format_reward")
    if args.audit_verifier and not args.apply_verifiable_reward:
        args.refuse("--audit_verifier --no_apply_verifiable_reward: no verifier is left to audit: drop one of them")
    if args.reward_file and not os.path.isfile(args.reward_file):
        args.refuse("--reward_file: no such file")
    if args.llm_judge_model:
        from scripts.parts import judges

        has_server = judges.judge_url(args) or os.environ.get("OPENAI_API_KEY")
        if not has_server and not getattr(args, "dry_run", False):
            args.refuse("--llm_judge_model: needs $OPENAI_API_KEY, or --llm_judge_base_url with your own server")
        if args.llm_judge_max_tokens > args.llm_judge_max_context_length - 1024:
            fix = "must leave 1024 tokens for what is judged: lower it"
            args.refuse(f"--llm_judge_max_tokens of --llm_judge_max_context_length {fix}")
