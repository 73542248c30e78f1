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
        return dist.TCPStore("127.0.0.1", port, is_master=False) if port else dist.FileStore(place)

name, place, kind = sys.argv[1:]
port = 0
if kind == "tcp" and name == "learner 0":  # hosts the store, which stops with it
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    open(place + ".tmp", "w").write(str(port))
    import os; os.rename(place + ".tmp", place)
elif kind == "tcp":
    while not __import__("os").path.exists(place):
        time.sleep(0.1)
    port = int(open(place).read())
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
    """Function (name of a rank, kind of store) -> its process, which watches. All are killed afterwards."""
    started = []

    def start_rank(name, kind):
        log = tmp_path / name
        log.touch()
        rank = programs.Program(["-c", RANK, name, tmp_path / "store", kind], log, address=programs.serve())
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
    engine = start("engine 0", "file")
    learner = start("learner 0", "file")
    time.sleep(7.0)
    assert engine.poll() is None and learner.poll() is None


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.house), "tcp"])
def test_a_stall_of_learner_0_ends_all_with_their_stacks(start, tmp_path, kind):
    """A learner 0 that no message reaches any more tells the others through the store."""
    learner = start("learner 0", kind)
    engine = start("engine 0", kind)
    os.kill(learner.pid, signal.SIGUSR1)  # it beats no more
    assert learner.wait(60) == 1 and engine.wait(60) == 1
    for name in ("learner 0", "engine 0"):
        words = (tmp_path / name).read_text()
        assert f"{name} (pid" in words and "Thread 0x" in words, "the stacks"
