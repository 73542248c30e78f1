"""Which sockets a run on one machine listens on."""

import contextlib
import ipaddress
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests import programs

FLAGS = """--dataset_mixer_list reasoning_gym:chain_sum 20 --response_length 8 --rollout_backend transformers
    --total_episodes 128 --no_filter_zero_std_samples --max_logprob_gap 0 --exp_name run"""


Sockets = set[tuple[str, int]]  # addresses and ports


def listeners(processes: list[psutil.Process]) -> Sockets:
    """Address and port of each TCP socket on which the processes listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((one.laddr.ip, one.laddr.port))
    return found


def sockets_of(commands: list[list[str]], tmp_path: Path) -> tuple[Sockets, Sockets]:
    """The sockets on which the processes of these commands, started together, listened: those of the commands' own
    processes, torchrun's agents, and those of all below them."""
    own, below = set(), set()
    pids = tmp_path / "pids"
    pids.mkdir()
    logs = [tmp_path / f"log_{number}" for number in range(len(commands))]
    runs = []
    for command, log in zip(commands, logs, strict=True):
        how = {"address": programs.serve(), "children": True, "PIDS": pids, "OMP_NUM_THREADS": 1}
        runs.append(programs.Program(command, log, **how))
    while any(run.poll() is None for run in runs):
        for run in runs:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process = psutil.Process(run.pid)
                own |= listeners([process])
                below |= listeners(process.children(recursive=True))
        time.sleep(0.1)
    assert [run.poll() for run in runs] == [0] * len(runs), logs[0].read_text()[-3000:]
    return own, below - own  # a fork has its parent's sockets for a moment


def beyond_loopback(found: Sockets) -> Sockets:
    """Those that another machine can reach, if nothing in between forbids it."""
    return {(ip, port) for ip, port in found if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback}


def test_one_machine_listens_on_loopback_only(tiny_models, tmp_path):
    """torch's store used to listen on all interfaces, in the launcher and in learner 0."""
    flags = f"--model_name_or_path {tiny_models()} --output_dir {tmp_path} {FLAGS}"
    own, below = sockets_of([["grpo_fast.py", *flags.split()]], tmp_path)
    assert below, "gloo listens"
    assert not own and not beyond_loopback(below)


@pytest.mark.house
def test_several_nodes_listen_to_each_other(tiny_models, tmp_path, monkeypatch):
    """torchrun's store, the run's, and learner 0 for the engines. Gloo listens on its interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GRPO_SECRET", "not in the store")
    flags = f"--model_name_or_path {tiny_models()} --output_dir {tmp_path} --num_learners_per_node 1 0 {FLAGS}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    commands = []
    for _ in range(2):
        commands.append(
            ["-m", "torch.distributed.run", "--log-dir", os.devnull, *where, "grpo_fast.py", *flags.split()]
        )
    own, below = sockets_of(commands, tmp_path)
    open_to_others = beyond_loopback(own | below)
    assert len(open_to_others) <= 4
    assert "GRPO_SECRET" not in (tmp_path / "log_0").read_text()
