"""Plumbing shared by grpo.py and grpo_fast.py: nothing here is edited for a research idea.

Sections: processes, flags · data · engines · packs · sharding, weights, checkpoints · traces · metrics · servers.

Import this module before torch: it pins thread counts and sets vLLM's switches, which both read at import time.
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
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, fields, is_dataclass, make_dataclass, replace
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
from rewards import Refusing, UserError, need, positive  # noqa: E402

# Compiled kernels outlive a run, beside vLLM's own. Inductor writes loops for the processor's vectors and does not ask,
# when it finds them again, for which: a home directory may be shared by machines of several kinds.
_CACHE = f"~/.cache/torchinductor/{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser(_CACHE))

if TYPE_CHECKING:  # an import of seconds; and names of the room above, which nothing here runs
    from transformers import PreTrainedTokenizerBase as Tokenizer

    import grpo

T = TypeVar("T")
REPO = Path(__file__).resolve().parent
OTHER_FLAGS = REPO / "scripts" / "train" / "open_instruct.tsv"  # flag or flag=value, what happens to it, what or why
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRIAL = 0.1  # see trial_adapters
Modules = dict[str, "grpo.Policy"]  # those that a checkpoint holds, by name
GATHER_BYTES = 5 * 2**28  # of a collective that makes weights whole: a dozen for a 7B in bfloat16

# --- Processes and flags ----------------------------------------------------------------------------------------------


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
    """Join the ranks torchrun started, or those who meet in `store`, or make a world of one without opening a port."""
    rank, size = int(os.environ.setdefault("RANK", "0")), int(os.environ.setdefault("WORLD_SIZE", "1"))
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    elif hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc's: to return large tensors is a quarter of a CPU step
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if store is None and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, timeout=timeout, store=store or dist.HashStore(), rank=rank, world_size=size)
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


@functools.cache
def _once(_world: object, make: Callable, *args: Any, **more: Any) -> Any:
    """make(*args, **more), the same in every call: policy and reference share communicators."""
    return make(*args, **more)


def sequence_group(args: "Flags") -> dist.ProcessGroup | None:
    """The group of --sequence_parallel_size neighbouring ranks that share their packs' tokens, or None. All ranks."""
    size = args.sequence_parallel_size
    return _once(dist.group.WORLD, dist.new_subgroups, size)[0] if size > 1 else None  # of neighbours


def share(thing: T, args: "Flags") -> list[T]:
    """The object of each rank of this one's sequence_group, its own as it is. All ranks must call it."""
    everyone, group = [thing] * args.sequence_parallel_size, sequence_group(args)
    if group is not None:
        dist.all_gather_object(everyone, thing, group)
        everyone[group.rank()] = thing
    return everyone


def leads(args: "Flags", world: World) -> bool:
    """Whether this rank speaks for its sequence_group, whose ranks compute the same losses."""
    return world.rank % args.sequence_parallel_size == 0


def on_main(work: Callable[[], T], world: World) -> T:
    """What `work` returns on rank 0, on every rank; its ValueError is a UserError on every rank. All ranks."""
    outcome: list[Any] = [None, ""]
    if world.is_main:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = str(error)
    if world.size > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1]:
        raise UserError(outcome[1])
    return outcome[0]


def after_restart(args: "grpo.Args") -> "grpo.Args":
    """The flags after torchrun --max-restarts started the ranks again: go on from the newest checkpoint, or afresh,
    with what it has begun. A directory that the first start refused to touch is refused again."""
    saved = (args.run_dir / "checkpoints" / "latest").exists()
    with contextlib.suppress(SystemExit):  # another's
        play("parts/run_dir.py", args.run_dir, "--begun_by_this_torchrun")
        args = replace(args, resume=saved, overwrite=not saved)
    return args


def device_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measured ceilings of this device: operations a second of a square matrix product, bytes a second of a copy."""
    large = torch.empty(2**28 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    n = 8192 if device.type == "cuda" else 512
    x = torch.randn(n, n, device=device, generator=torch.Generator(device)).to(dtype)
    flops, copied = 2 * n**3 / best_seconds(lambda: x @ x), large.numel() / best_seconds(large.clone)
    return {"flops_per_second": flops, "bytes_per_second": copied, "itemsize": dtype.itemsize}


def best_seconds(work: Callable[[], object]) -> float:
    """Wall seconds of the fastest of four calls."""
    wait_for_gpu = torch.cuda.synchronize if torch.cuda.is_available() else bool
    return min(timeit.repeat(lambda: (work(), wait_for_gpu()), number=1, repeat=4))


def core_speeds(dtypes: Sequence[torch.dtype]) -> list[float]:
    """GFLOP/s of a product of two 256 x 256 matrices in each dtype: by turns for a tenth of a second on one core, in
    seconds of processor time, which others do not lengthen, and no thread waits for another that was put aside."""
    threads, until = torch.get_num_threads(), time.thread_time() + 0.1
    torch.set_num_threads(1)
    xs = [torch.randn(256, 256, generator=torch.Generator()).to(dtype) for dtype in dtypes]
    best = [math.inf] * len(xs)
    while time.thread_time() < until or math.inf in best:
        spent = [timeit.timeit(functools.partial(torch.matmul, x, x), timer=time.thread_time, number=1) for x in xs]
        best = list(map(min, best, spent))
    torch.set_num_threads(threads)
    return [2 * 256**3 / b / 1e9 for b in best]


def choose_dtype(args: "Flags") -> tuple[str, str]:
    """The compute dtype that --model_dtype means here, and why, for a person.

    auto is bfloat16 on a GPU that has it, and on a CPU whose products of 256 x 256 matrices are faster in it than in
    float32, else float32; a run that goes on keeps what it began with. A CPU without bfloat16 instructions is some 6 to
    70 times slower in it, one with them 1.5 to 8 times faster: no measurement takes one for the other.
    """
    asked, why, before = args.model_dtype, "as --model_dtype says", args.run_dir / "args.json"
    if asked == "auto" and args.resume and before.exists():
        asked, why = json.loads(before.read_text())["model_dtype"], "as before --resume"
    if asked == "float32":
        return asked, why
    if torch.cuda.is_available():
        name, fast = torch.cuda.get_device_name(), torch.cuda.is_bf16_supported(including_emulation=False)
        found = f"{name} has {'' if fast else 'no '}bfloat16"
    else:
        half, full = core_speeds([torch.bfloat16, torch.float32])
        fast, found = half > full, f"a core reaches {half:.0f} GFLOP/s in bfloat16, {full:.0f} in float32 here"
    if asked == "auto":
        return ("bfloat16" if fast else "float32"), found
    slow = "" if fast else f"; WARNING: slow, {found}: --model_dtype auto would take float32"
    return asked, why + slow


def make_deterministic(args: "Flags") -> None:
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


def exit_process() -> None:
    """End a process whose work is done, without the destructors of gloo's and vLLM's threads: these abort now and then
    (in 1 of 38 two-rank runs), which would turn a finished run into a failed one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


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
    numpy = (name, torch.from_numpy(keys.copy()), *rest)  # ty: ignore[missing-attribute]
    cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()} | cuda


def set_rng_state(state: dict[str, Any]) -> None:
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
    """Parse flags into the dataclass `cls` with tyro; parts/translate.py turns `--flag true`, `--flag False` and
    open-instruct's other flags into ours, rank 0 prints what became of those. Raises UserError for one without which a
    run would not be the same, unless this is a --dry_run."""
    import tyro

    booleans = {f"no_{f.name}" for f in fields(cls) if f.type in (bool, "bool")}
    known = {f.name for f in fields(cls)} | booleans | {"help"}
    tokens, told, missing = list(sys.argv[1:] if argv is None else argv), "", ""
    names = [t.partition("=")[0].removeprefix("--").replace("-", "_") for t in tokens if t.startswith("--")]
    table = OTHER_FLAGS.read_text()  # has values of ours, too
    spelled = any("=" in t or t.lower() in ("true", "false") for t in tokens)
    if spelled or any(name not in known or f"\n{name}=" in table for name in names):
        command = program("parts/translate.py", "--known", " ".join(sorted(known)), *tokens)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stderr)
            raise SystemExit(done.returncode)
        tokens, told, missing = json.loads(done.stdout)
    if {"-h", "--help"} & set(tokens):  # in panels, one for each class that cls is made of; names stay flat
        groups = [c for c in reversed(cls.__mro__) if is_dataclass(c) and not any(map(is_dataclass, c.__bases__))]
        ours = [functools.partial(g, **{f.name: getattr(cls(), f.name) for f in fields(g)}) for g in groups]
        named = [(g.__name__, g, field(default_factory=make)) for g, make in zip(groups, ours, strict=True)]
        cls = make_dataclass(cls.__name__, named, namespace={"__doc__": cls.__doc__})
    args = tyro.cli(cls, args=tokens, use_underscores=True, config=(tyro.conf.OmitArgPrefixes,))
    if told and os.environ.get("RANK", "0") == "0" and os.environ.get("FLAGS_TOLD") != told:
        os.environ["FLAGS_TOLD"] = told  # for the ranks that grpo_fast.py starts
        print(told, flush=True)
    need(not missing or args.dry_run, f"{missing}. Drop what you can do without")
    return args


@dataclass(frozen=True)
class RunFlags(Refusing):
    """The run: its place, its randomness, what it keeps."""

    exp_name: str = "grpo"
    """Name of the run; it writes to output_dir/exp_name."""
    output_dir: str = "output"
    """Directory that holds runs."""
    seed: int = 1
    """Fixes data order, sampling and everything else random."""
    deterministic: bool = False
    """Deterministic kernels of torch; in grpo_fast.py each request has its engine, checkpoints wait for rollouts."""
    resume: bool = False
    """Go on from the newest checkpoint of output_dir/exp_name; refused when flags, data or model differ."""
    resume_anyway: bool = False
    """With resume: go on although they differ; the differences are printed."""
    overwrite: bool = False
    """Replace a run that exists in output_dir/exp_name. Off: refuse."""
    dry_run: bool = False
    """Check the flags, print arithmetic, sources and memory, and stop; loads nothing and needs no network."""
    save_freq: int = 200
    """Steps between Hugging Face saves to step_N/; the final model always goes to model/. -1 is never."""
    checkpoint_state_freq: int = -1
    """Steps between resumable checkpoints. -1 is never."""
    keep_last_n_checkpoints: int = 3
    """Older checkpoints are removed; -1 keeps all."""
    dump_steps: str = ""
    """Steps whose updates scripts/replay.py can make again: all, or N for every N-th; empty is none. Their rollouts go
    to rollouts.jsonl with the learner's logprobs, their packs to dumps/."""
    load_states: str = ""
    """Directory of a run, ours, veRL's or of Hugging Face models, whose state of step N - 1 step N takes (grpo.py)."""
    load_batches: str = ""
    """Directory of a run with --dump_steps to train on, step by step, instead of sampling (grpo.py only)."""
    save_traces: bool = False
    """Write every rollout to rollouts.jsonl."""

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.exp_name

    def check(self) -> None:
        every, run_dir = self.dump_steps, self.run_dir
        need(0 <= self.seed < 2**32, f"--seed {self.seed}: must be in [0, 2**32), as numpy and vLLM take it")
        if self.resume and self.overwrite:
            self.refuse("--resume continues a run, --overwrite replaces it: give one of them")
        if self.resume_anyway and not self.resume:
            self.refuse("--resume_anyway continues a run whose flags differ: it needs --resume")
        if self.resume and not (run_dir / "args.json").exists():
            self.refuse(f"--resume: no run in {run_dir}")
        if self.resume and not list(run_dir.glob("checkpoints/step_*[0-9]")):
            words = "has no checkpoint; was --checkpoint_state_freq set? --overwrite starts it anew"
            self.refuse(f"--resume: {run_dir} {words}")
        if every not in ("", "all") and not (every.isdecimal() and int(every) > 0):
            self.refuse("--dump_steps: all, or N for every N-th step")
        if self.load_batches and not Path(self.load_batches).is_dir():
            self.refuse("--load_batches: no directory")
        states, kinds = Path(self.load_states), ("checkpoints/step_1", "global_step_1/actor", "step_1", "checkpoint-1")
        if self.load_states and not any((states / kind).is_dir() for kind in kinds):
            self.refuse(f"--load_states: no state of step 1, which would be {', '.join(kinds)}")


@dataclass(frozen=True)
class TrackingFlags(Refusing):
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
        if self.with_tensorboard and importlib.util.find_spec("tensorboard") is None:
            self.refuse("--with_tensorboard needs a package that is not installed: pip install tensorboard")
        if (self.hf_repo_id or self.hf_repo_revision) and not self.push_to_hub:
            self.refuse("--hf_repo_id --hf_repo_revision: nothing is uploaded without --push_to_hub, off by default")


@dataclass(frozen=True)
class ModelFlags(Refusing):
    """The model and how the learner computes it."""

    model_name_or_path: str = ""
    """Hub name or directory of the causal LM to train. Required."""
    model_revision: str | None = None
    """Hub revision; None is the default branch."""
    model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype of learner and engine; auto is bfloat16 where the machine is fast in it, else float32. Master
    weights, Adam state, log-softmax and gradient reduction are float32."""
    lora_rank: int = 0
    """Train adapters of this rank and nothing else: W + lora_alpha / lora_rank * B A (LoRA, arXiv:2106.09685); 0 is
    off: all weights train."""
    lora_alpha: int = 32
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the layers' matrices that have adapters (q_proj v_proj ...); all-linear: all of them."""
    lora_merge: bool = False
    """Save the merged model too, beside each adapter, to model_merged/."""
    ref_model_name_or_path: str = ""
    """A teacher: the reference policy is this model, of the same vocabulary; with --beta 1 --kl_estimator kl2 that is
    on-policy distillation (arXiv:2306.13649). Empty is the start policy."""
    ref_model_revision: str | None = None
    """Hub revision of the teacher; None is its default branch."""
    ref_model_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype in which the teacher lies in memory and computes; auto is the policy's."""
    dither_master_weights: bool = True
    """bfloat16: start each master weight at a random place of its rounding interval, see dither."""
    attn_implementation: str = "sdpa"
    """Attention of the learner, as transformers names it: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    gradient_checkpointing_part: Literal["layer", "mlp"] = "layer"
    """What gradient_checkpointing recomputes; mlp: half the operations of a layer for some four times its memory."""
    compile_layers: bool = False
    """torch.compile each decoder layer, and the head on a CPU too: some minutes once, faster steps after them. Sums go
    in another order (1e-6 of an update in float32), and bfloat16 rounds less often."""
    deepspeed_stage: Literal[0, 2, 3] = 0
    """0: replicated learner; 2: gradients and optimizer state sharded; 3: parameters too. Carried out by FSDP2."""
    sequence_parallel_size: int = 1
    """Learners that share the tokens of a pack, each with its part of the activations (DeepSpeed-Ulysses,
    arXiv:2309.14509): a number that divides the learners and the model's attention heads."""

    def check(self) -> None:
        need(self.model_name_or_path != "", "--model_name_or_path is required: a hub name or a directory")
        if not self.ref_model_name_or_path and (self.ref_model_revision or self.ref_model_dtype != "auto"):
            self.refuse("--ref_model_revision --ref_model_dtype are a teacher's: give --ref_model_name_or_path too")
        positive(self, "sequence_parallel_size")
        if self.sequence_parallel_size > 1 and self.attn_implementation != "sdpa":
            self.refuse("--sequence_parallel_size with --attn_implementation: only our own attention, sdpa, can do it")
        if self.gradient_checkpointing_part != "layer" and not self.gradient_checkpointing:
            self.refuse("--gradient_checkpointing_part: it is a part of --gradient_checkpointing: add that flag")
        positive(self, "lora_rank lora_alpha", zero=True)
        if self.lora_merge and not self.lora_rank:
            self.refuse("--lora_merge without --lora_rank: drop it, the model that is saved is whole")
        if self.lora_rank and (self.lora_alpha == 0 or self.lora_target_modules == []):
            self.refuse("--lora_rank with --lora_alpha and --lora_target_modules trains nothing: leave these two out")

    def of_reference(self) -> Self:
        """The flags with which the reference policy loads: the teacher's, or these."""
        name, revision, dtype = self.ref_model_name_or_path, self.ref_model_revision, self.ref_model_dtype
        if not name:
            return self
        args = replace(self, model_name_or_path=name, model_revision=revision, lora_rank=0, ref_model_name_or_path="")
        return args if dtype == "auto" else replace(args, model_dtype=dtype)


@dataclass(frozen=True)
class DataFlags(Refusing):
    """Rows and how they become prompts."""

    dataset_mixer_list: list[str] = field(default_factory=lambda: ["ai2-adapt-dev/rlvr_gsm8k_zs", "1.0"])
    """NAME AMOUNT pairs: hub dataset, directory, .jsonl, .parquet or reasoning_gym:TASK; 1.0 is a fraction, 1 a row."""
    dataset_mixer_eval_list: list[str] = field(default_factory=list)
    """The same for evaluation; empty is no evaluation."""
    dataset_mixer_list_splits: list[str] = field(default_factory=lambda: ["train"])
    """One split for all training datasets or one each."""
    dataset_mixer_eval_list_splits: list[str] = field(default_factory=lambda: ["test"])
    """One split for all evaluation datasets or one each."""
    shuffle: bool = True
    """Another order in every pass over the prompts. Off: theirs (veRL's data.shuffle=false, in its first pass)."""
    max_prompt_token_length: int = 256
    """Tokens; longer prompts are dropped and counted."""
    chat_template_name: str | None = None
    """A template of scripts/data/templates in place of the tokenizer's own; None keeps the tokenizer's."""
    add_bos: bool = False
    """Begin every prompt with the tokenizer's BOS token, before what the chat template writes."""
    system_prompt_override_file: str | None = None
    """Text file whose content replaces every row's system message; None keeps the rows' own."""

    def check(self) -> None:
        positive(self, "max_prompt_token_length")
        need(self.dataset_mixer_list != [], "--dataset_mixer_list is empty: give NAME AMOUNT pairs to train on")
        if self.chat_template_name not in (None, *CHAT_TEMPLATES):
            self.refuse(f"--chat_template_name: there is none of this name, take one of {' | '.join(CHAT_TEMPLATES)}")
        for flag in ("dataset_mixer_list", "dataset_mixer_eval_list"):
            parse_mixer(flag, getattr(self, flag), getattr(self, f"{flag}_splits"))


@dataclass(frozen=True)
class EngineFlags(Refusing):
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
    """0 is greedy, or temperature where eval_pass_at_k is above 1 (in open-instruct it always is that)."""
    eval_response_length: int | None = None
    """Most tokens of an evaluation response; None is response_length."""
    vllm_gpu_memory_utilization: float = 0.9
    """Share of the GPU the engine takes. Where the learner is on the same GPU (grpo.py, --single_gpu_mode) 0.9, the
    default, is taken as 0.4; 0.3 to 0.6 can work there, to 0.8 in grpo.py where the engine sleeps."""
    vllm_enforce_eager: bool = False
    """Skip vLLM's compilation and CUDA graphs: starts faster, samples slower."""
    vllm_sleep: Literal["auto", "on", "off"] = "auto"
    """grpo.py: the engine gives the GPU's memory back while the learner works; auto: where it can, vLLM on a GPU."""
    vllm_enable_prefix_caching: bool = False
    """Share prompt prefixes between requests; each load of weights has a salt of its own, so none is stale."""
    vllm_tensor_parallel_size: int = 1
    """GPUs per engine in grpo_fast.py; grpo.py has one."""
    max_logprob_gap: float = 0.1
    """Stop when the mean |learner - engine| logprob of sampled tokens exceeds this (bfloat16: ~0.04); 0 is off."""

    def beside_engine(self, shared: bool) -> Self:
        """These flags where the learner shares the engine's GPU or not; the default is for an engine with its own."""
        own = EngineFlags.vllm_gpu_memory_utilization
        here = shared and torch.cuda.is_available() and self.vllm_gpu_memory_utilization == own
        return replace(self, vllm_gpu_memory_utilization=0.4) if here else self

    def check(self) -> None:
        positive(self, "response_length eval_response_length temperature vllm_tensor_parallel_size")
        positive(self, "eval_temperature max_logprob_gap", zero=True)
        if not 0 < self.vllm_gpu_memory_utilization < 1:
            self.refuse("--vllm_gpu_memory_utilization: must be in (0, 1)")
        if self.vllm_sleep == "on" and not (self.rollout_backend == "vllm" and torch.cuda.is_available()):
            self.refuse("--vllm_sleep: only vLLM on a GPU can give memory back: take auto, which does where it can")
        if not 0 < self.vllm_top_p <= 1:
            self.refuse("--vllm_top_p: must be in (0, 1]")


@dataclass(frozen=True)
class ProcessFlags(Refusing):
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
        positive(self, "async_steps stall_timeout_s", zero=True)


@dataclass(frozen=True)
class TurnFlags(Refusing):
    """Turns: who answers the policy, see scripts/README.md, Environments."""

    env_file: str = ""
    """Python file whose step(episode), or class Env, answers a response or ends it. Empty is off."""
    tools: list[str] = field(default_factory=list)
    """Tools that answer the calls in a response: names in scripts/tools/ or files of your own; empty is none."""
    tool_call_names: list[str] = field(default_factory=list)
    """The policy's names for them, in their order; empty: those of the files."""
    tool_configs: list[str] = field(default_factory=list)
    """A JSON object for each of them; empty: their defaults."""
    tool_parser_type: str = "legacy"
    """How calls are written: legacy is <name>text</name>, others are vLLM's tool parsers (hermes, olmo3, ...)."""
    max_steps: int = 5
    """Most answers in a rollout; after the last one the policy has one more turn."""
    per_turn_max_tokens: int | None = None
    """Most tokens of a turn; None: what response_length, which counts answers too, has left."""
    only_reward_good_outputs: bool = False
    """Verifiers score 0 for rollouts without an answer, or with one that failed."""
    pass_tools_to_chat_template: bool = True
    """The chat template tells the policy of the tools. Off: your prompts do."""
    env_timeout: float = 60.0
    """Seconds an answer may take; then the policy is told so, and goes on."""
    pool_size: int | None = None
    """Processes that answer at the same time; None is 2 a core, 8 at least."""

    @property
    def has_turns(self) -> bool:
        """Whether anybody answers."""
        return bool(self.env_file or self.tools)

    def check(self) -> None:
        positive(self, "max_steps env_timeout per_turn_max_tokens pool_size")
        if self.env_file and not Path(self.env_file).is_file():
            self.refuse("--env_file: no such file")
        if self.env_file and self.tools:
            self.refuse("--env_file --tools: an environment answers or tools do: drop one, or call tools in the file")
        for name in ("tool_call_names", "tool_configs"):
            if (given := getattr(self, name)) and len(given) != len(self.tools):
                self.refuse(f"--{name} has {len(given)} values for {len(self.tools)} of --tools: give one for each")


@dataclass(frozen=True)
class Flags(rewards.RewardFlags, ProcessFlags, TurnFlags, TrackingFlags, EngineFlags, DataFlags, ModelFlags, RunFlags):
    """All the flags that are not about the algorithm."""

    def check(self) -> None:
        """Refuse what cannot work, naming flag, value and fix. Raises UserError."""
        for name, value in vars(self).items():
            need(not (isinstance(value, float) and math.isnan(value)), f"--{name} nan: must be a number")
        for part in (RunFlags, ModelFlags, DataFlags, EngineFlags, TurnFlags, TrackingFlags, ProcessFlags):
            part.check(self)
        system = self.system_prompt_override_file
        if self.dry_run:
            return
        if self.compile_layers and not shutil.which(compiler := os.environ.get("CXX", "g++")):
            fix = "install one, name yours in the variable CXX, or leave the flag out"
            self.refuse(f"--compile_layers: there is no C++ compiler {compiler}, which torch.compile calls: {fix}")
        if system is not None and not Path(system).is_file():
            self.refuse("--system_prompt_override_file: no such file")
        if self.rollout_backend == "vllm" and not self.load_batches and importlib.util.find_spec("vllm") is None:
            fix = "bash scripts/setup.sh installs it where it has a build; else take --rollout_backend transformers"
            self.refuse(f"--rollout_backend: vLLM is not installed: {fix}")


def print_plan(args: Flags, **more: Any) -> None:
    """Print the arithmetic of a run and, with --dry_run, what it would do with this machine: see parts/plan.py."""
    with contextlib.suppress(SystemExit):  # what it could not do it has printed
        play("parts/plan.py", json.dumps(asdict(args) | more))


def prepare_run_dir(args: Flags, data_hash: str, world: World) -> Path:
    """Make `output_dir/exp_name` with args.json and environment.json; scripts/parts/run_dir.py says when one that holds
    another run is refused. All ranks. Raises UserError."""

    def claim() -> None:
        facts = {"command": [sys.executable, *sys.argv], "data_hash": data_hash}
        facts |= {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
        play("parts/run_dir.py", args.run_dir, "--claim", json.dumps({"args": asdict(args), "facts": facts}))

    on_main(claim, world)
    return args.run_dir


PROGRAM_S = 120.0  # of a program that a run waits for: matplotlib's first start on a machine looks for fonts


def program(name: str, *arguments: object) -> list[str]:
    """Command line of a program in scripts/: the four files start them and import one, sandbox."""
    return [sys.executable, str(REPO / "scripts" / name), *map(str, arguments)]


def play(name: str, *arguments: object) -> None:
    """Run a program in scripts/ in this process, which has torch already."""
    before, sys.argv = (sys.argv, [*sys.path]), program(name, *arguments)[1:]
    code = compile(Path(sys.argv[0]).read_text(), sys.argv[0], "exec")
    try:  # not by runpy, which puts another module in the place of __main__: threads unpickle what is in there
        exec(code, {"__name__": "__main__", "__package__": "", "__file__": sys.argv[0]})
    finally:
        sys.argv, sys.path[:] = before


def run_program(name: str, *arguments: object, seconds: float | None = None) -> str:
    """Run a program in scripts/; what it wrote to stderr if it failed, else ""."""
    command, limit = program(name, *arguments), seconds or PROGRAM_S
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit)
    except (OSError, subprocess.SubprocessError) as error:
        return (getattr(error, "stderr", "") or str(error)).strip()
    return ""


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


SWEEPERS: list[subprocess.Popen] = []


def sweep(directory: str | Path, until: str = "read -r _") -> None:
    """Have a temporary directory removed when this process is gone, however that came about: stdin ends with us."""
    line = ["sh", "-c", f'{until}; rm -rf -- "$0"', directory]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # who reads ours waits for all writers
    SWEEPERS.append(subprocess.Popen(line, stdin=subprocess.PIPE, **quiet, start_new_session=True))


# --- Data -------------------------------------------------------------------------------------------------------------


# Published models expect the words of most to the letter: R1-Zero's (arXiv:2501.12948, table 1), Qwen's boxed one,
# those of Olmo 3 RL-Zero. simple_chat is our own: open-instruct's of that name does not open the assistant's turn.
CHAT_TEMPLATES = {path.stem: path.read_text() for path in sorted(REPO.glob("scripts/data/templates/*.jinja"))}

HELD_OUT_SEED = 1_000_000  # reasoning_gym item i uses Random(seed + i): close seeds share nearly all items


@dataclass(frozen=True)
class Environment:
    """Who answers the policy: a file (see rewards.Episode), and what the chat template has around an answer. A turn,
    `first`, a text, (`between`, a text, ...) `last`, the next turn. With role "" these are empty: an answer stands in
    the policy's own turn. `first` begins with the end of the turn, which a policy that stopped has written."""

    path: str
    config: dict[str, Any]
    role: str
    stop: tuple[str, ...]
    schemas: dict[str, dict[str, Any]]  # of the tools, by name, for the chat template
    show_tools: bool = True  # to the chat template
    first: str = ""
    between: str | None = ""  # None: the template takes one message only, and texts are lines of it
    last: str = ""

    def of_row(self, row: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What the chat template and what the file is told of a row. Raises ValueError for one that is broken."""
        row = row or {}
        tools, config = row.get("tools"), row.get("env_config") or {}
        config = json.loads(config) if isinstance(config, str) else config
        need(isinstance(config, dict), f"env_config must be an object, got {config!r:.80}")
        names = list(self.schemas) if tools is None else [tools] if isinstance(tools, str) else list(tools)
        unknown = sorted(set(names) - set(self.schemas)) if self.schemas else []
        need(not unknown, f"tools {unknown}: --tools has {sorted(self.schemas)}")
        shown = [self.schemas[name] for name in names if name in self.schemas and self.show_tools]
        return shown, self.config | config | {"active_tools": names}

    def answer(self, texts: Sequence[str], ended: bool, room: int, tokenizer: "Tokenizer") -> tuple[list[int], str]:
        """Tokens that say `texts` to a policy whose turn has `ended` with an end token or not, and what they say: the
        texts, as templates have them without white space around, cut where they would take half of the `room`, in
        tokens. A tokenizer may join the end of a text with the separator after it, so they go to it together."""
        texts = texts if self.between is not None else ["\n".join(texts)]
        parts, left, kept = [self.first], (room - len(ids_of([self.first + self.last], tokenizer))) // 2, []
        for text in [text.strip() for text in texts] if self.role else texts:
            tokens = ids_of(plain_parts(text, tokenizer), tokenizer)
            if len(tokens) > max(left, 0):
                text = str(tokenizer.decode(tokens[: max(left - 8, 0)])).rstrip("\ufffd") + " [cut]"
            begin, *more = plain_parts(text, tokenizer)
            parts = [*parts[:-1], parts[-1] + ((self.between or "") if kept else "") + begin, *more]
            left -= len(tokens)
            kept.append(text)
        return ids_of([*parts[:-1], parts[-1] + self.last], tokenizer)[ended:], "\n".join(kept)

    def with_separators(self, tokenizer: "Tokenizer", eos_ids: Sequence[int]) -> "Environment":
        """The same with the separators of the tokenizer's chat template. Raises UserError for one that has none."""
        if not self.role:
            return self
        found = find_separators(tokenizer, self.role, eos_ids, list(self.schemas.values()) if self.show_tools else ())
        return replace(self, **dict(zip(("first", "between", "last"), found, strict=True)))


@dataclass(frozen=True)
class Prompt:
    """One dataset row from loading to reward: tokens, label and verifier never travel apart."""

    index: int  # position in the loaded dataset
    token_ids: tuple[int, ...]
    text: str  # the rendered prompt, for people
    ground_truths: tuple[Any, ...]
    verifiers: tuple[str, ...]  # one per ground truth; their scores are summed
    conversation: str = ""  # lines "role: content", for verifiers that read the prompt
    environment: Environment | None = None  # answers the policy between its turns; None: one turn
    episode: dict[str, Any] = field(default_factory=dict)  # what the row tells it: messages, ground_truths, config


def load_tokenizer(args: Flags) -> "Tokenizer":
    """Tokenizer of the model with the chat template that --chat_template_name and --add_bos ask for."""
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    tokenizer = pretrained(transformers.AutoTokenizer, args, "model_name_or_path")
    if args.chat_template_name is not None:
        tokenizer.chat_template = CHAT_TEMPLATES[args.chat_template_name]
    known, name = " | ".join(CHAT_TEMPLATES), args.model_name_or_path
    need(tokenizer.chat_template is not None, f"{name} has no chat template: give --chat_template_name {known}")
    if args.add_bos:
        begun = "bos_token" in tokenizer.chat_template or (tokenizer.bos_token or "\0") in tokenizer.chat_template
        if begun or tokenizer.bos_token is None:
            why = "its chat template writes one already" if begun else "its tokenizer has none"
            raise UserError(f"--add_bos: no BOS token can be added for {args.model_name_or_path}: {why}; drop the flag")
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    return tokenizer


@functools.lru_cache(maxsize=4)
def _added_tokens(tokenizer: "Tokenizer") -> re.Pattern:
    names = sorted((name for name in tokenizer.get_added_vocab() if len(name.strip()) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def plain_parts(text: str, tokenizer: "Tokenizer") -> list[str]:
    """A text in parts in which nothing is a special token, which a search result with an <|im_end|> must not have."""
    middles = [sum(match.span()) // 2 for match in _added_tokens(tokenizer).finditer(text)]
    return [text[a:b] for a, b in zip([0, *middles], [*middles, len(text)], strict=True)]


def ids_of(parts: Sequence[str], tokenizer: "Tokenizer") -> list[int]:
    """Tokens of texts, each alone."""
    return [i for part in parts if part for i in tokenizer(part, add_special_tokens=False)["input_ids"]]


def find_separators(
    tokenizer: "Tokenizer", role: str, eos_ids: Sequence[int], schemas: Sequence[dict[str, Any]] = ()
) -> tuple[str, str | None, str]:
    """Environment's first, between and last for the tokenizer's chat template, which on a probe conversation must come
    to the same tokens as the turns put together. Raises UserError with the reason if it does not."""

    def check(fits: bool, why: str) -> None:
        fix = 'take another --chat_template_name, or an environment whose about() gives another role (user, tool, "")'
        need(fits, f"the chat template {why}, so turns cannot follow one another token by token: {fix}")

    def render(*messages: tuple[str, str]) -> str:
        told = [{"role": name, "content": text} for name, text in (("user", "Question"), *messages)]
        how: dict[str, Any] = {"tools": list(schemas)} if schemas else {}
        return str(tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=False, **how))

    start, x, y = render(), 'Heard "it"\n{1}', "Noted"
    first, between, last, once, twice = "", None, "", "", ""
    for said in ("Said", "<think>\nThought\n</think>\n\nSaid"):
        try:
            once, twice = (render(*[("assistant", said), (role, x)] * n) for n in (1, 2))
        except Exception as error:  # whatever a template raises
            check(False, f"takes no message of role {role!r} after an assistant's ({error})")
        check(said in once, "drops or rewrites the thoughts of earlier turns")
        opens = "begins an assistant's turn otherwise than it is written later: it opens a <think>, for instance"
        check(once.startswith(start + said), opens)
        first, found, last = once[len(start + said) :].partition(x)
        check(found != "", f"rewrites what role {role!r} says")
        parts = [start, said, first + x + last, said, first + x + last]
        check(twice == "".join(parts), "writes a turn otherwise once others follow: it drops thoughts, for instance")
        check(ids_of([twice], tokenizer) == ids_of(parts, tokenizer), "joins tokens across the ends of turns")
    with contextlib.suppress(Exception):  # several answers to a turn; not all templates take that
        both = render(("assistant", "Said"), (role, x), (role, y))
        found = both.removeprefix(start + "Said" + first + x).removesuffix(y + last)
        between = found if both == start + "Said" + first + x + found + y + last else None
    ends = first != "" and ids_of([first], tokenizer)[0] in eos_ids
    check(ends, "writes no end token after an assistant's turn, at which the engine stops")
    return first, between, last


def load_environment(args: Flags, tokenizer: "Tokenizer | None" = None) -> Environment | None:
    """Who answers the policy, by --env_file or --tools, in the tokenizer's chat template if one is given. Raises
    UserError if it cannot be loaded, or the template cannot go on."""
    if not args.has_turns:
        return None
    rewards.more_env_workers(args.pool_size or max(8, 2 * len(ALL_CORES)))
    path, config = args.env_file, {}
    if args.tools:
        path = REPO / "scripts" / "tools" / "calls.py"
        config = {name: getattr(args, name) for name in ("tools", "tool_call_names", "tool_parser_type")}
        try:
            config["tool_configs"] = [json.loads(text) for text in args.tool_configs]
        except ValueError as error:
            raise UserError(f"--tool_configs {args.tool_configs}: not JSON: {error}") from None
        config["tokenizer"] = args.model_name_or_path
    path = os.path.abspath(path)
    about = rewards.about_environment("--tools" if args.tools else "--env_file", path, config)
    stop, schemas = tuple(about.get("stop", ())), about.get("schemas", {})
    loaded = Environment(path, config, about.get("role", "user"), stop, schemas, args.pass_tools_to_chat_template)
    return loaded if tokenizer is None else loaded.with_separators(tokenizer, eos_token_ids(args, tokenizer))


def pretrained(kind: Any, args: Flags, flag: str) -> Any:
    """What `kind` of transformers loads of --model_name_or_path; `flag` is what a person gave it by. UserError."""
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
        there = Path(name).suffix not in (".jsonl", ".parquet") or Path(name).is_file()
        need(there, f"--{flag} {name}: no such file")
        pairs.append((name, number))
    fits = not pairs or len(splits) == len(pairs) or len(set(splits)) == 1
    need(fits, f"--{flag}_splits: give one split or one per dataset ({len(pairs)}), got {len(splits)}")
    return pairs


Row = tuple[str, list[dict[str, str]], list[Any], list[str]]  # file and row for people, messages, labels, verifiers


def read_rows(flag: str, name: str, amount: float, split: str, seed: int) -> Iterator[Row]:
    """The rows that NAME AMOUNT of a mixer flag takes, as scripts/parts/rows.py reads them. Raises UserError."""
    command = program("parts/rows.py", name, amount, "--split", split, "--seed", seed)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            row = json.loads(line)
            need(isinstance(row, list), f"--{flag} {row}")  # else why it cannot be read
            yield row
    need(process.returncode == 0, f"--{flag} {name}: {shlex.join(command)} ended with {process.returncode}")


def generate_rows(flag: str, name: str, count: int, seed: int) -> Iterator[Row]:
    """The same of reasoning_gym:TASK. In this process, which needs the library for its check of the labels: its import
    takes seconds."""
    import reasoning_gym

    task = name.partition(":")[2]
    try:
        items = reasoning_gym.create_dataset(task, size=count, seed=seed)
    except ValueError as error:
        raise UserError(f"--{flag} {name}: {error}") from None
    for i, item in enumerate(items, start=1):
        label = json.dumps({"task": task, "entry": item}, default=str)
        yield f"{name} row {i}", [{"role": "user", "content": item["question"]}], [label], ["reasoning_gym"]


def load_prompts(
    flag: str, args: Flags, tokenizer: "Tokenizer", environment: Environment | None = None
) -> list[Prompt]:
    """Read, check and tokenize all rows of a mixer flag; over-long prompts are dropped and counted on stdout. The
    `environment` answers rows with a column tools or env_config, or all of a source that has no such row. Raises
    UserError with file, row number and reason."""
    pairs, splits = parse_mixer(flag, getattr(args, flag)), getattr(args, f"{flag}_splits")
    today = date_of_start(args)
    system = Path(args.system_prompt_override_file).read_text().strip() if args.system_prompt_override_file else None
    prompts: list[Prompt] = []
    dropped = 0
    for i, (name, amount) in enumerate(pairs):
        if name.startswith("reasoning_gym:"):
            rows = generate_rows(flag, name, int(amount), args.seed + (HELD_OUT_SEED if "eval" in flag else 0))
        else:
            rows = read_rows(flag, name, amount, splits[i % len(splits)], args.seed)
        for where, messages, labels, verifiers, *asked in rows:
            lines = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
            if system is not None:
                messages = [{"role": "system", "content": system}] + [m for m in messages if m["role"] != "system"]
            tools, episode = [], {}
            try:
                verifiers = [rewards.check_verifier(verifier) for verifier in verifiers]
                for verifier, label in zip(verifiers, labels, strict=True):
                    if reason := rewards.check_ground_truth(verifier, label, lines):
                        raise UserError(f"{verifier}: {reason}")
                if environment is not None and asked != [None]:
                    tools, config = environment.of_row(*asked)
                    episode = {"messages": messages, "ground_truths": labels, "config": config}
                how: dict[str, Any] = {"tools": tools} if tools else {}
                how |= {"add_generation_prompt": True, "strftime_now": today}
                text = str(tokenizer.apply_chat_template(messages, tokenize=False, **how))
            except Exception as error:  # whatever a template raises, of a role that it does not take for instance
                raise UserError(f"--{flag} {where}: {error}") from None
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(token_ids) > args.max_prompt_token_length:
                dropped += 1
                continue
            rest = tuple(labels), tuple(verifiers), lines, environment if episode else None, episode
            prompts.append(Prompt(len(prompts), tuple(token_ids), text, *rest))
    longest = args.max_prompt_token_length
    if dropped and int(os.environ.get("RANK", 0)) == 0:
        print(f"--{flag}: {dropped} of {dropped + len(prompts)} prompts longer than {longest} dropped")
    need(prompts != [] or not pairs, f"--{flag}: every prompt is longer than --max_prompt_token_length {longest}")
    return prompts


def date_of_start(args: Flags) -> Callable[[str], str]:
    """strftime of when the run began: some chat templates write the date, and --resume has the prompts of its start."""
    facts, resume = Path(args.output_dir) / args.exp_name / "environment.json", getattr(args, "resume", False)
    day = time.localtime(json.loads(facts.read_text()).get("begun") if resume and facts.exists() else None)
    return lambda form: time.strftime(form, day)  # scripts/minimal.py has no --resume


def data_hash(prompts: Iterable[Prompt]) -> str:
    """sha256 over tokens, labels, verifiers and environments of all prompts in order."""
    digest = hashlib.sha256()
    for p in prompts:
        digest.update(repr((p.token_ids, p.ground_truths, p.verifiers)).encode())
        if p.environment is not None:
            digest.update(repr(p.episode).encode())
    return digest.hexdigest()[:16]


def prompt_at(prompts: Sequence[Prompt], position: int, seed: int | None, excluded: Collection[int] = ()) -> Prompt:
    """The prompt at a position of the endless stream: epoch e is a permutation drawn from (seed, e); None: as they are.
    In place of an `excluded` one (by index) comes the next in the permutation that is not (itself, when all are)."""
    epoch, offset = divmod(position, len(prompts))
    order = _permutation(len(prompts), seed, epoch)
    candidates = (order[(offset + i) % len(order)] for i in range(len(order)))
    return prompts[next((i for i in candidates if i not in excluded), order[offset])]


@functools.lru_cache(maxsize=4)
def _permutation(n: int, seed: int | None, epoch: int) -> Sequence[int]:
    return range(n) if seed is None else random.Random(derive_seed(seed, epoch)).sample(range(n), n)


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
    play("parts/fits.py", json.dumps(asdict(args)))


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
    facts = [f"--revision={commit or args.model_revision or ''}", f"--dtype={args.model_dtype}"]
    facts += ["--tied"] * bool(model.config.tie_word_embeddings)
    play(
        "parts/start_files.py", path, args.model_name_or_path, *facts, "--eos", *eos_token_ids(args, tokenizer, commit)
    )


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


# --- Traces and dumps -------------------------------------------------------------------------------------------------


def record_step(step: Any, packing: str, policy: Any, args: Flags, world: World) -> None:
    """With --save_traces or --dump_steps: write what a grpo.Step sampled and trained on, see scripts/parts/dumps.py.
    All ranks."""
    if args.save_traces or args.dump_steps:
        from scripts.parts import dumps

        dumps.record_step(step, packing, policy, args, world)


# --- Metrics and report -----------------------------------------------------------------------------------------------


def read_numbers(values: Sequence[float | torch.Tensor]) -> list[float]:
    """The values as Python numbers; all tensors among them are read at once, so that a GPU is waited for once."""
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(numbers) if isinstance(x, torch.Tensor) else x for x in values]


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
        """Add `total` over `count` samples. Tensors are read in `reduce` only, so that this never waits for a GPU."""
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
        """Values of which the median and the 99th percentile are wanted, `name`_p50 and _p99."""
        self.samples[name] += values

    def extreme(self, name: str, value: float) -> None:
        """Keep the smallest value of a `..._min` name, the largest of a `..._max` name, over calls and ranks."""
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
        numbers = iter(read_numbers([number for pair in self.sums.values() for number in pair]))
        host.sums = {name: (next(numbers), next(numbers)) for name in self.sums}
        host.sums |= {name: (seconds, 1.0) for name, seconds in self.timer.seconds.items()}
        host.totals = self.totals
        host.extremes = self.extremes
        host.samples = self.samples
        return host

    def reduce(self, world: World) -> dict[str, float]:
        """Averages over all ranks, the same dict on each. All ranks must call it; their keys may differ."""
        merged = Metrics()
        for metrics in all_gather(self.on_host(), world):
            merged.merge(metrics)
        out = {name: total / count for name, (total, count) in merged.sums.items() if count}
        for name, values in merged.samples.items():
            out[f"{name}_p50"] = float(np.percentile(values, 50))
            out[f"{name}_p99"] = float(np.percentile(values, 99))
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


STATUSES = ("ok", "no_answer", "timeout", "crash", "infra_error")


def note_rollouts(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics) -> None:
    """Scores, verifier rates, lengths and stop rates of all the given rollouts, trained on or not."""
    note_verifiers(rollouts, args, metrics, "objective")
    note_statuses(rollouts, metrics)
    if any(r.turns for r in rollouts):
        from scripts.parts import turn_metrics

        turn_metrics.note(rollouts, metrics)
    scored = [r for r in rollouts if not math.isnan(r.score)]
    metrics.add_all("objective/scores", [r.score for r in scored])
    for r in scored:
        if args.overlong_buffer_length:
            metrics.add("objective/overlong_penalty", r.outcome - r.score)
        if args.apply_r1_style_format_reward:
            metrics.add("val/format_scores", r.format_score * args.r1_style_format_reward)
    note_lengths(rollouts, metrics)


def note_verifiers(rollouts: Sequence[Rollout], args: rewards.RewardFlags, metrics: Metrics, prefix: str) -> None:
    """Reward, share above 0 and share of full scores, of all verifiers together and of each. Missing scores, and the
    rollouts of a dump, which have no results, do not count."""
    for r in rollouts if args.apply_verifiable_reward else ():
        if not r.results:
            continue
        scores = [("verifiable", r.verifiable, len(r.prompt.verifiers))]  # name, score, full score
        for name, result in zip(r.prompt.verifiers, r.results, strict=True):
            scores.append((name, result.score, 1))
        for name, score, full_score in scores:
            if not math.isnan(score):
                solve_rate = "solve_rate" if name == "verifiable" else f"{name}_solve_rate"
                metrics.add(f"{prefix}/{name}_reward", args.verification_reward * score)
                metrics.add(f"{prefix}/{name}_correct_rate", float(score > 0))
                metrics.add(f"{prefix}/{solve_rate}", float(score >= full_score - 1e-8))


def note_statuses(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """How often each verifier ended in which of the STATUSES, its seconds and the numbers among its details."""
    statuses: dict[str, Counter[str]] = defaultdict(Counter)  # verifier -> status -> results
    for r in rollouts:
        for name, result in zip(r.prompt.verifiers, r.results, strict=bool(r.results)):
            statuses[name][result.status] += 1
            metrics.sample(f"time/reward_{name}", [result.seconds])
            for detail, value in result.details.items():
                if isinstance(value, (int, float)):
                    metrics.add(f"reward/{name}_{detail}", float(value))
    for name, counts in statuses.items():
        for status in STATUSES:
            metrics.count(f"reward/{name}_{status}", counts[status])
            if status != "ok":
                metrics.add(f"objective/reward_{status}_rate", counts[status], counts.total())


def note_lengths(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Tokens of the responses, and how many ended by themselves."""
    lengths = [len(r.token_ids) for r in rollouts]
    solved = [len(r.token_ids) for r in rollouts if r.verifiable > 0]
    unsolved = [len(r.token_ids) for r in rollouts if not r.verifiable > 0]  # the unscored, nan, too
    metrics.add_all("val/sequence_lengths", lengths)
    metrics.add("val/sequence_lengths_solved", sum(solved), len(solved))
    metrics.add("val/sequence_lengths_unsolved", sum(unsolved), len(unsolved))
    stopped = sum(r.finish_reason == "stop" for r in rollouts)
    metrics.add("val/stop_rate", stopped, len(rollouts))
    metrics.add("val/stop_token_rate", stopped, len(rollouts))
    metrics.count("val/num_stop_token_ids", stopped)


def kind_of(group: Group, args: rewards.RewardFlags) -> str:
    """How a group's outcomes are, the missing ones apart: "mixed" if they differ, so that the group has a gradient;
    else all "zero", all "solved" (the highest that the prompt allows), or "nonzero", as a group without outcomes."""
    outcomes = distinct_outcomes(group)
    highest = rewards.max_score(args, len(group[0].prompt.verifiers) or 1)
    if len(outcomes) > 1:
        return "mixed"
    if outcomes == {0.0}:
        return "zero"
    return "solved" if outcomes == {highest} else "nonzero"


def note_step(groups: Sequence[Group], sampled: Sequence[Group], args: Any, metrics: Metrics) -> None:
    """Metrics of a step's sampling, with grpo.Args: rollouts, groups by outcome, advantages. As in open-instruct's
    reports, objective_kept/* and val/num_step_tokens count the groups that are kept, and each prompt once."""
    rollouts = [r for group in sampled for r in group]
    note_rollouts(rollouts, args, metrics)
    kept = [group for group in groups if len(distinct_outcomes(group)) > 1 or not args.filter_zero_std_samples]
    kept_rollouts = [r for group in kept for r in group]
    note_verifiers(kept_rollouts, args, metrics, "objective_kept")

    prompt_lengths = [len(r.prompt.token_ids) for r in rollouts]
    response_tokens = sum(len(r.token_ids) for r in rollouts)
    kept_tokens = sum(len(group[0].prompt.token_ids) for group in kept)
    kept_tokens += sum(len(r.token_ids) for r in kept_rollouts)
    metrics.count("sampled", len(rollouts))
    metrics.count("response_tokens", response_tokens)
    metrics.count("val/num_sampled_tokens", sum(prompt_lengths) + response_tokens)
    metrics.count("val/num_step_tokens", kept_tokens)
    metrics.add_all("val/prompt_lengths", prompt_lengths)

    scores = [r.score for r in rollouts if not math.isnan(r.score)]
    metrics.add("val/score_sq", sum(score * score for score in scores), len(scores))
    metrics.count("batch/missing_rewards", len(rollouts) - len(scores))
    metrics.add_all("val/advantages", [r.advantage for group in groups for r in group])

    kinds = Counter(kind_of(group, args) for group in sampled)
    metrics.count("batch/total_prompts", len(sampled))
    metrics.count("val/total_reward_groups", kinds["mixed"])
    metrics.count("batch/filtered_prompts", len(sampled) - kinds["mixed"])
    for kind in ("zero", "solved", "nonzero"):
        metrics.count(f"batch/filtered_prompts_{kind}", kinds[kind])
    for name, gib in memory_used().items():
        metrics.extreme(name, gib)


def memory_used() -> dict[str, float]:
    """Memory in GiB: the most that this process ever held; what all processes of this machine hold now; the most that
    torch's tensors ever held on this process's GPU, and the most that torch's allocator ever reserved there."""
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
    """The variance, from the means of the squares, which leaves `metrics`, and of the values."""
    return max(metrics.pop(mean_square) - metrics[mean] ** 2, 0.0)


def finish_metrics(metrics: dict[str, float], args: Any) -> dict[str, float]:
    """Add the metrics that are functions of reduced ones, under open-instruct's names; `args` are grpo.GRPOFlags."""
    if "val/ratio_sq" in metrics:
        metrics["val/ratio_var"] = take_variance(metrics, "val/ratio_sq", "val/ratio")
    if "val/score_sq" in metrics:
        metrics["objective/reward_std"] = math.sqrt(take_variance(metrics, "val/score_sq", "objective/scores"))
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
    """Seconds of each named phase of a step: on the clock or, with `gpu`, between two events of the caller's stream.
    With `gpu`, reading `seconds` waits for the caller's own work alone, not for what other threads have on the GPU."""

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
        self.trackers: dict[str, subprocess.Popen] = {}
        if (run_dir / "metrics.jsonl").exists():
            from scripts.parts.run_dir import forget_after

            forget_after(run_dir, start_step)
        if args.with_tracking or args.with_tensorboard:
            from scripts.parts import track

            self.trackers = track.start(args, run_dir, start_step)

    def log(self, metrics: dict[str, Any]) -> None:
        """Append a step's metrics to metrics.jsonl, and print the step's line."""
        if not self.enabled:
            return
        metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}  # JSON has no NaN
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics, default=str) + "\n")
        if not self.header_shown:
            headings = [heading.rjust(self.WIDTH) for heading, _, _ in self.COLUMNS]
            self.say(" ".join(["step".rjust(self.step_width), *headings, "left".rjust(8)]))
            self.header_shown = True
        self.say(self._line(metrics))

    def _line(self, metrics: dict[str, Any]) -> str:
        """A step in at most 120 columns."""
        step = metrics["training_step"]
        cells = [f"{step}/{self.num_steps}".rjust(self.step_width)]
        for heading, name, form in self.COLUMNS:
            cells.append(cell(metrics.get(name), form, max(self.WIDTH, len(heading))))
        cells.append(self._time_left(step).rjust(8))
        return " ".join(cells)

    def _time_left(self, step: int) -> str:
        """Hours:minutes:seconds of the steps to come at the mean pace of the last ones, eval and saving included."""
        if step == 0:
            self.step_ends[-1] = time.monotonic()  # the evaluation before the first step
            return ""
        self.step_ends.append(time.monotonic())
        pace = (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)
        minutes, seconds = divmod(round(pace * (self.num_steps - step)), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Print the first and the last rollout; the first TABLE_ROLLOUTS go to samples.jsonl, for the trackers."""
        if not self.enabled or not groups:
            return
        rollouts = [r for group in groups for r in group]
        for r in (rollouts[0], rollouts[-1]):
            end = "ended by itself" if r.finish_reason == "stop" else "cut at the limit"
            label = str(*r.prompt.ground_truths[:1])
            self.say(f"  prompt   {r.prompt.text[-600:]!r}")
            self.say(f"  response {r.text[:600]!r}")
            self.say(f"  score {r.score:g}, {end}, label {label:.120}")
        rows = []
        for r in rollouts[:TABLE_ROLLOUTS]:
            row = {
                "training_step": step,
                "prompt": r.prompt.text,
                "ground_truths": str(r.prompt.ground_truths),
                "score": r.score,
                "advantage": r.advantage,
                "finish_reason": r.finish_reason,
                "text": r.text,
            }
            rows.append(row)
        with (self.run_dir / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"training_step": step, "rollouts": rows}, default=str) + "\n")

    def say(self, text: str) -> None:
        """Print a line."""
        if self.enabled:
            print(text, flush=True)

    def close(self) -> None:
        """Let the trackers send what they have not sent yet."""
        if not self.enabled:
            return
        for name, process in self.trackers.items():
            from scripts.parts import track

            problem = track.end(name, process)
            if problem:
                by_hand = f"scripts/track.py {self.run_dir} --{name}"
                self.say(f"{problem}: metrics.jsonl has all, {by_hand} sends it")


def draw_report(run_dir: Path) -> str:
    """Have scripts/reports/curves.py draw report.png; returns what the run's last line says of it. A failure is a
    warning."""
    problem = run_program("reports/curves.py", run_dir)
    if not problem:
        return f"report {run_dir / 'report.png'}"
    command = shlex.join(program("reports/curves.py", run_dir))
    print(f"WARNING: no report was drawn: {problem.splitlines()[-1]}. To draw it: {command}", flush=True)
    return "no report"


# --- Servers: language models for rewards -----------------------------------------------------------------------------


def start_reward_models(args: Flags, run_dir: Path, world: World) -> Any:
    """Connect this rank to the judge and the solver. Without --solver_base_url the first rank starts the solver's
    servers: its result is then a scripts.parts.serve.Servers, else None. All ranks that score. Raises UserError."""
    servers = None
    if args.solver_model_name_or_path and not args.solver_base_url:
        from scripts.parts import serve

        servers, args = serve.start_solver(args, run_dir, world)
    rewards.configure(args, connect=True)
    return servers
