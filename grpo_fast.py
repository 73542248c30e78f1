"""GRPO on a fast machine: the algorithm of grpo.py with generation and learning side by side, each on its own devices.

    python grpo_fast.py --flags                       one learner and one engine, started by this script
    torchrun --nproc_per_node=8 grpo_fast.py --num_learners_per_node 6 --vllm_num_engines 2 --flags

On each node the first num_learners_per_node ranks learn, the others are vLLM engines. All of the maths is imported
from grpo.py; this file is about who does what when:

    collector (a thread of learner 0)   admits prompts, gathers groups in stream order, scores and packs, one step ahead
    learners                            the update of grpo.py on their share of the packs; gather new weights
    sender (a thread of learner 0)      broadcasts weights to the engines while the next update runs
    engines                             decode; take new weights between two decoding steps
    watchdog (a thread of every rank)   ends a run in which nothing moves, with all stacks and what is outstanding

Staleness is kept by admission: with c(v) prompts consumed when the engines got version v, position i of the prompt
stream is admitted once i < c(v) + P * (async_steps + 1). Batches are taken in stream order, so a rollout is at most
async_steps updates old when it trains, nothing is dropped for its age, and long responses are as likely to be trained
on as short ones. async_steps 0 is strictly on-policy and makes the updates of grpo.py. At every step
started = trained + filtered + in flight groups, or the run stops.

Learners have their own world (FSDP2), every engine its own; they meet in a bare process group for the weights and talk
over local sockets whose addresses travel through torchrun's store: no port number stands in any flag.
"""

import ctypes
import faulthandler
import functools
import gc
import math
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import numpy as np
import torch
import torch.distributed as dist

import grpo
from grpo import Args, Pack
from utils import Generation, Group, Prompt, Request, Rollout, World

BUCKET_BYTES = 256 * 2**20  # of a weight broadcast
NEWS_EVERY = 8  # decoding steps, of an engine of several ranks: to tell them that there is none takes a millisecond
TIMEOUT = timedelta(days=1)  # of waiting for another rank: the watchdog ends stalls, the launcher deaths


# --- Processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """Who this process is among `learners` learners and `engines` engines of `tp` ranks each."""

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

    def learns(r: int) -> bool:
        node, place = divmod(r, ranks_per_node)
        return node < len(args.num_learners_per_node) and place < args.num_learners_per_node[node]

    before = sum(learns(r) for r in range(rank))
    learners, engines, tp = sum(args.num_learners_per_node), args.vllm_num_engines, args.vllm_tensor_parallel_size
    if learns(rank):
        return Roles(learners, engines, tp, True, before)
    return Roles(learners, engines, tp, False, *divmod(rank - before, tp))


def check_fast_args(args: Args, world_size: int | None, ranks_per_node: int) -> None:
    """Refusals of grpo_fast.py alone; world_size is None if this script starts the processes itself, on one node."""
    from scripts.parts import checks

    checks.check_asynchronous(args)
    checks.check_processes(args, world_size, ranks_per_node)


def launch(args: Args) -> None:
    """Start all ranks on this machine: they are this script again, with open-instruct's flags already translated."""
    from scripts.parts import launch as launcher
    from scripts.parts import translate

    ranks = sum(args.num_learners_per_node) + args.vllm_num_engines * args.vllm_tensor_parallel_size
    cores = len(utils.ALL_CORES)
    side_by_side = args.async_steps > 0 or torch.cuda.is_available()  # else learners and engines compute in turns
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // ranks) if side_by_side else cores)
    names = [roles_of(args, rank, ranks).name for rank in range(ranks)]
    flags = translate.translate(sys.argv[1:], translate.names_of(Args)).line
    launcher.launch(names, [__file__, *flags])


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher is gone: kill -9 of the launcher must leave no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1 and os.path.basename(__file__) not in Path("/proc/1/cmdline").read_text():  # a container's
            raise SystemExit("grpo_fast.py: the launcher is gone")


def pin_cores(args: Args) -> None:
    """Give this rank its own cores where the ranks compute at the same time and there are enough."""
    cores, ranks = sorted(utils.ALL_CORES), int(os.environ["LOCAL_WORLD_SIZE"])
    if args.async_steps > 0 and not torch.cuda.is_available() and len(cores) >= ranks:
        utils.pin(cores[int(os.environ["LOCAL_RANK"]) :: ranks])


def join(store: dist.Store, name: str, index: int, size: int) -> World:
    """This process's own world: the learners' for a learner, one of its own for an engine."""
    local_rank = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}  # vLLM reads them too
    return utils.init_distributed(dist.PrefixStore(name, store), TIMEOUT)


def weights_group(store: dist.Store, roles: Roles, args: Args) -> tuple[Any, torch.device | None]:
    """A bare process group of learner 0 and all engines, and where its tensors live (None: on the rank's GPU). A shared
    default group would hang inside vLLM; NCCL refuses two ranks on one GPU."""
    rank = 0 if roles.is_learner else 1 + roles.index * roles.tp + roles.tp_rank
    prefix = dist.PrefixStore("weights", store)
    if torch.cuda.is_available() and not args.single_gpu_mode:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return dist.ProcessGroupNCCL(prefix, rank, 1 + roles.engines * roles.tp, options), None
    return dist.ProcessGroupGloo(prefix, rank, 1 + roles.engines * roles.tp, TIMEOUT), torch.device("cpu")


class Watchdog:
    """A thread that ends this process with all its stacks when learner 0 sees nothing move for --stall_timeout_s.
    Learner 0 calls `beat` whenever anything arrives or a step ends, and on a stall tells the others by the store."""

    def __init__(self, meeting: "Meeting", roles: Roles, timeout_s: float, outstanding: Callable[[], str] = lambda: ""):
        self.roles, self.timeout_s, self.outstanding = roles, timeout_s, outstanding
        self.last, self.leads = time.monotonic(), roles.is_learner and roles.index == 0
        if timeout_s > 0:
            self.store = meeting.connect()
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not (time.monotonic() - self.last > self.timeout_s if self.leads else self.store.check(["stalled"])):
            time.sleep(min(1.0, self.timeout_s / 10))
        message = f"grpo_fast.py: {self.roles.name} (pid {os.getpid()}): stalled"
        if self.leads:
            self.store.set("stalled", "1")
            message += f": nothing moved for {time.monotonic() - self.last:.0f} s. Outstanding: {self.outstanding()}"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        if self.leads:
            time.sleep(3.0)  # the others dump too before the launcher ends them
        os._exit(1)


class Meeting:
    """Where all ranks of this start of the run meet: a store that rank 0 hosts. Its address lies in the store of
    torchrun's agents, which outlives restarts: a rank that finds the address of a rank 0 that is gone looks again. No
    port number is chosen by anybody."""

    def __init__(self):
        self.host = os.environ["MASTER_ADDR"]
        agents = dist.TCPStore(self.host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
        if os.environ["RANK"] == "0":
            key = uuid.uuid4().hex
            self.server = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
            self.server.set("key", key)
            self.server.set("starts", str(agents.add("grpo/starts", 1)))
            agents.set("grpo/meeting", f"{self.server.port} {key}")
        while True:
            port, key = agents.get("grpo/meeting").decode().split()
            self.port = int(port)
            try:
                self.store = self.connect(timedelta(seconds=5))
                if self.store.get("key").decode() == key:
                    break
            except dist.DistError:
                time.sleep(0.5)
        self.store.set_timeout(TIMEOUT)
        self.restarted = int(self.store.get("starts")) > 1

    def connect(self, timeout: timedelta = TIMEOUT) -> dist.TCPStore:
        """A further connection, for a thread: a client that waits blocks every other user of it."""
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)


# --- Weights ----------------------------------------------------------------------------------------------------------

Manifest = list[list[tuple[str, tuple[int, ...]]]]  # buckets of (name, shape)


def plan_weights(policy: grpo.Policy, dtype: torch.dtype) -> Manifest:
    """Which tensor travels in which bucket, in the order of utils.full_weights."""
    manifest: Manifest = []
    size = BUCKET_BYTES
    for name, parameter in utils.named_weights(policy.model):
        if size >= BUCKET_BYTES:
            manifest.append([])
            size = 0
        manifest[-1].append((name, tuple(parameter.shape)))
        size += parameter.numel() * dtype.itemsize
    return manifest


def gather_weights(policy: grpo.Policy, manifest: Manifest, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the whole weights in `dtype`, a flat bucket at a time. All learners must exhaust it in lock-step."""
    tensors = utils.full_weights(policy, dtype)
    for bucket in manifest:
        yield torch.cat([tensor.flatten() for _, (_, tensor) in zip(bucket, tensors, strict=False)])


def receive_weights(
    group: dist.ProcessGroup, manifest: Manifest, dtype: torch.dtype, device: torch.device, wire: list, inbox: Any
):
    """Yield (name, tensor) of a broadcast, bucket by bucket, on an engine whose Inbox, on its first rank, says that the
    next can come once the one before is loaded; appends the seconds spent on the wire."""
    for i, bucket in enumerate(manifest):
        if inbox is not None and i:
            inbox.say_ready()
        sizes = [math.prod(shape) for _, shape in bucket]
        start = time.perf_counter()
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        group.broadcast([flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
        if flat.is_cuda:  # NCCL's wait is one of the stream
            torch.cuda.current_stream().synchronize()
        wire.append(time.perf_counter() - start)
        for (name, shape), part in zip(bucket, flat.split(sizes), strict=True):
            yield name, part.view(shape)


# --- Engines ----------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """What an engine did with its time since the run began: seconds, decoding steps, tokens."""

    busy: float = 0.0
    idle: float = 0.0  # nothing to decode
    pause: float = 0.0  # taking weights
    wire: float = 0.0  # the part of pause that waited for the network
    steps: int = 0
    tokens: int = 0

    def since(self, other: "Clock") -> "Clock":
        return Clock(*(getattr(self, f) - getattr(other, f) for f in self.__dataclass_fields__))


def run_engine(args: Args, roles: Roles, meeting: Meeting) -> None:
    """Serve requests and weights from learner 0 until it says stop or is gone. With tensor parallelism the engine's
    first rank has the connection and tells the others what to do next."""
    world = join(meeting.store, f"engine{roles.index}", roles.tp_rank, roles.tp)
    Watchdog(meeting, roles, args.stall_timeout_s)
    tokenizer = utils.load_tokenizer(args)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout * (args.async_steps + 1)
    if args.single_gpu_mode:  # vLLM takes a share of what it finds free on the device, which must not change meanwhile
        meeting.store.get(f"engine {roles.index - 1} loaded" if roles.index else "learner loaded")
    engine = utils.make_engine(replace(args, vllm_sleep="off"), tokenizer, world, math.ceil(rollouts / roles.engines))
    meeting.store.set(f"{roles.name} loaded", "")
    group, device = weights_group(meeting.store, roles, args)  # waits for learner 0, which loads a model meanwhile
    device = device or world.device
    inbox = connection = None
    if world.is_main:
        host, port, key = meeting.store.get("address").decode().split()
        connection = Client((host, int(port)), authkey=key.encode())
        connection.send(roles.index)
        # the transformers engine's bits depend on what is in a batch, so then not on what came in time for it
        apart = args.rollout_backend == "transformers" and (args.deterministic or args.async_steps == 0)
        apart = apart or (args.deterministic and args.has_turns)
        inbox = Inbox(connection, args.inflight_updates, apart)
    dtype, clock = utils.DTYPES[args.model_dtype], Clock()
    utils.STOP.during = "what the learners ask for"
    while True:
        start = time.perf_counter()
        asks = world.size == 1 or not engine.busy or clock.steps % NEWS_EVERY == 0
        message = inbox.next(engine.busy) if inbox is not None and asks else None
        if world.size > 1 and asks:  # all its ranks do the same
            dist.broadcast(news := torch.tensor([message is not None]), 0)
            if news:
                dist.broadcast_object_list(box := [message])
                message = box[0]
        clock.idle += 0.0 if engine.busy else time.perf_counter() - start
        start = time.perf_counter()
        if message is None and not engine.busy:
            continue
        if message is None:
            finished = engine.step()
            clock.busy += time.perf_counter() - start
            clock.steps += 1
            clock.tokens += sum(len(g.token_ids) for _, g in finished)
            if finished and world.is_main:
                connection.send(("done", finished, clock))
        elif message[0] == "generate":
            for request_id, request in message[1]:
                engine.add(request_id, request)
        elif message[0] == "weights":
            _, version, manifest = message
            wire: list[float] = []
            engine.load_weights(receive_weights(group, manifest, dtype, device, wire, inbox), version)
            clock.pause += time.perf_counter() - start
            clock.wire += sum(wire)
            if world.is_main:
                connection.send(("loaded", version, clock))
        else:
            engine.close()
            return


class Inbox:
    """What learner 0 tells an engine, in its order; with `apart` when its running responses have ended. Weights are
    announced first: the engine says "ready" once it can take them, with `inflight` updates at once, else when those
    have ended; requests that arrive meanwhile are for the new weights."""

    def __init__(self, connection: Connection, inflight: bool, apart: bool = False):
        self.connection, self.inflight, self.apart = connection, inflight, apart
        self.later: deque = deque()  # requests that wait for weights
        self.expected = self.answered = False

    def say_ready(self) -> None:
        """The engine can take a bucket of weights."""
        self.connection.send(("ready", None, None))

    def next(self, busy: bool) -> tuple | None:
        """What the engine does next: a message, or None for a decoding step if it is `busy`."""
        while not (self.apart and busy):
            if self.expected and not self.answered and (self.inflight or not busy):
                self.say_ready()
                self.answered = True
            if self.later and not self.expected:
                return self.later.popleft()
            if not self.connection.poll(0 if busy else 60.0):
                return None
            message = self.connection.recv()
            if message[0] == "announce":
                self.expected, self.answered = True, False
            elif message[0] == "generate" and self.expected and not self.inflight:
                self.later.append(message)
            else:
                self.expected = self.expected and message[0] != "weights"
                return message
        return None


# A request, or the future of one, and what is called as it ends: it gives the future of what goes on in its place
Named = tuple[str, Request | Future, Callable[[Generation], Future | None]]


@dataclass
class Round:
    """Requests whose successors start together, in the order of `names`, when all have ended and been answered."""

    index: int  # of the engine
    names: list[str]
    left: int
    following: dict[str, Request] = field(default_factory=dict)


class Engines(utils.Sampler):
    """Learner 0's side of all engines. `generate` makes it an engine like those of utils, for evaluation."""

    def __init__(self, meeting: Meeting, roles: Roles, tokenizer: "utils.Tokenizer", eos_ids: list[int], args: Args):
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.changed = threading.Condition()
        self.finished: dict[str, float] = {}  # and when; 0: not yet, and waited for
        self.on_finish: dict[str, Callable[[Generation], Future | None]] = {}
        self.rounds: dict[str, Round] = {}
        self.tells_all = args.deterministic  # checkpoints wait for rollouts that nobody takes
        self.in_rounds = args.deterministic and args.has_turns  # then no batch depends on when an answer comes
        self.loaded: dict[int, int] = {}  # version -> engines that have it
        self.ready = 0  # engines that wait for a bucket of the weights announced
        self.clocks = [Clock() for _ in range(roles.engines)]
        self.dead: str | None = None
        self.connections: list[Any] = [None] * roles.engines
        self.owner: dict[str, int] = {}  # outstanding request -> engine
        self.loads = [0] * roles.engines  # how many each has
        self.locks = [threading.Lock() for _ in range(roles.engines)]
        self.watchdog = Watchdog(meeting, roles, args.stall_timeout_s, self.outstanding)
        self.group, self.device = weights_group(meeting.store, roles, args)
        key = uuid.uuid4().hex
        ranks = roles.learners + roles.engines * roles.tp
        one_node = ranks == int(os.environ["LOCAL_WORLD_SIZE"])
        with Listener(("127.0.0.1" if one_node else "", 0), authkey=key.encode()) as listener:
            host = "127.0.0.1" if one_node else meeting.host
            if not one_node and os.environ["GROUP_RANK"] != "0":  # of this node, as it reaches the other
                with socket.create_connection((meeting.host, meeting.port)) as connection:
                    host = connection.getsockname()[0]
            meeting.store.set("address", f"{host} {listener.address[1]} {key}")
            for _ in range(roles.engines):
                connection = listener.accept()
                self.connections[connection.recv()] = connection
        for i in range(roles.engines):
            threading.Thread(target=self._receive, args=(i,), daemon=True).start()

    def _receive(self, index: int) -> None:
        while True:
            try:
                kind, content, clock = self.connections[index].recv()
            except (EOFError, OSError):
                with self.changed:
                    self.dead = f"engine {index} is gone"
                    self.changed.notify_all()
                return
            self.watchdog.beat()
            with self.changed:
                self.clocks[index] = clock or self.clocks[index]
                if kind == "done":
                    for request_id, _ in content:
                        del self.owner[request_id]
                    self.loads[index] -= len(content)
                elif kind == "ready":
                    self.ready += 1
                else:
                    self.loaded[content] = self.loaded.get(content, 0) + 1
                if kind != "done" and len(self.connections) in (self.ready, self.loaded.get(content)):
                    self.changed.notify_all()  # nobody waits for a part of them; what is done is told in `_follow`
            for request_id, generation in content if kind == "done" else ():
                self._ended(request_id, generation)
                if len(self.owner) % 64 == 0:
                    gc.collect(1)  # see collect_garbage_by_hand

    def _ended(self, name: str, ended: Generation | Future) -> None:
        """A response has ended, or what answers it."""
        try:
            answer = ended.result() if isinstance(ended, Future) else self.on_finish[name](ended)
            if isinstance(answer, Future):
                answer.add_done_callback(functools.partial(self._ended, name))
            else:
                self._follow(name, answer)
        except Exception as error:
            with self.changed:  # in its own thread nobody would see it
                self.dead = f"handling of a response failed ({type(error).__name__}: {error})"

    def _follow(self, name: str, request: Request | None) -> None:
        """Take in what goes on in place of a request that ended, None: nothing; start the round's next ones."""
        with self.changed:
            round_ = self.rounds.pop(name)
            round_.left -= 1
            if request is None:
                if name in self.finished or self.tells_all:
                    self.changed.notify_all()
                self.finished[name] = time.perf_counter()
                del self.on_finish[name]
            else:
                round_.following[name] = request
            following = round_.following if round_.left == 0 else {}
            ready = [(n, following[n], self.on_finish[n]) for n in round_.names if n in following]
        if ready:
            self.submit(ready, round_.index)

    def outstanding(self) -> str:
        """The requests no engine has answered yet, for a person."""
        ids = sorted(self.owner)
        shown = ", ".join(f"{i} (engine {self.owner[i]})" for i in ids[:64])
        return f"{len(ids)} requests: {shown}{', ...' if len(ids) > 64 else ''}" if ids else "no request"

    def submit(self, requests: Sequence[Named], index: int | None = None) -> None:
        """Give requests to an engine, None: to that with the least to do. Calls come in other threads."""
        now = [(name, request) for name, request, _ in requests if isinstance(request, Request)]
        with self.changed:
            if index is None:
                index = self.loads.index(min(self.loads))
            self.on_finish |= {name: call for name, _, call in requests}
            names = [name for name, *_ in requests]
            for part in [names] if self.in_rounds else [[name] for name in names]:
                self.rounds |= dict.fromkeys(part, Round(index, part, len(part)))
            self.loads[index] += len(now)
            self.owner |= {name: index for name, _ in now}
        if now:
            with self.locks[index]:
                self.connections[index].send(("generate", now))
        for name, request, _ in requests:
            if isinstance(request, Future):
                request.add_done_callback(functools.partial(self._ended, name))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Block until condition() holds; raises RuntimeError when an engine is gone."""
        with self.changed:
            while not condition():
                if self.dead:
                    raise RuntimeError(f"{self.dead} while waiting for {what}")
                self.changed.wait(timeout=1.0)

    def take(self, request_ids: Sequence[str]) -> float:
        """Wait for requests, and all that went on in their place: when the last one ended."""
        for i in reversed(request_ids):  # to be woken for one of them, where the last ends last
            self.finished.setdefault(i, 0.0)
            self.wait_for(lambda i=i: self.finished[i] > 0, f"request {i}")
        with self.changed:
            return max([self.finished.pop(i) for i in request_ids])

    def generate(self, requests: Sequence[Request], finished: Callable[[int, Generation], Future | None]) -> None:
        """See utils.Engine.generate; finished is called in another thread."""
        named = [(f"now/{uuid.uuid4().hex}", r, functools.partial(finished, i)) for i, r in enumerate(requests)]
        for i in range(len(self.connections)):
            self.submit(named[i :: len(self.connections)], i)
        self.take([request_id for request_id, *_ in named])

    def tell_all(self, message: tuple) -> None:
        for lock, connection in zip(self.locks, self.connections, strict=True):
            with lock:
                connection.send(message)

    def wait_loaded(self, version: int) -> None:
        """Block until every engine computes with `version`."""
        self.wait_for(lambda: self.loaded.get(version) == len(self.connections), f"version {version} in the engines")

    def stop(self, version: int) -> None:
        """See utils.Sampler.stop; they are then not busy with a broadcast."""
        self.wait_loaded(version)
        self.tell_all(("stop",))

    def close(self) -> None:
        """Nothing needs to move any more."""
        self.watchdog.timeout_s = math.inf


# --- Collector --------------------------------------------------------------------------------------------------------


@dataclass
class StepData:
    """What the collector hands to the learners for a step."""

    groups: list[Group] = field(default_factory=list)  # those of the batch
    sampled: list[Group] = field(default_factory=list)  # all that were sampled for it
    packs: list[list[list[Pack]]] = field(default_factory=list)  # of each mini-batch, for each learner
    pickled: list[list[list[torch.Tensor]]] = field(default_factory=list)  # the same
    cursor: int = 0  # prompts consumed so far
    excluded: frozenset[int] = frozenset()  # prompts too easy to sample again
    seconds: dict[str, float] = field(default_factory=dict)


Packer = Callable[[list[Rollout]], list[list[Pack]]]  # into packs of each learner


class Collector:
    """A thread that admits prompts, gathers groups in stream order, scores and packs them, one step ahead."""

    def __init__(self, engines: Engines, prompts: list[Prompt], args: Args, state: dict, pack: Packer):
        self.engines, self.prompts, self.args, self.pack = engines, prompts, args, pack
        self.steps = range(state["step"], grpo.num_training_steps(args))
        self.first = self.admitted = self.consumed = state["cursor"]
        self.excluded = frozenset(state["excluded"])
        self.exclusions = {self.consumed: self.excluded}  # by how many prompts had been consumed
        self.in_order = args.deterministic or args.async_steps == 0  # no bit depends on when anything arrives
        self.admitting = threading.Lock()
        self.in_flight: dict[int, Group] = {}  # groups that were started and have not reached a learner
        self.restored = state.get("rollouts", {})  # see checkpoint
        self.started_at: dict[int, float] = {}
        self.counts = state.get("counts", {"started": 0, "trained": 0, "filtered": 0})
        self.ready: queue.Queue = queue.Queue(maxsize=1)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.engines_have(self.consumed)
        self.thread.start()

    def engines_have(self, cursor: int) -> None:
        """Weights trained on the first `cursor` prompts are in the engines: admit what they allow, but for the prompts
        that those excluded. It is a matter of timing whether the thread knows of more."""
        limit = cursor + self.args.num_unique_prompts_rollout * (self.args.async_steps + 1)
        self.admit(limit, self.exclusions.pop(cursor, self.excluded))

    def admit(self, limit: int, excluded: frozenset[int]) -> None:
        """Start all groups at stream positions below `limit` that have not been started."""
        if not self.args.active_sampling:  # then the run's end is known
            limit = min(limit, self.first + len(self.steps) * self.args.num_unique_prompts_rollout)
        with self.admitting:  # the engines' lock only for moments: learner 0's main thread asks for it, too
            positions, order = range(self.admitted, limit), self.args.seed if self.args.shuffle else None
            for position in positions:
                kept = self.restored.get(position)
                prompt = self.prompts[kept[0]] if kept else utils.prompt_at(self.prompts, position, order, excluded)
                group = [Rollout(prompt, position, j) for j in range(self.args.num_samples_per_prompt_rollout)]
                with self.engines.changed:
                    self.in_flight[position], self.started_at[position] = group, time.perf_counter()
                    self.admitted, self.counts["started"] = position + 1, self.counts["started"] + 1
        with self.engines.changed:
            self.engines.changed.notify_all()
        batches: dict[int | None, list] = {}  # of each engine in one message, so that its batches are always the same
        for position in positions:
            requests = []
            _, done = self.restored.pop(position, (None, {}))
            for r in self.in_flight[position]:
                name = f"{position}/{r.sample}"
                r.go_back(done.get(r.sample, {}))
                if r.over:
                    grpo.start_scoring(r, self.engines, self.args)
                    self.engines.finished[name] = time.perf_counter()
                    continue
                request: Request | Future = grpo.make_request(r, self.args)
                if r.turns and r.turns[-1]["role"] == "assistant":  # killed while the environment was asked
                    request = grpo.ask(r, self.engines, self.args)
                requests.append((name, request, functools.partial(self._finish, r)))
            if self.in_order:
                batches.setdefault(position % len(self.engines.connections), []).extend(requests)
            elif requests:
                self.engines.submit(requests)
        for index, requests in batches.items():
            self.engines.submit(requests, index)

    def _finish(self, rollout: Rollout, generation: Generation) -> Future | None:
        return grpo.end_turn(rollout, generation, self.engines, self.args)

    def _run(self) -> None:
        try:
            for _ in self.steps:
                self.ready.put(self._collect())
        except BaseException as error:  # handed to the learner, which raises it
            self.error = error
            self.ready.put(None)

    def _collect(self) -> StepData:
        args, wanted, timer = self.args, self.args.num_unique_prompts_rollout, utils.Timer(gpu=False)
        data, group_seconds = StepData(), []
        max_groups = wanted * (grpo.MAX_SAMPLING_ROUNDS if args.active_sampling else 1)
        whole = args.async_steps == 0  # rounds, as grpo.py samples
        while len(data.sampled) < max_groups and (len(data.groups) < wanted or (whole and len(data.sampled) % wanted)):
            if self.consumed == self.admitted and data.sampled:  # ran dry: go on from the newest weights
                self.admit(self.consumed + wanted, self.excluded)
            self.engines.wait_for(lambda: self.consumed < self.admitted, "new weights in the engines")
            group, seconds = self._take(self.consumed)
            group_seconds.append(seconds)
            data.sampled.append(group)
            self.consumed += 1
            with timer("reward"):
                if grpo.score_group(group, args):
                    data.groups.append(group)
            self.engines.watchdog.beat()
        with timer("reward"):
            grpo.set_advantages(data.sampled, args)
        data.groups = data.groups[:wanted]
        self.excluded = self.exclusions[self.consumed] = grpo.exclude_solved(self.excluded, data.sampled, args)
        longest = {f"time/group_generation_{f}": float(getattr(np, f)(group_seconds)) for f in ("mean", "min", "max")}
        with timer("packing"):
            data.packs = [self.pack(rollouts) for rollouts in grpo.split_groups(data.groups, args)]
            data.pickled = [[list(map(to_bytes, packs)) for packs in m] for m in data.packs]
        data.cursor, data.excluded, data.seconds = self.consumed, self.excluded, timer.seconds | longest
        return data

    def _take(self, position: int) -> tuple[Group, float]:
        """The group at a stream position, and the seconds from its start to its last token."""
        group = self.in_flight[position]
        when = self.engines.take([f"{position}/{r.sample}" for r in group])
        return group, when - self.started_at.pop(position)

    def next(self) -> StepData:
        """The next step's data; raises what the thread raised. The first call starts it: a signal then meets a step."""
        if self.thread.ident is None:
            self.start()
        data = self.ready.get()
        if data is None:
            raise self.error  # ty: ignore[invalid-raise]
        return data

    def checkpoint(self, cursor: int) -> dict[str, Any]:
        """What a checkpoint keeps of groups that no update has seen: `rollouts`, position -> (prompt index, sample ->
        its fields), and the counts without them. Turns still being made are left out and will be sampled, or answered,
        anew; with --deterministic those of weights older than the checkpoint's are waited for. All those of the
        checkpoint's own weights are then sampled anew, together, as they were: their batches decide about bits."""
        wanted = self.args.num_unique_prompts_rollout
        kept = range(cursor, min(cursor + wanted * self.args.async_steps, self.first + len(self.steps) * wanted))
        if self.in_order:  # the weights that allow the last of them may still be on their way
            self.engines.wait_for(lambda: self.admitted >= kept.stop, "weights for a checkpoint's rollouts")
            groups = [self.in_flight[p] for p in kept]
            self.engines.wait_for(lambda: all(r.over for g in groups for r in g), "rollouts for a checkpoint")
        with self.engines.changed:
            under_way = dict(self.in_flight)
        rollouts = {
            p: (group[0].prompt.index, {r.sample: fields for r in group if (fields := r.so_far())})
            for p, group in under_way.items()
            if p >= cursor and (p in kept or not self.in_order)
        }
        done = {name: self.counts[name] for name in ("trained", "filtered")}
        return {"rollouts": rollouts, "counts": done | {"started": sum(done.values())}}

    def account(self, data: StepData) -> dict[str, float]:
        """Groups after a step, counted where they are: started = trained + filtered + in flight, or RuntimeError."""
        trained = {piece[0].position for m in data.packs for packs in m for pack in packs for piece in pack}
        for position in {group[0].position for group in data.sampled}:
            del self.in_flight[position]
            self.counts["trained" if position in trained else "filtered"] += 1
        with self.engines.changed:
            now = self.counts | {"in_flight": len(self.in_flight)}
        if now["started"] != now["trained"] + now["filtered"] + now["in_flight"]:
            raise RuntimeError(f"groups got lost: {now}")
        return {f"batch/groups_{name}": float(number) for name, number in now.items()}


# --- Learners ---------------------------------------------------------------------------------------------------------


class Sender:
    """A thread of learner 0 that broadcasts weights while the next update runs, then admits what they allow. No
    collective starts before every engine can take part: it would wait on the learner's GPU. What is gathered before the
    first lies on the host; no more than four buckets are on the GPU: one made, two in `work`, one copied or sent."""

    def __init__(self, engines: Engines):
        self.engines = engines
        self.collector: Collector | None = None
        self.work: queue.Queue = queue.Queue(maxsize=2)
        self.metrics: dict[str, float] = {}
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            manifest, version, cursor = self.work.get()
            start, before = time.perf_counter(), list(self.engines.clocks)
            try:
                num_bytes = self._send(manifest, version)
                self.engines.wait_loaded(version)
            except (RuntimeError, OSError) as error:
                with self.engines.changed:
                    self.engines.dead = self.engines.dead or f"weight broadcast failed ({error})"
                    self.engines.changed.notify_all()
                while True:  # nobody shall wait for room
                    self.work.get()
            spent = [now.since(then) for now, then in zip(self.engines.clocks, before, strict=True)]
            pause, wire = max(c.pause for c in spent), max(c.wire for c in spent)
            self.metrics = {
                "time/weight_sync": time.perf_counter() - start,
                "time/weight_sync_wire": wire,
                "time/weight_sync_load": max(c.pause - c.wire for c in spent),
                "time/weight_sync_pause": pause,
                "val/weight_sync_bytes": float(num_bytes),
                "val/weight_sync_gb_per_second": num_bytes / wire / 1e9,
                "val/weight_sync_version": float(version),
            }
            if self.collector is not None:
                self.collector.engines_have(cursor)

    def _send(self, manifest: Manifest, version: int) -> int:
        """Broadcast the buckets that come; returns their bytes."""
        engines, everyone, held, num_bytes, told = self.engines, len(self.engines.connections), deque(), 0, False
        engines.ready = 0
        if engines.in_rounds:  # no turn's weights depend on when an answer comes
            engines.wait_for(lambda: not engines.on_finish, "the rollouts that have turns to come")
        engines.tell_all(("announce", version))
        for left in reversed(range(len(manifest))):
            held.append(self.work.get())
            num_bytes += held[-1][0].nbytes
            if left and not told and engines.ready < everyone:
                held[-1] = self._to_host(*held[-1])
                continue
            while held:
                engines.wait_for(lambda: engines.ready == everyone, "engines that can take weights")
                told = told or engines.tell_all(("weights", version, manifest)) is None
                engines.ready = 0
                self._broadcast(*held.popleft())
        return num_bytes

    def _to_host(self, bucket: torch.Tensor, gathered: torch.cuda.Event | None) -> tuple[torch.Tensor, None]:
        if gathered is None:
            return bucket, None
        host = torch.empty_like(bucket, device="cpu", pin_memory=True)  # torch keeps what it pins for the next time
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(gathered)
            host.copy_(bucket, non_blocking=True)
            self.stream.synchronize()
        return host, None

    def _broadcast(self, bucket: torch.Tensor, gathered: torch.cuda.Event | None) -> None:
        with torch.cuda.stream(self.stream):  # does nothing where there is none
            if gathered is not None:  # wait for the gather, not for the update that was queued after it
                self.stream.wait_event(gathered)
            there = self.engines.device or (bucket.device if self.stream is None else "cuda")
            data = bucket.view(torch.uint8).to(there)  # waits for a copy: gloo would send what has not come yet
            self.engines.group.broadcast([data], dist.BroadcastOptions()).wait()
            if data.is_cuda:  # else all would be on their way at once
                self.stream.synchronize()


def send_weights(
    policy: grpo.Policy, manifest: Manifest, sender: Sender | None, dtype: torch.dtype, version: int, cursor: int
) -> None:
    """Gather the weights bucket by bucket; learner 0 hands each to the sender, which broadcasts it while the next one
    is gathered. Waits only while the broadcast before is still under way. All learners."""
    if sender is not None:
        if sender.engines.dead:
            raise RuntimeError(f"{sender.engines.dead} while weights were sent")
        sender.work.put((manifest, version, cursor))
    for bucket in gather_weights(policy, manifest, dtype):
        if sender is not None:
            sender.work.put((bucket, torch.cuda.current_stream().record_event() if bucket.is_cuda else None))


def run_learner(args: Args, roles: Roles, meeting: Meeting) -> Path:
    """The training loop of every learner; learner 0 also owns collector, sender and all files."""
    world = join(meeting.store, "learners", roles.index, roles.learners)
    if not world.is_main:
        Watchdog(meeting, roles, args.stall_timeout_s)
    run = grpo.set_up(args, world)  # the engines are still starting
    run.eval_world = World(0, world.local_rank, 1, world.device)  # learner 0 only
    state, policy, dtype = run.state, run.learner.policy, utils.DTYPES[args.model_dtype]
    manifest = plan_weights(policy, dtype)
    engines = sender = collector = None  # learner 0 alone has them
    clocks: list[Clock] = []
    if world.is_main:
        meeting.store.set("learner loaded", "")
        run.servers = utils.start_reward_models(args, run.run_dir, run.eval_world)
        eos_ids = utils.eos_token_ids(args, run.tokenizer)
        run.engine = engines = Engines(meeting, roles, run.tokenizer, eos_ids, args)
        sender = Sender(engines)
    gap_metrics: dict[str, float] = {}
    for version, when, check in grpo.starts(policy, args, state["step"]):
        send_weights(policy, manifest, sender, dtype, version, state["cursor"])
        gap_metrics = check_engines(run, version, when, check)
    words = f"{roles.learners} learners, {roles.engines} engines, async_steps {args.async_steps}; "
    grpo.start_log(run, gap_metrics, words)
    if world.is_main:
        assert sender is not None and engines is not None
        sizes: Any = {"pack_length": args.pack_length, "learners": world.size // args.sequence_parallel_size}
        pack = functools.partial(grpo.pack_rollouts, packing=run.packing, pair_cost=policy.pair_cost, **sizes)
        sender.collector = collector = Collector(engines, run.train_prompts, args, state, pack)
        clocks = list(engines.clocks)

    # the gap on rollouts of older weights says nothing about the engine: then fresh ones are compared now and then
    update_args = replace(args, max_logprob_gap=0.0) if args.async_steps else args
    first_step, last_step = state["step"] + 1, grpo.num_training_steps(args)
    collect_garbage_by_hand()
    for number in utils.STOP.steps(range(first_step, last_step + 1)):
        step = grpo.Step(number)
        with step.timer("trainer_waiting_for_data"):
            data = collector.next() if collector is not None else StepData()
            step.groups, step.sampled, step.seconds = data.groups, data.sampled, data.seconds
            step.packs, probe, state["cursor"], excluded = scatter(data, args, world)
            state["excluded"] = sorted(excluded)
        with step.timer("training"):
            grpo.train(run, step, probe, update_args)
        with step.timer("gather"):
            send_weights(policy, manifest, sender, dtype, number, state["cursor"])

        # everything below reports or saves
        note_staleness(step.packs if utils.leads(args, world) else [], number, step.metrics)
        out, line = grpo.step_metrics(run, step), ""
        if collector is not None and sender is not None:
            engines.watchdog.beat()
            out |= collector.account(data) | sender.metrics
            now = list(engines.clocks)
            spent, clocks = [a.since(b) for a, b in zip(now, clocks, strict=True)], now
            out |= engine_metrics(spent, policy, out, state)
            line = step_line(out)
        evaluates = grpo.due(args.local_eval_every, number, last_step)
        if args.async_steps and (evaluates or number == first_step):
            check_engines(run, number, f"after the weights of step {number}")
        elif world.is_main and evaluates:
            engines.wait_loaded(number)
        grpo.end_step(run, step, out, line)
        more = functools.partial(collector.checkpoint, state["cursor"]) if collector is not None else dict
        if grpo.save_state(run, more):
            break
        gc.collect()
    return grpo.finish(run)


def check_engines(
    run: grpo.Run, version: int, when: str, check: Callable[..., dict[str, float]] = grpo.measure_gap
) -> dict[str, float]:
    """The logprob gap, or another check, of a short response of each engine to the learners' present weights,
    `version`. All learners."""
    probe: list[list[Group]] = [[]]
    if isinstance(run.engine, Engines):
        run.engine.wait_loaded(version)
        short = replace(run.args, response_length=min(run.args.response_length, 32))
        probe = [grpo.sample_probes(run.engine, 0, run.train_prompts[0], run.args.vllm_num_engines, short)]
    dist.broadcast_object_list(probe)
    return check(run.learner.policy, probe[0], when, run.args, run.world)


def scatter(data: StepData, args: Args, world: World) -> tuple[list[list[Pack]], list[Group], int, frozenset[int]]:
    """This learner's packs of each mini-batch, groups to measure the gap on, cursor, exclusions. All learners."""
    parts: list[Any] = [None] * world.size
    shares = [i // args.sequence_parallel_size for i in range(world.size)]
    if world.is_main:
        some = data.sampled[: args.per_device_train_batch_size]
        sizes = [[list(map(len, m[i])) for m in data.pickled] for i in shares]
        parts = [(mine, some, data.cursor, data.excluded) for mine in sizes]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parts)
    sizes, some, cursor, excluded = mine[0]
    pickled = [m[0] for m in data.pickled] or [[torch.empty(n, dtype=torch.uint8) for n in m] for m in sizes]
    if world.is_main:
        work = [dist.isend(pack, i) for i in range(1, world.size) for m in data.pickled for pack in m[shares[i]]]
    else:
        work = [dist.irecv(pack, 0) for m in pickled for pack in m]
    for sent in work:
        sent.wait()
    return [[pickle.loads(pack.numpy()) for pack in m] for m in pickled], some, cursor, excluded


def to_bytes(pack: Pack) -> torch.Tensor:
    """A pickled pack. All packs in one call would stop every thread of learner 0 meanwhile."""
    return torch.frombuffer(bytearray(pickle.dumps(pack, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def collect_garbage_by_hand() -> None:
    """Never in the middle of a step: with a batch of rollouts in flight a full collection stops all threads for a
    second, one of ten times utils' 10,000 objects for 70 ms. What is there now is never looked at again, the rest
    between two steps. While responses end, objects go as others come, which Python takes for none: of 1,024 x 16 it
    would look at all at once, for 45 ms, if `Engines._receive` did not have it look after 64 of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 10, 2**30)
    sys.setswitchinterval(1e-4)  # with 5 ms a thread that waits for several others stood still for 140, with 1 for 110


def note_staleness(packs: Sequence[Sequence[Pack]], step: int, metrics: utils.Metrics) -> None:
    """How many updates old the weights behind the trained tokens are."""
    for pack in [pack for m in packs for pack in m]:
        versions = np.concatenate([r.versions[r.mask] for piece in pack for r in piece])
        metrics.add("val/num_steps_off_policy", float((step - 1 - versions).sum()), len(versions))
        metrics.add_all("val/model_step", versions)


def engine_metrics(
    spent: Sequence[Clock], policy: grpo.Policy, out: dict[str, float], state: dict[str, Any]
) -> dict[str, float]:
    """What the engines did during a step, and which side the other waited for."""
    total, n = out["time/total"], len(spent)
    mean = {f: sum(getattr(c, f) for c in spent) / n for f in Clock.__dataclass_fields__}
    weights = (policy.matrices + policy.head) * state["itemsize"]  # bytes that each decoding step reads
    return {
        "time/generation_waiting_for_trainer": mean["idle"],
        "time/weight_sync_floor": out.get("val/weight_sync_bytes", 0.0) / state["bytes_per_second"],
        "time/generation": mean["busy"],
        "val/engine_pause_seconds": mean["pause"],
        "val/engine_idle_share": min(mean["idle"] / total, 1.0),  # engines report when something ends
        "val/learner_idle_share": out["time/trainer_waiting_for_data"] / total,
        "val/engine_bandwidth_share": weights * mean["steps"] / max(mean["busy"], 1e-9) / state["bytes_per_second"],
        "val/engine_tokens_per_second": sum(c.tokens for c in spent) / max(sum(c.busy for c in spent), 1e-9),
    }


def step_line(out: dict[str, float]) -> str:
    """The step's account, weight sync and bottleneck in one line."""
    learner, engine = out["val/learner_idle_share"], out["val/engine_idle_share"]
    name = "generation" if learner > max(engine, 0.05) else "training" if engine > 0.05 else "none, both sides are busy"
    line = (
        f"          groups {out['batch/groups_started']:.0f} started = {out['batch/groups_trained']:.0f} trained + "
        f"{out['batch/groups_filtered']:.0f} filtered + {out['batch/groups_in_flight']:.0f} in flight | idle: learner "
        f"{learner:.0%}, engines {engine:.0%}; bottleneck: {name}"
    )
    if "time/weight_sync" in out:
        line += (
            f" | weights v{out['val/weight_sync_version']:.0f}: {out['val/weight_sync_bytes'] / 1e6:.0f} MB, wire "
            f"{out['time/weight_sync_wire']:.2f} s, load {out['time/weight_sync_load']:.2f} s, pause "
            f"{out['time/weight_sync_pause']:.2f} s, {out['val/weight_sync_gb_per_second']:.1f} GB/s (a copy takes "
            f"{out['time/weight_sync_floor']:.2f} s)"
        )
    return line


def main(args: Args) -> None:
    """Start the ranks, or be one of them."""
    args = args.beside_engine(args.single_gpu_mode)
    world_size = int(os.environ["WORLD_SIZE"]) if "MASTER_ADDR" in os.environ else None  # torchrun started us
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    args.check(1, fast=True)
    check_fast_args(args, world_size, ranks_per_node)
    if args.dry_run or world_size is None:
        learners, awake = sum(args.num_learners_per_node), replace(args, vllm_sleep="off")
        chunk, shared = grpo.LOGPROB_CHUNK, args.single_gpu_mode
        utils.print_plan(awake, fast=True, learners=learners, shared_gpu=shared, logprob_chunk=chunk)
        if not args.dry_run:
            launch(args)
        return
    die_with_parent()
    pin_cores(args)
    roles = roles_of(args, int(os.environ["RANK"]), ranks_per_node)
    meeting = Meeting()
    if meeting.restarted:
        args = utils.after_restart(args)
    if os.environ["RANK"] == "0":
        dtype, why = utils.choose_dtype(args)
        print(f"dtype    {dtype}: {why}")
        meeting.store.set("dtype", dtype)
    args = replace(args, model_dtype=meeting.store.get("dtype").decode())
    (run_learner if roles.is_learner else run_engine)(args, roles, meeting)


if __name__ == "__main__":
    utils.STOP.listen()
    try:
        main(utils.parse_args(Args))
    except utils.UserError as error:
        raise SystemExit(f"grpo_fast.py: {error}") from None
    utils.exit_process()
