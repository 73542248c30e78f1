"""Benchmarks of what passes between the processes of grpo_fast.py: bench.py tokens, tools and loop."""

import dataclasses
import functools
import gc
import itertools
import math
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import grpo
import grpo_fast
import utils
from scripts.parts import addresses
from scripts.proof.benchmarks.common import BenchFlags, Result, in_rounds, ratio, spread, sums_flags
from scripts.proof.benchmarks.scores import gsm8k_records

PROMPT_TOKENS = 105

# --- Learner 0 and an engine in a process of its own ------------------------------------------------------------------


def serve_stub(address: Any, ids: np.ndarray, holds: bool) -> None:
    """In place of an engine: a process that answers every request with the tokens `ids`, a message for each as of long
    responses. With `holds` it never answers."""
    meeting: Any = SimpleNamespace(store=SimpleNamespace(get=lambda _: address.recv().encode()))
    connection = addresses.meet_learner(meeting, 0)
    logprobs = -np.linspace(0, 3, len(ids), dtype=np.float32)
    made = utils.Generation(ids, logprobs, "length", np.zeros(len(ids), np.int32))
    while True:
        message = connection.recv()
        if message[0] == "stop":
            return
        if message[0] == "generate" and not holds:
            for name, _ in message[1]:
                connection.send(("done", [(name, made)], None))


def ignore(*_: Any) -> None:
    pass


def no_group(*_: Any) -> tuple[None, None]:
    """In place of grpo_fast.weights_group: no weights are sent."""
    return None, None


def serve_vllm(address: Any, args: grpo.Args) -> None:
    """grpo_fast.py's engine in a process of its own, with the weights it starts with."""
    store = SimpleNamespace(get=lambda _: address.recv().encode(), set=ignore)
    meeting: Any = SimpleNamespace(store=store)
    roles = grpo_fast.Roles(1, 1, 1, is_learner=False, index=0)
    grpo_fast.join = lambda *_: utils.init_distributed()
    grpo_fast.start_watchdog = ignore
    grpo_fast.weights_group = no_group
    grpo_fast.run_engine(args, roles, meeting)


def connect_engine(serve: Callable[..., None], *arguments: Any, args: grpo.Args) -> Any:
    """grpo_fast.Engines whose only engine is a new process that runs serve(address, *arguments)."""
    here, there = multiprocessing.Pipe()
    spawn = serve is serve_vllm and torch.cuda.is_available()  # CUDA does not survive a fork
    context: Any = multiprocessing.get_context("spawn" if spawn else "fork")
    context.Process(target=serve, args=(there, *arguments), daemon=True).start()
    meeting: Any = SimpleNamespace(store=SimpleNamespace(set=lambda _, value: here.send(value)))
    tokenizer = utils.load_tokenizer(args)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        connections = addresses.meet_engines(meeting, 1, 2)
    watchdog: Any = SimpleNamespace(beat=ignore)
    return grpo_fast.Engines(connections, watchdog, tokenizer, [], args)


# --- tokens -----------------------------------------------------------------------------------------------------------


class Ticker:
    """A thread that wants to run every millisecond, as learner 0's main thread does while it gives work to a GPU.

    Its pause is the time in which it could not run because other threads of this process did. Of two bounds of a pause
    the smaller one counts: the CPU time of all Python threads, and the clock's time without the thread's own wait for a
    processor. On a machine with other jobs neither would do alone: other jobs make the clock's time longer, and gloo's
    threads, which stop nobody, make the process's CPU time longer.
    """

    def __init__(self):
        self.most = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    @staticmethod
    def _now(schedstat: int) -> np.ndarray:
        """CPU seconds of Python's threads, and the clock's seconds less this thread's wait for a processor."""
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident]
        cpu = sum(map(time.clock_gettime, clocks))
        _, nanoseconds_waited, _ = os.pread(schedstat, 64, 0).split()
        return np.array([cpu, time.perf_counter() - int(nanoseconds_waited) / 1e9])

    def _run(self) -> None:
        schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        last = self._now(schedstat)
        while True:
            time.sleep(0.001)
            now = self._now(schedstat)
            self.most = max(self.most, float(min(now - last)))
            last = now

    def longest(self) -> float:
        """Seconds of the longest pause since the last call."""
        time.sleep(0.005)
        most = self.most
        self.most = 0.0
        return most


class Part(NamedTuple):
    cpu: float  # seconds of the process
    pause: float  # seconds


class Parts:
    """Measures the parts of each step by their name."""

    def __init__(self):
        self.ticker = Ticker()
        self.measured: dict[str, list[Part]] = {}

    def measure(self, name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        self.ticker.longest()
        start = time.process_time()
        result = work(*arguments)
        cpu = time.process_time() - start
        self.measured.setdefault(name, []).append(Part(cpu, self.ticker.longest()))
        return result


def join_learners(rank: int, store: str) -> utils.World:
    """The world of two learners, whose rank this process has."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return utils.init_distributed(dist.FileStore(store, 2))


def second_learner(store: str, args: grpo.Args, steps: int) -> None:
    """Learner 1, which takes its packs and does nothing with them."""
    torch.set_num_threads(1)
    world = join_learners(1, store)
    for _ in range(steps):
        grpo_fast.scatter(grpo_fast.StepData(), args, world)


def make_batches(packs: list[list[grpo.Pack]], device: torch.device) -> None:
    for mini_batch in packs:
        for pack in mini_batch:
            grpo.make_batch([pack], device)


def request_to_packs(collector: Any, groups: int) -> Any:
    """Have the collector admit requests until it has admitted so many groups, and wait for the packs of a step."""
    collector.admit(groups, collector.sampler)
    return collector.next()


def run_steps(
    prompts: list[utils.Prompt], response_ids: np.ndarray, args: grpo.Args, steps: int
) -> dict[str, list[Part]]:
    """What each part of the path of a step's tokens took at learner 0 in each step. All responses are the same."""
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        fork = multiprocessing.get_context("fork")
        peer = fork.Process(target=second_learner, args=(store, args, steps), daemon=True)
        peer.start()
        engines = connect_engine(serve_stub, response_ids, False, args=args)
        world = join_learners(0, store)
        parts = Parts()

        def pack(rollouts: list[Any]) -> list[list[grpo.Pack]]:
            return grpo.pack_rollouts(rollouts, "shared", args.pack_length, 2, 1e-4)

        collector = grpo_fast.Collector(engines, prompts, args, grpo.start_state(), pack)
        grpo_fast.collect_garbage_by_hand()
        collector.thread.start()
        for step in range(1, steps + 1):
            # the next step's requests wait until this one's data are there, so that a part has its own tokens alone
            groups = step * args.num_unique_prompts_rollout
            data = parts.measure("request to packs", request_to_packs, collector, groups)
            packs = parts.measure("scatter", grpo_fast.scatter, data, args, world)[0]
            parts.measure("batch", make_batches, packs, world.device)
            parts.measure("staleness", grpo_fast.note_staleness, packs, 1, args, utils.Metrics())
            parts.measure("metrics", utils.note_step, data.groups, data.sampled, args, utils.Metrics())
            parts.measure("garbage", gc.collect)
            collector.account(data)
        engines.tell_all(("stop",))
        peer.join()
        dist.destroy_process_group()
    return parts.measured


def token_args(options: BenchFlags) -> grpo.Args:
    """The flags of a run of as many steps as there are rounds."""
    return grpo.Args(
        model_name_or_path=options.model,
        num_unique_prompts_rollout=options.groups,
        num_samples_per_prompt_rollout=options.samples,
        total_episodes=options.groups * options.samples * (1 + options.repeat),
        response_length=options.response_tokens,
        pack_length=max(16384, 2 * options.response_tokens),
        async_steps=1,
        filter_zero_std_samples=False,
        apply_verifiable_reward=True,
    )


def path_of_tokens(options: BenchFlags) -> dict[str, dict[str, float]]:
    """CPU microseconds a token of learner 0's process, and its longest pause, in each part of the path of a token."""
    args = token_args(options)
    tokenizer = utils.load_tokenizer(args)
    text = "\n".join(record.response for record in gsm8k_records(np.random.default_rng(0), 50))
    ids = tokenizer.encode(text)
    prompt_ids = tuple(np.resize(ids, PROMPT_TOKENS).tolist())
    prompts = [utils.Prompt(i, prompt_ids, text[:300], ("1",), ("gsm8k",)) for i in range(8)]
    response_ids = np.resize(ids, options.response_tokens).astype(np.int32)
    tokens = options.groups * options.samples * options.response_tokens
    table = {}
    for name, (_, *measured) in run_steps(prompts, response_ids, args, 1 + options.repeat).items():
        own_tokens = tokens / 2 if name in ("batch", "staleness") else tokens  # of this learner, or of both
        microseconds = [part.cpu / own_tokens * 1e6 for part in measured]
        table[name] = spread(microseconds) | {"pause": max(part.pause for part in measured)}
    return table


def submit_seconds(options: BenchFlags, outstanding: int) -> list[float]:
    """CPU microseconds to submit a request while so many are outstanding, a group at a time, in each round."""
    args = grpo.Args(model_name_or_path=options.model)
    engines = connect_engine(serve_stub, np.zeros(1), True, args=args)
    request = utils.Request((1,) * PROMPT_TOKENS, 1, 1.0, 2048)
    names = map(str, itertools.count())

    def submit(groups: int) -> None:
        for _ in range(groups):
            engines.submit([grpo_fast.NamedRequest(next(names), request, print) for _ in range(options.samples)])

    submit(math.ceil(outstanding / options.samples))
    microseconds = []
    for _ in range(options.repeat):
        start = time.thread_time()
        submit(100)
        microseconds.append((time.thread_time() - start) / (100 * options.samples) * 1e6)
    engines.tell_all(("stop",))
    return microseconds


def bench_tokens(options: BenchFlags) -> Result:
    """Learner 0's CPU microseconds a token, all threads of its process, and its longest pause: the seconds in which a
    thread that wants to run every millisecond could not run.

    The engine is a process that answers at once, the second learner one that takes its packs. Requests, collector,
    verifier (gsm8k), packer, scatter, batches and metrics are those of a run. Garbage is collected between two steps,
    and is not in the pause of all. --groups of --samples responses of --response_tokens each. Two more sides are
    microseconds a request.
    """
    table = path_of_tokens(options)
    total = {key: sum(part[key] for part in table.values()) for key in ("seconds", "min", "max")}
    pause = max(part["pause"] for name, part in table.items() if name != "garbage")
    table["all"] = total | {"pause": pause}
    few = submit_seconds(options, 100)
    many = submit_seconds(options, 100_000)
    table["submit, 100 outstanding"] = spread(few)
    table["submit, 100,000 outstanding"] = spread(many)
    ratios = {
        "microsecond a token: target over measured": ratio([total["seconds"]], [1.0], 1.0),
        "50 ms: target over longest pause": ratio([pause], [0.05], 1.0),
        "submit: 100 outstanding over 100,000": ratio(many, few, 0.8),
    }
    settings = {"groups": options.groups, "samples": options.samples, "response_tokens": options.response_tokens}
    return Result(settings, table, ratios)


# --- tools ------------------------------------------------------------------------------------------------------------

ENVIRONMENT = """import time

def step(episode):
    if episode.turn == 1:
        time.sleep(episode.config.get("wait", 0))
    return "Go on."
"""


class Ended(NamedTuple):
    """A turn that has ended."""

    time: float
    rollout: int
    tokens: int


def seconds_a_token(engines: Any, prompt: utils.Prompt, args: grpo.Args, calls: int, tool_seconds: float) -> float:
    """Seconds a token until all rollouts are done but the first, whose tool takes `tool_seconds` if they are not 0."""
    rollouts = [utils.Rollout(prompt, i, 0) for i in range(calls)]
    config = {"config": {"wait": tool_seconds}}
    rollouts[0].prompt = dataclasses.replace(prompt, episode=prompt.episode | config)
    requests = []
    for rollout in rollouts:
        request = grpo.make_request(rollout, args)
        requests.append(dataclasses.replace(request, max_tokens=1 + rollout.position % 32))
    turns: list[Ended] = []

    def end_turn(i: int, made: utils.Generation) -> Any:
        turns.append(Ended(time.perf_counter(), i, len(made.token_ids)))
        return grpo.end_turn(rollouts[i], made, engines, args)

    start = time.perf_counter()
    engines.generate(requests, end_turn)
    last = max(turn.time for turn in turns if turn.rollout != 0 or not tool_seconds)
    return (last - start) / sum(turn.tokens for turn in turns if turn.time <= last)


def bench_tools(options: BenchFlags) -> Result:
    """Tokens per second from an engine of grpo_fast.py to learner 0, with --calls rollouts of --turns turns.

    all fast   every tool answers at once
    one slow   one tool takes --tool_seconds; until the other rollouts are done

    A turn has 32 tokens, the first turn of a rollout 1 to 32, so that all rollouts never wait at the same time.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "env.py")
        file.write_text(ENVIRONMENT)
        flags = f"--env_file {file} --max_steps {options.turns - 1} --per_turn_max_tokens 32 --response_length 1024"
        args = utils.parse_args(grpo.Args, [*sums_flags(options), *flags.split()])
        tokenizer = utils.load_tokenizer(args)
        engines = connect_engine(serve_vllm, args, args=args)
        engines.eos_ids = utils.eos_token_ids(args, tokenizer)
        environment = utils.load_environment(args, tokenizer)
        prompt = utils.load_prompts("dataset_mixer_list", args, tokenizer, environment)[0]
        play = functools.partial(seconds_a_token, engines, prompt, args, options.calls)
        sides = {"all fast": lambda: play(0), "one slow": lambda: play(options.tool_seconds)}
        seconds = in_rounds(sides, options.repeat)
        engines.tell_all(("stop",))
    table = {name: spread(values, tokens=1) for name, values in seconds.items()}
    speed = ratio(seconds["one slow"], seconds["all fast"], 1 - 1 / options.calls)
    return Result({}, table, {"one slow": speed})


# --- loop -------------------------------------------------------------------------------------------------------------


class StubLLMEngine:
    """vLLM's LLMEngine without scheduler, cache and model: in a step its own output processor gets a token of each
    running request. `processor_seconds` are the processor's, in `made_up_seconds` the tokens were made up."""

    def __init__(self, length: int):
        from vllm.v1.engine.output_processor import OutputProcessor

        self.processor = OutputProcessor(None, log_stats=False)
        self.names: list[str] = []
        self.label = "0"
        self.tokens_left = length
        self.processor_seconds = 0.0
        self.made_up_seconds = 0.0

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
        self.tokens_left -= 1
        end = None if self.tokens_left else FinishReason.LENGTH
        count = len(self.names)
        logprobs = LogprobsLists(np.full((count, 1), 5), np.full((count, 1), -1.0, np.float32), np.ones(count, int))
        outputs = []
        for i, name in enumerate(self.names):
            own = logprobs.slice_request(i, 1)
            outputs.append(EngineCoreOutput(name, [5], own, finish_reason=end))
        made_up = time.thread_time()
        processed = self.processor.process_outputs(outputs, weight_version=self.label)
        self.made_up_seconds += made_up - start
        self.processor_seconds += time.thread_time() - made_up
        return processed.request_outputs


def engine_loop(running: int, length: int) -> dict[str, float]:
    """CPU seconds of each side of bench_loop in one round."""
    engine: Any = object.__new__(utils.VLLMEngine)
    engine.eos_ids = [0]
    engine.stop_strings = []
    engine.version = 0
    engine.asleep = 0
    engine.loads = 0
    engine.engine = StubLLMEngine(length)
    finished = []
    start = time.thread_time()
    for i in range(running):
        engine.add(str(i), utils.Request((1,) * PROMPT_TOKENS, i, 1.0, length))
    while engine.busy:
        finished += engine.step()
    looped = time.thread_time()
    for made in finished:
        ForkingPickler.dumps(("done", [made], None))
    replied = time.thread_time()
    processor = engine.engine.processor_seconds
    loop = looped - start - processor - engine.engine.made_up_seconds
    return {"vLLM's output": processor, "our loop": loop, "reply": replied - looped}


def bench_loop(options: BenchFlags) -> Result:
    """Microseconds of CPU a token in an engine's process, outside vLLM's scheduler and model: vLLM's output processor,
    our loop around it, and the reply to learner 0. --running requests of --response_tokens."""
    settings = {"running": options.running, "response_tokens": options.response_tokens}
    loop = functools.partial(engine_loop, options.running, options.response_tokens)
    rounds = in_rounds({"loop": loop}, options.repeat)["loop"]
    million_tokens = options.running * options.response_tokens / 1e6
    microseconds: dict[str, list[float]] = {}
    for seconds in rounds:
        for name, passed in (seconds | {"all": sum(seconds.values())}).items():
            microseconds.setdefault(name, []).append(passed / million_tokens)
    table = {name: spread(values) for name, values in microseconds.items()}
    speed = ratio(microseconds["all"], [12.0] * options.repeat, 1.0)
    return Result(settings, table, {"12 microseconds a token over measured": speed})
