"""Who may wait for the GPU: the learner's own thread for its own work, nobody for the device."""

import os
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from transformers import LlamaConfig

import utils
from tests.conftest import REPO
from tests.test_wiring import make_collector


@pytest.fixture
def waits(monkeypatch):
    """A GPU, as far as timers see, and who waits for it."""
    found: list[str] = []

    def wait(*_):
        found.append(threading.current_thread().name)

    event = types.SimpleNamespace(record=lambda: None, synchronize=wait, elapsed_time=lambda end: 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    return found


def test_the_collector_never_waits_for_the_gpu(waits):
    """It works while the learner does: a wait there is one for the learner's whole queue, once a group."""
    collector = make_collector("7", "1")
    collector.start()
    data = collector.next()
    assert len(data.sampled) == 2 and {"time/reward", "time/packing"} <= data.seconds.keys()
    assert waits == []


class Layer(torch.nn.Module):
    """A decoder layer of which each word makes another graph."""

    def forward(self, x, word):
        return x + len(word)


def test_a_backward_may_compile_as_often(monkeypatch):
    """On a GPU it has a thread of its own, which makes recomputed layers and attention again where a guard fails; what
    is set in torch._dynamo.config is set for one thread (pytorch's issue 186537)."""
    graphs, real = [], torch.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    layer: Any = Layer()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda work, **how: real(work, backend=count, **how))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr("torch.nn.attention.flex_attention.flex_attention", lambda x, word: x + len(word))
        attend = utils._flex_attention.__wrapped__()
        utils.compile_layers(
            types.SimpleNamespace(config=LlamaConfig(), _no_split_modules=["Layer"], modules=lambda: [layer])
        )
    for work in (attend, layer.forward):
        torch._dynamo.reset()
        graphs.clear()
        thread = threading.Thread(target=lambda work=work: [work(torch.ones(2), "a" * i) for i in range(12)])
        thread.start()
        thread.join()
        assert len(graphs) == 12, work


def test_a_checkpoint_is_written_without_the_gpu(world, tmp_path, monkeypatch):
    """It is on the host by then. The loader that torch takes in the writing thread where there is a GPU waits for that
    thread's stream: one of GPU 0, on which the CUDA of each rank would take half a GiB."""
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", None)
    there = types.SimpleNamespace(is_available=lambda: True)  # a device, as far as torch's writer asks
    monkeypatch.setattr(torch, torch._C._get_privateuse1_backend_name(), there, raising=False)
    model: Any = torch.nn.Linear(2, 2)
    writer = utils.Checkpoints(tmp_path, 1, world)
    writer.save(1, {"policy": model}, torch.optim.AdamW(model.parameters()), {})
    writer.wait()
    assert (tmp_path / "checkpoints" / "step_1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
def test_threads_of_torch_do_not_spin():
    """Beside a GPU torch has GNU's OpenMP. Its threads spun: start weights took minutes where an engine started."""
    mine = ("LD_PRELOAD", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    env = {name: value for name, value in os.environ.items() if name not in mine}
    env["OMP_DISPLAY_ENV"] = "VERBOSE"
    command = [sys.executable, "-c", "import utils, torch"]
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True)
    assert "GOMP_SPINCOUNT = '0'" in done.stderr
