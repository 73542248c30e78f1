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

import contextlib
import ctypes
import faulthandler
import functools
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import torch
import torch.distributed as dist

import grpo
import rewards
from grpo import Args, Pack
from utils import Group, Rollout

BUCKET_BYTES = 256 * 2**20  # of a weight broadcast
TIMEOUT = timedelta(days=1)  # of waiting for another rank: the watchdog ends stalls, the launcher deaths


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


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
    """grpo_fast.py's own refusals; world_size is None when this script starts the processes itself, on one node."""
    per_node, engines, tp = args.num_learners_per_node, args.vllm_num_engines, args.vllm_tensor_parallel_size
    learners = sum(per_node)
    given = f"--num_learners_per_node {' '.join(map(str, per_node))} --vllm_num_engines {engines}"
    if min(per_node, default=-1) < 0 or learners < 1 or engines < 1 or tp < 1:
        raise utils.UserError(f"{given} --vllm_tensor_parallel_size {tp}: a run needs a learner and an engine")
    ranks = learners + engines * tp
    if world_size is not None and world_size != ranks:
        raise utils.UserError(
            f"{given} x --vllm_tensor_parallel_size {tp} = {ranks} processes, but {world_size} ranks run: "
            f"start torchrun with {ranks} in all"
        )
    nodes = 1 if world_size is None else world_size // ranks_per_node
    if len(per_node) > nodes:
        raise utils.UserError(
            f"{given}: the first flag is for {len(per_node)} nodes, but {nodes} run: give one number for each node"
        )
    homes: dict[int, set[int]] = {}  # the nodes of each engine
    for rank in range(ranks if world_size is not None else 0):
        role = roles_of(args, rank, ranks_per_node)
        if not role.is_learner:
            homes.setdefault(role.index, set()).add(rank // ranks_per_node)
    if any(len(nodes_of_one) > 1 for nodes_of_one in homes.values()):
        raise utils.UserError(f"{given}: an engine of --vllm_tensor_parallel_size {tp} would span two nodes")
    if args.rollout_backend != "vllm" and tp > 1:
        raise utils.UserError(f"--vllm_tensor_parallel_size {tp} needs --rollout_backend vllm")
    if args.load_batches:
        raise utils.UserError("--load_batches: grpo.py trains on dumps; grpo_fast.py only writes them")
    if args.deterministic and (args.inflight_updates or (args.active_sampling and args.async_steps)):
        raise utils.UserError(
            "--deterministic with --inflight_updates, or with --active_sampling and --async_steps above 0: timing "
            "would decide which weights make a token: drop one of them"
        )
    if args.num_unique_prompts_rollout % args.num_mini_batches:
        raise utils.UserError(
            f"--num_mini_batches {args.num_mini_batches} does not divide --num_unique_prompts_rollout "
            f"{args.num_unique_prompts_rollout}"
        )
    gpus, here = torch.cuda.device_count(), ranks if world_size is None else ranks_per_node
    if gpus and here > gpus and not args.single_gpu_mode:
        raise utils.UserError(
            f"{given} x --vllm_tensor_parallel_size {tp} need {here} GPUs on a node, {gpus} are visible: "
            "lower them, or share one GPU with --single_gpu_mode"
        )


def launch(args: Args) -> None:
    """Start all ranks on this machine with torch's elastic launcher; they are this script again."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks = sum(args.num_learners_per_node) + args.vllm_num_engines * args.vllm_tensor_parallel_size
    cores = len(utils.ALL_CORES)
    together = args.async_steps > 0  # learners and engines compute at the same time
    if not torch.cuda.is_available():
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // ranks) if together else cores)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        signals_to_handle="SIGHUP,SIGQUIT",
        shutdown_timeout=3,  # seconds that the other ranks have when one has died
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # the ranks write to ours; torch would leave a directory
    )
    signal.set_wakeup_fd(-1)  # now it is the ranks that answer
    for number in (signal.SIGTERM, signal.SIGINT):  # torch would kill the ranks, which want to end their step
        signal.signal(number, pass_on)
    try:
        elastic_launch(config, sys.executable)(os.path.abspath(__file__), *sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        name = roles_of(args, rank, ranks).name
        print(f"grpo_fast.py: {name} (pid {failure.pid}) died with {_reason(failure.exitcode)}", file=sys.stderr)
        raise SystemExit(128 + PASSED_ON[-1] if PASSED_ON else 1) from None


PASSED_ON: list[int] = []  # signals


def pass_on(number: int, frame: Any) -> None:
    """Send a signal to all child processes, the ranks; end where there is none yet."""
    PASSED_ON.append(number)
    if sys.platform == "linux":
        children = " ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children"))
    else:
        children = subprocess.run(["pgrep", "-P", str(os.getpid())], stdout=subprocess.PIPE, text=True).stdout
    for pid in children.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
    if not children.strip():
        os._exit(128 + number)


def _reason(exitcode: int) -> str:
    return f"signal {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher is gone: kill -9 of the launcher must leave no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:
            raise SystemExit("grpo_fast.py: the launcher is gone")


def pin_cores(args: Args) -> None:
    """Give this rank its own cores where the ranks compute at the same time and there are enough."""
    cores, ranks = sorted(utils.ALL_CORES), int(os.environ["LOCAL_WORLD_SIZE"])
    if args.async_steps > 0 and not torch.cuda.is_available() and len(cores) >= ranks:
        utils.pin(cores[int(os.environ["LOCAL_RANK"]) :: ranks])


def join(store: Any, name: str, index: int, size: int) -> utils.World:
    """This process's own world: the learners' for a learner, one of its own for an engine."""
    local = int(os.environ["LOCAL_RANK"]) % max(torch.cuda.device_count(), 1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        utils.keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(name, store), rank=index, world_size=size, timeout=TIMEOUT)
    os.environ |= {"RANK": str(index), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local)}  # vLLM reads them
    return utils.World(index, local, size, device)


def weights_group(store: Any, roles: Roles, args: Args) -> tuple[Any, torch.device | None]:
    """A bare process group of learner 0 and all engines, and where its tensors live (None: on the rank's GPU). A shared
    default group would hang inside vLLM; NCCL refuses two ranks on one GPU."""
    rank = 0 if roles.is_learner else 1 + roles.index * roles.tp + roles.tp_rank
    prefix = dist.PrefixStore("weights", store)
    if torch.cuda.is_available() and not args.single_gpu_mode:
        return dist.ProcessGroupNCCL(prefix, rank, 1 + roles.engines * roles.tp, TIMEOUT), None  # ty: ignore[invalid-argument-type]
    return dist.ProcessGroupGloo(prefix, rank, 1 + roles.engines * roles.tp, TIMEOUT), torch.device("cpu")


class Watchdog:
    """A thread that ends this process with all its stacks when learner 0 sees nothing move for --stall_timeout_s.

    Learner 0 calls `beat` whenever anything arrives or a step ends, and on a stall tells the others by the store.
    """

    def __init__(self, meeting: "Meeting", roles: Roles, timeout_s: float, outstanding: Any = None):
        self.roles, self.timeout_s, self.outstanding = roles, timeout_s, outstanding
        self.last = time.monotonic()
        self.leads = roles.is_learner and roles.index == 0
        if timeout_s > 0:
            self.store = meeting.connect()
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        """Something moved."""
        self.last = time.monotonic()

    def _watch(self) -> None:
        while not self._stalled():
            time.sleep(min(1.0, self.timeout_s / 10))
        message = f"grpo_fast.py: {self.roles.name} (pid {os.getpid()}): stalled"
        if self.leads:
            message += f": nothing moved for {time.monotonic() - self.last:.0f} s. Outstanding: {self.outstanding()}"
        print(message, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        if self.leads:
            time.sleep(3.0)  # the others dump too before the launcher ends them
        os._exit(1)

    def _stalled(self) -> bool:
        if not self.leads:
            return self.store.check(["stalled"])
        if time.monotonic() - self.last > self.timeout_s:
            self.store.set("stalled", "1")
            return True
        return False


class Meeting:
    """Where all ranks of this start of the run meet: a store that rank 0 hosts.

    Its address lies in the store of torchrun's agents, which outlives restarts: a rank that finds the address of a rank
    0 that is gone looks again. No port number is chosen by anybody.
    """

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

    def connect(self, timeout: timedelta = TIMEOUT) -> Any:
        """A further connection, for a thread: a client that waits blocks every other user of it."""
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------

Manifest = list[list[tuple[str, tuple[int, ...]]]]  # buckets of (name, shape)


def plan_weights(policy: grpo.Policy, dtype: torch.dtype) -> Manifest:
    """Which tensor travels in which bucket, in the order of utils.full_weights."""
    manifest: Manifest = []
    size = BUCKET_BYTES
    for name, shape in utils.weight_shapes(policy.model):
        if size >= BUCKET_BYTES:
            manifest.append([])
            size = 0
        manifest[-1].append((name, shape))
        size += math.prod(shape) * dtype.itemsize
    return manifest


def gather_weights(policy: grpo.Policy, manifest: Manifest, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the whole weights in `dtype`, a flat bucket at a time. All learners must exhaust it in lock-step."""
    tensors = utils.full_weights(policy, dtype)
    for bucket in manifest:
        yield torch.cat([tensor.flatten() for _, (_, tensor) in zip(bucket, tensors, strict=False)])


def receive_weights(group: Any, manifest: Manifest, dtype: torch.dtype, device: torch.device, seconds: list[float]):
    """Yield (name, tensor) of a broadcast, bucket by bucket, on an engine; appends the seconds spent on the wire."""
    for bucket in manifest:
        sizes = [math.prod(shape) for _, shape in bucket]
        start = time.perf_counter()
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        group.broadcast([flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
        seconds.append(time.perf_counter() - start)
        for (name, shape), part in zip(bucket, flat.split(sizes), strict=True):
            yield name, part.view(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Engines
# ---------------------------------------------------------------------------------------------------------------------


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
    """Serve requests and weights from learner 0 until it says stop or is gone.

    With tensor parallelism the engine's first rank has the connection and tells the others what to do next.
    """
    world = join(meeting.store, f"engine{roles.index}", roles.tp_rank, roles.tp)
    Watchdog(meeting, roles, args.stall_timeout_s)
    tokenizer = utils.load_tokenizer(args)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout * (args.async_steps + 1)
    if args.single_gpu_mode:
        meeting.store.get("learner loaded")  # vLLM takes a share of what it finds free on the device
    engine = utils.make_engine(args, tokenizer, world, math.ceil(rollouts / roles.engines))
    group, device = weights_group(meeting.store, roles, args)  # waits for learner 0, which loads a model meanwhile
    device = device or world.device
    connection = None
    if world.is_main:
        host, port, key = meeting.store.get("address").decode().split()
        connection = Client((host, int(port)), authkey=key.encode())
        connection.send(roles.index)
    dtype, clock = utils.DTYPES[args.model_dtype], Clock()
    utils.STOP.during = "what the learners ask for"
    while True:
        start = time.perf_counter()
        message = next_message(connection, engine.busy, args.inflight_updates, world)
        clock.idle += 0.0 if engine.busy else time.perf_counter() - start
        start = time.perf_counter()
        if message is None and not engine.busy:
            continue
        if message is None:
            finished = engine.step()
            clock.busy += time.perf_counter() - start
            clock.steps += 1
            clock.tokens += sum(len(made.token_ids) for _, made in finished)
            if finished and world.is_main:
                connection.send(("done", finished, clock))
        elif message[0] == "generate":
            for request_id, request in message[1]:
                engine.add(request_id, request)
        elif message[0] == "weights":
            _, version, manifest = message
            wire: list[float] = []
            engine.load_weights(receive_weights(group, manifest, dtype, device, wire), version)
            clock.pause += time.perf_counter() - start
            clock.wire += sum(wire)
            if world.is_main:
                connection.send(("loaded", version, clock))
        else:
            engine.close()
            return


def next_message(connection: Connection | None, busy: bool, inflight: bool, world: utils.World) -> Any:
    """What an engine does next, the same on all its ranks: a message from learner 0, or None for a decoding step.

    Messages keep their order. Without `inflight` updates, weights wait until the running responses have ended.
    """
    message = None
    if connection is not None:
        if WAITING and not busy:
            message = WAITING.pop()
        elif not WAITING and connection.poll(0 if busy else 60.0):
            message = connection.recv()
            if message[0] == "weights" and busy and not inflight:
                WAITING.append(message)
                message = None
    if world.size > 1:
        box = [message]
        dist.broadcast_object_list(box)
        message = box[0]
    return message


WAITING: list[Any] = []  # an engine's weights message, until its running responses have ended


class Engines(utils.Sampler):
    """Learner 0's side of all engines. `generate` makes it an engine like those of utils, for evaluation."""

    def __init__(self, meeting: Meeting, roles: Roles, eos_ids: list[int], args: Args):
        self.eos_ids = eos_ids
        self.changed = threading.Condition()
        self.finished: dict[str, tuple[utils.Generation, float]] = {}  # and when
        self.on_finish: dict[str, Callable[[utils.Generation], None]] = {}
        self.loaded: dict[int, int] = {}  # version -> engines that have it
        self.clocks = [Clock() for _ in range(roles.engines)]
        self.dead: str | None = None
        self.connections: list[Any] = [None] * roles.engines
        self.owner: dict[str, int] = {}  # outstanding request -> engine
        self.locks = [threading.Lock() for _ in range(roles.engines)]
        self.watchdog = Watchdog(meeting, roles, args.stall_timeout_s, self.outstanding)
        self.group, self.device = weights_group(meeting.store, roles, args)
        key = uuid.uuid4().hex
        ranks = roles.learners + roles.engines * roles.tp
        one_node = ranks == int(os.environ["LOCAL_WORLD_SIZE"])
        with Listener(("127.0.0.1" if one_node else "", 0), authkey=key.encode()) as listener:
            host = "127.0.0.1" if one_node else meeting.host
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
            if kind == "done":
                self._call_back(content)
            with self.changed:
                self.clocks[index] = clock
                if kind == "done":
                    for request_id, generation in content:
                        self.finished[request_id] = generation, time.perf_counter()
                        del self.owner[request_id]
                else:
                    self.loaded[content] = self.loaded.get(content, 0) + 1
                self.changed.notify_all()

    def _call_back(self, finished: Sequence[tuple[str, utils.Generation]]) -> None:
        try:
            for request_id, generation in finished:
                self.on_finish.pop(request_id)(generation)
        except Exception as error:  # in this thread nobody would see it
            with self.changed:
                self.dead = f"handling of a response failed ({type(error).__name__}: {error})"

    def outstanding(self) -> str:
        """The requests no engine has answered yet, for a person."""
        ids = sorted(self.owner)
        shown = ", ".join(f"{i} (engine {self.owner[i]})" for i in ids[:64])
        return f"{len(ids)} requests: {shown}{', ...' if len(ids) > 64 else ''}" if ids else "no request"

    def submit(
        self,
        requests: Sequence[tuple[str, utils.Request, Callable[[utils.Generation], None]]],
        index: int | None = None,
    ) -> None:
        """Give requests to an engine, None: to that with the least to do; each brings what is called, in another
        thread, as it ends."""
        self.on_finish |= {request_id: call for request_id, _, call in requests}
        with self.changed:
            if index is None:
                loads = [0] * len(self.connections)
                for engine in self.owner.values():
                    loads[engine] += 1
                index = loads.index(min(loads))
            self.owner |= {request_id: index for request_id, *_ in requests}
        with self.locks[index]:
            self.connections[index].send(("generate", [(request_id, request) for request_id, request, _ in requests]))

    def wait_for(self, condition: Any, what: str) -> None:
        """Block until condition() holds; raises RuntimeError when an engine is gone."""
        with self.changed:
            while not condition():
                if self.dead:
                    raise RuntimeError(f"{self.dead} while waiting for {what}")
                self.changed.wait(timeout=1.0)

    def take(self, request_ids: Sequence[str]) -> tuple[list[utils.Generation], float]:
        """Wait for requests and hand over their results, and when the last one came."""
        self.wait_for(lambda: all(i in self.finished for i in request_ids), f"request {request_ids[0]}")
        with self.changed:
            made, when = zip(*[self.finished.pop(i) for i in request_ids], strict=True)
        return list(made), max(when)

    def generate(
        self, requests: Sequence[utils.Request], finished: Callable[[int, utils.Generation], None]
    ) -> list[utils.Generation]:
        """See utils.Engine.generate; finished is called in another thread."""
        named = [(f"now/{uuid.uuid4().hex}", r, functools.partial(finished, i)) for i, r in enumerate(requests)]
        for start in range(0, len(named), 8):
            self.submit(named[start : start + 8])
        return self.take([request_id for request_id, *_ in named])[0]

    def tell_all(self, message: tuple) -> None:
        """Send a message to every engine."""
        for lock, connection in zip(self.locks, self.connections, strict=True):
            with lock:
                connection.send(message)

    def wait_loaded(self, version: int) -> None:
        """Block until every engine computes with `version`."""
        self.wait_for(lambda: self.loaded.get(version) == len(self.connections), f"version {version} in the engines")


# ---------------------------------------------------------------------------------------------------------------------
# Collector
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class StepData:
    """What the collector hands to the learners for a step."""

    groups: list[Group] = field(default_factory=list)  # those of the batch
    sampled: list[Group] = field(default_factory=list)  # all that were sampled for it
    packs: list[list[list[Pack]]] = field(default_factory=list)  # of each mini-batch, for each learner
    cursor: int = 0  # prompts consumed so far
    excluded: frozenset[int] = frozenset()  # prompts too easy to sample again
    seconds: dict[str, float] = field(default_factory=dict)


class Collector:
    """A thread that admits prompts, gathers groups in stream order, scores and packs them, one step ahead."""

    def __init__(
        self,
        engines: Engines,
        prompts: list[utils.Prompt],
        tokenizer: Any,
        args: Args,
        state: dict[str, Any],
        pack: Any,  # rollouts -> packs of each learner
    ):
        self.engines, self.prompts, self.tokenizer, self.args, self.pack = engines, prompts, tokenizer, args, pack
        self.steps = range(state["step"], grpo.num_training_steps(args))
        self.first = self.admitted = self.consumed = state["cursor"]
        self.excluded = frozenset(state["excluded"])
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
        """Weights trained on the first `cursor` prompts are in the engines: admit what they allow."""
        self.admit(cursor + self.args.num_unique_prompts_rollout * (self.args.async_steps + 1))

    def admit(self, limit: int) -> None:
        """Start all groups at stream positions below `limit` that have not been started."""
        if not self.args.active_sampling:  # then the run's end is known
            limit = min(limit, self.first + len(self.steps) * self.args.num_unique_prompts_rollout)
        with self.engines.changed:
            positions = range(self.admitted, limit)
            self.admitted = max(self.admitted, limit)
            for position in positions:
                if position in self.restored:
                    prompt = self.prompts[self.restored[position][0]]
                else:
                    prompt = utils.prompt_at(self.prompts, position, self.args.seed, self.excluded)
                samples = range(self.args.num_samples_per_prompt_rollout)
                self.in_flight[position] = [Rollout(prompt, position, j) for j in samples]
                self.started_at[position] = time.perf_counter()
            self.counts["started"] += len(positions)
            self.engines.changed.notify_all()
        batches: dict[int | None, list] = {}  # of each engine in one message, so that its batches are always the same
        for position in positions:
            requests = []
            _, made = self.restored.pop(position, (None, {}))
            for r in self.in_flight[position]:
                name = f"{position}/{r.sample}"
                if r.sample in made:
                    self._finish(r, generation := utils.Generation(**made[r.sample]))
                    self.engines.finished[name] = generation, time.perf_counter()
                else:
                    request = grpo.make_request(r, self.args)
                    requests.append((name, request, functools.partial(self._finish, r)))
            if self.args.deterministic:
                batches.setdefault(position % len(self.engines.connections), []).extend(requests)
            elif requests:
                self.engines.submit(requests)
        for index, requests in batches.items():
            self.engines.submit(requests, index)

    def _finish(self, rollout: Rollout, made: utils.Generation) -> None:
        rollout.append(made)
        grpo.start_scoring(rollout, self.tokenizer, self.engines.eos_ids, self.args)

    def _run(self) -> None:
        try:
            for _ in self.steps:
                self.ready.put(self._collect())
        except BaseException as error:  # handed to the learner, which raises it
            self.error = error
            self.ready.put(None)

    def _collect(self) -> StepData:
        args, wanted, timer = self.args, self.args.num_unique_prompts_rollout, utils.Timer()
        data, group_seconds = StepData(), []
        most = wanted * (grpo.MAX_SAMPLING_ROUNDS if args.active_sampling else 1)
        taken = 0
        while taken < most and len(data.groups) < wanted:
            if self.consumed == self.admitted and taken:  # active_sampling ran dry: go on from the newest weights
                self.admit(self.consumed + wanted)
            self.engines.wait_for(lambda: self.consumed < self.admitted, "new weights in the engines")
            group, seconds = self._take(self.consumed)
            group_seconds.append(seconds)
            self.consumed, taken = self.consumed + 1, taken + 1
            with timer("reward"):
                grpo.score_rollouts(group, args)
            grpo.set_advantages(group, args)
            data.sampled.append(group)
            self.engines.watchdog.beat()
            if not args.active_sampling or grpo.has_gradient(group):
                data.groups.append(group)
        self.excluded = grpo.exclude_solved(self.excluded, data.sampled, args)
        longest = utils.summary("time/group_generation", group_seconds)
        with timer("packing"):
            per = len(data.groups) // args.num_mini_batches or 1
            for i in range(args.num_mini_batches):
                data.packs.append(self.pack(grpo.trainable(data.groups[i * per : (i + 1) * per], args)))
        data.cursor, data.excluded, data.seconds = self.consumed, self.excluded, timer.seconds | longest
        return data

    def _take(self, position: int) -> tuple[Group, float]:
        """The group at a stream position, and the seconds from its start to its last token."""
        group = self.in_flight[position]
        _, when = self.engines.take([f"{position}/{r.sample}" for r in group])
        return group, when - self.started_at.pop(position)

    def next(self) -> StepData:
        """The next step's data; raises what the thread raised."""
        data = self.ready.get()
        if data is None:
            raise self.error  # ty: ignore[invalid-raise]
        return data

    def checkpoint(self, cursor: int) -> dict[str, Any]:
        """What a checkpoint keeps of groups that no update has seen: `rollouts`, position -> (prompt index, sample ->
        fields of its Generation), and the counts without them. Samples still being made are left out and will be
        sampled anew; with --deterministic those of weights older than the checkpoint's are waited for."""
        if self.args.deterministic:
            old = range(cursor, cursor + self.args.num_unique_prompts_rollout * self.args.async_steps)
            groups = [self.in_flight[p] for p in old if p in self.in_flight]
            self.engines.wait_for(lambda: all(r.finish_reason for g in groups for r in g), "rollouts for a checkpoint")
        fields = utils.Generation.__dataclass_fields__
        with self.engines.changed:
            whole = {p: [r for r in group if r.finish_reason] for p, group in self.in_flight.items()}
            indices = {p: group[0].prompt.index for p, group in self.in_flight.items()}
        rollouts = {
            p: (indices[p], {r.sample: {f: getattr(r, f) for f in fields} for r in group})
            for p, group in whole.items()
            if p >= cursor
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


# ---------------------------------------------------------------------------------------------------------------------
# Learners
# ---------------------------------------------------------------------------------------------------------------------


class Sender:
    """A thread of learner 0 that broadcasts weights while the next update runs, then admits what they allow."""

    def __init__(self, engines: Engines):
        self.engines = engines
        self.collector: Collector | None = None
        self.work: queue.Queue = queue.Queue()
        self.idle = threading.Semaphore(1)  # one broadcast at a time; buckets of the next would pile up
        self.metrics: dict[str, float] = {}
        self.stream: Any = torch.cuda.Stream() if torch.cuda.is_available() else None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            manifest, version, cursor = self.work.get()
            start, before, num_bytes = time.perf_counter(), list(self.engines.clocks), 0
            try:
                self.engines.tell_all(("weights", version, manifest))
                for _ in manifest:
                    bucket, gathered = self.work.get()
                    num_bytes += bucket.numel() * bucket.element_size()
                    self._broadcast(bucket, gathered)
                self.engines.wait_loaded(version)
            except (RuntimeError, OSError) as error:
                with self.engines.changed:
                    self.engines.dead = self.engines.dead or f"weight broadcast failed ({error})"
                    self.engines.changed.notify_all()
                return
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
            self.idle.release()
            if self.collector is not None:
                self.collector.engines_have(cursor)

    def _broadcast(self, bucket: torch.Tensor, gathered: Any) -> None:
        with torch.cuda.stream(self.stream):  # does nothing where there is none
            if gathered is not None:  # wait for the gather, not for the update that was queued after it
                self.stream.wait_event(gathered)
                bucket.record_stream(self.stream)
            data = bucket.view(torch.uint8).to(self.engines.device or bucket.device)
            self.engines.group.broadcast([data], dist.BroadcastOptions()).wait()


def send_weights(
    policy: grpo.Policy, manifest: Manifest, sender: Sender | None, dtype: torch.dtype, version: int, cursor: int
) -> None:
    """Gather the weights bucket by bucket; learner 0 hands each to the sender, which broadcasts it while the next one
    is gathered. Waits only while the broadcast before is still under way. All learners."""
    if sender is not None:
        while not sender.idle.acquire(timeout=1.0):
            if sender.engines.dead:
                raise RuntimeError(f"{sender.engines.dead} while weights were sent")
        sender.work.put((manifest, version, cursor))
    for bucket in gather_weights(policy, manifest, dtype):
        if sender is not None:
            sender.work.put((bucket, torch.cuda.current_stream().record_event() if bucket.is_cuda else None))


def run_learner(args: Args, roles: Roles, meeting: Meeting) -> Path:
    """The training loop of every learner; learner 0 also owns collector, sender and all files."""
    start_time = time.perf_counter()
    world = join(meeting.store, "learners", roles.index, roles.learners)
    if not world.is_main:
        Watchdog(meeting, roles, args.stall_timeout_s)
    torch.manual_seed(args.seed)
    utils.make_deterministic(args)
    tokenizer = utils.load_tokenizer(args)
    train_prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    eval_prompts = utils.load_prompts("dataset_mixer_eval_list", args, tokenizer)
    utils.check_model_length(args)
    run_dir = utils.prepare_run_dir(args, utils.data_hash(train_prompts + eval_prompts), world)
    policy = grpo.load_policy(args, world)
    ref_policy = grpo.load_policy(args, world).requires_grad_(False) if args.load_ref_policy else None
    optimizer, scheduler = grpo.make_optimizer(policy, args)
    num_steps, dtype = grpo.num_training_steps(args), utils.DTYPES[args.model_dtype]
    modules = {"policy": policy} | ({"ref_policy": ref_policy} if args.ref_policy_update_freq else {})
    state = grpo.start_state()
    checkpoints = utils.Checkpoints(run_dir, args.keep_last_n_checkpoints, world)
    if args.resume:
        path = utils.newest_checkpoint(run_dir, world)
        state |= grpo.load_state(path, modules, optimizer, scheduler, world)
    alone = utils.World(0, world.local_rank, 1, world.device)  # evaluation and its metrics: learner 0 only
    manifest = plan_weights(policy, dtype)
    how = grpo.choose_packing(policy, train_prompts[0], args, world)  # the engines are still starting
    engines: Any = None  # these three: learner 0
    sender = collector = None
    servers: utils.Servers | None = None
    clocks: list[Clock] = []
    if world.is_main:
        meeting.store.set("learner loaded", "")
        servers = utils.start_reward_models(args, run_dir, alone)
        eos_ids = utils.eos_token_ids(args.model_name_or_path, args.model_revision, tokenizer)
        engines = Engines(meeting, roles, eos_ids, args)
        sender = Sender(engines)
    send_weights(policy, manifest, sender, dtype, state["step"], state["cursor"])
    probe_prompt = (0, train_prompts[0])
    gap_metrics = check_engines(engines, policy, probe_prompt, state["step"], "before the first rollout", args, world)
    state |= utils.device_speed(world.device, dtype)  # now that the engines are quiet
    logger = utils.Logger(args, run_dir, num_steps, state["step"], world)
    gap = gap_metrics["debug/vllm_vs_local_logprob_diff_mean"]
    if state["step"]:
        logger.say(f"resumed after step {state['step']}")
    logger.say(
        f"{len(train_prompts)} prompts, {len(eval_prompts)} for evaluation; {roles.learners} learners, {roles.engines} "
        f"engines, async_steps {args.async_steps}; {grpo.PACKING[how].format(args.pack_length)}; ready after "
        f"{time.perf_counter() - start_time:.0f} s; logprob gap before the first rollout mean {gap:.1e}"
    )
    if world.is_main:
        if args.eval_on_step_0 and state["step"] == 0:
            found = grpo.evaluate(engines, eval_prompts, tokenizer, args, alone)[0]
            logger.log({"training_step": 0, "episode": 0} | gap_metrics | found)

        def pack(rollouts: list[Rollout]) -> list[list[Pack]]:
            return grpo.pack_rollouts(rollouts, how, args.pack_length, world.size, policy.pair_cost)

        assert engines is not None and sender is not None
        sender.collector = collector = Collector(engines, train_prompts, tokenizer, args, state, pack)
        collector.start()
        clocks = list(engines.clocks)

    # the gap on rollouts of older weights says nothing about the engine: then fresh ones are compared now and then
    update_args = replace(args, max_logprob_gap=0.0) if args.async_steps else args
    first_step = state["step"] + 1
    for step in utils.STOP.steps(range(first_step, num_steps + 1)):
        step_start, timer, metrics = time.perf_counter(), utils.Timer(), utils.Metrics()
        with timer("trainer_waiting_for_data"):
            data = collector.next() if world.is_main else StepData()
            packs, fallback, state["cursor"], excluded = scatter(data, args, world)
            state["excluded"] = sorted(excluded)
        with timer("training"):
            batches = [grpo.micro_batches(p, how, args, world.device) for p in packs]
            gap_metrics, bad = grpo.update(
                policy, ref_policy, optimizer, scheduler, batches, update_args, world, metrics
            )
            if not gap_metrics:  # no group has a gradient
                gap_metrics = grpo.measure_gap(policy, fallback, "on this step's rollouts", update_args, world)
        state["nonfinite_in_a_row"] = grpo.handle_nonfinite(
            bad, state["nonfinite_in_a_row"], batches, step, run_dir, world, logger
        )
        if ref_policy is not None and args.ref_policy_update_freq and step % args.ref_policy_update_freq == 0:
            grpo.refresh_reference(ref_policy, policy, args.alpha)
        with timer("gather"):
            send_weights(policy, manifest, sender, dtype, step, state["cursor"])

        # everything below reports or saves
        utils.check_servers(servers)
        state["step"] = step
        seconds = timer.seconds | data.seconds | {"time/total": time.perf_counter() - step_start}
        describe_staleness(packs, step, metrics)
        grpo.describe_update(policy, packs, args, bad, world, metrics)
        utils.describe_step(data.groups, data.sampled, args, metrics)
        out = grpo.finish_step(metrics, gap_metrics, seconds, state, len(train_prompts), start_time, args, world)
        if world.is_main:
            engines.watchdog.beat()
            out |= collector.account(data) | sender.metrics
            now = list(engines.clocks)
            spent, clocks = [a.since(b) for a, b in zip(now, clocks, strict=True)], now
            out |= describe_engines(spent, policy, out, state)
            longest = max(out["time/group_generation_max"], 1e-9)
            tokens = sum(len(r.token_ids) for group in data.sampled for r in group)
            out["val/actor_tokens_per_second_longest_group"] = tokens / longest  # open-instruct's throughput
        if args.save_freq > 0 and step % args.save_freq == 0:
            with timer("saving"):
                utils.save_model(policy, tokenizer, run_dir / f"step_{step}", args, world)
            out["time/saving"] = timer.seconds["time/saving"]
        evaluated = args.local_eval_every > 0 and (step % args.local_eval_every == 0 or step == num_steps)
        if args.async_steps and (evaluated or step == first_step):
            check_engines(engines, policy, probe_prompt, step, f"after the weights of step {step}", args, world)
        if world.is_main and eval_prompts and evaluated:
            engines.wait_loaded(step)
            out |= grpo.evaluate(engines, eval_prompts, tokenizer, args, alone)[0]
        logger.log(out)
        if world.is_main:
            logger.say(step_line(out))
            if step % grpo.SHOW_ROLLOUTS_EVERY == 1:
                logger.show(step, data.sampled)
        utils.record_step(step, data.sampled, data.groups, packs, batches, how, policy, args, world)
        stopping = utils.stop_asked(world)
        if stopping or (args.checkpoint_state_freq > 0 and step % args.checkpoint_state_freq == 0):
            more = collector.checkpoint(state["cursor"]) if world.is_main else {}
            grpo.save_state(checkpoints, modules, optimizer, scheduler, state, **more)
        if stopping:
            logger.say(f"{stopping}: stopped after step {step}; --resume goes on")
            break

    checkpoints.wait()
    finished = state["step"] == num_steps
    if finished:
        utils.save_model(policy, tokenizer, run_dir / "model", args, world)
    logger.close()
    if world.is_main:
        engines.wait_loaded(state["step"])
        engines.tell_all(("stop",))
        made = f"model {run_dir / 'model'}" if finished else f"no model yet, checkpoints in {run_dir / 'checkpoints'}"
        print(f"{made}, {utils.draw_report(run_dir)}")
    rewards.close()
    utils.stop_servers(servers)
    dist.barrier()  # no rank leaves while another still writes
    utils.leave_distributed()
    if args.push_to_hub and world.is_main and finished:  # the other ranks wait for nothing
        engines.watchdog.timeout_s = math.inf
        utils.push_model(run_dir)
    return run_dir


def check_engines(
    engines: Any,  # Engines on learner 0
    policy: grpo.Policy,
    prompt: tuple[int, utils.Prompt],
    version: int,
    when: str,
    args: Args,
    world: utils.World,
) -> dict[str, float]:
    """The logprob gap on a short response sampled with the learners' present weights, `version`. All learners."""
    probe: list[list[Group]] = [[]]
    if world.is_main:
        engines.wait_loaded(version)
        short = replace(args, response_length=min(args.response_length, 32))
        probe = [grpo.sample_rollouts(engines, [prompt], 1, short)]
    dist.broadcast_object_list(probe)
    return grpo.measure_gap(policy, probe[0], when, args, world)


def scatter(
    data: StepData, args: Args, world: utils.World
) -> tuple[list[list[Pack]], list[Group], int, frozenset[int]]:
    """This learner's packs of each mini-batch, groups to measure the gap on, cursor, exclusions. All learners."""
    parts: list[Any] = [None] * world.size
    if world.is_main:
        some = data.sampled[: args.per_device_train_batch_size]
        parts = [([m[i] for m in data.packs], some, data.cursor, data.excluded) for i in range(world.size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parts)
    return mine[0]


def describe_staleness(packs: Sequence[Sequence[Pack]], step: int, metrics: utils.Metrics) -> None:
    """How many updates old the weights behind the trained tokens are."""
    versions = [v for m in packs for pack in m for piece in pack for r in piece for v in r.versions]
    metrics.add("val/num_steps_off_policy", sum(step - 1 - v for v in versions), len(versions))
    metrics.add_all("val/model_step", versions)


def describe_engines(
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
    world_size = int(os.environ["WORLD_SIZE"]) if "MASTER_ADDR" in os.environ else None  # torchrun started us
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    check_fast_args(args, world_size, ranks_per_node)
    args.check(1, fast=True)
    if args.dry_run or world_size is None:
        lines = args.batch_arithmetic(1).splitlines()
        print("\n".join(line for line in lines if not line.startswith("ranks")))  # packs, not prompts, are shared out
        tp = args.vllm_tensor_parallel_size
        print(
            f"roles    {sum(args.num_learners_per_node)} learners + {args.vllm_num_engines} engines x {tp} = "
            f"{sum(args.num_learners_per_node) + args.vllm_num_engines * tp} processes, "
            f"{torch.cuda.device_count()} GPUs visible; async_steps {args.async_steps}: at most "
            f"{args.num_unique_prompts_rollout * (args.async_steps + 1)} groups in flight"
        )
        if args.dry_run:
            print("dtype    {}: {}".format(*utils.choose_dtype(args)))
            learners, shared = sum(args.num_learners_per_node), args.single_gpu_mode
            print(utils.describe_sources(args))
            utils.print_memory(args, learners, shared, grpo.LOGPROB_CHUNK)
        else:
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
