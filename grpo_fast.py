"""GRPO on a fast machine: the algorithm of grpo.py with generation and learning side by side, each on its own devices.

    python grpo_fast.py --flags                       one learner and one engine, started by this script
    torchrun --nproc_per_node=8 grpo_fast.py --num_learners_per_node 6 --vllm_num_engines 2 --flags

The first sum(num_learners_per_node) ranks learn, the others are vLLM engines. All of the maths is imported from
grpo.py; this file is about who does what when:

    collector (a thread of learner 0)   admits prompts, gathers groups in stream order, scores them, one step ahead
    learners                            the update of grpo.py on their share of the rows; gather new weights
    sender (a thread of learner 0)      broadcasts weights to the engines while the next update runs
    engines                             decode; take new weights between two decoding steps

Staleness is kept by admission: with c(v) prompts consumed when the engines got version v, position i of the prompt
stream is admitted once i < c(v) + P * (async_steps + 1). Batches are taken in stream order, so a rollout is at most
async_steps updates old when it trains, nothing is dropped for its age, and long responses are as likely to be trained
on as short ones. async_steps 0 is strictly on-policy and makes the updates of grpo.py.

Learners have their own world (FSDP2), every engine its own; they meet in a bare process group for the weights and talk
over local sockets whose addresses travel through torchrun's store: no port number stands in any flag.
"""

import ctypes
import math
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import utils  # isort: skip  (pins thread counts, so it comes before torch)

import torch
import torch.distributed as dist

import grpo
import rewards
from grpo import Args, Rollout

BUCKET_BYTES = 256 * 2**20  # of a weight broadcast
TIMEOUT = timedelta(minutes=30)


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roles:
    """Who this process is: learner `index` of `learners`, or engine `index` of `engines`."""

    learners: int
    engines: int
    rank: int

    @property
    def is_learner(self) -> bool:
        return self.rank < self.learners

    @property
    def index(self) -> int:
        return self.rank if self.is_learner else self.rank - self.learners


def check_fast_args(args: Args, world_size: int | None) -> None:
    """grpo_fast.py's own refusals; world_size is None when this script starts the processes itself."""
    learners, engines = sum(args.num_learners_per_node), args.vllm_num_engines
    if min(args.num_learners_per_node, default=0) < 1 or engines < 1:
        raise utils.UserError(
            f"--num_learners_per_node {args.num_learners_per_node} --vllm_num_engines {engines}: both must be positive"
        )
    if world_size is not None and world_size != learners + engines:
        raise utils.UserError(
            f"--num_learners_per_node {args.num_learners_per_node} + --vllm_num_engines {engines} = "
            f"{learners + engines} processes, but {world_size} ranks run"
        )
    if args.num_unique_prompts_rollout % args.num_mini_batches:
        raise utils.UserError(
            f"--num_mini_batches {args.num_mini_batches} does not divide --num_unique_prompts_rollout "
            f"{args.num_unique_prompts_rollout}"
        )
    if args.resume or args.checkpoint_state_freq > 0:
        raise utils.UserError("--resume and --checkpoint_state_freq work in grpo.py only so far")
    gpus = torch.cuda.device_count()
    if gpus and learners + engines > gpus and not args.single_gpu_mode:
        raise utils.UserError(
            f"{learners} learners + {engines} engines need {learners + engines} GPUs, {gpus} are visible: lower "
            "--num_learners_per_node or --vllm_num_engines, or share one GPU with --single_gpu_mode"
        )


def launch(args: Args) -> None:
    """Start all ranks on this machine with torch's elastic launcher; they are this script again."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks = sum(args.num_learners_per_node) + args.vllm_num_engines
    cores = len(os.sched_getaffinity(0))
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
    )
    try:
        elastic_launch(config, sys.executable)(os.path.abspath(__file__), *sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
        who = Roles(sum(args.num_learners_per_node), args.vllm_num_engines, rank)
        name = f"{'learner' if who.is_learner else 'engine'} {who.index}"
        raise SystemExit(f"grpo_fast.py: {name} (pid {failure.pid}) died with {_reason(failure.exitcode)}") from None


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
    cores, ranks = sorted(os.sched_getaffinity(0)), int(os.environ["LOCAL_WORLD_SIZE"])
    if args.async_steps > 0 and not torch.cuda.is_available() and len(cores) >= ranks:
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"]) :: ranks])


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


def weights_group(store: Any, roles: Roles) -> Any:
    """A bare process group of learner 0 and all engines. A shared default group would hang inside vLLM."""
    rank = 0 if roles.is_learner else roles.index + 1
    prefix = dist.PrefixStore("weights", store)
    if torch.cuda.is_available():
        return dist.ProcessGroupNCCL(prefix, rank, roles.engines + 1, TIMEOUT)
    return dist.ProcessGroupGloo(prefix, rank, roles.engines + 1, TIMEOUT)


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------

Manifest = list[list[tuple[str, tuple[int, ...]]]]  # buckets of (name, shape)


def gather_weights(policy: grpo.Policy, dtype: torch.dtype, keep: bool) -> tuple[Manifest, list[torch.Tensor]]:
    """All weights in `dtype` as flat buckets and what is in them. All learners; only those that `keep` get buckets."""
    manifest: Manifest = []
    buckets: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []
    size = BUCKET_BYTES
    for name, tensor in utils.full_weights(policy.model, dtype):  # all learners
        if not keep:
            continue
        if size >= BUCKET_BYTES:
            buckets += [torch.cat(parts)] if parts else []
            manifest, parts, size = manifest + [[]], [], 0
        manifest[-1].append((name, tuple(tensor.shape)))
        parts.append(tensor.flatten())
        size += tensor.numel() * tensor.element_size()
    return manifest, buckets + ([torch.cat(parts)] if parts else [])


def receive_weights(group: Any, manifest: Manifest, dtype: torch.dtype, device: torch.device):
    """Yield (name, tensor) of a broadcast, bucket by bucket, on an engine."""
    for bucket in manifest:
        sizes = [math.prod(shape) for _, shape in bucket]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        group.broadcast([flat.view(torch.uint8)], dist.BroadcastOptions()).wait()
        for (name, shape), part in zip(bucket, flat.split(sizes), strict=True):
            yield name, part.view(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Engines
# ---------------------------------------------------------------------------------------------------------------------


def run_engine(args: Args, roles: Roles, store: Any) -> None:
    """Serve requests and weights from learner 0 until it says stop or is gone."""
    world = join(store, f"engine{roles.index}", 0, 1)
    group = weights_group(store, roles)
    tokenizer = utils.load_tokenizer(args)
    rollouts = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout * (args.async_steps + 1)
    engine = utils.make_engine(args, tokenizer, world, math.ceil(rollouts / roles.engines))
    host, port, key = store.get("address").decode().split()
    connection = Client((host, int(port)), authkey=key.encode())
    connection.send(roles.index)
    dtype = utils.DTYPES[args.model_dtype]
    waiting: list[Any] = []  # a message that has to wait until running sequences end
    while True:
        while waiting or connection.poll(0 if engine.busy else None):
            kind, *content = waiting.pop() if waiting else connection.recv()
            if kind == "stop":
                engine.close()
                return
            if kind == "generate":
                for request_id, request in content[0]:
                    engine.add(request_id, request)
            elif engine.busy and not args.inflight_updates:
                waiting.append((kind, *content))
                break
            else:
                version, manifest = content
                start = time.perf_counter()
                engine.load_weights(receive_weights(group, manifest, dtype, world.device), version)
                connection.send(("loaded", version, time.perf_counter() - start))
        if engine.busy and (finished := engine.step()):
            connection.send(("done", finished))


class Engines:
    """Learner 0's side of all engines. `generate` makes it an engine like those of utils, for evaluation."""

    def __init__(self, store: Any, roles: Roles, eos_ids: list[int], log: Any = None):
        self.eos_ids = eos_ids
        self.changed = threading.Condition()
        self.finished: dict[str, utils.Generation] = {}
        self.loaded: dict[int, list[float]] = {}  # version -> seconds of each engine that has it
        self.dead: str | None = None
        self.group = weights_group(store, roles)
        self.connections: list[Connection] = [None] * roles.engines
        self.outstanding = [0] * roles.engines
        self.owner: dict[str, int] = {}
        self.locks = [threading.Lock() for _ in range(roles.engines)]
        key = uuid.uuid4().hex
        with Listener(("127.0.0.1" if roles.learners + roles.engines == int(os.environ["LOCAL_WORLD_SIZE"]) else "", 0),
                      authkey=key.encode()) as listener:  # fmt: skip
            host, port = listener.address
            host = os.environ["MASTER_ADDR"] if host in ("", "0.0.0.0") else host
            store.set("address", f"{host} {port} {key}")
            for _ in range(roles.engines):
                connection = listener.accept()
                self.connections[connection.recv()] = connection
        for i in range(roles.engines):
            threading.Thread(target=self._receive, args=(i,), daemon=True).start()

    def _receive(self, index: int) -> None:
        while True:
            try:
                kind, *content = self.connections[index].recv()
            except (EOFError, OSError):
                with self.changed:
                    self.dead = f"engine {index} is gone"
                    self.changed.notify_all()
                return
            with self.changed:
                if kind == "done":
                    for request_id, generation in content[0]:
                        self.finished[request_id] = generation
                        self.outstanding[self.owner.pop(request_id)] -= 1
                else:
                    version, seconds = content
                    self.loaded.setdefault(version, []).append(seconds)
                self.changed.notify_all()

    def submit(self, requests: Sequence[tuple[str, utils.Request]]) -> None:
        """Give requests (a group's stay together) to the engine with the least to do."""
        with self.changed:
            index = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
            self.outstanding[index] += len(requests)
            self.owner |= {request_id: index for request_id, _ in requests}
        with self.locks[index]:
            self.connections[index].send(("generate", list(requests)))

    def wait_for(self, condition: Any, what: str) -> None:
        """Block until condition() holds; raises RuntimeError when an engine is gone."""
        with self.changed:
            while not condition():
                if self.dead:
                    raise RuntimeError(f"{self.dead} while waiting for {what}")
                self.changed.wait(timeout=1.0)

    def take(self, request_ids: Sequence[str]) -> list[utils.Generation]:
        """Wait for requests and hand over their results."""
        self.wait_for(lambda: all(i in self.finished for i in request_ids), f"request {request_ids[0]}")
        with self.changed:
            return [self.finished.pop(i) for i in request_ids]

    def generate(self, requests: Sequence[utils.Request]) -> list[utils.Generation]:
        """Sample all requests to their end; the result has their order."""
        named = [(f"now/{uuid.uuid4().hex}", request) for request in requests]
        for start in range(0, len(named), 8):
            self.submit(named[start : start + 8])
        return self.take([request_id for request_id, _ in named])

    def send_weights(self, manifest: Manifest, buckets: Sequence[torch.Tensor], version: int) -> float:
        """Broadcast to all engines; returns the seconds until the last byte was taken."""
        start = time.perf_counter()
        for lock, connection in zip(self.locks, self.connections, strict=True):
            with lock:
                connection.send(("weights", version, manifest))
        for bucket in buckets:
            self.group.broadcast([bucket.view(torch.uint8)], dist.BroadcastOptions()).wait()
        return time.perf_counter() - start

    def wait_loaded(self, version: int) -> None:
        """Block until every engine computes with `version`."""
        self.wait_for(lambda: len(self.loaded.get(version, ())) == len(self.connections), f"version {version}")

    def stop(self) -> None:
        """Tell all engines to end."""
        for lock, connection in zip(self.locks, self.connections, strict=True):
            with lock:
                connection.send(("stop",))


# ---------------------------------------------------------------------------------------------------------------------
# Collector
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class StepData:
    """What the collector hands to the learners for a step."""

    groups: list[list[Rollout]]
    sampled: list[Rollout]
    cursor: int  # prompts consumed so far
    reward_s: float


class Collector:
    """A thread that admits prompts, gathers groups in stream order, scores them and stays one step ahead."""

    def __init__(self, engines: Engines, prompts: list[utils.Prompt], tokenizer: Any, args: Args, num_steps: int):
        self.engines, self.prompts, self.tokenizer, self.args = engines, prompts, tokenizer, args
        self.num_steps = num_steps
        self.admitted = self.consumed = 0
        self.ready: queue.Queue = queue.Queue(maxsize=1)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.admit(self.args.num_unique_prompts_rollout * (self.args.async_steps + 1))
        self.thread.start()

    def admit(self, limit: int) -> None:
        """Start all groups at stream positions below `limit` that have not been started."""
        limit = (
            limit if self.args.active_sampling else min(limit, self.num_steps * self.args.num_unique_prompts_rollout)
        )
        with self.engines.changed:
            first, self.admitted = self.admitted, max(self.admitted, limit)
            self.engines.changed.notify_all()
        for position in range(first, limit):
            prompt = utils.prompt_at(self.prompts, position, self.args.seed)
            self.engines.submit([
                (f"{position}/{j}", grpo.make_request(prompt, position, j, self.args, evaluation=False))
                for j in range(self.args.num_samples_per_prompt_rollout)
            ])  # fmt: skip

    def engines_have(self, cursor: int) -> None:
        """Weights trained on the first `cursor` prompts are in the engines: admit what they allow."""
        self.admit(cursor + self.args.num_unique_prompts_rollout * (self.args.async_steps + 1))

    def _run(self) -> None:
        try:
            for _ in range(self.num_steps):
                self.ready.put(self._collect())
        except BaseException as error:  # handed to the learner, which raises it
            self.error = error
            self.ready.put(None)

    def _collect(self) -> StepData:
        args, wanted = self.args, self.args.num_unique_prompts_rollout
        chosen: list[list[Rollout]] = []
        sampled: list[Rollout] = []
        reward_s, most = 0.0, wanted * (grpo.MAX_SAMPLING_ROUNDS if args.active_sampling else 1)
        taken = 0
        while taken < most and len(chosen) < wanted:
            if self.consumed == self.admitted and taken:  # active_sampling ran dry: go on from the newest weights
                self.admit(self.consumed + wanted)
            self.engines.wait_for(lambda: self.consumed < self.admitted, "new weights in the engines")
            group = self._take(self.consumed)
            self.consumed, taken = self.consumed + 1, taken + 1
            start = time.perf_counter()
            grpo.score_rollouts(group, self.tokenizer, self.engines.eos_ids, args)
            grpo.set_advantages(group, args)
            reward_s += time.perf_counter() - start
            sampled += group
            if not args.active_sampling or grpo.has_gradient(group):
                chosen.append(group)
        return StepData(chosen, sampled, self.consumed, reward_s)

    def _take(self, position: int) -> list[Rollout]:
        prompt = utils.prompt_at(self.prompts, position, self.args.seed)
        samples = range(self.args.num_samples_per_prompt_rollout)
        group = [Rollout(prompt, position, j) for j in samples]
        for rollout, made in zip(group, self.engines.take([f"{position}/{j}" for j in samples]), strict=True):
            rollout.append(made)
        return group

    def next(self) -> StepData:
        """The next step's data; raises what the thread raised."""
        data = self.ready.get()
        if data is None:
            raise self.error
        return data


def share_rollouts(rollouts: Sequence[Rollout], row_tokens: int, learners: int) -> list[list[Rollout]]:
    """Split a mini-batch over the learners by rows, longest first to the learner with the least tokens; no row is
    dropped. One learner gets all rollouts in their order, as in grpo.py."""
    shares: list[list[list[Rollout]]] = [[] for _ in range(learners)]
    loads = [0] * learners
    for row in sorted(grpo.fill_rows(rollouts, row_tokens), key=grpo.row_length, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(row)
        loads[least] += grpo.row_length(row)
    order = {id(r): i for i, r in enumerate(rollouts)}
    return [sorted((r for row in share for r in row), key=lambda r: order[id(r)]) for share in shares]


# ---------------------------------------------------------------------------------------------------------------------
# Learners
# ---------------------------------------------------------------------------------------------------------------------


class Sender:
    """A thread of learner 0 that broadcasts weights while the next update runs, then admits what they allow."""

    def __init__(self, engines: Engines):
        self.engines = engines
        self.collector: Collector | None = None
        self.work: queue.Queue = queue.Queue(maxsize=1)
        self.seconds: dict[str, float] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            manifest, buckets, version, cursor = self.work.get()
            try:
                wire_s = self.engines.send_weights(manifest, buckets, version)
                self.engines.wait_loaded(version)
            except (RuntimeError, OSError) as error:
                with self.engines.changed:
                    self.engines.dead = self.engines.dead or f"weight broadcast failed ({error})"
                    self.engines.changed.notify_all()
                return
            num_bytes = sum(bucket.numel() * bucket.element_size() for bucket in buckets)
            self.seconds = {
                "time/weight_sync": wire_s,
                "time/weight_load": max(self.engines.loaded[version]),
                "val/weight_sync_gb_per_second": num_bytes / wire_s / 1e9,
            }
            if self.collector is not None:
                self.collector.engines_have(cursor)


def run_learner(args: Args, roles: Roles, store: Any) -> Path:
    """The training loop of every learner; learner 0 also owns collector, sender and all files."""
    start_time = time.perf_counter()
    world = join(store, "learners", roles.index, roles.learners)
    torch.manual_seed(args.seed)
    tokenizer = utils.load_tokenizer(args)
    train_prompts = utils.load_prompts("dataset_mixer_list", args, tokenizer)
    eval_prompts = utils.load_prompts("dataset_mixer_eval_list", args, tokenizer)
    utils.check_model_length(args)
    run_dir = utils.prepare_run_dir(args, utils.data_hash(train_prompts + eval_prompts), world)
    policy = grpo.load_policy(args, world)
    ref_policy = grpo.load_policy(args, world).requires_grad_(False) if args.load_ref_policy else None
    optimizer, scheduler = grpo.make_optimizer(policy, args)
    num_steps, dtype = grpo.num_training_steps(args), utils.DTYPES[args.model_dtype]
    state = {"step": 0, "cursor": 0, "episode": 0, "tokens": 0.0, "seconds": 0.0}
    alone = utils.World(0, world.local_rank, 1, world.device)  # evaluation and its metrics: learner 0 only
    engines = sender = collector = None
    if world.is_main:
        eos_ids = utils.eos_token_ids(args.model_name_or_path, args.model_revision, tokenizer)
        engines = Engines(store, roles, eos_ids)
        sender = Sender(engines)
    send_weights(policy, sender, dtype, 0, 0)
    row_tokens = args.pack_length if grpo.shares_prompts(policy, train_prompts[0], args, world) else 0
    probe = [None]
    if world.is_main:
        engines.wait_loaded(0)
        probe = [grpo.sample_rollouts(engines, [(0, train_prompts[0])], 1, args)]
    dist.broadcast_object_list(probe)
    gap_metrics = grpo.measure_gap(policy, probe[0], "before the first rollout", args, world)
    logger = utils.Logger(args, run_dir, num_steps, 0, world)
    logger.say(
        f"{len(train_prompts)} prompts, {len(eval_prompts)} for evaluation; {roles.learners} learners, {roles.engines} "
        f"engines, async_steps {args.async_steps}; ready after {time.perf_counter() - start_time:.0f} s; logprob gap "
        f"before the first rollout mean {gap_metrics['debug/vllm_vs_local_logprob_diff_mean']:.1e}"
    )
    if world.is_main:
        if args.eval_on_step_0:
            found = grpo.evaluate(engines, eval_prompts, tokenizer, args, alone)[0]
            logger.log({"training_step": 0, "episode": 0} | gap_metrics | found)
        sender.collector = collector = Collector(engines, train_prompts, tokenizer, args, num_steps)
        collector.start()

    bad_in_a_row = 0
    for step in range(1, num_steps + 1):
        step_start, timer, metrics = time.perf_counter(), utils.Timer(), utils.Metrics()
        with timer("trainer_waiting_for_data"):
            data = collector.next() if world.is_main else StepData([], [], 0, 0.0)
            rows, fallback, state["cursor"] = scatter(data, row_tokens, args, world)
        with timer("training"):
            size = args.per_device_train_batch_size
            batches = [grpo.micro_batches(r, size, row_tokens, world.device) for r in rows]
            gap_metrics, bad = grpo.update(policy, ref_policy, optimizer, scheduler, batches, args, world, metrics)
            if not gap_metrics:  # no group has a gradient
                gap_metrics = grpo.measure_gap(policy, fallback, "on this step's rollouts", args, world)
        bad_in_a_row = grpo.handle_nonfinite(bad, bad_in_a_row, batches, step, run_dir, world, logger)
        if args.ref_policy_update_freq and step % args.ref_policy_update_freq == 0:
            grpo.refresh_reference(ref_policy, policy, args.alpha)
        with timer("gather"):
            send_weights(policy, sender, dtype, step, state["cursor"])

        state["step"] = step
        seconds = timer.seconds | {"time/total": time.perf_counter() - step_start, "time/reward": data.reward_s}
        seconds["time/generation"] = seconds["time/total"]  # engines decode all the time: tokens / wall seconds
        describe_staleness(rows, step, metrics)
        grpo.describe_update(rows, batches, bad, world, metrics)
        utils.describe_step(data.groups, data.sampled, args, metrics)
        out = grpo.finish_step(metrics, gap_metrics, seconds, state, len(train_prompts), start_time, args, world)
        if args.save_freq > 0 and step % args.save_freq == 0:
            with timer("saving"):
                utils.save_model(policy.model, tokenizer, run_dir / f"step_{step}", dtype, world)
            out["time/saving"] = timer.seconds["time/saving"]
        evaluated = args.local_eval_every > 0 and (step % args.local_eval_every == 0 or step == num_steps)
        if world.is_main:
            if eval_prompts and evaluated:
                engines.wait_loaded(step)
                out |= grpo.evaluate(engines, eval_prompts, tokenizer, args, alone)[0]
            in_flight = collector.admitted - collector.consumed
            out |= sender.seconds | {"batch/prompts_in_flight": in_flight}
        logger.log(out)
        if args.save_traces:
            logger.trace(step, data.sampled, world)

    utils.save_model(policy.model, tokenizer, run_dir / "model", dtype, world)
    logger.close()
    if world.is_main:
        engines.wait_loaded(num_steps)
        engines.stop()
        print(f"model {run_dir / 'model'}, report {utils.write_report(run_dir)}")
    rewards.close()
    dist.barrier()  # no rank leaves while another still writes
    utils.leave_distributed()
    return run_dir


def send_weights(policy: grpo.Policy, sender: Sender | None, dtype: torch.dtype, version: int, cursor: int) -> None:
    """Gather the weights and hand them to the sender; waits only while the one before is still on its way. All."""
    manifest, buckets = gather_weights(policy, dtype, keep=sender is not None)
    if sender is not None:
        sender.work.put((manifest, buckets, version, cursor))


def scatter(
    data: StepData, row_tokens: int, args: Args, world: utils.World
) -> tuple[list[list[Rollout]], list[Rollout], int]:
    """Every learner's share of each mini-batch, a few rollouts to measure the gap on, and the cursor. All learners."""
    parts: list[Any] = [None] * world.size
    if world.is_main:
        per = len(data.groups) // args.num_mini_batches or 1
        mini_batches = [
            grpo.trainable(data.groups[i * per : (i + 1) * per], args) for i in range(args.num_mini_batches)
        ]
        shares = [share_rollouts(rollouts, row_tokens, world.size) for rollouts in mini_batches]
        some = data.sampled[: args.per_device_train_batch_size]
        parts = [([share[i] for share in shares], some, data.cursor) for i in range(world.size)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, parts)
    return mine[0]


def describe_staleness(rows: Sequence[Sequence[Rollout]], step: int, metrics: utils.Metrics) -> None:
    """How many updates old the weights behind the trained tokens are."""
    versions = [version for mini_batch in rows for r in mini_batch for version in r.versions]
    metrics.add("val/num_steps_off_policy", sum(step - 1 - v for v in versions), len(versions))
    metrics.add_all("val/model_step", versions)


def main(args: Args) -> None:
    """Start the ranks, or be one of them."""
    world_size = int(os.environ["WORLD_SIZE"]) if "MASTER_ADDR" in os.environ else None  # torchrun started us
    learners = sum(args.num_learners_per_node)
    check_fast_args(args, world_size)
    utils.check_args(args, 1, fast=True)
    if args.dry_run or world_size is None:
        lines = utils.batch_arithmetic(args, 1, grpo.num_training_steps(args)).splitlines()
        print("\n".join(line for line in lines if not line.startswith("ranks")))  # rows, not prompts, are shared out
        print(f"roles    {learners} learners, {args.vllm_num_engines} engines, async_steps {args.async_steps}")
        if args.dry_run:
            print(utils.describe_sources(args))
        else:
            launch(args)
        return
    die_with_parent()
    pin_cores(args)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
    store = dist.PrefixStore(f"grpo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    roles = Roles(learners, args.vllm_num_engines, int(os.environ["RANK"]))
    (run_learner if roles.is_learner else run_engine)(args, roles, store)


if __name__ == "__main__":
    try:
        main(utils.parse_args(Args))
    except utils.UserError as error:
        raise SystemExit(f"grpo_fast.py: {error}") from None
    utils.exit_process()
