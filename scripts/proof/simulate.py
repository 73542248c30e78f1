"""Play a run of grpo_fast.py on any number of GPUs: its own threads, with clocks in place of models, in virtual time.

    python scripts/proof/simulate.py --num_learners_per_node 6 --vllm_num_engines 2 \\
        --model_name_or_path Qwen2.5-7B --num_unique_prompts_rollout 1024 --num_samples_per_prompt_rollout 5
    python scripts/proof/simulate.py --what plan --gpus 64 ...  the best numbers of learners and engines, and why
    python scripts/proof/simulate.py --what fit --run RUN     fit the clocks to a run's metrics.jsonl and play it
    python scripts/proof/simulate.py --what records           verl's asynchronous settings on 128 H20, as published
    python scripts/proof/simulate.py --what dropping ...      admission against dropping old rollouts, same prompts
    python scripts/proof/simulate.py --what scale --gpus 512 ...  8, 64, ... GPUs, with as many more prompts

Flags are those of grpo_fast.py and a few of the simulation. Real are all of grpo_fast's threads and messages: the loop
of an engine with its Inbox, Engines, Collector with its admission, accounting and packer, Sender, send_weights and the
plan of buckets. Clocks stand for the models: an engine decodes in a time that depends on its batch and its cache, a
learner updates in a time that depends on its packs, weights take a time that depends on their bytes (proof/roofline.py,
or with `fit` a run's own metrics). One thread runs at a time, and virtual time stands still meanwhile. When all threads
wait, time jumps to the next event. The seconds that Python really took at learner 0 are charged. With --host_speed 0
nothing is charged, and the same flags give the same figures to the last bit.

Not played: evaluation, checkpoints, verifiers, failures, batches of transformers, which end together. The cache keeps
room for a whole response here; vLLM would preempt. Adapters, several turns and sequence parallelism are refused. No
clock has been compared with a GPU yet.
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
from typing import Any, Literal, NamedTuple
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
LOAD_COPIES = 3  # of each byte, on the device, while an engine takes its weights
HOST_TOKEN_S = 0.4e-6  # of learner 0 a token, its text and judgement included: bench.py tokens, on 2 slow cores
BATCH_TOKEN_S = 0.55e-6  # of a learner a token of its own: make_batch 0.05, ids of the block mask 0.35 to 0.6
IDLE = "time/generation_waiting_for_trainer"
WAITS = "time/trainer_waiting_for_data"
SAMPLE_BYTES = 13  # of a response token at learner 0, in arrays: id 4, logprob 4, mask 1, version 4


# --- Virtual time -----------------------------------------------------------------------------------------------------


class Over(SystemExit):
    """Ends the threads that still wait when a simulation is over; threading prints nothing about it."""


def held_lock() -> Any:
    """A lock that is held: a thread that acquires it waits until somebody releases it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Task:
    """A thread of grpo_fast: it runs until it waits."""

    host: bool  # of learner 0, whose Python is charged
    go: Any = field(default_factory=held_lock)
    turn: int = 0  # how often it has been woken: a wake-up names the wait that it ends
    began: float = 0.0  # processor seconds of its thread when it was woken
    done: bool = False
    error: BaseException | None = None


Waiting = list[tuple[Task, int]]  # (task, its turn when it began to wait)


class Time:
    """Discrete events, and threads of which one runs at a time."""

    def __init__(self, host_speed: float):
        self.now = 0.0
        self.host_speed = host_speed
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.awake: deque[tuple[Task, int]] = deque()
        self.tasks: list[Task] = []
        self.above = Task(False)  # `run`, which is woken when all is over
        self.current = self.above
        self.host_free = 0.0  # when learner 0's Python, one thread at a time, is free
        self.host_seconds = 0.0
        self.over = False

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), call))

    def charge(self, seconds: float) -> float:
        """Python at learner 0 works for some seconds; returns when it is free again."""
        self.host_seconds += seconds
        self.host_free = max(self.host_free, self.now) + self.host_speed * seconds
        return self.host_free

    def pause(self, waiting: Waiting | None = None, until: float = math.inf) -> None:
        """Block the running task until that time, or until `wake(waiting)`."""
        task = self.current
        ticket = (task, task.turn)
        if waiting is not None:
            waiting.append(ticket)
        if until < math.inf:
            self.at(until, lambda: self.awake.append(ticket))
        following = self.following()
        if following is not task:
            following.go.release()
            task.go.acquire()
        task.began = time.thread_time()
        if self.over:
            raise Over

    def following(self) -> Task:
        """The task whose turn it is; time moves on until there is one. The thread that waits finds it out itself and
        wakes that task: with thousands of engines, switches between threads are most of the work of a simulation."""
        while not self.over and not self.current.error and not self.tasks[0].done and (self.awake or self.events):
            if self.awake:
                task, turn = self.awake.popleft()
                if task.turn == turn:  # else something else has woken it
                    self.current = task
                    task.turn += 1
                    return task
            else:
                self.now, _, call = heapq.heappop(self.events)
                call()
        return self.above

    def pay(self) -> None:
        """Charge the time of the running task's Python, if it is learner 0's."""
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
                raise RuntimeError("all tasks wait and there is no event: a clock has a hole")
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
        threads = SimpleNamespace(
            Thread=functools.partial(Thread, self),
            Condition=functools.partial(Condition, self),
            Lock=contextlib.nullcontext,  # nobody waits while holding a lock
        )
        queues = SimpleNamespace(Queue=functools.partial(Queue, self))
        return {"time": clock, "threading": threads, "queue": queues}


@dataclass
class Thread:
    """threading.Thread in virtual time."""

    time: Time
    target: Callable
    args: tuple = ()
    daemon: bool = True
    ident: int | None = None  # of one that was started

    def start(self) -> None:
        self.ident = id(self.time.spawn(self.target, *self.args))


class Condition(contextlib.nullcontext):
    """threading.Condition in virtual time."""

    def __init__(self, simulated: Time):
        super().__init__()
        self.time = simulated
        self.waiting: Waiting = []
        self.notified = 0

    def wait(self, timeout: float) -> None:
        before = self.notified
        self.time.pay()  # meanwhile others run
        if self.notified == before:
            self.time.pause(self.waiting)

    def notify_all(self) -> None:
        self.notified += 1
        self.time.wake(self.waiting)


class Queue:
    """queue.Queue in virtual time."""

    def __init__(self, simulated: Time, maxsize: float):
        self.time = simulated
        self.maxsize = maxsize
        self.items: deque = deque()
        self.waiting: Waiting = []

    def put(self, item: Any) -> None:
        self.time.wait(lambda: len(self.items) < self.maxsize, self.waiting)
        self.items.append(item)
        self.time.wake(self.waiting)

    def get(self) -> Any:
        self.time.wait(lambda: bool(self.items), self.waiting)
        self.time.wake(self.waiting)
        return self.items.popleft()


class End:
    """One end of a connection: a message reaches the other end MESSAGE_S later."""

    def __init__(self, simulated: Time, other: "End | None" = None):
        self.time = simulated
        self.inbox: deque = deque()
        self.waiting: Waiting = []
        self.other = other or End(simulated, self)

    def send(self, message: Any) -> None:
        arrival = self.time.now + MESSAGE_S
        clock = message[-1]
        if isinstance(clock, grpo_fast.Clock):  # from an engine
            message = (*message[:-1], replace(clock))  # as it is now
            if self.time.host_speed:
                arrival = max(arrival, self.time.charge(HOST_TOKEN_S * tokens_in(message)))
        self.time.at(arrival, lambda: self.other.arrive(message))

    def arrive(self, message: Any) -> None:
        self.inbox.append(message)
        self.time.wake(self.waiting)

    def poll(self, seconds: float) -> bool:
        """As a connection's, but an engine that has nothing else to do waits until there is a message."""
        if seconds:
            self.time.wait(lambda: bool(self.inbox), self.waiting)
        return bool(self.inbox)

    def recv(self) -> Any:
        self.poll(math.inf)
        return self.inbox.popleft()


def tokens_in(message: tuple) -> int:
    """Response tokens in a message of an engine."""
    if message[0] != "done":
        return 0
    return sum(len(generation.token_ids) for _, generation in message[1])


class Group:
    """The process group of the weights: a broadcast begins when learner 0 and all engines are there."""

    def __init__(self, simulated: Time, size: int, wire: float):
        self.time = simulated
        self.size = size
        self.wire = wire
        self.present = 0
        self.ended = 0  # broadcasts
        self.bytes = 0
        self.waiting: Waiting = []

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> "Group":
        before = self.ended
        self.present += 1
        self.bytes = sum(tensor.nbytes for tensor in tensors) or self.bytes  # an engine brings nothing
        if self.present == self.size:
            self.present = 0
            self.time.at(self.time.now + self.wire * self.bytes, self.end)
        self.time.wait(lambda: self.ended > before, self.waiting)
        return self

    def end(self) -> None:
        self.ended += 1
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
    clocks: Literal["fast", "slow"] | None = None
    """End of roofline.py's range. Default: both are played, one after the other."""
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
        args = self.args
        size = args.num_samples_per_prompt_rollout
        if (position, 0) in self.known:
            return [self.known[position, sample] for sample in range(size)]

        rng = np.random.default_rng((args.seed, position))
        if self.lengths:
            tokens = rng.choice(self.lengths, size).astype(float)
        else:
            tokens = self.log_normal(rng, size)
        tokens = np.clip(np.rint(tokens), 1, args.response_length).astype(int)
        rate = args.solve_rate
        if 0 < rate < 1:
            rate = rng.beta(2 * rate, 2 * (1 - rate))
        scores = (rng.random(size) < rate).astype(float)
        return list(zip(tokens.tolist(), scores.tolist(), strict=True))

    def log_normal(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Lengths (size,) of the mean that the flags ask for; half of the variance lies between prompts."""
        sigma = self.args.length_sigma
        of_prompt = rng.standard_normal()
        z = (of_prompt + rng.standard_normal(size)) / math.sqrt(2)
        return np.exp(math.log(self.args.length_mean) - sigma**2 / 2 + sigma * z)


def drawn_of(args: Any) -> Drawn:
    """Lengths and scores as the flags ask for them."""
    if not args.lengths:
        return Drawn(args)
    lengths = []
    for line in Path(args.lengths).read_text().split("\n"):
        if line.strip():
            row = json.loads(line)
            lengths.append(len(row["token_ids"]) if isinstance(row, dict) else int(row))
    return Drawn(args, lengths=tuple(lengths))


# --- Clocks -----------------------------------------------------------------------------------------------------------


MiniBatches = list[grpo_fast.Shares]  # [mini-batch][learner][pack]


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
    update: Callable[[MiniBatches, int], float] = lambda packs, step: 0.0
    gather: float = 0.0  # a byte of weights
    wire: float = 0.0  # a byte
    load: float = 0.0  # a byte
    rest: float = BARRIER_S  # of a step
    reward: float = 0.0  # of the collector, a rollout

    def gpu_step(self, batch: int, cached: float) -> float:
        """Seconds of one step on the GPU."""
        return self.base + self.each * batch + self.cached * cached

    def host_step(self, batch: int) -> float:
        """Seconds of one step on the host."""
        return self.floor + self.floor_each * batch

    def steps(self, batch: int, cached: float, count: float) -> float:
        """Seconds of `count` steps: the cache grows by a token a response and step."""
        gpu = self.gpu_step(batch, cached) * count + self.cached * batch * count**2 / 2
        return max(gpu, self.host_step(batch) * count)

    def count(self, batch: int, cached: float, seconds: float) -> float:
        """Steps that fit in `seconds`."""
        linear = self.gpu_step(batch, cached)
        square = self.cached * batch / 2
        steps = seconds / linear
        if square > 0:
            steps = 2 * seconds / (linear + math.sqrt(linear**2 + 4 * square * seconds))
        host = self.host_step(batch)
        return min(steps, seconds / host) if host else steps


@dataclass(frozen=True)
class PaperUpdate:
    """Seconds of an update by roofline.py's arithmetic."""

    args: Any
    shape: Any
    gpu: Any
    way: Any
    learners: int

    def __call__(self, mini_batches: MiniBatches, step: int) -> float:
        optimizer = self.args.num_epochs * roofline.optimizer_seconds(self.shape, self.gpu, self.way, self.learners)
        total = 0.0
        for shares in mini_batches:  # learners gather weights in step: each round takes as long as its longest pack
            times = [map(self.pack_seconds, packs) for packs in shares]
            total += sum(map(max, itertools.zip_longest(*times, fillvalue=0.0))) + optimizer
        return total

    def pack_seconds(self, pack: Any) -> float:
        """Seconds of a pack in all epochs, with the forwards for reference and old logprobs."""
        args = self.args
        several_updates = args.num_epochs * args.num_mini_batches > 1 or args.kl_in_reward
        forwards = int(args.load_ref_policy) + int(several_updates)
        tokens = sum(map(grpo.piece_length, pack))
        pairs = sum(map(grpo.attended_pairs, pack))
        responses = sum(len(r.token_ids) for r in grpo_fast.rollouts_of([[pack]]))
        seconds = functools.partial(
            roofline.seconds, self.shape, self.gpu, self.way, self.learners, tokens, pairs, responses
        )
        update = sum(seconds(True).values())
        forward = sum(seconds(False).values())
        return args.num_epochs * update + forwards * forward + BATCH_TOKEN_S * tokens


def paper_clocks(args: Any) -> Clocks:
    """Clocks of roofline.py's arithmetic, at one end of its range; the slow one where the flags name none."""
    shape = roofline.shape_of(args.model_name_or_path)
    gpu = roofline.GPUS[args.gpu]
    tp = args.vllm_tensor_parallel_size
    learners = sum(args.num_learners_per_node)
    speeds = roofline.ENDS[args.clocks or "slow"]
    recompute = args.gradient_checkpointing_part if args.gradient_checkpointing else "none"
    way = roofline.Way(args.compile_layers, True, recompute, args.deepspeed_stage, speeds=speeds)

    bandwidth = gpu.bandwidth * speeds.bytes * tp
    products = 2 * (shape.matrices + shape.head) / gpu.flops / speeds.decode_products / tp
    prefill = 2 * shape.matrices / gpu.flops / speeds.products / tp
    gpus = learners + args.vllm_num_engines * tp
    link = gpu.network if gpus > 8 else gpu.link
    link *= speeds.link
    copies = 2 * LOAD_COPIES / bandwidth
    python = shape.tensors * speeds.loaded_tensor
    python /= 2 * shape.weights
    return Clocks(
        base=2 * shape.weights / bandwidth,  # every weight is read; the products of a batch take the longer of both
        each=products,
        cached=shape.token_bytes / bandwidth,
        floor=speeds.engine_step,
        floor_each=speeds.engine_token,
        prefill=prefill,
        update=PaperUpdate(args, shape, gpu, way, learners),
        gather=1 / link,
        wire=1 / link,
        load=copies + python,
    )


# --- A run ------------------------------------------------------------------------------------------------------------


class Running(NamedTuple):
    """A response that an engine decodes; the one that ends first is the smallest."""

    last_step: int
    name: str
    prompt: int  # tokens
    first_step: int
    tokens: int


class Engine:
    """What grpo_fast.EngineLoop drives, with a clock for the model. A step is all decoding steps until a response ends
    or a message comes."""

    def __init__(self, play: "Play", messages: End):
        self.play = play
        self.time = play.time
        self.clocks = play.clocks
        self.messages = messages
        self.seats = min(grpo_fast.most_requests(play.args), 1024)
        self.queued: deque[tuple[str, int]] = deque()  # (name, tokens of the prompt)
        self.running: list[Running] = []  # a heap
        self.steps = 0
        self.cached = 0
        self.reserved = 0
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
            length, _ = self.play.drawn.group(position)[sample]
            if self.running and self.reserved + prompt + length > self.play.cache_tokens:
                break
            self.queued.popleft()
            heapq.heappush(self.running, Running(self.steps + length, name, prompt, self.steps, length))
            self.reserved += prompt + length
            self.cached += prompt
            tokens += prompt
        self.time.sleep(self.clocks.prefill * tokens)

    def step(self) -> list[tuple[str, Any]]:
        self.admit()
        batch = len(self.running)
        began = self.time.now
        count = self.running[0].last_step - self.steps
        end = began + self.clocks.steps(batch, self.cached, count)
        self.time.pause(self.messages.waiting, end)

        steps = self.clocks.count(batch, self.cached, self.time.now - began)
        count = min(count, math.ceil(steps - 1e-6))  # the step under way is made to its end
        end = began + self.clocks.steps(batch, self.cached, count)
        self.time.sleep(end - self.time.now)
        self.steps += count
        self.cached += count * batch
        finished = []
        while self.running and self.running[0].last_step <= self.steps:
            response = heapq.heappop(self.running)
            self.cached -= response.prompt + self.steps - response.first_step
            self.reserved -= response.prompt + response.tokens
            finished.append((response.name, self.generation(response)))
        return finished

    def generation(self, response: Running) -> utils.Generation:
        """What learner 0 gets for a response: arrays without memory, but the versions are real."""
        tokens = response.tokens
        reason = "stop" if tokens < self.play.args.response_length else "length"
        begins, versions = np.array(self.versions, np.int32).T
        steps = np.arange(response.first_step, response.first_step + tokens)
        of_tokens = versions[np.searchsorted(begins, steps, side="right") - 1]
        ids = np.broadcast_to(np.int32(0), tokens)
        logprobs = np.broadcast_to(np.float32(0), tokens)
        return utils.Generation(ids, logprobs, reason, of_tokens)

    def load_weights(self, buckets: Iterator[int], version: int) -> None:
        for size in buckets:
            self.time.sleep(self.clocks.load * size)
        self.versions = [*self.versions[-64:], (self.steps, version)]


class Play:
    """A run of `args.steps` steps; `rows` has each step's metrics under their names in metrics.jsonl."""

    def __init__(self, args: Any, clocks: Clocks | None = None, drawn: Drawn | None = None, kind: Any = None):
        plain = {"lora_rank": 0, "sequence_parallel_size": 1, "env_file": "", "tools": []}
        for name, value in plain.items():
            utils.need(getattr(args, name) == value, f"--{name} {getattr(args, name)}: is not played, leave it out")
        rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
        steps = math.ceil(args.steps + 2 * (args.async_steps + 1))  # see `mean`
        dtype = "float32" if args.model_dtype == "float32" else "bfloat16"
        self.args = replace(args, total_episodes=steps * rollouts, model_dtype=dtype)
        self.dtype = utils.DTYPES[dtype]
        self.time = Time(args.host_speed)
        self.policy = meta_policy(args.model_name_or_path)
        self.manifest = grpo_fast.plan_weights(self.policy, self.dtype)
        self.cache_tokens = cache_tokens(args)
        self.clocks = clocks or paper_clocks(self.args)
        self.drawn = drawn or drawn_of(self.args)
        self.group = Group(self.time, 1 + args.vllm_num_engines, self.clocks.wire)
        self.kind = kind or grpo_fast.Collector
        self.rows: list[dict[str, float]] = []
        self.trained: list[Any] = []  # rollouts of each step
        self.seconds = 0.0  # of this machine
        self.collector: Any = None

    def run(self) -> "Play":
        began = time.perf_counter()
        modules = self.time.modules()
        of_fast = modules | {"gather_weights": self.gather, "Rollout": Light, "to_bytes": lambda _: ()}
        of_utils = {"prompt_at": self.prompt_at, "time": modules["time"]}
        core = sorted(utils.ALL_CORES)[os.getpid() % len(utils.ALL_CORES)]
        with contextlib.ExitStack() as patches:
            patches.callback(utils.pin, utils.pin({core}))  # threads that take turns do so in two thirds of the time
            patches.enter_context(mock.patch.multiple(grpo_fast, **of_fast))
            patches.enter_context(mock.patch.multiple(utils, **of_utils))
            patches.enter_context(mock.patch.object(grpo, "start_scoring", self.start_scoring))
            # meta tensors travel in place of weights
            patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: False))
            self.time.run(self.start)
        self.seconds = time.perf_counter() - began
        return self

    def start(self) -> None:
        """Start the engines, then learn."""
        ends = [End(self.time) for _ in range(self.args.vllm_num_engines)]
        for end in ends:
            self.time.spawn(self.serve, end, host=False)
        self.learn([end.other for end in ends])

    def serve(self, end: End) -> None:
        """run_engine, without processes."""
        inbox = grpo_fast.Inbox(end, self.args.inflight_updates, grpo_fast.fixed_order(self.args).messages)
        engine: Any = Engine(self, end)
        grpo_fast.EngineLoop(engine, utils.World(0, 0, 1, torch.device("meta")), inbox, self.receive).run()

    def prompt_at(self, prompts: list[utils.Prompt], position: int, *_: Any) -> utils.Prompt:
        """utils.prompt_at, whose prompts have lengths alone."""
        return prompts[self.drawn.prompts.get(position, self.args.prompt_tokens)]

    def start_scoring(self, rollout: Any, *_: Any) -> None:
        """grpo.start_scoring, which knows the score and takes its time."""
        rollout.scoring = [SimpleNamespace(result=functools.partial(self.score, rollout))]

    def score(self, rollout: Any) -> SimpleNamespace:
        if self.clocks.reward:
            self.time.sleep(self.clocks.reward)
        _, score = self.drawn.group(rollout.position)[rollout.sample]
        return SimpleNamespace(score=score)

    def sizes(self, manifest: Any) -> list[int]:
        """Parameters of each bucket."""
        return [sum(math.prod(shape) for _, shape in bucket) for bucket in manifest]

    def gather(self, policy: Any, manifest: Any, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """grpo_fast.gather_weights, whose tensors have sizes alone."""
        for size in self.sizes(manifest):
            flat = torch.empty(size, dtype=dtype, device="meta")
            self.time.sleep(self.clocks.gather * flat.nbytes)
            yield flat

    def receive(self, manifest: Any, clock: grpo_fast.Clock, inbox: grpo_fast.Inbox) -> Iterator[int]:
        """grpo_fast.receive_weights, which gives the bytes of the last bucket. The others are loaded while the engine
        is in the group already, whose broadcast waits for learner 0, and learner 0 for all engines to be ready."""
        sizes = [size * self.dtype.itemsize for size in self.sizes(manifest)]
        for loaded in (0, *sizes[:-1]):
            began = self.time.now + self.clocks.load * loaded
            if loaded:
                self.time.at(began, inbox.say_ready)
            self.group.broadcast([])
            clock.wire += self.time.now - began
        yield sizes[-1]

    def learn(self, connections: list[End]) -> None:
        """run_learner, less what it computes and writes."""
        args = self.args
        watchdog: Any = SimpleNamespace(beat=lambda: None)
        engines = grpo_fast.Engines(connections, watchdog, None, [], args)
        sender = grpo_fast.Sender(engines, self.group, None)
        learners = sum(args.num_learners_per_node)

        def pack(rollouts: list[Any]) -> grpo_fast.Shares:
            return grpo.pack_rollouts(rollouts, "shared", args.pack_length, learners, self.policy.pair_cost)

        grpo_fast.send_weights(self.policy, self.manifest, sender, self.dtype, 0, 0)
        engines.wait_loaded(0)
        longest = max([args.prompt_tokens, *self.drawn.prompts.values()])
        prompts = [utils.Prompt(n, (0,) * n, "", ("",), ("simulated",)) for n in range(longest + 1)]
        self.collector = self.kind(engines, prompts, args, grpo.start_state(), pack)
        sender.collector = self.collector
        engines.spent()
        for step in range(1, grpo.num_training_steps(args) + 1):
            data, out = self.play_step(step, sender)
            out |= self.collector.account(data) | sender.metrics | data.seconds
            speed = {"itemsize": self.dtype.itemsize, "bytes_per_second": roofline.GPUS[args.gpu].bandwidth}
            out |= grpo_fast.engine_metrics(engines.spent(), self.policy, out, speed)
            self.rows.append(out)
            self.trained.append([r for group in data.sampled for r in group])

    def play_step(self, step: int, sender: grpo_fast.Sender) -> tuple[grpo_fast.StepData, dict[str, float]]:
        """One step of the learners; its data and metrics."""
        simulated = self.time
        start = simulated.now
        host_seconds = simulated.host_seconds
        timer = utils.Timer(gpu=False)
        with timer("trainer_waiting_for_data"):
            data = self.collector.next()
        with timer("training"):
            simulated.pay()
            seconds = self.clocks.update(data.shares, step)
            simulated.current.began = time.thread_time()  # reading the clocks is no work of learner 0
            simulated.sleep(seconds)
        with timer("gather"):
            grpo_fast.send_weights(self.policy, self.manifest, sender, self.dtype, step, data.cursor)
        simulated.sleep(self.clocks.rest)

        out = timer.seconds | {"training_step": float(step), "time/total": simulated.now - start}
        out["host"] = simulated.host_seconds - host_seconds
        out["tokens_held"] = float(response_tokens(list(self.collector.in_flight.values())))
        out |= batch_metrics(data, step)
        return data, out

    def mean(self, name: str) -> float:
        """Over args.steps steps in the middle: before them the pipeline fills, after them it runs dry."""
        first = math.ceil(self.args.async_steps) + 1
        values = [row[name] for row in self.rows[first : first + self.args.steps] if name in row]
        return sum(values) / len(values) if values else 0.0


def response_tokens(groups: list[Any]) -> int:
    """Tokens of all responses in some groups."""
    return sum(len(r.token_ids) for group in groups for r in group)


def batch_metrics(data: grpo_fast.StepData, step: int) -> dict[str, float]:
    """Sizes and ages of what a step trains on."""
    tokens = response_tokens(data.sampled)
    trained = [r for shares in data.shares for r in grpo_fast.rollouts_of(shares)]
    ages = step - 1 - np.concatenate([[], *(r.versions for r in trained)])
    loads = [[tokens_of(packs) for packs in shares] for shares in data.shares]  # [mini-batch][learner]
    learner_tokens = sum(map(sum, loads))
    fullest_tokens = sum(map(max, loads))

    metrics = {"tokens": float(tokens)}
    metrics["val/sequence_lengths"] = tokens / sum(map(len, data.sampled))
    metrics["val/num_learner_tokens"] = float(learner_tokens)
    metrics["val/num_steps_off_policy"] = float(ages.sum()) / max(len(ages), 1)
    metrics["oldest"] = float(ages.max(initial=0))
    metrics["imbalance"] = fullest_tokens / max(learner_tokens / len(loads[0]), 1)
    return metrics


@functools.cache
def meta_policy(name: str) -> grpo.Policy:
    """The policy without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return grpo.Policy(AutoModelForCausalLM.from_config(roofline.load_config(name), dtype=torch.bfloat16))


def cache_tokens(args: Any) -> float:
    """Tokens that an engine's cache holds; 2 GiB go to its activations and graphs."""
    shape = roofline.shape_of(args.model_name_or_path)
    room = roofline.GPUS[args.gpu].memory * memory.GIB * args.vllm_gpu_memory_utilization - 2 * memory.GIB
    return (room * args.vllm_tensor_parallel_size - 2 * shape.weights) / shape.token_bytes


def tokens_of(packs: list[Any]) -> int:
    """Tokens of some packs."""
    return sum(grpo.piece_length(piece) for pack in packs for piece in pack)


# --- What is asked ----------------------------------------------------------------------------------------------------


def learner_gib(args: Any) -> float:
    """scripts/proof/memory.py's estimate for a learner, GiB."""
    flags = {name: getattr(args, name) for name in ESTIMATED_BY if name not in ("model_dtype", "model_revision")}
    setup = memory.Setup(**flags, learners=sum(args.num_learners_per_node), logprob_chunk=grpo.LOGPROB_CHUNK)
    estimate = memory.memory_estimate(setup, roofline.load_config(args.model_name_or_path))
    return sum(size for name, size in estimate.items() if not name.startswith("engine")) / memory.GIB


def why(play: Play) -> str:
    """Who waits for whom."""
    total = play.mean("time/total")
    idle = play.mean(IDLE)
    waits = play.mean(WAITS)
    trains = play.mean("time/training")
    gather = play.mean("time/gather")
    if play.mean("host") * play.args.host_speed > 0.9 * total:
        return "learner 0's Python is the bottleneck"
    if gather > trains:
        return f"weights are the bottleneck: learners hand them over in {gather:.1f} of {total:.1f} s"
    if waits < 0.05 * total:
        return f"learners are the bottleneck: {trains:.1f} of {total:.1f} s; engines wait {idle:.1f} s"
    if idle < 0.05 * total:
        return f"engines are the bottleneck: learners wait {waits:.1f} of {total:.1f} s"
    return f"both wait, learners {waits:.1f} s, engines {idle:.1f} s: async_steps hides less than one of them"


def division(args: Any) -> str:
    """How the GPUs are divided, in words."""
    return f"{sum(args.num_learners_per_node)} learners + {args.vllm_num_engines} engines"


def describe(play: Play) -> str:
    """A run in a few lines."""
    args = play.args
    mean = play.mean
    tp = args.vllm_tensor_parallel_size
    total = mean("time/total")
    gpus = sum(args.num_learners_per_node) + args.vllm_num_engines * tp
    held = (mean("tokens_held") + mean("tokens")) * SAMPLE_BYTES
    oldest = max(row["oldest"] for row in play.rows)
    in_flight = ", in flight" if args.inflight_updates else ""
    lines = [
        f"{args.model_name_or_path}: {division(args)} x {tp}, async_steps {args.async_steps}{in_flight}: "
        f"{total:.1f} s a step, {mean('tokens') / total / gpus:,.0f} tokens a second and GPU",
        why(play),
        f"idle: learners {mean(WAITS) / total:.0%}, engines {mean(IDLE) / total:.0%} | update "
        f"{mean('time/training'):.1f} s on {mean('val/num_learner_tokens'):,.0f} tokens, fullest learner "
        f"{mean('imbalance'):.3f} of even | weights {mean('time/weight_sync'):.1f} s, of which engines pause "
        f"{mean('time/weight_sync_pause'):.1f}",
        f"staleness {mean('val/num_steps_off_policy'):.2f} updates, at most {oldest:.0f} | response tokens "
        f"{mean('val/sequence_lengths'):.0f}",
        f"learner 0: Python {mean('host'):.1f} s a step, rollouts {held / 1e9:.2f} GB | GPU memory: learner "
        f"{learner_gib(args):.0f} of {roofline.GPUS[args.gpu].memory:.0f} GiB, an engine's cache "
        f"{play.cache_tokens:,.0f} tokens",
        f"played {len(play.rows)} steps in {play.seconds:.0f} s",
    ]
    return "\n    ".join(lines)


def splits(args: Any) -> list[Any]:
    """Flags of each division of args.gpus worth trying: all on up to 16 GPUs, else some around an even one."""
    numbers = [n for n in range(1, args.gpus) if (args.gpus - n) % args.vllm_tensor_parallel_size == 0]
    if args.gpus > 16:
        even = even_learners(args, nearest(numbers, args.gpus / 2))
        numbers = sorted({nearest(numbers, share * even) for share in (0.75, 0.9, 1.0, 1.1, 1.25)})
    return [divided(args, learners) for learners in numbers]


def even_learners(args: Any, half: int) -> float:
    """How many learners have as much to do as the engines, by a short trial with `half` of the GPUs."""
    trial = Play(replace(divided(args, half), steps=2)).run()
    learner_work = trial.mean("time/training") * half
    engine_work = trial.mean("time/generation") * (args.gpus - half)
    return args.gpus * learner_work / max(learner_work + engine_work, 1e-9)


def nearest(numbers: list[int], wanted: float) -> int:
    return min(numbers, key=lambda n: abs(n - wanted))


def divided(args: Any, learners: int) -> Any:
    """args with so many learners, the other GPUs being engines."""
    engines = (args.gpus - learners) // args.vllm_tensor_parallel_size
    return replace(args, num_learners_per_node=[learners], vllm_num_engines=engines)


def lack_of_room(args: Any) -> str:
    """Why a division does not fit into memory; empty if it does."""
    most = roofline.GPUS[args.gpu].memory
    learner = learner_gib(args)
    cache = cache_tokens(args)
    if learner > 0.95 * most:
        return f"no room, a learner needs {learner:.0f} of {most:.0f} GiB"
    if cache < args.max_prompt_token_length + args.response_length:
        return f"no room, an engine's cache holds {max(cache, 0):,.0f} tokens"
    return ""


def plan(args: Any) -> list[Play]:
    """Play the splits that fit into memory; prints them, best first."""
    plays = []
    refused = []
    for flags in splits(args):
        reason = lack_of_room(flags)
        if reason:
            refused.append(f"{division(flags)}: {reason}")
        else:
            plays.append(Play(flags).run())
    plays.sort(key=lambda play: play.mean("time/total"))
    for place, play in enumerate(plays, start=1):
        print(f"{place:2}. {division(play.args)}: {play.mean('time/total'):.1f} s a step; {why(play)}")
    print("\n".join(refused))
    if plays:
        print("\nthe best:\n" + describe(plays[0]))
    else:
        print("nothing fits: more GPUs, --gradient_checkpointing, --vllm_tensor_parallel_size, a smaller --pack_length")
    return plays


def scale(args: Any) -> None:
    """The run of 8 GPUs on more of them, with as many more prompts a step."""
    learners = args.num_learners_per_node[0]
    for times in (1, 8, 64, 512):
        engines = args.vllm_num_engines * times
        prompts = args.num_unique_prompts_rollout * times
        gpus = learners * times + engines
        if times > 1 and gpus > args.gpus:
            break
        flags = replace(args, num_learners_per_node=[learners * times], vllm_num_engines=engines)
        flags = replace(flags, num_unique_prompts_rollout=prompts)
        print(f"{gpus:,} GPUs, {prompts:,} prompts:", end=" ", flush=True)
        print(describe(Play(flags).run()), flush=True)


class Dropping(grpo_fast.Collector):
    """open-instruct's way, read in its data_loader.py of August 2026: async_steps * P groups are under way at any time,
    up to async_steps batches are made ahead, of what ended first, and a group whose first weights are then more than
    async_steps updates old is thrown away and replaced."""

    refill = True  # each group taken or thrown away lets another one start, at once

    def __init__(self, engines: Any, prompts: Any, args: Any, state: Any, pack: Any):
        super().__init__(engines, prompts, replace(args, active_sampling=True), state, pack)
        engines.wakes_for_each = True  # groups are taken as they end, and nobody waits for one by name
        self.ended: deque[int] = deque()  # positions
        self.left: dict[int, int] = {}  # position -> responses that have not ended
        self.dropped: list[Any] = []
        self.step = 0
        self.ready.maxsize = max(int(args.async_steps) - 1, 1)  # one more waits to be put

    def engines_have(self, *_: Any) -> None:
        if not self.admitted:
            self.admit(self.args.num_unique_prompts_rollout * max(self.args.async_steps, 1), self.sampler)

    def _finish(self, rollout: Any, generation: Any) -> None:
        super()._finish(rollout, generation)
        position = rollout.position
        left = self.left.get(position, len(self.in_flight[position])) - 1
        self.left[position] = left
        if not left:
            self.ended.append(position)

    def _collect(self) -> Any:
        data = grpo_fast.StepData()
        self.step += 1
        while len(data.groups) < self.args.num_unique_prompts_rollout:
            self.engines.wait_for(lambda: bool(self.ended), "a group")
            group, _ = self._take(self.ended.popleft())
            if self.refill:
                self.admit(self.admitted + 1, self.sampler)
            age = self.step - 1 - min(r.versions[0] for r in group)
            if self.refill and age > self.args.async_steps:
                self.dropped.append(group)
                del self.in_flight[group[0].position]
                self.counts["filtered"] += 1
            else:
                grpo.score_group(group, self.args)
                data.groups.append(group)
        grpo.set_advantages(data.groups, self.args)
        data.sampled = data.groups
        data.shares = [self.pack(rollouts) for rollouts in grpo.split_groups(data.groups, self.args)]
        self.consumed += len(data.groups)
        data.cursor = self.consumed
        return data


class Streaming(Dropping):
    """verl's way: with new weights, (1 + staleness) * P groups less those under way may start; none is thrown away, and
    a batch is made of what ended first."""

    refill = False

    def engines_have(self, cursor: int) -> None:
        self.admit(cursor + int(self.args.num_unique_prompts_rollout * (1 + self.args.async_steps)), self.sampler)


# verl, docs/advance/fully_async.md, "128-card Stale Ablation Experiment" (Qwen2.5-Math-7B, DAPO, 512 x 16, at most 28K
# tokens, 64 + 64 H20): staleness threshold -> seconds of a step, of those waiting for rollouts, of the update
VERL = {
    0.0: (231.34, 128.47, 98.77),
    0.1: (171.30, 58.17, 109.12),
    0.3: (146.11, 38.88, 103.22),
    0.5: (150.63, 33.14, 113.16),
}
VERL_REST_S = 4.1  # step less gen less update_actor, the same in all four
VERL_FLAGS = """--gpu h20 --num_unique_prompts_rollout 512 --num_samples_per_prompt_rollout 16 --num_mini_batches 1
    --num_learners_per_node 64 --vllm_num_engines 64 --response_length 28672 --pack_length 32768
    --max_prompt_token_length 2048 --steps 3 --host_speed 0 --no_filter_zero_std_samples"""


def play_verl(args: Any, length_mean: float, staleness: float) -> Play:
    """One of verl's settings, if responses had that mean length."""
    _, _, update_seconds = VERL[staleness]
    flags = replace(args, length_mean=length_mean, async_steps=staleness, inflight_updates=staleness > 0)
    clocks = replace(paper_clocks(flags), update=lambda packs, step: update_seconds, rest=VERL_REST_S)
    return Play(flags, clocks, kind=Streaming).run()


def records(args: Any) -> list[float]:
    """verl's four staleness settings. Their lengths are not published: their mean is chosen so that the wait of the
    first setting comes out; the other three are then played. Returns the errors of their steps."""
    words = f"{VERL_FLAGS} --length_sigma {args.length_sigma} --seed {args.seed}".split()
    words += ["--clocks", args.clocks] if args.clocks else []
    args = utils.parse_args(Simulation, words)
    _, published_wait, _ = VERL[0.0]
    low = 200.0
    high = 20000.0
    for _ in range(7):
        middle = math.sqrt(low * high)
        if play_verl(args, middle, 0.0).mean(WAITS) < published_wait:
            low = middle
        else:
            high = middle
    mean = math.sqrt(low * high)
    print(f"mean length {mean:.0f} (sigma of the logarithm {args.length_sigma}) gives the wait of staleness 0\n")
    print("| staleness | step, verl | played | waits, verl | played |\n|---|---|---|---|---|")
    errors = []
    for staleness, (step, wait, _) in VERL.items():
        play = play_verl(args, mean, staleness)
        played = play.mean("time/total")
        errors.append(played / step - 1)
        print(f"| {staleness} | {step:.0f} | {played:.0f} | {wait:.0f} | {play.mean(WAITS):.0f} |", flush=True)
    return errors


def dropping(args: Any) -> list[Play]:
    """Admission and dropping on the same stream of prompts."""
    plays = {"admission": Play(args).run(), "dropping": Play(args, kind=Dropping).run()}
    for name, play in plays.items():
        first = play.collector.first
        positions = range(first, first + len(play.trained) * args.num_unique_prompts_rollout)
        offered = [tokens for position in positions for tokens, _ in play.drawn.group(position)]
        trained = lengths_of(play.trained)
        dropped = lengths_of(getattr(play.collector, "dropped", []))
        share = sum(dropped) / (sum(dropped) + sum(trained))
        print(
            f"{name}: {play.mean('time/total'):.1f} s a step, staleness {play.mean('val/num_steps_off_policy'):.2f}; "
            f"thrown away {len(dropped):,} rollouts, {share:.1%} of the tokens"
        )
        line = (
            f"    tokens of a response, mean and 50th, 90th, 99th percentile: trained {spread(trained)}, the stream's "
        )
        line += f"first as many {spread(offered)}"
        print(f"{line}, thrown away {spread(dropped)}" if dropped else line)
    return list(plays.values())


def lengths_of(groups: list[Any]) -> list[int]:
    """Tokens of each response in some groups."""
    return [len(r.token_ids) for group in groups for r in group]


def spread(lengths: list[int]) -> str:
    """Mean and quantiles."""
    percentiles = [f"{np.percentile(lengths, q):.0f}" for q in (50, 90, 99)]
    return f"{np.mean(lengths):.0f} ({', '.join(percentiles)})"


class PlayedRun(NamedTuple):
    """A run to be played again."""

    args: Any  # its flags
    rows: list[dict[str, float]]  # its metrics, step by step
    drawn: Drawn  # its lengths and scores


def read_run(args: Any) -> PlayedRun:
    """The run --run, with its own lengths and scores if it has them (--save_traces), else drawn ones."""
    run = Path(args.run)
    if not (run / "metrics.jsonl").exists():
        raise utils.UserError(f"--run {args.run}: no run of grpo_fast.py, it has no metrics.jsonl")
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["training_step"] > 0]
    if not rows or "val/engine_idle_share" not in rows[0]:
        raise utils.UserError(f"--run {args.run}: its metrics are not those of grpo_fast.py")

    flags = json.loads((run / "args.json").read_text())
    known = {name: value for name, value in flags.items() if name in Simulation.__dataclass_fields__}
    steps = len(rows) - 2 * (known["async_steps"] + 1)
    if steps < 2:
        raise utils.UserError(f"--run {args.run}: {len(rows)} steps are too few; take {len(rows) + 2 - steps} or more")
    args = replace(args, **known, steps=steps, gpu=args.gpu, host_speed=args.host_speed)
    traces = run / "rollouts.jsonl"
    if not traces.exists():
        length = mean_of(rows, "val/sequence_lengths")
        solved = mean_of(rows, "objective/verifiable_correct_rate")
        args = replace(args, length_mean=length, solve_rate=solved)
        return PlayedRun(args, rows, Drawn(args))

    rollouts = {}
    prompts = {}
    for r in read_jsonl(traces):
        rollouts[r["position"], r["sample"]] = (len(r["token_ids"]), r["verifiable"] or 0.0)
        prompts[r["position"]] = len(r["prompt_ids"])
    return PlayedRun(args, rows, Drawn(args, rollouts, prompts))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean_of(rows: list[dict[str, float]], name: str) -> float:
    """Mean of a metric over steps; 0 in those that lack it."""
    return sum(row.get(name, 0.0) for row in rows) / len(rows)


def middle_of(run: PlayedRun) -> list[dict[str, float]]:
    """The steps that are compared: before them the pipeline fills, after them it runs dry."""
    first = run.args.async_steps + 1
    return run.rows[first : first + run.args.steps]


class FittedUpdate:
    """Seconds of an update: a constant and a time for each token of the fullest learner, times the factor by which the
    run's own step was slower or faster."""

    def __init__(self, run: PlayedRun):
        self.learners = sum(run.args.num_learners_per_node)
        rows = middle_of(run)
        tokens = [row["val/num_learner_tokens"] / self.learners for row in rows]
        seconds = [row["time/training"] for row in rows]
        self.constant, self.slope = linear(tokens, seconds)
        self.factors = {}  # of steps
        for step, (n, took) in enumerate(zip(tokens, seconds, strict=True), start=run.args.async_steps + 2):
            self.factors[step] = took / (self.constant + self.slope * n)

    def __call__(self, mini_batches: MiniBatches, step: int) -> float:
        loads = [sum(tokens_of(shares[i]) for shares in mini_batches) for i in range(self.learners)]
        return self.factors.get(step, 1.0) * (self.constant + self.slope * max(loads, default=0))


def fitted(run: PlayedRun) -> Clocks:
    """Clocks of a run's metrics, those of the steps in the middle. The engine takes a time for each decoding step."""
    args = run.args
    mean = functools.partial(mean_of, middle_of(run))
    size = mean("val/weight_sync_bytes")
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    rest = mean("time/total") - mean(WAITS) - mean("time/training") - mean("time/gather")
    clocks = Clocks(
        base=1e-3,
        each=0.0,
        cached=0.0,
        update=FittedUpdate(run),
        gather=mean("time/gather") / size,
        wire=max(mean("time/weight_sync_wire") / size, 1e-15),
        load=mean("time/weight_sync_load") / size,
        rest=rest,
        reward=mean("time/reward") / samples,
    )
    for _ in range(3):  # how many decoding steps there are depends on who waits for whom
        play = Play(args, clocks, run.drawn).run()
        clocks = replace(clocks, base=clocks.base * mean("time/generation") / play.mean("time/generation"))
    return clocks


def linear(x: list[float], y: list[float]) -> tuple[float, float]:
    """(constant, slope) of least squares, neither negative."""
    slope = 0.0
    if len(set(x)) > 1:
        slope = float(np.cov(x, y)[0, 1] / np.var(x, ddof=1))
    mean_x = sum(x) / len(x)
    mean_y = sum(y) / len(y)
    slope = min(max(slope, 0.0), mean_y / max(mean_x, 1e-9))
    return mean_y - slope * mean_x, slope


def fit(args: Any) -> list[Play]:
    """A run and its simulation side by side, over the steps in the middle."""
    run = read_run(args)
    clocks = fitted(run)
    print(
        f"clocks of {args.run}: a decoding step {clocks.base * 1e3:.2f} ms, weights {clocks.load * 1e9:.2f} s a GB, "
        f"rest of a step {clocks.rest:.3f} s"
    )
    play = Play(run.args, clocks, run.drawn).run()
    rows = middle_of(run)
    print(f"\n| mean of {run.args.steps} steps | run | played |\n|---|---|---|")
    for name in FITTED:
        print(f"| {name} | {mean_of(rows, name):.4g} | {play.mean(name):.4g} |")
    print(f"\nstep time off by {play.mean('time/total') / mean_of(rows, 'time/total') - 1:+.1%}")
    return [play]


# of metrics.jsonl; the last four have to be equal where lengths and scores are the run's own
FITTED = """time/total time/training time/trainer_waiting_for_data time/generation time/generation_waiting_for_trainer
    time/weight_sync_pause time/gather val/learner_idle_share val/engine_idle_share val/num_steps_off_policy
    batch/groups_in_flight val/sequence_lengths val/num_learner_tokens batch/groups_trained
    batch/groups_filtered""".split()


def run(args: Any) -> None:
    play = Play(args).run()
    print(describe(play))


def main() -> None:
    args = utils.parse_args(Simulation)
    if args.what == "fit":  # clocks of a run
        fit(args)
        return
    what = {"run": run, "plan": plan, "scale": scale, "dropping": dropping, "records": records}[args.what]
    print("On paper: data sheets times efficiencies that are believed (roofline.py). What is played is a range:")
    best = []
    for end in [args.clocks] if args.clocks else roofline.ENDS:
        print(f"\nclocks of the {end} end", flush=True)
        found = what(replace(args, clocks=end))
        if args.what == "plan" and found:
            best.append(division(found[0].args))
    if len(best) > 1:
        same = f"At both ends {best[0]} come first." if best[0] == best[1] else ""
        print(same or f"\nWhich split is best is not known: {best[0]} at the fast end, {best[1]} at the slow end.")


if __name__ == "__main__":
    try:
        main()
    except (utils.UserError, ValueError) as error:
        raise SystemExit(f"simulate.py: {error}") from None
