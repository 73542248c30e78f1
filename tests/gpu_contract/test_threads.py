"""Who may wait for the GPU: the learner's own thread for its own work, nobody for the device."""

import threading
import types

import pytest
import torch

import grpo
import grpo_fast
import utils


class Event:
    """A CUDA event on a stream of which `now` milliseconds have been worked off."""

    now = 0.0
    waited: list[str] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        Event.waited.append(threading.current_thread().name)

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's events, and what a wait for the whole device would leave."""
    device: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: device.append(threading.current_thread().name))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waited", [])
    return device


def test_phases_are_timed_by_events(gpu):
    timer = utils.Timer()
    for name, milliseconds in (("training", 1500.0), ("gather", 250.0), ("training", 500.0)):
        with timer(name):
            Event.now += milliseconds
    assert Event.waited == [] and gpu == []  # nothing waits until somebody reads
    assert timer.seconds == {"time/training": 2.0, "time/gather": 0.25}
    assert gpu == []


def test_the_collector_never_waits_for_the_gpu(gpu):
    """It works while the learner does: a wait there is one for the learner's whole queue, once a group."""
    line = "--model_name_or_path x --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 2 --async_steps 0"
    args = utils.parse_args(grpo.Args, [*line.split(), "--total_episodes", "4"])
    engines = types.SimpleNamespace(changed=threading.Condition(), eos_ids=[0], watchdog=types.SimpleNamespace())
    engines.watchdog.beat = lambda: None
    engines.wait_for, engines.take = lambda condition, what: None, lambda names: 0.0

    def submit(requests, index):
        for i, (_, _, finished) in enumerate(requests):
            finished(utils.Generation([55 + i], [-1.0], "stop", [0]))

    engines.submit, engines.connections = submit, [None]
    engines.tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    prompts = [utils.Prompt(i, (1, 2, 3), "", ("7",), ("gsm8k",)) for i in range(4)]
    collector = grpo_fast.Collector(engines, prompts, args, grpo.start_state(), lambda rollouts: [[]])
    collector.start()
    data = collector.next()
    assert len(data.sampled) == 2 and {"time/reward", "time/packing"} <= data.seconds.keys()
    assert Event.waited == [] and gpu == []
