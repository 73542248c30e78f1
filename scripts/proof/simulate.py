"""Play a run of grpo_fast.py on any number of GPUs: its own code with clocks for models, in virtual time.

    python scripts/proof/simulate.py --num_learners_per_node 6 --vllm_num_engines 2 \\
        --model_name_or_path Qwen2.5-7B --num_unique_prompts_rollout 1024 --num_samples_per_prompt_rollout 5
    python scripts/proof/simulate.py --what plan --gpus 64 ...  the best numbers of learners and engines, and why
    python scripts/proof/simulate.py --what fit --run RUN     clocks fitted to a run's metrics.jsonl; then it is played
    python scripts/proof/simulate.py --what records           verl's asynchronous settings on 128 H20, as published
    python scripts/proof/simulate.py --what dropping ...      admission against dropping old rollouts, the same prompts
    python scripts/proof/simulate.py --what scale --gpus 512 ...  8, 64, ... GPUs, with as many more prompts

Flags are those of grpo_fast.py, and a few of its own. Real: all of grpo_fast's threads and messages: run_engine with
its Inbox, Engines, Collector with its admission, accounting and packer, Sender, send_weights and the plan of buckets.
Clocks: an engine decodes in a time that depends on its batch and its cache, a learner updates in a time that depends on
its packs, weights take a time that depends on their bytes (proof/roofline.py; with `fit`, a run's own metrics). One
thread runs at a time and time stands still meanwhile; when all wait, it jumps to the next event. What Python at
learner 0 really took is charged (--host_speed 0: nothing is, and the same flags give the same figures to the last bit).

Not played: evaluation, checkpoints, verifiers, failures, transformers' batches, which end together; vLLM keeps a place
in its cache for the whole of a response, where it would preempt. Adapters, several turns and sequence parallelism are
refused. No clock has been held against a GPU yet.
"""

import contextlib
import functools
import heapq
import itertools
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import numpy as np
import torch

import grpo
import grpo_fast
from scripts.parts.plan import ESTIMATED_BY
from scripts.proof import memory, roofline

BARRIER_S = 0.01  # of a step outside the update, believed
MESSAGE_S = 2e-4  # a message over a local socket, believed
LOAD_BYTES = 4.2e9  # a second of vLLM's reload: 0.5B in 0.24 s, 4B in 1.9 s (vLLM issue 48382)
ENGINE_STEP_S = 2e-3  # of vLLM's Python and launches for a decoding step, believed
ENGINE_TOKEN_S = 29e-6  # of vLLM's Python a token, beside the GPU: half of the 58 us measured on 2 slow cores, believed
HOST_TOKEN_S = 0.4e-6  # of learner 0 a token, its text and judgement included: bench.py tokens, on 2 slow cores
BATCH_TOKEN_S = 0.55e-6  # of a learner a token of its own: make_batch 0.05, ids of the block mask 0.35 to 0.6
IDLE = "time/generation_waiting_for_trainer"
SAMPLE_BYTES = 13  # of a response token at learner 0, in arrays: id 4, logprob 4, mask 1, version 4


# --- Virtual time -----------------------------------------------------------------------------------------------------


class Over(SystemExit):
    """Ends the threads that wait when a simulation is over; threading says nothing about it."""


def shut() -> Any:
    """A lock that somebody holds: who asks for it waits until it is released."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Task:
    """A thread of grpo_fast: it runs until it waits."""

    host: bool  # of learner 0, whose Python is charged
    go: Any = field(default_factory=shut)
    turn: int = 0  # how often it went on: who wakes it says which wait is meant
    began: float = 0.0  # processor seconds of its thread when it went on
    done: bool = False
    error: BaseException | None = None


Waiting = list[tuple[Task, int]]


class Time:
    """Discrete events, and threads of which one runs at a time."""

    def __init__(self, host_speed: float):
        self.now, self.host_speed = 0.0, host_speed
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.awake: deque[tuple[Task, int]] = deque()
        self.tasks: list[Task] = []
        self.above = Task(False)  # `run`, which goes on when all is over
        self.current = self.above
        self.host_free, self.host_seconds = 0.0, 0.0  # learner 0's Python: one thread at a time
        self.over = False

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), call))

    def charge(self, seconds: float) -> float:
        """Python at learner 0 works for so long; when it is free again."""
        self.host_seconds += seconds
        self.host_free = max(self.host_free, self.now) + self.host_speed * seconds
        return self.host_free

    def pause(self, waiting: Waiting | None = None, until: float = math.inf) -> None:
        """Block the running task until that time, or until `wake(waiting)`."""
        task, me = self.current, (self.current, self.current.turn)
        if waiting is not None:
            waiting.append(me)
        if until < math.inf:
            self.at(until, lambda: self.awake.append(me))
        following = self.following()
        if following is not task:
            following.go.release()
            task.go.acquire()
        task.began = time.thread_time()
        if self.over:
            raise Over

    def following(self) -> Task:
        """Whose turn it is; time goes on until there is one. The thread that waits finds out itself and lets that one
        go on: with thousands of engines switches of threads are most of what a play takes."""
        while not self.over and not self.current.error and not self.tasks[0].done and (self.awake or self.events):
            if self.awake:
                task, turn = self.awake.popleft()
                if task.turn == turn:  # else it has gone on for another reason
                    self.current, task.turn = task, turn + 1
                    return task
            else:
                self.now, _, call = heapq.heappop(self.events)
                call()
        return self.above

    def pay(self) -> None:
        """The running task's Python, if it is learner 0's, has taken time."""
        if self.current.host and self.host_speed:
            free = self.charge(time.thread_time() - self.current.began)
            if free > self.now:
                self.pause(until=free)

    def wait(self, ready: Callable[[], bool], waiting: Waiting) -> None:
        """Block the running task until ready(), which is asked again at each `wake(waiting)`."""
        self.pay()
        while not ready():
            self.pause(waiting)

    def sleep(self, seconds: float) -> None:
        self.pay()
        if seconds > 0:
            self.pause(until=self.now + seconds)

    def wake(self, waiting: Waiting) -> None:
        self.awake.extend(waiting)
        waiting.clear()

    def spawn(self, target: Callable, *args: Any, host: bool = True) -> Task:
        """A task that will run target(*args)."""
        task = Task(host)

        def body() -> None:
            task.go.acquire()
            task.began = time.thread_time()
            try:
                if not self.over:
                    target(*args)
            except BaseException as error:  # `run` raises it
                task.error = error
            task.done = True
            self.following().go.release()

        threading.Thread(target=body, daemon=True).start()
        self.tasks.append(task)
        self.awake.append((task, 0))
        return task

    def run(self, target: Callable[[], None]) -> None:
        """Run target(), and what it starts, until it returns; raises what any of them raised."""
        main = self.spawn(target)
        try:
            self.following().go.release()
            self.above.go.acquire()
            for task in self.tasks:
                if task.error:
                    raise task.error
            if not main.done:
                raise RuntimeError("all wait and nothing will happen: a clock has a hole")
        finally:
            self.over = True
            for task in self.tasks:
                while not task.done:
                    self.current = task
                    task.go.release()
                    self.above.go.acquire()

    def modules(self) -> dict[str, Any]:
        """Stand-ins for the modules that grpo_fast.py waits with."""
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=lambda: self.now)

        def thread(target: Callable, args: tuple = (), daemon: bool = True) -> Thread:
            return Thread(lambda: self.spawn(target, *args))

        # nobody waits while holding a lock
        threads = SimpleNamespace(Thread=thread, Condition=lambda: Condition(self), Lock=contextlib.nullcontext)
        queues = SimpleNamespace(Queue=lambda maxsize: Queue(self, maxsize))
        return {"time": clock, "threading": threads, "queue": queues}


@dataclass
class Thread:
    spawn: Callable[[], Task]
    ident: int | None = None  # of one that was started

    def start(self) -> None:
        self.ident = id(self.spawn())


class Condition(contextlib.nullcontext):
    def __init__(self, simulated: Time):
        super().__init__()
        self.time, self.waiting, self.told = simulated, [], 0

    def wait(self, timeout: float) -> None:
        told = self.told
        self.time.pay()  # meanwhile others go on
        if self.told == told:
            self.time.pause(self.waiting)

    def notify_all(self) -> None:
        self.told += 1
        self.time.wake(self.waiting)


class Queue:
    def __init__(self, simulated: Time, maxsize: float):
        self.time, self.maxsize, self.items, self.waiting = simulated, maxsize, deque(), []

    def put(self, item: Any) -> None:
        self.time.wait(lambda: len(self.items) < self.maxsize, self.waiting)
        self.items.append(item)
        self.time.wake(self.waiting)

    def get(self) -> Any:
        self.time.wait(lambda: bool(self.items), self.waiting)
        self.time.wake(self.waiting)
        return self.items.popleft()


class End:
    """One end of a connection: what is sent reaches the other end MESSAGE_S later."""

    def __init__(self, simulated: Time, other: "End | None" = None):
        self.time, self.inbox, self.waiting = simulated, deque(), []
        self.other = other or End(simulated, self)

    def send(self, message: Any) -> None:
        when = self.time.now + MESSAGE_S
        if isinstance(message, tuple) and isinstance(message[-1], grpo_fast.Clock):  # of an engine, as it is now
            message = (*message[:-1], replace(message[-1]))
            tokens = sum(len(made.token_ids) for _, made in message[1]) if message[0] == "done" else 0
            when = max(when, self.time.charge(HOST_TOKEN_S * tokens) if self.time.host_speed else 0.0)
        self.time.at(when, lambda: self.other.arrive(message))

    def arrive(self, message: Any) -> None:
        self.inbox.append(message)
        self.time.wake(self.waiting)

    def poll(self, seconds: float) -> bool:
        """As a connection's, but whoever has nothing else to do waits until there is something."""
        if seconds:
            self.time.wait(lambda: bool(self.inbox), self.waiting)
        return bool(self.inbox)

    def recv(self) -> Any:
        self.poll(math.inf)
        return self.inbox.popleft()


class Group:
    """The process group of the weights: a broadcast begins when learner 0 and all engines are there."""

    def __init__(self, simulated: Time, size: int, wire: float):
        self.time, self.size, self.wire = simulated, size, wire
        self.here, self.made, self.bytes, self.waiting = 0, 0, 0, []

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> "Group":
        made, self.here = self.made, self.here + 1
        self.bytes = sum(t.nbytes for t in tensors) or self.bytes  # an engine brings nothing
        if self.here == self.size:
            self.here = 0
            self.time.at(self.time.now + self.wire * self.bytes, self.end)
        self.time.wait(lambda: self.made > made, self.waiting)
        return self

    def end(self) -> None:
        self.made += 1
        self.time.wake(self.waiting)

    def wait(self) -> None:
        pass


# --- Flags ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulationFlags:
    """What is played."""

    what: Literal["run", "plan", "scale", "dropping", "fit", "records"] = "run"
    """See above."""
    steps: int = 6
    """Training steps; means leave out the first."""
    gpus: int = 8
    """plan: GPUs to divide; scale: the most that are played."""
    gpu: Literal["h100", "h200", "h20", "a100", "4090"] = "h100"
    """Data sheet of scripts/proof/roofline.py."""
    length_mean: float = 232.0
    """Tokens of a response, before the cut at response_length: a log-normal; Qwen2.5-7B's on GSM8K."""
    length_sigma: float = 0.5
    """Standard deviation of its logarithm; half of the variance lies between prompts."""
    lengths: str = ""
    """A file with a number a line, or a run's rollouts.jsonl, to draw lengths from instead."""
    prompt_tokens: int = 105
    """Tokens of a prompt; GSM8K's."""
    solve_rate: float = 0.5
    """Mean share of right responses; prompts differ in it (a beta distribution of weight 2)."""
    host_speed: float = 1.0
    """What a second of Python on this machine takes at learner 0: 0.5 for a host twice as fast, 0 for none."""
    run: str = ""
    """fit: directory of a run of grpo_fast.py."""


@dataclass(frozen=True)
class Simulation(SimulationFlags, grpo.Args):
    """Flags of grpo_fast.py with the defaults of the README's run on 8 GPUs, and a few of the simulation's own."""

    model_name_or_path: str = "Qwen2.5-7B"
    """A model of scripts/proof/memory.py, by any name that holds its name there, or a directory with a config.json."""
    num_unique_prompts_rollout: int = 1024
    num_samples_per_prompt_rollout: int = 5
    num_mini_batches: int = 4
    max_prompt_token_length: int = 512
    response_length: int = 1024
    pack_length: int = 6144
    deepspeed_stage: Literal[0, 2, 3] = 3
    gradient_checkpointing: bool = True
    num_learners_per_node: list[int] = field(default_factory=lambda: [4])
    vllm_num_engines: int = 4


Simulation.__doc__ = __doc__  # of --help


# --- What is sampled --------------------------------------------------------------------------------------------------


class Light(utils.Rollout):
    """A rollout of one turn, which keeps what the engine gives: arrays without memory."""

    def append(self, generation: utils.Generation) -> None:
        vars(self).update(vars(generation), mask=np.broadcast_to(True, len(generation.token_ids)))


@dataclass(frozen=True, eq=False)
class Drawn:
    """Prompts and responses, functions of (seed, position, sample): two policies of admission meet the same ones."""

    args: Any
    known: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)  # of a run: (tokens, score)
    prompts: dict[int, int] = field(default_factory=dict)  # of a run: position -> tokens
    lengths: tuple[int, ...] = ()  # those of a file, to draw from

    @functools.cache  # noqa: B019 (as long as the play)
    def group(self, position: int) -> list[tuple[int, float]]:
        """(tokens, score) of each sample."""
        args, size = self.args, self.args.num_samples_per_prompt_rollout
        if (position, 0) in self.known:
            return [self.known[position, j] for j in range(size)]
        rng = np.random.default_rng((args.seed, position))
        if self.lengths:
            tokens = rng.choice(self.lengths, size).astype(float)
        else:  # a log-normal of the mean asked for; half of the variance lies between prompts
            sigma = args.length_sigma
            z = (rng.standard_normal() + rng.standard_normal(size)) / math.sqrt(2)
            tokens = np.exp(math.log(args.length_mean) - sigma**2 / 2 + sigma * z)
        tokens = np.clip(np.rint(tokens), 1, args.response_length).astype(int)
        rate = rng.beta(2 * args.solve_rate, 2 * (1 - args.solve_rate)) if 0 < args.solve_rate < 1 else args.solve_rate
        scores = (rng.random(size) < rate).astype(float)
        return list(zip(tokens.tolist(), scores.tolist(), strict=True))


def drawn_of(args: Any) -> Drawn:
    """Lengths and scores as the flags say."""
    lines = Path(args.lengths).read_text().split("\n") if args.lengths else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return Drawn(args, lengths=tuple(len(r["token_ids"]) if isinstance(r, dict) else int(r) for r in rows))


# --- Clocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clocks:
    """Seconds. A decoding step of a batch of b with c tokens in the cache takes base + each * b + cached * c, or
    floor + floor_each * b (the host's, beside the GPU) where that is more."""

    base: float
    each: float
    cached: float
    floor: float = 0.0
    floor_each: float = 0.0
    prefill: float = 0.0  # a prompt token
    update: Callable[[list[list[list[Any]]], int], float] = lambda packs, step: 0.0  # packs of mini-batches of learners
    gather: float = 0.0  # a byte of weights
    wire: float = 0.0  # a byte
    load: float = 0.0  # a byte
    rest: float = BARRIER_S  # of a step
    reward: float = 0.0  # of the collector, a rollout

    def steps(self, batch: int, cached: float, count: float) -> float:
        """Seconds of `count` steps: the cache grows by a token a response and step."""
        gpu = (self.base + self.each * batch + self.cached * cached) * count + self.cached * batch * count**2 / 2
        return max(gpu, (self.floor + self.floor_each * batch) * count)

    def count(self, batch: int, cached: float, seconds: float) -> float:
        """Steps that fit in `seconds`."""
        linear, square = self.base + self.each * batch + self.cached * cached, self.cached * batch / 2
        gpu = seconds / linear
        if square > 0:
            gpu = 2 * seconds / (linear + math.sqrt(linear**2 + 4 * square * seconds))
        host = self.floor + self.floor_each * batch
        return min(gpu, seconds / host) if host else gpu


def paper_clocks(args: Any, policy: grpo.Policy) -> Clocks:
    """Clocks of roofline.py's arithmetic: data sheets times believed efficiencies."""
    shape, gpu, tp = roofline.shape_of(args.model_name_or_path), roofline.GPUS[args.gpu], args.vllm_tensor_parallel_size
    learners, efficiency = sum(args.num_learners_per_node), roofline.EFFICIENCY
    recompute = args.gradient_checkpointing_part if args.gradient_checkpointing else "none"
    way = roofline.Way(args.compile_layers, True, recompute, args.deepspeed_stage)
    bandwidth = gpu.bandwidth * efficiency["bytes"] * tp
    products = 2 * (shape.matrices + shape.head) / gpu.flops / efficiency["decode products"] / tp
    several = args.num_epochs * args.num_mini_batches > 1 or args.kl_in_reward
    extra = int(args.load_ref_policy) + int(several)  # forwards for reference and old logprobs

    def pack_seconds(pack: Any) -> float:
        tokens, pairs = sum(map(grpo.piece_length, pack)), sum(map(grpo.attended_pairs, pack))
        responses = sum(len(r.token_ids) for piece in pack for r in piece)

        def one(update: bool) -> float:
            return sum(roofline.seconds(shape, gpu, way, learners, tokens, pairs, responses, update).values())

        return args.num_epochs * one(True) + extra * one(False) + BATCH_TOKEN_S * tokens

    def update(mini_batches: list[list[list[Any]]], step: int) -> float:
        total = 0.0
        for of_learners in mini_batches:  # learners gather weights in step: each round takes as long as its longest
            rounds = itertools.zip_longest(*([pack_seconds(p) for p in packs] for packs in of_learners), fillvalue=0.0)
            total += sum(map(max, rounds)) + args.num_epochs * roofline.optimizer_seconds(shape, gpu, learners)
        return total

    nodes = (learners + args.vllm_num_engines * tp) > 8
    link = (gpu.network if nodes else gpu.link) * efficiency["link"]
    return Clocks(
        base=2 * shape.weights / bandwidth,  # every weight is read; the products of a batch take the longer of both
        each=products,
        cached=shape.token_bytes / bandwidth,
        floor=ENGINE_STEP_S,
        floor_each=ENGINE_TOKEN_S,
        prefill=2 * shape.matrices / gpu.flops / efficiency["products"] / tp,
        update=update,
        gather=1 / link,
        wire=1 / link,
        load=1 / LOAD_BYTES / tp,
    )


# --- A run ------------------------------------------------------------------------------------------------------------


class Engine:
    """What grpo_fast.run_engine drives, with a clock for the model. A step is all decoding steps until a response ends
    or a message comes."""

    def __init__(self, play: "Play", messages: End, num_requests: int):
        self.play, self.time, self.clocks, self.messages = play, play.time, play.clocks, messages
        self.seats = min(num_requests, 1024)
        self.queued: deque[tuple[str, int]] = deque()  # (name, tokens of the prompt)
        self.running: list[tuple[int, str, int, int, int]] = []  # (last step, name, prompt, first step, tokens)
        self.steps, self.cached, self.reserved = 0, 0, 0
        self.versions: list[tuple[int, int]] = []  # (steps made before, version)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.queued)

    def add(self, name: str, request: utils.Request) -> None:
        self.queued.append((name, len(request.prompt_ids)))

    def admit(self) -> None:
        """Take queued requests into the batch where there is room, and prefill them."""
        tokens = 0
        while self.queued and len(self.running) < self.seats:
            name, prompt = self.queued[0]
            position, sample = map(int, name.split("/"))
            length = self.play.drawn.group(position)[sample][0]
            if self.running and self.reserved + prompt + length > self.play.cache_tokens:
                break
            self.queued.popleft()
            heapq.heappush(self.running, (self.steps + length, name, prompt, self.steps, length))
            self.reserved += prompt + length
            self.cached += prompt
            tokens += prompt
        self.time.sleep(self.clocks.prefill * tokens)

    def step(self) -> list[tuple[str, Any]]:
        self.admit()
        batch, cached, began = len(self.running), self.cached, self.time.now
        count = self.running[0][0] - self.steps
        self.time.pause(self.messages.waiting, began + self.clocks.steps(batch, cached, count))
        made = self.clocks.count(batch, cached, self.time.now - began)
        count = min(count, math.ceil(made - 1e-6))  # the step under way is made to its end
        self.time.sleep(began + self.clocks.steps(batch, cached, count) - self.time.now)
        self.steps += count
        self.cached += count * batch
        finished = []
        while self.running and self.running[0][0] <= self.steps:
            _, name, prompt, first, tokens = heapq.heappop(self.running)
            self.cached -= prompt + self.steps - first
            self.reserved -= prompt + tokens
            reason = "stop" if tokens < self.play.args.response_length else "length"
            begins, versions = np.array(self.versions, np.int32).T
            made = versions[np.searchsorted(begins, np.arange(first, first + tokens), side="right") - 1]
            ids, logprobs = (np.broadcast_to(dtype(0), tokens) for dtype in (np.int32, np.float32))
            finished.append((name, utils.Generation(ids, logprobs, reason, made)))
        return finished

    def load_weights(self, buckets: Iterator[int], version: int) -> None:
        for size in buckets:
            self.time.sleep(self.clocks.load * size)
        self.versions = [*self.versions[-64:], (self.steps, version)]


class Play:
    """A run of `args.steps` steps; `rows` has each step's metrics under their names in metrics.jsonl."""

    def __init__(self, args: Any, clocks: Clocks | None = None, drawn: Drawn | None = None, kind: Any = None):
        for name, plain in (("lora_rank", 0), ("sequence_parallel_size", 1), ("env_file", ""), ("tools", [])):
            utils.need(getattr(args, name) == plain, f"--{name} {getattr(args, name)}: is not played, leave it out")
        batch = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
        whole = args.steps + 2 * (args.async_steps + 1)  # see `mean`
        dtype = "float32" if args.model_dtype == "float32" else "bfloat16"
        self.args = args = replace(args, total_episodes=math.ceil(whole) * batch, model_dtype=dtype)
        self.time = Time(args.host_speed)
        self.policy = meta_policy(args.model_name_or_path)
        self.clocks = clocks = clocks or paper_clocks(args, self.policy)
        self.drawn = drawn or drawn_of(args)
        self.dtype = utils.DTYPES[dtype]
        self.manifest = grpo_fast.plan_weights(self.policy, self.dtype)
        self.cache_tokens = cache_tokens(args)
        self.kind = kind or grpo_fast.Collector
        self.ends = [End(self.time) for _ in range(args.vllm_num_engines)]  # of the engines
        self.rows: list[dict[str, float]] = []
        self.trained: list[Any] = []
        self.seconds = 0.0  # of this machine
        self.collector: Any = None

    def run(self) -> "Play":
        args, engines, meta = self.args, self.args.vllm_num_engines, torch.device("meta")
        began, learners, tp = time.perf_counter(), sum(args.num_learners_per_node), args.vllm_tensor_parallel_size
        modules, group = self.time.modules(), Group(self.time, 1 + engines, self.clocks.wire)
        clients, accepted = iter(self.ends), (end.other for end in self.ends)
        listener = SimpleNamespace(address=("", 0), accept=lambda: next(accepted))
        store = SimpleNamespace(set=lambda *_: None, get=lambda _: b"here 0 key")
        meeting: Any = SimpleNamespace(host="", store=store)

        def start() -> None:
            for i in range(engines):
                roles = grpo_fast.Roles(learners, engines, tp, False, i)
                self.time.spawn(grpo_fast.run_engine, args, roles, meeting, host=False)
            self.learn(meeting, grpo_fast.Roles(learners, engines, tp, True, 0))

        def make_engine(args: Any, tokenizer: Any, world: utils.World, num_requests: int) -> Engine:
            return Engine(self, self.ends[world.local_rank], num_requests)

        of_fast = modules | {
            "Listener": lambda *_, **__: contextlib.nullcontext(listener),
            "Client": lambda *_, **__: next(clients),
            "Watchdog": lambda *_: SimpleNamespace(beat=lambda: None),
            "join": lambda store, name, *_: utils.World(0, int(name.removeprefix("engine")), 1, meta),
            "weights_group": lambda *_: (group, None),
            "gather_weights": self.gather,
            "receive_weights": self.receive,
            "Rollout": Light,
            "to_bytes": lambda _: (),
        }
        of_utils = {
            "load_tokenizer": lambda _: None,
            "make_engine": make_engine,
            "prompt_at": self.prompt_at,
            "time": modules["time"],
            "STOP": SimpleNamespace(),
        }
        core = sorted(utils.ALL_CORES)[os.getpid() % len(utils.ALL_CORES)]
        with contextlib.ExitStack() as patches:
            patches.callback(utils.pin, utils.pin({core}))  # threads that take turns do so in two thirds of the time
            patches.enter_context(mock.patch.multiple(grpo_fast, **of_fast))
            patches.enter_context(mock.patch.multiple(utils, **of_utils))
            patches.enter_context(mock.patch.object(grpo, "start_scoring", self.start_scoring))
            patches.enter_context(mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "0", "GROUP_RANK": "0"}))
            # meta tensors travel in place of weights
            patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: False))
            self.time.run(start)
        self.seconds = time.perf_counter() - began
        return self

    def prompt_at(self, prompts: list[utils.Prompt], position: int, *_: Any) -> utils.Prompt:
        """utils.prompt_at, whose prompts have lengths alone."""
        return prompts[self.drawn.prompts.get(position, self.args.prompt_tokens)]

    def start_scoring(self, rollout: Any, *_: Any) -> None:
        result = SimpleNamespace(score=self.drawn.group(rollout.position)[rollout.sample][1])

        def wait() -> SimpleNamespace:
            if self.clocks.reward:
                self.time.sleep(self.clocks.reward)
            return result

        rollout.scoring = [SimpleNamespace(result=wait)]

    def sizes(self, manifest: Any) -> list[int]:
        return [sum(math.prod(shape) for _, shape in bucket) for bucket in manifest]

    def gather(self, policy: Any, manifest: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """grpo_fast.gather_weights, whose tensors have sizes alone."""
        for size in self.sizes(manifest):
            flat = torch.empty(size, dtype=dtype, device="meta")
            self.time.sleep(self.clocks.gather * flat.nbytes)
            yield flat

    def receive(
        self, group: Group, manifest: Any, dtype: Any, device: Any, wire: list[float], inbox: grpo_fast.Inbox
    ) -> Iterator[int]:
        """grpo_fast.receive_weights, which gives the bytes of the last bucket. The others are loaded while the engine
        is in the group already, whose broadcast waits for learner 0, and that for all to be ready."""
        sizes = [size * dtype.itemsize for size in self.sizes(manifest)]
        for loaded in (0, *sizes[:-1]):
            began = self.time.now + self.clocks.load * loaded
            if loaded:
                self.time.at(began, inbox.say_ready)
            group.broadcast([])
            wire.append(self.time.now - began)
        yield sizes[-1]

    def learn(self, meeting: Any, roles: grpo_fast.Roles) -> None:
        """run_learner, less what it computes and writes."""
        args, now = self.args, self.time
        lengths = max([args.prompt_tokens, *self.drawn.prompts.values()])
        prompts = [utils.Prompt(i, (0,) * i, "", ("",), ("simulated",)) for i in range(lengths + 1)]
        engines = grpo_fast.Engines(meeting, roles, None, [], args)
        sender = grpo_fast.Sender(engines)
        packing = "shared" if args.share_prompts else "plain"

        def pack(rollouts: list[Any]) -> list[list[grpo.Pack]]:
            return grpo.pack_rollouts(rollouts, packing, args.pack_length, roles.learners, self.policy.pair_cost)

        grpo_fast.send_weights(self.policy, self.manifest, sender, self.dtype, 0, 0)
        engines.wait_loaded(0)
        self.collector = collector = self.kind(engines, prompts, args, grpo.start_state(), pack)
        sender.collector = collector
        clocks = list(engines.clocks)
        speed = {"itemsize": self.dtype.itemsize, "bytes_per_second": roofline.GPUS[args.gpu].bandwidth}
        for step in range(1, grpo.num_training_steps(args) + 1):
            start, host, timer = now.now, now.host_seconds, utils.Timer(gpu=False)
            with timer("trainer_waiting_for_data"):
                data = collector.next()
            with timer("training"):
                now.pay()
                seconds = self.clocks.update(data.packs, step)
                now.current.began = time.thread_time()  # reading the clocks is no work of learner 0
                now.sleep(seconds)
            with timer("gather"):
                grpo_fast.send_weights(self.policy, self.manifest, sender, self.dtype, step, data.cursor)
            now.sleep(self.clocks.rest)
            rollouts = [r for group in data.sampled for r in group]
            pieces = [piece for m in data.packs for packs in m for pack in packs for piece in pack]
            ages = step - 1 - np.concatenate([[], *(r.versions for piece in pieces for r in piece)])
            held = sum(len(r.token_ids) for group in list(collector.in_flight.values()) for r in group)
            tokens = sum(len(r.token_ids) for r in rollouts)
            out = timer.seconds | {
                "training_step": float(step),
                "time/total": now.now - start,
                "val/sequence_lengths": tokens / len(rollouts),
                "val/num_learner_tokens": float(sum(map(grpo.piece_length, pieces))),
                "val/num_steps_off_policy": float(ages.sum()) / max(len(ages), 1),
                "oldest": float(ages.max(initial=0)),
                "host": now.host_seconds - host,
                "tokens": float(tokens),
                "tokens_held": float(held),
                "imbalance": imbalance(data.packs),
            }
            out |= collector.account(data) | sender.metrics | data.seconds
            ended = list(engines.clocks)
            spent, clocks = [a.since(b) for a, b in zip(ended, clocks, strict=True)], ended
            self.rows.append(out | grpo_fast.engine_metrics(spent, self.policy, out, speed))
            self.trained.append(rollouts)

    def mean(self, name: str) -> float:
        """Over args.steps steps in the middle: before them the pipeline fills, after them it runs dry."""
        first = math.ceil(self.args.async_steps) + 1
        values = [row[name] for row in self.rows[first : first + self.args.steps] if name in row]
        return sum(values) / len(values) if values else 0.0


@functools.cache
def meta_policy(name: str) -> grpo.Policy:
    """The policy without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return grpo.Policy(AutoModelForCausalLM.from_config(roofline.load_config(name), dtype=torch.bfloat16))


def cache_tokens(args: Any) -> float:
    """Tokens that an engine's cache holds; 2 GiB go to its activations and graphs."""
    gpu, tp, shape = roofline.GPUS[args.gpu], args.vllm_tensor_parallel_size, roofline.shape_of(args.model_name_or_path)
    room = gpu.memory * memory.GIB * args.vllm_gpu_memory_utilization - 2 * memory.GIB
    return (room * tp - 2 * shape.weights) / shape.token_bytes


def tokens_of(packs: list[Any]) -> int:
    """Tokens of some packs."""
    return sum(grpo.piece_length(piece) for pack in packs for piece in pack)


def imbalance(mini_batches: list[list[list[Any]]]) -> float:
    """Tokens of the learner with most over the mean."""
    loads = [[tokens_of(packs) for packs in of_learners] for of_learners in mini_batches]
    return sum(map(max, loads)) / max(sum(map(sum, loads)) / len(loads[0]), 1)


# --- What is asked ----------------------------------------------------------------------------------------------------


def memory_of(args: Any) -> dict[str, float]:
    """scripts/proof/memory.py's estimate for a learner, GiB; and the tokens an engine's cache holds."""
    setup = memory.Setup(
        **{name: getattr(args, name) for name in ESTIMATED_BY if name not in ("model_dtype", "model_revision")},
        learners=sum(args.num_learners_per_node),
        logprob_chunk=grpo.LOGPROB_CHUNK,
    )
    parts = memory.memory_estimate(setup, roofline.load_config(args.model_name_or_path))
    learner = sum(size for name, size in parts.items() if not name.startswith("engine"))
    return {"learner": learner / memory.GIB, "cache": cache_tokens(args)}


def why(play: Play) -> str:
    """Who waits for whom."""
    total, idle = play.mean("time/total"), play.mean(IDLE)
    waits, trains = play.mean("time/trainer_waiting_for_data"), play.mean("time/training")
    if play.mean("host") * play.args.host_speed > 0.9 * total:
        return "learner 0's Python is the bottleneck"
    if play.mean("time/gather") > trains:
        return f"weights are the bottleneck: learners hand them over in {play.mean('time/gather'):.1f} of {total:.1f} s"
    if waits < 0.05 * total:
        return f"learners are the bottleneck: {trains:.1f} of {total:.1f} s; engines wait {idle:.1f} s"
    if idle < 0.05 * total:
        return f"engines are the bottleneck: learners wait {waits:.1f} of {total:.1f} s"
    return f"both wait, learners {waits:.1f} s, engines {idle:.1f} s: async_steps hides less than one of them"


def division(args: Any) -> str:
    """Its GPUs, in words."""
    return f"{sum(args.num_learners_per_node)} learners + {args.vllm_num_engines} engines"


def describe(play: Play) -> str:
    """A run in a few lines."""
    args, room, tp = play.args, memory_of(play.args), play.args.vllm_tensor_parallel_size
    total, held = play.mean("time/total"), play.mean("tokens_held") + play.mean("tokens")
    rate = play.mean("tokens") / total / (sum(args.num_learners_per_node) + args.vllm_num_engines * tp)
    return "\n".join(
        [
            f"{args.model_name_or_path}: {division(args)} x {tp}, async_steps {args.async_steps}"
            f"{', in flight' * args.inflight_updates}: {total:.1f} s a step, {rate:,.0f} tokens a second and GPU",
            f"    {why(play)}",
            f"    idle: learners {play.mean('time/trainer_waiting_for_data') / total:.0%}, engines "
            f"{play.mean(IDLE) / total:.0%} | update {play.mean('time/training'):.1f} s on "
            f"{play.mean('val/num_learner_tokens'):,.0f} tokens, fullest learner {play.mean('imbalance'):.3f} of even "
            f"| weights {play.mean('time/weight_sync'):.1f} s, of which engines pause "
            f"{play.mean('time/weight_sync_pause'):.1f}",
            f"    staleness {play.mean('val/num_steps_off_policy'):.2f} updates, at most "
            f"{max(row['oldest'] for row in play.rows):.0f} | response tokens {play.mean('val/sequence_lengths'):.0f}",
            f"    learner 0: Python {play.mean('host'):.1f} s a step, rollouts {held * SAMPLE_BYTES / 1e9:.2f} GB | "
            f"GPU memory: learner {room['learner']:.0f} of {roofline.GPUS[args.gpu].memory:.0f} GiB, an engine's cache "
            f"{room['cache']:,.0f} tokens",
            f"    played {len(play.rows)} steps in {play.seconds:.0f} s",
        ]
    )


def splits(args: Any) -> list[Any]:
    """Flags of each division of args.gpus worth trying: all on up to 16 GPUs, else some around an even one."""
    tp = args.vllm_tensor_parallel_size
    every = [n for n in range(1, args.gpus) if (args.gpus - n) % tp == 0]
    if args.gpus > 16:
        half = min(every, key=lambda n: abs(n - args.gpus / 2))
        trial = Play(replace(divided(args, half), steps=2)).run()
        learner, engine = trial.mean("time/training") * half, trial.mean("time/generation") * (args.gpus - half)
        even = args.gpus * learner / max(learner + engine, 1e-9)
        every = sorted({min(every, key=lambda n: abs(n - share * even)) for share in (0.75, 0.9, 1.0, 1.1, 1.25)})
    return [divided(args, learners) for learners in every]


def divided(args: Any, learners: int) -> Any:
    """args with so many learners, the other GPUs being engines."""
    engines = (args.gpus - learners) // args.vllm_tensor_parallel_size
    return replace(args, num_learners_per_node=[learners], vllm_num_engines=engines)


def plan(args: Any) -> list[Play]:
    """Play the splits that fit into memory; prints them, best first."""
    plays, refused = [], []
    for flags in splits(args):
        room, gpu = memory_of(flags), roofline.GPUS[args.gpu]
        if room["learner"] > 0.95 * gpu.memory:
            refused.append(f"{division(flags)}: no room, a learner needs {room['learner']:.0f} of {gpu.memory:.0f} GiB")
        elif room["cache"] < args.max_prompt_token_length + args.response_length:
            refused.append(f"{division(flags)}: no room, an engine's cache holds {max(room['cache'], 0):,.0f} tokens")
        else:
            plays.append(Play(flags).run())
    plays.sort(key=lambda p: p.mean("time/total"))
    for place, play in enumerate(plays, start=1):
        print(f"{place:2}. {division(play.args)}: {play.mean('time/total'):.1f} s a step; {why(play)}")
    print("\n".join(refused))
    if not plays:
        print("nothing fits: more GPUs, --gradient_checkpointing, --vllm_tensor_parallel_size, a smaller --pack_length")
        return plays
    print("\nthe best:\n" + describe(plays[0]))
    return plays


def scale(args: Any) -> None:
    """The run of 8 GPUs on more of them, with as many more prompts a step."""
    learners, engines, prompts = args.num_learners_per_node[0], args.vllm_num_engines, args.num_unique_prompts_rollout
    for times in (n for n in (1, 8, 64, 512) if n == 1 or (learners + engines) * n <= args.gpus):
        flags = replace(
            args,
            num_learners_per_node=[learners * times],
            vllm_num_engines=engines * times,
            num_unique_prompts_rollout=prompts * times,
        )
        print(f"{(learners + engines) * times:,} GPUs, {prompts * times:,} prompts:", end=" ", flush=True)
        print(describe(Play(flags).run()), flush=True)


class Dropping(grpo_fast.Collector):
    """open-instruct's way, read in its data_loader.py of August 2026: async_steps * P groups are under way at any time,
    up to async_steps batches are made ahead, of what ended first, and a group whose first weights are then more than
    async_steps updates old is thrown away and replaced."""

    refill = True  # each group taken or thrown away lets another one start, at once

    def __init__(self, engines: Any, prompts: Any, args: Any, *rest: Any):
        super().__init__(engines, prompts, replace(args, active_sampling=True), *rest)
        engines.tells_all = True  # what ended is looked for, not taken by name
        self.ended, self.left, self.dropped, self.step = deque(), {}, [], 0
        self.ready.maxsize = max(int(args.async_steps) - 1, 1)  # one more waits to be put

    def engines_have(self, *_: Any) -> None:
        if not self.admitted:
            self.admit(self.args.num_unique_prompts_rollout * max(self.args.async_steps, 1), frozenset())

    def _finish(self, rollout: Any, generation: Any) -> None:
        super()._finish(rollout, generation)
        left = self.left[rollout.position] = self.left.get(rollout.position, len(self.in_flight[rollout.position])) - 1
        if not left:
            self.ended.append(rollout.position)

    def _collect(self) -> Any:
        args, data = self.args, grpo_fast.StepData()
        self.step += 1
        while len(data.groups) < args.num_unique_prompts_rollout:
            self.engines.wait_for(lambda: bool(self.ended), "a group")
            group: Any = self._take(self.ended.popleft())[0]
            if self.refill:
                self.admit(self.admitted + 1, frozenset())
            if self.refill and self.step - 1 - min(r.versions[0] for r in group) > args.async_steps:
                self.dropped.append(group)
                del self.in_flight[group[0].position]
                self.counts["filtered"] += 1
            else:
                grpo.score_group(group, args)
                data.groups.append(group)
        grpo.set_advantages(data.groups, args)
        data.sampled = data.groups
        data.packs = [self.pack(rollouts) for rollouts in grpo.split_groups(data.groups, args)]
        self.consumed += len(data.groups)
        data.cursor = self.consumed
        return data


class Streaming(Dropping):
    """verl's way: with new weights, (1 + staleness) * P groups less those under way may start; none is thrown away, and
    a batch is made of what ended first."""

    refill = False

    def engines_have(self, cursor: int) -> None:
        self.admit(cursor + int(self.args.num_unique_prompts_rollout * (1 + self.args.async_steps)), frozenset())


# verl, docs/advance/fully_async.md, "128-card Stale Ablation Experiment" (Qwen2.5-Math-7B, DAPO, 512 x 16, at most 28K
# tokens, 64 + 64 H20): staleness threshold -> seconds of a step, of those waiting for rollouts, of the update
VERL = {
    0.0: (231.34, 128.47, 98.77),
    0.1: (171.30, 58.17, 109.12),
    0.3: (146.11, 38.88, 103.22),
    0.5: (150.63, 33.14, 113.16),
}
VERL_REST_S = 4.1  # step less gen less update_actor, the same in all four


def records(args: Any) -> list[float]:
    """verl's four staleness settings. Not published are the lengths: their mean is chosen so that the wait of the first
    setting comes out; the other three are then played. Returns the errors of their steps."""
    run = "--gpu h20 --num_unique_prompts_rollout 512 --num_samples_per_prompt_rollout 16 --num_mini_batches 1 "
    run += "--num_learners_per_node 64 --vllm_num_engines 64 --response_length 28672 --pack_length 32768 "
    run += "--max_prompt_token_length 2048 --steps 3 --host_speed 0 --no_filter_zero_std_samples "
    args = utils.parse_args(Simulation, f"{run} --length_sigma {args.length_sigma} --seed {args.seed}".split())

    def one(mean: float, staleness: float) -> Play:
        flags = replace(args, length_mean=mean, async_steps=staleness, inflight_updates=staleness > 0)
        paper = paper_clocks(flags, meta_policy(args.model_name_or_path))
        clocks = replace(paper, update=lambda packs, step: VERL[staleness][2], rest=VERL_REST_S)
        return Play(flags, clocks, kind=Streaming).run()

    low, high = 200.0, 20000.0
    for _ in range(7):
        middle = math.sqrt(low * high)
        waits = one(middle, 0.0).mean("time/trainer_waiting_for_data")
        low, high = (middle, high) if waits < VERL[0.0][1] else (low, middle)
    mean = math.sqrt(low * high)
    print(f"mean length {mean:.0f} (sigma of the logarithm {args.length_sigma}) gives the wait of staleness 0\n")
    print("| staleness | step, verl | played | waits, verl | played |\n|---|---|---|---|---|")
    errors = []
    for staleness, (step, wait, _) in VERL.items():
        play = one(mean, staleness)
        played, waited = (play.mean(f"time/{name}") for name in ("total", "trainer_waiting_for_data"))
        errors.append(played / step - 1)
        print(f"| {staleness} | {step:.0f} | {played:.0f} | {wait:.0f} | {waited:.0f} |", flush=True)
    return errors


def dropping(args: Any) -> list[Play]:
    """Admission and dropping on the same stream of prompts."""
    plays = [Play(args).run(), Play(args, kind=Dropping).run()]
    for name, play in zip(("admission", "dropping"), plays, strict=True):
        trained = np.array([len(r.token_ids) for rollouts in play.trained for r in rollouts])
        begun = range(play.collector.first, play.collector.first + len(play.trained) * args.num_unique_prompts_rollout)
        offered = np.array([n for position in begun for n, _ in play.drawn.group(position)])
        lost = [len(r.token_ids) for group in getattr(play.collector, "dropped", []) for r in group]
        print(
            f"{name}: {play.mean('time/total'):.1f} s a step, staleness {play.mean('val/num_steps_off_policy'):.2f}; "
            f"thrown away {len(lost):,} rollouts, {sum(lost) / (sum(lost) + trained.sum()):.1%} of the tokens\n"
            f"    tokens of a response, mean and 50th, 90th, 99th percentile: trained {spread(trained)}, the stream's "
            f"first as many {spread(offered)}" + (f", thrown away {spread(np.array(lost))}" if lost else "")
        )
    return plays


def read_run(args: Any) -> tuple[Any, list[dict[str, float]], Drawn]:
    """Flags of the run --run as args, its metrics step by step, and its own lengths and scores if it has them
    (--save_traces), else drawn ones of the same mean."""
    run = Path(args.run)
    if not (run / "metrics.jsonl").exists():
        raise utils.UserError(f"--run {args.run}: no run of grpo_fast.py, it has no metrics.jsonl")
    flags = json.loads((run / "args.json").read_text())
    known = {name: value for name, value in flags.items() if name in Simulation.__dataclass_fields__}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in lines if row["training_step"] > 0]
    if not rows or "val/engine_idle_share" not in rows[0]:
        raise utils.UserError(f"--run {args.run}: its metrics are not those of grpo_fast.py")
    steps = len(rows) - 2 * (known["async_steps"] + 1)
    if steps < 2:
        raise utils.UserError(f"--run {args.run}: {len(rows)} steps are too few; take {len(rows) + 2 - steps} or more")
    args = replace(args, **known, steps=steps, gpu=args.gpu, host_speed=args.host_speed)
    traces = run / "rollouts.jsonl"
    if not traces.exists():
        length, solved = (
            sum(row.get(name, 0.0) for row in rows) / len(rows)
            for name in ("val/sequence_lengths", "objective/verifiable_correct_rate")
        )
        args = replace(args, length_mean=length, solve_rate=solved)
        return args, rows, Drawn(args)
    made = [json.loads(line) for line in traces.read_text().splitlines()]
    rollouts = {(r["position"], r["sample"]): (len(r["token_ids"]), r["verifiable"] or 0.0) for r in made}
    return args, rows, Drawn(args, rollouts, {r["position"]: len(r["prompt_ids"]) for r in made})


def fitted(args: Any, rows: list[dict[str, float]], drawn: Drawn) -> Clocks:
    """Clocks of a run's metrics, those of the steps in the middle. The update takes a constant and a time for each
    token, times what that step was slower or faster; the engine a time for each decoding step."""
    before = args.async_steps + 1
    rows = rows[before : before + args.steps]

    def total(name: str) -> float:
        return sum(row.get(name, 0.0) for row in rows)

    learners, size = sum(args.num_learners_per_node), total("val/weight_sync_bytes") / len(rows)
    tokens = [row["val/num_learner_tokens"] / learners for row in rows]
    each = linear(tokens, [row["time/training"] for row in rows])
    shared = ("time/total", "time/trainer_waiting_for_data", "time/training", "time/gather")
    rest = total(shared[0]) - sum(map(total, shared[1:]))
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    own = [row["time/training"] / (each[0] + each[1] * n) for row, n in zip(rows, tokens, strict=True)]
    factors = dict(enumerate(own, start=before + 1))  # of steps

    def update(mini_batches: list[list[list[Any]]], step: int) -> float:
        loads = [sum(tokens_of(m[i]) for m in mini_batches) for i in range(learners)]
        return factors.get(step, 1.0) * (each[0] + each[1] * max(loads, default=0))

    clocks = Clocks(
        base=1e-3,
        each=0.0,
        cached=0.0,
        update=update,
        gather=total("time/gather") / len(rows) / size,
        wire=max(total("time/weight_sync_wire") / len(rows) / size, 1e-15),
        load=total("time/weight_sync_load") / len(rows) / size,
        rest=rest / len(rows),
        reward=total("time/reward") / len(rows) / samples,
    )
    for _ in range(3):  # how many decoding steps there are depends on who waits for whom
        play = Play(args, clocks, drawn).run()
        clocks = replace(clocks, base=clocks.base * total("time/generation") / len(rows) / play.mean("time/generation"))
    return clocks


def linear(x: list[float], y: list[float]) -> tuple[float, float]:
    """(constant, slope) of least squares, neither negative."""
    slope = float(np.cov(x, y)[0, 1] / np.var(x, ddof=1)) if len(set(x)) > 1 else 0.0
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = min(max(slope, 0.0), mean_y / max(mean_x, 1e-9))
    return mean_y - slope * mean_x, slope


def fit(args: Any) -> list[Play]:
    """A run and its simulation side by side, over the steps in the middle."""
    args, rows, drawn = read_run(args)
    clocks = fitted(args, rows, drawn)
    print(
        f"clocks of {args.run}: a decoding step {clocks.base * 1e3:.2f} ms, weights {clocks.load * 1e9:.2f} s a GB, "
        f"rest of a step {clocks.rest:.3f} s"
    )
    play = Play(args, clocks, drawn).run()
    first = args.async_steps + 1
    theirs = rows[first : first + args.steps]
    print(f"\n| mean of {args.steps} steps | run | played |\n|---|---|---|")
    measured = {name: sum(row[name] for row in theirs) / len(theirs) for name in FITTED}
    for name, value in measured.items():
        print(f"| {name} | {value:.4g} | {play.mean(name):.4g} |")
    print(f"\nstep time off by {play.mean('time/total') / measured['time/total'] - 1:+.1%}")
    return [play]


# of metrics.jsonl; the last four have to be equal where lengths and scores are the run's own
FITTED = """time/total time/training time/trainer_waiting_for_data time/generation time/generation_waiting_for_trainer
    time/weight_sync_pause time/gather val/learner_idle_share val/engine_idle_share val/num_steps_off_policy
    batch/groups_in_flight val/sequence_lengths val/num_learner_tokens batch/groups_trained
    batch/groups_filtered""".split()


def spread(lengths: np.ndarray) -> str:
    """Mean and quantiles."""
    return f"{lengths.mean():.0f} (" + ", ".join(f"{np.percentile(lengths, q):.0f}" for q in (50, 90, 99)) + ")"


def main() -> None:
    args = utils.parse_args(Simulation)
    if args.what != "fit":
        print(
            "On paper: data sheets times believed efficiencies (roofline.py), +-25 %; rankings are surer than seconds."
        )
    if args.what == "run":
        print(describe(Play(args).run()))
    else:
        {"plan": plan, "scale": scale, "dropping": dropping, "fit": fit, "records": records}[args.what](args)


if __name__ == "__main__":
    try:
        main()
    except (utils.UserError, ValueError) as error:
        raise SystemExit(f"simulate.py: {error}") from None
