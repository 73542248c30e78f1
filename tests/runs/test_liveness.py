"""When nothing moves, learner 0 ends and has the others end."""

import os
import signal
import time

import pytest

from tests import programs

RANK = """
import signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from scripts.parts import launch

class Meeting:
    def keep_last_words(self, words):
        return False

    def connect(self):
        return dist.FileStore(place)

name, place = sys.argv[1:]
beats = [True]
watchdog = launch.Watchdog(Meeting(), name, 2.0)
signal.signal(signal.SIGUSR1, lambda *_: beats.clear())
print("watches", flush=True)
while True:
    watchdog.beat() if beats and name == "learner 0" else None
    time.sleep(0.1)
"""


@pytest.fixture
def start(tmp_path):
    """Function (name of a rank) -> its process, which watches. All are killed afterwards."""
    started = []

    def start_rank(name):
        log = tmp_path / name
        log.touch()
        rank = programs.Program(["-c", RANK, name, tmp_path / "store"], log, address=programs.serve())
        started.append(rank)
        until = time.monotonic() + 60
        while "watches" not in log.read_text():
            assert time.monotonic() < until and rank.poll() is None, log.read_text()
            time.sleep(0.1)
        return rank

    yield start_rank
    for rank in started:
        rank.kill()
        rank.wait()


def test_a_learner_0_that_lives_is_left_alone(start):
    """Both outlast the limit of 2 s."""
    engine = start("engine 0")
    learner = start("learner 0")
    time.sleep(7.0)
    assert engine.poll() is None and learner.poll() is None


def test_a_stall_of_learner_0_ends_all_with_their_stacks(start, tmp_path):
    """A learner 0 that no message reaches any more tells the others through the store."""
    learner = start("learner 0")
    engine = start("engine 0")
    os.kill(learner.pid, signal.SIGUSR1)  # it beats no more
    assert learner.wait(60) == 1 and engine.wait(60) == 1
    for name in ("learner 0", "engine 0"):
        words = (tmp_path / name).read_text()
        assert f"{name} (pid" in words and "Thread 0x" in words, "the stacks"
