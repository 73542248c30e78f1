"""Benchmarks. Each measures its sides by turns, A B A B, and prints the ratios of their median seconds, with the
smallest and the largest of a round. Above 1 we are faster. `source scripts/setup.sh` first.

    python scripts/proof/bench.py learner    forward and backward of packs: ours, and a bare loop
    python scripts/proof/bench.py head       the same of the head: ours, torch's, and Liger's where it is installed
    python scripts/proof/bench.py host       the host's CPU time of a micro-batch, and plain transformers'
    python scripts/proof/bench.py rollout    our engine loop, and LLM.generate on the same engine
    python scripts/proof/bench.py sync       weights into the engine: ours, a memory copy, vLLM's own reload
    python scripts/proof/bench.py trl        whole steps of grpo_fast.py and TRL (bash scripts/peers/setup_trl.sh first)
"""

import dataclasses
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.benchmark import Timer  # noqa: E402

import grpo  # noqa: E402
from scripts.data.make_addition import make_addition  # noqa: E402
from scripts.parts.plan import choose_dtype  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 8  # of a prompt
PACK_LENGTH = 2048


@dataclass(frozen=True)
class BenchFlags:
    bench: tyro.conf.Positional[Literal["learner", "head", "host", "rollout", "sync", "trl"]]
    """The benchmark. A flag that is not listed here goes to grpo.py and grpo_fast.py."""
    model: str = str(ROOT / "models" / "SmolLM2-135M-Instruct")
    """Directory of the model: python scripts/data/get_smollm2.py, or make_tiny_model.py, makes one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute dtype. auto: the faster one on this machine."""
    repeat: int = 3
    """Rounds of A B A B; trl has one."""
    json: bool = False
    """Print one line of JSON."""
    prompts: int = 4
    """learner: groups of eight responses."""
    response_tokens: int = 85
    """learner: tokens of the median response."""
    steps: int = 3
    """trl: measured steps of each run, after two that do not count."""
    grpo_flags: tyro.conf.Suppress[tuple[str, ...]] = ()
    """All flags that are not listed here."""


class Result(NamedTuple):
    seconds: dict[str, list[float]]  # of each side in each round
    compared: list[tuple[str, str]]  # a side of ours, another
    facts: dict[str, Any]


def by_turns(sides: dict[str, Callable[[], Any]], rounds: int, **timer: Any) -> dict[str, list[float]]:
    """Median seconds of a call of each side in each round. timer: what Timer is given beside."""
    options = {"num_threads": torch.get_num_threads()} | timer
    timers = {name: Timer("work()", globals={"work": work}, **options) for name, work in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, clock in timers.items():
            seconds[name].append(clock.blocked_autorange().median)
    return seconds


def ratio(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """How many times faster (or smaller) `ours` is: ratio of the medians, and the range of the rounds' own ratios."""
    rounds = [b / a for a, b in zip(ours, other, strict=True)]
    return {"value": statistics.median(other) / statistics.median(ours), "min": min(rounds), "max": max(rounds)}


def random_rollouts(prompts: int, vocab: int, response_tokens: int) -> list[list[grpo.Rollout]]:
    """Groups of random tokens with the lengths of GSM8K in SmolLM2's tokens, but for the median of the responses.

    Their logs are normal, fitted to the 7473 questions (mean 4.04, standard deviation 0.345), to which the chat
    template adds 30 tokens, and to the answers that people wrote (4.45, a median of 85; 0.434). The engine's logprobs
    are -30, so rho, which is cut at 1, is 1: the gradient is that of a bare policy gradient.
    """
    rng = np.random.default_rng(1)
    longest = PACK_LENGTH // 2 - 30
    questions = np.exp(rng.normal(4.04, 0.345, prompts)).clip(1, longest).astype(int).tolist()
    logs = rng.normal(np.log(response_tokens), 0.434, (prompts, SAMPLES))
    answers = np.exp(logs).clip(1, longest).astype(int).tolist()
    groups = []
    for i, question in enumerate(questions):
        prompt_ids = tuple(rng.integers(0, vocab, 30 + question).tolist())
        prompt = utils.Prompt(i, prompt_ids, "", ("1",), ("gsm8k",))
        group = []
        for j, length in enumerate(answers[i]):
            ids = rng.integers(0, vocab, length).tolist()
            rollout = grpo.Rollout(prompt, i, j, ids, [-30.0] * length, [True] * length, [0] * length, "stop")
            rollout.advantage = 1.0 if j % 2 else -0.5
            group.append(rollout)
        groups.append(group)
    return groups


def bare_pass(model: Any, batches: Sequence[grpo.Batch], tokens: int) -> float:
    """Policy gradient of `tokens` response tokens with a Hugging Face model and nothing of ours but the attention over
    packs: the gradient's norm. Weights and gradients have the compute dtype alone, and all logits are kept."""
    model.set_attn_implementation(utils.PACK_ATTENTION)
    for batch in batches:
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "layout": batch.layout}
        where = batch.response_mask
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state[where]  # (n, H)
        logits = model.get_output_embeddings()(hidden).float()  # (n, V)
        nll = cross_entropy(logits, batch.targets[where], reduction="none")
        (nll * batch.advantages[where] / tokens).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    return float(norm)


def bench_learner(options: BenchFlags) -> Result:
    """Forward and backward of training. Ours makes the packs, keeps float32 weights and computes the logits twice; the
    bare loop gets packs, or the eight responses to a prompt as rows, each with the prompt, padded on the right: kinder
    than TRL, which pads between them and has logits of padding. grad_norm: all compute the same."""
    flags = f"--model_name_or_path {options.model} --model_dtype {options.dtype} --pack_length {PACK_LENGTH}"
    flags += " --per_device_train_batch_size 1 --beta 0 --no_load_ref_policy --max_logprob_gap 0"
    flags += " --rho_clamp_upper_bound 1 --temperature 1"
    args = utils.parse_args(grpo.Args, [*flags.split(), *options.grpo_flags])
    world = utils.init_distributed()
    policy = grpo.load_policy(args, world)
    model = utils.load_causal_lm(args).to(world.device, utils.DTYPES[options.dtype])
    no_step: Any = SimpleNamespace(step=lambda: None, zero_grad=policy.zero_grad, get_last_lr=lambda: [0.0])
    learner = grpo.Learner(policy, None, no_step, no_step)
    groups = random_rollouts(options.prompts, model.config.vocab_size, options.response_tokens)
    rollouts = [rollout for group in groups for rollout in group]

    def pack() -> list[grpo.Batch]:
        packs = grpo.pack_rollouts(rollouts, "shared", args.pack_length, 1, policy.pair_cost)[0]
        return grpo.micro_batches(packs, "shared", args, world.device)

    def update() -> float:
        metrics = utils.Metrics()
        grpo.update(learner, [pack()], args, world, metrics)
        return metrics.reduce(world)["optim/grad_norm"]

    tokens = sum(len(r.token_ids) for r in rollouts)
    packs = pack()
    padded = []
    for i in range(0, len(rollouts), SAMPLES):
        padded.append(grpo.make_batch([[[r]] for r in rollouts[i : i + SAMPLES]], world.device))
    sides = {"ours": update, "bare loop": functools.partial(bare_pass, model, packs, tokens)}
    sides["padded rows"] = functools.partial(bare_pass, model, padded, tokens)
    norms = {name: work() for name, work in sides.items()}
    off = {name: abs(norm / norms["ours"] - 1) for name, norm in norms.items()}
    compared = [("ours", "bare loop"), ("ours", "padded rows")]
    facts = {"packs": len(packs), "grad_norms": norms, "off": off}
    return Result(by_turns(sides, options.repeat), compared, facts)


def whole_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logprobs of the targets by torch."""
    logits = (hidden @ weight.T).float()
    return -cross_entropy(logits, targets, reduction="none")


def our_head(*tensors: torch.Tensor) -> torch.Tensor:
    """The same by ours, compiled."""
    logprobs, _ = grpo.HeadLogprobs.apply(*tensors, 1.0, 3 * grpo.LOGPROB_CHUNK, True)
    return logprobs


def both_ways(head: Callable[..., Any], hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    """[logprobs, the gradients of their sum by hidden states and weights]. Liger's logprobs are their sum."""
    logprobs = head(hidden, weight, targets)
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    return [logprobs.detach(), *gradients]


def relative(truth: torch.Tensor, found: torch.Tensor) -> float:
    """The distance of two tensors, of the first one's norm."""
    distance = (truth.double() - found.double()).norm()
    return float(distance / truth.double().norm())


def heads_of(device: torch.device) -> dict[str, Any]:
    """Functions from hidden states, weights and targets to logprobs."""
    heads: dict[str, Any] = {"ours": our_head, "whole logits": whole_logits}
    heads["whole logits, compiled"] = torch.compile(whole_logits)
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        functional: Any = importlib.import_module("liger_kernel.transformers.functional")
        loss = functools.partial(functional.liger_fused_linear_cross_entropy, reduction="sum")
        heads["Liger"] = lambda *tensors: -loss(*tensors)
    return heads


def bench_head(options: BenchFlags) -> Result:
    """Forward and backward of the head over random hidden states, whose logits have a deviation of 3. off: the largest
    relative distance of logprobs and gradients from those of whole logits in float32."""
    device = utils.init_distributed().device
    on_gpu = device.type == "cuda"
    model = utils.load_causal_lm(grpo.Args(model_name_or_path=options.model))
    weight = model.get_output_embeddings().weight.detach().float().to(device)
    torch.manual_seed(0)
    hidden = torch.randn(8192 if on_gpu else 512, weight.shape[1], device=device)
    hidden *= 3 / weight.norm(dim=1).mean()
    targets = torch.randint(len(weight), hidden.shape[:1], device=device)
    inputs = [values.to(utils.DTYPES[options.dtype]).requires_grad_() for values in (hidden, weight)]
    exact = [values.detach().float().requires_grad_() for values in inputs]
    truth = both_ways(whole_logits, *exact, targets)
    off = {}
    gib = {}
    sides = {}
    for name, head in heads_of(device).items():
        sides[name] = functools.partial(both_ways, head, *inputs, targets)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        pairs = zip(truth, sides[name](), strict=True)
        off[name] = max(relative(a, b) for a, b in pairs if a.shape == b.shape)
        if on_gpu:
            gib[name] = torch.cuda.max_memory_allocated() / 2**30
    compared = [("ours", name) for name in sides if name != "ours"]
    return Result(by_turns(sides, options.repeat), compared, {"off": off, "peak_gib": gib})


def narrow_model(directory: str) -> Any:
    """A random Qwen2 of 24 narrow layers, as Qwen2.5-0.5B has: as many operations as one of any width, and no work in
    them. Eight layers are sharded together, as in utils.GROUP_BYTES."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("qwen2", num_hidden_layers=24, vocab_size=256, tie_word_embeddings=True, **shape)
    model: Any = AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(directory)
    utils.GROUP_BYTES = 2 * 8 * sum(p.numel() for p in model.base_model.layers[0].parameters())
    return model.train()


def short_batch(device: torch.device) -> grpo.Batch:
    """A pack of three tokens. It is said to be of 64 rollouts with the prompts of GSM8K, which only the host sees."""
    prompt = utils.Prompt(0, (5, 6), "", ("1",), ("gsm8k",))
    piece = []
    for j in (0, 1):
        piece.append(grpo.Rollout(prompt, 0, j, [7 + j], [-5.0], [True], [0], "stop", advantage=1.0 - j))
    batch = grpo.make_batch([[piece]], device)
    long = dataclasses.replace(prompt, token_ids=tuple(range(105)))
    rollouts = [dataclasses.replace(r, prompt=long) for r in piece * 32]
    batch.rollouts = np.array(rollouts, object)
    return batch


def bench_host(options: BenchFlags) -> Result:
    """The host's CPU time for forward and backward of a micro-batch of three tokens, on one thread: no GPU is faster.
    bfloat16, --deepspeed_stage 3, rank 0 of 8, whose other ranks are not there: collectives return at once.
    recomputed: with --gradient_checkpointing, and with transformers' own. Flags of grpo.py change ours."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    world = utils.World(0, 0, 8, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    ids = torch.tensor([[5, 6, 7]], device=world.device)

    def update(policy: grpo.Policy, batch: grpo.Batch, args: grpo.Args) -> None:
        grpo.accumulate_gradient(policy, [batch], 1, args, world, utils.Metrics())

    def plain(model: Any) -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    sides = {}
    for name, flag in (("plain", "--no_gradient_checkpointing"), ("recomputed", "--gradient_checkpointing")):
        with tempfile.TemporaryDirectory() as directory:
            model = narrow_model(directory).to(world.device)
            flags = f"--model_name_or_path {directory} --model_dtype bfloat16 --no_load_ref_policy --beta 0 {flag}"
            args = utils.parse_args(grpo.Args, [*flags.split(), "--deepspeed_stage", "3", *options.grpo_flags])
            policy = grpo.load_policy(args, world)
        if name == "recomputed":
            model.gradient_checkpointing_enable()
        sides[f"ours, {name}"] = functools.partial(update, policy, short_batch(world.device), args)
        sides[f"transformers, {name}"] = functools.partial(plain, model)
    seconds = by_turns(sides, options.repeat, num_threads=1, timer=time.process_time)
    return Result(seconds, [(f"ours, {how}", f"transformers, {how}") for how in ("plain", "recomputed")], {})


def sums_flags(options: BenchFlags) -> list[str]:
    """The flags of a run on "What is 18 + 2? Give only the number.", then those of grpo.py that were given."""
    data = make_addition(ROOT / "data" / "addition2", digits=2)
    flags = f"""--dataset_mixer_list {data}/train.jsonl 1.0 --model_name_or_path {options.model}
        --model_dtype {options.dtype} --num_unique_prompts_rollout 8 --num_samples_per_prompt_rollout 8
        --max_prompt_token_length 64 --response_length 64 --pack_length 2048 --temperature 1.0 --learning_rate 1e-5
        --lr_scheduler_type constant --beta 0.0 --no_load_ref_policy --save_freq -1 --local_eval_every -1
        --vllm_enforce_eager --vllm_enable_prefix_caching --vllm_gpu_memory_utilization 0.4 --async_steps 0"""
    return [*flags.split(), *options.grpo_flags]


def generate_by_vllm(engine: Any, requests: Sequence[utils.Request]) -> list[list[int]]:
    """Responses to requests by LLM.generate of our engine's own LLM, which makes as much of them as we have it make."""
    from vllm import SamplingParams

    prompts = []
    sampling = []
    for request in requests:
        options = dict(vars(request))  # seed, temperature, ...: vLLM's names
        del options["stop"]
        prompts.append({"prompt_token_ids": list(options.pop("prompt_ids"))})
        options |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        sampling.append(SamplingParams(**options, stop_token_ids=engine.eos_ids))
    engine.llm.reset_prefix_cache()
    outputs = engine.llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def bench_rollout(options: BenchFlags) -> Result:
    """A step's generation: engine.generate and plain LLM.generate on the same engine with the same requests."""
    args = utils.parse_args(grpo.Args, sums_flags(options))
    tokenizer = utils.load_tokenizer(args)
    engine = utils.VLLMEngine(args, tokenizer, utils.init_distributed(), 64)
    prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    requests = []
    for i in range(args.num_unique_prompts_rollout):
        prompt = grpo.prompt_at(prompts, i, args.seed)
        for j in range(args.num_samples_per_prompt_rollout):
            requests.append(grpo.make_request(utils.Rollout(prompt, i, j), args))

    def generate() -> list[list[int]]:
        engine.llm.reset_prefix_cache()
        return [made.token_ids.tolist() for made in engine.generate(requests)]

    sides = {"ours": generate, "LLM.generate": functools.partial(generate_by_vllm, engine, requests)}
    ours, theirs = [work() for work in sides.values()]
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    facts = {"requests": len(requests), "tokens": sum(map(len, ours)), "share_of_same_responses": statistics.mean(same)}
    return Result(by_turns(sides, options.repeat), [("ours", "LLM.generate")], facts)


def bench_sync(options: BenchFlags) -> Result:
    """The learner's weights into the engine of the same process, against three memory copies and vLLM's own reload."""
    args = utils.parse_args(grpo.Args, sums_flags(options))
    world = utils.init_distributed()
    policy = grpo.load_policy(args, world)
    engine = utils.VLLMEngine(args, utils.load_tokenizer(args), world, 64)
    full_weights = functools.partial(utils.full_weights, policy, utils.DTYPES[args.model_dtype])
    weights = [(name, tensor.clone()) for name, tensor in full_weights()]
    buffers = [torch.empty_like(tensor) for _, tensor in weights]
    sides = {
        "ours": lambda: engine.load_weights(full_weights(), version=1),
        "memory copy": lambda: [buffer.copy_(tensor) for buffer, (_, tensor) in zip(buffers, weights, strict=True)],
        "vLLM's reload": lambda: engine.worker.reload_weights(weights_iterator=iter(weights)),
    }
    seconds = by_turns(sides, options.repeat)
    rounds = zip(seconds["memory copy"], seconds["vLLM's reload"], strict=True)
    seconds["3 copies + vLLM's reload"] = [3 * copy + reload for copy, reload in rounds]
    return Result(seconds, [("ours", "3 copies + vLLM's reload")], {"bytes": sum(buffer.nbytes for buffer in buffers)})


def run_ours(options: BenchFlags, more: Sequence[str]) -> dict[str, float]:
    """Means over the measured steps of a run of grpo_fast.py."""
    with tempfile.TemporaryDirectory() as directory:
        run = f"--exp_name bench --output_dir {directory} --total_episodes {64 * (2 + options.steps)}".split()
        subprocess.run([sys.executable, "grpo_fast.py", *sums_flags(options), *run, *more], cwd=ROOT, check=True)
        lines = Path(directory, "bench", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][2:]
    names = {"seconds": "time/total", "generation": "time/generation", "tokens": "val/sequence_lengths"}
    column = {name: statistics.mean(step.get(metric) or 0.0 for step in steps) for name, metric in names.items()}
    return column | {"tokens": 64 * column["tokens"]}


def run_trl(options: BenchFlags, mode: str) -> dict[str, float]:
    """The same of TRL's GRPOTrainer in its own environment."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    utils.need(python.exists(), "TRL is not installed: bash scripts/peers/setup_trl.sh")
    autocast = "bfloat16" if options.dtype == "bfloat16" else "none"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "steps.json"
        line = [*sums_flags(options), "--total_episodes", str(64 * (2 + options.steps))]
        args = utils.parse_args(grpo.Args, line)
        settings = json.dumps(dataclasses.asdict(args))
        Path(directory, "args.json").write_text(settings)
        flags = f"scripts/peers/trl_side.py --mode {mode} --like {directory} --autocast {autocast} --json {path}"
        subprocess.run([python, *flags.split()], cwd=ROOT, check=True)
        steps = json.loads(path.read_text())[2:]
    return {name: statistics.mean(step[name] for step in steps) for name in ("seconds", "generation", "tokens")}


def bench_trl(options: BenchFlags) -> Result:
    """Mean seconds of a step: grpo_fast.py and TRL, 8 prompts x 8 samples, the same model, data and settings, one run
    each; on a GPU also TRL with vLLM. Most groups have no gradient. We skip them and TRL trains on them; "all groups"
    trains on them too."""
    ours = {"ours": [], "ours, all groups": ["--no_filter_zero_std_samples"]}
    runs = {name: run_ours(options, flags) for name, flags in ours.items()}
    runs |= {f"TRL {mode}": run_trl(options, mode) for mode in ["stock", "vllm"][: 1 + torch.cuda.is_available()]}
    compared = [(name, other) for other in runs if other not in ours for name in ours]
    return Result({name: [run["seconds"]] for name, run in runs.items()}, compared, runs)


def main() -> None:
    options, others = tyro.cli(BenchFlags, description=__doc__, return_unknown_args=True, use_underscores=True)
    dtype, why = choose_dtype(grpo.Args(model_dtype=options.dtype))
    model = str(Path(options.model).resolve())
    options = dataclasses.replace(options, model=model, dtype=dtype, grpo_flags=tuple(others))
    machine = {"cores": len(utils.ALL_CORES), "load": os.getloadavg()[0], "torch": torch.__version__, "dtype": dtype}
    machine |= {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "LD_PRELOAD")}
    result = globals()[f"bench_{options.bench}"](options)
    table = {}
    for name, seconds in result.seconds.items():
        table[name] = {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    for ours, other in result.compared:
        table[f"{ours} over {other}"] = ratio(result.seconds[ours], result.seconds[other])
    if options.json:
        print(json.dumps({"bench": options.bench, "machine": machine, "facts": result.facts, "table": table}))
        return
    print(machine, why, *(f"{name}: {value}" for name, value in result.facts.items()), sep="\n")
    for name, figures in table.items():
        print(f"{name:45}", *(f"{figure} {value:.4g}" for figure, value in figures.items()))


if __name__ == "__main__":
    try:
        main()
    except utils.UserError as error:
        raise SystemExit(f"bench.py: {error}") from None
    utils.exit_process()
