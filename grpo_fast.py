"""GRPO on a fast machine: the algorithm of grpo.py, with generation and learning side by side on devices of their own.

    python grpo_fast.py --flags                       one learner and one engine, started by this script
    torchrun --nproc_per_node=8 grpo_fast.py --num_learners_per_node 6 --vllm_num_engines 2 --flags

On each node the first num_learners_per_node ranks learn; the others are vLLM engines. All of the maths is imported from
grpo.py. This file decides who does what when:

    collector (a thread of learner 0)   admits prompts, takes groups in stream order, scores and packs, one step ahead
    learners                            run the update of grpo.py on their packs, then gather the new weights
    sender (a thread of learner 0)      broadcasts weights to the engines while the next update runs
    engines                             decode; take new weights between two decoding steps
    watchdog (a thread of every rank)   ends a run in which nothing moves, with all stacks and outstanding requests

One step, with async_steps 1:

    1. New weights reach the engines: the sender tells the collector, which admits P more prompts.
    2. The engines sample them. Each response goes to its verifiers as soon as it ends.
    3. The collector takes the next P groups of the stream, waits for their scores, and packs them.
    4. The learners take the packs and update, while the engines sample the prompts admitted after them.
    5. The learners gather their weights bucket by bucket, and the sender broadcasts them: 1.

Admission bounds staleness. Let c(v) be the number of prompts consumed when version v of the weights was made. The
prompt at stream position i is admitted once the engines have a version v with i < c(v) + P * (async_steps + 1). Batches
are taken in stream order, so a rollout is at most async_steps updates old when it trains, no rollout is dropped for its
age, and long responses are as likely to be trained on as short ones. With async_steps 0 the run is strictly on-policy
and makes the updates of grpo.py.

A step with active_sampling takes more than P groups, so that many more are admitted (groups_ahead). If it then takes
fewer than expected, some admitted groups would be too old. They expire by the version that admitted them, whatever
their length. After every step started = trained + filtered + expired + in flight groups, or the run stops.

The learners share a world (FSDP2), and each engine has a world of its own. A bare process group of learner 0 and the
engines carries the weights. Everything else goes over local sockets, whose addresses are kept in torchrun's store, so
that no flag contains a port number.
"""

import contextlib
import functools
import gc
import math
import os
import pickle
import queue
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import numpy as np
import torch
import torch.distributed as dist

import grpo
from grpo import Args, Pack
from utils import TIMEOUT, Generation, Group, Prompt, Request, Rollout, World

BUCKET_BYTES = 256 * 2**20  # of a weight broadcast
NEWS_EVERY = 8  # decoding steps between looks for a message, which cost an engine of several ranks a millisecond
SIGN_EVERY_S = 10.0  # of life, from an engine whose responses are long
STOP_S = 10.0  # for engines to read that the run is over
RECENT_STEPS = 8  # of which groups_ahead takes the mean


# --- Processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """What this process is, in a run with `learners` learners and `engines` engines of `tp` ranks each."""

    learners: int
    engines: int
    tp: int
    is_learner: bool
    index: int  # of this learner, or of this engine
    tp_rank: int = 0  # in its engine

    @property
    def name(self) -> str:
        return f"{'learner' if self.is_learner else 'engine'} {self.index}"


def roles_of(args: Args, rank: int, ranks_per_node: int) -> Roles:
    """The role of a rank: on node i the first num_learners_per_node[i] ranks learn, the others are engines' ranks."""
    learner_ranks: list[int] = []
    for node, number in enumerate(args.num_learners_per_node):
        first = node * ranks_per_node
        learner_ranks += range(first, first + min(number, ranks_per_node))

    tp = args.vllm_tensor_parallel_size
    is_learner = rank in learner_ranks
    tp_rank = 0
    if is_learner:
        index = learner_ranks.index(rank)
    else:
        learners_before = sum(learner < rank for learner in learner_ranks)
        index, tp_rank = divmod(rank - learners_before, tp)
    return Roles(sum(args.num_learners_per_node), args.vllm_num_engines, tp, is_learner, index, tp_rank)


def launch(args: Args) -> None:
    """Start all ranks on this machine. Each runs this script, with open-instruct's flags already translated. Ranks that
    compute at the same time share the threads that grpo.py would have; those that take turns have as many each."""
    from scripts.parts import checks
    from scripts.parts import launch as launcher

    ranks = sum(args.num_learners_per_node) + args.vllm_num_engines * args.vllm_tensor_parallel_size
    threads = torch.get_num_threads()  # bits depend on it
    if args.async_steps > 0 or torch.cuda.is_available():
        threads = max(1, threads // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    names = [roles_of(args, rank, ranks).name for rank in range(ranks)]
    flags = checks.translate(sys.argv[1:], checks.names_of(Args)).line
    launcher.launch(names, [__file__, *flags])


def join(store: dist.Store, name: str, index: int, size: int) -> World:
    """Join the world of this process: that of all learners, or that of one engine's ranks."""
    local_rank = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}  # vLLM reads them too
    return utils.init_distributed(dist.PrefixStore(name, store))


def weights_group(store: dist.Store, roles: Roles, args: Args) -> tuple[Any, torch.device | None]:
    """A bare process group of learner 0 and all ranks of the engines, and the device of the tensors it sends (None: the
    rank's GPU). Waits for all of its ranks. A default group shared with the engines would hang inside vLLM. NCCL
    refuses two ranks on one GPU, so with --single_gpu_mode the group is gloo's."""
    size = 1 + roles.engines * roles.tp
    rank = 0
    if not roles.is_learner:
        rank = 1 + roles.index * roles.tp + roles.tp_rank
    prefix = dist.PrefixStore("weights", store)
    if args.single_gpu_mode or not torch.cuda.is_available():
        return dist.ProcessGroupGloo(prefix, rank, size, TIMEOUT), torch.device("cpu")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(prefix, rank, size, options), None


@dataclass(frozen=True)
class FixedOrder:
    """Which events happen in an order that timing cannot change.

    The bits of a token depend on the batch in which the engine decodes it. With --deterministic a run always has the
    same batches. With --async_steps 0 they are those of grpo.py.
    """

    requests: bool  # an engine gets the requests of an admission in one message, and each position has its engine
    messages: bool  # an engine reads a message only while no response is running: a late one would change the batch
    turns: bool  # the next turns of a message's requests start together, once all of them have been answered


def fixed_order(args: Args) -> FixedOrder:
    """The order that the flags ask for."""
    requests = args.deterministic or args.async_steps == 0
    turns = args.deterministic and args.has_turns
    messages = turns or (requests and (not args.has_turns or args.rollout_backend == "transformers"))
    return FixedOrder(requests, messages, turns)


# --- Weights ----------------------------------------------------------------------------------------------------------

Manifest = list[list[tuple[str, tuple[int, ...], str]]]  # buckets of (name, shape, dtype), each of one dtype


def plan_weights(policy: grpo.Policy, args: Args) -> Manifest:
    """Which tensor travels in which bucket, in the order of utils.engine_weights."""
    shapes = []
    for name, weight in utils.named_weights(policy.model):
        dtype = utils.DTYPES[args.model_dtype] if isinstance(weight, torch.nn.Parameter) else weight.dtype
        shapes.append((name, torch.empty(weight.shape, dtype=dtype, device="meta")))

    manifest: Manifest = []
    size = BUCKET_BYTES
    for name, tensor in utils.for_engine(policy.model, shapes, args):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if size >= BUCKET_BYTES or manifest[-1][0][2] != dtype:
            manifest.append([])
            size = 0
        manifest[-1].append((name, tuple(tensor.shape), dtype))
        size += tensor.numel() * tensor.itemsize
    return manifest


def tensors_to_send(policy: grpo.Policy, manifest: Manifest, args: Args) -> Iterator[torch.Tensor]:
    """Yield all weights, a flat bucket at a time. All learners must exhaust it in lock-step."""
    tensors = utils.engine_weights(policy, args)
    for bucket in manifest:
        yield torch.cat([tensor.flatten() for _, (_, tensor) in zip(bucket, tensors, strict=False)])


def receive_weights(
    group: Any, device: torch.device, manifest: Manifest, clock: "Clock", inbox: "Inbox"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a broadcast, bucket by bucket, on all ranks of an engine. Asks for a bucket once the one
    before is loaded, and adds the seconds on the wire to the clock."""
    for i, bucket in enumerate(manifest):
        if i > 0:
            inbox.say_ready()
        sizes = [math.prod(shape) for _, shape, _ in bucket]
        start = time.perf_counter()
        flat = torch.empty(sum(sizes), dtype=getattr(torch, bucket[0][2]), device=device)
        group.broadcast([flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
        if flat.is_cuda:  # NCCL's wait is one of the stream
            torch.cuda.current_stream().synchronize()
        clock.wire += time.perf_counter() - start
        for (name, shape, _), values in zip(bucket, flat.split(sizes), strict=True):
            yield name, values.view(shape)


# --- Engines ----------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """What an engine did since the run began: seconds, decoding steps, tokens."""

    busy: float = 0.0
    idle: float = 0.0  # nothing to decode
    pause: float = 0.0  # taking weights
    wire: float = 0.0  # the part of pause that waited for the network
    steps: int = 0
    tokens: int = 0


def spent(before: Sequence[Clock], now: Sequence[Clock]) -> list[Clock]:
    """What each engine did between two states of its clock."""
    differences = np.array([astuple(clock) for clock in now]) - [astuple(clock) for clock in before]
    return [Clock(*row) for row in differences.tolist()]


def most_requests(args: Args) -> int:
    """Requests that an engine may have at a time: its share of the rollouts that admission allows."""
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout * (args.async_steps + 1)
    return math.ceil(rollouts / args.vllm_num_engines)


def start_watchdog(args: Args, roles: Roles, meeting: Any) -> Any:
    """A thread that ends this process when nothing moves any more: see scripts/parts/launch.py."""
    from scripts.parts import launch as launcher

    return launcher.Watchdog(meeting, roles.name, launcher.limit_s(args))


def run_engine(args: Args, roles: Roles, meeting: Any) -> None:
    """One rank of an engine: load the model, meet learner 0, and do what it asks for."""
    world = join(meeting.store, f"engine{roles.index}", roles.tp_rank, roles.tp)
    start_watchdog(args, roles, meeting)
    if args.deterministic:  # on a GPU the bits of a token then do not depend on its batch either
        os.environ.setdefault("VLLM_BATCH_INVARIANT", str(int(world.device.type == "cuda")))
    tokenizer = utils.load_tokenizer(args)
    if args.single_gpu_mode:  # vLLM takes a share of the memory that it finds free: load one after the other
        before = f"engine {roles.index - 1}" if roles.index else "learner"
        meeting.store.get(f"{before} loaded")
    engine = utils.make_engine(replace(args, vllm_sleep="off"), tokenizer, world, most_requests(args))
    meeting.store.set(f"{roles.name} loaded", "")

    group, device = weights_group(meeting.store, roles, args)  # waits for learner 0, which loads a model meanwhile
    connection = None
    if world.is_main:
        from scripts.parts import addresses

        connection = addresses.meet_learner(meeting, roles.index)
    inbox = Inbox(connection, args.inflight_updates, fixed_order(args).messages)
    receive = functools.partial(receive_weights, group, device or world.device)
    utils.STOP.during = "what the learners ask for"
    try:
        EngineLoop(engine, world, inbox, receive).run()
    except (EOFError, ConnectionError):  # learner 0 says why
        raise utils.UserError("learner 0 has ended") from None


@dataclass
class EngineLoop:
    """The loop of one rank of an engine. With tensor parallelism the first rank tells the others what to do next."""

    engine: utils.Engine
    world: World  # of this engine
    inbox: "Inbox"
    receive: Callable[[Manifest, Clock, "Inbox"], Iterator]  # see receive_weights
    clock: Clock = field(default_factory=Clock)
    told: float = 0.0  # when learner 0 got the last sign of life

    def run(self) -> None:
        """Do what learner 0 asks for, until it sends stop. Raises EOFError if learner 0 is gone."""
        from scripts.parts import guards

        self.asker = guards.Asker(self.engine, lambda kind, content: self.inbox.send(kind, content, self.clock))
        self.engine.on_token = self.tell
        while True:
            start = time.perf_counter()
            message = self.next_message()
            if not self.engine.busy:
                self.clock.idle += time.perf_counter() - start

            if message is None:
                if self.engine.busy:
                    self.decode()
            elif message[0] == "generate":
                for name, request in message[1]:
                    self.engine.add(name, request)
            elif message[0] == "weights":
                self.load_weights(*message[1:])
            else:
                self.engine.close()
                return

    def next_message(self) -> tuple | None:
        """The next message of learner 0, on all ranks, or None. A busy engine of several ranks looks for one after
        every NEWS_EVERY decoding steps."""
        busy = self.engine.busy
        if self.world.size == 1:
            return self.inbox.next(busy)
        if busy and self.clock.steps % NEWS_EVERY:
            return None
        box = [self.inbox.next(busy)]
        has_news = torch.tensor([box[0] is not None])
        dist.broadcast(has_news, 0)
        if has_news:
            dist.broadcast_object_list(box)
        return box[0]

    def decode(self) -> None:
        """One decoding step; responses that end go to learner 0."""
        start = time.perf_counter()
        finished = self.engine.step()
        self.clock.busy += time.perf_counter() - start
        self.clock.steps += 1
        finished = self.asker.take(finished)
        self.clock.tokens += sum(len(generation.token_ids) for _, generation in finished)
        self.tell(finished)

    def tell(self, finished: Sequence[tuple[str, Generation]] = ()) -> None:
        """Send learner 0 what has finished, and a sign of life where nothing has for a while."""
        if finished or time.monotonic() - self.told > SIGN_EVERY_S:
            self.inbox.send("done", finished, self.clock)
            self.told = time.monotonic()

    def load_weights(self, version: int, manifest: Manifest) -> None:
        """Take part in a broadcast of weights, and ask the engine whether they arrived."""
        start = time.perf_counter()
        self.engine.load_weights(self.receive(manifest, self.clock, self.inbox), version)
        self.clock.pause += time.perf_counter() - start
        self.inbox.send("loaded", version, self.clock)
        is_idle = not self.engine.busy
        self.asker.ask()
        while is_idle and self.engine.busy:  # before other requests come: bits depend on the batch
            self.decode()


class Inbox:
    """Messages from learner 0 to one engine, in order. With `only_when_idle` a message waits until no response is
    running. Only the first rank of an engine has a connection, the others have None: nothing arrives there.

    Weights are announced first. The engine answers "ready" when it can take them: at once with `inflight`, else when
    its running responses have ended. Requests that arrive in between are for the new weights and wait for them."""

    def __init__(self, connection: Any, inflight: bool, only_when_idle: bool = False):
        self.connection = connection
        self.inflight = inflight
        self.only_when_idle = only_when_idle
        self.announced = False  # weights are on their way
        self.answered = False  # the engine has said that it can take them
        self.later: deque = deque()  # requests that wait for the weights

    def send(self, *message: Any) -> None:
        if self.connection is not None:
            self.connection.send(message)

    def say_ready(self) -> None:
        """The engine can take a bucket of weights."""
        self.send("ready", None, None)

    def next(self, busy: bool) -> tuple | None:
        """The next message for an engine that is `busy` with responses or not; None if it should decode."""
        while self.connection is not None and not (self.only_when_idle and busy):
            if self.announced and not self.answered and (self.inflight or not busy):
                self.say_ready()
                self.answered = True
            if self.later and not self.announced:
                return self.later.popleft()
            if not self.connection.poll(0 if busy else 60.0):
                return None

            message = self.connection.recv()
            kind = message[0]
            if kind == "announce":
                self.announced = True
                self.answered = False
            elif kind == "generate" and self.announced and not self.inflight:
                self.later.append(message)
            else:
                if kind == "weights":
                    self.announced = False
                return message
        return None


# Takes a response. Returns None if the rollout is over, else a future of its next request (or of None: it is over)
OnEnd = Callable[[Generation], Future | None]


class NamedRequest(NamedTuple):
    """A request to the engines. `on_end` takes its response."""

    name: str
    request: Request | Future  # a future: the environment is still answering the turn before
    on_end: OnEnd


class Engines(utils.Sampler):
    """Learner 0's side of all engines. `generate` makes it an engine like those of utils, for evaluation."""

    def __init__(
        self,
        connections: Sequence[Any],
        watchdog: Any,
        tokenizer: "utils.Tokenizer",
        eos_ids: list[int],
        args: Args,
    ):
        from scripts.parts import guards

        self.connections = connections
        self.locks = [threading.Lock() for _ in connections]  # one thread at a time sends to an engine
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.echo = guards.Echo(args)
        self.watchdog = watchdog
        watchdog.outstanding = self.outstanding
        self.rounds = None  # of turns that start together
        if fixed_order(args).turns:
            from scripts.parts import turns

            self.rounds = turns.Rounds()

        self.changed = threading.Condition()  # guards the attributes below
        self.dead = ""  # why nobody may wait for the engines any more
        self.gone = 0  # engines that have ended
        self.owner: dict[str, int] = {}  # outstanding request -> engine
        self.loads = [0] * len(connections)  # outstanding requests of each engine
        self.on_end: dict[str, OnEnd] = {}  # of requests that are not over
        self.finished: dict[str, float] = {}  # request -> when it was over; 0: not yet, and somebody waits for it
        self.loaded: dict[int, int] = {}  # version -> engines that have it
        self.ready = 0  # engines that wait for a bucket of the weights announced
        self.clocks = [Clock() for _ in connections]
        self.reported = list(self.clocks)  # at the last call of `spent`
        for index in range(len(connections)):
            threading.Thread(target=self._receive, args=(index,), daemon=True).start()

    def _receive(self, index: int) -> None:
        """Take in the messages of an engine, in a thread of its own."""
        while True:
            try:
                kind, content, clock = self.connections[index].recv()
            except (EOFError, OSError):
                with self.changed:
                    self.dead = f"engine {index} is gone"
                    self.gone += 1
                    self.changed.notify_all()
                return
            self.watchdog.beat()
            with self.changed:
                self.clocks[index] = clock or self.clocks[index]
                if kind == "done":
                    self.loads[index] -= len(content)
                    for name, _ in content:
                        del self.owner[name]
                elif kind == "ready":
                    self.ready += 1
                    if self.ready == len(self.connections):
                        self.changed.notify_all()
                elif kind == "echo":
                    self.echo.judge(index, *content)
                else:
                    self.loaded[content] = self.loaded.get(content, 0) + 1
                    if self.loaded[content] == len(self.connections):
                        self.changed.notify_all()
            if kind == "done":
                for name, generation in content:
                    self._ended(name, index, generation)

    def _ended(self, name: str, index: int, ended: Generation | Future) -> None:
        """A response of engine `index` has ended, or the future of a next request has its result."""
        self.watchdog.beat()
        try:
            answer = ended.result() if isinstance(ended, Future) else self.on_end[name](ended)
            if isinstance(answer, Future):
                answer.add_done_callback(functools.partial(self._ended, name, index))
            else:
                self._go_on(name, index, answer)
        except Exception as error:  # nobody would see it: this thread has no caller
            traceback.print_exc()
            with self.changed:
                self.dead = f"handling of a response failed ({utils.words_of(error)})"

    def _go_on(self, name: str, index: int, request: Request | None) -> None:
        """A turn has been answered: start the next one, `request`, or have it wait for its round. Without a request the
        turn was the last one."""
        with self.changed:
            turns = [] if request is None else [(name, request)]
            if self.rounds is not None:
                turns = self.rounds.answer(name, request)
            if request is None:
                if name in self.finished:
                    self.changed.notify_all()
                self.finished[name] = time.perf_counter()
                del self.on_end[name]
            requests = [NamedRequest(name, turn, self.on_end[name]) for name, turn in turns]
        if requests:
            self.submit(requests, index)

    def outstanding(self) -> str:
        """The requests that no engine has answered yet, in words."""
        names = sorted(self.owner)
        shown = ", ".join(f"{name} (engine {self.owner[name]})" for name in names[:64])
        dots = ", ..." if len(names) > 64 else ""
        return f"{len(names)} requests: {shown}{dots}" if names else "no request"

    def submit(self, requests: Sequence[NamedRequest], index: int | None = None) -> None:
        """Give requests to engine `index`, or to the engine with the fewest. `on_end` is called in other threads."""
        ready = [(named.name, named.request) for named in requests if isinstance(named.request, Request)]
        with self.changed:
            if index is None:
                index = self.loads.index(min(self.loads))
            self.loads[index] += len(ready)
            for name, _ in ready:
                self.owner[name] = index
            for named in requests:
                self.on_end[named.name] = named.on_end
            if self.rounds is not None:
                self.rounds.start([named.name for named in requests])
        if ready:
            self.tell(index, ("generate", ready))
        for named in requests:
            if isinstance(named.request, Future):
                named.request.add_done_callback(functools.partial(self._ended, named.name, index))

    def spent(self) -> list[Clock]:
        """What each engine did since the last call."""
        before = self.reported
        self.reported = list(self.clocks)
        return spent(before, self.reported)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Block until condition() is true. Raises UserError when an engine is gone."""
        with self.changed:
            while not condition():
                if self.dead:
                    raise utils.UserError(f"{self.dead} while waiting for {what}")
                self.changed.wait(timeout=1.0)

    def take(self, names: Sequence[str]) -> float:
        """Wait until all turns of requests are over. Returns the time at which the last request was over."""
        for name in reversed(names):  # the last request often ends last, and then wakes this thread only once
            self.finished.setdefault(name, 0.0)
            self.wait_for(lambda name=name: self.finished[name] > 0, f"request {name}")
        with self.changed:
            return max([self.finished.pop(name) for name in names])

    def generate(
        self, requests: Sequence[Request | Future], finished: Callable[[int, Generation], Future | None]
    ) -> None:
        """See utils.Engine.generate; finished is called in another thread."""
        named_requests = []
        for i, request in enumerate(requests):
            name = f"now/{uuid.uuid4().hex}"
            named_requests.append(NamedRequest(name, request, functools.partial(finished, i)))
        engines = len(self.connections)
        for index in range(engines):
            self.submit(named_requests[index::engines], index)
        self.take([named.name for named in named_requests])

    def tell_all(self, message: tuple) -> None:
        """Send a message to every engine."""
        for index in range(len(self.connections)):
            self.tell(index, message)

    def tell(self, index: int, message: tuple) -> None:
        """Send a message to an engine. If that is gone, those who wait for it get to know."""
        with self.locks[index], contextlib.suppress(OSError):
            self.connections[index].send(message)

    def wait_loaded(self, version: int) -> None:
        """Block until every engine computes with `version`."""
        self.wait_for(lambda: self.loaded.get(version) == len(self.connections), f"version {version} in the engines")

    def stop(self, version: int) -> None:
        """See utils.Sampler.stop. Engines that have `version` are not busy with a broadcast. A dead one costs nothing
        any more. Those that still decode must find learner 0 there until they have read that they are to stop."""
        with contextlib.suppress(utils.UserError):
            self.wait_loaded(version)
        self.tell_all(("stop",))
        with self.changed:
            self.changed.wait_for(lambda: self.gone == len(self.connections), timeout=STOP_S)

    def close(self) -> None:
        """Switch the watchdog off: from now on nothing needs to move."""
        self.watchdog.timeout_s = math.inf


# --- Collector --------------------------------------------------------------------------------------------------------

Shares = list[list[Pack]]  # [share][pack]: a share has the packs of one learner, or of --sequence_parallel_size ones


@dataclass
class StepData:
    """What the collector hands to the learners for a step."""

    groups: list[Group] = field(default_factory=list)  # to train on
    sampled: list[Group] = field(default_factory=list)  # all that were sampled for the step
    expired: list[Group] = field(default_factory=list)  # that came before them and were too old
    shares: list[Shares] = field(default_factory=list)  # of each mini-batch
    pickled: list[list[list[torch.Tensor]]] = field(default_factory=list)  # the same, each pack as bytes
    cursor: int = 0  # prompts consumed so far
    sampler: dict[str, Any] = field(default_factory=dict)  # after these groups: see grpo.next_sampler
    taken: tuple[int, ...] = ()  # groups that each of the last RECENT_STEPS took
    seconds: dict[str, float] = field(default_factory=dict)


def groups_ahead(args: Args, taken: Sequence[int]) -> int:
    """How many groups may be admitted beyond those that were consumed when weights were made: P (async_steps + 1), the
    groups of that many steps.

    With active_sampling a step takes E >= P groups, the mean of `taken`. If a group has a gradient with probability
    P / E, n steps take n E groups with a standard deviation of sqrt(n E (E / P - 1)), and n E minus that is admitted:
    more would often expire, less would let the engines run dry."""
    prompts = args.num_unique_prompts_rollout
    steps = args.async_steps + 1
    if not args.active_sampling or args.async_steps == 0 or not taken:
        return prompts * steps
    mean = sum(taken) / len(taken)
    expected = steps * mean
    deviation = math.sqrt(expected * (mean / prompts - 1))
    return max(prompts * steps, int(expected - deviation))


def oldest_version(kept: dict[int, dict[str, Any]], version: int) -> int:
    """The oldest version that sampled a token of a checkpoint's rollouts of a group; `version` if that is older."""
    oldest = version
    for fields in kept.values():
        versions = np.asarray(fields.get("versions", ()))
        sampled = versions[versions >= 0]  # the others are answers
        if len(sampled):
            oldest = min(oldest, int(sampled.min()))
    return oldest


class Collector:
    """A thread that admits prompts, takes groups in stream order, scores and packs them, one step ahead.
    `pack` makes each learner's packs of some rollouts."""

    def __init__(
        self,
        engines: Engines,
        prompts: Sequence[Prompt],
        args: Args,
        state: dict,
        pack: Callable[[list[Rollout]], Shares],
    ):
        self.engines = engines
        self.prompts = prompts
        self.args = args
        self.pack = pack
        self.fixed = fixed_order(args).requests
        self.steps = range(state["step"], grpo.num_training_steps(args))
        self.number = state["step"] + 1  # of the step that is being collected
        self.version = state["step"] - 1  # of the weights that the engines have
        self.reported = state["step"]  # the last step that asks the engines no more
        self.first = state["cursor"]  # position of this start of the run
        self.admitted = self.first  # the next position to admit
        self.consumed = self.first  # the next position to collect
        self.sampler = state["sampler"]
        self.taken: tuple[int, ...] = state.get("taken", ())  # as in StepData, of the last step that was trained
        self.recent = self.taken  # of the last step that was collected
        # by the prompts consumed when weights were made: the sampler of that time, and its groups_ahead
        self.plans = {self.consumed: (self.sampler, groups_ahead(args, self.taken))}
        self.restored = state.get("rollouts", {})  # see checkpoint
        self.counts = state.get("counts", {"started": 0, "trained": 0, "filtered": 0, "expired": 0})
        rounds = grpo.MAX_SAMPLING_ROUNDS if args.active_sampling else 1
        self.most_groups = rounds * args.num_unique_prompts_rollout  # that a step may sample
        self.admitting = threading.Lock()
        self.in_flight: dict[int, Group] = {}  # position -> group that was started and has not reached a learner
        self.started_at: dict[int, float] = {}
        self.admitted_by: dict[int, int] = {}  # position -> version of the weights, or of its oldest token
        self.ready: queue.Queue = queue.Queue(maxsize=1)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.engines_have(self.consumed)
        self.thread.start()

    def engines_have(self, cursor: int) -> None:
        """The engines have the weights that were made when `cursor` prompts had been consumed. Admit every prompt that
        these weights allow, as the sampler of that time says: how far a later one is depends on timing. In a fixed
        order an evaluation of these weights comes first, because bits depend on what vLLM keeps of earlier prompts."""
        self.version += 1
        if self.fixed:
            self.engines.wait_for(lambda: self.reported >= self.version, "the evaluation")
        sampler, ahead = self.plans.pop(cursor, (self.sampler, groups_ahead(self.args, self.recent)))
        self.admit(cursor + ahead, sampler)

    def asks_no_more(self, number: int) -> None:
        """Learner 0 asks the engines no more in this step."""
        with self.engines.changed:
            self.reported = number
            self.engines.changed.notify_all()

    def admit(self, limit: int, sampler: dict[str, Any]) -> None:
        """Start all groups at stream positions below `limit` that have not been started."""
        if not self.args.active_sampling:  # then the run's end is known
            limit = min(limit, self.first + len(self.steps) * self.args.num_unique_prompts_rollout)
        with self.admitting:
            positions = range(self.admitted, limit)
            for position in positions:
                self._start_group(position, sampler)
        with self.engines.changed:
            self.engines.changed.notify_all()

        by_engine: dict[int, list[NamedRequest]] = {}
        for position in positions:
            requests = self._requests(position)
            if self.fixed:
                by_engine.setdefault(position % len(self.engines.connections), []).extend(requests)
            elif requests:
                self.engines.submit(requests)
        for index, requests in by_engine.items():
            self.engines.submit(requests, index)

    def _start_group(self, position: int, sampler: dict[str, Any]) -> None:
        """Choose the group at a stream position and count it as started. The engines' lock is held only for moments,
        because learner 0's main thread asks for it too."""
        version = self.version
        if position in self.restored:
            index, kept = self.restored[position]
            version = oldest_version(kept, version)
            group = grpo.new_group(self.prompts[index], position, len(kept))
        else:
            group = grpo.next_group(self.prompts, position, sampler, self.args)
        with self.engines.changed:
            self.in_flight[position] = group
            self.started_at[position] = time.perf_counter()
            self.admitted_by[position] = version
            self.counts["started"] += 1
            self.admitted = position + 1

    def _requests(self, position: int) -> list[NamedRequest]:
        """The requests of the group at a stream position. Rollouts of a checkpoint continue from where they were; those
        that were over go to their verifiers at once."""
        _, restored = self.restored.pop(position, (None, {}))
        requests = []
        for r in self.in_flight[position]:
            name = f"{position}/{r.sample}"
            r.go_back(restored.get(r.sample, {}))
            if r.over:
                grpo.start_scoring(r, self.engines, self.args)
                self.engines.finished[name] = time.perf_counter()
                continue
            request = grpo.next_request(r, self.engines, self.args)
            on_end = functools.partial(grpo.end_turn, r, engine=self.engines, args=self.args)
            requests.append(NamedRequest(name, request, on_end))
        return requests

    def _run(self) -> None:
        try:
            for _ in self.steps:
                self.ready.put(self._collect())
        except BaseException as error:  # handed to the learner, which raises it
            self.error = error
            self.ready.put(None)

    def _collect(self) -> StepData:
        """Gather, score and pack the groups of the next step."""
        args = self.args
        timer = utils.Timer(gpu=False)
        data = StepData()
        group_seconds = self._gather(data, timer)

        with timer("reward"):
            grpo.set_advantages(data.sampled, args)
        data.groups = data.groups[: args.num_unique_prompts_rollout]
        data.cursor = self.consumed
        seen = grpo.what_was_seen(data.sampled, args)
        data.sampler = grpo.next_sampler(self.sampler, seen, args)
        data.taken = (*self.recent, len(data.sampled))[-RECENT_STEPS:]
        self.sampler = data.sampler
        self.recent = data.taken
        self.plans[self.consumed] = (data.sampler, groups_ahead(args, data.taken))
        self.number += 1

        with timer("packing"):
            data.shares = [self.pack(rollouts) for rollouts in grpo.split_groups(data.groups, args)]
            for shares in data.shares:
                data.pickled.append([[to_bytes(pack) for pack in packs] for packs in shares])
        data.seconds = timer.seconds
        data.seconds["time/group_generation_mean"] = float(np.mean(group_seconds))
        data.seconds["time/group_generation_min"] = min(group_seconds)
        data.seconds["time/group_generation_max"] = max(group_seconds)
        return data

    def _gather(self, data: StepData, timer: utils.Timer) -> list[float]:
        """Take and score groups in stream order until the step has enough; returns the seconds of each. Groups that
        weights older than async_steps updates have admitted expire."""
        oldest = self.number - 1 - self.args.async_steps
        group_seconds = []
        while self._needs_groups(data):
            if self.consumed == self.admitted and (data.sampled or data.expired):
                self._admit_more(data)
            self.engines.wait_for(lambda: self.consumed < self.admitted, "new weights in the engines")
            position = self.consumed
            group, seconds = self._take(position)
            self.consumed += 1
            if self.admitted_by.pop(position) < oldest:
                data.expired.append(group)
                continue
            group_seconds.append(seconds)
            data.sampled.append(group)
            with timer("reward"):
                if grpo.score_group(group, self.args):
                    data.groups.append(group)
            self.engines.watchdog.beat()
        return group_seconds

    def _admit_more(self, data: StepData) -> None:
        """With active_sampling a step has taken all admitted groups and needs more. Wait for weights that are at most
        async_steps updates older than those it trains, and admit no more groups than it will take: a later step would
        find them too old."""
        least = self.number - 1 - self.args.async_steps
        self.engines.wait_for(lambda: self.consumed < self.admitted or self.version >= least, "newer weights")
        if self.consumed < self.admitted:
            return
        count = self.args.num_unique_prompts_rollout
        if self.args.async_steps > 0:
            count = min(count - len(data.groups), self.most_groups - len(data.sampled))
        self.admit(self.consumed + count, self.sampler)

    def _needs_groups(self, data: StepData) -> bool:
        """Whether a step needs more groups. With async_steps 0 it takes rounds of P groups, as grpo.py samples them."""
        wanted = self.args.num_unique_prompts_rollout
        if len(data.sampled) >= self.most_groups:
            return False
        inside_round = self.args.async_steps == 0 and len(data.sampled) % wanted > 0
        return len(data.groups) < wanted or inside_round

    def _take(self, position: int) -> tuple[Group, float]:
        """The group at a stream position, and the seconds from its start to its last token."""
        group = self.in_flight[position]
        end = self.engines.take([f"{position}/{r.sample}" for r in group])
        return group, end - self.started_at.pop(position)

    def next(self) -> StepData:
        """The next step's data. Raises what the thread raised. The first call starts the thread, so that a signal at
        the start still finds a step under way."""
        if self.thread.ident is None:
            self.start()
        data = self.ready.get()
        if data is None:
            raise self.error  # ty: ignore[invalid-raise]
        return data

    def checkpoint(self, cursor: int) -> dict[str, Any]:
        """What a checkpoint keeps of groups that no update has seen: `rollouts`, position -> (prompt index, sample ->
        its fields, none before its first turn has ended), and the counts without those groups.

        Turns that are still being made are left out: they will be sampled, or answered, again. With --deterministic the
        rollouts of weights older than the checkpoint's are waited for, and those of the checkpoint's own weights are
        not kept: they are sampled again in the same batches, because the batch affects the bits. Where an engine is
        gone, all are sampled again.
        """
        trained = self.counts["trained"]
        filtered = self.counts["filtered"]
        expired = self.counts["expired"]
        counts = {"trained": trained, "filtered": filtered, "expired": expired}
        counts["started"] = sum(counts.values())
        state: dict[str, Any] = {"counts": counts, "rollouts": {}, "taken": self.taken}
        if self.engines.dead:
            return state
        wanted = self.args.num_unique_prompts_rollout
        last = self.first + len(self.steps) * wanted
        of_older_weights = range(cursor, min(cursor + wanted * self.args.async_steps, last))
        if self.fixed:  # the weights that allow the last of them may still be on their way
            self.engines.wait_for(lambda: self.admitted >= of_older_weights.stop, "weights for a checkpoint's rollouts")
            awaited = [r for position in of_older_weights for r in self.in_flight[position]]
            self.engines.wait_for(lambda: all(r.over for r in awaited), "rollouts for a checkpoint")

        with self.engines.changed:
            in_flight = dict(self.in_flight)
        for position, group in in_flight.items():
            if position in of_older_weights or (position >= cursor and not self.fixed):
                kept = {r.sample: r.so_far() for r in group}
                state["rollouts"][position] = (group[0].prompt.index, kept)
        return state

    def account(self, data: StepData) -> dict[str, float]:
        """Count the groups after a step. The run ends unless started = trained + filtered + expired + in flight."""
        trained = {r.position for shares in data.shares for r in rollouts_of(shares)}
        for group in data.sampled:
            position = group[0].position
            del self.in_flight[position]
            end = "trained" if position in trained else "filtered"
            self.counts[end] += 1
        for group in data.expired:
            del self.in_flight[group[0].position]
            self.counts["expired"] += 1
        self.taken = data.taken
        with self.engines.changed:
            counts = self.counts | {"in_flight": len(self.in_flight)}
        accounted = counts["trained"] + counts["filtered"] + counts["expired"] + counts["in_flight"]
        if counts["started"] != accounted:
            utils.STOP.ask(f"groups got lost, a defect of grpo_fast.py: {counts}")
        tokens = sum(len(r.token_ids) for group in data.expired for r in group)
        found = {f"batch/groups_{name}": float(number) for name, number in counts.items()}
        return found | {"val/expired_tokens": float(tokens)}


def rollouts_of(shares: Sequence[Sequence[Pack]]) -> Iterator[Rollout]:
    """All rollouts in lists of packs."""
    for packs in shares:
        for pack in packs:
            for piece in pack:
                yield from piece


# --- Learners ---------------------------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """A flat part of the weights."""

    values: torch.Tensor
    gathered: Any = None  # on a GPU the event after which the values are there


class Sender:
    """A thread of learner 0 that broadcasts weights while the next update runs, then admits the prompts they allow.

    No collective starts before every engine can take part in it, because it would wait on the learner's GPU. Buckets
    gathered before the first engine is ready are copied to host memory. At most four buckets are on the GPU at a time:
    one being gathered, two queued, one being copied or sent. `group` and `device` are those of weights_group.
    """

    def __init__(self, engines: Engines, group: Any, device: torch.device | None):
        self.engines = engines
        self.group = group
        self.device = device
        self.collector: Collector | None = None  # from the first step on
        self.queue: queue.Queue = queue.Queue(maxsize=2)  # (manifest, version, cursor), then the buckets
        self.metrics: dict[str, float] = {}  # of the last broadcast
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            manifest, version, cursor = self.queue.get()
            start = time.perf_counter()
            clocks = list(self.engines.clocks)
            try:
                num_bytes = self._send(manifest, version)
                self.engines.wait_loaded(version)
                sync_clocks = spent(clocks, list(self.engines.clocks))
                wire = max(clock.wire for clock in sync_clocks)
                self.metrics = {
                    "time/weight_sync": time.perf_counter() - start,
                    "time/weight_sync_wire": wire,
                    "time/weight_sync_load": max(clock.pause - clock.wire for clock in sync_clocks),
                    "time/weight_sync_pause": max(clock.pause for clock in sync_clocks),
                    "val/weight_sync_bytes": float(num_bytes),
                    "val/weight_sync_gb_per_second": num_bytes / wire / 1e9,
                    "val/weight_sync_version": float(version),
                }
                if self.collector is not None:
                    self.collector.engines_have(cursor)
            except (RuntimeError, OSError, utils.UserError) as error:
                with self.engines.changed:
                    self.engines.dead = self.engines.dead or f"weight broadcast failed ({error})"
                    self.engines.changed.notify_all()
                while True:  # the learner must not wait for room in the queue
                    self.queue.get()

    def _send(self, manifest: Manifest, version: int) -> int:
        """Broadcast the buckets of a version as they come; returns their bytes."""
        engines = self.engines
        num_engines = len(engines.connections)
        num_bytes = 0
        started = False  # the engines take part in broadcasts
        waiting: deque[Bucket] = deque()  # gathered and not sent

        engines.ready = 0
        if engines.rounds is not None:  # the weights of a turn must not depend on when its answer comes
            engines.wait_for(lambda: not engines.on_end, "the rollouts that have turns to come")
        engines.tell_all(("announce", version))
        for left in reversed(range(len(manifest))):
            waiting.append(self.queue.get())
            num_bytes += waiting[-1].values.nbytes
            if left and not started and engines.ready < num_engines:
                waiting[-1] = self._to_host(waiting[-1])
                continue
            while waiting:
                engines.wait_for(lambda: engines.ready == num_engines, "engines that can take weights")
                if not started:
                    engines.tell_all(("weights", version, manifest))
                    started = True
                engines.ready = 0
                self._broadcast(waiting.popleft())
        return num_bytes

    def _to_host(self, bucket: Bucket) -> Bucket:
        """A copy in host memory of a bucket on a GPU."""
        if bucket.gathered is None:
            return bucket
        host = torch.empty_like(bucket.values, device="cpu", pin_memory=True)  # torch keeps what it pins for later
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(bucket.gathered)
            host.copy_(bucket.values, non_blocking=True)
            self.stream.synchronize()
        return Bucket(host)

    def _broadcast(self, bucket: Bucket) -> None:
        """Send a bucket to all engines, which wait for it."""
        device = self.device or (bucket.values.device if self.stream is None else "cuda")
        with torch.cuda.stream(self.stream):  # does nothing where there is none
            if bucket.gathered is not None:  # wait for the gather, not for the update that was queued after it
                self.stream.wait_event(bucket.gathered)
            data = bucket.values.view(torch.uint8).to(device)  # waits until all is copied: gloo sends what is there
            self.group.broadcast([data], dist.BroadcastOptions()).wait()
            if data.is_cuda:  # else all buckets would be on their way at once
                self.stream.synchronize()


def send_weights(
    policy: grpo.Policy, manifest: Manifest, sender: Sender | None, args: Args, version: int, cursor: int
) -> None:
    """Gather the weights bucket by bucket. Learner 0 hands each bucket to the sender, which broadcasts it while the
    next one is gathered. Waits only for a broadcast of earlier weights. All learners."""
    if sender is not None:
        sender.queue.put((manifest, version, cursor))
    for values in tensors_to_send(policy, manifest, args):
        if sender is not None:
            sender.engines.echo.note(version, values)
            gathered = torch.cuda.current_stream().record_event() if values.is_cuda else None
            sender.queue.put(Bucket(values, gathered))


def start_sender(run: grpo.Run, roles: Roles, meeting: Any) -> Sender:
    """On learner 0, once its model is loaded: start the reward models, wait for the engines, and start the sender."""
    from scripts.parts import addresses

    meeting.store.set("learner loaded", "")
    run.servers = grpo.start_reward_models(run.args, run.run_dir, run.eval_world)
    eos_ids = utils.eos_token_ids(run.args, run.tokenizer)
    watchdog = start_watchdog(run.args, roles, meeting)
    group, device = weights_group(meeting.store, roles, run.args)
    run.learner.policy.register_forward_pre_hook(lambda *_: watchdog.beat())  # an update may be longer than the limit
    connections = addresses.meet_engines(meeting, roles.engines, roles.learners + roles.engines * roles.tp)
    engines = Engines(connections, watchdog, run.tokenizer, eos_ids, run.args)
    run.engine = engines
    return Sender(engines, group, device)


def run_learner(args: Args, roles: Roles, meeting: Any) -> Path:
    """The training loop of every learner; learner 0 also owns collector, sender and all files."""
    from scripts.parts import engine_report

    world = join(meeting.store, "learners", roles.index, roles.learners)
    if not world.is_main:
        start_watchdog(args, roles, meeting)
    run = grpo.set_up(args, world)  # the engines are still starting
    run.eval_world = World(0, world.local_rank, 1, world.device)  # learner 0 only
    state = run.state
    policy = run.learner.policy
    manifest = plan_weights(policy, args)
    sender = start_sender(run, roles, meeting) if world.is_main else None

    utils.say("start    engines, once loaded, get the first weights and show that they have the learner's logprobs")
    send_weights(policy, manifest, sender, args, state["step"], state["cursor"])
    gap = check_engines(run, state["step"])
    utils.shard_again(policy)
    processes = f"{roles.learners} learners, {roles.engines} engines, async_steps {args.async_steps}; "
    grpo.start_log(run, gap, roles.engines, processes)
    meeting.begin()
    collector = make_collector(run, sender) if sender is not None else None
    more_state: Callable[[], dict[str, Any]] = dict
    if collector is not None:
        more_state = lambda: collector.checkpoint(state["cursor"])  # noqa: E731

    first_step = state["step"] + 1
    last_step = grpo.num_training_steps(args)
    collect_garbage_by_hand()
    for number in utils.profiled(utils.STOP.steps(range(first_step, last_step + 1)), args, world):
        step = grpo.Step(number)
        data = StepData()
        with step.timer("trainer_waiting_for_data"):
            if collector is not None:
                with utils.STOP.on_error():
                    data = collector.next()
            part = scatter(data, args, world)
        if part.over:
            grpo.save_state(run, more_state)
            break
        step.groups = data.groups
        step.sampled = data.sampled
        step.seconds = data.seconds
        step.packs = part.packs
        state["cursor"] = part.cursor
        state["sampler"] = part.sampler
        if utils.leads(args, world):
            note_staleness(step.packs, number, args, step.metrics)
        with step.timer("training"):
            grpo.train(run, step, part.probe, args)
            if args.async_steps == 0:  # the gap on rollouts of older weights says nothing about the engine
                run.guards.judge_gap(step.gap, f"in step {number}")
        with step.timer("gather"):
            send_weights(policy, manifest, sender, args, number, state["cursor"])

        # everything below reports or saves
        out = grpo.step_metrics(run, step)
        grpo.advance(run, step, out)
        if collector is not None and sender is not None:
            engines = collector.engines
            engines.watchdog.beat()
            out |= collector.account(data) | sender.metrics
            out |= engine_report.metrics(engines.spent(), policy, out, state)
        evaluates = grpo.due(args.local_eval_every, number, last_step)
        if args.async_steps and (evaluates or number == first_step):
            run.guards.judge_gap(check_engines(run, number), f"after the weights of step {number}")
        elif sender is not None and evaluates:
            with utils.STOP.on_error():
                sender.engines.wait_loaded(number)
        grpo.end_step(run, step, out)
        if collector is not None:
            collector.asks_no_more(number)
        if grpo.save_state(run, more_state):
            break
        gc.collect()
    return grpo.finish(run)


def make_collector(run: grpo.Run, sender: Sender) -> Collector:
    """Learner 0's collector, which the sender tells about new weights."""
    args = run.args
    pack = functools.partial(
        grpo.pack_rollouts,
        packing=run.packing,
        pair_cost=run.learner.policy.pair_cost,
        pack_length=args.pack_length,
        learners=run.world.size // args.sequence_parallel_size,
    )
    collector = Collector(sender.engines, run.train_prompts, args, run.state, pack)
    sender.collector = collector
    sender.engines.spent()  # the start is no part of a step
    return collector


def check_engines(run: grpo.Run, version: int) -> Any:
    """The logprob gap of short responses of each engine to the learners' present weights, `version`. All learners."""
    from scripts.parts import guards

    box: list[list[Group]] = [[]]
    if isinstance(run.engine, Engines):
        engines = run.args.vllm_num_engines
        with utils.STOP.on_error():
            run.engine.wait_loaded(version)
            box = [grpo.sample_probes(run.engine, run, 0, guards.GAP_PROMPTS * engines, 1)]
    dist.broadcast_object_list(box)
    return grpo.measure_gap(run.learner.policy, box[0], run.args, run.world)


class LearnerData(NamedTuple):
    """What a learner gets for a step."""

    packs: list[list[Any]]  # of each mini-batch; on their way the bytes of each
    probe: list[Group]  # to measure the logprob gap on
    cursor: int
    sampler: dict[str, Any]
    over: bool  # there is no data: the run has to end


def scatter(data: StepData, args: Args, world: World) -> LearnerData:
    """This learner's part of the step that learner 0 has collected; packs travel one by one. All learners. Neighbours
    that split sequences between them (--sequence_parallel_size) get the same packs."""
    share_of = [rank // args.sequence_parallel_size for rank in range(world.size)]
    parts: list[Any] = [None] * world.size
    if world.is_main:
        probe = data.sampled[: args.per_device_train_batch_size]
        for rank, share in enumerate(share_of):
            sizes = [[len(pack) for pack in shares[share]] for shares in data.pickled]
            parts[rank] = LearnerData(sizes, probe, data.cursor, data.sampler, not data.sampled)
    box: list[Any] = [None]
    dist.scatter_object_list(box, parts)
    part: LearnerData = box[0]

    transfers = []
    if world.is_main:
        pickled = [shares[0] for shares in data.pickled]
        for rank in range(1, world.size):
            for shares in data.pickled:
                transfers += [dist.isend(pack, rank) for pack in shares[share_of[rank]]]
    else:
        pickled = [[torch.empty(size, dtype=torch.uint8) for size in sizes] for sizes in part.packs]
        for packs in pickled:
            transfers += [dist.irecv(pack, 0) for pack in packs]
    for transfer in transfers:
        transfer.wait()
    return part._replace(packs=[[pickle.loads(pack.numpy()) for pack in packs] for packs in pickled])


def to_bytes(pack: Pack) -> torch.Tensor:
    """A pickled pack. To pickle all packs in one call would stop every thread of learner 0 meanwhile."""
    return torch.frombuffer(bytearray(pickle.dumps(pack, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def collect_garbage_by_hand() -> None:
    """Keep Python from a full garbage collection in the middle of a step. With a batch of rollouts in flight it would
    stop all threads for a second; a collection after 100,000 new objects would stop them for 70 ms.

    Objects that exist now are frozen: the collector never scans them again. All others are collected between two steps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 10, 2**30)
    sys.setswitchinterval(1e-4)  # with Python's 5 ms a thread that waits for several others stood still for 140 ms


# --- Reports ----------------------------------------------------------------------------------------------------------


def note_staleness(packs: Sequence[Sequence[Pack]], step: int, args: Args, metrics: utils.Metrics) -> None:
    """Count how many updates old the weights behind the trained tokens are. The run ends for a token that is more than
    async_steps updates old: a defect of this script, and never a matter of timing."""
    for mini_batch in packs:
        for pack in mini_batch:
            versions = np.concatenate([r.versions[r.mask] for r in rollouts_of([[pack]])])
            versions = versions[versions >= 0]  # the others were not sampled for this run: see grpo.note_gap
            if len(versions) == 0:
                continue
            ages = step - 1 - versions
            if ages.max() > args.async_steps:
                utils.STOP.ask(f"step {step} has tokens {ages.max()} updates old; async_steps {args.async_steps}")
            metrics.add("val/num_steps_off_policy", float(ages.sum()), len(versions))
            metrics.add_all("val/model_step", versions)


def main(args: Args) -> None:
    """Start the ranks, or be one of them."""
    from scripts.parts import checks, hub, plan
    from scripts.parts import launch as launcher

    args = args.beside_engine(args.single_gpu_mode)
    world_size = int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    args.check(1, fast=True)
    checks.check_fast(args, world_size, ranks_per_node)
    grpo.configure_rewards(args)
    if args.dry_run or world_size is None:
        plan.print_plan(
            replace(args, vllm_sleep="off"),
            fast=True,
            learners=sum(args.num_learners_per_node),
            shared_gpu=args.single_gpu_mode,
            logprob_chunk=grpo.LOGPROB_CHUNK,
        )
    if args.dry_run:
        return
    if world_size is None:
        launch(args)
        return
    launcher.die_with_parent()
    roles = roles_of(args, int(os.environ["RANK"]), ranks_per_node)
    meeting = launcher.Meeting(TIMEOUT)
    if meeting.restarted:
        args = utils.after_restart(args)
    utils.STOP.tell = meeting.keep_last_words
    hub.share_by_store(args, meeting.store)
    if utils.is_first_rank():
        dtype, why = plan.choose_dtype(args)
        print(f"dtype    {dtype}: {why}")
        meeting.store.set("dtype", dtype)
    args = replace(args, model_dtype=meeting.store.get("dtype").decode())
    if roles.is_learner:
        run_learner(args, roles, meeting)
    else:
        run_engine(args, roles, meeting)


if __name__ == "__main__":
    utils.run_script(main, Args)
