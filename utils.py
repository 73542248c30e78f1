"""Plumbing shared by grpo.py and grpo_fast.py: nothing here is edited for a research idea.

    processes   World, collectives, random state, seeds
    flags       parse_args and the classes of flags but the algorithm's
    programs    what runs beside a run in processes of its own
    data        Prompt, load_prompts
    engines     Request -> Generation, with vLLM or transformers
    packs       which sequences a forward computes together, and attention inside them
    sharding    how a model is spread over the learners (FSDP2), weights, saved models, checkpoints
    traces      rollouts and dumps on disk
    metrics     counts and means over ranks, and who is told of them
    servers     language models that score

Features that not every run has are in scripts/parts/, imported in the function whose flag asks for them. Import this
module before torch: it sets thread counts and vLLM's switches, which both read at import time.
"""

import bisect
import contextlib
import functools
import gc
import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
import random
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar

_LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
# The cores this process may use; macOS pins no process and has no call that says so
ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
_ENVIRONMENT = {  # what is not set, before torch and vLLM read it
    # Two OpenMP pools that together want more threads than there are cores run 10-20x slower.
    "OMP_NUM_THREADS": str(max(1, len(ALL_CORES) // _LOCAL_WORLD_SIZE)),
    # Threads of GNU's OpenMP spin while they wait; where others want the cores an operation takes 200 times as long
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN compiles a bfloat16 product for each shape and keeps 1024; packs have hundreds of lengths
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "20000",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",  # vLLM would tell its makers of each engine
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # vLLM does so after its first warnings
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # looks at deprecated names of torch
VLLM_CACHE = os.environ.get("VLLM_CACHE_ROOT") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/vllm"

# Imports make objects that stay. To look for dead cycles after every 700 objects takes a quarter of the imports' time.
gc.set_threshold(10_000)

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: source scripts/setup.sh, once a shell") from None
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402

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

# Compiled kernels outlive a run. Inductor compiles them for this processor and does not check that when it loads them
# again, so each kind of processor has a directory: machines of several kinds may share a home directory.
_KERNELS = f"~/.cache/torchinductor/{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser(_KERNELS))

if TYPE_CHECKING:  # to import transformers takes seconds
    from transformers import PreTrainedTokenizerBase as Tokenizer


T = TypeVar("T")
NamedTensors = Iterable[tuple[str, Tensor]]
F = TypeVar("F", bound="Flags")
REPO = Path(__file__).resolve().parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TIMEOUT = timedelta(days=1)  # for another rank, which may sample, score or save for hours; torch's own is 30 minutes

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


def is_first_rank() -> bool:
    """Whether this is the only process, or rank 0. In grpo_fast.py learners and engines have a rank 0 each."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Print a line, on the first rank alone, in one write: other processes write to the same terminal."""
    if is_first_rank():
        print(f"{text}\n", end="", flush=True)


def init_distributed(store: dist.Store | None = None) -> World:
    """Join the ranks that torchrun started, or the ranks that share `store`. Without torchrun and store this process is
    a world of its own, which opens no port."""
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
    if store is None and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT, store=store or dist.HashStore(), rank=rank, world_size=size)
    return World(rank, local_rank, size, device)


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


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """The host's tensor on `device`. To a GPU it goes from pinned memory: without that the host would wait until the
    GPU has done all its work."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def sequence_group(args: "Flags") -> dist.ProcessGroup | None:
    """The group of --sequence_parallel_size neighbouring ranks that share the tokens of their packs, or None. All
    ranks."""
    if args.sequence_parallel_size == 1:
        return None
    from scripts.parts import attention

    return attention.group_of_neighbours(args.sequence_parallel_size)


def share(thing: T, args: "Flags") -> list[T]:
    """The object of each rank in this rank's sequence_group; its own object is not copied. All ranks must call it."""
    group = sequence_group(args)
    if group is None:
        return [thing]
    from scripts.parts import attention

    return attention.share(thing, group)


def leads(args: "Flags", world: World) -> bool:
    """Whether this rank reports for its sequence_group, whose ranks compute the same losses."""
    return world.rank % args.sequence_parallel_size == 0


def on_main(function: Callable[[], T], world: World) -> T:
    """Call `function` on rank 0 and return its result on every rank. If it raises a ValueError, every rank raises a
    UserError with the same text. All ranks must call it."""
    result: Any = None
    problem = ""
    if world.is_main:
        try:
            result = function()
        except ValueError as error:
            problem = str(error)
    box: list[Any] = [result, problem]
    if world.size > 1:
        dist.broadcast_object_list(box)
    result, problem = box
    if problem:
        raise UserError(problem)
    return result


def after_restart(args: F) -> F:
    """The flags of ranks that torchrun --max-restarts has started again: they resume. A directory that another torchrun
    began is refused as before, so its flags stay as they are."""
    from scripts.parts import run_files

    is_own = run_files.begun_by_this_torchrun(args.run_dir)
    return replace(args, resume=True, overwrite=False) if is_own else args


def make_deterministic(args: "Flags") -> None:
    """--deterministic: kernels whose result does not depend on the order of threads, where torch has them."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore[missing-attribute]  # finds bugs only


def run_script(main: Callable[[Any], Any], args_class: Any) -> None:
    """Run a script's `main` with its flags, and end the process. Whatever ends a run in between has the last line, and
    goes into torchrun's error file."""
    STOP.listen()
    status = 0
    try:
        record(main)(parse_args(args_class))
    except Exception as error:
        status = 1
        if not isinstance(error, UserError):
            traceback.print_exc()
            STOP.save_after_error()
        words = words_of(error)
        if not STOP.tell(words):
            print(f"{Path(sys.argv[0]).name}: {words}", file=sys.stderr)
    exit_process(status)


def words_of(error: Exception) -> str:
    """An error in one line. Of a GPU without memory it says what helps."""
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    words = kind + " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        helps = "a smaller --pack_length, --gradient_checkpointing, a smaller --vllm_gpu_memory_utilization"
        return f"{words[:200]}... What helps most: {helps}; --dry_run says how much"
    return words


def exit_process(status: int = 0) -> None:
    """End a process without the destructors of gloo's and vLLM's threads: these abort now and then (in 1 of 38 two-rank
    runs), which would turn a finished run into a failed one."""
    end_trackers(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


TRACKERS: list[Any] = []  # of this process's run: see scripts/parts/track.py


def end_trackers(status: int = 0) -> None:
    """Let the trackers send what they have not sent yet. status: of the run."""
    while TRACKERS:
        TRACKERS.pop().end(status)


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


UNHURRIED: list[bool] = []  # not empty: this process waits for a disk, whose seconds no watchdog counts


@contextlib.contextmanager
def unhurried():
    """Mark a block, or a function, that waits for a disk."""
    UNHURRIED.append(True)
    try:
        yield
    finally:
        UNHURRIED.pop()


# --- Flags: their classes; scripts/parts/checks.py refuses what contradicts itself ------------------------------------


def parse_args(cls: Any, argv: Sequence[str] | None = None) -> Any:
    """Parse flags into the dataclass `cls`. open-instruct's flags are translated to ours, and rank 0 prints how. Raises
    UserError for a flag that has no translation and that the run depends on, unless this is a --dry_run."""
    import tyro

    from scripts.parts import checks

    tokens = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(tokens):
        from scripts.parts import help as help_part

        help_part.show(cls, tokens)
    translation = checks.translate(tokens, checks.names_of(cls))
    args = tyro.cli(cls, args=translation.line, use_underscores=True)
    if translation.others:
        say(translation.text())
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
    """Continue the run in output_dir/exp_name from its newest checkpoint, or begin it if it has none: one command line
    does for every start. Refused if flags, data or model differ. Reading a checkpoint of somebody else runs no code."""
    resume_anyway: bool = False
    """With resume: continue although they differ, and print the differences."""
    overwrite: bool = False
    """Replace the run that is in output_dir/exp_name. Off: refuse to start there."""
    dry_run: bool = False
    """Check the flags, print arithmetic, sources and memory, and end. Loads nothing and needs no network. PLAN_GPU=h200
    in the environment plans for that GPU."""
    save_freq: int = 200
    """Steps between saves of the model in Hugging Face format, to step_N/. The last model always goes to model/. -1 is
    never."""
    checkpoint_state_freq: int = -1
    """Steps between checkpoints from which resume continues. -1: by the clock, see checkpoint_minutes."""
    checkpoint_minutes: NotNegative[float] = 30.0
    """Without checkpoint_state_freq: minutes between checkpoints, of which the last one is kept, where the disk has
    room for two. 0 is never."""
    keep_last_n_checkpoints: int = 3
    """How many checkpoints are kept; older ones are removed. -1 keeps all."""
    dump_steps: str = ""
    """Steps whose updates scripts/replay.py can compute again: all, or N for every N-th. Their rollouts go to
    rollouts.jsonl with the learner's logprobs, their packs to dumps/. Empty is none."""
    load_states: str = ""
    """grpo.py: begin each step N with another run's weights and optimizer after its step N - 1, in place of one's own.
    The directory of a run of ours, of veRL, or of Hugging Face models. Reading it runs no code. Empty is off."""
    load_batches: str = ""
    """grpo.py: directory of a run with --dump_steps. Train on its rollouts, step by step, instead of sampling."""
    save_traces: bool = False
    """Write every rollout to rollouts.jsonl."""
    profile_step: NotNegative[int] = 0
    """Write what torch's profiler sees of this step to RUN/profile, for each rank that trains, with a snapshot of a
    GPU's memory. 0 is off."""

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.exp_name


@dataclass(frozen=True)
class TrackingFlags(Refusing):
    """Where metrics and model go beside the console and the run's directory."""

    with_tracking: bool = False
    """Log to Weights & Biases (WANDB_MODE=offline works)."""
    with_tensorboard: bool = False
    """Write TensorBoard's event files to RUN/tensorboard."""
    with_trackio: bool = False
    """Log to trackio (pip install trackio), on this machine: `trackio show` has the page."""
    wandb_project: str = "grpo"
    """Project in Weights & Biases or trackio."""
    wandb_entity: str | None = None
    """Entity in Weights & Biases. None is the account's default."""
    push_to_hub: bool = False
    """Upload the last model, and a card with the command line, to the Hugging Face hub. Off: nothing is uploaded."""
    hf_repo_id: str | None = None
    """Repository for push_to_hub, NAME or ORGANIZATION/NAME. A new one is private. None is exp_name."""


@dataclass(frozen=True)
class ModelFlags(Refusing):
    """The model and how the learner computes it."""

    model_name_or_path: str = ""
    """Hub name or directory of the causal language model to train. Required."""
    model_revision: str | None = None
    """Hub revision of the model. None is the default branch."""
    trust_remote_code: bool = False
    """Run the code that comes with a model (auto_map in its config.json), as you: read it first. Off: refuse a model
    that needs it."""
    model_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute dtype of learner and engine. auto: bfloat16 if this machine is fast in it, else float32. Master weights,
    Adam state, log-softmax and the reduction of gradients are float32. float16 scales the loss: parts/loss_scale.py."""
    lora_rank: NotNegative[int] = 0
    """Train adapters of this rank only: W + lora_alpha / lora_rank * B A (LoRA, arXiv:2106.09685). 0: train all
    weights."""
    lora_alpha: NotNegative[int] = 32
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the matrices that get adapters (q_proj v_proj ...). all-linear: all matrices of the layers, which the
    router and the experts of a mixture are mostly not: they do not train."""
    lora_merge: bool = False
    """Beside each saved adapter also save the merged model, to model_merged/."""
    ref_model_name_or_path: str = ""
    """A teacher of the same vocabulary as reference policy. With --beta 1 --kl_estimator kl2 that is on-policy
    distillation (arXiv:2306.13649). Empty: the start policy."""
    dither_master_weights: bool = True
    """With bfloat16: start each master weight at a random point of its rounding interval, see dither."""
    attn_implementation: str = "sdpa"
    """Attention of the learner, by transformers' names: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    compile_layers: bool = False
    """Compile each decoder layer with torch.compile, and on a CPU the head. The start takes minutes more; what a step
    gains is not measured on GPUs. In float32 an update changes by 1e-6 of itself, and bfloat16 rounds less often."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """0: each learner has the whole model; 2: gradients and optimizer state are sharded; 3: parameters too. FSDP2 does
    it."""
    fsdp_shard_size: NotNegative[int] = 0
    """Shard within groups of this many learners, such as those of a node, and replicate across groups: only gradients
    travel between groups. 0: shard over all. Must divide the learners; needs --deepspeed_stage 2 or 3."""
    offload: list[Literal["reference"]] = field(default_factory=list)
    """What is in host memory while the GPU does not need it: the reference policy's shards. The same numbers, for time
    on PCIe."""
    sequence_parallel_size: Positive[int] = 1
    """Learners that share the tokens of a pack and its activations (DeepSpeed-Ulysses, arXiv:2309.14509). Must divide
    the number of learners and the model's attention heads."""

    def of_reference(self) -> Self:
        """The flags with which the reference policy loads: these, or those of a teacher, which comes from its default
        branch and has the policy's dtype."""
        if not self.ref_model_name_or_path:
            return self
        return replace(
            self,
            model_name_or_path=self.ref_model_name_or_path,
            model_revision=None,
            lora_rank=0,
            ref_model_name_or_path="",
        )


@dataclass(frozen=True)
class DataFlags(Refusing):
    """Data sets and how their rows become prompts."""

    dataset_mixer_list: list[str] = field(default_factory=lambda: ["ai2-adapt-dev/rlvr_gsm8k_zs", "1.0"])
    """NAME AMOUNT pairs to train on. NAME: hub data set, directory, .jsonl, .parquet, .csv, .json (.gz and .zst
    too) or reasoning_gym:TASK. AMOUNT: 1.0 is a fraction, 1 is one row."""
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
    """Chat template: a name of scripts/data/templates, or a file of yours. None is the tokenizer's own."""
    chat_template_kwargs: str = ""
    """Values for the chat template as a JSON object, such as '{"enable_thinking": false}'. The saved model's template
    has them too. Empty is none."""
    add_bos: bool = False
    """Begin every prompt with the tokenizer's BOS token, before the text of the chat template."""
    system_prompt_override_file: str | None = None
    """Text file that replaces the system message of every row. None keeps the rows' own."""

    def mixer(self, flag: str) -> list[tuple[str, float | int]]:
        """The pairs of a mixer flag, as many as its splits allow: see parse_mixer. Raises UserError."""
        return parse_mixer(flag, getattr(self, flag), getattr(self, f"{flag}_splits"))

    @property
    def problem_of_template(self) -> str:
        """What is wrong with --chat_template_name, or ""."""
        name = self.chat_template_name
        if name is None or name in CHAT_TEMPLATES or Path(name).is_file():
            return ""
        names = " | ".join(CHAT_TEMPLATES)
        return f"--chat_template_name {name}: no file, and none of this name: take one of {names}"


# Options of vLLM that have a flag, and those that this code needs as it sets them
ENGINE_FLAGS = {
    "model": "--model_name_or_path",
    "tokenizer": "--model_name_or_path",
    "revision": "--model_revision",
    "trust_remote_code": "--trust_remote_code",
    "dtype": "--model_dtype",
    "seed": "--seed",
    "max_model_len": "--max_prompt_token_length with --response_length",
    "tensor_parallel_size": "--vllm_tensor_parallel_size",
    "gpu_memory_utilization": "--vllm_gpu_memory_utilization",
    "enable_sleep_mode": "--vllm_sleep",
    "enforce_eager": "--vllm_enforce_eager",
    "enable_prefix_caching": "--vllm_enable_prefix_caching",
}
ENGINE_NEEDS = """code_revision config_format convert data_parallel_size distributed_executor_backend disable_log_stats
    generation_config load_format logprobs_mode model_loader_extra_config nnodes pipeline_parallel_size runner
    skip_tokenizer_init tokenizer_revision use_tqdm_on_load worker_cls""".split()


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
    vllm_sleep: Literal["auto", "off"] = "auto"
    """grpo.py: the engine frees the GPU's memory during updates. auto: if it can, as vLLM does on a GPU."""
    vllm_enable_prefix_caching: bool = False
    """Requests share the cache of prompts that begin alike. New weights never read what older ones have cached."""
    vllm_tensor_parallel_size: Positive[int] = 1
    """grpo_fast.py: GPUs of an engine. In grpo.py an engine has one."""
    vllm_kwargs: str = ""
    """More options of vLLM.LLM as a JSON object, such as '{"kv_cache_dtype": "fp8"}'. What some do to the gap:
    scripts/README.md. Empty is none."""
    max_logprob_gap: NotNegative[float | None] = None
    """Largest mean |learner - engine| logprob, in nats, over an engine's last 32 prompts; above it the run saves and
    ends. None: 0.1 in bfloat16 (rounding makes 0.02 to 0.05), 0.03 in float16, 0.01 in float32. 0 is off, and with it
    the check that weights arrived."""

    def more_engine_options(self) -> dict[str, Any]:
        """The options of --vllm_kwargs. Raises UserError for what is no JSON object, and for what a flag sets or this
        code needs as it is."""
        try:
            options = json.loads(self.vllm_kwargs or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            self.refuse("--vllm_kwargs: not a JSON object")
        for name in options:
            if name in ENGINE_FLAGS:
                self.refuse(f"--vllm_kwargs: {name} is what {ENGINE_FLAGS[name]} sets")
            if name in ENGINE_NEEDS:
                self.refuse(f"--vllm_kwargs: {name} has to stay as the engine needs it here, drop it")
        return options

    def beside_engine(self, shared: bool) -> Self:
        """The flags of a run in which learner and engine share a GPU (`shared`) or not. The default of
        vllm_gpu_memory_utilization is for an engine that is alone on its GPU: a shared GPU gets a smaller one."""
        is_default = self.vllm_gpu_memory_utilization == EngineFlags.vllm_gpu_memory_utilization
        return replace(self, vllm_gpu_memory_utilization=0.4) if shared and is_default else self


@dataclass(frozen=True)
class ProcessFlags(Refusing):
    """The processes of grpo_fast.py. grpo.py accepts these flags, so that both take the same command line."""

    num_learners_per_node: list[int] = field(default_factory=lambda: [1])
    """grpo_fast.py: learner ranks on each node; all other ranks are engines. grpo.py takes torchrun's ranks."""
    vllm_num_engines: Positive[int] = 1
    """grpo_fast.py: number of engines. grpo.py has one on each rank."""
    async_steps: NotNegative[int] = 1
    """grpo_fast.py: how many updates old a rollout may be when it is trained on. grpo.py is strictly on-policy."""
    inflight_updates: bool = False
    """grpo_fast.py: an engine takes new weights between two decoding steps. Off: its running responses end first."""
    single_gpu_mode: bool = False
    """grpo_fast.py: learner and engine share a device. In grpo.py they always do."""
    stall_timeout_s: NotNegative[float] = 1800.0
    """grpo_fast.py: end the run if nothing has moved for this many seconds longer than the flags let a verifier or an
    environment take, and print all stacks and outstanding requests. 0 is off."""


@dataclass(frozen=True)
class TurnFlags(Refusing):
    """Turns: an environment or tools answer the policy, see scripts/tools/README.md."""

    env_file: str = ""
    """Python file whose step(episode), or class Env, answers a response or ends the rollout; or whose agent(base_url,
    row) asks the policy as it would ask OpenAI's chat completions. Empty is off."""
    tools: list[str] = field(default_factory=list)
    """Tools that answer calls in a response: names of scripts/tools/, or files of your own. The chat template describes
    them to the policy. Empty is none."""
    tool_call_names: list[str] = field(default_factory=list)
    """Names by which the policy calls the tools, in the order of tools. Empty: the names in their files."""
    tool_configs: list[str] = field(default_factory=list)
    """A JSON object with the settings of each tool. A text "$NAME" in it is a variable of the environment: write keys
    like this, and no file of the run shows them. Empty: their defaults."""
    tool_parser_type: str = "legacy"
    """Form of a call. legacy is <name>text</name>; the others are vLLM's tool parsers (hermes, olmo3, ...)."""
    max_steps: Positive[int] = 5
    """Most answers in a rollout. After the last one the policy has one more turn."""
    per_turn_max_tokens: Positive[int | None] = None
    """Most tokens of a turn. None: as many as response_length leaves, which counts answers too."""
    env_timeout: Positive[float] = 60.0
    """Seconds that an environment, or all tools of a turn, may take to answer. Then the policy reads that no answer
    came and goes on; with a live environment the rollout ends."""
    pool_size: Positive[int | None] = None
    """Processes that answer at the same time. None is 2 for each core, and at least 8."""

    @property
    def has_turns(self) -> bool:
        """Whether an environment or tools answer the policy."""
        return bool(self.env_file or self.tools)


@dataclass(frozen=True)
class Flags(rewards.RewardFlags, ProcessFlags, TurnFlags, TrackingFlags, EngineFlags, DataFlags, ModelFlags, RunFlags):
    """All flags but those of the algorithm."""

    @property
    def problem_of_engine(self) -> str:
        """What vLLM says against --vllm_kwargs, or "". A model that is not on this machine yet has no part in it."""
        from vllm.engine.arg_utils import EngineArgs

        from scripts.parts import run_files

        options = self.more_engine_options()
        directory = run_files.on_this_machine(self.model_name_or_path, self.model_revision)
        try:
            options |= {"dtype": self.model_dtype, "trust_remote_code": self.trust_remote_code}
            engine = EngineArgs(model=str(directory), **options)
            if directory is not None:
                with fenced_rng():
                    engine.create_engine_config()
        except Exception as error:  # it has no class for what is wrong with an option
            return f"--vllm_kwargs {self.vllm_kwargs}: vLLM says: {' '.join(str(error).split())}"
        return ""


def prepare_run_dir(args: Flags, data_hash: str, world: World) -> Path:
    """Make `output_dir/exp_name` with args.json and environment.json. Raises UserError for a directory that holds a
    run, see scripts/parts/run_files.py. All ranks must call it."""
    from scripts.parts import run_files

    facts = {
        "command": [sys.executable, *sys.argv],
        "data_hash": data_hash,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    on_main(functools.partial(run_files.prepare, args.run_dir, asdict(args), facts), world)
    if args.reward_file or args.has_turns:
        from scripts.parts import user_files

        user_files.PRINTS.path = args.run_dir / "prints.txt"
        user_files.PRINTS.begin_step(user_files.CONSOLE_LINES if world.is_main else 0)
    return args.run_dir


# --- Programs beside a run --------------------------------------------------------------------------------------------

PROGRAM_S = 120.0  # for a program that a run waits for: matplotlib's first start on a machine looks for fonts
SWEEPERS: list[subprocess.Popen] = []  # see sweep


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


def sweep(directory: str | Path, until: str = "read -r _") -> None:
    """Have a shell remove a temporary directory however this process ends. First it runs the command `until`, which
    waits: the default ends when stdin closes, which happens when this process ends."""
    sweeper = subprocess.Popen(
        ["sh", "-c", f'{until}; rm -rf -- "$0"', directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # a reader of our output would wait for the shell too
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    SWEEPERS.append(sweeper)  # a sweeper that is forgotten is closed


# --- Data -------------------------------------------------------------------------------------------------------------


# Published models expect most of these templates to the letter: R1-Zero's (arXiv:2501.12948, table 1), Qwen's boxed
# one, those of Olmo 3 RL-Zero. simple_chat is our own: open-instruct's of that name does not open the assistant's turn.
CHAT_TEMPLATES = {path.stem: path.read_text() for path in sorted(REPO.glob("scripts/data/templates/*.jinja"))}

MOST_BAD = 0.01  # of the rows that a run takes: a larger share is no slip, but another form of data
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
    reward_columns: dict[str, Any] = field(default_factory=dict)  # those that functions of --reward_file take
    problem: str = ""  # why it cannot be used


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
    reward_columns: dict[str, Any] = field(default_factory=dict)  # of the row, for --reward_file


def load_tokenizer(args: Flags) -> "Tokenizer":
    """Tokenizer of the model with the chat template that --chat_template_name, _kwargs and --add_bos ask for."""
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    tokenizer = pretrained(transformers.AutoTokenizer, args)
    if args.chat_template_name is not None:
        tokenizer.chat_template = chat_template(args.chat_template_name)
    names = " | ".join(CHAT_TEMPLATES)
    has_template = tokenizer.chat_template is not None
    need(has_template, f"{args.model_name_or_path} has no chat template: give --chat_template_name {names}")
    if args.chat_template_kwargs:
        set_in_template(tokenizer, args)
    if args.add_bos:
        add_bos(tokenizer, args.model_name_or_path)
    return tokenizer


def chat_template(name: str) -> str:
    """The chat template of a name of CHAT_TEMPLATES, or of a file."""
    return CHAT_TEMPLATES[name] if name in CHAT_TEMPLATES else Path(name).read_text()


def set_in_template(tokenizer: "Tokenizer", args: DataFlags) -> None:
    """Have the chat template begin with --chat_template_kwargs. Raises UserError for what it does not use."""
    template: Any = tokenizer.chat_template
    lines = []
    for name, value in json.loads(args.chat_template_kwargs).items():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            args.refuse(f"--chat_template_kwargs: the chat template has no {name}")
        text = "none" if value is None else json.dumps(value, ensure_ascii=False)
        lines.append(f"{{% set {name} = {text} %}}")
    tokenizer.chat_template = "".join(lines) + template


def add_bos(tokenizer: "Tokenizer", model: str) -> None:
    """Have the chat template begin with the BOS token. Raises UserError if it does already, or there is none."""
    template: Any = tokenizer.chat_template
    bos = tokenizer.bos_token
    problem = f"--add_bos: no BOS token can be added for {model}"
    begins_with_it = "bos_token" in template or (bos is not None and bos in template)
    need(not begins_with_it, f"{problem}: its chat template writes one already; drop the flag")
    need(bos is not None, f"{problem}: its tokenizer has none; drop the flag")
    tokenizer.chat_template = "{{ bos_token }}" + template


def start_dir(args: Flags, flag: str = "model_name_or_path") -> str:
    """The directory with the files of --model_name_or_path: itself, or in the hub's cache those of the run's commit.
    `flag` is the flag that named the model, for the error. Raises UserError."""
    if Path(args.model_name_or_path).is_dir():
        return args.model_name_or_path
    from scripts.parts import hub

    try:
        return str(hub.model(args.model_name_or_path, args.model_revision))
    except ValueError as error:
        raise UserError(f"--{flag} {args.model_name_or_path}: {error}") from None


def pretrained(kind: Any, args: Flags, flag: str = "model_name_or_path", directory: Any = None, **options: Any) -> Any:
    """Load --model_name_or_path, or what of it is in `directory`, with a class of transformers: `kind`, such as
    AutoTokenizer. The model's own code runs with --trust_remote_code alone: transformers would ask at the terminal.
    Raises UserError."""
    directory = str(directory or start_dir(args, flag))
    trust = getattr(args, "trust_remote_code", False)  # older runs have no such flag
    try:
        return kind.from_pretrained(directory, trust_remote_code=trust, **options)
    except (OSError, ValueError) as error:  # no tokenizer in it, say
        problem = " ".join(str(error).split())
        if "trust_remote_code" in problem:
            from scripts.parts import run_files

            own = ", ".join(run_files.code_of(directory))
            files = own or "of another repository, see auto_map in its config.json"
            problem = f"it has code of its own, which would run as you: read {files} in {directory}, then add "
            problem += "--trust_remote_code"
        raise UserError(f"--{flag} {args.model_name_or_path}: {problem}") from None


def parse_mixer(flag: str, values: Sequence[str], splits: Sequence[str] = ("",)) -> list[tuple[str, float | int]]:
    """`NAME AMOUNT NAME AMOUNT ...` as pairs: see parse_amount. Raises UserError."""
    given = " ".join(values)
    need(len(values) % 2 == 0, f"--{flag} takes NAME AMOUNT pairs, got {len(values)} values: {given}")
    pairs: list[tuple[str, float | int]] = []
    for name, amount in zip(values[::2], values[1::2], strict=True):
        number = parse_amount(flag, name, amount)
        pairs.append((name, number))

    num_pairs = len(pairs)
    num_splits = len(splits)
    fits = num_splits == num_pairs or num_pairs == 0 or len(set(splits)) == 1
    need(fits, f"--{flag}_splits: give one split or one per dataset ({num_pairs}), got {num_splits}")
    return pairs


def parse_amount(flag: str, name: str, amount: str) -> float | int:
    """The AMOUNT of a data set: with a dot a fraction, without one a number of rows. Raises UserError."""
    given = f"--{flag} {name} {amount}"
    try:
        number = float(amount) if "." in amount else int(amount)
    except ValueError:
        raise UserError(f"{given}: the amount must be a fraction (1.0) or a count (500)") from None
    need(number > 0, f"{given}: the amount must be positive")
    endless = name.startswith("reasoning_gym:")
    need(not endless or isinstance(number, int), f"{given}: generated data has no end, give a count such as 2000")
    return number


def mixed_rows(flag: str, args: Flags) -> Iterator[Row]:
    """The rows of all data sets of a mixer flag, in its order. Raises UserError."""
    splits = getattr(args, f"{flag}_splits")
    pairs = parse_mixer(flag, getattr(args, flag))
    for i, (name, amount) in enumerate(pairs):
        split = splits[i % len(splits)]
        if name.startswith("reasoning_gym:"):
            from scripts.parts import gym

            held_out = HELD_OUT_SEED if "eval" in flag else 0
            for row in gym.generate_rows(flag, name, int(amount), args.seed + held_out):
                yield Row(**row)
        else:
            yield from read_rows(flag, name, amount, split, args)


def read_rows(flag: str, name: str, amount: float, split: str, args: Flags) -> Iterator[Row]:
    """The rows that NAME AMOUNT of a mixer flag takes. The program scripts/rows.py reads them, so that pyarrow,
    datasets and rows that are not drawn take no memory of this process. Raises UserError."""
    command = program("rows.py", name, amount, "--split", split, "--seed", args.seed)
    if getattr(args, "reward_file", "") or getattr(args, "has_turns", False):  # scripts/minimal.py has neither flag
        from scripts.parts import rows

        command += rows.options(args)
    if not Path(name).exists():
        from scripts.parts import hub

        command += hub.commit_for_rows(flag, name)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            row = json.loads(line)
            error = row.get("error")
            need(error is None, f"--{flag} {rewards.printable(str(error))}")
            yield Row(**row)
    need(process.returncode == 0, f"--{flag} {name}: {shlex.join(command)} ended with {process.returncode}")


class Taken(NamedTuple):
    """What became of rows."""

    prompts: Sequence[Prompt]
    dropped: int  # prompts that are too long
    bad: list[str]  # rows that cannot be used, each with the reason


def load_prompts(
    flag: str, args: Flags, tokenizer: "Tokenizer", environment: Any = None, world: World | None = None
) -> Sequence[Prompt]:
    """Read, check and tokenize all rows of a mixer flag. Prompts that are too long are dropped and counted on stdout.
    So are a few rows that cannot be used. Of large data sets all ranks of a node share the prompts, which later starts
    find again: see scripts/parts/prepared.py. All ranks of `world`; None is this process alone.

    The `environment` answers the rows that have a column tools or env_config. In a data set without such rows it
    answers all rows. Raises UserError with file, row number and reason.
    """
    from scripts.parts import checks

    system = None
    if args.system_prompt_override_file:
        system = Path(args.system_prompt_override_file).read_text().strip()
    strftime = date_of_start(args)
    longest = args.max_prompt_token_length

    def make(row: Row, index: int) -> Prompt:
        return make_prompt(row, index, tokenizer, environment, system, strftime)

    world = world or World(0, 0, 1, torch.device("cpu"))
    found = None
    if checks.is_large(parse_mixer(flag, getattr(args, flag))):
        from scripts.parts import prepared

        found = prepared.load(flag, args, tokenizer, environment, make, world)
    prompts, dropped, bad = found or take(mixed_rows(flag, args), make, longest)
    tell_bad(flag, bad, len(prompts) + dropped)
    if dropped:
        say(f"--{flag}: {dropped} of {dropped + len(prompts)} prompts longer than {longest} dropped")
    need(len(prompts) > 0 or not dropped, f"--{flag}: every prompt is longer than --max_prompt_token_length {longest}")
    return prompts


def take(rows: Iterable[Row], make: Callable[..., Prompt], longest: int) -> Taken:
    """Make the prompts of rows with `make`, a make_prompt that knows all but row and index."""
    prompts: list[Prompt] = []
    dropped = 0
    bad: list[str] = []
    for row in rows:
        try:
            prompt = make(row, len(prompts))
        except Exception as error:  # whatever a template raises, for example for a role that it does not know
            bad.append(f"{row.where}: {rewards.printable(str(error))}")
            continue
        if len(prompt.token_ids) > longest:
            dropped += 1
        else:
            prompts.append(prompt)
    return Taken(prompts, dropped, bad)


def tell_bad(flag: str, bad: list[str], good: int) -> None:
    """Say which rows of a mixer flag cannot be used and are dropped. Raises UserError if they are more than
    MOST_BAD."""
    if not bad:
        return
    number = len(bad) + good
    unusable = f"{len(bad)} of {number} rows cannot be used"
    first = f"{bad[0]} ({unusable})" if number > len(bad) > 1 else bad[0]
    need(len(bad) <= MOST_BAD * number, f"--{flag} {first}")
    say(f"WARNING: --{flag}: {unusable} and are dropped: {bad[0]}")


def make_prompt(
    row: Row,
    index: int,
    tokenizer: "Tokenizer",
    environment: Any,
    system: str | None,
    strftime: Callable[[str], str],
) -> Prompt:
    """Make the prompt of a row: check its labels, render its messages with the chat template, and tokenize them. A
    `system` message replaces the row's own. Raises ValueError."""
    conversation = conversation_of(row)
    verifiers = checked_verifiers(row)
    messages = row.messages
    if system is not None:
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]

    episode: dict[str, Any] = {}
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "strftime_now": strftime}
    if not row.has_turns:
        environment = None
    if environment is not None:
        tools, config = environment.of_row(row.columns)
        episode = {"messages": messages, "ground_truths": row.ground_truths, "config": config}
        if tools:
            options["tools"] = tools

    text = str(tokenizer.apply_chat_template(messages, **options))
    if environment is not None:
        text = environment.open_prompt(text)
    token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    ground_truths = tuple(row.ground_truths)
    columns = row.reward_columns
    return Prompt(index, token_ids, text, ground_truths, verifiers, conversation, environment, episode, columns)


def conversation_of(row: Row) -> str:
    """The row's messages as verifiers read them: lines "role: content"."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in row.messages)


def checked_verifiers(row: Row) -> tuple[str, ...]:
    """The names of the row's verifiers, after --remap_verifier. Raises ValueError for a row that cannot be used, a
    verifier that does not exist or one that can never score its label."""
    need(not row.problem, row.problem)
    conversation = conversation_of(row)
    verifiers = tuple(rewards.check_verifier(name) for name in row.verifiers)
    for verifier, label in zip(verifiers, row.ground_truths, strict=True):
        problem = rewards.check_ground_truth(verifier, label, conversation, row.reward_columns)
        need(not problem, f"{verifier}: {problem}")
    return verifiers


def date_of_start(args: Flags) -> Callable[[str], str]:
    """A strftime that always gives the date on which the run began. Some chat templates write the date, and a resumed
    run must have the prompts that it began with."""
    begun = None  # now
    path = Path(args.output_dir) / args.exp_name / "environment.json"
    if getattr(args, "resume", False) and path.exists():  # scripts/minimal.py has no --resume
        begun = json.loads(path.read_text()).get("begun")
    day = time.localtime(begun)
    return lambda form: time.strftime(form, day)


def data_hash(*mixers: Sequence[Prompt]) -> str:
    """sha256 over tokens, labels, verifiers, environments and columns for rewards of all prompts in order."""
    digest = hashlib.sha256()
    for prompts in mixers:
        kept = getattr(prompts, "hashed", None)  # of scripts.parts.prepared.Prompts
        for part in kept() if kept else map(hashed, prompts):
            digest.update(part)
    return digest.hexdigest()[:16]


def hashed(prompt: Prompt) -> bytes:
    """What data_hash takes of a prompt."""
    parts = [repr((prompt.token_ids, prompt.ground_truths, prompt.verifiers))]
    parts += [repr(more) for more in (prompt.episode, prompt.reward_columns) if more]  # {} where there is none
    return "".join(parts).encode()


# --- Engines: token ids in, token ids out -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` fixes its tokens, whatever else is in the batch. Temperature 0 is greedy."""

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0
    stop: tuple[str, ...] = ()  # in addition to --stop_strings


# Attributes that hold one value per token of a response
COLUMNS = {"token_ids": np.int32, "logprobs": np.float32, "mask": np.bool_, "versions": np.int32}


class Columns:
    """Base of Generation and Rollout. The attributes named in COLUMNS are numpy arrays. They are pickled as bytes:
    numpy's own pickling takes five times as long."""

    def __post_init__(self) -> None:
        for name, dtype in COLUMNS.items():
            if hasattr(self, name):
                setattr(self, name, np.asarray(getattr(self, name), dtype))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in COLUMNS.keys() & state.keys():
            state[name] = state[name].tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if name in COLUMNS:
                value = np.frombuffer(bytearray(value), COLUMNS[name])  # of a bytearray: the array can be written
            setattr(self, name, value)


@dataclass(eq=False)
class Generation(Columns):
    """What an engine returns for a request: the sampled tokens with the logprob each was sampled with (nats)."""

    token_ids: Any
    logprobs: Any
    finish_reason: str  # "stop" or "length", as the engine reports it; never inferred from the last token
    versions: Any  # version of the weights that sampled each token
    cached: int = 0  # tokens of the request that were found in the prefix cache


OnEnd = Callable[[int, Generation], Future | None] | None  # see Sampler.generate
LOCK = threading.Lock()  # guards tokens and turns of rollouts: one thread adds to them while another one copies them


@dataclass(eq=False)
class Rollout(Columns):
    """One response with everything known about it. The arrays named in COLUMNS only grow. For each token they hold its
    logprob, whether the policy chose it (False: a tool inserted it) and the version of the weights that sampled it. The
    version is -1 where no engine of this run did, as in replayed responses."""

    prompt: Prompt
    position: int  # of the prompt in the endless stream: (position, sample) names a rollout of the run
    sample: int
    token_ids: Any = ()
    logprobs: Any = ()
    mask: Any = ()
    versions: Any = ()
    finish_reason: str = ""
    text: str = ""
    scoring: list[Future] = field(default_factory=list, repr=False)  # futures of the results
    results: list[rewards.RewardResult] = field(default_factory=list)  # one per verifier of the prompt
    verifiable: float = 0.0  # sum of verifier scores; NaN when a verifier could not judge
    format_score: float = 0.0
    outcome: float = 0.0  # verifiers and format, without penalties: a group of equal outcomes has no gradient
    score: float = 0.0  # what GRPO maximizes: the outcome less penalties
    audit: float = math.nan  # sum of the scores by --audit_verifier, for people alone; NaN without it
    advantage: Any = 0.0  # a number for all tokens of the response, or a list or array of one for each
    tokenless: list[float] = field(default_factory=list)  # scores of responses of its group without a sampled token
    turns: list[dict[str, Any]] = field(default_factory=list)  # with an environment: who wrote what, see grpo.end_turn
    over: bool = False  # nothing is added any more
    evaluation: bool = False  # sampled to evaluate the policy, with seeds apart from those of training

    @property
    def state(self) -> str:
        """The environment's state after its last answer."""
        states = [turn["state"] for turn in self.turns if "state" in turn]
        return states[-1] or "" if states else ""

    def append(self, generation: Generation) -> None:
        """Add tokens the policy chose."""
        self._add(
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            mask=np.ones(len(generation.token_ids)),
            versions=generation.versions,
        )
        self.finish_reason = generation.finish_reason

    def append_answer(self, token_ids: Sequence[int]) -> None:
        """Add tokens the policy did not choose: no logprob, no version, no part in the loss."""
        n = len(token_ids)
        self._add(token_ids=token_ids, logprobs=np.zeros(n), mask=np.zeros(n), versions=np.full(n, -1))

    def _add(self, **columns: Any) -> None:
        for name, dtype in COLUMNS.items():
            values = np.asarray(columns[name], dtype)
            setattr(self, name, np.concatenate([getattr(self, name), values]))

    def so_far(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, for `go_back`. It is empty until the rollout has ended a turn or is over,
        and while its environment lives in a process."""
        with LOCK:
            is_live = self.state.startswith("live ")  # as environments.is_live
            if not self.over and (is_live or not self.turns):
                return {}
            kept: dict[str, Any] = {name: torch.from_numpy(getattr(self, name)) for name in COLUMNS}
            kept["finish_reason"] = self.finish_reason
            kept["turns"] = list(self.turns)
            kept["over"] = self.over
            return kept

    def go_back(self, kept: dict[str, Any]) -> None:
        """Restore a state that `so_far` returned."""
        for name, value in kept.items():
            setattr(self, name, value)
        self.__post_init__()


Group = list[Rollout]  # the responses to one prompt


def distinct_outcomes(group: Group) -> set[float]:
    """The different outcomes of a group, without missing ones (NaN). With two or more the group has a gradient."""
    return {r.outcome for r in group if not math.isnan(r.outcome)}


def eos_token_ids(args: Flags, tokenizer: "Tokenizer") -> list[int]:
    """Every end-of-sequence id of the model: the tokenizer's, and those of its generation config or else its config."""
    from transformers import AutoConfig, GenerationConfig

    try:
        config: Any = GenerationConfig.from_pretrained(start_dir(args))
    except OSError:  # no generation_config.json
        config = pretrained(AutoConfig, args).get_text_config()
    configured = getattr(config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return sorted({n for n in ids if n is not None})


class Sampler:
    """Something that samples responses: one engine, or all engines of grpo_fast.py."""

    tokenizer: "Tokenizer"
    eos_ids: list[int]

    def generate(self, requests: Sequence[Request | Future], finished: OnEnd = None) -> list[Generation]:
        """Sample all requests to their end; the result has their order. finished(i, generation) is called when request
        i ends. It may return a future, whose result is a request that continues request i, or None, and so may a
        request be."""
        raise NotImplementedError

    def stop(self, version: int) -> None:
        """Let processes that sample end, once they have the weights `version`."""

    asleep = False  # since the last load_weights

    def sleep(self) -> None:
        """Free the engine's memory where possible, its weights and cache, until load_weights."""

    def close(self) -> None:
        """End the engine, if there is anything to end."""


class Engine(Sampler):
    """What both engines have in common: `add` requests, `step` until not `busy`, `load_weights` in between."""

    def __init__(self, args: Flags, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer
        self.eos_ids = eos_token_ids(args, tokenizer)
        self.stop_strings = list(args.stop_strings)
        self.version = -1
        self.on_token: Callable[[], None] = lambda: None  # called between two tokens of a long `step`
        # With --deterministic the next turns start together, once all have been answered: no batch depends on timing
        self.in_rounds = args.deterministic

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
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
        """Work on the requests for a while; return those that finished."""
        raise NotImplementedError

    def generate(self, requests: Sequence[Request | Future], finished: OnEnd = None) -> list[Generation]:
        results: dict[int, Generation] = {}
        answers: dict[int, Future] = {}  # request -> future of the request that continues it
        with fenced_rng():
            for i, request in enumerate(requests):
                if isinstance(request, Future):
                    answers[i] = request
                else:
                    self.add(str(i), request)
            while self.busy or answers:
                self._add_answered(answers)
                if not self.busy:
                    continue
                for name, generation in self.step():
                    i = int(name)
                    results[i] = generation
                    answer = finished(i, generation) if finished else None
                    if answer:
                        answers[i] = answer
        return [results[i] for i in sorted(results)]

    def _add_answered(self, answers: dict[int, Future]) -> None:
        """Start the requests of the answers that are ready. An idle engine waits until one is ready, or until all are
        if turns start together (--deterministic)."""
        if self.busy and self.in_rounds:
            return
        if not self.busy:
            wait(answers.values(), return_when="ALL_COMPLETED" if self.in_rounds else "FIRST_COMPLETED")
        ready = sorted(i for i, answer in answers.items() if answer.done())
        for i in ready:
            request = answers.pop(i).result()
            if request:
                self.add(str(i), request)


@contextlib.contextmanager
def no_weight_missing(model: torch.nn.Module):
    """Raise UserError for weights that vLLM did not take: it only logs them, at a level that is off. A layer without
    weights is logged too. GPT-OSS writes its experts and sinks past the loaders, to tensors without memory."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload")
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    owners = set()
    for name, _ in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        owners.add(type(layer).__name__)
    lost = [text for text in messages if "not loaded" in text or text.partition(": Failed to load")[0] in owners]
    words = "; ".join(dict.fromkeys(lost))
    need(not lost, f"vLLM did not take all weights: take --rollout_backend transformers. {words:.300}")


class VLLMEngine(Engine):
    """vLLM in this process, driven step by step, on this rank's device. All ranks construct and load their engines at
    the same time: vLLM builds its one-rank groups inside the ranks' own world (`external_launcher`)."""

    def __init__(self, args: Flags, tokenizer: "Tokenizer", world: World, num_requests: int):
        on_cpu = world.device.type == "cpu"
        if not on_cpu:
            # Compiled code contains the device's number, but vLLM caches it by rank: see tests/gpu_contract
            os.environ["VLLM_CACHE_ROOT"] = os.path.join(VLLM_CACHE, f"device_{world.device.index}")
        prepare_compiler()
        from vllm import LLM

        if not gc.get_freeze_count():  # vLLM's start collects garbage five times: exempt the objects of all imports
            gc.collect()
            gc.freeze()
        max_num_seqs = min(num_requests, 1024)
        max_model_len = args.max_prompt_token_length + max(args.response_length, args.eval_response_length or 0)
        options = cpu_engine_options(args, max_model_len) if on_cpu else gpu_engine_options(args, max_num_seqs)
        if args.vllm_tensor_parallel_size > 1:
            prepare_engine_ranks(on_cpu)
        options |= {"max_num_seqs": max_num_seqs} | args.more_engine_options()
        with fenced_rng():
            self.llm = LLM(
                model=start_dir(args),
                trust_remote_code=args.trust_remote_code,
                dtype=args.model_dtype,
                seed=args.seed,
                max_model_len=max_model_len,
                tensor_parallel_size=args.vllm_tensor_parallel_size,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
                enable_sleep_mode=not on_cpu and args.vllm_sleep != "off",
                enforce_eager=args.vllm_enforce_eager,
                enable_prefix_caching=args.vllm_enable_prefix_caching,
                logprobs_mode="processed_logprobs",  # after temperature: the distribution that was sampled from
                generation_config="vllm",  # else the model's own sampling defaults apply
                disable_log_stats=True,
                use_tqdm_on_load=False,
                **options,
            )
        self.engine = self.llm.llm_engine
        self.worker = self.engine.model_executor.driver_worker.worker
        super().__init__(args, tokenizer)
        self.loads = 0  # how often weights were loaded
        self.engine.set_weight_version("-1")

    def sleep(self) -> None:
        if self.asleep or not self.llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
            return
        with fenced_rng():
            self.llm.sleep(2)  # 1 would pin a copy of the weights in host memory, rounded up to a power of two
        self.asleep = True

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        model = self.worker.get_model()
        with fenced_rng():
            if self.asleep:
                self.llm.wake_up(["weights"])
            with no_weight_missing(model):
                self.worker.reload_weights(weights_iterator=known_weights(model, named_tensors))
            if not torch.cuda.is_available():
                pack_experts(model)
            if self.asleep:
                self.llm.wake_up(["kv_cache"])
        self.version = version
        self.asleep = False
        self.loads += 1
        core: Any = self.engine.engine_core
        if not core.engine_core.batch_queue:  # else the next step still returns tokens of the weights before
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
            raise RuntimeError("the engine gave its weights back: load_weights first")
        # The salt hides prefix-cache blocks of older weights. It is no version: --load_states loads a version twice
        prompt: Any = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": str(self.loads)}
        self.engine.add_request(request_id, prompt, params)

    def step(self) -> list[tuple[str, Generation]]:
        """Run one decoding step for all running requests; return those that finished."""
        finished = []
        for output in self.engine.step():
            response: Any = output.outputs[0]  # ty: ignore[not-subscriptable]
            if not response.token_ids:
                raise RuntimeError(f"vLLM finished request {output.request_id} without a token")
            reason = "stop" if response.finish_reason == "stop" else "length"
            spans = response.weight_versions
            lengths = [span.end - span.start for span in spans]
            versions = np.repeat([int(span.version) for span in spans], lengths)
            cached = output.num_cached_tokens or 0
            generation = Generation(response.token_ids, response.logprobs.logprobs, reason, versions, cached)
            finished.append((output.request_id, generation))
        self.engine.set_weight_version(str(self.version))  # on a GPU a step returns the tokens of the step before
        return finished

    def close(self) -> None:
        """Stop the engine. It also ends the process group it shares with the learner."""
        self.engine.engine_core.shutdown()


def known_weights(model: torch.nn.Module, named_tensors: NamedTensors) -> NamedTensors:
    """The weights that vLLM's model knows: without a tied head, where it has no head of its own."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    has_head = any(name.endswith("lm_head") for name in modules)
    for name, tensor in named_tensors:
        if has_head or name != "lm_head.weight":
            yield name, tensor


def pack_experts(model: torch.nn.Module) -> None:
    """Have vLLM's CPU build lay out the experts for its kernel, which it does by itself after the first load only."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def cpu_engine_options(args: Flags, max_model_len: int) -> dict[str, Any]:
    """Options of vLLM on a CPU. Its CPU build cannot rewind a seeded generator, which chunked prefill needs: prompts
    are scheduled whole. The prefix cache shares whole blocks, and most prompts are shorter than the default of 128."""
    options: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
    if args.vllm_enable_prefix_caching:
        options["block_size"] = 32
    return options


def gpu_engine_options(args: Flags, max_num_seqs: int) -> dict[str, Any]:
    """Options of vLLM on a GPU. Its CUDA graphs end at 512 sequences: extend them to the batch, in steps of 16."""
    if args.vllm_enforce_eager or max_num_seqs <= 512:
        return {}
    return {"max_cudagraph_capture_size": 16 * math.ceil(max_num_seqs / 16)}


def prepare_engine_ranks(on_cpu: bool) -> None:
    """Prepare for an engine over several ranks (--vllm_tensor_parallel_size)."""
    if on_cpu:
        # CPU ranks share memory under one name for all runs of the host: let them use gloo instead
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False  # ty: ignore[invalid-assignment]
    sockets = tempfile.mkdtemp(prefix="vllm_")  # vLLM does not remove the sockets of its ranks
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    sweep(sockets)


def make_engine(args: Flags, tokenizer: "Tokenizer", world: World, num_requests: int) -> Engine:
    """The engine of --rollout_backend. `num_requests` is how many responses are wanted at once. All ranks."""
    if args.rollout_backend == "vllm":
        return VLLMEngine(args, tokenizer, world, num_requests)
    from scripts.parts import transformers_engine

    return transformers_engine.TransformersEngine(args, tokenizer, world, num_requests)


# --- Packs: which sequences go together, and attention inside them ----------------------------------------------------

PACK_ATTENTION = "packs"
SHORT_PIECE = 256  # tokens up to which one masked product is faster than one per response (CPU)


def segment_ids(shared: int, segments: Sequence[int]) -> list[int]:
    """The number of each token's segment in a piece: 0 for the shared tokens, then 1, 2, ..."""
    ids = [0] * shared
    for i, n in enumerate(segments, 1):
        ids += [i] * n
    return ids


class Layout:
    """Which tokens of a pack attend to which. A pack is a row of pieces, and a piece is a prompt with some responses:
    (shared tokens, tokens of each segment). A segment attends to the shared tokens of its piece and, causally, to
    itself."""

    def __init__(self, pieces: Sequence[tuple[int, Sequence[int]]], device: torch.device):
        self.device = device
        self.windows: dict[int, Layout] = {}  # the same pack where layers attend within a window: parts/attention.py
        self.pieces = []
        self.length = 0  # tokens
        for shared, segments in pieces:
            length = shared + sum(segments)
            self.length += length
            if len(segments) == 1:  # plain causal attention
                self.pieces.append((0, [length]))
            else:
                self.pieces.append((shared, list(segments)))

    @functools.cached_property
    def chunks(self) -> list[list[int]]:
        """The products in which a CPU computes the attention of each piece, as numbers of tokens. A piece that is short
        or has one segment is one product. Any other piece has a product for the shared tokens and one for each segment.
        """
        chunks = []
        for shared, segments in self.pieces:
            length = shared + sum(segments)
            if length <= SHORT_PIECE or len(segments) == 1:
                chunks.append([length])
            else:
                chunks.append([shared, *segments])
        return chunks

    @functools.cached_property
    def masks(self) -> dict[tuple[int, ...], Tensor]:
        """Boolean masks (queries, keys) of the products that are not plainly causal. The mask of a whole piece has the
        key (shared tokens, *tokens of each segment), that of one segment (shared tokens, tokens of the segment), and
        that of shared tokens alone (0, shared tokens)."""
        masks = {}
        for (shared, segments), chunks in zip(self.pieces, self.chunks, strict=True):
            if len(segments) == 1:
                continue
            if len(chunks) == 1:
                ids = torch.tensor(segment_ids(shared, segments))
                visible = (ids == 0) | (ids == ids[:, None])
                masks[shared, *segments] = visible.tril()
            else:
                for n in segments:
                    masks[shared, n] = torch.ones(n, shared + n, dtype=torch.bool).tril(shared)
        return masks

    def attends(self) -> Callable:
        """Flex attention's function (batch, head, query, key) -> whether this key is visible to this query."""
        pieces: list[int] = []  # of each token
        segments: list[int] = []
        for i, (shared, lengths) in enumerate(self.pieces):
            ids = segment_ids(shared, lengths)
            segments += ids
            pieces += [i] * len(ids)
        ids = send(torch.tensor([pieces, segments]), self.device)
        piece = ids[0]
        segment = ids[1]

        def attends(_batch, _head, q, k):
            visible = (segment[k] == 0) | (segment[k] == segment[q])
            return (q >= k) & (piece[q] == piece[k]) & visible

        return attends

    @functools.cached_property
    def block_mask(self) -> Any:
        """The mask of the whole pack, for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        # Compiled, it never holds a mask of all pairs
        make_mask = torch.compile(create_block_mask, disable=self.device.type == "cpu")
        return make_mask(self.attends(), None, None, self.length, self.length, self.device)


@functools.cache
def _flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.cuda.is_available():
        return flex_attention
    return torch.compile(flex_attention, **prepare_compiler())  # uncompiled it makes the scores of all pairs


def fit_flex_attention(config: Any, dtype: torch.dtype, tokens: int, device: torch.device) -> str:
    """Run flex attention over a pack of `tokens`, forward and backward, for this model's heads on this GPU. Returns "",
    or why that fails: heads of 256, or of 128 in float32, need more shared memory than some GPUs have."""
    shared = tokens // 2
    layout = Layout([(shared, [tokens - shared])], device)
    heads, kv_heads, width = max(attention_heads(config), key=lambda layer: layer.width)
    kv_shape = (1, kv_heads, tokens, width)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    query = torch.ones(1, heads, tokens, width, **options)
    key = torch.ones(kv_shape, **options)
    value = torch.ones(kv_shape, **options)
    try:
        mixed, _ = pack_attention(torch.nn.Module(), query, key, value, None, layout=layout, flex=True)
        mixed.sum().backward()
    except (torch.OutOfMemoryError, TypeError, AttributeError, NameError, ImportError):
        raise  # these are no matter of the kernel
    except Exception as error:  # torch, Inductor, Triton and the driver raise classes of their own
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


def pack_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: Layout | None = None,
    flex: bool | None = None,
    group: dist.ProcessGroup | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of (1, heads, T, D) queries inside the pieces of a pack; without a layout transformers' own SDPA.

    Returns (1, T, heads, D). A GPU runs one flex attention over the pack. A CPU attends piece by piece: one mask for
    the whole pack would have work for all pairs of its tokens. `flex` overrides that choice. With a
    `group` the T tokens are this rank's only (Ulysses): see scripts/parts/attention.py. With a `sliding_window`, which
    a model names layer by layer, a token attends to itself and the sliding_window - 1 before it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if group is not None:
        from scripts.parts import attention

        return attention.attend(query, key, value, scaling, layout, flex, group, sliding_window), None
    if sliding_window:
        from scripts.parts import attention

        layout = attention.narrow(layout, sliding_window, query)
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if flex is None:
        flex = query.is_cuda
    if not flex:
        return _attend_by_piece(query, key, value, scaling, layout), None
    # else packs of fewer than 128 tokens get torch's kernels for decoding, which our block masks do not fit
    options: dict[str, Any] = {"scale": scaling, "kernel_options": {"BACKEND": "TRITON"}}
    grouped = query.shape[1] != key.shape[1]
    mixed = _flex_attention()(query, key, value, block_mask=layout.block_mask, enable_gqa=grouped, **options)
    return mixed.transpose(1, 2).contiguous(), None


def _attend_by_piece(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, layout: Layout) -> Tensor:
    """Attention of a pack, with a product for each chunk of its layout. Returns (1, T, heads, D)."""
    from transformers.integrations.sdpa_attention import repeat_kv

    repeats = query.shape[1] // key.shape[1]
    key = repeat_kv(key, repeats)
    value = repeat_kv(value, repeats)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, scale=scaling)
    lengths = [n for chunks in layout.chunks for n in chunks]
    queries = query.split(lengths, dim=2)
    keys = key.split(lengths, dim=2)
    values = value.split(lengths, dim=2)

    mixed = []
    first = 0  # the piece's first chunk
    for (shared, segments), chunks in zip(layout.pieces, layout.chunks, strict=True):
        q = queries[first]
        k = keys[first]
        v = values[first]
        mask = layout.masks.get((shared, *segments) if len(chunks) == 1 else (0, shared))
        mixed.append(attend(q, k, v, mask, is_causal=mask is None))
        for i in range(first + 1, first + len(chunks)):  # the segments, after the shared tokens
            seen_keys = torch.cat([k, keys[i]], dim=2)
            seen_values = torch.cat([v, values[i]], dim=2)
            mask = layout.masks[shared, lengths[i]]
            mixed.append(attend(queries[i], seen_keys, seen_values, attn_mask=mask))
        first += len(chunks)
    return torch.cat([x.transpose(1, 2) for x in mixed], dim=1)


def balance(tokens: Sequence[float], costs: Sequence[float], bins: int, exchanges: int = 1000) -> list[list[int]]:
    """Distribute items over `bins` such that the sums of tokens and of costs are even. Returns the indices of each bin,
    ascending. Longest processing time first (Graham 1969), then at most `exchanges` exchanges between the fullest bin
    and an emptier one, as long as they help."""
    if bins == 1:
        return [list(range(len(tokens)))]
    sizes = np.array([tokens, costs], dtype=np.float64)  # (2, items)
    totals = np.maximum(sizes.sum(1, keepdims=True), 1e-9)
    sizes /= totals / bins  # 1.0 is an even share
    # A few long items cannot be even in both, so costs count half: they may deviate a bit more than tokens do
    sizes[1] = sizes.mean(0)

    owner = np.zeros(len(tokens), dtype=np.int64)  # the bin of each item
    loads = np.zeros((2, bins))
    for i in np.argsort(-sizes.sum(0), kind="stable"):
        with_item = loads + sizes[:, i, None]  # of each bin, if the item were in it
        best = with_item.max(0).argmin()
        owner[i] = best
        loads[:, best] += sizes[:, i]

    for _ in range(exchanges):
        if loads.max() <= 1.002 or not _exchange_items(sizes, owner, loads):
            break
    return [np.flatnonzero(owner == b).tolist() for b in range(bins)]


def _exchange_items(sizes: np.ndarray, owner: np.ndarray, loads: np.ndarray) -> bool:
    """Move an item out of the fullest bin, in exchange for an item of another bin or for nothing. Take the exchange
    after which the fuller of the two bins is least full. `sizes` is (2, items) and `loads` (2, bins). `owner` and
    `loads` change in place. Returns False if no exchange helps."""
    highest = loads.max(0)  # (bins,)
    fullest = int(highest.argmax())
    # 64 other bins are enough: with all of them, 2,048 bins of 8 items took seconds
    emptiest = np.argsort(highest, kind="stable")[:64]
    partners = np.sort(emptiest[emptiest != fullest])

    # An item of `given` leaves. An item of `others` comes back or, in the last columns, nothing
    given = np.flatnonzero(owner == fullest)[:256]
    others = np.flatnonzero(np.isin(owner, partners))
    returned_sizes = np.pad(sizes[:, others], ((0, 0), (0, len(partners))))
    partner = np.concatenate([owner[others], partners])
    moved = sizes[:, given, None] - returned_sizes[:, None, :]  # (2, given, others + partners)
    fullest_after = loads[:, fullest, None, None] - moved
    partner_after = loads[:, partner][:, None, :] + moved
    after = np.maximum(fullest_after, partner_after).max(0)

    i, j = np.unravel_index(after.argmin(), after.shape)
    if after[i, j] >= highest[fullest] - 1e-9:
        return False
    loads[:, fullest] -= moved[:, i, j]
    loads[:, partner[j]] += moved[:, i, j]
    owner[given[i]] = partner[j]
    if j < len(others):
        owner[others[j]] = fullest
    return True


def pack_bins(tokens: Sequence[int], costs: Sequence[float], budget: int) -> list[list[int]]:
    """Distribute items (indices) over bins of at most `budget` tokens, as few as best-fit-decreasing needs. Then even
    the bins out, if they stay within the budget. Returns costly bins first. An item above the budget is a bin of its
    own, and so is every item with budget 0."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        tightest = bisect.bisect_left(rooms, (tokens[i], 0))  # the fullest bin with enough room
        if tightest < len(rooms):
            left, b = rooms.pop(tightest)
        else:
            left = budget
            b = len(bins)
            bins.append([])
        bins[b].append(i)
        bisect.insort(rooms, (left - tokens[i], b))

    if len(bins) > 1 and budget:
        even = balance(tokens, costs, len(bins), exchanges=0)
        fullest = max(sum(tokens[i] for i in items) for items in even)
        if fullest <= budget:
            bins = even
    for items in bins:
        items.sort()
    return sorted(bins, key=lambda items: -sum(costs[i] for i in items))


class Heads(NamedTuple):
    """The attention of a layer: heads of queries, heads of keys and values, width of a head."""

    queries: int
    keys: int
    width: int


def attention_heads(config: Any) -> list[Heads]:
    """The attention of each layer of a model's text part, by its config. Layers may differ; some have none."""
    layers = []
    for text in config.get_text_config().per_layer_config:
        queries = getattr(text, "num_attention_heads", None) or 0
        keys = getattr(text, "num_key_value_heads", None) or queries
        width = getattr(text, "head_dim", None) or text.hidden_size // max(queries, 1)
        layers.append(Heads(queries, keys, width))
    return layers


def attention_width(config: Any) -> int:
    """Heads x head dimension over all layers: a (query, key) pair costs 4 times as many operations in a forward."""
    return sum(layer.queries * layer.width for layer in attention_heads(config))


def matmul_parameters(model: Any) -> tuple[int, int]:
    """(weights of the matrices that multiply a token, weights of the head, which multiplies response tokens).

    Of a mixture's experts, which are one tensor (experts, rows, columns), a token uses some."""
    share = experts_share(model.config)
    head = model.get_output_embeddings().weight
    left_out = {id(head)}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            left_out.add(id(module.weight))
    matrices = 0
    for p in model.parameters():
        if p.ndim >= 2 and id(p) not in left_out:
            matrices += round(p.numel() * share) if p.ndim == 3 else p.numel()
    return matrices, head.numel()


# Names of a config for how many experts a layer has, and how many compute a token
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
USED_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def experts_share(config: Any) -> float:
    """The share of a mixture's experts that compute a token; 1 for models without experts."""
    text = config.get_text_config()
    used = [getattr(text, name, None) for name in USED_EXPERTS]
    experts = [getattr(text, name, None) for name in EXPERTS]
    some = [n for n in used if isinstance(n, int) and n]
    total = [n for n in experts if isinstance(n, int) and n]
    return some[0] / total[0] if some and total else 1.0


# --- Sharding, weights, checkpoints -----------------------------------------------------------------------------------

GROUP_BYTES = 2**28  # of weights in compute dtype that are gathered together, or one layer
NARROW = 2**24  # weights of a layer that a GPU computes in less time than the host takes to tell it to
DITHER_SLICE = 2**18  # weights dithered at a time: what they need stays in a core's cache


def shard_model(module: torch.nn.Module, model: Any, args: Flags, world: World) -> Any:
    """Shard `module`, whose forward is called, and the layers of the causal LM `model` in it over all ranks.

    Compute is in --model_dtype; master weights and gradient reduction are in float32; frozen weights are stored in
    --model_dtype. --deepspeed_stage 0 replicates (a mesh of shard size 1), 2 shards gradients and optimizer state, 3
    also frees parameters after the forward, but for those with which the backward begins: of the last of several groups
    of layers, and those of no layer. With --fsdp_shard_size N each N neighbouring ranks have the whole model, and
    replicas add up their gradients. Inputs are not cast: FSDP would copy all that a batch holds, and tokens need no
    cast. --offload reference keeps the shards of a model that does not train in host memory. See needs_no_wrapper for
    when `module` stays the plain one that it is.
    """
    trains = any(p.requires_grad for p in model.parameters())
    if needs_no_wrapper(args, world.size, trains):
        return place_model(module, model, args, world)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    shards = args.fsdp_shard_size or world.size
    if args.deepspeed_stage == 0:
        shards = 1
    replicated = shards < world.size or args.deepspeed_stage == 0
    mesh = device_mesh(dist.group.WORLD, world.device.type, (world.size // shards, shards))
    compute_dtype = DTYPES[args.model_dtype]
    options: dict[str, Any] = {
        "mesh": mesh if replicated else mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False),
    }
    if "reference" in args.offload and not trains:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = layer_groups(blocks_of(model), compute_dtype.itemsize)
    stays = groups[-1] if len(groups) > 1 else None  # FSDP keeps the buffer of its gather too: room for two of several
    for group in groups:
        for layer in group:  # one at a time: the host never holds the whole model in float32
            cast_weights(layer, names, args)
        frees = args.deepspeed_stage == 3 and group is not stays
        fully_shard(group, **options, reshard_after_forward=frees)
    if trains and compute_dtype is torch.float16:
        from scripts.parts import loss_scale

        loss_scale.add(module)
    cast_weights(module, names, args)
    return fully_shard(module, **options, reshard_after_forward=False)


def needs_no_wrapper(args: Any, ranks: int, trains: bool) -> bool:
    """Whether one learner without --deepspeed_stage computes with the weights that it stores: those of float32 compute,
    and those of a model that does not train. FSDP would only keep a second copy of them and cost the host time. With
    bfloat16 or float16 that copy is what the forward computes with: FSDP makes it once an optimizer step, and adds the
    gradients up in float32."""
    if ranks > 1 or args.deepspeed_stage != 0:
        return False
    return args.model_dtype == "float32" if trains else "reference" not in args.offload


def place_model(module: torch.nn.Module, model: Any, args: Flags, world: World) -> Any:
    """Cast a plain model and move it to the device, a layer at a time, as shard_model does."""
    names = {id(p): name for name, p in model.named_parameters()}
    for part in (*blocks_of(model), module):
        cast_weights(part, names, args)
        part.to(world.device)
    return module


def layer_groups(layers: Sequence[torch.nn.Module], itemsize: int) -> list[list[torch.nn.Module]]:
    """Neighbouring layers of one kind in groups of at most GROUP_BYTES, a larger layer alone."""
    groups: list[list[torch.nn.Module]] = []
    room = 0
    for layer in layers:
        size = itemsize * sum(p.numel() for p in layer.parameters())
        if size > room or type(layer) is not type(groups[-1][0]):
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(layer)
        room -= size
    return groups


@functools.cache
def device_mesh(_ranks: object, device_type: str, shape: tuple[int, int]) -> Any:
    """The mesh of all ranks (`_ranks`, their group). Policy and reference share the mesh, and so its communicators."""
    return dist.init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def cast_weights(part: Any, names: dict[int, str], args: Flags) -> None:
    """Cast the parameters of `part` that are still in `names` (id -> name), and remove them from `names`. Parameters
    that train become float32, dithered with --dither_master_weights; others get --model_dtype. Buffers become
    float32."""
    dithered = args.dither_master_weights and args.model_dtype == "bfloat16"
    for p in part.parameters():
        name = names.pop(id(p), None)
        if name is None:
            continue
        p.data = p.data.to(torch.float32 if p.requires_grad else DTYPES[args.model_dtype])
        if p.requires_grad and dithered:
            dither(p.data, derive_seed(args.seed, name))
    for buffer in part.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()


def compile_layers(model: Any) -> None:
    """Have torch.compile fuse the operations between the matrix products of each decoder layer. Call it before FSDP and
    checkpoint_layers: both stay outside the compiled code. One graph serves any number of tokens; attention
    over a pack is not compiled. Raises UserError if the model does not name its layers."""
    layers = blocks_of(model)
    need(bool(layers), f"--compile_layers: {type(model).__name__} does not name its layers: leave the flag out")
    options = prepare_compiler()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, **options)


def blocks_of(model: Any) -> list[Any]:
    """The layers of the decoder."""
    names = set(model._no_split_modules or ())
    return [m for part in trained_parts(model) for m in part.modules() if type(m).__name__ in names]


def checkpoint_layers(model: Any) -> None:
    """Recompute each decoder layer in the backward.

    Call it after compile_layers and before shard_model, whose hooks then run once a layer. Random states are not
    kept: no layer has dropout (load_causal_lm), and packing.first_that_agrees sees that none draws numbers.
    """
    layers = blocks_of(model)
    need(bool(layers), f"--gradient_checkpointing: {type(model).__name__} does not name its layers: leave the flag out")
    for layer in layers:
        is_narrow = sum(p.numel() for p in layer.parameters()) <= NARROW
        layer.forward = functools.partial(recompute, layer.forward, is_narrow)


def recompute(forward: Callable[..., Any], is_narrow: bool, *args: Any, **kwargs: Any) -> Any:
    """forward(*args, **kwargs), computed again in the backward. The same bits in one of two ways.

    As a rule torch keeps track of each tensor that the backward needs, and stops before the last product, whose output
    it does not need. A narrow layer is computed again as a whole, by the re-entrant checkpoint, which costs the host a
    quarter less of a micro-batch. That one gives a gradient to tensors among `args` alone.
    """
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import checkpoint

    direct = [x for x in args if getattr(x, "requires_grad", False)]
    taking = [x for x in tree_leaves((args, kwargs)) if getattr(x, "requires_grad", False)]
    if is_narrow and torch.is_grad_enabled() and 0 < len(taking) == len(direct):
        whole = functools.partial(forward, **kwargs)
        return checkpoint(whole, *args, use_reentrant=True, preserve_rng_state=False)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    return checkpoint(forward, *args, **options, **kwargs)


def gradient_sync(module: Any, args: Flags, last: bool) -> None:
    """Tell FSDP before a backward whether it is the `last` of its optimizer step. Replicated ranks add up locally and
    reduce once. Sharded ranks reduce in every micro-batch to save memory; replicas of their shards do it once."""
    is_plain = not hasattr(module, "set_requires_gradient_sync")
    if is_plain or getattr(module, "syncs", None) is last:  # FSDP would walk through all modules again
        return
    module.syncs = last
    if args.deepspeed_stage == 0:
        module.set_requires_gradient_sync(last)
    elif args.fsdp_shard_size:
        module.set_requires_all_reduce(last)
    if args.deepspeed_stage != 3:
        module.set_reshard_after_backward(last)


def dither(weight: Tensor, seed: int) -> None:
    """Move each float32 weight that is a bfloat16 number to a random place among those that round to it, in place.

    A weight in the middle of its rounding interval takes hundreds of updates of the learning rate's size to reach an
    end of it. Until then nothing that computes in bfloat16 changes. Dithered, the share of weights that round to
    another number grows with the drift, from the first update on. The policy stays the same bit for bit: rounded to
    nearest, weight + offset is the same number for offsets of -32767 to 32767 units of the 16 bits that rounding drops.
    Zeros stay, and so do weights between two bfloat16 numbers (those of float32 checkpoints).

    Slices take this rank's share of the cores, in Python's threads: torch's own wait for each other after every
    operation, which takes minutes where an engine starts on the same cores.
    """
    weights = weight.view(torch.int32).view(-1).numpy()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    share = math.ceil(len(ALL_CORES) / ranks)
    starts = range(0, len(weights), DITHER_SLICE)
    with ThreadPoolExecutor(share) as pool:
        list(pool.map(functools.partial(dither_slice, weights, seed), starts))


def dither_slice(weights: np.ndarray, seed: int, start: int) -> None:
    """Dither DITHER_SLICE weights from `start` on; `weights` has their bits, as int32."""
    bits = weights[start : start + DITHER_SLICE]
    generator = np.random.PCG64(seed)
    generator.advance(start // 4)  # a random word is four offsets
    random_words = generator.random_raw(math.ceil(len(bits) / 4))
    raw_offsets = random_words.view(np.int16)[: len(bits)]
    offsets = np.maximum(raw_offsets, -32767).astype(np.int32)  # -32768 is the tie between two numbers
    is_bfloat16 = bits & 0xFFFF == 0
    is_nonzero = bits << 1 != 0
    bits += offsets * (is_bfloat16 & is_nonzero)


def shard_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def class_of(config: Any, name: str) -> Any:
    """transformers' auto class for a model: with all its parts, where its config has some. Raises UserError."""
    import transformers

    texts = (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
    parts = (transformers.AutoModelForImageTextToText, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    in_parts = config.get_text_config() is not config
    for auto_class, mapping in (parts, texts) if in_parts else (texts, parts):
        has_own = is_own_code(config) and auto_class.__name__ in config.auto_map
        if type(config) in mapping or has_own:
            return auto_class
    kind = type(config).__name__
    raise UserError(f"--model_name_or_path {name}: transformers has no causal language model for a {kind}")


def is_own_code(config: Any) -> bool:
    """Whether a config is of code that came with its model, which --trust_remote_code has let run."""
    from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

    return type(config).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME


def model_class(config: Any, auto_class: Any) -> Any:
    """The class of a model that is of one of transformers' auto classes."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    if is_own_code(config):
        return get_class_from_dynamic_module(config.auto_map[auto_class.__name__], config.name_or_path)
    return auto_class._model_mapping[type(config)]


def trained_parts(model: Any) -> list[torch.nn.Module]:
    """The parts of a model that text trains: all, or of several parts the decoder, its embedding and its head."""
    if model.config.get_text_config() is model.config:
        return [model]
    return [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]


def load_causal_lm(args: Flags) -> Any:
    """The Hugging Face causal LM without dropout, not sharded yet, in its checkpoint's dtype. Parts that text does not
    train, such as vision, are frozen."""
    from transformers import AttentionInterface, AutoConfig

    from scripts.parts import packing

    # Each pack has another layout, for which a compiled layer would be compiled again
    attention = torch.compiler.disable(pack_attention) if args.compile_layers else pack_attention
    AttentionInterface.register(PACK_ATTENTION, attention)
    name = args.model_name_or_path
    auto_class = class_of(pretrained(AutoConfig, args), name)
    model: Any = pretrained(auto_class, args, dtype="auto", attn_implementation=args.attn_implementation)
    model.requires_grad_(False)
    for part in trained_parts(model):
        part.requires_grad_(True)
    if packing.takes_our_attention(model, args):
        model.set_attn_implementation(PACK_ATTENTION)

    # Without dropout old and new logprobs agree. eval() would also switch gradient checkpointing off. Whatever draws
    # numbers under another name is refused at the start: packing.refuse_noise
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)
        # vLLM, in grpo.py's process, may compile the class of this model for its own use
        module.do_not_compile = True
    return model.train()


def prepare_compiler() -> dict[str, Any]:
    """Import Inductor, and return torch.compile's options: any number of tokens, and 64 graphs of a function in place
    of torch's 8. The limit is set in torch's global settings, too; those do not reach the thread of a GPU's backward.
    """
    setattr(torch._dynamo.config, "recompile_limit", 64)  # noqa: B010
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.makedirs(cache, exist_ok=True)
    # Inductor's import chooses the temporary directory for precompiled C++ headers: let them outlive the run
    tempfile.tempdir = cache
    importlib.import_module("torch._inductor.codecache")
    tempfile.tempdir = None
    return {"dynamic": True, "recompile_limit": 64}


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether a layer of the module has a LoRA adapter."""
    return any(hasattr(layer, "lora_A") for layer in module.modules())


def without_adapters(model: Any) -> contextlib.AbstractContextManager[None]:
    """The model as it was before training, if it has adapters; else nothing changes."""
    if not has_adapters(model):
        return contextlib.nullcontext()
    from scripts.parts import adapters

    return adapters.without_adapters(model)


def named_weights(model: Any) -> NamedTensors:
    """(name, parameter) of all weights of a model except adapters, then the buffers that its files have. A tied head is
    yielded under its own name too: vLLM's CPU backend keeps a packed copy of it, which would go stale."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            parameters[name.replace(".base_layer.", ".")] = parameter
    yield from parameters.items()
    if "lm_head.weight" not in parameters and model.get_output_embeddings() is not None:
        yield "lm_head.weight", model.get_input_embeddings().weight
    saved = model.state_dict().keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


@torch.no_grad()
def shard_again(module: torch.nn.Module) -> None:
    """Make parameters() this rank's shards of the master weights. After a forward without a backward FSDP has whole
    copies in compute dtype in their place: it drops them later, with everything that was written to them."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def full_weights(policy: Any, dtype: torch.dtype) -> NamedTensors:
    """Yield (name, whole tensor in `dtype`) of named_weights(policy.model), one at a time, with adapters merged into
    them; buffers keep their dtype. All ranks must exhaust it in lock-step."""
    shard_again(policy)
    if has_adapters(policy.model):
        from scripts.parts import adapters

        yield from adapters.merged_weights(policy.model, dtype)
    else:
        yield from gather_weights(named_weights(policy.model), dtype)


def for_engine(model: Any, named: NamedTensors, args: Flags) -> NamedTensors:
    """A model's weights under the names that its engine knows, a layer at a time. vLLM knows those of the checkpoint:
    transformers has others in memory, and the experts of a layer as one tensor. Tensors may be on the meta device."""
    from transformers.core_model_loading import revert_weight_conversion

    if args.rollout_backend != "vllm":
        yield from named
        return
    for _, layer in itertools.groupby(named, layer_of):
        tensors = dict(layer)
        converted = revert_weight_conversion(model, tensors)
        yield from converted.items()


def layer_of(named: tuple[str, Any]) -> str:
    """The beginning of a weight's name that those of its layer share."""
    name, _ = named
    return re.sub(r"(\.\d+\.).*", r"\1", name)


def engine_weights(policy: Any, args: Flags) -> NamedTensors:
    """What an engine loads: full_weights(policy) in --model_dtype, under the engine's names. All ranks must exhaust it
    in lock-step."""
    return for_engine(policy.model, full_weights(policy, DTYPES[args.model_dtype]), args)


def gather_weights(named: NamedTensors, dtype: torch.dtype) -> NamedTensors:
    """Yield (name, whole tensor in `dtype`) of sharded weights; buffers as they are. All ranks must exhaust it in
    lock-step."""
    from torch.distributed.tensor import DTensor

    for name, weight in named:
        if isinstance(weight, torch.nn.Parameter):
            weight = weight.detach().to(dtype)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        yield name, weight


@unhurried()
def save_model(policy: Any, tokenizer: "Tokenizer", path: Path, args: Flags, world: World) -> Path:
    """Write the model in Hugging Face format; all ranks gather, rank 0 writes. Returns where it is, elsewhere if the
    disk is full. If it has adapters, only they are written, in peft's format; --lora_merge also writes the merged model
    to PATH_merged. Files that training does not change are the start model's own, byte for byte."""
    shard_again(policy)
    if not has_adapters(policy.model):
        return _save_whole_model(policy, tokenizer, path, args, world)
    from scripts.parts import adapters

    if args.lora_merge:
        merged = path.with_name(f"{path.name}_merged")
        _save_whole_model(policy, tokenizer, merged, args, world)
    return adapters.save_adapters(policy.model, tokenizer, path, world)


def _save_whole_model(policy: Any, tokenizer: "Tokenizer", path: Path, args: Flags, world: World) -> Path:
    from scripts.parts import run_files

    model = policy.model
    tied = model.config.tie_word_embeddings
    state = {}
    for name, tensor in full_weights(policy, DTYPES[args.model_dtype]):  # all ranks
        if world.is_main and not (tied and name == "lm_head.weight"):
            state[name] = tensor.to("cpu", copy=True)
    if world.is_main:
        path = run_files.write_directory(path, functools.partial(_write_model, model, state, tokenizer, args))
    dist.barrier()
    return path


def _write_model(model: Any, state: dict[str, Any], tokenizer: "Tokenizer", args: Flags, path: Path) -> None:
    from transformers import GenerationConfig

    from scripts.parts import run_files

    # The start model's own sampling defaults stay, so that it differs from the trained model in one thing only. A model
    # without defaults gets those of training: softmax(logits / temperature).
    tied = bool(model.config.tie_word_embeddings)
    eos_ids = eos_token_ids(args, tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=args.temperature,
        top_p=args.vllm_top_p,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(path, state_dict=state, max_shard_size="5GB")
    tokenizer.save_pretrained(path)
    run_files.keep_start_files(
        path,
        start=Path(start_dir(args)),
        dtype=args.model_dtype,
        tied=tied,
        eos_ids=eos_ids,
    )


class Checkpoints:
    """Resumable checkpoints of a run, in run_dir/checkpoints/step_N: see scripts/parts/checkpoints.py, which the first
    save loads. All ranks construct it and call its methods."""

    def __init__(self, run_dir: Path, keep: int, world: World):
        self.run_dir = run_dir
        self.keep = keep
        self.world = world
        self.writer: Any = None
        self.every_s = math.inf  # on rank 0: seconds between checkpoints by the clock, see plan.go_by_clock
        self.saved = time.monotonic()

    @unhurried()
    def save(self, step: int, modules: dict[str, Any], optimizer: torch.optim.Optimizer, extra: dict[str, Any]) -> None:
        """Start to write everything that a resume needs. Returns once all is copied, so that training may go on. The
        optimizer is that of modules["policy"]. `extra` is this rank's plain data; its random state is added."""
        if self.writer is None:
            from scripts.parts import checkpoints

            self.writer = checkpoints.Writer(self.run_dir, self.keep, self.world)
        self.saved = time.monotonic()
        self.writer.save(step, modules, optimizer, extra)

    @unhurried()
    def wait(self) -> None:
        """Wait until the checkpoint being written is on disk, or has failed."""
        if self.writer is not None:
            self.writer.wait()

    def is_time(self) -> bool:
        """Whether a checkpoint by the clock is due."""
        return time.monotonic() - self.saved >= self.every_s

    def resume(self, path: Path, learner: Any, args: Flags) -> dict[str, Any]:
        """Load a checkpoint into a grpo.Learner; returns the run's state."""
        from scripts.parts import checkpoints

        return checkpoints.resume(path, learner, args, self.world)


def newest_checkpoint(run_dir: Path, world: World, before: float = math.inf) -> Path | None:
    """The newest undamaged checkpoint of a step below `before`; damaged ones are reported and skipped. All ranks."""
    from scripts.parts import checkpoints

    return on_main(lambda: checkpoints.newest(run_dir / "checkpoints", before), world)


def profiled(steps: Iterable[int], args: Flags, world: World) -> Iterator[int]:
    """The numbers of steps; what is done in --profile_step is watched."""
    for step in steps:
        if step == args.profile_step:
            from scripts.parts import dumps

            with dumps.profiled(args.run_dir, step, world.rank):
                yield step
        else:
            yield step


class Stop:
    """Ends a run early: after a step, with a checkpoint, where a guard asks for it (`because`) or a signal does.

    During a step the first SIGTERM or Ctrl-C lets the step end and a second one ends the process. At any other time the
    first one ends it. A thread reads the signals: Python runs a handler only between two operations of the main thread,
    which may take minutes."""

    def __init__(self):
        self.during = ""  # what the first signal lets end, for a person; "": nothing
        self.asked = 0  # number of the first signal
        self.because = ""  # what is wrong with the run, and what to do: the last line that it prints
        self.save: Callable[[], None] = lambda: None  # what an error in the middle of a run does first
        self.tell: Callable[[str], bool] = lambda _: False  # takes the last line and says whether it will be printed

    def save_after_error(self) -> None:
        """Save what can be saved. If that fails as well, say so: the first error stays the cause."""
        try:
            self.save()
        except Exception as error:
            print(f"no checkpoint was written: {words_of(error)}", file=sys.stderr)

    def ask(self, because: str) -> None:
        """Have the run end after this step, or before its first one. The first cause counts."""
        self.because = self.because or because

    @contextlib.contextmanager
    def on_error(self, alone: bool = True):
        """Have an error in the block end the run after this step. It must be one of this rank `alone`: ranks that wait
        for it inside the block would wait for ever, and so the error is raised."""
        try:
            yield
        except Exception as error:
            if not alone:
                raise
            if not isinstance(error, UserError):
                traceback.print_exc()
            self.ask(words_of(error))

    def give_cause(self, run_dir: Path) -> None:
        """Raise UserError if the run has ended `because` of something, with the words on how it goes on."""
        newest = run_dir / "checkpoints" / "latest"
        resumes = f"--resume goes on after {newest.read_text()}" if newest.exists() else "There is no checkpoint"
        need(not self.because, f"{self.because.rstrip('.')}. {resumes}")

    def listen(self) -> None:
        """Start to answer signals."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            ignored = signal.getsignal(number) == signal.SIG_IGN  # a shell's background job, or nohup
            if not ignored:
                signal.signal(number, lambda *_: None)  # the thread gets its number through the pipe
        threading.Thread(target=self._answer, args=(reader,), daemon=True).start()

    def _answer(self, reader: int) -> None:
        """Answer each signal that comes through the pipe. The first rank of a node reports on stderr."""
        reports = os.environ.get("LOCAL_RANK", "0") == "0"
        first_time = -math.inf
        while True:
            number = os.read(reader, 1)[0]
            # Job queues signal launcher and ranks, and the launcher signals the ranks again: within a second it is one
            repeated = time.monotonic() - first_time < 1.0
            if number not in (signal.SIGTERM, signal.SIGINT) or repeated:
                continue
            stops_now = bool(self.asked) or not self.during
            if reports:
                answer = "stopping now" if stops_now else f"finishing {self.during}; once more to stop now"
                os.write(2, f"{signal.Signals(number).name}: {answer}\n".encode())
            if stops_now:
                rewards.close()  # all other processes end when they find that this one is gone
                os._exit(128 + number)
            self.asked = number
            first_time = time.monotonic()

    def steps(self, steps: Iterable[int]) -> Iterator[int]:
        """Yield each step. While it runs, the first signal lets it end: see `stop_asked`."""
        try:
            for step in steps:
                self.during = f"step {step}, then a checkpoint"
                yield step
        finally:
            self.during = "what is left to write"


STOP = Stop()


def agree(due: bool, world: World) -> tuple[str, bool]:
    """What stops the run now, on any rank: a signal's name, or "an error", which is then STOP.because of each, or "".
    And whether any rank finds a checkpoint `due`. All ranks, which get the same answers."""
    asked = [float(STOP.asked), float(STOP.because != ""), float(due)]
    number, error, is_due = all_reduce(asked, world, dist.ReduceOp.MAX)
    if error:
        STOP.because = next(filter(None, all_gather(STOP.because, world)))
        return "an error", True
    return signal.Signals(int(number)).name if number else "", bool(is_due)


# --- Metrics and report -----------------------------------------------------------------------------------------------


def read_numbers(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The values as Python numbers. All tensors among them are read at once, so that this waits for a GPU once."""
    numbers: list[Any] = list(values)
    places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    if places:
        tensors = [numbers[i] for i in places]
        for i, number in zip(places, torch.stack(tensors).tolist(), strict=True):
            numbers[i] = number
    return numbers


class Metrics:
    """Numbers of one step on one rank. Means are kept as (sum, count): all samples of all ranks weigh the same."""

    def __init__(self):
        self.sums: dict[str, tuple[Any, Any]] = {}  # name -> (sum, count): numbers, or tensors with one element
        self.totals: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}
        self.samples: dict[str, list[float]] = defaultdict(list)
        self.timer = Timer()  # of phases whose mean over ranks is wanted

    def count(self, name: str, number: float) -> None:
        """Add to a number that is summed over ranks, not averaged."""
        self.totals[name] += number

    def add(self, name: str, total: float | torch.Tensor, count: float | torch.Tensor = 1.0) -> None:
        """Add `total`, the sum over `count` samples. Only `reduce` reads tensors, so that this never waits for a
        GPU."""
        if isinstance(total, torch.Tensor):
            total = total.detach().double()
        if isinstance(count, torch.Tensor):
            count = count.detach().double()
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_count + count)

    def add_all(self, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Mean, and `_min` / `_max`, of a list or an array."""
        if len(values):
            self.add(name, float(np.sum(values)), len(values))
            self.extreme(f"{name}_min", float(np.min(values)))
            self.extreme(f"{name}_max", float(np.max(values)))

    def sample(self, name: str, values: Sequence[float]) -> None:
        """Add values to those whose median and 99th percentile are reported, as `name`_p50 and `name`_p99."""
        self.samples[name] += values

    def extreme(self, name: str, value: float) -> None:
        """Keep the smallest value of a name that ends in _min, or the largest of one in _max, over calls and ranks."""
        best = min if name.endswith("_min") else max
        self.extremes[name] = best(self.extremes.get(name, value), value)

    def merge(self, other: "Metrics") -> None:
        """Take in the numbers of another rank."""
        for name, values in other.samples.items():
            self.sample(name, values)
        for name, number in other.totals.items():
            self.count(name, number)
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, value in other.extremes.items():
            self.extreme(name, value)

    def on_host(self) -> "Metrics":
        """The same numbers without tensors and GPU events, as other ranks get them."""
        host = Metrics()
        totals_and_counts = read_numbers([number for pair in self.sums.values() for number in pair])
        pairs = zip(totals_and_counts[::2], totals_and_counts[1::2], strict=True)
        host.sums = dict(zip(self.sums, pairs, strict=True))
        for name, seconds in self.timer.seconds.items():
            host.sums[name] = (seconds, 1.0)
        host.totals = self.totals
        host.extremes = self.extremes
        host.samples = self.samples
        return host

    def reduce(self, world: World) -> dict[str, float]:
        """Averages over all ranks, the same dict on each. All ranks must call it; their keys may differ."""
        merged = Metrics()
        for metrics in all_gather(self.on_host(), world):
            merged.merge(metrics)

        out = {}
        for name, (total, count) in merged.sums.items():
            if count:
                out[name] = total / count
        for name, values in merged.samples.items():
            out[f"{name}_p50"] = float(np.percentile(values, 50))
            out[f"{name}_p99"] = float(np.percentile(values, 99))
        return out | dict(merged.totals) | merged.extremes  # dict: the result must not be a defaultdict


def note_rollouts(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics) -> None:
    """Scores, verifier rates, lengths and stop rates of all the given rollouts, trained on or not."""
    note_verifiers(rollouts, args, metrics, "objective")
    note_statuses(rollouts, metrics)
    if args.audit_verifier:
        from scripts.parts import audit

        audit.note(rollouts, args, metrics)
    if any(r.turns for r in rollouts):
        from scripts.parts import turns

        turns.note(rollouts, metrics)
    scored = [r for r in rollouts if not math.isnan(r.score)]
    metrics.add_all("objective/scores", [r.score for r in scored])
    for r in scored:
        if args.overlong_buffer_length:
            metrics.add("objective/overlong_penalty", r.outcome - r.score)
        if args.apply_r1_style_format_reward:
            metrics.add("val/format_scores", r.format_score * args.r1_style_format_reward)
    note_lengths(rollouts, metrics)


def note_verifiers(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics, prefix: str) -> None:
    """Reward, share above 0 and share of full scores, of all verifiers together and of each. Missing scores do not
    count, and neither do rollouts of a dump, which have no results."""
    if not args.apply_verifiable_reward:
        return
    for r in rollouts:
        if not r.results:
            continue
        scores = [("verifiable", r.verifiable, len(r.prompt.verifiers))]  # name, score, full score
        for name, result in zip(r.prompt.verifiers, r.results, strict=True):
            scores.append((name, result.score, 1))
        for name, score, full_score in scores:
            if math.isnan(score):
                continue
            solve_rate = "solve_rate" if name == "verifiable" else f"{name}_solve_rate"
            metrics.add(f"{prefix}/{name}_reward", args.verification_reward * score)
            metrics.add(f"{prefix}/{name}_correct_rate", float(score > 0))
            metrics.add(f"{prefix}/{solve_rate}", float(score >= full_score - 1e-8))


def note_statuses(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Of each verifier: how often it ended in each status, its seconds and the numbers among its details."""
    statuses = defaultdict(Counter)  # verifier -> status -> results
    for r in rollouts:
        for name, result in zip(r.prompt.verifiers, r.results, strict=bool(r.results)):
            statuses[name][result.status] += 1
            metrics.sample(f"time/reward_{name}", [result.seconds])
            for detail, value in result.details.items():
                if isinstance(value, (int, float)):
                    metrics.add(f"reward/{name}_{detail}", float(value))
    for name, counts in statuses.items():
        for status in rewards.STATUSES:
            metrics.count(f"reward/{name}_{status}", counts[status])
            if status != "ok":
                metrics.add(f"objective/reward_{status}_rate", counts[status], counts.total())


def note_lengths(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Tokens of the responses, and how many ended by themselves."""
    stopped = 0
    for r in rollouts:
        stopped += r.finish_reason == "stop"
        kind = "unsolved"  # also the unscored (NaN)
        if r.verifiable > 0:
            kind = "solved"
        metrics.add(f"val/sequence_lengths_{kind}", len(r.token_ids))
    metrics.add_all("val/sequence_lengths", [len(r.token_ids) for r in rollouts])
    metrics.add("val/stop_rate", stopped, len(rollouts))
    metrics.add("val/stop_token_rate", stopped, len(rollouts))
    metrics.count("val/num_stop_token_ids", stopped)


def kind_of(group: Group, args: rewards.RewardFlags) -> str:
    """The kind of a group by its outcomes, without missing ones. "mixed": they differ, so the group has a gradient.
    "zero" or "solved": all are 0, or all are the highest that the prompt allows. "nonzero": neither, or there is
    none."""
    outcomes = distinct_outcomes(group)
    if len(outcomes) > 1:
        return "mixed"
    if outcomes == {0.0}:
        return "zero"
    highest = rewards.max_score(args, len(group[0].prompt.verifiers) or 1)
    return "solved" if outcomes == {highest} else "nonzero"


def note_step(groups: Sequence[Group], sampled: Sequence[Group], args: Any, metrics: Metrics) -> None:
    """Metrics of a step's sampling: rollouts, tokens, kinds of groups. `groups` are trained on; `args` are
    grpo.Args. As in open-instruct, objective_kept/* and val/num_step_tokens count the groups that are kept, and each
    prompt once."""
    rollouts = [r for group in sampled for r in group]
    note_rollouts(rollouts, args, metrics)
    kept = [group for group in groups if len(distinct_outcomes(group)) > 1 or not args.filter_zero_std_samples]
    kept_rollouts = [r for group in kept for r in group]
    note_verifiers(kept_rollouts, args, metrics, "objective_kept")

    prompt_lengths = [len(r.prompt.token_ids) for r in rollouts]
    response_tokens = sum(len(r.token_ids) for r in rollouts)
    kept_tokens = sum(len(r.token_ids) for r in kept_rollouts)
    kept_tokens += sum(len(group[0].prompt.token_ids) for group in kept)
    metrics.count("sampled", len(rollouts))
    metrics.count("response_tokens", response_tokens)
    metrics.count("val/num_sampled_tokens", sum(prompt_lengths) + response_tokens)
    metrics.count("val/num_step_tokens", kept_tokens)
    metrics.add_all("val/prompt_lengths", prompt_lengths)

    scores = [r.score for r in rollouts if not math.isnan(r.score)]
    metrics.add("val/score_sq", sum(score * score for score in scores), len(scores))
    metrics.count("batch/missing_rewards", len(rollouts) - len(scores))

    note_kinds(sampled, args, metrics)
    for name, gib in memory_used().items():
        metrics.extreme(name, gib)


def note_kinds(groups: Sequence[Group], args: rewards.RewardFlags, metrics: Metrics) -> None:
    """How many groups are of each kind."""
    kinds = Counter(kind_of(group, args) for group in groups)
    metrics.count("batch/total_prompts", len(groups))
    metrics.count("val/total_reward_groups", kinds["mixed"])
    metrics.count("batch/filtered_prompts", len(groups) - kinds["mixed"])
    for kind in ("zero", "solved", "nonzero"):
        metrics.count(f"batch/filtered_prompts_{kind}", kinds[kind])


def memory_used() -> dict[str, float]:
    """Memory in GiB. On the host: the peak of this process, and what all processes of the machine use now. On this
    process's GPU: the peak of torch's tensors, and of what torch's allocator has reserved."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    out = {"memory/process_peak_gib": peak * unit / 2**30}
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = dict(re.findall(r"(\w+): +(\d+)", meminfo.read_text()))
        out["memory/host_used_gib"] = (int(kib["MemTotal"]) - int(kib["MemAvailable"])) / 2**20
    if torch.cuda.is_available():
        out["memory/gpu_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        out["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return out


def take_variance(metrics: dict[str, float], mean_square: str, mean: str) -> float:
    """The variance: the mean of the squares, which is removed from `metrics`, minus the square of the mean."""
    return max(metrics.pop(mean_square) - metrics[mean] ** 2, 0.0)


def finish_metrics(metrics: dict[str, float], args: Any) -> dict[str, float]:
    """Add the metrics that are functions of reduced ones, under open-instruct's names; `args` are grpo.GRPOFlags."""
    if "val/ratio_sq" in metrics:
        metrics["val/ratio_var"] = take_variance(metrics, "val/ratio_sq", "val/ratio")
    if "val/score_sq" in metrics:
        metrics["objective/reward_std"] = math.sqrt(take_variance(metrics, "val/score_sq", "objective/scores"))
    if "loss/policy_avg" in metrics:
        parts = [metrics.get(f"loss/{part}_avg", 0.0) for part in ("policy", "kl", "entropy")]
        metrics["loss/total_avg"] = sum(parts)
        metrics["objective/loss"] = metrics["loss/total_avg"]
    if "objective/scores" in metrics:
        metrics["objective/scores_mean"] = metrics["objective/scores"]
        if "objective/kl" in metrics:
            metrics["objective/non_score_reward"] = args.beta * metrics["objective/kl"]
            metrics["objective/rlhf_reward"] = metrics["objective/scores"] - metrics["objective/non_score_reward"]
    return metrics


class Timer:
    """Seconds of each named phase of a step: by the clock or, with `gpu`, between two events of the caller's stream.
    Reading `seconds` then waits only for the caller's own work on the GPU, not for that of other threads."""

    def __init__(self, gpu: bool | None = None):
        self.gpu = torch.cuda.is_available() if gpu is None else gpu
        self.phases: list[tuple[str, Any, Any]] = []  # name, start, end

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
                seconds[name] += start.elapsed_time(end) / 1000
            else:
                seconds[name] += end - start
        return dict(seconds)


TABLE_ROLLOUTS = 8  # samples that a tracker gets at a time


def cell(value: float | None, form: str, width: int) -> str:
    """A number in `width` columns, in scientific notation where `form` takes more; blank for None."""
    if value is None:
        return " " * width
    text = form.format(value)
    if len(text) > width:
        text = f"{value:.0e}"
    return text.rjust(width)


def sample_row(r: Rollout, step: int) -> dict[str, Any]:
    """A rollout as a row of the trackers' table. Of advantages per token it has the mean."""
    return {
        "training_step": step,
        "prompt": r.prompt.text,
        "ground_truths": str(r.prompt.ground_truths),
        "score": r.score,
        "advantage": np.mean(r.advantage),
        "finish_reason": r.finish_reason,
        "text": r.text,
    }


class Logger:
    """Console, metrics.jsonl, samples.jsonl and trackers, all on rank 0; other ranks get a silent one."""

    COLUMNS = (  # (heading, metric, format)
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
    WIDTH = 7  # of a column, where its heading is not longer

    def __init__(self, args: TrackingFlags, run_dir: Path, num_steps: int, start_step: int, world: World):
        self.enabled = world.is_main
        if not self.enabled:
            return
        self.run_dir = run_dir
        self.num_steps = num_steps
        self.step_width = max(9, len(f"{num_steps}/{num_steps}"))
        self.header_shown = False
        self.step_ends = deque([time.monotonic()], maxlen=20)  # of the last steps: a step's time changes over a run
        if (run_dir / "metrics.jsonl").exists():
            from scripts.parts.run_files import forget_after

            forget_after(run_dir, start_step)
        if args.with_tracking or args.with_tensorboard or args.with_trackio:
            from scripts.parts import track

            TRACKERS.extend(track.start(args, run_dir, start_step))

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a step's metrics to metrics.jsonl, and print the step's line."""
        if not self.enabled:
            return
        metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        self.append("metrics", metrics)
        if not self.header_shown:
            headings = [heading.rjust(self.WIDTH) for heading, _, _ in self.COLUMNS]
            self.say(" ".join(["step".rjust(self.step_width), *headings, "left".rjust(8)]))
            self.header_shown = True
        self.say(self._line(metrics))
        user_files = sys.modules.get("scripts.parts.user_files")
        if user_files is not None:
            user_files.PRINTS.begin_step()

    def _line(self, metrics: dict[str, Any]) -> str:
        """A step's line, of at most 120 columns."""
        step = metrics["training_step"]
        cells = [f"{step}/{self.num_steps}".rjust(self.step_width)]
        for heading, name, form in self.COLUMNS:
            width = max(self.WIDTH, len(heading))
            cells.append(cell(metrics.get(name), form, width))
        cells.append(self._time_left(step).rjust(8))
        return " ".join(cells)

    def _time_left(self, step: int) -> str:
        """Hours:minutes:seconds that the remaining steps take at the mean pace of the last ones, evaluation and saving
        included."""
        if step == 0:
            self.step_ends[-1] = time.monotonic()  # the evaluation before the first step
            return ""
        self.step_ends.append(time.monotonic())
        seconds = self.step_ends[-1] - self.step_ends[0]
        pace = seconds / (len(self.step_ends) - 1)
        seconds_left = pace * (self.num_steps - step)
        minutes, seconds = divmod(round(seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}"

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Print the first and the last rollout. Append the first TABLE_ROLLOUTS to samples.jsonl, for the trackers."""
        if not self.enabled or not groups:
            return
        rollouts = [r for group in groups for r in group]
        for r in (rollouts[0], rollouts[-1]):
            end = "ended by itself" if r.finish_reason == "stop" else "cut at the limit"
            label = str(r.prompt.ground_truths[0]) if r.prompt.ground_truths else ""
            self.say(f"  prompt   {r.prompt.text[-600:]!r}")
            self.say(f"  response {r.text[:600]!r}")
            self.say(f"  score {r.score:g}, {end}, label {rewards.printable(label):.120}")
        rows = [sample_row(r, step) for r in rollouts[:TABLE_ROLLOUTS]]
        self.append("samples", {"training_step": step, "rollouts": rows})

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a line to NAME.jsonl, and give it to the trackers. A full disk ends no run: see run_files.py."""
        from scripts.parts import run_files

        line = json.dumps(row, default=str) + "\n"
        run_files.append_lines(self.run_dir / f"{name}.jsonl", line)
        for tracker in TRACKERS:
            tracker.rows.put(json.loads(line))

    def say(self, text: str) -> None:
        """Print a line, on the first rank."""
        if self.enabled:
            say(text)

    def close(self) -> None:
        """Write what waits for the disk, and let the trackers send what they have not sent yet."""
        from scripts.parts import run_files

        run_files.append_waiting()
        end_trackers()


def draw_report(run_dir: Path) -> str:
    """Have scripts/reports/curves.py draw report.png. Returns the words about the report for the run's last line. A
    failure is only a warning."""
    problem = run_program("reports/curves.py", run_dir)
    if not problem:
        command = shlex.join(["python", "scripts/reports/report.py", str(run_dir)])
        return f"report {run_dir / 'report.png'}\nrollouts and checks: {command}"
    command = shlex.join(program("reports/curves.py", run_dir))
    print(f"WARNING: no report was drawn: {problem.splitlines()[-1]}. To draw it: {command}", flush=True)
    return "no report"
