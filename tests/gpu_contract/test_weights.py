"""How weights travel: no collective before all can take part, no more than a few buckets alive, no learner waits."""

import queue
import threading
import time
import types
import weakref
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

import grpo_fast
import utils

BUCKETS = 12


class Group:
    """The process group of learner 0 and its engines: a broadcast that not all wait for would spin on the GPU."""

    def __init__(self, engines):
        self.sent, self.said, self.went = [], [0] * len(engines.ends), [queue.Queue() for _ in engines.ends]

    def broadcast(self, tensors, options):
        self.sent.append(int(tensors[0][0]))
        assert self.said == [len(self.sent)] * len(self.said), "a kernel would wait on the learner's GPU"
        for went in self.went:
            went.put(None)
        return types.SimpleNamespace(wait=lambda: None)


@pytest.fixture
def engines():
    """Learner 0's side of two engines, whose other ends are `ends`."""
    made: Any = object.__new__(grpo_fast.Engines)
    pipes = [Pipe() for _ in range(2)]
    made.connections, made.ends = [ours for ours, _ in pipes], [theirs for _, theirs in pipes]
    made.changed, made.dead = threading.Condition(), None
    made.gone = 0
    made.locks, made.clocks = [threading.Lock() for _ in pipes], [grpo_fast.Clock() for _ in pipes]
    made.finished, made.on_end, made.owner, made.loads = {}, {}, {}, [0, 0]
    made.rounds = None
    made.loaded, made.ready, made.group = {}, 0, Group(made)
    made.watchdog = types.SimpleNamespace(beat=lambda: None)
    for i in range(2):
        threading.Thread(target=made._receive, args=(i,), daemon=True).start()
    return made


class Inbox(grpo_fast.Inbox):
    """One that counts for which bucket its engine is ready."""

    def __init__(self, group, index, *of):
        super().__init__(*of)
        self.group, self.index = group, index

    def say_ready(self):
        self.group.said[self.index] += 1
        super().say_ready()


class Engine(threading.Thread):
    """An engine's loop around the real inbox: busy until `drained`, notes what it is told."""

    def __init__(self, engines, index, inflight):
        super().__init__(daemon=True)
        self.group, self.index, self.end = engines.group, index, engines.ends[index]
        self.inbox, self.drained, self.told = Inbox(self.group, index, self.end, inflight), threading.Event(), []
        self.start()

    def run(self):
        while True:
            message = self.inbox.next(busy=not self.drained.is_set())
            if message is None:
                time.sleep(0.001)
                continue
            self.told.append(message)
            if message[0] == "weights":
                for _ in message[2][1:]:
                    self.group.went[self.index].get()  # the bucket before is here, and loaded
                    self.inbox.say_ready()
                self.end.send(("loaded", message[1], grpo_fast.Clock(pause=1.0, wire=0.5)))


def gather(sender, alive):
    """Hand over the buckets of a version as send_weights does; returns the most that were alive at once."""
    most, manifest = 0, [[(str(i), (4,))] for i in range(BUCKETS)]
    sender.queue.put((manifest, 7, 0))
    for i in range(BUCKETS):
        bucket = torch.full((4,), i, dtype=torch.uint8)
        alive.add(bucket)
        most = max(most, len(alive))
        sender.queue.put(grpo_fast.Bucket(bucket))
        del bucket
    return most


@pytest.mark.parametrize("inflight", [False, True])
def test_a_broadcast_waits_for_every_engine_and_no_learner_for_a_drain(engines, monkeypatch, inflight):
    monkeypatch.setattr(
        grpo_fast.Sender, "_to_host", lambda self, bucket: grpo_fast.Bucket(bucket.values.clone())
    )  # as on a GPU
    one, other = (Engine(engines, i, inflight) for i in range(2))
    sender, alive = grpo_fast.Sender(engines, engines.group, torch.device("cpu")), weakref.WeakSet()
    one.drained.set()  # and the other still decodes
    most = gather(sender, alive)  # comes back while it does
    assert most <= 4
    if not inflight:
        assert engines.group.sent == [] and 7 not in engines.loaded
        late = grpo_fast.NamedRequest("late", utils.Request((1,), 0, 1.0, 1), lambda made: None)
        engines.submit([late], index=1)
        time.sleep(0.05)
        assert other.told == []  # a request that comes after the weights is for the weights
        other.drained.set()
    deadline = time.monotonic() + 60
    while not sender.metrics or len(other.told) < 2 - inflight:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engines.group.sent == list(range(BUCKETS))
    assert [message[0] for message in other.told] == ["weights", "generate"][: 2 - inflight]
    assert sender.metrics["val/weight_sync_bytes"] == 4 * BUCKETS and len(alive) == 0


def test_a_dead_engine_ends_the_wait(engines):
    """The queue is bounded: a learner must not wait for room in it, and hears of the death where it waits."""
    sender = grpo_fast.Sender(engines, engines.group, torch.device("cpu"))
    engines.ends[0].close()
    while engines.dead is None:  # it is its own thread that finds out
        time.sleep(0.001)
    for _ in range(2):
        gather(sender, weakref.WeakSet())
    with pytest.raises(utils.UserError, match="engine 0 is gone"):
        engines.wait_loaded(2)
