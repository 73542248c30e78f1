"""Plumbing shared by grpo.py and grpo_fast.py: nothing here is edited for a research idea.

    processes   World, collectives, random state, seeds
    flags       parse_args and the classes of flags but the algorithm's
    programs    what runs beside a run in processes of its own
    data        Prompt; load_prompts, prompt_at: the endless stream of prompts
    engines     Request -> Generation, with vLLM or transformers
    packs       which sequences a forward computes together, and attention inside them
    sharding    FSDP2, weights, saved models, checkpoints
    traces      rollouts and dumps on disk
    metrics     counts and means over ranks, and who is told of them
    servers     language models that score

Features that not every run has are in scripts/parts/, imported in the function whose flag asks for them. Import this
module before torch: it sets thread counts and vLLM's switches, which both read at import time.
"""

import bisect
import contextlib
import copy
import ctypes
import functools
import gc
import hashlib
import importlib.util
import json
import logging
import math
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

_LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
# The cores this process may use; macOS pins no process and has no call that says so
ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
# Two OpenMP pools that together want more threads than there are cores run 10-20x slower.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(ALL_CORES) // _LOCAL_WORLD_SIZE)))
# oneDNN compiles a bfloat16 product for each shape and keeps 1024; packs have hundreds of lengths
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # vLLM does so after its first warnings
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # looks at deprecated names of torch
VLLM_CACHE = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "vllm")

# Imports make objects that stay: looking for dead cycles after every 700 is a quarter of their time, vLLM's a third
gc.set_threshold(10_000)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rewards  # noqa: E402
from rewards import (  # noqa: E402
    NotNegative,
    Positive,
    Refusing,
    Seed,
    ShareAboveZero,
    ShareBetween,
    UserError,
    need,
)

# Compiled kernels outlive a run, beside vLLM's own. Inductor writes loops for the processor's vectors and does not ask,
# when it finds them again, for which: a home directory may be shared by machines of several kinds.
_CACHE = f"~/.cache/torchinductor/{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser(_CACHE))

if TYPE_CHECKING:  # an import of seconds; and names of the room above, which nothing here runs
    from transformers import PreTrainedTokenizerBase as Tokenizer

    import grpo

T = TypeVar("T")
F = TypeVar("F", bound="Flags")
REPO = Path(__file__).resolve().parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRIAL = 0.1  # see trial_adapters
Modules = dict[str, "grpo.Policy"]  # those that a checkpoint holds, by name
GATHER_BYTES = 5 * 2**28  # of a collective that makes weights whole: a dozen for a 7B in bfloat16

# --- Processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process among all learner ranks; `device` is where its shard and its engine live."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_distributed(store: dist.Store | None = None, timeout: timedelta | None = None) -> World:
    """Join the ranks that torchrun started, or those that meet in `store`; without either make a world of one, which
    opens no port."""
    rank = int(os.environ.setdefault("RANK", "0"))
    size = int(os.environ.setdefault("WORLD_SIZE", "1"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        backend = "gloo"
        keep_freed_memory()
    if store is None and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        store = store or dist.HashStore()
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    return World(rank, local_rank, size, device)


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: to return large tensors to the kernel takes a quarter of a CPU step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def all_reduce(values: Sequence[float], world: World, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[float]:
    """Each value reduced over all ranks in float64. All ranks must call it."""
    tensor = torch.tensor(values, dtype=torch.float64)  # on the CPU: gloo carries it even where GPUs use nccl
    if world.size > 1:
        dist.all_reduce(tensor, op)
    return tensor.tolist()


def all_gather(thing: T, world: World) -> list[T]:
    """Every rank's object. All ranks must call it."""
    everyone = [thing] * world.size
    if world.size > 1:
        dist.all_gather_object(everyone, thing)
    return everyone


@functools.cache
def _once(_world: object, make: Callable, *args: Any, **options: Any) -> Any:
    """make(*args, **options), made by the first call only: policy and reference share communicators."""
    return make(*args, **options)


def sequence_group(args: "Flags") -> dist.ProcessGroup | None:
    """The group of --sequence_parallel_size neighbouring ranks that share the tokens of their packs, or None. All ranks
    must call it."""
    size = args.sequence_parallel_size
    if size == 1:
        return None
    own_group, _ = _once(dist.group.WORLD, dist.new_subgroups, size)  # of neighbours
    return own_group


def share(thing: T, args: "Flags") -> list[T]:
    """The object of each rank in this one's sequence_group; its own is not copied. All ranks must call it."""
    group = sequence_group(args)
    if group is None:
        return [thing]
    everyone = [thing] * args.sequence_parallel_size
    dist.all_gather_object(everyone, thing, group)
    everyone[group.rank()] = thing
    return everyone


def leads(args: "Flags", world: World) -> bool:
    """Whether this rank reports for its sequence_group, whose ranks compute the same losses."""
    return world.rank % args.sequence_parallel_size == 0


def on_main(work: Callable[[], T], world: World) -> T:
    """Rank 0's result of `work`, on every rank. Its ValueError is a UserError on every rank. All ranks must call it."""
    outcome: list[Any] = [None, ""]  # result, error
    if world.is_main:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = str(error)
    if world.size > 1:
        dist.broadcast_object_list(outcome)
    result, error = outcome
    if error:
        raise UserError(error)
    return result


def after_restart(args: F) -> F:
    """The flags after torchrun --max-restarts has started the ranks again: resume from the newest checkpoint, or
    replace what this torchrun has begun. The flags stay as they are for a directory of another run: it is refused
    again."""
    from scripts.parts import run_dir

    if not run_dir.begun_by_this_torchrun(args.run_dir):
        return args
    has_checkpoint = (args.run_dir / "checkpoints" / "latest").exists()
    return replace(args, resume=has_checkpoint, overwrite=not has_checkpoint)


def device_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured ceilings of this device: operations a second of a matrix product, bytes a second of a copy."""
    from scripts.parts import machine

    return machine.device_speed(device, dtype)


def choose_dtype(args: "Flags") -> tuple[str, str]:
    """The compute dtype that --model_dtype means on this machine, and why, for a person."""
    from scripts.parts import machine

    return machine.choose_dtype(args)


def make_deterministic(args: "Flags") -> None:
    """--deterministic: kernels whose result does not depend on the order of threads, where torch has them."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore[missing-attribute]  # finds bugs, no more


def pin(cores: Iterable[int]) -> set[int]:
    """Keep this process on these cores, where the system can (macOS cannot). Returns the cores it had."""
    if not hasattr(os, "sched_setaffinity"):
        return ALL_CORES
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    return before


def exit_process() -> None:
    """End a process that has finished its work, without the destructors of gloo's and vLLM's threads: these abort now
    and then (in 1 of 38 two-rank runs), which would turn a finished run into a failed one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def fenced_rng():
    """Restore the random state after a block: vLLM reseeds and consumes the global generators."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Random state of python, numpy and torch (CPU and the current GPU), loadable with weights_only=True."""
    algorithm, keys, *position = np.random.get_state()
    keys = torch.from_numpy(keys.copy())  # ty: ignore[missing-attribute]
    state = {
        "python": random.getstate(),
        "numpy": (algorithm, keys, *position),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what rng_state returned."""
    algorithm, keys, *position = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((algorithm, keys.numpy(), *position))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def derive_seed(*parts: int | str) -> int:
    """63-bit seed that depends on every part and on nothing else, e.g. (run seed, stream position, sample)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --- Flags: their classes; scripts/parts/checks.py refuses what contradicts itself ------------------------------------


def parse_args(cls: Any, argv: Sequence[str] | None = None) -> Any:
    """Parse flags into the dataclass `cls`. open-instruct's flags become ours, and rank 0 prints what became of them.
    Raises UserError for one without which the run would be another one, unless this is a --dry_run."""
    import tyro

    from scripts.parts import translate

    tokens = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(tokens):
        from scripts.parts import help as help_part

        help_part.show(cls, tokens)
    translation = translate.translate(tokens, translate.names_of(cls))
    args = tyro.cli(cls, args=translation.line, use_underscores=True)
    if translation.others and os.environ.get("RANK", "0") == "0":
        print(translation.text(), flush=True)
    missing = translation.missing()
    need(not missing or args.dry_run, f"{missing}. Drop what you can do without")
    return args


@dataclass(frozen=True)
class RunFlags(Refusing):
    """The run: its directory, its randomness, what it saves."""

    exp_name: str = "grpo"
    """Name of the run. It writes to output_dir/exp_name."""
    output_dir: str = "output"
    """Directory of all runs."""
    seed: Seed[int] = 1
    """Fixes the order of the data, the sampling and everything else that is random."""
    deterministic: bool = False
    """Use deterministic kernels of torch. In grpo_fast.py each request also has a fixed engine, and a checkpoint waits
    until no rollout is running."""
    resume: bool = False
    """Continue the run in output_dir/exp_name from its newest checkpoint. Refused if flags, data or model differ."""
    resume_anyway: bool = False
    """With resume: continue although they differ, and print the differences."""
    overwrite: bool = False
    """Replace the run that is in output_dir/exp_name. Off: refuse to start there."""
    dry_run: bool = False
    """Check the flags, print arithmetic, sources and memory, and end. Loads nothing and needs no network."""
    save_freq: int = 200
    """Steps between saves of the model in Hugging Face format, to step_N/. The last model always goes to model/. -1 is
    never."""
    checkpoint_state_freq: int = -1
    """Steps between checkpoints from which resume continues. -1 is never."""
    keep_last_n_checkpoints: int = 3
    """How many checkpoints are kept; older ones are removed. -1 keeps all."""
    dump_steps: str = ""
    """Steps whose updates scripts/replay.py can compute again: all, or N for every N-th. Their rollouts go to
    rollouts.jsonl with the learner's logprobs, their packs to dumps/. Empty is none."""
    load_states: str = ""
    """grpo.py: directory of a run of ours, of veRL or of Hugging Face models. Step N begins with its state of step
    N - 1."""
    load_batches: str = ""
    """grpo.py: directory of a run with --dump_steps. Train on its rollouts, step by step, instead of sampling."""
    save_traces: bool = False
    """Write every rollout to rollouts.jsonl."""

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.exp_name


@dataclass(frozen=True)
class TrackingFlags(Refusing):
    """Where metrics and model go beside the console and the run's directory."""

    with_tracking: bool = False
    """Log to Weights & Biases (WANDB_MODE=offline works)."""
    with_tensorboard: bool = False
    """Write TensorBoard's event files to RUN/tensorboard. Needs pip install tensorboard."""
    wandb_project: str = "grpo"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Entity in Weights & Biases. None is the account's default."""
    push_to_hub: bool = False
    """Upload the last model, and a card with the command line, to the Hugging Face hub. Off: nothing is uploaded."""
    hf_repo_id: str | None = None
    """Repository for push_to_hub, NAME or ORGANIZATION/NAME. A new one is private. None is exp_name."""
    hf_repo_revision: str | None = None
    """Branch for push_to_hub, created if it is new. None is the default branch."""


@dataclass(frozen=True)
class ModelFlags(Refusing):
    """The model and how the learner computes it."""

    model_name_or_path: str = ""
    """Hub name or directory of the causal language model to train. Required."""
    model_revision: str | None = None
    """Hub revision of the model. None is the default branch."""
    model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of learner and engine. auto: bfloat16 if this machine is fast in it, else float32. Master weights,
    Adam state, log-softmax and the reduction of gradients are float32."""
    lora_rank: NotNegative[int] = 0
    """Train adapters of this rank only: W + lora_alpha / lora_rank * B A (LoRA, arXiv:2106.09685). 0: train all
    weights."""
    lora_alpha: NotNegative[int] = 32
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the matrices that get adapters (q_proj v_proj ...). all-linear: all matrices of the layers."""
    lora_merge: bool = False
    """Beside each saved adapter also save the merged model, to model_merged/."""
    ref_model_name_or_path: str = ""
    """A teacher of the same vocabulary as reference policy. With --beta 1 --kl_estimator kl2 that is on-policy
    distillation (arXiv:2306.13649). Empty: the start policy."""
    ref_model_revision: str | None = None
    """Hub revision of the teacher. None is its default branch."""
    ref_model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the teacher, in memory and in computing. auto is the policy's."""
    dither_master_weights: bool = True
    """With bfloat16: start each master weight at a random point of its rounding interval, see utils.dither."""
    attn_implementation: str = "sdpa"
    """Attention of the learner, by transformers' names: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    gradient_checkpointing_part: Literal["layer", "mlp"] = "layer"
    """What gradient_checkpointing computes again. mlp: half of a layer's operations, for some four times the memory."""
    compile_layers: bool = False
    """torch.compile each decoder layer, and on a CPU the head: once some minutes, then faster steps. Sums are taken in
    another order (1e-6 of an update in float32), and bfloat16 rounds less often."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """0: each learner has the whole model; 2: gradients and optimizer state are sharded; 3: parameters too. FSDP2 does
    it."""
    sequence_parallel_size: Positive[int] = 1
    """Learners that share the tokens of a pack and its activations (DeepSpeed-Ulysses, arXiv:2309.14509). Must divide
    the number of learners and the model's attention heads."""

    def of_reference(self) -> Self:
        """The flags with which the reference policy loads: the teacher's, or these."""
        if not self.ref_model_name_or_path:
            return self
        dtype = self.model_dtype if self.ref_model_dtype == "auto" else self.ref_model_dtype
        return replace(
            self,
            model_name_or_path=self.ref_model_name_or_path,
            model_revision=self.ref_model_revision,
            model_dtype=dtype,
            lora_rank=0,
            ref_model_name_or_path="",
        )


@dataclass(frozen=True)
class DataFlags(Refusing):
    """Data sets and how their rows become prompts."""

    dataset_mixer_list: list[str] = field(default_factory=lambda: ["ai2-adapt-dev/rlvr_gsm8k_zs", "1.0"])
    """NAME AMOUNT pairs to train on. NAME: hub data set, directory, .jsonl, .parquet or reasoning_gym:TASK. AMOUNT: 1.0
    is a fraction, 1 is one row."""
    dataset_mixer_eval_list: list[str] = field(default_factory=list)
    """NAME AMOUNT pairs for evaluation. Empty: no evaluation."""
    dataset_mixer_list_splits: list[str] = field(default_factory=lambda: ["train"])
    """Split of all training data sets, or one for each."""
    dataset_mixer_eval_list_splits: list[str] = field(default_factory=lambda: ["test"])
    """Split of all evaluation data sets, or one for each."""
    shuffle: bool = True
    """Every pass over the prompts has another order. Off: the order of the files (the first pass of veRL with
    data.shuffle=false)."""
    max_prompt_token_length: Positive[int] = 256
    """Most tokens of a prompt. Longer ones are dropped and counted."""
    chat_template_name: str | None = None
    """Chat template of scripts/data/templates. None is the tokenizer's own."""
    add_bos: bool = False
    """Begin every prompt with the tokenizer's BOS token, before the text of the chat template."""
    system_prompt_override_file: str | None = None
    """Text file that replaces the system message of every row. None keeps the rows' own."""


@dataclass(frozen=True)
class EngineFlags(Refusing):
    """The engine and how it samples."""

    rollout_backend: Literal["vllm", "transformers"] = "vllm"
    """Engine that samples. transformers is for machines without vLLM."""
    response_length: Positive[int] = 256
    """Most tokens of a response."""
    temperature: Positive[float] = 0.7
    """Sampling temperature. The learner's logits are divided by it too."""
    vllm_top_p: ShareAboveZero[float] = 1.0
    """Probability mass of nucleus sampling. 1.0 is off. A smaller one biases the importance correction, which must then
    be off."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a response and are part of it. Empty is none."""
    eval_temperature: NotNegative[float] = 0.0
    """Sampling temperature of evaluations. 0 is greedy; or, if eval_pass_at_k is above 1, the value of temperature, as
    it always is in open-instruct."""
    eval_response_length: Positive[int | None] = None
    """Most tokens of a response in evaluations. None is response_length."""
    vllm_gpu_memory_utilization: ShareBetween[float] = 0.9
    """Share of GPU memory for the engine. If the learner is on the same GPU (grpo.py, --single_gpu_mode), the default
    becomes 0.4: take 0.3 to 0.6, in grpo.py up to 0.8, where the engine sleeps during updates."""
    vllm_enforce_eager: bool = False
    """Leave out vLLM's compilation and CUDA graphs: it starts faster and samples slower."""
    vllm_sleep: Literal["auto", "on", "off"] = "auto"
    """grpo.py: the engine frees the GPU's memory during updates. auto: if it can, as vLLM does on a GPU."""
    vllm_enable_prefix_caching: bool = False
    """Requests share the cache of prompts that begin alike. New weights never read what older ones have cached."""
    vllm_tensor_parallel_size: Positive[int] = 1
    """grpo_fast.py: GPUs of an engine. In grpo.py an engine has one."""
    max_logprob_gap: NotNegative[float] = 0.1
    """End the run if the mean |learner - engine| logprob of sampled tokens is larger (bfloat16: ~0.04). 0 is off."""

    def beside_engine(self, shared: bool) -> Self:
        """These flags where learner and engine share a GPU or not: the default share is for an engine alone on one."""
        default = EngineFlags.vllm_gpu_memory_utilization
        if shared and torch.cuda.is_available() and self.vllm_gpu_memory_utilization == default:
            return replace(self, vllm_gpu_memory_utilization=0.4)
        return self


@dataclass(frozen=True)
class ProcessFlags(Refusing):
    """The processes of grpo_fast.py. grpo.py accepts these flags, so that both take the same command line."""

    num_learners_per_node: list[int] = field(default_factory=lambda: [1])
    """grpo_fast.py: learner ranks on each node; all other ranks are engines. grpo.py takes torchrun's ranks."""
    vllm_num_engines: int = 1
    """grpo_fast.py: number of engines. grpo.py has one on each rank."""
    async_steps: NotNegative[int] = 1
    """grpo_fast.py: how many updates old a rollout may be when it is trained on. grpo.py is strictly on-policy."""
    inflight_updates: bool = False
    """grpo_fast.py: an engine takes new weights between two decoding steps. Off: its running responses end first."""
    single_gpu_mode: bool = False
    """grpo_fast.py: learner and engine share a device. In grpo.py they always do."""
    stall_timeout_s: NotNegative[float] = 1800.0
    """grpo_fast.py: end the run if nothing has moved for this many seconds, and print all stacks and outstanding
    requests. 0 is off."""


@dataclass(frozen=True)
class TurnFlags(Refusing):
    """Turns: an environment or tools answer the policy, see scripts/README.md, Environments."""

    env_file: str = ""
    """Python file whose step(episode), or class Env, answers a response or ends the rollout. Empty is off."""
    tools: list[str] = field(default_factory=list)
    """Tools that answer calls in a response: names of scripts/tools/, or files of your own. Empty is none."""
    tool_call_names: list[str] = field(default_factory=list)
    """Names by which the policy calls the tools, in the order of tools. Empty: the names in their files."""
    tool_configs: list[str] = field(default_factory=list)
    """A JSON object with the settings of each tool. Empty: their defaults."""
    tool_parser_type: str = "legacy"
    """Form of a call. legacy is <name>text</name>; the others are vLLM's tool parsers (hermes, olmo3, ...)."""
    max_steps: Positive[int] = 5
    """Most answers in a rollout. After the last one the policy has one more turn."""
    per_turn_max_tokens: Positive[int | None] = None
    """Most tokens of a turn. None: as many as response_length leaves, which counts answers too."""
    only_reward_good_outputs: bool = False
    """Verifiers score a rollout 0 if no answer came or one failed."""
    pass_tools_to_chat_template: bool = True
    """The chat template describes the tools to the policy. Off: your prompts describe them."""
    env_timeout: Positive[float] = 60.0
    """Seconds for an answer. After that the policy reads that none came, and the rollout continues."""
    pool_size: Positive[int | None] = None
    """Processes that answer at the same time. None is 2 for each core, and at least 8."""

    @property
    def has_turns(self) -> bool:
        """Whether an environment or tools answer the policy."""
        return bool(self.env_file or self.tools)


@dataclass(frozen=True)
class Flags(rewards.RewardFlags, ProcessFlags, TurnFlags, TrackingFlags, EngineFlags, DataFlags, ModelFlags, RunFlags):
    """All flags but those of the algorithm."""


def print_plan(args: Flags, fast: bool, learners: int, shared_gpu: bool, logprob_chunk: int) -> None:
    """Print the arithmetic of a run and, with --dry_run, what it would do on this machine."""
    from scripts.parts import plan

    plan.print_plan(args, fast, learners, shared_gpu, logprob_chunk)


def prepare_run_dir(args: Flags, data_hash: str, world: World) -> Path:
    """Make `output_dir/exp_name` with args.json and environment.json; scripts/parts/run_dir.py says when a directory
    that holds a run is refused. All ranks must call it. Raises UserError."""
    from scripts.parts import run_dir

    facts = {
        "command": [sys.executable, *sys.argv],
        "data_hash": data_hash,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    on_main(functools.partial(run_dir.prepare, args.run_dir, asdict(args), facts), world)
    return args.run_dir


# --- Programs beside a run --------------------------------------------------------------------------------------------

PROGRAM_S = 120.0  # of a program that a run waits for: matplotlib's first start on a machine looks for fonts
SWEEPERS: list[subprocess.Popen] = []


def program(name: str, *arguments: object) -> list[str]:
    """Command line of a program in scripts/ that must be a process of its own."""
    return [sys.executable, str(REPO / "scripts" / name), *map(str, arguments)]


def run_program(name: str, *arguments: object, seconds: float | None = None) -> str:
    """Run a program in scripts/ and wait for it. Returns what it wrote to stderr if it failed, else ""."""
    command = program(name, *arguments)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds or PROGRAM_S)
    except (OSError, subprocess.SubprocessError) as error:
        problem = getattr(error, "stderr", "") or str(error)
        return problem.strip()
    return ""


def start_program(log: Path, name: str, *arguments: object) -> subprocess.Popen:
    """Start a program of scripts/ beside this process. It ends when its stdin closes, which the kernel does however
    this process ends. This process reads its stdout; its stderr goes to `log`."""
    pinned = pin(ALL_CORES)  # grpo_fast.py pins its ranks, and a program would inherit their cores
    try:
        with log.open("a") as stderr:
            return subprocess.Popen(
                program(name, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is for this process to handle
            )
    finally:
        pin(pinned)


def sweep(directory: str | Path, until: str = "read -r _") -> None:
    """Have a temporary directory removed however this process ends: a shell waits until its stdin closes."""
    SWEEPERS.append(
        subprocess.Popen(
            ["sh", "-c", f'{until}; rm -rf -- "$0"', directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # who reads our output waits until all who hold it have ended
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )


# --- Data -------------------------------------------------------------------------------------------------------------


# Published models expect the words of most to the letter: R1-Zero's (arXiv:2501.12948, table 1), Qwen's boxed one,
# those of Olmo 3 RL-Zero. simple_chat is our own: open-instruct's of that name does not open the assistant's turn.
CHAT_TEMPLATES = {path.stem: path.read_text() for path in sorted(REPO.glob("scripts/data/templates/*.jinja"))}

HELD_OUT_SEED = 1_000_000  # reasoning_gym item i uses Random(seed + i): close seeds share nearly all items


@dataclass(frozen=True)
class Row:
    """A row of a data set before it is rendered and tokenized."""

    where: str  # file and row, for error messages
    messages: list[dict[str, str]]
    ground_truths: list[Any]
    verifiers: list[str]  # one per ground truth
    columns: dict[str, Any] = field(default_factory=dict)  # tools and env_config, where the row has them
    has_turns: bool = True  # if an environment answers; False: other rows of the file ask for it and this one does not


@dataclass(frozen=True)
class Prompt:
    """One dataset row from loading to reward: tokens, label and verifier never travel apart."""

    index: int  # position in the loaded dataset
    token_ids: tuple[int, ...]
    text: str  # the rendered prompt, for people
    ground_truths: tuple[Any, ...]
    verifiers: tuple[str, ...]  # one per ground truth; their scores are summed
    conversation: str = ""  # lines "role: content", for verifiers that read the prompt
    environment: Any = None  # scripts.parts.turns.Environment that answers the policy; None: one turn
    episode: dict[str, Any] = field(default_factory=dict)  # what the row tells it: messages, ground_truths, config


def load_tokenizer(args: Flags) -> "Tokenizer":
    """Tokenizer of the model with the chat template that --chat_template_name and --add_bos ask for."""
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    tokenizer = pretrained(transformers.AutoTokenizer, args, "model_name_or_path")
    if args.chat_template_name is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[args.chat_template_name]
    names = " | ".join(CHAT_TEMPLATES)
    has_template = tokenizer.chat_template is not None
    need(has_template, f"{args.model_name_or_path} has no chat template: give --chat_template_name {names}")
    if args.add_bos:
        add_bos(tokenizer, args.model_name_or_path)
    return tokenizer


def add_bos(tokenizer: "Tokenizer", model: str) -> None:
    """Have the chat template begin with the BOS token. Raises UserError if it does already, or there is none."""
    template: Any = tokenizer.chat_template
    bos = tokenizer.bos_token
    problem = f"--add_bos: no BOS token can be added for {model}"
    begins_with_it = "bos_token" in template or (bos is not None and bos in template)
    need(not begins_with_it, f"{problem}: its chat template writes one already; drop the flag")
    need(bos is not None, f"{problem}: its tokenizer has none; drop the flag")
    tokenizer.chat_template = "{{ bos_token }}" + template


def load_environment(args: Flags, tokenizer: "Tokenizer | None" = None) -> Any:
    """The scripts.parts.turns.Environment of --env_file or --tools, or None. With a tokenizer it has the separators of
    its chat template. Raises UserError if it cannot be loaded, or the template has none."""
    if not args.has_turns:
        return None
    from scripts.parts import turns

    return turns.load_environment(args, tokenizer)


def pretrained(kind: Any, args: Flags, flag: str) -> Any:
    """What `kind` of transformers loads of --model_name_or_path; `flag` is the one by which a person named the model.
    Raises UserError."""
    try:
        return kind.from_pretrained(args.model_name_or_path, revision=args.model_revision)
    except (OSError, ValueError) as error:  # no such directory or repository, no network, no tokenizer in it
        raise UserError(
            f"--{flag} {args.model_name_or_path}: {str(error).strip().splitlines()[0]} Give a directory with a model, "
            "or the name of one on the Hugging Face hub, with a network to reach it"
        ) from None


def parse_mixer(flag: str, values: Sequence[str], splits: Sequence[str] = ("",)) -> list[tuple[str, float | int]]:
    """`NAME AMOUNT NAME AMOUNT ...` as pairs; an amount with a dot is a fraction, without one a number of rows. Raises
    UserError for a malformed flag or a file that does not exist."""
    need(len(values) % 2 == 0, f"--{flag} takes NAME AMOUNT pairs, got {len(values)} values: {' '.join(values)}")
    pairs: list[tuple[str, float | int]] = []
    for name, amount in zip(values[::2], values[1::2], strict=True):
        given = f"--{flag} {name} {amount}"
        try:
            number = float(amount) if "." in amount else int(amount)
        except ValueError:
            raise UserError(f"{given}: the amount must be a fraction (1.0) or a count (500)") from None
        need(number > 0, f"{given}: the amount must be positive")
        endless = name.startswith("reasoning_gym:")
        need(not endless or isinstance(number, int), f"{given}: generated data has no end, give a count such as 2000")
        is_file = Path(name).suffix in (".jsonl", ".parquet")
        need(not is_file or Path(name).is_file(), f"--{flag} {name}: no such file")
        pairs.append((name, number))
    one_split = len(set(splits)) == 1
    if pairs and not one_split and len(splits) != len(pairs):
        raise UserError(f"--{flag}_splits: give one split or one per dataset ({len(pairs)}), got {len(splits)}")
    return pairs


def mixed_rows(flag: str, args: Flags) -> Iterator[Row]:
    """The rows of all data sets of a mixer flag, in its order. Raises UserError."""
    splits = getattr(args, f"{flag}_splits")
    pairs = parse_mixer(flag, getattr(args, flag))
    for i, (name, amount) in enumerate(pairs):
        split = splits[i % len(splits)]
        if name.startswith("reasoning_gym:"):
            held_out = HELD_OUT_SEED if "eval" in flag else 0
            yield from generate_rows(flag, name, int(amount), args.seed + held_out)
        else:
            yield from read_rows(flag, name, amount, split, args.seed)


def read_rows(flag: str, name: str, amount: float, split: str, seed: int) -> Iterator[Row]:
    """The rows that NAME AMOUNT of a mixer flag takes. scripts/rows.py reads them in a process of its own, so that
    pyarrow, datasets and rows that are not drawn take no memory of this one. Raises UserError."""
    command = program("rows.py", name, amount, "--split", split, "--seed", seed)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            row = json.loads(line)
            error = row.get("error")
            need(error is None, f"--{flag} {error}")
            yield Row(**row)
    need(process.returncode == 0, f"--{flag} {name}: {shlex.join(command)} ended with {process.returncode}")


def generate_rows(flag: str, name: str, count: int, seed: int) -> Iterator[Row]:
    """The rows of reasoning_gym:TASK, made in this process, which needs the library to check the labels. Raises
    UserError."""
    import reasoning_gym

    task = name.partition(":")[2]
    try:
        items = reasoning_gym.create_dataset(task, size=count, seed=seed)
    except ValueError as error:
        raise UserError(f"--{flag} {name}: {error}") from None
    for i, item in enumerate(items, start=1):
        label = json.dumps({"task": task, "entry": item}, default=str)
        yield Row(f"{name} row {i}", [{"role": "user", "content": item["question"]}], [label], ["reasoning_gym"])


def load_prompts(flag: str, args: Flags, tokenizer: "Tokenizer", environment: Any = None) -> list[Prompt]:
    """Read, check and tokenize all rows of a mixer flag. Prompts that are too long are dropped and counted on stdout.

    The `environment` answers rows with a column tools or env_config; if a source has no such row, all of its rows.
    Raises UserError with file, row number and reason.
    """
    system = None
    if args.system_prompt_override_file:
        system = Path(args.system_prompt_override_file).read_text().strip()
    strftime = date_of_start(args)
    prompts: list[Prompt] = []
    dropped = 0
    for row in mixed_rows(flag, args):
        try:
            prompt = make_prompt(row, len(prompts), tokenizer, environment, system, strftime)
        except Exception as error:  # whatever a template raises, for example for a role that it does not know
            raise UserError(f"--{flag} {row.where}: {error}") from None
        if len(prompt.token_ids) > args.max_prompt_token_length:
            dropped += 1
        else:
            prompts.append(prompt)

    longest = args.max_prompt_token_length
    is_main = os.environ.get("RANK", "0") == "0"
    if dropped and is_main:
        print(f"--{flag}: {dropped} of {dropped + len(prompts)} prompts longer than {longest} dropped")
    need(prompts != [] or not dropped, f"--{flag}: every prompt is longer than --max_prompt_token_length {longest}")
    return prompts


def make_prompt(
    row: Row,
    index: int,
    tokenizer: "Tokenizer",
    environment: Any,
    system: str | None,
    strftime: Callable[[str], str],
) -> Prompt:
    """The prompt of a row: its labels are checked, its messages are rendered by the chat template and tokenized.
    `system` replaces its system message. Raises ValueError."""
    conversation = "\n".join(f"{message['role']}: {message['content']}" for message in row.messages)
    verifiers = checked_verifiers(row, conversation)
    messages = row.messages
    if system is not None:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]
    answers = environment if row.has_turns else None
    episode: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if answers is not None:
        tools, config = answers.of_row(row.columns)
        episode = {"messages": messages, "ground_truths": row.ground_truths, "config": config}
        options = {"tools": tools} if tools else {}
    rendered = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, strftime_now=strftime, **options
    )
    text = str(rendered)
    token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    ground_truths = tuple(row.ground_truths)
    return Prompt(index, token_ids, text, ground_truths, verifiers, conversation, answers, episode)


def checked_verifiers(row: Row, conversation: str) -> tuple[str, ...]:
    """The names of the row's verifiers, after --remap_verifier. Raises ValueError for one that does not exist or can
    never score its label."""
    verifiers = tuple(rewards.check_verifier(name) for name in row.verifiers)
    for verifier, label in zip(verifiers, row.ground_truths, strict=True):
        problem = rewards.check_ground_truth(verifier, label, conversation)
        need(not problem, f"{verifier}: {problem}")
    return verifiers


def date_of_start(args: Flags) -> Callable[[str], str]:
    """strftime of the run's start. Some chat templates write the date; a resumed run has the prompts of its start."""
    start = None  # now
    path = Path(args.output_dir) / args.exp_name / "environment.json"
    if getattr(args, "resume", False) and path.exists():  # scripts/minimal.py has no --resume
        start = json.loads(path.read_text()).get("begun")
    day = time.localtime(start)
    return lambda form: time.strftime(form, day)


def data_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 over tokens, labels, verifiers and environments of all prompts in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.token_ids, prompt.ground_truths, prompt.verifiers)).encode())
        if prompt.environment is not None:
            digest.update(repr(prompt.episode).encode())
    return digest.hexdigest()[:16]


def prompt_at(prompts: Sequence[Prompt], position: int, seed: int | None, excluded: Collection[int] = ()) -> Prompt:
    """The prompt at a position of the endless stream. Epoch e is a permutation drawn from (seed, e); without a seed it
    is the prompts as they are. In place of an `excluded` one (by index) comes the next of the permutation that is not,
    or the excluded one itself if all are."""
    epoch, offset = divmod(position, len(prompts))
    order = _permutation(len(prompts), seed, epoch)
    for i in range(len(order)):
        candidate = order[(offset + i) % len(order)]
        if candidate not in excluded:
            return prompts[candidate]
    return prompts[order[offset]]


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int | None, epoch: int) -> Sequence[int]:
    """The order of n prompts in an epoch."""
    if seed is None:
        return range(n)
    return random.Random(derive_seed(seed, epoch)).sample(range(n), n)


# --- Engines: token ids in, token ids out -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` fixes it, whatever else is in the batch; temperature 0 is greedy."""

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # beside --stop_strings


COLUMNS = {"token_ids": np.int32, "logprobs": np.float32, "mask": np.bool_, "versions": np.int32}  # a value per token


class Columns:
    """What has some of COLUMNS as attributes. Pickled they are bytes: numpy's own way takes five times as long."""

    def __post_init__(self) -> None:
        had = vars(self)
        had |= {name: np.asarray(had[name], dtype) for name, dtype in COLUMNS.items() if name in had}

    def __getstate__(self) -> dict[str, Any]:
        return {name: x.tobytes() if name in COLUMNS else x for name, x in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        had = {name: np.frombuffer(bytearray(x), COLUMNS[name]) for name, x in state.items() if name in COLUMNS}
        vars(self).update(state | had)


@dataclass(frozen=True, eq=False)
class Generation(Columns):
    """What an engine returns for a request: the sampled tokens with the logprob each was sampled with (nats)."""

    token_ids: Any
    logprobs: Any
    finish_reason: str  # "stop" or "length", as the engine says; never inferred from the last token
    versions: Any  # version of the weights behind each token
    cached: int = 0  # tokens of the request that the prefix cache had


OnEnd = Callable[[int, Generation], Future | None] | None  # see Sampler.generate
LOCK = threading.Lock()  # of a rollout's tokens and turns, which grow in one thread while another keeps them


@dataclass(eq=False)
class Rollout(Columns):
    """One response with all that is known about it. COLUMNS are arrays that only get longer: a token has its
    logprob, whether the policy chose it (False: text put in by a tool) and the version of the weights that made it."""

    prompt: Prompt
    position: int  # of the prompt in the endless stream: (position, sample) names a rollout of the run
    sample: int
    token_ids: Any = ()
    logprobs: Any = ()
    mask: Any = ()
    versions: Any = ()
    finish_reason: str = ""
    text: str = ""
    scoring: list[Future] = field(default_factory=list, repr=False)  # of the results, until they are waited for
    results: list[rewards.RewardResult] = field(default_factory=list)  # one per verifier of the prompt
    verifiable: float = 0.0  # sum of verifier scores; NaN when a verifier could not judge
    format_score: float = 0.0
    outcome: float = 0.0  # what the verifiers and the format say: a group of equal outcomes teaches nothing
    score: float = 0.0  # what GRPO maximizes: the outcome less penalties
    advantage: float = 0.0  # of every token of the response, to which make_batch gives it
    tokenless: list[float] = field(default_factory=list)  # scores of its group's responses without a sampled token
    turns: list[dict[str, Any]] = field(default_factory=list)  # with an environment: who wrote what, see grpo.end_turn
    over: bool = False  # nothing is added any more

    def append(self, generation: Generation) -> None:
        """Add tokens the policy chose."""
        self._add(vars(generation) | {"mask": np.ones(len(generation.token_ids), np.bool_)})
        self.finish_reason = generation.finish_reason

    def append_answer(self, token_ids: Sequence[int]) -> None:
        """Add tokens the policy did not choose: no logprob, no version, no part in the loss."""
        n = len(token_ids)
        new = {"logprobs": np.zeros(n), "mask": np.zeros(n, np.bool_), "versions": np.full(n, -1)}
        self._add(new | {"token_ids": np.asarray(token_ids, np.int32)})

    def _add(self, new: dict[str, Any]) -> None:
        had = vars(self)
        had |= {name: np.concatenate([had[name], new[name]], dtype=dtype) for name, dtype in COLUMNS.items()}

    def so_far(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, for `go_back`: all if it is over, else its whole turns, if it has any."""
        with LOCK:
            rest = {name: copy.copy(getattr(self, name)) for name in ("finish_reason", "turns", "over")}
            there = COLUMNS if self.over or self.turns else ()
            return {name: torch.from_numpy(getattr(self, name)) for name in there} | (rest if there else {})

    def go_back(self, kept: dict[str, Any]) -> None:
        """Be what another was when it was kept."""
        vars(self).update(kept)
        self.__post_init__()


Group = list[Rollout]  # the responses to one prompt


def distinct_outcomes(group: Group) -> set[float]:
    """The outcomes of a group, missing ones apart: with two or more, the group has a gradient."""
    return {r.outcome for r in group if not math.isnan(r.outcome)}


def eos_token_ids(args: Flags, tokenizer: "Tokenizer", commit: str | None = None) -> list[int]:
    """Every end-of-sequence id of the model: the tokenizer's and those of its generation config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # a model without generation_config.json
        revision: Any = commit or args.model_revision
        more = GenerationConfig.from_pretrained(args.model_name_or_path, revision=revision).eos_token_id
        ids |= set(more if isinstance(more, list) else [more])
    return sorted(ids - {None})


class Sampler:
    """What samples: an engine, or all of grpo_fast.py's."""

    tokenizer: "Tokenizer"
    eos_ids: list[int]

    def generate(self, requests: Sequence[Request], finished: OnEnd = None) -> list[Generation]:
        """Sample all requests to their end; the result has their order. finished(i, generation) is called as request i
        ends; if it gives a future, that one's result is the request which goes on in place of i, or None."""
        raise NotImplementedError

    def stop(self, version: int) -> None:
        """Let processes that sample end, once they have the weights `version`."""

    def sleep(self, level: int = 2) -> None:
        """Give memory back, where the engine can: of the cache and (2) of the weights, which are gone until
        load_weights, or (1) kept on the host until the next request."""

    def close(self) -> None:
        """End, if there is anything to end."""


class Engine(Sampler):
    """What both engines are: `add` requests, `step` until not `busy`, `load_weights` in between."""

    def __init__(self, args: Flags, tokenizer: "Tokenizer"):
        self.tokenizer, self.eos_ids = tokenizer, eos_token_ids(args, tokenizer)
        self.stop_strings, self.version = list(args.stop_strings), -1
        self.in_rounds = args.deterministic  # answers go on together, once all are there: no batch depends on when

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by `named_tensors` (checkpoint names) and stamp later tokens with `version`."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        raise NotImplementedError

    def add(self, request_id: str, request: Request) -> None:
        """Start a request; `step` returns it once it is finished."""
        raise NotImplementedError

    def step(self) -> list[tuple[str, Generation]]:
        """Some work on the requests; returns those it finished."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request], finished: OnEnd = None) -> list[Generation]:
        results: dict[int, Generation] = {}
        answers: dict[int, Future] = {}  # that are waited for
        with fenced_rng():
            for i, request in enumerate(requests):
                self.add(str(i), request)
            while self.busy or answers:
                if not self.busy:
                    wait(answers.values(), return_when="ALL_COMPLETED" if self.in_rounds else "FIRST_COMPLETED")
                go_on = () if self.in_rounds and self.busy else (i for i, answer in answers.items() if answer.done())
                for i in sorted(go_on):
                    if (request := answers.pop(i).result()) is not None:
                        self.add(str(i), request)
                for name, generation in self.step() if self.busy else ():
                    results[int(name)] = generation
                    if finished is not None and (answer := finished(int(name), generation)) is not None:
                        answers[int(name)] = answer
        return [results[i] for i in range(len(requests))]


class VLLMEngine(Engine):
    """vLLM in this process, driven step by step, on this rank's device. All ranks construct and load theirs at the same
    time: vLLM builds its one-rank groups inside the ranks' own world (`external_launcher`)."""

    def __init__(self, args: Flags, tokenizer: "Tokenizer", world: World, num_requests: int):
        on_cpu = world.device.type == "cpu"
        if not on_cpu:  # torch writes the device into what it compiles, vLLM keeps that by rank: see tests/gpu_contract
            os.environ["VLLM_CACHE_ROOT"] = os.path.join(VLLM_CACHE, f"device_{world.device.index}")
        prepare_compiler()
        from vllm import LLM

        if not gc.get_freeze_count():  # vLLM's start looks for garbage five times: not among all that it has imported
            gc.collect()
            gc.freeze()
        max_model_len = args.max_prompt_token_length + max(args.response_length, args.eval_response_length or 0)
        options: dict[str, Any] = {}
        if on_cpu:
            # The CPU build cannot rewind a seeded generator, which chunked prefill needs: schedule prompts whole.
            options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
        if on_cpu and args.vllm_tensor_parallel_size > 1:
            # CPU ranks would talk through shared memory of one name for all runs on the host: let them use gloo.
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False  # ty: ignore[invalid-assignment]
        if args.vllm_tensor_parallel_size > 1:  # vLLM leaves its ranks' sockets
            os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm_")
            sweep(os.environ["VLLM_RPC_BASE_PATH"])
        if on_cpu and args.vllm_enable_prefix_caching:
            options["block_size"] = 32  # only whole blocks are shared, and the default of 128 outgrows most prompts
        max_num_seqs = min(num_requests, 1024)
        if not on_cpu and not args.vllm_enforce_eager and max_num_seqs > 512:  # where vLLM's CUDA graphs end
            options["max_cudagraph_capture_size"] = 16 * math.ceil(max_num_seqs / 16)  # their steps are of 16
        with fenced_rng():
            self.llm = LLM(
                model=args.model_name_or_path,
                revision=args.model_revision,
                dtype=args.model_dtype,
                seed=args.seed,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                tensor_parallel_size=args.vllm_tensor_parallel_size,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                enable_sleep_mode=not on_cpu and args.vllm_sleep != "off",
                enforce_eager=args.vllm_enforce_eager,
                enable_prefix_caching=args.vllm_enable_prefix_caching,
                logprobs_mode="processed_logprobs",  # after temperature: the distribution that was sampled from
                generation_config="vllm",  # else the model's own sampling defaults slip in
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        self.engine = self.llm.llm_engine
        self.worker = self.engine.model_executor.driver_worker.worker
        super().__init__(args, tokenizer)
        self.loads = self.asleep = 0
        self.engine.set_weight_version("-1")

    def sleep(self, level: int = 2) -> None:
        if self.llm.llm_engine.vllm_config.model_config.enable_sleep_mode and not self.asleep:
            with fenced_rng():
                self.llm.sleep(level)
            self.asleep = level

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        with fenced_rng():
            if self.asleep:
                self.llm.wake_up(["weights"])
            self.worker.reload_weights(weights_iterator=named_tensors)
            if self.asleep:
                self.llm.wake_up(["kv_cache"])
        self.version, self.asleep, self.loads = version, 0, self.loads + 1
        core: Any = self.engine.engine_core
        if not core.engine_core.batch_queue:  # else tokens of the weights before are still to come: see step
            self.engine.set_weight_version(str(version))

    @property
    def busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def add(self, request_id: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            stop=[*self.stop_strings, *request.stop] or None,
            include_stop_str_in_output=True,
            stop_token_ids=self.eos_ids,
            detokenize=bool(self.stop_strings or request.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if self.asleep:
            if self.asleep == 2:
                raise RuntimeError("the engine gave its weights back: load_weights first")
            self.llm.wake_up()
            self.asleep = 0
        # The salt keeps prefix-cache blocks of older weights from being found: --load_states loads a version twice
        prompt: Any = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": str(self.loads)}
        self.engine.add_request(request_id, prompt, params)

    def step(self) -> list[tuple[str, Generation]]:
        """One decoding step for all running requests; returns those it finished."""
        finished = []
        for output in self.engine.step():
            response: Any = output.outputs[0]  # ty: ignore[not-subscriptable]
            if not response.token_ids:
                raise RuntimeError(f"vLLM finished request {output.request_id} without a token")
            reason = "stop" if response.finish_reason == "stop" else "length"
            parts = response.weight_versions
            versions = np.repeat([int(part.version) for part in parts], [part.end - part.start for part in parts])
            made = response.token_ids, response.logprobs.logprobs, reason, versions, output.num_cached_tokens or 0
            finished.append((output.request_id, Generation(*made)))
        self.engine.set_weight_version(str(self.version))  # on a GPU a step returns the tokens of the one before
        return finished

    def close(self) -> None:
        """Stop the engine. It also ends the process group it shares with the learner."""
        self.engine.engine_core.shutdown()


class TransformersEngine(Engine):
    """The same by `model.generate`, for machines without vLLM. Slower: rows wait for the longest. A greedy search over
    logprobs - log of exponential noise, the request's own, samples softmax(logits / temperature) (Gumbel-max trick)."""

    def __init__(self, args: Flags, tokenizer: "Tokenizer", world: World, num_requests: int):
        from transformers import AutoModelForCausalLM

        super().__init__(args, tokenizer)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, revision=args.model_revision, dtype=DTYPES[args.model_dtype]
        )
        self.model.to(world.device).eval().requires_grad_(False)
        self.model.generation_config = type(self.model.generation_config)()  # else its sampling defaults slip in
        if args.model_dtype == "bfloat16":  # of strided rows a CPU's product copies the head for each: GiB, a minute
            self.model.get_output_embeddings().register_forward_pre_hook(lambda _, x: (x[0].contiguous(),))
        self.device, self.batch_size = world.device, min(num_requests, 256)
        self.waiting: dict[str, Request] = {}

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = set(parameters)
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise RuntimeError(f"weights not sent to the engine: {sorted(missing)[:5]}")
        self.version = version

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, request_id: str, request: Request) -> None:
        self.waiting[request_id] = request

    @torch.no_grad()
    def step(self) -> list[tuple[str, Generation]]:
        """Sample a batch of waiting requests, the shortest prompts, to their end."""
        ids = sorted(self.waiting, key=lambda i: len(self.waiting[i].prompt_ids))
        alike = {i: (r.stop, r.top_p) for i, r in self.waiting.items()}
        ids = [i for i in ids if alike[i] == alike[ids[0]]][: self.batch_size]
        return list(zip(ids, self._generate_batch([self.waiting.pop(i) for i in ids]), strict=True))

    def _generate_batch(self, requests: list[Request]) -> list[Generation]:
        from transformers import GenerationConfig, LogitsProcessorList
        from transformers.generation.logits_process import TopPLogitsWarper

        width, pad = max(len(r.prompt_ids) for r in requests), self.eos_ids[0]
        padded = [[pad] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests]
        attend = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
        temperatures = torch.tensor([[r.temperature or 1.0] for r in requests], device=self.device)
        greedy = torch.tensor([[r.temperature == 0] for r in requests], device=self.device)
        generators = [torch.Generator().manual_seed(r.seed) for r in requests]
        warper = TopPLogitsWarper(requests[0].top_p) if requests[0].top_p < 1 else None
        sampled: list[torch.Tensor] = []

        def seeded_sample(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            scores = logits.float() / temperatures  # (B, V)
            logprobs = torch.log_softmax(warper(ids, scores) if warper else scores, -1)
            noise = torch.stack([torch.empty(logits.shape[1]).exponential_(generator=g) for g in generators])
            noisy = torch.where(greedy, logprobs, logprobs - noise.to(self.device).log())
            sampled.append(logprobs.gather(1, noisy.argmax(-1, keepdim=True)))
            return noisy

        longest, stop = max(r.max_tokens for r in requests), [*self.stop_strings, *requests[0].stop]
        ends = {"eos_token_id": self.eos_ids, "pad_token_id": pad, "stop_strings": stop or None}
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, **ends)
        sequences = self.model.generate(
            input_ids=torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(attend, device=self.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([seeded_sample]),
            tokenizer=self.tokenizer if stop else None,
        )
        logprobs = torch.cat(sampled, dim=1).tolist()  # (B, T)
        rows = enumerate(sequences.tolist())
        return [self._cut(row[width:], logprobs[i], requests[i].max_tokens, stop) for i, row in rows]

    def _cut(self, ids: list[int], logprobs: list[float], max_tokens: int, stop_strings: Sequence[str]) -> Generation:
        """End a row where it stopped: generate pads finished rows up to the longest of the batch."""
        end = next((j + 1 for j, token in enumerate(ids) if token in self.eos_ids), None)
        for stop in stop_strings:
            lengths = range(1, 1 + (len(ids) if end is None else end))
            end = next((n for n in lengths if stop in self.tokenizer.decode(ids[:n])), end)
        length = min(end or len(ids), max_tokens)
        reason = "stop" if end is not None and end <= max_tokens else "length"
        return Generation(ids[:length], logprobs[:length], reason, [self.version] * length)


def make_engine(args: Flags, tokenizer: "Tokenizer", world: World, num_requests: int) -> Engine:
    """The engine `--rollout_backend` names; `num_requests` is how many responses are wanted at once. All ranks."""
    backends = {"vllm": VLLMEngine, "transformers": TransformersEngine}
    return backends[args.rollout_backend](args, tokenizer, world, num_requests)


# --- Packs: which sequences go together, and attention inside them ----------------------------------------------------

PACK_ATTENTION = "packs"
SHORT_PIECE = 256  # tokens up to which one masked product is faster than one per response (CPU)


def exchange(x: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut dimension `split` into a part for each rank of the group, and put together along `join` what they sent."""
    from torch.distributed._functional_collectives import all_to_all_single  # with a gradient: the way back

    parts = torch.stack(x.chunk(group.size(), split))
    return torch.cat(all_to_all_single(parts, None, None, group).unbind(), join)


def columns(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's columns of (B, T), which are as many on each rank of the group: filled up with zeros."""
    n = -(-x.shape[1] // group.size())
    return torch.nn.functional.pad(x, (0, n * group.size() - x.shape[1])).split(n, 1)[group.rank()]


def all_columns(mine: torch.Tensor, length: int, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, T) of what each rank has for its columns. Every rank computes the same loss from it, so the gradient of a
    part is taken where that part was made, and not added up."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.detach(), group)
    parts[group.rank()] = mine
    return torch.cat(parts, 1)[:, :length].clone()  # what FSDP's forward returns must not be a view


class Layout:
    """Who attends to whom in a pack: `pieces` of (shared tokens, tokens of each segment), one after the other. Every
    segment attends to its piece's shared tokens and causally to itself."""

    def __init__(self, pieces: Sequence[tuple[int, Sequence[int]]], device: torch.device):
        self.pieces = [(0, [shared + own[0]]) if len(own) == 1 else (shared, list(own)) for shared, own in pieces]
        self.length = sum(shared + sum(own) for shared, own in self.pieces)  # tokens
        self.device = device

    @functools.cached_property
    def parts(self) -> list[tuple[int, list[int], list[int]]]:
        """(shared tokens, tokens of each segment, the parts to attend one by one) of each piece."""
        out = []
        for shared, own in self.pieces:
            whole = shared + sum(own)
            out.append((shared, own, [whole] if whole <= SHORT_PIECE or len(own) == 1 else [shared, *own]))
        return out

    @functools.cached_property
    def masks(self) -> dict[tuple[int, ...], torch.Tensor]:
        """(key tokens, query tokens, ...) -> bool mask, for what is_causal cannot say."""
        masks = {}
        for shared, own, parts in self.parts:
            if len(own) > 1 and len(parts) == 1:
                ids = torch.tensor([0] * shared + [i for i, n in enumerate(own, 1) for _ in range(n)])
                masks[shared, *own] = ((ids == 0) | (ids == ids[:, None])).tril()
            elif len(own) > 1:
                masks |= {(shared, n): torch.ones(n, shared + n, dtype=torch.bool).tril(shared) for n in own}
        return masks

    @functools.cached_property
    def block_mask(self) -> Any:
        """The same for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        piece, segment = [], []
        for i, (shared, own) in enumerate(self.pieces):
            piece += [i] * (shared + sum(own))
            segment += [0] * shared + [j for j, n in enumerate(own, 1) for _ in range(n)]
        pieces, segments = torch.tensor(piece, device=self.device), torch.tensor(segment, device=self.device)

        def attends(_batch, _head, q, k):
            same = (segments[k] == 0) | (segments[k] == segments[q])
            return (q >= k) & (pieces[q] == pieces[k]) & same

        n, gpu = len(piece), self.device.type == "cuda"  # compiled it never holds a mask of all pairs
        return create_block_mask(attends, None, None, n, n, device=self.device, _compile=gpu)


@functools.cache
def _flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.cuda.is_available():
        return flex_attention
    return torch.compile(flex_attention, **prepare_compiler())  # beyond its limit the fallback makes all pairs


# Options for flex attention's kernels, the first that run: torch's own take up to 150 KB of shared memory for heads of
# 256 (of 128 in float32), and a 4090, an L40S or a consumer Blackwell has 99
FLEX_OPTIONS: list[dict[str, int]] = [{}]
for _m, _n, _backward in ((64, 32, 32), (32, 16, 16)):
    _blocks = {"fwd_BLOCK_M": _m, "fwd_BLOCK_N": _n} | {f"bwd_BLOCK_{x}": _backward for x in ("M1", "N1", "M2", "N2")}
    FLEX_OPTIONS.append(_blocks | {"fwd_num_stages": 1, "bwd_num_stages": 1})


def fit_flex_attention(config: Any, dtype: torch.dtype, tokens: int, device: torch.device) -> str:
    """Drop FLEX_OPTIONS with which this model's heads and a pack of `tokens` do not run on this GPU, forward and
    backward. Returns "", or why none is left."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads, width = getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None)
    layout, why = Layout([(tokens // 2, [tokens // 4, tokens - tokens // 2 - tokens // 4])], device), "as before"
    while FLEX_OPTIONS:
        try:
            q, k, v = (
                torch.ones(1, n, tokens, width or hidden // heads, dtype=dtype, device=device, requires_grad=True)
                for n in (heads, kv_heads, kv_heads)
            )
            pack_attention(torch.nn.Module(), q, k, v, None, layout=layout, flex=True)[0].sum().backward()
            return ""
        except Exception as error:  # of torch, Inductor, Triton or the driver, each with classes of its own
            why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            FLEX_OPTIONS.pop(0)
    return why


def pack_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    flex: bool | None = None,
    group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (1, heads, T, D) queries inside the pieces of a pack; without a layout transformers' own SDPA.

    On a GPU one flex attention over the pack, on a CPU piece by piece: a mask over the whole would cost a multiple
    (`proof/bench.py learner`). Returns (1, T, heads, D). With a `group` T are this rank's tokens: all tokens of its
    share of the heads come and go by all-to-alls (Ulysses, arXiv:2309.14509), key-value heads repeated if too few.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if group is not None:
        key, value = (repeat_kv(x, group.size() // math.gcd(x.shape[1], group.size())) for x in (key, value))
        query, key, value = (exchange(x, 1, 2, group) for x in (query, key, value))
        length = query.shape[2]
        n = layout.length if layout is not None else length  # the rest is padding
        heads: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
        whole = (x[:, :, :n] for x in (query, key, value))
        mixed, _ = pack_attention(heads, *whole, None, scaling=scaling, layout=layout, flex=flex)
        return exchange(torch.nn.functional.pad(mixed, (0, 0, 0, 0, 0, length - n)), 1, 2, group), None
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if query.is_cuda if flex is None else flex:
        options: dict[str, Any] = {"kernel_options": FLEX_OPTIONS[0], "enable_gqa": query.shape[1] != key.shape[1]}
        mixed = _flex_attention()(query, key, value, block_mask=layout.block_mask, scale=scaling, **options)
        return mixed.transpose(1, 2).contiguous(), None
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, scale=scaling)
    sizes = [n for _, _, parts in layout.parts for n in parts]
    qs, ks, vs = (iter(x.split(sizes, dim=2)) for x in (query, key, value))
    mixed = []
    for shared, own, parts in layout.parts:
        q, k, v = next(qs), next(ks), next(vs)
        if len(parts) == 1:
            mask = layout.masks[shared, *own] if len(own) > 1 else None
            mixed.append(attend(q, k, v, attn_mask=mask, is_causal=mask is None))
            continue
        mixed.append(attend(q, k, v, is_causal=True))
        for n in own:
            both = (torch.cat([k, next(ks)], dim=2), torch.cat([v, next(vs)], dim=2))
            mixed.append(attend(next(qs), *both, attn_mask=layout.masks[shared, n]))
    return torch.cat([x.transpose(1, 2) for x in mixed], dim=1), None


def balance(tokens: Sequence[float], costs: Sequence[float], bins: int, exchanges: int = 1000) -> list[list[int]]:
    """Items (indices) into `bins` with even sums of tokens and of costs; each bin in ascending order. Longest
    processing time first (Graham 1969), then exchanges between the fullest bin and the emptiest while they help."""
    if bins == 1:
        return [list(range(len(tokens)))]
    sizes = np.array([tokens, costs], dtype=np.float64)  # (2, items)
    sizes /= np.maximum(sizes.sum(1, keepdims=True), 1e-9) / bins  # 1.0 is an even share
    sizes[1] = sizes.mean(0)  # few long items cannot be even in both: a cost may be off by a bit more than tokens
    owner, loads = np.zeros(len(tokens), dtype=np.int64), np.zeros((2, bins))
    for i in np.argsort(-sizes.sum(0), kind="stable"):
        owner[i] = np.maximum(loads[0] + sizes[0, i], loads[1] + sizes[1, i]).argmin()
        loads[:, owner[i]] += sizes[:, i]
    for _ in range(exchanges):
        worst = int(loads.max(0).argmax())
        if loads.max() <= 1.002:
            break
        some = np.argsort(loads.max(0), kind="stable")[:64]  # with all, 2,048 bins of 8 items took seconds
        some = np.sort(some[some != worst])
        mine, others = np.flatnonzero(owner == worst)[:256], np.flatnonzero(np.isin(owner, some))
        # give item i and take item j (or nothing): the new loads of both bins
        taken, to = np.pad(sizes[:, others], ((0, 0), (0, len(some)))), np.concatenate([owner[others], some])
        delta = sizes[:, mine, None] - taken[:, None, :]  # (2, mine, others)
        after = np.maximum(loads[:, worst, None, None] - delta, loads[:, to][:, None, :] + delta).max(0)
        i, j = np.unravel_index(after.argmin(), after.shape)
        if after[i, j] >= loads.max() - 1e-9:
            break
        loads[:, worst] -= delta[:, i, j]
        loads[:, to[j]] += delta[:, i, j]
        owner[mine[i]] = to[j]
        if j < len(others):
            owner[others[j]] = worst
    return [np.flatnonzero(owner == b).tolist() for b in range(bins)]


def pack_bins(tokens: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Items (indices) into as few bins of at most `budget` tokens as best-fit-decreasing needs, then evened out where
    that keeps the budget; costly bins first. An item above the budget, or budget 0, is a bin of its own."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        at = bisect.bisect_left(rooms, (tokens[i], 0))
        left, b = rooms.pop(at) if at < len(rooms) else (budget, len(bins))
        if b == len(bins):
            bins.append([])
        bins[b].append(i)
        bisect.insort(rooms, (left - tokens[i], b))
    if len(bins) > 1 and budget:
        even = balance(tokens, costs, len(bins), exchanges=0)
        if all(sum(tokens[i] for i in b) <= budget for b in even):
            bins = even
    return sorted((sorted(b) for b in bins), key=lambda b: -sum(costs[i] for i in b))


def attention_width(config: Any) -> int:
    """Layers x heads x head dimension: a (query, key) pair costs 4 times as many operations in a forward."""
    heads = config.num_attention_heads
    return config.num_hidden_layers * heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)


def matmul_parameters(model: Any) -> tuple[int, int]:
    """Weights of matrices every token is multiplied with, and of the head, which only response tokens meet."""
    head = model.get_output_embeddings().weight
    skip = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} | {id(head)}
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in skip), head.numel()


# --- Sharding, weights, checkpoints -----------------------------------------------------------------------------------


def check_models(args: Flags) -> None:
    """Raise UserError where prompts, responses, learners or a teacher do not fit the model: see parts/fits.py."""
    from scripts.parts import fits

    fits.check(args)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def within_window(config: Any, args: Flags) -> bool:
    """Whether a token sees all that is before it: where a window is shorter, it takes the model's own masks."""
    window = getattr(config, "sliding_window", None) or math.inf
    return args.max_prompt_token_length + args.response_length <= window


def load_causal_lm(args: Flags) -> Any:
    """The Hugging Face causal LM with dropout off and no cache, still unsharded, in its checkpoint's dtype."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    # each pack has a layout of its own, for which a compiled layer would be compiled again
    attention = torch.compiler.disable(pack_attention) if args.compile_layers else pack_attention
    AttentionInterface.register(PACK_ATTENTION, attention)
    source = {"revision": args.model_revision, "attn_implementation": args.attn_implementation}
    model: Any = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype="auto", **source)
    if args.attn_implementation == "sdpa" and model._supports_attention_backend and within_window(model.config, args):
        model.set_attn_implementation(PACK_ATTENTION)
    for module in model.modules():  # old and new logprobs must agree; eval() would also switch checkpointing off
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


def checkpoint_layers(model: Any, part: str) -> None:
    """Recompute each decoder layer in backward, or its MLP alone, whose wide activations are most of what is kept."""
    from torch.utils.checkpoint import checkpoint

    if part == "layer":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    mlps: list[Any] = [getattr(layer, "mlp", None) for layer in blocks_of(model)]
    need(all(mlps) and bool(mlps), f"--gradient_checkpointing_part mlp: {type(model).__name__} has none: take layer")
    for mlp in mlps:
        mlp.forward = functools.partial(checkpoint, mlp.forward, use_reentrant=False)


def prepare_compiler() -> dict[str, Any]:
    """Inductor keeps precompiled C++ headers where its import finds the temporary directory: in its cache, then. And
    more graphs of a function than torch's 8; by options too, which it returns: a GPU's backward sees no setting."""
    setattr(torch._dynamo.config, "recompile_limit", 64)  # noqa: B010
    tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.makedirs(tempfile.tempdir, exist_ok=True)
    importlib.import_module("torch._inductor.codecache")  # asks where that is
    tempfile.tempdir = None
    return {"dynamic": True, "recompile_limit": 64}


def compile_layers(model: Any) -> bool:
    """Have torch.compile fuse what stands between the matrix products of each decoder layer. Before FSDP and below
    checkpointing, both of which stay outside. Any number of tokens is one graph; attention over a pack is left out.
    Raises UserError where the model does not say what its layers are."""
    layers = blocks_of(model)
    need(bool(layers), f"--compile_layers: {type(model).__name__} does not name its layers: leave the flag out")
    options = prepare_compiler()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)
    return True


def blocks_of(model: Any) -> list[Any]:
    """The decoder layers."""
    names = set(model._no_split_modules or ())
    return [m for m in model.modules() if type(m).__name__ in names]


@torch.no_grad()
def dither(weight: torch.Tensor, seed: int) -> None:
    """Move each float32 weight that is a bfloat16 number to a random place among those that round to it, in place.

    In the middle of its rounding interval a weight takes hundreds of updates of the learning rate's size to reach an
    end, and until then nothing that computes in bfloat16 has changed; so the share that has moved on grows with the
    drift, from the first update on. Rounded to nearest, weight + offset is the same number for offsets of -32767 to
    32767 units of the 16 bits that go, so the policy is bit for bit what it was. Zeros stay, and so do weights between
    two bfloat16 numbers (those of float32 checkpoints).
    """
    bits = weight.view(torch.int32).view(-1)
    raw = np.random.PCG64(seed).random_raw(bits.numel() // 4 + 1).view(np.int16)[: bits.numel()]
    offsets = torch.from_numpy(raw).int().clamp_(min=-32767)  # -32768 is the tie between two numbers
    bits += offsets * ((bits & 0xFFFF == 0) & (bits << 1 != 0))


def shard_model(module: torch.nn.Module, model: Any, args: Flags, world: World) -> Any:
    """FSDP2 over all ranks: `--model_dtype` compute, float32 master weights and gradient reduction; what is frozen lies
    in memory in `--model_dtype`. `module` is the wrapper whose forward is called, `model` the causal LM inside it.
    deepspeed_stage 0 replicates (a mesh of shard size 1), 2 shards gradients and optimizer state, 3 also frees
    parameters after forward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape, names = (world.size, 1) if args.deepspeed_stage == 0 else (1, world.size), ("replicate", "shard")
    mesh = _once(dist.group.WORLD, dist.init_device_mesh, world.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.model_dtype], reduce_dtype=torch.float32)
    mesh = mesh if args.deepspeed_stage == 0 else mesh["shard"]
    waiting = {id(p): name for name, p in model.named_parameters()}

    def shard(part: Any) -> Any:
        for p in part.parameters():  # one block at a time: the host never holds all of float32
            if id(p) in waiting:
                name = waiting.pop(id(p))
                p.data = p.data.to(torch.float32 if p.requires_grad else DTYPES[args.model_dtype])
                if p.requires_grad and args.dither_master_weights and args.model_dtype == "bfloat16":
                    dither(p.data, derive_seed(args.seed, name))
        for buffer in part.buffers():
            buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
        return fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=args.deepspeed_stage == 3)

    for layer in blocks_of(model):
        shard(layer)
    return shard(module)


def gradient_sync(module: Any, args: ModelFlags, last: bool) -> None:
    """Say before a backward whether it is the `last` of its optimizer step. Replicated ranks add up locally and reduce
    once; sharded ranks reduce every micro-batch to keep memory down."""
    if args.deepspeed_stage == 0:
        module.set_requires_gradient_sync(last)
    if args.deepspeed_stage != 3:
        module.set_reshard_after_backward(last)


def add_adapters(model: Any, args: Flags) -> None:
    """Freeze the model and give each matrix of --lora_target_modules an adapter, by peft. A is random by seed and name
    (peft's uniform(-1, 1) / sqrt(inputs)), B zero: the policy is the model's, bit for bit. Raises UserError."""
    from peft import LoraConfig, inject_adapter_in_model

    names: Any = args.lora_target_modules
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules="all-linear" if names == ["all-linear"] else names,
        base_model_name_or_path=args.model_name_or_path,
        revision=args.model_revision,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        args.refuse(f"--lora_target_modules: {str(error).strip().splitlines()[0]}")
    inside = {module for layer in blocks_of(model) for module in layer.modules()}
    model.requires_grad_(False)
    for name, module in adapters(model).items():
        if module not in inside or not isinstance(module.base_layer, torch.nn.Linear):
            args.refuse(f"--lora_target_modules: {name} is no matrix of a layer, take all-linear or names of such")
        generator = torch.Generator().manual_seed(derive_seed(args.seed, name))
        for half in (module.lora_A, module.lora_B):
            half.requires_grad_(True).float()
        torch.nn.init.kaiming_uniform_(module.lora_A["default"].weight, math.sqrt(5), generator=generator)


def adapters(model: Any) -> dict[str, Any]:
    """The layers of peft that have an adapter, by the checkpoint name of the weight it changes."""
    return {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def adapter_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(peft's name, whole float32 tensor) of A and B of each adapter. All ranks."""
    pairs = ((name.removesuffix("weight"), half, m) for name, m in adapters(model).items() for half in ("A", "B"))
    named = [(f"base_model.model.{n}lora_{h}.weight", getattr(m, f"lora_{h}")["default"].weight) for n, h, m in pairs]
    yield from _whole(named, torch.float32)


@contextlib.contextmanager
def without_adapters(model: Any):
    """The model as it was before training, where it has adapters."""
    layers = adapters(model).values()
    for layer in layers:
        layer._disable_adapters = True
    yield
    for layer in layers:
        layer._disable_adapters = False


@contextlib.contextmanager
@torch.no_grad()
def trial_adapters(policy: "grpo.Policy", seed: int):
    """Noise in place of every adapter's B, which changes each matrix by TRIAL of its size: see grpo.check_trial."""
    shard_again(policy)
    kept = []
    for name, layer in adapters(policy.model).items():
        a, b = layer.lora_A["default"].weight, shard_of(layer.lora_B["default"].weight)
        size = shard_of(layer.base_layer.weight).float().square().mean().sqrt()
        size *= TRIAL * math.sqrt(3 * a.shape[1] / a.shape[0]) / layer.scaling["default"]  # A's elements: 1 / sqrt(3 n)
        kept.append((b, b.clone()))
        generator = torch.Generator().manual_seed(derive_seed(seed, name, "trial"))
        b.copy_(torch.randn(b.shape, generator=generator)).mul_(size)
    yield
    shard_again(policy)
    for b, before in kept:
        b.copy_(before)


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, parameter) of all of a model's weights but adapters. A tied head has its own name too: vLLM's
    CPU backend keeps a packed copy that goes stale otherwise."""
    parameters = {n.replace(".base_layer.", "."): p for n, p in model.named_parameters() if ".lora_" not in n}
    yield from parameters.items()
    if "lm_head.weight" not in parameters and model.get_output_embeddings() is not None:
        yield "lm_head.weight", model.get_input_embeddings().weight


@torch.no_grad()
def shard_again(module: torch.nn.Module) -> None:
    """Make parameters() this rank's shards of the master weights: after a forward without backward FSDP keeps whole
    copies in compute dtype in their place, which it drops later, with whatever was written to them."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def full_weights(policy: "grpo.Policy", dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, whole tensor in `dtype`) of named_weights(policy.model), one at a time, adapters merged
    into it. All ranks must exhaust it in lock-step."""
    shard_again(policy)
    adapted, halves = adapters(policy.model), [tensor for _, tensor in adapter_weights(policy.model)]
    low = dict(zip(adapted, zip(halves[::2], halves[1::2], strict=True), strict=True))  # A, B
    buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
    for name, weight in named_weights(policy.model):
        buckets[-1].append((name, weight))
        if sum(w.numel() for _, w in buckets[-1]) * dtype.itemsize >= GATHER_BYTES:
            buckets.append([])
    for bucket in buckets:
        for name, weight in _whole(bucket, dtype):
            if name in adapted:
                a, b = low[name]
                weight = (weight.float() + adapted[name].scaling["default"] * (b @ a)).to(dtype)
            yield name, weight


def _whole(named: Sequence[tuple[str, Any]], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of `named` whole by one collective: shards in `dtype`, their rows filled up to the first rank's."""
    mesh: Any = getattr(named[0][1], "device_mesh", None) if named else None  # None: nothing is sharded
    ranks = mesh.size(-1) if mesh is not None else 1
    if ranks == 1:
        yield from ((name, shard_of(weight).to(dtype)) for name, weight in named)
        return
    shards = []
    for _, weight in named:
        mine = shard_of(weight).to(dtype).flatten()
        rows = -(-len(weight) // ranks)
        shards.append(torch.nn.functional.pad(mine, (0, rows * (weight.numel() // len(weight)) - len(mine))))
    sizes = [len(shard) for shard in shards]
    everyone = torch.empty(ranks * sum(sizes), dtype=dtype, device=shards[0].device)
    group, mine = mesh.get_group(-1), torch.cat(shards)
    dist.all_gather_single(everyone.view(torch.uint8), mine.view(torch.uint8), group)
    for (name, weight), part in zip(named, everyone.view(ranks, -1).split(sizes, 1), strict=True):
        yield name, part.reshape(-1, *weight.shape[1:])[: len(weight)]


def save_model(
    policy: "grpo.Policy", tokenizer: "Tokenizer", path: Path, args: Flags, world: World, merge: bool = False
) -> None:
    """Write the model in Hugging Face format (all ranks gather, rank 0 writes; written aside, then renamed). Where it
    has adapters, and not to `merge`, these are written, in peft's; with --lora_merge PATH_merged has the model too.
    What training does not change is the start model's own, byte for byte: see scripts/parts/start_files.py."""
    model, state, dtype = policy.model, {}, DTYPES[args.model_dtype]
    tied, adapted = model.config.tie_word_embeddings, not merge and adapters(model) != {}
    shard_again(policy)
    for name, tensor in adapter_weights(model) if adapted else full_weights(policy, dtype):  # all ranks
        if world.is_main and not (tied and name == "lm_head.weight"):
            state[name] = tensor.to("cpu", copy=True)
    if world.is_main:
        temporary = path.with_name(path.name + ".tmp")  # readers never see half a save
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if adapted:
            from safetensors.torch import save_file

            save_file(state, temporary / "adapter_model.safetensors", {"format": "pt"})
            model.peft_config["default"].save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        else:
            _write_model(model, state, tokenizer, temporary, args)
        for file in temporary.iterdir():  # safetensors writes files that only their owner may read
            if file.is_file():
                shutil.copymode(temporary / "tokenizer_config.json", file)
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    dist.barrier()
    if adapted and args.lora_merge:
        save_model(policy, tokenizer, path.with_name(f"{path.name}_merged"), args, world, merge=True)


def _write_model(model: Any, state: dict[str, Any], tokenizer: "Tokenizer", path: Path, args: Flags) -> None:
    from transformers import GenerationConfig

    from scripts.parts import start_files

    persistent = model.state_dict().keys()
    state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
    # A start model's own sampling defaults stay: who compares it with its trained self wants one difference.
    # Where it has none, they are those that were trained: softmax(logits / temperature).
    how: dict[str, Any] = {"do_sample": True, "temperature": args.temperature, "top_p": args.vllm_top_p}
    how |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**how)
    model.save_pretrained(path, state_dict=state, max_shard_size="5GB")
    tokenizer.save_pretrained(path)
    commit = getattr(model.config, "_commit_hash", None)
    tied = bool(model.config.tie_word_embeddings)
    eos_ids = eos_token_ids(args, tokenizer, commit)
    start_files.keep(path, args.model_name_or_path, commit or args.model_revision, args.model_dtype, tied, eos_ids)


def push_model(run_dir: Path) -> None:
    """Have parts/push_to_hub.py upload run_dir/model, on rank 0, after all else. A failure is told with the command
    that tries again, and is none of the run: torchrun would train once more."""
    command = program("parts/push_to_hub.py", run_dir)
    upload = subprocess.Popen([*command, "--end_with_stdin"], stdin=subprocess.PIPE)
    signal.signal(signal.SIGTERM, lambda *_: upload.terminate())  # nothing is left to save
    if status := upload.wait():
        told = f"the upload ended with status {status}; the model is complete in {run_dir / 'model'}"
        again = f"WARNING: to upload it: {shlex.join(command)}"
        print(f"WARNING: --push_to_hub: {told}\n{again}", file=sys.stderr, flush=True)


class Checkpoints:
    """Resumable checkpoints in run_dir/checkpoints/step_N, sharded and written in the background.

    A checkpoint is written as step_N.tmp and, once on disk, made step_N by parts/checkpoints.py: whatever kills the
    run, a step_N is whole. Where one cannot be written, on a full disk for instance, that is a warning, and the one
    before stays. All ranks construct it and call its methods.
    """

    def __init__(self, run_dir: Path, keep: int, world: World):
        self.root, self.keep, self.world = run_dir / "checkpoints", keep, world
        self.group = dist.new_group(backend="gloo")  # the background must not mix into the learners' collectives
        self.thread: threading.Thread | None = None
        for old in self.root.glob("*.tmp") if world.is_main else ():  # of a run that was killed
            shutil.rmtree(old, ignore_errors=True)

    def save(self, step: int, modules: Modules, optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Start to write everything a resume needs; returns once it is copied, and training may go on. The optimizer is
        that of modules["policy"]. `extra` is plain data, each rank's own; its random state is added."""
        import torch.distributed.checkpoint as dcp

        self.wait()
        temporary, problem = self.root / f"step_{step}.tmp", ""
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            with (temporary / f"rank_{self.world.rank}.pt").open("wb") as file:
                torch.save(extra | {"rng": rng_state()}, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch.save has RuntimeErrors for a full disk
            problem = str(error)
        if problem := max(all_gather(problem, self.world)):  # nobody goes on alone
            return self._failed(temporary, problem)
        state = _learner_state(modules, optimizer)
        writer = dcp.filesystem._FileSystemWriter(temporary / "state", per_thread_copy_ahead=0)  # else CUDA on GPU 0
        writing = dcp.async_save(state, storage_writer=writer, process_group=self.group)
        self.thread = threading.Thread(target=self._finish, args=(writing, temporary))
        self.thread.start()

    def wait(self) -> None:
        """Until the checkpoint being written is on disk, or has failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _finish(self, writing: Future, temporary: Path) -> None:
        from torch.distributed.checkpoint import CheckpointException

        try:
            writing.result()  # of all ranks
            publish = "parts/checkpoints.py", temporary, "--publish", self.keep
            problem = run_program(*publish, seconds=86_400.0) if self.world.is_main else ""
        except (OSError, CheckpointException) as error:
            problem = str(error).strip().splitlines()[-1]
        if problem:
            self._failed(temporary, problem)

    def _failed(self, temporary: Path, problem: str) -> None:
        if self.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            print(f"WARNING: checkpoint {temporary.stem} was not written, the one before stays: {problem}", flush=True)


def newest_checkpoint(run_dir: Path, world: World, before: float = math.inf) -> Path | None:
    """The newest undamaged checkpoint, of a step below `before`; damaged ones are reported and skipped. All ranks."""

    def find() -> str:
        command = program("parts/checkpoints.py", run_dir, "--newest", "--before", before)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(done.stderr, end="", flush=True)
        return done.stdout.strip()

    return Path(found) if (found := on_main(find, world)) else None


def _learner_state(modules: Modules, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    trained = StateDictOptions(ignore_frozen_params=True)
    policy, optimizer_state = get_state_dict(modules["policy"], optimizer, options=trained)
    others = {name: get_model_state_dict(module) for name, module in modules.items() if name != "policy"}
    return {"policy": policy, "optimizer": optimizer_state} | others


def load_checkpoint(path: Path, modules: Modules, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Load a checkpoint into modules and optimizer; returns rank 0's `extra` and restores the random state. The number
    of ranks may have changed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

    state = _learner_state(modules, optimizer)
    groups = state["optimizer"].pop("param_groups")  # the flags of now count, which --resume_anyway may have changed
    dcp.load(state, checkpoint_id=path / "state")
    set_optimizer_state_dict(modules["policy"], optimizer, state["optimizer"] | {"param_groups": groups})
    for name, module in modules.items():
        whole = not adapters(module)  # else what is frozen is not in it
        set_model_state_dict(module, state[name], options=StateDictOptions(strict=whole))
    mine = path / f"rank_{world.rank}.pt"
    extra = torch.load(path / "rank_0.pt", weights_only=True)
    set_rng_state((torch.load(mine, weights_only=True) if mine.exists() else extra)["rng"])
    del extra["rng"]
    return extra


def take_state(
    args: Flags, step: int, policy: "grpo.Policy", optimizer: torch.optim.Optimizer, engine: Engine | None, world: World
) -> None:
    """With --load_states: the other run's weights and moments after `step` into learner and engine; step 0 is the start
    model. All ranks. Raises UserError where there is no such state."""
    path, converted = Path(args.load_states) / "checkpoints" / f"step_{step}", args.run_dir / "state.tmp"
    if not args.load_states or step == 0:
        return
    if not path.is_dir():
        path, more = converted, (args.load_states, step, converted, "--model", args.model_name_or_path)
        need(not (problem := on_main(lambda: run_program("align/states.py", *more, seconds=1500.0), world)), problem)
    shard_again(policy)
    load_checkpoint(path, {"policy": policy}, optimizer, world)
    if engine is not None:
        engine.load_weights(full_weights(policy, DTYPES[args.model_dtype]), version=step)
    dist.barrier()  # all have read it
    shutil.rmtree(converted, ignore_errors=True)


class Stop:
    """What SIGTERM and Ctrl-C do: during a step the first lets it end, another ends the process; at any other time the
    first does. A thread answers at once, whatever the main thread computes: Python would run a handler after it."""

    def __init__(self):
        self.during = ""  # what the first one lets end, for a person; "": nothing
        self.asked = 0  # the signal's number

    def listen(self) -> None:
        """From now on; the first rank of a node says on stderr what happens next, and sweeps up after torchrun."""
        for directory in Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents:
            if directory.name.startswith("torchelastic_") and os.environ.get("LOCAL_RANK") == "0":  # not a --log-dir
                # when torchrun, which restarts us, is gone
                sweep(directory, f"while kill -0 {os.getppid()} 2>/dev/null; do sleep 1; done")
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(number) != signal.SIG_IGN:  # of a shell's background job, or nohup
                signal.signal(number, lambda *_: None)  # its number comes through the pipe
        threading.Thread(target=self._answer, args=(reader,), daemon=True).start()

    def _answer(self, reader: int) -> None:
        first, speaks = -math.inf, os.environ.get("LOCAL_RANK", "0") == "0"
        while True:
            number = os.read(reader, 1)[0]
            if number not in (signal.SIGTERM, signal.SIGINT) or time.monotonic() - first < 1.0:
                continue  # the same again: job queues tell launcher and ranks, and the launcher tells the ranks
            words = f"finishing {self.during}; once more to stop now"
            now = self.asked or not self.during
            if speaks:
                os.write(2, f"{signal.Signals(number).name}: {'stopping now' if now else words}\n".encode())
            if now:
                rewards.close()  # all other processes end when they find that we are gone
                os._exit(128 + number)
            self.asked, first = number, time.monotonic()

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        """Each step in turn, during which `stop_asked` is what a signal does."""
        try:
            for step in steps:
                self.during = f"step {step}, then a checkpoint"
                yield step
        finally:
            self.during = "what is left to write"


STOP = Stop()


def stop_asked(world: World) -> str:
    """The name of the signal by which any rank was asked to stop, else "". All ranks, which get the same answer."""
    number = int(all_reduce([float(STOP.asked)], world, dist.ReduceOp.MAX)[0])
    return signal.Signals(number).name if number else ""


# --- Traces and dumps: what was sampled and what the learner made of it -----------------------------------------------

DUMP_SCHEMA = 2
LEARNER_COLUMNS = ("old_logprobs", "ref_logprobs", "new_logprobs")  # a value per response token


def record_step(step: "grpo.Step", packing: str, policy: "grpo.Policy", args: Flags, world: World) -> None:
    """Append the rollouts of a grpo.Step to rollouts.jsonl, a row each in stream order (--save_traces). All ranks. At a
    step of --dump_steps the rows of what was trained on also have the LEARNER_COLUMNS (the new logprobs are of the last
    pass, before its optimizer step), and dumps/step_NNNNNN.json has what else a replay needs: see append_rows."""
    dumping = args.dump_steps == "all" or (args.dump_steps != "" and step.number % int(args.dump_steps) == 0)
    if not (dumping or args.save_traces):
        return
    computed: dict[tuple[int, int], dict[str, Any]] = {}
    for batch in (b for mini_batch in step.batches for b in mini_batch if leads(args, world)):
        there = {name: x for name in LEARNER_COLUMNS if dumping and (x := getattr(batch, name)) is not None}
        for i, r in enumerate(batch.rollouts, start=1):
            columns = {name: x[batch.seq_ids == i].tolist() for name, x in there.items()}
            computed[r.position, r.sample] = columns | {"advantage": r.advantage}  # which --kl_in_reward makes anew
    computed = {name: columns for part in all_gather(computed, world) for name, columns in part.items()}
    lines = []
    for r in (r for group in step.sampled for r in group):
        row = rollout_row(r, step.number) | computed.get((r.position, r.sample), {})
        lines.append((r.position, r.sample, json.dumps(row, default=str) + "\n"))
    names = [[[[(r.position, r.sample) for r in piece] for piece in pack] for pack in m] for m in step.packs]
    everyone = all_gather((lines, [group[0].position for group in step.groups], names), world)
    dump: dict[str, Any] = {}
    if dumping:
        dump |= {"training_step": step.number, "how": packing, "weights": weights_hash(policy, world)}
        dump |= {"positions": sorted(position for _, part, _ in everyone for position in part)}
        learners = [part for _, _, part in everyone[:: args.sequence_parallel_size]]
        dump |= {"packs": list(zip(*learners, strict=True))}
    if world.is_main:
        lines = sorted(line for part, _, _ in everyone for line in part)
        append_rows(args.run_dir, [line for *_, line in lines], dump)


def rollout_row(r: Rollout, step: int) -> dict[str, Any]:
    """A rollout as a row of rollouts.jsonl. NaN is null; all else comes back to the last bit, since a float is written
    with the digits that tell it from any other."""
    row: dict[str, Any] = {"training_step": step} | vars(r) | {name: getattr(r, name).tolist() for name in COLUMNS}
    row |= {"prompt": r.prompt.text, "prompt_ids": r.prompt.token_ids}
    row |= {"ground_truths": r.prompt.ground_truths, "verifiers": r.prompt.verifiers}
    row["results"] = [asdict(result) for result in r.results]
    del row["scoring"]
    for part in (row, *row["results"]):
        part |= {name: None for name in ("score", "outcome", "verifiable") if math.isnan(part.get(name, 0.0))}
    return row


def rollouts_of(rows: Sequence[dict[str, Any]]) -> list[Rollout]:
    """The rollouts of rows of rollouts.jsonl, scored, without labels and verdicts."""
    names = [f for f in Rollout.__dataclass_fields__ if f not in ("prompt", "scoring", "results")]
    prompts: dict[int, Prompt] = {}
    rollouts = []
    for row in rows:
        prompt = Prompt(row["position"], tuple(row["prompt_ids"]), row.get("prompt", ""), (), ())
        known: dict[str, Any] = {n: math.nan if row[n] is None else row[n] for n in names if n in row}
        rollouts.append(Rollout(prompts.setdefault(row["position"], prompt), **known))
    return rollouts


def append_rows(run_dir: Path, lines: Sequence[str], dump: dict[str, Any]) -> None:
    """Append lines to rollouts.jsonl. `dump`, unless empty, describes them as a dumped step, in dumps/: training_step;
    how, the way of packing; weights, their hash after the step; positions of the batch's groups; packs, by mini-batch,
    learner, pack and piece, of (position, sample). Beside it, their bytes' place in rollouts.jsonl and sha256."""
    data = "".join(lines).encode()
    with (run_dir / "rollouts.jsonl").open("ab") as file:
        start = file.tell()
        file.write(data)
    if dump:
        path = run_dir / "dumps" / f"step_{dump['training_step']:06d}.json"
        path.parent.mkdir(exist_ok=True)
        rows = {"start": start, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        path.with_suffix(".tmp").write_text(json.dumps({"schema_version": DUMP_SCHEMA} | dump | {"rows": rows}))
        os.replace(path.with_suffix(".tmp"), path)


def read_dump(run_dir: Path, step: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a dumped step and its description. Raises UserError if they are missing, damaged or of another
    schema."""
    path, traces = run_dir / "dumps" / f"step_{step:06d}.json", run_dir / "rollouts.jsonl"
    there = path.is_file() and traces.is_file()
    need(there, f"{run_dir} has no dump of step {step}: is it a run's directory, and was --dump_steps set?")
    dump = json.loads(path.read_text())
    schema = dump["schema_version"]
    need(schema == DUMP_SCHEMA, f"{path}: schema {schema}, this version reads {DUMP_SCHEMA}")
    with traces.open("rb") as file:
        file.seek(dump["rows"]["start"])
        data = file.read(dump["rows"]["bytes"])
    whole = hashlib.sha256(data).hexdigest() == dump["rows"]["sha256"]
    need(whole, f"{traces} is damaged: the sha256 of the rows of step {step} is not the one in {path.name}")
    return [json.loads(line) for line in data.splitlines()], dump


def weights_hash(policy: "grpo.Policy", world: World) -> str:
    """sha256 of all weights in float32, in the order of full_weights; "" on ranks other than 0. All ranks."""
    digest = hashlib.sha256()
    for name, tensor in full_weights(policy, torch.float32):
        if world.is_main:
            digest.update(name.encode())
            copy = tensor.to("cpu", copy=True).contiguous()  # numpy() would pin the storage, which FSDP resizes
            digest.update(copy.view(torch.uint8).numpy())
    return digest.hexdigest() if world.is_main else ""


# --- Metrics and report -----------------------------------------------------------------------------------------------


class Metrics:
    """Numbers of one step on one rank as (sum, count), so that averages over ranks weigh every sample alike."""

    def __init__(self):
        self.sums: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0.0])
        self.totals: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.timer = Timer()  # of phases whose mean over ranks is wanted

    def count(self, name: str, number: float) -> None:
        """Add to a number that is summed over ranks, not averaged."""
        self.totals[name] += number

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor = 1.0) -> None:
        """Add `total` over `count` samples; tensors are read only in `reduce`, so this never waits for a GPU."""
        entry = self.sums[name]
        entry[0] = entry[0] + (total.detach().double() if isinstance(total, torch.Tensor) else total)
        entry[1] = entry[1] + (count.detach().double() if isinstance(count, torch.Tensor) else count)

    def add_all(self, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Mean, and `_min` / `_max`, of a list or an array."""
        if len(values):
            self.add(name, float(np.sum(values)), len(values))
            self.extreme(f"{name}_min", float(np.min(values)))
            self.extreme(f"{name}_max", float(np.max(values)))

    def sample(self, name: str, values: Sequence[float]) -> None:
        """Values of which the median and the 99th percentile are wanted, `name`_p50 and _p99."""
        self.samples[name] += values

    def extreme(self, name: str, value: float) -> None:
        """Keep the smallest value of a `..._min` name, the largest of a `..._max` name, over calls and ranks."""
        best = min if name.endswith("_min") else max
        self.extremes[name] = best(self.extremes.get(name, value), value)

    def reduce(self, world: World) -> dict[str, float]:
        """Averages over all ranks, the same dict on each. All ranks must call it; their keys may differ."""
        tensors = [x for pair in self.sums.values() for x in pair if isinstance(x, torch.Tensor)]
        read = iter(torch.stack(tensors).tolist() if tensors else ())  # one wait for a GPU
        sums = {k: tuple(next(read) if isinstance(x, torch.Tensor) else x for x in p) for k, p in self.sums.items()}
        sums |= {name: (seconds, 1.0) for name, seconds in self.timer.seconds.items()}
        mine = (sums, dict(self.totals), self.extremes, dict(self.samples))
        merged = Metrics()
        for other_sums, other_totals, other_extremes, other_samples in all_gather(mine, world):
            for name, values in other_samples.items():
                merged.sample(name, values)
            for name, number in other_totals.items():
                merged.count(name, number)
            for name, (total, count) in other_sums.items():
                merged.add(name, total, count)
            for name, value in other_extremes.items():
                merged.extreme(name, value)
        out = {k: s / c for k, (s, c) in merged.sums.items() if c}
        for name, values in merged.samples.items():
            out |= {f"{name}_p{q}": float(np.percentile(values, q)) for q in (50, 99)}
        return out | dict(merged.totals) | merged.extremes  # a defaultdict would infect the result


class GapError(RuntimeError):
    """Engine and learner disagree about the probability of tokens the engine sampled."""


class Gap:
    """Running comparison of learner and engine logprobs of sampled tokens: the gauge of the weight sync."""

    def __init__(self):
        self.parts: list[torch.Tensor] = []  # n, |d|, d^2, k3, rho, rho^2, max |d| of each batch, read only in `check`

    @torch.no_grad()
    def add(self, logprobs: torch.Tensor, batch: "grpo.Batch") -> None:
        """Take in a batch's learner logprobs (B, T) under the weights that sampled it."""
        d = (logprobs.detach() - batch.vllm_logprobs).flatten()[batch.places].double()  # (n,)
        rho = d.exp()
        columns = (torch.ones_like(d), d.abs(), d.square(), rho - 1 - d, rho, rho.square())
        if len(d):  # a tool may have made all tokens
            self.parts.append(torch.stack([*(c.sum() for c in columns), d.abs().max()]))

    def check(self, args: "grpo.Args", world: World, when: str) -> dict[str, float]:
        """The gap over all ranks as metrics. All ranks. Raises GapError beyond --max_logprob_gap."""
        sums, most = [0.0] * 6, 0.0
        for *row, largest in torch.stack(self.parts).tolist() if self.parts and leads(args, world) else ():
            sums, most = [a + b for a, b in zip(sums, row, strict=True)], max(most, largest)
        n, absolute, squared, k3, rho, rho_sq = all_reduce(sums, world)
        largest = all_reduce([most], world, dist.ReduceOp.MAX)[0]
        if n == 0:
            return {}
        mean = absolute / n
        out = {
            "debug/vllm_vs_local_logprob_diff_mean": mean,
            "debug/vllm_vs_local_logprob_diff_max": largest,
            "debug/vllm_vs_local_logprob_diff_std": math.sqrt(max(squared / n - mean**2, 0.0)),
            "debug/vllm_local_reverse_kl": k3 / n,
            "val/rho": rho / n,
            "val/rho_se": math.sqrt(max(rho_sq / n - (rho / n) ** 2, 0.0) / n),
        }
        if args.max_logprob_gap and not mean <= args.max_logprob_gap:
            cause = (
                "they never held the same weights: another revision or dtype, a head or embedding the engine did not "
                "take, or a model whose logits are scaled or capped after its head"
                if when == "before the first rollout"
                else "weights did not arrive (a tied lm_head that kept its old copy is the usual one), or learner and "
                "engine diverged numerically: try --model_dtype float32; --load_batches of others: --max_logprob_gap 0"
            )
            raise GapError(
                f"{when}: mean |learner - engine| logprob {mean:.3g} (max {largest:.3g}, mean ratio {rho / n:.3g}) "
                f"over {n:.0f} sampled tokens exceeds --max_logprob_gap {args.max_logprob_gap}. Likely cause: {cause}."
            )
        return out


def note_rollouts(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics) -> None:
    """Scores, verifier rates, lengths and stop rates over all the rollouts given, trained on or not."""
    note_verifiers(rollouts, args, metrics, "objective")
    note_turns(rollouts, metrics)
    found: dict[str, Counter[str]] = defaultdict(Counter)  # verifier -> status -> results
    for r in rollouts:
        for name, result in zip(r.prompt.verifiers, r.results, strict=bool(r.results)):
            found[name][result.status] += 1
            metrics.sample(f"time/reward_{name}", [result.seconds])
            for detail, value in result.details.items():
                if isinstance(value, (int, float)):
                    metrics.add(f"reward/{name}_{detail}", float(value))
        if math.isnan(r.score):
            continue
        if args.overlong_buffer_length:
            metrics.add("objective/overlong_penalty", r.outcome - r.score)
        if args.apply_r1_style_format_reward:
            metrics.add("val/format_scores", r.format_score * args.r1_style_format_reward)
    for name, kind in [(name, kind) for name in found for kind in STATUSES]:
        metrics.count(f"reward/{name}_{kind}", found[name][kind])
        if kind != "ok":
            metrics.add(f"objective/reward_{kind}_rate", found[name][kind], found[name].total())
    metrics.add_all("objective/scores", [r.score for r in rollouts if not math.isnan(r.score)])
    metrics.add_all("val/sequence_lengths", [len(r.token_ids) for r in rollouts])
    for name, right in (("solved", True), ("unsolved", False)):
        chosen = [len(r.token_ids) for r in rollouts if (r.verifiable > 0) == right]
        metrics.add(f"val/sequence_lengths_{name}", sum(chosen), len(chosen))
    stopped = sum(r.finish_reason == "stop" for r in rollouts)
    metrics.add("val/stop_rate", stopped, len(rollouts))
    metrics.add("val/stop_token_rate", stopped, len(rollouts))
    metrics.count("val/num_stop_token_ids", stopped)


def note_turns(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Metrics of the rollouts with turns: who wrote how much, the tools' calls, what environments count."""
    rollouts = [r for r in rollouts if r.turns]
    tools: set[str] = set()
    calls: dict[tuple[str, str], float] = defaultdict(float)  # (tool, calls | failures | seconds)
    for r in rollouts:
        environment, sampled, numbers = r.prompt.environment, int(r.mask.sum()), {}
        name = "environment" if environment is None else Path(environment.path).stem
        tools |= set() if environment is None else environment.schemas.keys()
        answers = [t for t in r.turns if t["role"] != "assistant"]
        metrics.add("val/policy_tokens", sampled)
        metrics.add("val/environment_tokens", len(r.mask) - sampled)
        metrics.add(f"env/{name}/reward", sum(t["reward"] for t in answers))
        for kind in rewards.MISSING:
            metrics.add(f"env/{name}/{kind}_rate", sum(t["status"] == kind for t in answers), len(answers))
        length = len(r.prompt.token_ids)
        for turn in r.turns:
            if turn["role"] == "assistant":
                metrics.add("val/prefix_cached_share", turn["cached"], length)
            length += turn["tokens"]
            numbers |= turn.get("metrics", {})
            for key, value in turn.get("metrics", {}).items():
                if key.startswith("tools/") and key.count("/") == 2:
                    _, tool, kind = key.split("/")
                    calls[tool, kind] += value
                    calls["aggregate", kind] += value
        for key, value in numbers.items():
            if not key.startswith("tools/"):
                metrics.add(f"env/{name}/{key}", value)
    metrics.add_all("val/turns", [sum(t["role"] == "assistant" for t in r.turns) for r in rollouts])
    for tool in sorted(tools | {tool for tool, _ in calls}):
        metrics.add(f"tools/{tool}/avg_calls_per_rollout", calls[tool, "calls"], len(rollouts))
        metrics.add(f"tools/{tool}/failure_rate", calls[tool, "failures"], calls[tool, "calls"])
        metrics.add(f"tools/{tool}/avg_runtime", calls[tool, "seconds"], calls[tool, "calls"])


STATUSES = ("ok", "no_answer", "timeout", "crash", "infra_error")


def note_verifiers(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics, prefix: str) -> None:
    """Reward, share above 0 and share of full scores, of all verifiers together and of each; missing ones apart."""
    for r in rollouts if args.apply_verifiable_reward else ():
        if not r.results:  # a rollout of a dump
            continue
        whole = len(r.prompt.verifiers)
        parts = [("verifiable", r.verifiable, whole)]
        parts += [(name, result.score, 1) for name, result in zip(r.prompt.verifiers, r.results, strict=True)]
        for name, value, full in parts:
            if not math.isnan(value):
                metrics.add(f"{prefix}/{name}_reward", args.verification_reward * value)
                metrics.add(f"{prefix}/{name}_correct_rate", float(value > 0))
                solved = "solve_rate" if name == "verifiable" else f"{name}_solve_rate"
                metrics.add(f"{prefix}/{solved}", float(value >= full - 1e-8))


def note_step(groups: Sequence[Group], sampled: Sequence[Group], args: "grpo.Args", metrics: Metrics) -> None:
    """Metrics of a step's sampling: rollouts, groups by outcome, advantages. What open-instruct's reports print counts
    the groups it keeps, and each prompt once: objective_kept/*, val/num_step_tokens."""
    rollouts, outcomes = [r for group in sampled for r in group], [distinct_outcomes(group) for group in sampled]
    note_rollouts(rollouts, args, metrics)
    kept = [g for g in groups if len(distinct_outcomes(g)) > 1 or not args.filter_zero_std_samples]
    note_verifiers([r for group in kept for r in group], args, metrics, "objective_kept")
    prompts, responses = [len(r.prompt.token_ids) for r in rollouts], sum(len(r.token_ids) for r in rollouts)
    metrics.count("sampled", len(rollouts))
    metrics.count("response_tokens", responses)
    metrics.count("val/num_sampled_tokens", sum(prompts) + responses)
    each_prompt_once = sum(len(group[0].prompt.token_ids) for group in kept)
    metrics.count("val/num_step_tokens", each_prompt_once + sum(len(r.token_ids) for group in kept for r in group))
    metrics.add_all("val/prompt_lengths", prompts)
    for name, gib in memory_used().items():
        metrics.extreme(name, gib)
    present = [r.score for r in rollouts if not math.isnan(r.score)]
    metrics.add("val/score_sq", sum(s * s for s in present), len(present))
    metrics.add_all("val/advantages", [r.advantage for group in groups for r in group])
    best = [rewards.max_score(args, len(group[0].prompt.verifiers) or 1) for group in sampled]
    constant = [(found, {top}) for found, top in zip(outcomes, best, strict=True) if len(found) < 2]
    metrics.count("batch/total_prompts", len(sampled))
    metrics.count("val/total_reward_groups", len(sampled) - len(constant))
    metrics.count("batch/filtered_prompts", len(constant))
    metrics.count("batch/filtered_prompts_zero", sum(s == {0.0} for s, _ in constant))
    metrics.count("batch/filtered_prompts_solved", sum(s == top for s, top in constant))
    metrics.count("batch/filtered_prompts_nonzero", sum(s not in ({0.0}, top) for s, top in constant))
    metrics.count("batch/missing_rewards", sum(math.isnan(r.score) for r in rollouts))


def memory_used() -> dict[str, float]:
    """GiB: most that this process ever held; what is in use on this machine by anybody; most of its GPU that torch's
    tensors ever took, and its allocator."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
    out = {"memory/process_peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if Path("/proc/meminfo").exists():
        kib = dict(re.findall(r"(\w+): +(\d+)", Path("/proc/meminfo").read_text()))
        out["memory/host_used_gib"] = (int(kib["MemTotal"]) - int(kib["MemAvailable"])) / 2**20
    if torch.cuda.is_available():
        out["memory/gpu_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        out["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return out


def finish_metrics(metrics: dict[str, float], args: "grpo.GRPOFlags") -> dict[str, float]:
    """Derive the metrics that are functions of reduced ones, under the names of open-instruct's page."""

    def variance(square: str, mean: str) -> float:
        return max(metrics.pop(square) - metrics[mean] ** 2, 0.0)

    if "val/ratio_sq" in metrics:
        metrics["val/ratio_var"] = variance("val/ratio_sq", "val/ratio")
    if "val/score_sq" in metrics:
        metrics["objective/reward_std"] = math.sqrt(variance("val/score_sq", "objective/scores"))
    if "loss/policy_avg" in metrics:
        metrics["loss/total_avg"] = sum(metrics.get(f"loss/{k}_avg", 0.0) for k in ("policy", "kl", "entropy"))
        metrics["objective/loss"] = metrics["loss/total_avg"]
    if "objective/scores" in metrics:
        metrics["objective/scores_mean"] = metrics["objective/scores"]
        if "objective/kl" in metrics:
            metrics["objective/non_score_reward"] = args.beta * metrics["objective/kl"]
            metrics["objective/rlhf_reward"] = metrics["objective/scores"] - metrics["objective/non_score_reward"]
    return metrics


class Timer:
    """Seconds per named phase of a step: of the wall or, with `gpu`, between two events of the caller's stream. Then
    only reading `seconds` waits, for the caller's own work: never for the device, where other threads have some too."""

    def __init__(self, gpu: bool | None = None):
        self.gpu = torch.cuda.is_available() if gpu is None else gpu
        self.phases: list[tuple[str, Any, Any]] = []

    def _mark(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def __call__(self, name: str):
        start = self._mark()
        yield
        self.phases.append((f"time/{name}", start, self._mark()))

    @property
    def seconds(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in self.phases:
            if self.gpu:
                end.synchronize()
            seconds[name] += start.elapsed_time(end) / 1000 if self.gpu else end - start
        return dict(seconds)


TRACKER_START_S = 120.0  # before a run goes on without waiting for a tracker to be ready
TRACKER_WAIT_S = 30.0  # at the end of a run, for what is not sent yet
TABLE_ROLLOUTS = 8  # samples that a tracker gets at a time


def start_tracker(name: str, run_dir: Path, start_step: int) -> subprocess.Popen:
    """Have parts/track.py send what comes into RUN/metrics.jsonl and samples.jsonl. Raises UserError if it cannot."""
    log, after = run_dir / f"{name}.log", start_step or -1  # -1: the evaluation before the first step too
    process: Any = start_program(log, "parts/track.py", run_dir, f"--{name}", "--follow", "--after", after)
    if select.select([process.stdout], [], [], TRACKER_START_S)[0]:
        answer = process.stdout.readline()
        if not answer.startswith("tracked by "):
            words = (answer + process.stdout.read()).strip() or log.read_text()[-3000:].strip()
            raise UserError(f"--with_{'tracking' if name == 'wandb' else name}: {words}")
        print(answer, end="", flush=True)
    return process


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last `width` values as bars of eight heights between their lowest and highest."""
    values = list(values)[-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low)) if high > low else 0] for v in values)


class Logger:
    """Console, metrics.jsonl, samples.jsonl and trackers, all on rank 0; other ranks get a silent one."""

    SHOWN = (  # (heading, metric, format)
        ("score", "objective/scores", "{:.3f}"),
        ("correct", "objective/verifiable_correct_rate", "{:.3f}"),
        ("eval", "eval/objective/verifiable_correct_rate", "{:.3f}"),
        ("grad groups", "other/real_batch_size_ratio", "{:.2f}"),
        ("len", "val/sequence_lengths", "{:.0f}"),
        ("kl", "objective/kl", "{:.3f}"),
        ("gap", "debug/vllm_vs_local_logprob_diff_mean", "{:.1e}"),
        ("grad", "optim/grad_norm", "{:.2f}"),
        ("gen s", "time/generation", "{:.1f}"),
        ("train s", "time/training", "{:.1f}"),
        ("total s", "time/total", "{:.1f}"),
    )

    def __init__(self, args: TrackingFlags, run_dir: Path, num_steps: int, start_step: int, world: World):
        self.enabled = world.is_main
        if not self.enabled:
            return
        from tqdm import tqdm

        from scripts.parts.run_dir import forget_after

        tqdm.monitor_interval = 0  # painted once a step only: else it wipes out the prompt of a debugger
        form = "step {bar} {n_fmt}/{total_fmt} {desc}"  # disable=None: where stdout is no terminal
        self.bar = tqdm(total=num_steps, initial=start_step, file=sys.stdout, disable=None, bar_format=form)
        self.path, self.samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        if self.path.exists():
            forget_after(run_dir, start_step)
        self.num_steps, self.header_shown = num_steps, False
        self.scores: list[float] = []
        self.ends = deque([time.monotonic()], maxlen=20)  # of the last steps: a step's time changes over a run
        names = ["wandb"] * args.with_tracking + ["tensorboard"] * args.with_tensorboard
        self.trackers = {name: start_tracker(name, run_dir, start_step) for name in names}

    def log(self, metrics: dict[str, Any]) -> None:
        if not self.enabled:
            return
        metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no NaN
        with self.path.open("a") as file:
            file.write(json.dumps(metrics, default=str) + "\n")
        if not self.header_shown:
            headings = [h.rjust(max(7, len(h))) for h, _, _ in self.SHOWN]
            self.say(" ".join(["step".rjust(9), *headings, "left".rjust(8)]))
            self.header_shown = True
        step = metrics["training_step"]
        cells = [f"{step}/{self.num_steps}".rjust(9)]
        for heading, name, fmt in self.SHOWN:
            value = metrics.get(name)
            cells.append(("" if value is None else fmt.format(value)).rjust(max(7, len(heading))))
        left = self._time_left(step)
        self.say(" ".join([*cells, left.rjust(8)]))
        self.scores += [metrics["objective/scores"]] if metrics.get("objective/scores") is not None else []
        told = f"{left} left  score {sparkline(self.scores)} {self.scores[-1] if self.scores else math.nan:.3g}"
        self.bar.n = step
        self.bar.set_description_str(told)

    def _time_left(self, step: int) -> str:
        """Hours:minutes:seconds of the steps to come at the mean pace of the last ones, eval and saving included."""
        if step == 0:
            self.ends[-1] = time.monotonic()  # the evaluation before the first step
            return ""
        self.ends.append(time.monotonic())
        pace = (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        return str(timedelta(seconds=round(pace * (self.num_steps - step))))

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Print the first and the last rollout; the first TABLE_ROLLOUTS go to samples.jsonl, for the trackers."""
        if not self.enabled or not groups:
            return
        rollouts = [r for group in groups for r in group]
        for r in (rollouts[0], rollouts[-1]):
            end = "ended by itself" if r.finish_reason == "stop" else "cut at the limit"
            answer = f"score {r.score:g}, {end}, label {str(*r.prompt.ground_truths[:1]):.120}"
            self.say(f"  prompt   {r.prompt.text[-600:]!r}\n  response {r.text[:600]!r}\n  {answer}")
        rows = []
        for r in rollouts[:TABLE_ROLLOUTS]:
            row = {name: getattr(r, name) for name in ("score", "advantage", "finish_reason", "text")}
            labels = {"prompt": r.prompt.text, "ground_truths": str(r.prompt.ground_truths)}
            rows.append({"training_step": step} | labels | row)
        with self.samples.open("a") as file:
            file.write(json.dumps({"training_step": step, "rollouts": rows}, default=str) + "\n")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Take the bar away and wait TRACKER_WAIT_S at most for what each tracker has not sent yet."""
        if not self.enabled:
            return
        self.bar.close()
        for name, process in self.trackers.items():
            try:
                words, _ = process.communicate("end", TRACKER_WAIT_S)
                ended = f"WARNING: {name} ended with status {process.returncode}"
                problem = (words.splitlines() or [ended])[-1] if process.returncode else ""
            except subprocess.TimeoutExpired:
                process.kill()
                problem = f"WARNING: {name} has not ended within {TRACKER_WAIT_S:.0f} s and may lack rows"
            if problem:
                self.say(
                    f"{problem}: metrics.jsonl has all, scripts/parts/track.py {self.path.parent} --{name} sends it"
                )


def draw_report(run_dir: Path) -> str:
    """Have scripts/reports/curves.py draw report.png; words for the end of the run. A failure is a warning."""
    if problem := run_program("reports/curves.py", run_dir):
        again = shlex.join(program("reports/curves.py", run_dir))
        print(f"WARNING: no report was drawn: {problem.splitlines()[-1]}. To draw it: {again}", flush=True)
        return "no report"
    return f"report {run_dir / 'report.png'}"


# --- Servers: language models for rewards -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Servers:
    """vLLM servers of a model, for OpenAI clients; they end with `process`, parts/serve.py, whose words `log` has."""

    base_urls: list[str]
    api_key: str
    process: subprocess.Popen
    log: Path


def start_reward_models(args: Flags, run_dir: Path, world: World) -> Servers | None:
    """Connect this rank to the judge and the solver; the first rank starts the solver's servers if none run already.
    All ranks that score. Raises UserError."""
    servers: Servers | None = None

    def start() -> tuple[str, str]:
        nonlocal servers
        in_use = 1 if args.single_gpu_mode else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        need(
            not 0 < torch.cuda.device_count() < in_use + args.solver_num_engines,
            f"--solver_num_engines {args.solver_num_engines}: each takes a GPU of its own, and {in_use} of "
            f"{torch.cuda.device_count()} are the run's: lower it, or start a server with a smaller share of a GPU "
            "yourself and give --solver_base_url",
        )
        length = args.max_prompt_token_length + args.response_length + args.solver_response_length + 512
        flags: dict[str, Any] = {"num_engines": args.solver_num_engines, "max_model_len": length, "seed": args.seed}
        flags |= {"model_dtype": args.model_dtype, "max_num_seqs": rewards.SOLVER_MAX_CONCURRENCY}
        servers = start_servers(args.solver_model_name_or_path, run_dir, devices_in_use=in_use, **flags)
        return ",".join(servers.base_urls), servers.api_key

    if args.solver_model_name_or_path and not args.solver_base_url:
        urls, os.environ["SOLVER_API_KEY"] = on_main(start, world)
        args = replace(args, solver_base_url=urls)
    rewards.configure(args, connect=True)
    return servers


def start_servers(model: str, log_dir: Path, name: str = "solver", **flags: object) -> Servers:
    """Have scripts/parts/serve.py start vLLM servers, `flags` being its own, and wait until they answer; logs are
    log_dir/name*.log. They end with stop_servers or this process, also if that is killed. Raises UserError."""
    log, given = log_dir / f"{name}.log", flags | {"log_dir": log_dir, "name": name}
    process = start_program(log, "parts/serve.py", model, *(f"--{flag}={value}" for flag, value in given.items()))
    answer = process.stdout.readline()  # JSON once all answer; nothing if it gave up
    need(answer != "", f"no server of {model}: {log.read_text(errors='replace')[-3000:]}")
    return Servers(**json.loads(answer), process=process, log=log)


def check_servers(servers: Servers | None) -> None:
    """Raise UserError with the end of the log if a server has ended."""
    if servers is not None and servers.process.poll() is not None:
        raise UserError(servers.log.read_text(errors="replace")[-3000:])


def stop_servers(servers: Servers | None) -> None:
    if servers is not None:
        servers.process.stdin.close()
        servers.process.wait()
