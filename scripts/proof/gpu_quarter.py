"""What a quarter of an hour on one GPU can tell, in the order of its worth. With more time and more GPUs it goes on.

    python scripts/proof/gpu_quarter.py [--out DIR] [--seconds 540] [--only NAME ...] [--model DIR]
    python scripts/proof/gpu_quarter.py --tiny --seconds 300       in miniature on a CPU, which compiles nothing

Nothing is downloaded: models have random weights, or are the fly of scripts/studies. What needs vLLM is made where it
is installed. Every figure is a line of DIR/results.jsonl, and DIR/README.md is written anew after each check: what is
cut off loses nothing. DIR/failed.txt has the ends of the logs of what failed. Logs and runs are in DIR.work.

Checks of right and wrong run side by side, timed ones alone. Each is a process, which imports while the ones before it
work, and ends when its seconds are over.
"""

import argparse
import contextlib
import copy
import functools
import gc
import importlib.util
import inspect
import json
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)
if not importlib.util.find_spec("httpx2"):  # beside an older transformers the hub's client is httpx
    sys.modules["httpx2"] = importlib.import_module("httpx")

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import grpo  # noqa: E402
from scripts.data.make_addition import make_addition  # noqa: E402
from scripts.data.make_tasks import make_task  # noqa: E402
from scripts.data.make_tiny_model import make_tokenizer  # noqa: E402
from scripts.parts import estimate  # noqa: E402
from scripts.proof import bench  # noqa: E402
from scripts.reports.common import CORRECT, parser, read_lines  # noqa: E402

PROGRAM = "scripts/proof/gpu_quarter.py"
GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda" if GPUS else "cpu")
DTYPE = torch.bfloat16 if GPUS else torch.float32
GIB = 2**30
SIZES = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
    tie_word_embeddings""".split()
SHAPES = {  # of Qwen2.5; of the 7B as many layers as 80 GB hold with Adam
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 8, 28, 4, 152064, False),
}
TINY = (64, 128, 2, 2, 1, 2048, True)


@dataclass(frozen=True)
class Job:
    """What a check knows."""

    name: str
    out: Path  # directory of the results
    work: Path  # of its own files
    tiny: bool  # it is tried in miniature
    dry: bool  # there are too few GPUs: its run only says what it would do
    model: str  # a real one, or ""

    def note(self, case: str, ok: bool | None = None, **figures: Any) -> None:
        """Keep a case and its figures. `ok`: whether it is right, None where it is only measured."""
        row = {"check": self.name, "case": case, "ok": ok, "figures": figures}
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    @contextlib.contextmanager
    def case(self, name: str) -> Generator[None]:
        """A case whose memory is counted. One that fails, or does not fit, is noted, and the next one follows."""
        gc.collect()
        if GPUS:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        except Exception as error:
            ok = None if isinstance(error, torch.OutOfMemoryError) else False
            self.note(name, ok=ok, error=f"{type(error).__name__}: {error}"[:300])

    def random_model(self, shape: str, **options: Any) -> Any:
        """A Qwen2 of random weights in bfloat16, made on the device."""
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        sizes = TINY if self.tiny else SHAPES[shape]
        config = AutoConfig.for_model("qwen2", **dict(zip(SIZES, sizes, strict=True)))
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)

    def model_on_disk(self, shape: str) -> str:
        """A model of random weights; its tokenizer knows 512 of its tokens."""
        out = self.work / self.name / "model"
        tokenizer = make_tokenizer(512)
        model = self.random_model(shape)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        return str(out)


own_world = functools.cache(utils.init_distributed)


def timed(work: Callable[[], Any]) -> float:
    """Median seconds of a call, after one that compiles."""
    return bench.by_turns({"": work}, 1)[""][0]


def peak() -> dict[str, float]:
    """GiB: torch's tensors and its allocator at their peak, and what the device has in use beyond the allocator."""
    if not GPUS:
        return {}
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    allocated = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    return {"peak_gib": allocated / GIB, "reserved_gib": reserved / GIB, "context_gib": context / GIB}


def check_machine(job: Job) -> None:
    """The device's measured ceilings, and what a start's dithering of master weights takes."""
    import transformers

    size = 8192 if GPUS else 512
    x = torch.randn(size, size, device=DEVICE).to(DTYPE)
    copies = torch.empty(8 if GPUS else 1, 2**27, dtype=torch.uint8, device=DEVICE)
    seconds = timed(lambda: x @ x)
    speed = {"product_flops": 2 * size**3 / seconds}
    speed["copied_bytes"] = copies.nbytes / timed(copies.clone)
    (job.out / "speed.json").write_text(json.dumps(speed))
    device = torch.cuda.get_device_name() if GPUS else "a CPU"
    found = [name for name in ("vllm", "liger_kernel") if importlib.util.find_spec(name)]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "found": found}
    job.note(f"{device}, {len(utils.ALL_CORES)} cores", **versions, **speed, **peak())

    weights = torch.randn(2**20 if job.tiny else 2**28)
    weights = weights.bfloat16().float()
    start = time.perf_counter()
    utils.dither(weights, 1)
    seconds = time.perf_counter() - start
    job.note("dithering", ns_a_weight=1e9 * seconds / weights.numel())


def check_packs(job: Job, head_dim: int, heads: int, kv_heads: int) -> None:
    """A response in a pack and alone in a row, both against transformers' own attention in higher precision: logprobs
    and gradients of the pack are not worse than those of the row."""
    from transformers import AttentionInterface, AutoConfig

    own_world()
    AttentionInterface.register(utils.PACK_ATTENTION, utils.pack_attention)
    values = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    values |= {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    lengths = [(300, 0), (20, 0), (4000 if GPUS else 400, 0), (300, 150)]  # tokens of a response, window
    for dtype in {DTYPE, torch.float32}:
        for tokens, window in lengths:
            config = AutoConfig.for_model("mistral", sliding_window=window or None, **values)
            name = str(dtype).removeprefix("torch.")
            if GPUS and (tokens, window) == lengths[0]:
                problem = utils.fit_flex_attention(config, dtype, tokens, DEVICE)
                job.note(f"flex attention, {name}", ok=not problem, problem=problem)
            case = f"{head_dim} x {heads} / {kv_heads}, {name}, responses of {tokens}, window {window}"
            compare_packs(job, case, config, dtype, tokens)


def compare_packs(job: Job, case: str, config: Any, dtype: torch.dtype, tokens: int) -> None:
    """The second of four responses to a prompt, whose weights are of `dtype`."""
    rollouts = four_rollouts(tokens)
    row = [[rollouts[1:2]]]
    pack = [grpo.make_pieces(rollouts, 2**62)]
    least = 1e-3
    higher = torch.float32
    if dtype == torch.float32:
        least = 1e-6
        higher = torch.float64
    ours = utils.PACK_ATTENTION
    truth = of_tokens(slice(tokens), row, config, "sdpa", dtype, higher)
    in_row = of_tokens(slice(tokens), row, config, ours, dtype, dtype)
    in_pack = of_tokens(slice(tokens, 2 * tokens), pack, config, ours, dtype, dtype)
    row_off = list(map(bench.relative, truth, in_row))
    pack_off = list(map(bench.relative, truth, in_pack))
    logprobs_fine = pack_off[0] < 2 * row_off[0] + least
    gradient_fine = pack_off[1] < 2 * row_off[1] + least
    job.note(case, ok=logprobs_fine and gradient_fine, row_off=row_off, pack_off=pack_off)


def four_rollouts(tokens: int) -> list[grpo.Rollout]:
    """Responses of random tokens to one prompt, in two groups: a pack of two pieces."""
    prompt = utils.Prompt(0, tuple(range(50, 90)), "", ("7",), ("gsm8k",))
    rng = np.random.default_rng(0)
    rollouts = []
    for sample in range(4):
        r = grpo.Rollout(prompt, sample // 2, sample)
        ids = rng.integers(0, 1024, tokens).tolist()
        r.append(utils.Generation(ids, [0.0] * tokens, "stop", [0] * tokens))
        rollouts.append(r)
    return rollouts


def of_tokens(
    tokens: slice, packs: Any, config: Any, attention: str, dtype: torch.dtype, computed_in: torch.dtype
) -> list[Tensor]:
    """[logprobs of some response tokens in packs, the gradient of their sum]."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.to(DEVICE, dtype).to(computed_in)
    policy = grpo.Policy(model)
    batch = grpo.make_batch(packs, DEVICE)
    logprobs, _ = policy(batch, 1.0)
    logprobs = logprobs[batch.response_mask][tokens]
    gradients = torch.autograd.grad(logprobs.sum(), [*policy.parameters()])
    flat = [gradient.flatten() for gradient in gradients]
    return [logprobs.detach(), torch.cat(flat)]


def check_update(job: Job, shape: str, flags: Sequence[str]) -> None:
    """Updates with some flags each."""
    layers = SHAPES[shape][2]
    for words in flags:
        case = f"{shape}, {layers} layers {words}".strip()
        with job.case(case):
            time_update(job, case, shape, words)


def load(job: Job, shape: str, flags: str) -> tuple[grpo.Args, grpo.Learner]:
    """A learner with some flags, whose model is made on the device, with random weights."""
    from transformers import AttentionInterface

    pack_length = 256 if job.tiny else 8192
    line = f"""--model_name_or_path {shape} --model_dtype bfloat16 --beta 0 --no_load_ref_policy --temperature 1
        --no_dither_master_weights --max_logprob_gap 0 --rho_clamp_upper_bound 1 --pack_length {pack_length} {flags}"""
    args = utils.parse_args(grpo.Args, line.split())
    ours = torch.compiler.disable(utils.pack_attention) if args.compile_layers else utils.pack_attention
    AttentionInterface.register(utils.PACK_ATTENTION, ours)
    model = job.random_model(shape, attn_implementation=utils.PACK_ATTENTION)
    utils.load_causal_lm = lambda args: model.train()
    return args, grpo.load_learner(args, own_world())


def time_update(job: Job, case: str, shape: str, flags: str) -> None:
    """Time, MFU and memory of an update, AdamW included; milliseconds of a micro-batch, and of its host alone."""
    args, learner = load(job, shape, flags)
    policy = learner.policy
    prompts = 2 if job.tiny else 16
    groups = bench.random_rollouts(prompts, policy.model.config.vocab_size, 16 if job.tiny else 400)
    rollouts = [rollout for group in groups for rollout in group]
    (packs,) = grpo.pack_rollouts(rollouts, "shared", args.pack_length, 1, policy.pair_cost)
    batches = grpo.micro_batches(packs, "shared", args, DEVICE)
    update = partial(grpo.update, learner, [batches], args, own_world(), utils.Metrics())
    start = time.perf_counter()
    update()  # reads its gradient's norm, so it has waited for the device
    first = time.perf_counter() - start
    seconds = timed(update)
    memory = peak()
    both = timed(lambda: policy(batches[0], 1.0)[0].sum().backward())
    start = time.perf_counter()
    policy(batches[0], 1.0)[0].sum().backward()
    host = time.perf_counter() - start

    pieces = [piece for pack in packs for piece in pack]
    tokens = sum(map(grpo.piece_length, pieces))
    pairs = sum(map(grpo.attended_pairs, pieces))
    answered = sum(len(r.token_ids) for r in rollouts)
    flops = 3 * policy.flops(tokens, pairs, answered) / seconds
    figures = {"tokens": tokens, "packs": len(packs), "tokens_per_s": tokens / seconds}
    figures |= {"first_s": first, "update_s": seconds, "micro_batch_ms": 1e3 * both, "host_ms": 1e3 * host}
    sheet = estimate.planned_card().sheet
    if sheet is not None:
        figures["mfu"] = flops / sheet.operations
    setup = estimate.Setup(args, learners=1, shared_gpu=True, logprob_chunk=grpo.LOGPROB_CHUNK)
    counted = estimate.count(setup, copy.deepcopy(policy.model.config))
    parts = estimate.memory_parts(setup, counted)
    job.note(case, **figures, estimated_gib=estimate.learner_bytes(parts) / GIB, **memory)


# --- Runs and other programs ------------------------------------------------------------------------------------------

TORCHRUN = "-m torch.distributed.run --standalone --local_addr 127.0.0.1 --nproc_per_node".split()
FLY = """--model_name_or_path scripts/studies/fly --output_dir WORK/runs --overwrite --save_freq -1 --eval_on_step_0
    --dataset_mixer_list WORK/tasks/largest_digit/train.jsonl 1.0 --remap_verifier learned=gsm8k --pack_length 2048
    --dataset_mixer_eval_list WORK/tasks/largest_digit/eval.jsonl 1.0 --response_length 14 --temperature 1.0 --beta 0
    --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8 --max_prompt_token_length 64
    --lr_scheduler_type constant --learning_rate 1e-3 --advantage_normalization_type centered
    --vllm_gpu_memory_utilization 0.1"""
FIGURES = """debug/vllm_vs_local_logprob_diff_mean time/total time/training time/weight_sync time/weight_sync_pause
    val/weight_sync_gb_per_second memory/gpu_allocated_gib""".split()


def make_do() -> None:
    """Give an older torch (2.11 has been tried) what it lacks of 2.13."""
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        compiler: Any = torch.compile
        torch.compile = lambda *args, recompile_limit=0, **options: compiler(*args, **options)
    if not hasattr(dist, "all_gather_single"):
        dist.all_gather_single = dist.all_gather_into_tensor


def run_program(
    job: Job, log: str, words: Sequence[Any], ranks: int = 1, until: Callable[[], bool] | None = None, **more: str
) -> int:
    """Exit status of a program of ours under make_do, which is killed once `until` holds."""
    line = [PROGRAM, "--under", *map(str, words)]
    if ranks > 1:
        line = [*TORCHRUN, str(ranks), *line]
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | dict(os.environ) | more  # FlashInfer's may have to be compiled
    path = job.work / f"{log}.log"
    with path.open("a") as file:  # several processes write to its end
        command = [sys.executable, *line]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        while until is not None and process.poll() is None:
            time.sleep(0.02)
            if until():
                process.kill()
        status = process.wait()
    if status > 0:
        keep_failure(job.out, path)
    return status


def keep_failure(out: Path, log: Path) -> None:
    with (out / "failed.txt").open("a") as file:
        file.write(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}\n")


def flags_of(job: Job, name: str, steps: int, more: str) -> list[str]:
    """Flags of a run of the fly, then others."""
    text = f"{FLY} --exp_name {name} --local_eval_every {steps} --total_episodes {64 * steps} {more}"
    return text.replace("WORK", str(job.work)).split()


def steps_of(job: Job, name: str) -> list[dict[str, Any]]:
    """Rows of a run's metrics, the first evaluation's too."""
    return list(read_lines(job.work / "runs" / name / "metrics.jsonl"))


def check_run(
    job: Job, flags: str, program: str = "grpo.py", steps: int = 12, ranks: int = 1, shape: str = "", kill: bool = False
) -> None:
    """A run of the fly ends well, makes all its steps and has learned; with a `shape` it is of a model of random
    weights, which learns nothing. `kill`: by kill -9 once there is a checkpoint, and it is resumed."""
    if job.tiny:
        steps = min(steps, 4)
    words = [program, *flags_of(job, job.name, steps, flags)]
    if job.dry:
        status = run_program(job, job.name, [*words, "--dry_run"])
        job.note(f"{program}: its flags alone, for want of GPUs", ok=status == 0)
        return
    if shape:
        words += ["--model_name_or_path", job.model_on_disk(shape)]
    if job.name == "vllm_model":
        words += ["--model_name_or_path", job.model]
    if kill:
        words += ["--checkpoint_state_freq", "1"]
        newest = job.work / "runs" / job.name / "checkpoints" / "latest"
        status = run_program(job, f"{job.name}_killed", words, ranks, newest.exists)
        job.note("killed", ok=status < 0, status=status)
        words.remove("--overwrite")
        words.append("--resume")
    status = run_program(job, job.name, words, ranks)

    rows = steps_of(job, job.name)
    right = [row[f"eval/{CORRECT}"] for row in rows if f"eval/{CORRECT}" in row]
    done = [row["training_step"] for row in rows if row["training_step"] > 0]
    figures: dict[str, Any] = {"status": status, "steps": len(done), "held_out": right}
    for key in FIGURES:
        values = [row[key] for row in rows[2:] if row.get(key) is not None]
        if values:
            figures[key] = statistics.median(values)
    learned = len(right) > 1 and right[-1] > right[0]
    fine = status == 0 and done == list(range(1, steps + 1))
    job.note(program, ok=fine and (learned or shape != ""), **figures)


def check_replay(job: Job) -> None:
    """Updates that a CPU made, made again from its dumps: the first one, then all, each after those before it."""
    steps = 2 if job.tiny else 6
    name = "of_a_cpu"
    words = ["grpo.py", *flags_of(job, name, steps, f"{HF} --model_dtype float32 --dump_steps all")]
    status = run_program(job, name, words, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="4")
    job.note("the run on a CPU", ok=status == 0)
    for step, tolerance in ((1, 1e-3), (steps, 1e-2)):
        how = ["--step", step, "--from_start", "--tolerance", tolerance]
        status = run_program(job, f"replay_{step}", ["scripts/replay.py", job.work / "runs" / name, *how])
        said = (job.work / f"replay_{step}.log").read_text().splitlines()
        job.note(f"to step {step}", ok=status == 0, said=said[-2:])


def check_async_0(job: Job) -> None:
    """grpo_fast.py with --async_steps 0 makes the updates of grpo.py."""
    steps = 2 if job.tiny else 6
    norms = []
    for program, ranks, more in (("grpo.py", 1, ""), ("grpo_fast.py", 2, "--single_gpu_mode")):
        words = flags_of(job, program, steps, f"{HF} --deterministic --async_steps 0 {more}")
        run_program(job, program, [program, *words], ranks)
        norms.append([row["optim/grad_norm"] for row in steps_of(job, program)[1:]])
    same = norms[0] == norms[1] and len(norms[0]) == steps
    job.note("the same gradient norms", ok=same, gradient_norms=norms)


def check_bench(job: Job, bench_name: str, shape: str, limit: float, flags: str = "") -> None:
    """A benchmark of bench.py, whose sides compute the same."""
    words = ["scripts/proof/bench.py", bench_name, "--json", "--repeat", 1, "--model", job.model_on_disk(shape)]
    if not job.tiny:
        words += f"--dtype bfloat16 {flags}".split()
    run_program(job, job.name, words)
    said = (job.work / f"{job.name}.log").read_text()
    found = json.loads(re.findall('{"bench": .*}', said)[-1])  # behind a bar of progress or on a line of its own
    facts = found["facts"]
    job.note(shape, ok=max(facts["off"].values()) < limit, **facts)
    for case, figures in found["table"].items():
        job.note(f"{shape}: {case}", **figures)


# --- All of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    seconds: float  # after which it is ended
    work: Callable[[Job], None]
    alone: bool = True  # it is timed
    gpus: int = 0  # that it needs; with fewer it only says what it would do, in miniature


CHECKS: dict[str, Check] = {}  # in the order of their worth
HF = "--rollout_backend transformers"
EAGER = "--vllm_enforce_eager"
BESIDE = "--single_gpu_mode --async_steps 1 --inflight_updates"
HF_BESIDE = f"{HF} {BESIDE}"
MANY = 8 if GPUS >= 8 else 4 if GPUS >= 4 else 2  # GPUs of the runs that take more than one
APART = f"{EAGER} --num_learners_per_node {MANY // 2} --vllm_num_engines {MANY // 2} --async_steps 1"
RECOMPUTED = "--gradient_checkpointing"
LONG = "--prompts 16 --response_tokens 400 --pack_length 8192"
LONGER = "--pack_length 16384"
TP_2 = "--vllm_tensor_parallel_size 2 --async_steps 1 --inflight_updates"
SUMS = "--dataset_mixer_list WORK/sums/train.jsonl 1.0 --dataset_mixer_eval_list WORK/sums/eval.jsonl 1.0"


def add(name: str, seconds: float, work: Callable[..., None], alone: bool = True, gpus: int = 0, **given: Any) -> None:
    CHECKS[name] = Check(seconds, partial(work, **given), alone, gpus)


def add_checks() -> None:
    """For a quarter of an hour, then for more time and GPUs. Those named vllm_... are made where it is installed."""
    beside = partial(add, alone=False)
    fast = partial(check_run, program="grpo_fast.py")
    add("machine", 60, check_machine)
    beside("packs_128", 170, check_packs, head_dim=128, heads=7, kv_heads=1)
    beside("packs_64", 170, check_packs, head_dim=64, heads=14, kv_heads=2)
    beside("packs_256", 170, check_packs, head_dim=256, heads=4, kv_heads=2)
    beside("replay", 150, check_replay)
    beside("fly", 120, check_run, flags=HF)
    beside("fly_fast", 150, fast, flags=HF_BESIDE, ranks=2)
    beside("fly_resumed", 150, check_run, flags=HF, kill=True)
    beside("start_05", 150, check_run, flags=HF, steps=3, shape="0.5B")
    add("vllm_eager", 110, check_run, flags=EAGER)
    add("update_05", 90, check_update, shape="0.5B", flags=["", RECOMPUTED, LONGER])
    add("update_7", 110, check_update, shape="7B", flags=[RECOMPUTED, "", f"{LONGER} {RECOMPUTED}"])
    add("vllm_fast", 110, fast, flags=f"{EAGER} {BESIDE}", ranks=2)
    add("head", 60, check_bench, bench_name="head", shape="7B", limit=0.02)
    add("rows_15", 80, check_bench, bench_name="learner", shape="1.5B", limit=0.05, flags=LONG)
    add("sync_15", 90, fast, flags=HF_BESIDE, steps=3, ranks=2, shape="1.5B")
    add("compiled_7", 120, check_update, shape="7B", flags=[f"--compile_layers {RECOMPUTED}"])
    add("vllm_start_05", 120, check_run, flags=f"{EAGER} --vllm_gpu_memory_utilization 0.3", steps=3, shape="0.5B")
    add("update_15", 90, check_update, shape="1.5B", flags=["", RECOMPUTED])
    add("compiled_05", 120, check_update, shape="0.5B", flags=["--compile_layers"])
    add("vllm_graphs", 200, check_run, gpus=1, flags="")

    add("async_0", 200, check_async_0)
    add("vllm_torchrun", 200, check_run, gpus=2, flags=f"{EAGER} --deepspeed_stage 3", ranks=MANY)
    add("vllm_drained", 200, fast, gpus=2, flags=f"{APART} --deepspeed_stage 3", ranks=MANY)
    add("vllm_resumed", 300, fast, gpus=2, flags=APART, ranks=MANY, kill=True)
    add("vllm_tp_2", 200, fast, gpus=3, flags=f"{EAGER} {TP_2}", ranks=3)
    add("vllm_model", 900, check_run, flags=f"{SUMS} --learning_rate 1e-5", steps=20)


def lacking(name: str, options: argparse.Namespace) -> str:
    """Why a check is not made here, or ""."""
    gpus = CHECKS[name].gpus
    if name.startswith("vllm") and not importlib.util.find_spec("vllm"):
        return "vLLM is not installed"
    if name == "vllm_model" and not options.model:
        return "no --model DIR was given"
    if GPUS < gpus and not options.tiny:
        return f"it needs {gpus} GPUs, and here are {GPUS}"
    return ""


def job_of(name: str, options: argparse.Namespace) -> Job:
    dry = GPUS < CHECKS[name].gpus
    return Job(name, options.out, options.work, options.tiny, dry, options.model)


def groups_of(names: list[str], tiny: bool) -> list[list[str]]:
    """Checks that run at the same time: neighbours that are not timed. In miniature no time is meant."""
    most = max(2, len(utils.ALL_CORES) // 2)
    groups: list[list[str]] = []
    for name in names:
        before = groups[-1] if groups else []
        timed = not tiny and any(CHECKS[one].alone for one in [*before, name])
        if before and not timed and len(before) < most:
            before.append(name)
        else:
            groups.append([name])
    return groups


def start(name: str, options: argparse.Namespace) -> Any:
    """The process of a check, which imports at once and waits for a line."""
    line = [sys.executable, PROGRAM, "--one", name, "--out", str(options.out), "--model", options.model]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(len(utils.ALL_CORES) if CHECKS[name].alone else 2)
    if options.tiny:
        line.append("--tiny")
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (options.work / f"{name}.out").open("a") as log:
        return subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True, stdout=log, **pipes)


def end(name: str, process: Any, deadline: float, options: argparse.Namespace) -> None:
    """Wait for a check until its time is over, end all of its processes, and write the page."""
    status: Any = "cut off"
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(max(0.1, deadline - time.monotonic()))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if status != 0:
        job_of(name, options).note("the check itself", ok=False, status=status)
        keep_failure(options.out, options.work / f"{name}.out")
    write_page(options.out)


def write_page(out: Path) -> None:
    """DIR/README.md from what results there are."""
    words = {True: "pass", False: "**FAIL**", None: ""}
    order = list(CHECKS)
    rows = sorted(read_lines(out / "results.jsonl"), key=lambda row: order.index(row["check"]))
    lines = ["| check | case | | figures |", "|---|---|---|---|"]
    for row in rows:
        figures = [f"{key} {rounded(value)}" for key, value in row["figures"].items()]
        shown = ", ".join(figures).replace("|", "/")
        word = words[row["ok"]]
        lines.append(f"| {row['check']} | {row['case']} | {word} | {shown} |")
    (out / "README.md").write_text("\n".join(lines) + "\n")


def rounded(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(rounded, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def make_checks(options: argparse.Namespace) -> None:
    """Group by group, until all are made or the time is over."""
    deadline = time.monotonic() + options.seconds
    names = []
    for name in options.only or CHECKS:
        lack = lacking(name, options)
        if lack:
            job_of(name, options).note(f"not made: {lack}")
        else:
            names.append(name)
    groups = groups_of(names, options.tiny)
    following: dict[str, Any] = {}
    for i, group in enumerate(groups):
        running = following or {name: start(name, options) for name in group}
        began = time.monotonic()
        for process in running.values():
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(b"go\n")
                process.stdin.close()
        goes_on = i + 1 < len(groups) and deadline - began > 20
        following = {name: start(name, options) for name in groups[i + 1]} if goes_on else {}
        for name, process in running.items():
            end(name, process, min(deadline, began + CHECKS[name].seconds), options)
        if not goes_on:
            break
    write_page(options.out)


def main() -> None:
    if sys.argv[1:2] == ["--under"]:  # another program of ours, with the flags that follow
        make_do()
        sys.argv = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    add_checks()
    flags = parser(__doc__)
    flags.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_quarter", help="directory of the results")
    flags.add_argument("--seconds", type=float, default=540.0, help="after which everything ends")
    flags.add_argument("--only", nargs="+", choices=list(CHECKS), help="these checks, in this order")
    flags.add_argument("--model", default="", help="a chat model on this machine, whose score must rise")
    flags.add_argument("--tiny", action="store_true", help="tiny models: to try this program on a CPU")
    flags.add_argument("--one", choices=list(CHECKS), help=argparse.SUPPRESS)
    options = flags.parse_args()
    if not GPUS and not options.tiny:
        raise SystemExit("gpu_quarter.py: no GPU is visible to torch; --tiny tries this program on a CPU")
    options.out = options.out.resolve()
    options.work = options.out.with_name(f"{options.out.name}.work")
    if options.one:
        make_do()
        importlib.import_module("transformers")  # which takes long
        if os.read(0, 1):  # nothing comes of a parent that has died
            CHECKS[options.one].work(job_of(options.one, options))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    make_task("largest_digit", options.work / "tasks")
    make_addition(options.work / "sums", digits=2)
    make_checks(options)
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
