"""Benchmarks. Each measures its sides in one run, interleaved A B A B, and prints ratios of their median seconds.

    python scripts/proof/bench.py learner  forward and backward: packs, a bare loop, padding, one by one, a dense mask
    python scripts/proof/bench.py compiled  forward and backward by plain layers, and with --compile_layers
    python scripts/proof/bench.py rollout  our engine loop and LLM.generate on the same engine
    python scripts/proof/bench.py sync  learner's weights into the engine: us, a memory copy, vLLM's own reload
    python scripts/proof/bench.py pipeline  grpo.py and grpo_fast.py on the demo's task, and the ideal of their phases
    python scripts/proof/bench.py packing  pack_rollouts on 100k sequences, and next-fit in arrival order
    python scripts/proof/bench.py rewards  scores per second; a solver model asked all at once and one by one
    python scripts/proof/bench.py precision  steps to learn the demo's task, by what weights are rounded to; an hour
    python scripts/proof/bench.py startup  seconds to --help, --dry_run and first steps, and of the imports they need
    python scripts/proof/bench.py loop  an engine's Python per token outside vLLM's scheduler and model, no weights
    python scripts/proof/bench.py tokens  the path of a token at learner 0: CPU time and longest pause, stub devices
    python proof/bench.py tools  an engine's tokens per second with 64 fast tools, and with a slow one among them
    python scripts/proof/bench.py trl   whole steps of TRL's GRPOTrainer (scripts/peers) and of grpo_fast.py; minutes

    --model DIR    scripts/data/make_tiny_model.py makes one in a second    --json    one line of JSON, no tables
    --repeat N     rounds of A B A B                                        --help    everything else

A ratio above 1 is good for us. It comes with the smallest and largest value of a round and, where there is one, the
target it should reach. On a CPU, `source scripts/setup.sh` first.

Lengths. Unless --lengths FILE.jsonl names rows of {prompt_tokens, response_tokens}, they are drawn from log-normals
fitted to the logs of the 7473 training rows of GSM8K in SmolLM2's tokens: the question has mean 4.04 and standard
deviation 0.345 (median 56), to which SmolLM2's chat template adds 30 tokens; the answer without its <<calculator>>
marks, with the end token, has 4.45 and 0.434 (median 85). Their quantiles are taken in random order, so that a small
batch has the spread of a large one. Answers are people's: a policy's own are often longer and spread wider, and padding
then costs more than here.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import multiprocessing
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Client
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(ROOT)
THREAD_SETTINGS = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "KMP_BLOCKTIME", "LD_PRELOAD")}

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import grpo  # noqa: E402
import grpo_fast  # noqa: E402
import rewards  # noqa: E402
from scripts.parts import serve  # noqa: E402

QUESTION, TEMPLATE_TOKENS, ANSWER = (4.04, 0.345), 30, (4.45, 0.434)  # see Lengths above
SHOWN = """time/training time/generation time/weight_sync time/trainer_waiting_for_data
    val/engine_pause_seconds val/engine_idle_share val/learner_idle_share""".split()


def stopwatch(work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def side_by_side(sides: dict[str, Callable[[], Any]], repeat: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each side in each of `repeat` rounds, after one that does not count."""
    for work in sides.values() if warm_up else ():
        work()
    rounds = [{name: stopwatch(work) for name, work in sides.items()} for _ in range(repeat)]
    return {name: [r[name] for r in rounds] for name in sides}


def ratio(ours: Sequence[float], other: Sequence[float], target: float | None = None) -> dict[str, Any]:
    """How many times faster (or smaller) `ours` is: ratio of the medians, and the range of the rounds' own ratios."""
    value = statistics.median(other) / statistics.median(ours)
    rounds = [b / a for a, b in zip(ours, other, strict=True)]
    met = None if target is None else value >= target
    return {"value": value, "min": min(rounds), "max": max(rounds), "target": target, "met": met}


def spread(seconds: Sequence[float], **amounts: float) -> dict[str, float]:
    """Median and range, and each amount per median second."""
    median = statistics.median(seconds)
    rates = {f"{name}_per_second": amount / median for name, amount in amounts.items()}
    return {"seconds": median, "min": min(seconds), "max": max(seconds)} | rates


def matrix_product(dtype: torch.dtype, device: Any) -> tuple[Callable[[], Any], float]:
    """A square matrix product and its floating-point operations."""
    slow = dtype == torch.bfloat16 and utils.choose_dtype(grpo.Args())[0] == "float32"
    n = 8192 if torch.cuda.is_available() else 256 if slow else 2048  # emulated, a large one takes minutes
    a, b, out = torch.randn(3, n, n, device=device).to(dtype)
    return lambda: torch.mm(a, b, out=out), 2.0 * n**3


def machine(dtype: torch.dtype) -> dict[str, Any]:
    """What the numbers were measured on. A load well above 0 at the start: others are at work, trust no ratio."""
    cuda = torch.cuda.is_available()
    facts = {"cores": len(utils.ALL_CORES), "load": os.getloadavg()[0], "torch": torch.__version__}
    product, operations = matrix_product(dtype, "cuda" if cuda else "cpu")
    peak = operations / min(stopwatch(product) for _ in range(6)) / 1e9
    facts |= {"threads": torch.get_num_threads(), "peak_gflops": peak, **THREAD_SETTINGS}
    return {"device": torch.cuda.get_device_name() if cuda else "cpu"} | facts


def draw_lengths(prompts: int, options: argparse.Namespace) -> list[tuple[int, list[int]]]:
    """(prompt tokens, tokens of each of its --samples responses), from --lengths (again and again) or the fit."""
    samples, longest = options.samples, options.pack_length // 2  # so that any response fits a pack with its prompt
    if options.lengths:
        rows = [json.loads(line) for line in Path(options.lengths).read_text().splitlines()]
        chosen = [[rows[(i * samples + j) % len(rows)] for j in range(samples)] for i in range(prompts)]
        drawn = [(g[0]["prompt_tokens"], [row["response_tokens"] for row in g]) for g in chosen]
    else:
        rng = np.random.default_rng(options.seed)
        asked, answered = (
            rng.permutation([statistics.NormalDist(*fit).inv_cdf((i + 0.5) / n) for i in range(n)])
            for fit, n in ((QUESTION, prompts), (ANSWER, prompts * samples))
        )
        asked, answered = TEMPLATE_TOKENS + np.exp(asked).astype(int), np.exp(answered).reshape(prompts, -1).astype(int)
        drawn = list(zip(asked.tolist(), answered.tolist(), strict=True))
    return [(min(max(n, 2), longest), [min(max(m, 1), longest) for m in own]) for n, own in drawn]


def make_rollouts(lengths: Sequence[tuple[int, list[int]]], vocab: int, seed: int) -> list[grpo.Rollout]:
    """Rollouts of random tokens. Engine logprobs of -30 make rho, which is cut at 1, exactly 1: the gradient is that of
    a bare policy gradient."""
    rng, rollouts = np.random.default_rng(seed), []
    for i, (n, own) in enumerate(lengths):
        prompt = utils.Prompt(i, tuple(rng.integers(0, vocab, n).tolist()), "", ("1",), ("gsm8k",))
        for j, m in enumerate(own):
            ids, advantage = rng.integers(0, vocab, m).tolist(), 1.0 if j % 2 else -0.5
            rollout = grpo.Rollout(prompt, i, j, ids, [-30.0] * m, [True] * m, [0] * m, "stop", advantage=advantage)
            rollouts.append(rollout)
    return rollouts


def demo_flags(options: argparse.Namespace) -> list[str]:
    """The flags of scripts/demo.sh with --model, --dtype and all that was given for grpo.py; makes the demo's data."""
    from scripts.data.make_addition import make_addition

    if not (ROOT / "data" / "addition" / "train.jsonl").exists():
        make_addition(ROOT / "data" / "addition")
    script = (ROOT / "scripts" / "demo.sh").read_text().replace("\\\n", " ")
    command = re.search(r"^python grpo(_fast)?\.py(.*)$", script, re.MULTILINE)[2]
    flags = [str(ROOT / flag) if flag.startswith("data/") else flag for flag in shlex.split(command) if flag != "$@"]
    return [*flags, "--model_name_or_path", options.model, "--model_dtype", options.dtype, *options.more]


def start_engine(options: argparse.Namespace) -> tuple[grpo.Args, utils.World, Any, Any]:
    """(flags, world, tokenizer, vLLM engine) of the demo."""
    args = utils.parse_args(grpo.Args, demo_flags(options))
    world, tokenizer = utils.init_distributed(), utils.load_tokenizer(args)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    return args, world, tokenizer, utils.VLLMEngine(args, tokenizer, world, rollouts)


Prepared = list[tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]]  # see bare_pass


def bare_pass(model: Any, attention: str, batches: Prepared, optimizer: Any) -> float:
    """Policy gradient with a Hugging Face model and nothing of ours but, on packs, their attention. A batch is the
    model's inputs, where to compute logits, and for these n positions the targets and the weights of their logprobs in
    the loss. Returns the gradient's norm."""
    model.set_attn_implementation(attention)
    for inputs, where, targets, weights in batches:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[where]  # (n, H)
        nll = cross_entropy(model.get_output_embeddings()(hidden).float(), targets, reduction="none")
        (nll * weights).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    return float(norm)


def prepare_packs(batches: Sequence[grpo.Batch], dense: bool) -> Prepared:
    """Packs for the bare loop: with our layout, or with the (T, T) mask of who attends to whom."""
    tokens, prepared = sum(int(b.response_mask.sum()) for b in batches), []
    for batch in batches:
        where, inputs = batch.response_mask, {"input_ids": batch.input_ids}
        if batch.layout is not None:
            mask = {"attention_mask": dense_mask(batch.layout)} if dense else {"layout": batch.layout}
            inputs |= {"position_ids": batch.position_ids} | mask
        prepared.append((inputs, where, batch.targets[where], batch.advantages[where] / tokens))
    return prepared


def dense_mask(layout: utils.Layout) -> torch.Tensor:
    """(1, 1, T, T) bool: who attends to whom in a pack, written out."""
    own = [[0] * shared + [j for j, n in enumerate(own, 1) for _ in range(n)] for shared, own in layout.pieces]
    pieces = torch.tensor([i for i, segments in enumerate(own) for _ in segments], device=layout.device)
    segments = torch.tensor([j for segments in own for j in segments], device=layout.device)
    same = (pieces == pieces[:, None]) & ((segments == 0) | (segments == segments[:, None]))
    return same.tril()[None, None]


def prepare_padded(rollouts: Sequence[grpo.Rollout], rows: int, device: Any) -> Prepared:
    """`rows` responses each with its own prompt, as TRL has them: prompts padded on the left and responses on the right
    to the longest of the rows, logits for the padded responses."""
    tokens, prepared = sum(len(r.token_ids) for r in rollouts), []
    for chosen in (rollouts[i : i + rows] for i in range(0, len(rollouts), rows)):
        start, longest = max(len(r.prompt.token_ids) for r in chosen), max(len(r.token_ids) for r in chosen)
        ids, attend = torch.zeros(2, len(chosen), start + longest, dtype=torch.long)
        weights, where = torch.zeros(len(chosen), longest), torch.zeros(ids.shape, dtype=torch.bool)
        where[:, start - 1 : -1] = True
        for row, r in enumerate(chosen):
            part = slice(start - len(r.prompt.token_ids), start + len(r.token_ids))
            ids[row, part], attend[row, part] = torch.tensor([*r.prompt.token_ids, *r.token_ids.tolist()]), 1
            weights[row, : len(r.token_ids)] = r.advantage / tokens
        ids, targets = ids.to(device), ids[:, start:].flatten().to(device)
        inputs = {"input_ids": ids, "attention_mask": attend.to(device)}
        prepared.append((inputs, where.to(device), targets, weights.flatten().to(device)))
    return prepared


def learner_flags(options: argparse.Namespace) -> grpo.Args:
    """Of a bare policy gradient, and all that was given for grpo.py."""
    flags = f"--model_dtype {options.dtype} --pack_length {options.pack_length} --per_device_train_batch_size 1"
    flags += " --beta 0 --no_load_ref_policy --max_logprob_gap 0 --rho_clamp_upper_bound 1 --temperature 1"
    return utils.parse_args(grpo.Args, ["--model_name_or_path", options.model, *flags.split(), *options.more])


def bench_learner(options: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of training, in real tokens per second: those of each response and its prompt, whatever is
    computed. peak_share is of the floating-point operations the shared packs need at the speed of a matrix product.

    packs_shared   grpo.pack_rollouts and grpo.update, as in training: a prompt once for its responses in a pack
    bare_packs     a bare loop over the same packs, made before. The bare loops have weights and gradients in --dtype
                   alone and backward through logits they kept; ours have float32 beside them and make logits twice
    packs_plain    as packs_shared, each response with its own prompt; one_by_one: each response a forward of its own
    padded         a bare loop over padded rows, made before
    bare_dense     bare_packs with a (T, T) mask, made before: what pack_attention avoids
    """
    args, world, dtype = learner_flags(options), utils.init_distributed(), utils.DTYPES[options.dtype]
    policy = grpo.load_policy(args, world)
    model = utils.load_causal_lm(args).to(world.device, dtype)
    no_step = SimpleNamespace(step=lambda: None, zero_grad=policy.zero_grad, get_last_lr=lambda: [0.0])
    optimizer: Any = grpo.make_optimizer(policy, args) if options.optimizer else (no_step, no_step)
    learner = grpo.Learner(policy, None, *optimizer)
    bare_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True) if options.optimizer else no_step
    lengths = draw_lengths(options.prompts, options)
    rollouts = make_rollouts(lengths, model.config.vocab_size, options.seed)
    norms: dict[str, float] = {}

    def packs_of(packing: str) -> list[grpo.Pack]:
        return grpo.pack_rollouts(rollouts, packing, args.pack_length, 1, policy.pair_cost)[0]

    def ours(name: str, packing: str) -> None:
        batches, metrics = grpo.micro_batches(packs_of(packing), packing, args, world.device), utils.Metrics()
        grpo.update(learner, [batches], args, world, metrics)
        norms[name] = metrics.reduce(world)["optim/grad_norm"]

    def bare(name: str, attention: str, batches: Prepared) -> None:
        norms[name] = bare_pass(model, attention, batches, bare_optimizer)

    shared = grpo.micro_batches(packs_of("shared"), "shared", args, world.device)
    packs, dense = prepare_packs(shared, dense=False), prepare_packs(shared, dense=True)
    padded = prepare_padded(rollouts, options.rows, world.device)
    product, product_flops = matrix_product(dtype, world.device)
    sides = {
        "packs_shared": lambda: ours("packs_shared", "shared"),
        "bare_packs": lambda: bare("bare_packs", utils.PACK_ATTENTION, packs),
        "packs_plain": lambda: ours("packs_plain", "plain"),
        "one_by_one": lambda: ours("one_by_one", "rows"),
        "padded": lambda: bare("padded", "sdpa", padded),
        "bare_dense": lambda: bare("bare_dense", "sdpa", dense),
        "matrix_product": product,
    }
    seconds = side_by_side(sides, options.repeat)
    real, responses = sum(n * len(own) + sum(own) for n, own in lengths), sum(sum(own) for _, own in lengths)
    pieces = [piece for pack in packs_of("shared") for piece in pack]
    tokens, pairs = sum(map(grpo.piece_length, pieces)), sum(map(grpo.attended_pairs, pieces))
    peak_seconds = 3 * policy.flops(tokens, pairs, responses) / product_flops * min(seconds["matrix_product"])
    table = {name: spread(seconds[name], tokens=real) | {"grad_norm": norm} for name, norm in norms.items()}
    table["matrix_product"] = spread(seconds["matrix_product"])
    for name in ("packs_shared", "bare_packs", "bare_dense"):
        table[name]["peak_share"] = peak_seconds / table[name]["seconds"]
    numbers = {"real_tokens": real, "response_tokens": responses, "packs": len(shared), "tokens_in_packs": tokens}
    return {
        "settings": numbers | {"tokens_in_padded_rows": sum(b[0]["input_ids"].numel() for b in padded)},
        "sides": table,
        "ratios": {
            name: ratio(seconds[ours], seconds[other], target)
            for name, ours, other, target in (
                ("packs over a bare loop over the same packs", "packs_shared", "bare_packs", 0.9),
                ("packs over padded rows", "packs_shared", "padded", 2.0),
                ("packs over one by one", "packs_shared", "one_by_one", 1.0),
                ("packs over one by one, no shared prompts", "packs_plain", "one_by_one", 1.0),
                ("packs over packs without shared prompts", "packs_shared", "packs_plain", None),
                ("attention by pieces over a dense mask, bare", "bare_packs", "bare_dense", None),
            )
        },
    }


def bench_compiled(options: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of training on the same shared packs, by plain layers and with --compile_layers. On a CPU
    seconds are the process's: other jobs make the clock's longer. The first call of each, which compiles, is apart."""
    args, world = learner_flags(options), utils.init_distributed()
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    first, seconds, norms, packs = {}, {}, {}, []

    def run(name: str, learner: grpo.Learner, batches: list[grpo.Batch]) -> float:
        start, metrics = clock(), utils.Metrics()
        grpo.update(learner, [batches], args, world, metrics)
        norms[name] = metrics.reduce(world)["optim/grad_norm"]  # waits for a GPU
        return clock() - start

    work: dict[str, tuple[grpo.Learner, list[grpo.Batch]]] = {}
    for name, compiled in (("plain", False), ("compiled", True)):
        policy = grpo.load_policy(dataclasses.replace(args, compile_layers=compiled), world)
        no_step: Any = SimpleNamespace(step=lambda: None, zero_grad=policy.zero_grad, get_last_lr=lambda: [0.0])
        if not packs:
            rollouts = make_rollouts(
                draw_lengths(options.prompts, options), policy.model.config.vocab_size, options.seed
            )
            packs = grpo.pack_rollouts(rollouts, "shared", args.pack_length, 1, policy.pair_cost)[0]
        work[name] = (
            grpo.Learner(policy, None, no_step, no_step),
            grpo.micro_batches(packs, "shared", args, world.device),
        )
        first[name] = run(name, *work[name])
    for _ in range(options.repeat):
        for name, both in work.items():
            seconds.setdefault(name, []).append(run(name, *both))
    tokens = sum(map(grpo.piece_length, [piece for pack in packs for piece in pack]))
    sides, graphs = {name: spread(seconds[name], tokens=tokens) for name in work}, torch._dynamo.utils.counters["stats"]
    return {
        "settings": {"packs": len(packs), "tokens": tokens, "graphs": graphs["unique_graphs"]},
        "sides": {n: side | {"first": first[n], "grad_norm": norms[n]} for n, side in sides.items()},
        "ratios": {"compiled over plain layers": ratio(seconds["compiled"], seconds["plain"])},
    }


def bench_rollout(options: argparse.Namespace) -> dict[str, Any]:
    """A step's generation with the demo's flags: engine.generate and plain LLM.generate, same engine, same requests."""
    from vllm import SamplingParams

    args, world, tokenizer, engine = start_engine(options)
    prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    pairs = [(i, utils.prompt_at(prompts, i, args.seed)) for i in range(args.num_unique_prompts_rollout)]
    samples = range(args.num_samples_per_prompt_rollout)
    requests = [grpo.make_request(utils.Rollout(prompt, i, j), args) for i, prompt in pairs for j in samples]
    made: dict[str, list[list[int]]] = {}

    def ours() -> None:
        engine.llm.reset_prefix_cache()
        made["engine.generate"] = [g.token_ids.tolist() for g in engine.generate(requests)]

    def plain() -> None:
        engine.llm.reset_prefix_cache()
        same = {"logprobs": 0, "stop_token_ids": engine.eos_ids, "detokenize": False}
        own = [{k: v for k, v in vars(r).items() if k not in ("prompt_ids", "stop")} for r in requests]  # seed, ...
        texts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
        outputs = engine.llm.generate(texts, [SamplingParams(**one, **same) for one in own], use_tqdm=False)
        made["LLM.generate"] = [list(o.outputs[0].token_ids) for o in outputs]

    seconds = side_by_side({"engine.generate": ours, "LLM.generate": plain}, options.repeat)
    tokens = {name: sum(map(len, responses)) for name, responses in made.items()}
    same = statistics.mean(a == b for a, b in zip(*made.values(), strict=True))
    return {
        "settings": {"requests": len(requests), "share_of_same_responses": same},
        "sides": {name: spread(seconds[name], tokens=tokens[name]) for name in made},
        "ratios": {
            "our engine loop over LLM.generate": ratio(seconds["engine.generate"], seconds["LLM.generate"], 0.95)
        },
    }


def bench_sync(options: argparse.Namespace) -> dict[str, Any]:
    """The learner's weights into the engine of the same process, against three memory copies and vLLM's own reload."""
    args, world, _, engine = start_engine(options)
    policy, dtype = grpo.load_policy(args, world), utils.DTYPES[args.model_dtype]
    weights = [(name, tensor.clone()) for name, tensor in utils.full_weights(policy, dtype)]
    buffers = [torch.empty_like(tensor) for _, tensor in weights]
    sides = {
        "engine.load_weights": lambda: engine.load_weights(utils.full_weights(policy, dtype), version=1),
        "memory copy": lambda: [b.copy_(tensor) for (_, tensor), b in zip(weights, buffers, strict=True)],
        "vLLM's reload": lambda: engine.worker.reload_weights(weights_iterator=iter(weights)),
        "full_weights alone": lambda: sum(1 for _ in utils.full_weights(policy, dtype)),
    }
    seconds = side_by_side(sides, options.repeat)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
    bound = [3 * a + b for a, b in zip(seconds["memory copy"], seconds["vLLM's reload"], strict=True)]
    return {
        "settings": {"bytes": size, "tensors": len(weights)},
        "sides": {name: spread(values, gb=size / 1e9) for name, values in seconds.items()},
        "ratios": {"sync against 3 copies + vLLM's reload": ratio(seconds["engine.load_weights"], bound, 1.0)},
    }


def run_script(script: str, flags: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Mean metrics of the steps after the first --warmup_steps of a whole run on the demo's task."""
    args, steps = utils.parse_args(grpo.Args, demo_flags(options)), options.steps + options.warmup_steps
    episodes = steps * args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    with tempfile.TemporaryDirectory() as directory:
        line = [sys.executable, script, *demo_flags(options), "--output_dir", directory, "--exp_name", "bench"]
        line += ["--total_episodes", str(episodes), "--local_eval_every", "-1", "--no_eval_on_step_0", *flags]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"bench.py: {shlex.join(line)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
        lines = (Path(directory) / "bench" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["training_step"] > options.warmup_steps]
    names = {name for row in rows for name, value in row.items() if value is not None}
    return {name: statistics.mean(row.get(name) or 0.0 for row in rows) for name in names}


def bench_pipeline(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of whole runs, against max(generation, training): a step whose halves overlap entirely.

    Where learner and engines share the cores of one CPU, either half is slower when both run, and there is little to
    win.
    """
    scripts = {
        "grpo.py": ("grpo.py", []),
        "async_steps 0": ("grpo_fast.py", ["--async_steps", "0"]),
        "async_steps 1": ("grpo_fast.py", ["--async_steps", "1"]),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in scripts}
    for _ in range(options.repeat):
        for name, (script, flags) in scripts.items():
            runs[name].append(run_script(script, flags, options))
    seconds, ideal, table = {}, {}, {}
    for name, own in runs.items():
        seconds[name] = [r["time/total"] for r in own]
        generate = [r["time/generation"] for r in own]
        ideal[name] = [max(g, r["time/training"]) for g, r in zip(generate, own, strict=True)]
        metrics = [metric for metric in SHOWN if all(metric in r for r in own)]
        found = {metric: statistics.median(r[metric] for r in own) for metric in metrics}
        table[name] = spread(seconds[name]) | {"ideal": statistics.median(ideal[name])} | found
    return {
        "settings": {"steps": options.steps, "warmup_steps": options.warmup_steps},
        "sides": table,
        "ratios": {
            "async_steps 1 over grpo.py": ratio(seconds["async_steps 1"], seconds["grpo.py"]),
            "async_steps 1 over async_steps 0": ratio(seconds["async_steps 1"], seconds["async_steps 0"]),
            "async_steps 1 against its ideal": ratio(seconds["async_steps 1"], ideal["async_steps 1"]),
            "async_steps 1 against the ideal of grpo.py": ratio(seconds["async_steps 1"], ideal["grpo.py"]),
        },
    }


# task: response length, and how many times faster than each of TRL's settings a step should be
TASKS = {"addition2": (64, {"stock": 5.0, "vllm": 2.5, "fastest": 2.0}), "addition": (24, {"vllm": 1.8})}
TRL = {
    "stock": "--mode stock",  # float32 master weights, as its users can run it
    "vllm": "--mode vllm",  # the same with vLLM, patched by us
    "fastest": "--mode vllm --dtype bfloat16 --torch_compile",  # bare bfloat16 weights, compiled learner
}


def run_trl(setting: str, task: str, options: argparse.Namespace) -> dict[str, Any]:
    """TRL's side in its own environment, with its own preloads; seconds without the first step."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trl.json"
        line = f"source scripts/peers/setup_trl.sh && exec python scripts/peers/trl_side.py {TRL[setting]}"
        line += f" --data data/{task}/train.jsonl --max_new_tokens {TASKS[task][0]} --steps {options.trl_steps + 1}"
        line += f" --model {shlex.quote(options.model)} --json {path}"
        env = {name: value for name, value in os.environ.items() if name not in THREAD_SETTINGS}
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"bench.py: {line}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
        return json.loads(path.read_text())


def bench_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step: grpo_fast.py and TRL, 8 prompts x 8 samples, the same model, data and settings, one sitting.

    Both without a reference policy. Two-operand addition leaves most groups without a gradient, which we skip and TRL
    trains on; of single digits nearly all groups have one. The steps of TRL are alike (median); ours differ with the
    number of groups trained (mean).
    """
    from scripts.data.make_addition import make_addition

    table: dict[str, dict[str, float]] = {}
    ratios: dict[str, Any] = {}
    for task in options.tasks:
        length, targets = TASKS[task]
        make_addition(ROOT / "data" / task, digits=2 if task == "addition2" else 1)
        flags = ["--async_steps", "0", "--no_load_ref_policy", "--response_length", str(length)]
        flags += ["--dataset_mixer_list", str(ROOT / "data" / task / "train.jsonl"), "1.0"]
        ours = run_script("grpo_fast.py", flags, options)
        table[f"{task}: us"] = {
            "seconds": ours["time/total"],
            "generation": ours["time/generation"],
            "training": ours["time/training"],
            "rollouts trained on": ours["other/real_batch_size_ratio"],
            "response tokens": ours["val/sequence_lengths"] * 64,
        }
        for setting, target in targets.items():
            found = run_trl(setting, task, options)
            median, steps = found["median"], found["steps"][1:]
            table[f"{task}: TRL {setting}"] = {
                "seconds": median["total_s"],
                "generation": median["generation_s"],
                "training": median["learner_s"],
                "rollouts trained on": 1.0,
                "response tokens": statistics.mean(step["completion_tokens"] for step in steps),
            }
            every = [step["total_s"] for step in steps]
            ratios[f"{task}: us over TRL {setting}"] = ratio([ours["time/total"]] * len(every), every, target)
    return {"settings": {"TRL": "; ".join(f"{k}: {v}" for k, v in TRL.items())}, "sides": table, "ratios": ratios}


# What the policy computes with (the learner's forward and backward, and the engine):
#   products   dtype of the matrix products: --model_dtype
#   rounded    round the master weights to it, products in float32: only the rounding of weights differs
#   dithered   start the master weights as --dither_master_weights does
#   head       float32 products of learner's and engine's head (arXiv:2506.13585, 2510.13786)
ARMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "weights in bfloat16": {"rounded": "bfloat16"},
    "weights in bfloat16, dithered": {"rounded": "bfloat16", "dithered": True},
    "weights in float16": {"rounded": "float16"},
    "weight decay: float32": {"more": {"weight_decay": 0.1}},
    "weight decay: weights in bfloat16, dithered": {
        "rounded": "bfloat16",
        "dithered": True,
        "more": {"weight_decay": 0.1},
    },
    "bfloat16 products": {"products": "bfloat16"},
    "bfloat16 products, dithered": {"products": "bfloat16", "dithered": True},
    "bfloat16 products, dithered, float32 head": {"products": "bfloat16", "dithered": True, "head": True},
    "1e-6: float32": {"slow": True},
    "1e-6: weights in bfloat16": {"rounded": "bfloat16", "slow": True},
    "1e-6: weights in bfloat16, dithered": {"rounded": "bfloat16", "dithered": True, "slow": True},
}
LEARNED, SLOW_STEPS, SHARES_AT = 0.9, 50, (1, 5, 20, 50)


def learned_at(correct: Sequence[float]) -> int | None:
    """The first step whose share of correct answers, mean of it and the two before, reaches LEARNED."""
    means = [statistics.mean(correct[i - 2 : i + 1]) for i in range(2, len(correct))]
    return next((i for i, mean in enumerate(means, start=3) if mean >= LEARNED), None)


def precision_run(name: str, seed: int, start: Sequence[torch.Tensor], session: Any, most_steps: int) -> dict[str, Any]:
    """A training run of an arm: per step the share of correct answers, seconds, the logprob gap and, at SHARES_AT, the
    share of the weights that the policy computes with which are not those of the start."""
    args, world, engine, policy, prompts = session
    arm = ARMS[name]
    rate = 1e-6 if arm.get("slow") else 1e-5
    args = dataclasses.replace(args, seed=seed, learning_rate=rate, **arm.get("more", {}))
    named = [(name, utils.shard_of(p).detach()) for name, p in policy.model.named_parameters()]
    served = utils.DTYPES.get(arm.get("rounded", arm.get("products", "float32")), torch.float16)
    with torch.no_grad():
        for (parameter, weight), value in zip(named, start, strict=True):
            weight.copy_(value)
            if arm.get("dithered"):
                utils.dither(weight, utils.derive_seed(seed, parameter))
    optimizer, scheduler = grpo.make_optimizer(policy, args)
    learner = grpo.Learner(policy, None, optimizer, scheduler)
    masters = [weight.clone() for _, weight in named] if "rounded" in arm else []

    @torch.no_grad()
    def to_masters(*_: Any) -> None:
        for (_, weight), master in zip(named, masters, strict=False):
            weight.copy_(master)

    @torch.no_grad()
    def to_rounded(*_: Any) -> None:
        for (_, weight), master in zip(named, masters, strict=False):
            master.copy_(weight)
            weight.copy_(master.to(served))

    to_rounded()
    optimizer.register_step_pre_hook(to_masters)
    optimizer.register_step_post_hook(to_rounded)
    state, before = grpo.start_state(), [weight.to(served, copy=True) for _, weight in named]
    row: dict[str, Any] = {"arm": name, "seed": seed, "correct": [], "seconds": [], "gap": [], "changed": {}}
    with float32_head(engine, policy) if arm.get("head") else contextlib.nullcontext():
        for step in range(1, (SLOW_STEPS if arm.get("slow") else most_steps) + 1):
            begin, metrics = time.perf_counter(), utils.Metrics()
            engine.load_weights(utils.full_weights(policy, utils.DTYPES[args.model_dtype]), version=step)
            groups, sampled = grpo.sample_groups(engine, prompts, state, args, world, utils.Timer())
            packs = grpo.pack_rollouts(grpo.trainable(groups, args), "shared", args.pack_length, 1, policy.pair_cost)[0]
            batches = grpo.micro_batches(packs, "shared", args, world.device)
            gap, _ = grpo.update(learner, [batches], args, world, metrics)
            row["correct"].append(statistics.mean(r.verifiable > 0 for group in sampled for r in group))
            row["seconds"].append(time.perf_counter() - begin)
            row["gap"].append(gap.get("debug/vllm_vs_local_logprob_diff_mean"))
            utils.shard_again(policy)
            if step in SHARES_AT:
                changed = sum(int((weight.to(served) != b).sum()) for (_, weight), b in zip(named, before, strict=True))
                row["changed"][str(step)] = changed / sum(b.numel() for b in before)
            enough = seed > 1 or step >= 20  # the first seed tells the shares
            if learned_at(row["correct"]) and enough and not arm.get("slow"):
                break
    return row


@contextlib.contextmanager
def float32_head(engine: Any, policy: grpo.Policy) -> Generator[None]:
    """Products of the head in float32 in learner and engine, from the same weights and hidden states."""
    model, logits = engine.worker.model_runner.model, grpo.HeadLogprobs.logits
    compute = model.compute_logits

    def exact(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
        return (hidden.float() @ weight.float().T).div_(temperature)

    def engines(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden.float() @ utils.shard_of(policy.model.get_input_embeddings().weight).to(hidden.dtype).float().T

    grpo.HeadLogprobs.logits, model.compute_logits = staticmethod(exact), engines
    try:
        yield
    finally:
        grpo.HeadLogprobs.logits, model.compute_logits = staticmethod(logits), compute


def bench_precision(options: argparse.Namespace) -> dict[str, Any]:
    """The demo's task from one start model: steps and seconds until 0.9 of the sampled answers are right (mean of three
    steps), by arm (see ARMS) and seed. A finished run is a row of --results and is not done again: stop and go on at
    will. Arms of another dtype of products than --dtype are left to another call; table and figure have all rows.
    """
    results = Path(options.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    wanted = [
        (name, seed)
        for seed in options.seeds
        for name, arm in ARMS.items()
        if arm.get("products", "float32") == options.dtype
        and (options.arms is None or name in options.arms)
        and not any((row["arm"], row["seed"]) == (name, seed) for row in rows)
        and not (arm.get("slow") and seed > 1)
    ]
    if wanted:
        args, world, tokenizer, engine = start_engine(options)
        policy = grpo.load_policy(dataclasses.replace(args, dither_master_weights=False), world)
        start = [utils.shard_of(p).detach().clone() for _, p in policy.model.named_parameters()]
        prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    for name, seed in wanted:
        row = precision_run(name, seed, start, (args, world, engine, policy, prompts), options.most_steps)
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}, seed {seed}: {' '.join(f'{c:.2f}' for c in row['correct'])}", file=sys.stderr)
    table: dict[str, dict[str, float]] = {}
    ends = {name: [learned_at(row["correct"]) for row in rows if row["arm"] == name] for name in ARMS}
    for name in (name for name in ARMS if ends[name]):
        runs, steps = [row for row in rows if row["arm"] == name], [end for end in ends[name] if end]
        values = {"runs": len(runs), "not learned": len(runs) - len(steps)}
        if steps:
            seconds = [sum(r["seconds"][:end]) for r, end in zip(runs, ends[name], strict=True) if end]
            values |= {"steps": statistics.mean(steps), "least": min(steps), "most": max(steps)}
            values |= {"seconds": statistics.mean(seconds)}
        values |= {"at the end": statistics.mean(c for row in runs for c in row["correct"][-3:])}
        values |= {"gap": statistics.mean(g for row in runs for g in row["gap"] if g)}
        for at in SHARES_AT:
            found = [row["changed"][str(at)] for row in runs if str(at) in row["changed"]]
            values |= {f"changed {at}": statistics.mean(found)} if found else {}
        for what, value in values.items():
            table.setdefault(what, {})[name] = value
    ratios = {}
    for name in (name for name in ARMS if name != "float32" and not ARMS[name].get("slow")):
        if ends[name] and None not in ends[name] + ends["float32"] and len(ends[name]) == len(ends["float32"]):
            ratios[f"steps of float32 over those of: {name}"] = ratio(ends[name], ends["float32"], 1 / 1.2)
    return {"settings": {"figure": str(draw_precision(rows, results))}, "sides": table, "ratios": ratios}


def draw_precision(rows: Sequence[dict[str, Any]], results: Path) -> Path:
    """Share of correct answers by step, the mean of the seeds and their range, of the arms that tell the story."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4), constrained_layout=True, sharey=True)
    shown = [
        ("weights alone are rounded, products in float32", [n for n in ARMS if not ARMS[n].get("products")]),
        ("bfloat16 products", ["float32", *(n for n in ARMS if ARMS[n].get("products"))]),
    ]
    for axis, (title, names) in zip(axes, shown, strict=True):
        for name in (n for n in names if not ARMS[n].get("slow") and not n.startswith("weight decay")):
            if not (curves := [row["correct"] for row in rows if row["arm"] == name]):
                continue
            steps = range(max(map(len, curves), default=0))
            points = [[curve[i] for curve in curves if i < len(curve)] for i in steps]
            (line,) = axis.plot([i + 1 for i in steps], [statistics.mean(p) for p in points], label=name)
            band = ([i + 1 for i in steps], [min(p) for p in points], [max(p) for p in points])
            axis.fill_between(*band, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.axhline(LEARNED, color="black", linewidth=0.5)
        axis.set(title=title, xlabel="step", ylabel="share of correct answers")
        axis.legend(fontsize=8, loc="lower right")
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


LLAMA = "import torch, tyro; from transformers.models.llama.modeling_llama import LlamaForCausalLM"


def cached() -> dict[str, str]:
    """The environment of a start whose bytecode is kept from the one before, as it is unless somebody forbids it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def first_step(script: str, root: Path, flags: Sequence[str]) -> float:
    """Seconds from the start of a run of one step to its line in metrics.jsonl."""
    with tempfile.TemporaryDirectory() as directory:
        metrics, log = Path(directory) / "run" / "metrics.jsonl", Path(directory) / "log"
        line = [sys.executable, script, *flags, "--output_dir", directory, "--exp_name", "run"]
        line += ["--total_episodes", "64", "--local_eval_every", "-1", "--save_freq", "-1"]
        start = time.perf_counter()
        with log.open("w") as out, subprocess.Popen(line, cwd=root, env=cached(), stdout=out, stderr=out) as process:
            while not metrics.exists() or '"training_step": 1,' not in metrics.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"bench.py: {shlex.join(line)}\n{log.read_text()[-3000:]}")
                time.sleep(0.01)
            return time.perf_counter() - start  # the end of the run is waited for, and not counted


def bench_startup(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a command says or does its first thing, each in a process of its own; the first round, which fills
    the caches, does not count. Beside this checkout that of --against, in the same rounds.

    LLM()          vLLM's engine as the demo has it, bare: what no run with vLLM can be faster than
    import llama   torch, tyro and a model's code from transformers, bare: the same of --dry_run with a memory estimate
    tiny model     a random model of two layers, --rollout_backend transformers, to the end of the first step
    demo           grpo_fast.py as scripts/demo.sh has it, the evaluation before training included, to the same
    """
    from scripts.data.make_tiny_model import make_tiny_model

    flags = demo_flags(options)
    args = utils.parse_args(grpo.Args, flags)
    llm: dict[str, Any] = {"model": args.model_name_or_path, "dtype": args.model_dtype, "seed": args.seed}
    llm |= {"max_model_len": args.max_prompt_token_length + args.response_length, "max_num_seqs": 64}
    llm |= {"enforce_eager": args.vllm_enforce_eager, "gpu_memory_utilization": args.vllm_gpu_memory_utilization}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        tiny = ["--model_name_or_path", str(make_tiny_model(Path(directory) / "tiny")), "--overwrite"]
        tiny += ["--rollout_backend", "transformers", "--beta", "0", "--response_length", "24"]
        tiny += ["--dataset_mixer_list", str(ROOT / "data" / "addition" / "train.jsonl"), "1.0"]

        def python(root: Path, *line: str) -> float:
            quiet = {"cwd": root, "env": cached(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            return stopwatch(lambda: subprocess.run([sys.executable, *line], check=True, **quiet))

        theirs: dict[str, Callable[[Path], float]] = {
            "import torch, tyro": lambda root: python(root, "-c", "import torch, tyro"),
            "import llama": lambda root: python(
                root, "-c", f"import torch, tyro; from {LLAMA} import LlamaForCausalLM"
            ),
            "from vllm import LLM": lambda root: python(root, "-c", "from vllm import LLM"),
            "LLM()": lambda root: python(root, "-c", f"from vllm import LLM; LLM(**{llm})"),
        }
        ours: dict[str, Callable[[Path], float]] = {
            "import grpo": lambda root: python(root, "-c", "import grpo"),
            "--help": lambda root: python(root, "grpo.py", "--help"),
            "--dry_run": lambda root: python(root, "grpo.py", *flags, "--dry_run"),
            "tiny model": lambda root: first_step("grpo.py", root, tiny),
            "demo": lambda root: first_step("grpo_fast.py", root, flags),
        }
        sides = {name: functools.partial(start, ROOT) for name, start in (theirs | ours).items()}
        if options.against:
            sides |= {f"{name}, against": functools.partial(start, options.against) for name, start in ours.items()}
        if options.sides:
            sides = {name: start for name, start in sides.items() if any(part in name for part in options.sides)}
        for _ in range(1 + options.repeat):
            for name, start in sides.items():
                seconds.setdefault(name, []).append(start())
    seconds = {name: values[1:] for name, values in seconds.items()}
    ratios = {}
    for name, reference, times in (
        ("--help", "import torch, tyro", 1.5),
        ("--dry_run", "import torch, tyro", 2),
        ("--dry_run", "import llama", None),
        ("tiny model", "import torch, tyro", 3),
        ("demo", "from vllm import LLM", 2),
        ("demo", "LLM()", None),
    ):
        for ending in ("", ", against"):
            if name + ending in seconds and reference in seconds:
                target = 1 / times if times and not ending else None
                ratios[f"{reference} over {name}{ending}"] = ratio(seconds[name + ending], seconds[reference], target)
        if name in seconds and f"{name}, against" in seconds:
            ratios[f"{name} against the other"] = ratio(seconds[name], seconds[f"{name}, against"])
    return {"settings": {}, "sides": {name: spread(values) for name, values in seconds.items()}, "ratios": ratios}


def next_fit(lengths: Sequence[int], pack_length: int, learners: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """open-instruct's packs (indices) of each learner, and those it drops: fill a pack until the next sequence does not
    fit, give every learner the same number of packs, in order, and leave out the rest."""
    limit, room = min(pack_length, sum(lengths) // learners), -1
    packs: list[list[int]] = []
    for i, n in enumerate(lengths):
        if n > room:
            packs.append([])
            room = limit
        packs[-1].append(i)
        room -= n
    per = len(packs) // learners
    return [packs[k * per : (k + 1) * per] for k in range(learners)], packs[per * learners :]


def bench_packing(options: argparse.Namespace) -> dict[str, Any]:
    """pack_rollouts with and without shared prompts, and next-fit of the responses with their prompts as they arrive.

    Prompts start together, and a group arrives when its longest response is done. Imbalances are the largest learner's
    over the mean; a cost is tokens + pair_cost * attended pairs. fewest_packs: no packing of each learner's tokens has
    fewer. No weights are loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        policy = grpo.Policy(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)))
    lengths = sorted(draw_lengths(options.sequences // options.samples, options), key=lambda group: max(group[1]))
    rollouts = make_rollouts(lengths, 2, options.seed)
    alone = [grpo.piece_length([r]) for r in rollouts]
    responses = sum(len(r.token_ids) for r in rollouts)

    def pack(how: str, learners: int) -> tuple[list[list[grpo.Pack]], int]:
        """Each learner's packs, and the number of packs dropped."""
        if how != "next-fit":
            return grpo.pack_rollouts(rollouts, how, options.pack_length, learners, policy.pair_cost), 0
        shares, dropped = next_fit(alone, options.pack_length, learners)
        return [[[[rollouts[i]] for i in bin] for bin in share] for share in shares], len(dropped)

    def describe(shares: Sequence[Sequence[grpo.Pack]], dropped: int) -> dict[str, float]:
        pieces = [[piece for bin in share for piece in bin] for share in shares]
        tokens = [sum(map(grpo.piece_length, share)) for share in pieces]
        pairs = [sum(map(grpo.attended_pairs, share)) for share in pieces]
        costs = [n + policy.pair_cost * m for n, m in zip(tokens, pairs, strict=True)]
        return {
            "tokens": sum(tokens),
            "packs": sum(map(len, shares)) + dropped,
            "fewest_packs": sum(math.ceil(n / options.pack_length) for n in tokens),
            "token_imbalance": max(tokens) / max(statistics.mean(tokens), 1),
            "cost_imbalance": max(costs) / max(statistics.mean(costs), 1),
            "response_tokens_lost": responses - sum(len(r.token_ids) for s in pieces for piece in s for r in piece),
        }

    table, ratios = {}, {}
    for n in options.learners:
        made: dict[str, Any] = {}
        ways = ("shared", "plain", "next-fit")
        sides = {how: lambda how=how, n=n, made=made: made.update({how: pack(how, n)}) for how in ways}
        seconds = side_by_side(sides, options.repeat, warm_up=False)
        rows = {how: spread(seconds[how]) | describe(*made[how]) for how in ways}
        table |= {f"{how}, {n}": row for how, row in rows.items()}
        for how in ("shared", "plain"):
            row, name = rows[how], f"{how}, {n} learners"
            ratios[f"{name}: tokens kept"] = ratio([responses], [responses - row["response_tokens_lost"]], 1.0)
            ratios[f"{name}: fewest packs over packs"] = ratio([row["packs"]], [row["fewest_packs"]])
        ratios[f"{name}: next-fit's packs over packs"] = ratio([row["packs"]], [rows["next-fit"]["packs"]])
    settings = {"sequences": len(rollouts), "response_tokens": responses, "pair_cost": policy.pair_cost}
    return {"settings": settings, "sides": table, "ratios": ratios}


def gsm8k_records(rng: np.random.Generator, count: int) -> list[rewards.RewardRecord]:
    """Solutions of some 300 characters, two of three right."""
    records = []
    for i in range(count):
        a, b = rng.integers(0, 100, 2).tolist()
        text = f"Anna has {a} apples and buys {b} more of them at the market.\n" * 4
        text += f"So she has {a} + {b} = {a + b} apples.\n#### {a + b + (i % 3 == 0)}"
        records.append(rewards.RewardRecord(text, str(a + b), "gsm8k"))
    return records


# label, and a right answer of another form
MATH_FORMS = (
    (r"\frac{%d}{%d}", r"%d/%d"),
    (r"%d\sqrt{2}+%d", r"\sqrt{2}\cdot %d+%d"),
    (r"x^2+%dx+%d", r"x(x+%d)+%d"),
    (r"(%d,%d)", r"\left(%d, %d\right)"),
    (r"[%d,%d)", r"\left[ %d, %d \right)"),
    (r"%d+%d\pi", r"%d+\pi\cdot %d"),
)


def math_records(rng: np.random.Generator, count: int, samples: int) -> list[rewards.RewardRecord]:
    """`samples` solutions of some 800 characters for each label, as in training: 3 of 5 labels are integers and the
    others of MATH_FORMS; of 8 answers 3 are spelled as the label, 2 are right in another form, 3 are wrong."""
    records = []
    for i in range(count):
        group, j = divmod(i, samples)
        if j == 0:
            a, b = sorted(rng.integers(2, 500, 2).tolist())
        form, other = MATH_FORMS[group % len(MATH_FORMS)] if group % 5 > 2 else ("%d%d", "%d%d.0")
        label = form % (a, b)
        answer = label if j % 8 < 3 else other % (a, b) if j % 8 < 5 else form % (a, b + j)
        text = "We put both conditions together and solve for what is asked. " * 12 + f"So it is $\\boxed{{{answer}}}$."
        records.append(rewards.RewardRecord(text, label, "math"))
    return records


def code_records(rng: np.random.Generator, count: int) -> list[rewards.RewardRecord]:
    """Programs that add two numbers, one test each."""
    program = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    tests = [{"input": f"{a} {b}\n", "output": f"{a + b}\n"} for a, b in rng.integers(0, 100, (count, 2)).tolist()]
    return [rewards.RewardRecord(program, [test], "code_stdio") for test in tests]


def bench_rewards(options: argparse.Namespace) -> dict[str, Any]:
    """Scores per second of the verifiers through rewards.score, and a solver's calls in flight together or in turn.

    The solver is --model in a vLLM server, greedy, at most --solver_tokens for each of --calls guidelines to different
    questions; one by one are the first --calls_in_turn of these, and the ratio is of seconds a token. Neither side has
    anything cached, and no record is scored twice. The servers and the workers run before the clock does. Each is told
    on stderr when it is done.
    """
    rng, samples, solver = np.random.default_rng(options.seed), options.samples, "solver, all at once"
    verifiers = {
        "gsm8k": (functools.partial(gsm8k_records, rng, options.records), 10_000),
        "math": (functools.partial(math_records, rng, options.records // 5, samples), 1_000),
        "code_stdio": (functools.partial(code_records, rng, options.records // 20), 300),
    }
    results: dict[str, list[rewards.RewardResult]] = {}

    def judge(name: str, batches: Sequence[Sequence[rewards.RewardRecord]]) -> None:
        start = time.perf_counter()
        results[name] = [result for batch in batches for result in rewards.score(batch)]
        passed = time.perf_counter() - start
        count, rate = len(results[name]), len(results[name]) / passed
        told = f"{name}: {count:,} scores in {passed:.1f} s, {rate:,.{0 if rate > 10 else 1}f} a second"
        print(told, file=sys.stderr, flush=True)

    # Each round has records of its own: what was parsed before is kept by the workers, and training sees nothing twice.
    rounds = {name: iter([make() for _ in range(options.repeat)]) for name, (make, _) in verifiers.items()}
    for name, (make, _) in verifiers.items():
        judge(f"warm-up, {name}", [make()[:40]])  # workers and sandboxes start
    seconds = side_by_side(
        {name: lambda name=name: judge(name, [next(rounds[name])]) for name in verifiers}, options.repeat, warm_up=False
    )
    guidelines = [
        rewards.RewardRecord(
            "Add the tens, then the ones.", {"question": f"What is {a}+{b}?", "answer": a + b}, "solver"
        )
        for a, b in zip(range(10, 10 + options.calls), rng.integers(10, 100, options.calls).tolist(), strict=True)
    ]
    print("starting the solver", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        servers = serve.start_servers(options.model, Path(directory), max_model_len=1024, model_dtype=options.dtype)
        os.environ["SOLVER_API_KEY"] = servers.api_key
        flags = rewards.RewardFlags(
            solver_model_name_or_path=options.model,
            solver_base_url=servers.base_urls[0],
            solver_response_length=options.solver_tokens,
            solver_baseline=False,
        )

        def solve(name: str, batches: Sequence[Sequence[rewards.RewardRecord]]) -> None:
            rewards.configure(flags, connect=True)  # nothing of the round before is kept
            judge(name, batches)

        in_turn = [[record] for record in guidelines[: options.calls_in_turn]]
        solve("warm-up, solver", [guidelines[: options.calls_in_turn]])
        sides = {
            solver: lambda: solve(solver, [guidelines]),
            "solver, one by one": lambda: solve("solver, one by one", in_turn),
        }
        seconds |= side_by_side(sides, options.repeat, warm_up=False)
        servers.stop()
    missing = {name: sum(result.status in rewards.MISSING for result in found) for name, found in results.items()}
    table, ratios = {}, {}
    for name, found in seconds.items():
        table[name] = spread(found, scores=len(results[name])) | {"missing": missing[name]}
        table[name]["mean score"] = statistics.mean([r.score for r in results[name] if r.status not in rewards.MISSING])
        if name in verifiers:
            count, target = len(results[name]), verifiers[name][1]
            ratios[f"{name}: scores/s over {target}"] = ratio(
                [t / count for t in found], [1 / target] * len(found), 1.0
            )
        else:
            tokens = sum(result.details.get("tokens", 0) for result in results[name])
            table[name] |= {"tokens": tokens, "tokens_per_second": tokens / table[name]["seconds"]}
    name = f"solver, {options.calls} calls: all at once over one by one"
    a_token = [[t / table[side]["tokens"] for t in seconds[side]] for side in (solver, "solver, one by one")]
    ratios[name] = ratio(*a_token, 8.0)
    return {"settings": {"workers": rewards.NUM_WORKERS}, "sides": table, "ratios": ratios}


def serve_stub(address: Any, ids: np.ndarray, holds: bool) -> None:
    """An engine in place of which a process answers every request with tokens `ids`, a message each as of long
    responses, or `holds` them for ever."""
    host, port, key = address.recv().split()
    connection = Client((host, int(port)), authkey=key.encode())
    connection.send(0)
    made = utils.Generation(ids, -np.linspace(0, 3, len(ids), dtype=np.float32), "length", np.zeros(len(ids), np.int32))
    while (message := connection.recv())[0] != "stop":
        for name, _ in () if holds or message[0] != "generate" else message[1]:
            connection.send(("done", [(name, made)], None))


def stub_engines(process: Any, address: Any, tokenizer: Any, args: grpo.Args) -> Any:
    """grpo_fast.Engines whose only engine is the process."""
    meeting: Any = SimpleNamespace(store=SimpleNamespace(set=lambda _, value: address.send(value)))
    watchdog: Any = SimpleNamespace(beat=lambda: None)
    process.start()
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        connections = grpo_fast.meet_engines(meeting, grpo_fast.Roles(1, 1, 1, True, 0))
    return grpo_fast.Engines(connections, watchdog, tokenizer, [], args)


class Ticker:
    """A thread that wants to run every millisecond, as learner 0's main thread does while it gives work to a GPU;
    `longest` is the most seconds since the last call in which it could not: what Python's threads were on a processor
    meanwhile, and no more than it waited less its own wait for one. On a machine with other jobs neither the clock nor
    the process's time would do: they had the one, and gloo's threads, which stop nobody, have the other."""

    def __init__(self):
        self.most = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        linux = Path("/proc/thread-self/schedstat").exists()
        own = os.open("/proc/thread-self/schedstat", os.O_RDONLY) if linux else -1

        def now() -> np.ndarray:
            clocks = [time.pthread_getcpuclockid(t.ident) for t in threading.enumerate() if t.ident] if linux else []
            spent = sum(map(time.clock_gettime, clocks)) if linux else time.process_time()
            waited = int(os.pread(own, 64, 0).split()[1]) if linux else 0  # ns for a processor
            return np.array([spent, time.perf_counter() - waited / 1e9])

        last = now()
        while True:
            time.sleep(0.001)
            this = now()
            self.most, last = max(self.most, float(min(this - last))), this

    def longest(self) -> float:
        time.sleep(0.005)
        most, self.most = self.most, 0.0
        return most


def path_of_tokens(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """CPU seconds of learner 0's process and its longest pause in each part of the path of a step's tokens."""
    samples, length = options.samples, options.response_tokens
    args = grpo.Args(
        model_name_or_path=options.model,
        num_unique_prompts_rollout=options.groups,
        num_samples_per_prompt_rollout=samples,
        total_episodes=options.groups * samples * (1 + options.repeat),
        response_length=length,
        pack_length=max(16384, 2 * length),
        async_steps=1,
        filter_zero_std_samples=False,
        apply_verifiable_reward=True,
    )
    tokenizer = utils.load_tokenizer(args)
    text = "\n".join(record.response for record in gsm8k_records(np.random.default_rng(0), 50))
    prompt, ids = (np.resize(tokenizer.encode(text), n).astype(np.int32) for n in (105, length))
    prompts = [utils.Prompt(i, tuple(prompt.tolist()), text[:300], ("1",), ("gsm8k",)) for i in range(8)]
    forks, (here, there) = multiprocessing.get_context("fork"), multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as directory:

        def learner(rank: int) -> utils.World:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            return utils.init_distributed(dist.FileStore(f"{directory}/store", 2))

        def other() -> None:
            torch.set_num_threads(1)
            world = learner(1)
            for _ in range(1 + options.repeat):
                grpo_fast.scatter(grpo_fast.StepData(), args, world)

        peer = forks.Process(target=other, daemon=True)
        peer.start()
        engine = forks.Process(target=serve_stub, args=(there, ids, False), daemon=True)
        engines = stub_engines(engine, here, tokenizer, args)
        world, ticker = learner(0), Ticker()

        def pack(rollouts: list[Any]) -> list[list[grpo.Pack]]:
            return grpo.pack_rollouts(rollouts, "shared", args.pack_length, 2, 1e-4)

        collector = grpo_fast.Collector(engines, prompts, args, grpo.start_state(), pack)
        parts: dict[str, list[tuple[float, float]]] = {}

        def part(name: str, work: Callable[[], Any]) -> Any:
            ticker.longest()
            start = time.process_time()
            result = work()
            parts.setdefault(name, []).append((time.process_time() - start, ticker.longest()))
            return result

        grpo_fast.collect_garbage_by_hand()
        collector.thread.start()
        for step in range(1 + options.repeat):
            # the next step's requests wait until this one's data are there, so that a part has its own tokens alone
            limit = (step + 1) * options.groups
            data = part(
                "request to packs", lambda limit=limit: (collector.admit(limit, frozenset()), collector.next())[1]
            )
            packs = part("scatter", lambda data=data: grpo_fast.scatter(data, args, world))[0]
            part("batch", lambda packs=packs: [grpo.make_batch([p], world.device) for m in packs for p in m])
            part("staleness", lambda packs=packs: grpo_fast.note_staleness(packs, 1, utils.Metrics()))
            part("metrics", lambda d=data: utils.note_step(d.groups, d.sampled, args, utils.Metrics()))
            part("garbage", gc.collect)
            collector.account(data)
        engines.tell_all(("stop",))
        peer.join()
        dist.destroy_process_group()
    tokens = args.total_episodes / (1 + options.repeat) * length
    table = {}
    for name, found in parts.items():
        own = tokens / (2 if name in ("batch", "staleness") else 1)  # of this learner, or of both
        table[name] = spread([cpu / own * 1e6 for cpu, _ in found[1:]]) | {"pause": max(p for _, p in found[1:])}
    return table


def submit_seconds(options: argparse.Namespace, outstanding: int) -> list[float]:
    """CPU microseconds to submit a request while so many are outstanding, a group at a time, in each round."""
    here, there = multiprocessing.Pipe()
    args = grpo.Args(model_name_or_path=options.model)
    fork = multiprocessing.get_context("fork").Process
    engines = stub_engines(fork(target=serve_stub, args=(there, np.zeros(1), True), daemon=True), here, None, args)
    request, names, found = utils.Request((1,) * 105, 1, 1.0, 2048), iter(map(str, range(2**40))), []

    def submit(groups: int) -> None:
        for _ in range(groups):
            engines.submit([(next(names), request, print) for _ in range(options.samples)])

    submit(math.ceil(outstanding / options.samples))
    for _ in range(options.repeat):
        start = time.thread_time()
        submit(100)
        found.append((time.thread_time() - start) / (100 * options.samples) * 1e6)
    engines.tell_all(("stop",))
    return found


def bench_tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Learner 0's CPU microseconds a token, all threads of its process, and its longest pause in seconds: a thread that
    wants to run every millisecond could not for so long. An engine is a process that answers at once, a second learner
    one that takes its packs; requests, collector, verifier (gsm8k), packer, scatter, batches and metrics are those of a
    run. Garbage is collected between two steps, and is not in the pause of all. --groups of --samples responses of
    --response_tokens each. Two more sides are microseconds a request."""
    table = path_of_tokens(options)
    total = {key: sum(part[key] for part in table.values()) for key in ("seconds", "min", "max")}
    table["all"] = total | {"pause": max(part["pause"] for name, part in table.items() if name != "garbage")}
    few, many = (submit_seconds(options, n) for n in (100, 100_000))
    table |= {"submit, 100 outstanding": spread(few), "submit, 100,000 outstanding": spread(many)}
    ratios = {
        "microsecond a token: target over measured": ratio([total["seconds"]], [1.0], 1.0),
        "50 ms: target over longest pause": ratio([table["all"]["pause"]], [0.05], 1.0),
        "submit: 100 outstanding over 100,000": ratio(many, few, 0.8),
    }
    settings = {"groups": options.groups, "samples": options.samples, "response_tokens": options.response_tokens}
    return {"settings": settings, "sides": table, "ratios": ratios}


def serve_vllm(address: Any, args: grpo.Args) -> None:
    """grpo_fast.py's engine in a process of its own, with the weights it starts with."""
    meeting: Any = SimpleNamespace(store=SimpleNamespace(get=lambda _: address.recv().encode(), set=lambda *_: None))
    quiet = {"Watchdog": lambda *_: None, "weights_group": lambda *_: (None, None)}
    with mock.patch.multiple(grpo_fast, join=lambda *_: utils.init_distributed(), **quiet):
        grpo_fast.run_engine(args, grpo_fast.Roles(1, 1, 1, False, 0), meeting)


def bench_tools(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second from an engine of grpo_fast.py to learner 0, of --calls rollouts of --turns turns that are
    answered at once, and with one that waits --tool_seconds, until the others are done. A turn has 32 tokens, a first
    one 1 to 32: never do all wait."""
    here, there = multiprocessing.Pipe()
    text = "import time\ndef step(e):\n    time.sleep(e.config.get('wait', 0) * (e.turn == 1))\n    return 'Go on.'\n"
    with tempfile.TemporaryDirectory() as directory:
        (env := Path(directory, "env.py")).write_text(text)
        more = f"--env_file {env} --max_steps {options.turns - 1} --per_turn_max_tokens 32 --response_length 1024"
        args = utils.parse_args(grpo.Args, [*demo_flags(options), *more.split()])
        how: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        process = how.Process(target=serve_vllm, args=(there, args), daemon=True)
        engines = stub_engines(process, here, tokenizer := utils.load_tokenizer(args), args)
        engines.eos_ids = utils.eos_token_ids(args, tokenizer)
        environment = utils.load_environment(args, tokenizer)
        prompt = utils.load_prompts("dataset_mixer_list", args, tokenizer, environment)[0]

        def play(slow: float) -> float:
            rollouts = [utils.Rollout(prompt, i, 0) for i in range(options.calls)]
            rollouts[0].prompt = dataclasses.replace(prompt, episode=prompt.episode | {"config": {"wait": slow}})
            first = [dataclasses.replace(grpo.make_request(r, args), max_tokens=1 + r.position % 32) for r in rollouts]
            ends, start = [], time.perf_counter()

            def ended(i: int, made: utils.Generation) -> Any:
                ends.append((time.perf_counter(), i, len(made.token_ids)))
                return grpo.end_turn(rollouts[i], made, engines, args)

            engines.generate(first, ended)
            last = max(at for at, i, _ in ends if i or not slow)
            return (last - start) / sum(tokens for at, _, tokens in ends if at <= last)

        rounds = [(play(0), play(options.tool_seconds)) for _ in range(1 + options.repeat)]
        engines.tell_all(("stop",))
    fast, slow = zip(*rounds[1:], strict=True)  # seconds of a token
    sides = {"all fast": spread(fast, tokens=1), "one slow": spread(slow, tokens=1)}
    return {"settings": {}, "sides": sides, "ratios": {"one slow": ratio(slow, fast, 1 - 1 / options.calls)}}


class StubLLMEngine:
    """vLLM's LLMEngine without scheduler, cache and model: in a step its own output processor gets a token of each
    running request. `seconds` are the processor's, `made` those in which the step was made up."""

    def __init__(self, length: int):
        from vllm.v1.engine.output_processor import OutputProcessor

        self.processor, self.names, self.label = OutputProcessor(None, log_stats=False), [], "0"
        self.left, self.seconds, self.made = length, 0.0, 0.0

    def set_weight_version(self, label: str) -> None:
        self.label = label

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(name, prompt["prompt_token_ids"], None, params, None, 0.0, None, None, None)
        request.external_req_id = name
        self.processor.add_request(request, None, None, 0)
        self.names.append(name)

    def has_unfinished_requests(self) -> bool:
        return self.processor.has_unfinished_requests()

    def step(self) -> list[Any]:
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.outputs import LogprobsLists

        start = time.thread_time()
        self.left -= 1
        ends, n = None if self.left else FinishReason.LENGTH, len(self.names)
        lists = LogprobsLists(np.full((n, 1), 5), np.full((n, 1), -1.0, np.float32), np.ones(n, int))
        parts = [lists.slice_request(i, 1) for i in range(n)]
        outputs = [
            EngineCoreOutput(x, [5], part, finish_reason=ends) for x, part in zip(self.names, parts, strict=True)
        ]
        middle = time.thread_time()
        found = self.processor.process_outputs(outputs, weight_version=self.label).request_outputs
        self.made, self.seconds = self.made + middle - start, self.seconds + time.thread_time() - middle
        return found


def bench_loop(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of CPU a token in an engine's process, outside vLLM's scheduler and model: vLLM's output processor,
    our loop around it, and the reply to learner 0. --running requests of --response_tokens."""
    engine: Any = object.__new__(utils.VLLMEngine)
    engine.eos_ids, engine.stop_strings, engine.version, engine.asleep, engine.loads = [0], [], 0, 0, 0
    found: dict[str, list[float]] = {"vLLM's output": [], "our loop": [], "reply": []}
    tokens = options.running * options.response_tokens / 1e6
    for _ in range(1 + options.repeat):
        engine.engine, finished = StubLLMEngine(options.response_tokens), []
        start = time.thread_time()
        for i in range(options.running):
            engine.add(str(i), utils.Request((1,) * 105, i, 1.0, options.response_tokens))
        while engine.busy:
            finished += engine.step()
        total = time.thread_time() - start
        found["vLLM's output"].append(engine.engine.seconds / tokens)
        found["our loop"].append((total - engine.engine.seconds - engine.engine.made) / tokens)
        start = time.thread_time()
        for made in finished:
            ForkingPickler.dumps(("done", [made], None))
        found["reply"].append((time.thread_time() - start) / tokens)
    sides = {name: values[1:] for name, values in found.items()}
    sides["all"] = [sum(values) for values in zip(*sides.values(), strict=True)]
    settings = {"running": options.running, "response_tokens": options.response_tokens}
    ratios = {"12 microseconds a token over measured": ratio(sides["all"], [12.0] * options.repeat, 1.0)}
    return {"settings": settings, "sides": {name: spread(values) for name, values in sides.items()}, "ratios": ratios}


def show(result: dict[str, Any]) -> None:
    """The machine, a table of what was measured of each side, a table of ratios."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    for facts in (result["machine"], result["settings"]):
        console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False, soft_wrap=True)
    measured, ratios = Table("", *result["sides"]), Table("ratio", "value", "min", "max", "target", "")
    for row in dict.fromkeys(name for side in result["sides"].values() for name in side):
        values = [side.get(row) for side in result["sides"].values()]
        measured.add_row(row, *("" if v is None else f"{v:.4g}" if abs(v) < 1e4 else f"{v:,.0f}" for v in values))
    for name, found in result["ratios"].items():
        met = {None: "", True: "met", False: "MISSED"}[found["met"]]
        target = "" if found["target"] is None else f"{found['target']:.2f}"
        ratios.add_row(name, *(f"{found[key]:.3f}" for key in ("value", "min", "max")), target, met)
    console.print(measured, ratios)


def parse_options() -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    add = parser.add_argument
    add("bench", choices=BENCHES, help="any flag that is not listed here goes to grpo.py and grpo_fast.py")
    add("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"), help="directory of the model")
    add("--dtype", choices=("auto", *utils.DTYPES), default="auto", help="compute dtype (auto: the faster one here)")
    add("--repeat", type=int, default=3, help="rounds (3)")
    add("--json", action="store_true", help="one line of JSON on stdout")
    add("--samples", type=int, default=8, help="learner, packing, rewards, tokens: responses per prompt (8)")
    add(
        "--lengths",
        help="learner, compiled, packing: .jsonl of {prompt_tokens, response_tokens}, a prompt's rows adjacent",
    )
    add("--pack_length", type=int, default=2048, help="learner, compiled, packing: tokens (2048)")
    add("--seed", type=int, default=1, help="learner, packing, rewards: of lengths, tokens, records (1)")
    add("--groups", type=int, default=64, help="tokens: groups in flight (64)")
    add("--response_tokens", type=int, default=2048, help="tokens, loop: of each response (2048)")
    add("--running", type=int, default=512, help="loop: requests that run at once (512)")
    add("--prompts", type=int, default=4, help="learner, compiled: prompts (4)")
    add("--rows", type=int, default=16, help="learner: of a padded micro-batch (16)")
    add("--optimizer", action="store_true", help="learner: AdamW's step too; ours is on float32 weights")
    add("--sequences", type=int, default=100_000, help="packing: responses (100000)")
    add("--learners", type=int, nargs="+", default=[8, 64], help="packing: counts of learners (8 64)")
    add("--steps", type=int, default=6, help="pipeline, trl: measured steps of each of our runs (6)")
    add("--warmup_steps", type=int, default=2, help="pipeline, trl: steps before them (2)")
    add("--records", type=int, default=10_000, help="rewards: gsm8k scores; a fifth as many math, a 20th code (10000)")
    add("--calls", type=int, default=64, help="rewards: guidelines for the solver; tools: rollouts (64)")
    add("--calls_in_turn", type=int, default=4, help="rewards: of these also asked one by one (4)")
    add("--solver_tokens", type=int, default=64, help="rewards: longest text of the solver (64)")
    add("--results", default=str(ROOT / "runs" / "precision.jsonl"), help="precision: its runs (runs/precision.jsonl)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="precision: of the runs (1 2 3)")
    add("--arms", nargs="+", help="precision: of these names (all)")
    add("--most_steps", type=int, default=40, help="precision: steps of a run that does not learn (40)")
    add("--against", help="startup: another checkout to measure in the same rounds")
    add("--sides", nargs="+", help="startup: only those whose name has one of these parts")
    add("--turns", type=int, default=8, help="tools: of a rollout (8)")
    add("--tool_seconds", type=float, default=30.0, help="tools: of the slow one (30)")
    add("--trl_steps", type=int, default=3, help="trl: measured steps of each of its runs, after one (3)")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="trl: what to learn (both)")
    options, options.more = parser.parse_known_args()
    if options.bench in ("packing", "rewards", "tokens", "loop") and options.more:
        parser.error(f"unknown: {' '.join(options.more)}")
    if not (Path(options.model) / "config.json").exists():
        parser.error(f"no model in {options.model}: python scripts/data/get_smollm2.py (make_tiny_model.py) makes it")
    options.model = str(Path(options.model).resolve())
    run = grpo.Args(model_dtype=options.dtype)
    options.dtype, why = utils.choose_dtype(run)
    print(f"dtype {options.dtype}: {why}", file=sys.stderr)
    return options


BENCHES = {
    f.__name__[6:]: f
    for f in (
        bench_compiled,
        bench_learner,
        bench_loop,
        bench_rollout,
        bench_sync,
        bench_pipeline,
        bench_packing,
        bench_precision,
        bench_rewards,
        bench_startup,
        bench_tokens,
        bench_tools,
        bench_trl,
    )
}


def main() -> None:
    options = parse_options()
    missing = [name for name, value in THREAD_SETTINGS.items() if not value]
    if missing and not torch.cuda.is_available():
        hint = "a CPU is slower without: `source scripts/setup.sh` first"
        print(f"bench.py: WARNING: {', '.join(missing)} not set, {hint}", file=sys.stderr)
    facts = machine(utils.DTYPES[options.dtype])
    chosen = {"bench": options.bench, "model": options.model, "dtype": options.dtype, "repeat": options.repeat}
    result = chosen | {"machine": facts} | BENCHES[options.bench](options)
    print(json.dumps(result)) if options.json else show(result)


if __name__ == "__main__":
    try:
        main()
    except utils.UserError as error:
        raise SystemExit(f"bench.py: {error}") from None
    utils.exit_process()
