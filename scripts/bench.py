"""Benchmarks. Each measures its sides in one run, interleaved A B A B, and prints ratios of their median seconds.

    python scripts/bench.py learner     forward and backward: packs, a bare loop, padding, one by one, a dense mask
    python scripts/bench.py rollout     our engine loop and LLM.generate on the same engine
    python scripts/bench.py sync        learner's weights into the engine: us, a memory copy, vLLM's own reload
    python scripts/bench.py pipeline    grpo.py and grpo_fast.py on the demo's task, and the ideal of their phases
    python scripts/bench.py packing     pack_rollouts on 100k sequences, and next-fit in arrival order

    --model DIR    scripts/make_tiny_model.py makes one in a second      --repeat N    rounds of A B A B
    --json         one line of JSON on stdout in place of the tables

A ratio above 1 is good for us. It comes with its smallest and largest value over the rounds and, where there is one,
the target it should reach. On a CPU, `source scripts/setup.sh` first.

Lengths. Unless --lengths FILE.jsonl names rows of {prompt_tokens, response_tokens}, they are drawn from log-normals
fitted to the logs of the 7473 training rows of GSM8K in SmolLM2's tokens: the question has mean 4.04 and standard
deviation 0.345 (median 57), to which SmolLM2's chat template adds 30 tokens; the answer without its <<calculator>>
marks, with the end token, has 4.45 and 0.434 (median 86). Answers are people's: a policy's own are often longer and
spread wider, and padding then costs more than here.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
THREAD_SETTINGS = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "KMP_BLOCKTIME", "LD_PRELOAD")}

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import grpo  # noqa: E402

QUESTION, TEMPLATE_TOKENS, ANSWER = (4.04, 0.345), 30, (4.45, 0.434)  # see Lengths above
Side = dict[str, float]  # a row of the table

# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


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


def spread(seconds: Sequence[float]) -> Side:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def matrix_product(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Any], float]:
    """A square matrix product and its floating-point operations."""
    n = 8192 if device.type == "cuda" else 2048
    a, b, out = torch.randn(3, n, n, device=device).to(dtype)
    return lambda: torch.mm(a, b, out=out), 2.0 * n**3


def machine(dtype: torch.dtype) -> dict[str, Any]:
    """What the numbers were measured on."""
    cuda = torch.cuda.is_available()
    product, operations = matrix_product(dtype, torch.device("cuda" if cuda else "cpu"))
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],  # above the cores: others are at work, trust no ratio
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "peak_gflops": operations / min(stopwatch(product) for _ in range(6)) / 1e9,
        "peak_dtype": str(dtype).removeprefix("torch."),
        **THREAD_SETTINGS,
    }


def warn_of_threads() -> None:
    """Say so when a CPU lacks the settings of scripts/setup.sh; numbers without them are of another machine."""
    missing = [name for name, value in THREAD_SETTINGS.items() if not value]
    if missing and not torch.cuda.is_available():
        hint = "run `source scripts/setup.sh` first, or every CPU number here is slower than it should be"
        print(f"bench.py: WARNING: {', '.join(missing)} not set: {hint}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def draw_lengths(prompts: int, samples: int, options: argparse.Namespace) -> list[tuple[int, list[int]]]:
    """(prompt tokens, tokens of each of its `samples` responses) per prompt, from --lengths or the fit of GSM8K."""
    longest = options.pack_length // 2  # so that any response fits a pack with its prompt
    if options.lengths:
        rows = [json.loads(line) for line in Path(options.lengths).read_text().splitlines()]
        chosen = [[rows[(i * samples + j) % len(rows)] for j in range(samples)] for i in range(prompts)]
        drawn = [(g[0]["prompt_tokens"], [row["response_tokens"] for row in g]) for g in chosen]
    else:
        rng = np.random.default_rng(options.seed)
        questions, answers = rng.lognormal(*QUESTION, prompts), rng.lognormal(*ANSWER, (prompts, samples))
        drawn = [(TEMPLATE_TOKENS + round(q), np.rint(a).astype(int).tolist()) for q, a in zip(questions, answers, strict=True)]
    return [(min(max(n, 2), longest), [min(max(m, 1), longest) for m in own]) for n, own in drawn]


def make_rollouts(lengths: Sequence[tuple[int, list[int]]], vocab: int, seed: int) -> list[grpo.Rollout]:
    """Rollouts of random tokens. The engine's logprobs say that each token was all but impossible, so that rho, cut
    at 1, is 1 and the gradient is that of the bare loop."""
    rng, rollouts = np.random.default_rng(seed), []
    for i, (n, own) in enumerate(lengths):
        prompt = utils.Prompt(i, tuple(rng.integers(0, vocab, n).tolist()), "", ("1",), ("gsm8k",))
        for j, m in enumerate(own):
            ids = rng.integers(0, vocab, m).tolist()
            advantage = 1.0 if j % 2 else -0.5
            rollout = grpo.Rollout(prompt, i, j, ids, [-30.0] * m, [True] * m, [0] * m, "stop", advantage=advantage)
            rollouts.append(rollout)
    return rollouts


def demo_flags() -> list[str]:
    """The flags of scripts/demo.sh, its files made and named from anywhere."""
    from scripts.make_addition import make_addition

    if not (ROOT / "data" / "addition" / "train.jsonl").exists():
        make_addition(ROOT / "data" / "addition")
    command = (ROOT / "scripts" / "demo.sh").read_text().split("python grpo.py", 1)[1]
    flags = [flag for flag in shlex.split(command) if flag != "$@"]
    return [str(ROOT / flag) if flag.startswith("data/") else flag for flag in flags]


def start_engine(options: argparse.Namespace) -> tuple[grpo.Args, utils.World, Any, Any]:
    """(flags, world, tokenizer, engine) of the demo with --model."""
    flags = [*demo_flags(), "--model_name_or_path", options.model, "--model_dtype", options.dtype, *options.more]
    args = utils.parse_args(grpo.Args, flags)
    world, tokenizer = utils.init_distributed(), utils.load_tokenizer(args)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    return args, world, tokenizer, utils.VLLMEngine(args, tokenizer, world, rollouts)


# ---------------------------------------------------------------------------------------------------------------------
# learner
# ---------------------------------------------------------------------------------------------------------------------


def bare_pass(model: Any, batches: Sequence[grpo.Batch], masks: Sequence[torch.Tensor] | None, optimizer: Any) -> float:
    """Policy gradient on packs with a Hugging Face model and nothing of ours but the attention of a pack; with `masks`
    not even that. Returns the gradient's norm."""
    model.set_attn_implementation("sdpa" if masks else utils.PACK_ATTENTION)
    tokens = sum(int(b.response_mask.sum()) for b in batches)
    for i, batch in enumerate(batches):
        how = {"attention_mask": masks[i]} if masks else {"layout": batch.layout}
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        hidden = model.base_model(**inputs, **(how if batch.layout else {})).last_hidden_state[batch.response_mask]
        logits = model.get_output_embeddings()(hidden).float()  # (n, V), of response positions only
        nll = cross_entropy(logits, batch.targets[batch.response_mask], reduction="none")
        ((nll * batch.advantages[batch.response_mask]).sum() / tokens).backward()
    return finish_bare(model, optimizer)


def padded_pass(model: Any, rollouts: Sequence[grpo.Rollout], rows: int, optimizer: Any) -> float:
    """The same on `rows` responses at a time, each with its own prompt, as TRL lays them out: prompts padded on the
    left and responses on the right to the longest of the rows. Returns the gradient's norm."""
    model.set_attn_implementation("sdpa")
    device, tokens = next(model.parameters()).device, sum(len(r.token_ids) for r in rollouts)
    for i in range(0, len(rollouts), rows):
        chosen = rollouts[i : i + rows]
        before, after = max(len(r.prompt.token_ids) for r in chosen), max(len(r.token_ids) for r in chosen)
        ids, attend = torch.zeros(2, len(chosen), before + after, dtype=torch.long)
        for row, r in enumerate(chosen):
            part = slice(before - len(r.prompt.token_ids), before + len(r.token_ids))
            ids[row, part], attend[row, part] = torch.tensor([*r.prompt.token_ids, *r.token_ids]), 1
        ids, attend = ids.to(device), attend.to(device)
        logits = model(input_ids=ids, attention_mask=attend, use_cache=False, logits_to_keep=after + 1).logits[:, :-1]
        mask = attend[:, before:].bool()  # (rows, after)
        advantages = torch.tensor([[r.advantage] for r in chosen], device=device).expand(mask.shape)[mask]
        nll = cross_entropy(logits[mask].float(), ids[:, before:][mask], reduction="none")
        ((nll * advantages).sum() / tokens).backward()
    return finish_bare(model, optimizer)


def finish_bare(model: Any, optimizer: Any) -> float:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    return float(norm)


def dense_mask(layout: utils.Layout | None) -> torch.Tensor | None:
    """(1, 1, T, T) bool: who attends to whom in a pack, written out."""
    if layout is None:
        return None
    piece, segment = [], []
    for i, (shared, own) in enumerate(layout.pieces):
        piece += [i] * (shared + sum(own))
        segment += [0] * shared + [j for j, n in enumerate(own, 1) for _ in range(n)]
    pieces, segments = torch.tensor(piece, device=layout.device), torch.tensor(segment, device=layout.device)
    same = (segments == 0) | (segments == segments[:, None])
    return ((pieces == pieces[:, None]) & same).tril()[None, None]


def bench_learner(options: argparse.Namespace) -> dict[str, Any]:
    """Training's forward and backward, in tokens of prompt + response per second: what every response would have in a
    row of its own, whatever is computed.

    packs_shared, packs_plain, one_by_one   grpo.update, as in training: a prompt once per pack; with each response; no
                                            packs, one response a forward. Packing is in the time.
    bare_packs                              a bare loop over the packs of packs_shared, made before
    bare_dense                              the same with a (T, T) mask, made before: what pack_attention avoids
    padded                                  a bare loop over padded rows
    The bare loops hold weights and gradients in --dtype alone; ours keeps float32 beside them, clips and measures.
    """
    flags = f"--model_dtype {options.dtype} --pack_length {options.pack_length} --per_device_train_batch_size 1"
    flags += " --beta 0 --no_load_ref_policy --max_logprob_gap 0 --rho_clamp_upper_bound 1 --learning_rate 1e-6"
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", options.model, *flags.split(), *options.more])
    world, dtype = utils.init_distributed(), utils.DTYPES[options.dtype]
    policy = grpo.load_policy(args, world)
    bare = utils.load_causal_lm(args).to(world.device, dtype)
    no_step = SimpleNamespace(step=lambda: None, zero_grad=policy.zero_grad, get_last_lr=lambda: [0.0])
    optimizer, scheduler = grpo.make_optimizer(policy, args) if options.optimizer else (no_step, no_step)
    bare_optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-6, fused=True) if options.optimizer else no_step

    lengths = draw_lengths(options.prompts, options.samples, options)
    rollouts = make_rollouts(lengths, bare.config.vocab_size, options.seed)
    norms: dict[str, float] = {}

    def packs_of(how: str) -> list[grpo.Pack]:
        return grpo.pack_rollouts(rollouts, how, args.pack_length, 1, policy.pair_cost)[0]

    def ours(name: str, how: str) -> None:
        batches, metrics = grpo.micro_batches(packs_of(how), how, args, world.device), utils.Metrics()
        grpo.update(policy, None, optimizer, scheduler, [batches], args, world, metrics)
        norms[name] = metrics.reduce(world)["optim/grad_norm"]

    shared = grpo.micro_batches(packs_of("shared"), "shared", args, world.device)
    masks = [dense_mask(batch.layout) for batch in shared]
    product, product_flops = matrix_product(dtype, world.device)
    sides = {
        "packs_shared": lambda: ours("packs_shared", "shared"),
        "bare_packs": lambda: norms.update(bare_packs=bare_pass(bare, shared, None, bare_optimizer)),
        "packs_plain": lambda: ours("packs_plain", "plain"),
        "one_by_one": lambda: ours("one_by_one", "rows"),
        "padded": lambda: norms.update(padded=padded_pass(bare, rollouts, options.rows, bare_optimizer)),
        "bare_dense": lambda: norms.update(bare_dense=bare_pass(bare, shared, masks, bare_optimizer)),
        "matrix_product": product,
    }
    seconds = side_by_side(sides, options.repeat)

    real, responses = sum(n * len(own) + sum(own) for n, own in lengths), sum(sum(own) for _, own in lengths)
    peak = product_flops / min(seconds["matrix_product"])
    table = {name: spread(values) for name, values in seconds.items()}
    for name, norm in norms.items():
        table[name] |= {"tokens_per_second": real / table[name]["seconds"], "grad_norm": norm}
        if name != "padded":
            how = {"packs_plain": "plain", "one_by_one": "rows"}.get(name, "shared")
            pieces = [piece for pack in packs_of(how) for piece in pack]
            tokens, pairs = sum(map(grpo.piece_length, pieces)), sum(map(grpo.attended_pairs, pieces))
            needed = 3 * policy.flops(tokens, pairs, responses)
            table[name] |= {"computed_tokens": tokens, "peak_share": needed / table[name]["seconds"] / peak}
    return {
        "settings": {"real_tokens": real, "response_tokens": responses, "packs": len(shared), "dtype": options.dtype},
        "sides": table,
        "ratios": {
            "packs over a bare loop over the same packs": ratio(seconds["packs_shared"], seconds["bare_packs"], 0.90),
            "packs over padded rows": ratio(seconds["packs_shared"], seconds["padded"], 2.0),
            "packs over one by one": ratio(seconds["packs_shared"], seconds["one_by_one"], 1.0),
            "packs over one by one, no shared prompts": ratio(seconds["packs_plain"], seconds["one_by_one"], 1.0),
            "packs over packs without shared prompts": ratio(seconds["packs_shared"], seconds["packs_plain"]),
            "attention by pieces over a dense mask, bare": ratio(seconds["bare_packs"], seconds["bare_dense"]),
        },
    }


# ---------------------------------------------------------------------------------------------------------------------
# rollout, sync
# ---------------------------------------------------------------------------------------------------------------------


def bench_rollout(options: argparse.Namespace) -> dict[str, Any]:
    """A step's generation with the demo's flags: engine.generate and plain LLM.generate, same engine, same requests."""
    from vllm import SamplingParams

    args, world, tokenizer, engine = start_engine(options)
    prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    pairs = [(i, utils.prompt_at(prompts, i, args.seed)) for i in range(args.num_unique_prompts_rollout)]
    samples = range(args.num_samples_per_prompt_rollout)
    requests = [grpo.make_request(prompt, i, j, args, False) for i, prompt in pairs for j in samples]
    texts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
    made: dict[str, list[list[int]]] = {}

    def ours() -> None:
        engine.llm.reset_prefix_cache()
        made["ours"] = [g.token_ids for g in engine.generate(requests)]

    def plain() -> None:
        engine.llm.reset_prefix_cache()
        params = [
            SamplingParams(
                temperature=r.temperature,
                top_p=r.top_p,
                max_tokens=r.max_tokens,
                seed=r.seed,
                logprobs=0,
                stop_token_ids=engine.eos_ids,
                detokenize=False,
            )
            for r in requests
        ]
        made["plain"] = [list(o.outputs[0].token_ids) for o in engine.llm.generate(texts, params, use_tqdm=False)]

    seconds = side_by_side({"engine.generate": ours, "LLM.generate": plain}, options.repeat)
    counts = {"engine.generate": sum(map(len, made["ours"])), "LLM.generate": sum(map(len, made["plain"]))}
    table = {k: spread(v) | {"tokens_per_second": counts[k] / statistics.median(v)} for k, v in seconds.items()}
    same = sum(a == b for a, b in zip(made["ours"], made["plain"], strict=True)) / len(requests)
    return {
        "settings": {"requests": len(requests), "tokens": counts["engine.generate"], "same_responses": same},
        "sides": table,
        "ratios": {
            "our engine loop over LLM.generate": ratio(seconds["engine.generate"], seconds["LLM.generate"], 0.95)
        },
    }


def bench_sync(options: argparse.Namespace) -> dict[str, Any]:
    """The learner's weights into the engine of the same process, and what that is made of."""
    args, world, _, engine = start_engine(options)
    policy, dtype = grpo.load_policy(args, world), utils.DTYPES[args.model_dtype]
    weights = [(name, tensor.clone()) for name, tensor in utils.full_weights(policy.model, dtype)]
    buffers = [torch.empty_like(tensor) for _, tensor in weights]

    def copy() -> None:
        for (_, tensor), buffer in zip(weights, buffers, strict=True):
            buffer.copy_(tensor)

    def gather() -> None:
        for _ in utils.full_weights(policy.model, dtype):
            pass

    sides = {
        "engine.load_weights": lambda: engine.load_weights(utils.full_weights(policy.model, dtype), version=1),
        "memory copy": copy,
        "vLLM's reload": lambda: engine.worker.reload_weights(weights_iterator=iter(weights)),
        "full_weights alone": gather,
    }
    seconds = side_by_side(sides, options.repeat)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
    table = {k: spread(v) | {"gb_per_second": size / statistics.median(v) / 1e9} for k, v in seconds.items()}
    bound = [3 * a + b for a, b in zip(seconds["memory copy"], seconds["vLLM's reload"], strict=True)]
    return {
        "settings": {"bytes": size, "tensors": len(weights), "dtype": args.model_dtype},
        "sides": table,
        "ratios": {"sync against 3 copies + vLLM's reload": ratio(seconds["engine.load_weights"], bound, 1.0)},
    }


# ---------------------------------------------------------------------------------------------------------------------
# pipeline
# ---------------------------------------------------------------------------------------------------------------------


def run_script(script: str, flags: Sequence[str], options: argparse.Namespace) -> dict[str, float]:
    """Mean metrics of the steps after the first --warmup_steps of a whole run on the demo's task."""
    args = utils.parse_args(grpo.Args, demo_flags())
    steps = options.steps + options.warmup_steps
    episodes = steps * args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    with tempfile.TemporaryDirectory() as directory:
        line = [sys.executable, script, *demo_flags(), "--model_name_or_path", options.model, "--output_dir", directory]
        line += ["--model_dtype", options.dtype, "--exp_name", "bench", "--total_episodes", str(episodes), "--local_eval_every", "-1"]
        line += ["--no_eval_on_step_0", *flags, *options.more]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"bench.py: {shlex.join(line)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
        lines = (Path(directory) / "bench" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["training_step"] > options.warmup_steps]
    names = {name for row in rows for name, value in row.items() if value is not None}
    return {name: statistics.mean(row.get(name) or 0.0 for row in rows) for name in names}


def bench_pipeline(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of whole runs, against max(generation, training): the time of a step whose halves overlap.

    An engine's share is val/engine_busy_seconds where the script writes it, else time/generation. Where learner and
    engines share the cores of one CPU, two halves at once have half the machine each and nothing can be won.
    """
    scripts = {
        "grpo.py": ("grpo.py", []),
        "grpo_fast.py --async_steps 0": ("grpo_fast.py", ["--async_steps", "0"]),
        "grpo_fast.py --async_steps 1": ("grpo_fast.py", ["--async_steps", "1", "--inflight_updates"]),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in scripts}
    for _ in range(options.repeat):
        for name, (script, flags) in scripts.items():
            runs[name].append(run_script(script, flags, options))

    def series(name: str, metric: str) -> list[float]:
        return [run.get(metric, math.nan) for run in runs[name]]

    shown = "time/training time/generation time/weight_sync time/trainer_waiting_for_data val/engine_busy_seconds "
    shown += "val/engine_pause_seconds val/engine_idle_share val/learner_idle_share objective/verifiable_correct_rate"
    seconds, ideal, table = {}, {}, {}
    for name in scripts:
        seconds[name] = series(name, "time/total")
        generate = series(name, "val/engine_busy_seconds")
        generate = series(name, "time/generation") if math.isnan(generate[0]) else generate
        ideal[name] = [max(pair) for pair in zip(generate, series(name, "time/training"), strict=True)]
        table[name] = spread(seconds[name]) | {"ideal": statistics.median(ideal[name])}
        found = {metric: statistics.median(series(name, metric)) for metric in shown.split()}
        table[name] |= {metric: value for metric, value in found.items() if not math.isnan(value)}
    sync, on_policy, one_off = scripts
    return {
        "settings": {"steps": options.steps, "warmup_steps": options.warmup_steps},
        "sides": table,
        "ratios": {
            "async_steps 1 over grpo.py": ratio(seconds[one_off], seconds[sync]),
            "async_steps 1 over async_steps 0": ratio(seconds[one_off], seconds[on_policy]),
            "async_steps 1 against its own ideal": ratio(seconds[one_off], ideal[one_off]),
            "async_steps 1 against the ideal of grpo.py": ratio(seconds[one_off], ideal[sync]),
        },
    }


# ---------------------------------------------------------------------------------------------------------------------
# packing
# ---------------------------------------------------------------------------------------------------------------------


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
    """pack_rollouts with and without shared prompts, and next-fit of the responses with their prompts as they arrive:
    prompts start together and a group arrives when its longest response is done. No weights are loaded.

    Imbalances are the largest learner's over the mean; cost is in tokens, attended pairs included. fewest_packs is
    tokens / pack_length, no packing can have fewer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        policy = grpo.Policy(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model)))
    lengths = draw_lengths(options.sequences // options.samples, options.samples, options)
    lengths.sort(key=lambda group: max(group[1]))
    rollouts = make_rollouts(lengths, 2, options.seed)
    alone = [grpo.piece_length([r]) for r in rollouts]
    responses = sum(len(r.token_ids) for r in rollouts)

    def describe(shares: Sequence[Sequence[grpo.Pack]], dropped: int, seconds: Sequence[float]) -> Side:
        pieces = [[piece for pack in share for piece in pack] for share in shares]
        tokens = [sum(map(grpo.piece_length, share)) for share in pieces]
        pairs = [sum(map(grpo.attended_pairs, share)) for share in pieces]
        costs = [n + policy.pair_cost * m for n, m in zip(tokens, pairs, strict=True)]
        return spread(seconds) | {
            "packs": sum(map(len, shares)) + dropped,
            "fewest_packs": math.ceil(sum(tokens) / options.pack_length),
            "token_imbalance": max(tokens) / (statistics.mean(tokens) or math.nan),
            "cost_imbalance": max(costs) / (statistics.mean(costs) or math.nan),
            "tokens_lost": responses - sum(len(r.token_ids) for share in pieces for piece in share for r in piece),
        }

    table, ratios = {}, {}
    for n in options.learners:
        made: dict[str, Any] = {}

        def ours(how: str, n: int = n, made: dict = made) -> None:
            made[how] = grpo.pack_rollouts(rollouts, how, options.pack_length, n, policy.pair_cost), 0

        def theirs(n: int = n, made: dict = made) -> None:
            shares, dropped = next_fit(alone, options.pack_length, n)
            made["next-fit"] = [[[[rollouts[i]] for i in pack] for pack in share] for share in shares], len(dropped)

        sides = {"shared": lambda: ours("shared"), "plain": lambda: ours("plain"), "next-fit": theirs}
        seconds = side_by_side(sides, options.repeat, warm_up=False)
        rows = {how: describe(*made[how], seconds[how]) for how in sides}
        table |= {f"{how}, {n} learners": row for how, row in rows.items()}
        for how in ("shared", "plain"):
            kept, bound = 1 - rows[how]["tokens_lost"] / responses, rows[how]["fewest_packs"] / rows[how]["packs"]
            ratios[f"{how}, {n} learners: share of tokens kept"] = ratio([1.0], [kept], 1.0)
            ratios[f"{how}, {n} learners: fewest packs over packs"] = ratio([1.0], [bound])
        packs = rows["plain"]["packs"], rows["next-fit"]["packs"]
        ratios[f"{n} learners: packs of next-fit over plain"] = ratio([packs[0]], [packs[1]])
    settings = {"sequences": len(rollouts), "response_tokens": responses, "pair_cost": policy.pair_cost}
    return {"settings": settings, "sides": table, "ratios": ratios}


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Tables for people: the sides with what was measured, then the ratios."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)

    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e5 else f"{value:,.0f}"

    sides, ratios = Table(), Table("ratio", "value", "min", "max", "target", "")
    for name in ("", *result["sides"]):
        sides.add_column(name)
    for row in dict.fromkeys(name for side in result["sides"].values() for name in side):
        cells = [side.get(row) for side in result["sides"].values()]
        sides.add_row(row, *("" if cell is None else text(cell) for cell in cells))
    for name, found in result["ratios"].items():
        target = "" if found["target"] is None else f"{found['target']:.2f}"
        met = {None: "", True: "met", False: "MISSED"}[found["met"]]
        ratios.add_row(name, *(f"{found[k]:.3f}" for k in ("value", "min", "max")), target, met)
    for facts in (result["machine"], result["settings"]):
        console.print(", ".join(f"{k} {v}" for k, v in facts.items()), highlight=False, soft_wrap=True)
    console.print(sides, ratios)


BENCHES = {
    "learner": bench_learner,
    "rollout": bench_rollout,
    "sync": bench_sync,
    "pipeline": bench_pipeline,
    "packing": bench_packing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="bench", required=True)
    more = "Further flags go to grpo.py and grpo_fast.py."
    formatter = argparse.ArgumentDefaultsHelpFormatter
    for name, bench in BENCHES.items():
        about = bench.__doc__.splitlines()[0] + ("" if name == "packing" else f" {more}")
        command = commands.add_parser(name, description=about, formatter_class=formatter)
        command.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"), help="directory")
        command.add_argument("--dtype", choices=sorted(utils.DTYPES), default="bfloat16", help="compute dtype")
        command.add_argument("--repeat", type=int, default=3, help="rounds")
        command.add_argument("--json", action="store_true", help="one line of JSON on stdout")
        if name in ("learner", "packing"):
            command.add_argument("--samples", type=int, default=8, help="responses per prompt")
            command.add_argument("--lengths", help="rows of {prompt_tokens, response_tokens}, a prompt's adjacent")
            command.add_argument("--pack_length", type=int, default=2048 if name == "learner" else 4096, help="tokens")
            command.add_argument("--seed", type=int, default=1, help="of lengths and tokens")
        if name == "learner":
            command.add_argument("--prompts", type=int, default=4, help="prompts")
            command.add_argument("--rows", type=int, default=16, help="of a padded micro-batch")
            command.add_argument("--optimizer", action="store_true", help="AdamW's step too, in float32 for us only")
        if name == "packing":
            command.add_argument("--sequences", type=int, default=100_000, help="responses")
            command.add_argument("--learners", type=int, nargs="+", default=[8, 64], help="learner counts")
        if name == "pipeline":
            command.add_argument("--steps", type=int, default=6, help="measured steps of each run")
            command.add_argument("--warmup_steps", type=int, default=2, help="steps before them")
    options, options.more = parser.parse_known_args()
    if options.bench == "packing" and options.more:
        parser.error(f"unknown: {' '.join(options.more)}")
    if not (Path(options.model) / "config.json").exists():
        parser.error(f"--model {options.model} is no model: python scripts/get_smollm2.py or scripts/make_tiny_model.py")
    options.model = str(Path(options.model).resolve())
    warn_of_threads()
    facts = machine(utils.DTYPES[options.dtype])
    result = {"bench": options.bench, "model": options.model, "repeat": options.repeat, "machine": facts}
    result |= BENCHES[options.bench](options)
    print(json.dumps(result)) if options.json else show(result)


if __name__ == "__main__":
    try:
        main()
    except utils.UserError as error:
        raise SystemExit(f"bench.py: {error}") from None
    utils.exit_process()
