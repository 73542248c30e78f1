"""Which sockets a run on one machine listens on."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from scripts.proof import sockets
from scripts.proof.sockets import Socket, family
from tests import programs
from tests.conftest import REPO

FLAGS = """--dataset_mixer_list reasoning_gym:chain_sum 20 --response_length 8 --rollout_backend transformers
    --total_episodes 128 --no_filter_zero_std_samples --max_logprob_gap 0 --exp_name run"""


def listeners(pids: list[int]) -> set[Socket]:
    """The sockets of a network on which the processes listen."""
    return {found for found in sockets.listeners(pids) if found.kind != "unix"}


def sockets_of(commands: list[list[str]], tmp_path: Path) -> tuple[set[Socket], set[Socket]]:
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
            own |= listeners([run.pid])
            below |= listeners(family(run.pid)[1:])
        time.sleep(0.1)
    assert [run.poll() for run in runs] == [0] * len(runs), logs[0].read_text()[-3000:]
    return own, below - own  # a fork has its parent's sockets for a moment


def beyond_loopback(found: set[Socket]) -> set[Socket]:
    return {one for one in found if one.reach != "users of this machine"}


def test_the_list_of_sockets_that_is_printed(tmp_path):
    """Sockets of this process, of each kind."""
    file = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.2", 0)) as loopback,
        socket.create_server(("", 0)) as everywhere,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_connection(loopback.getsockname()),
    ):
        unix.bind(file)
        unix.listen()
        ports = [one.getsockname()[1] for one in (loopback, everywhere)]
        wanted = {Socket("tcp", "127.0.0.2", ports[0]), Socket("tcp", "0.0.0.0", ports[1]), Socket("unix", file, 0)}
        assert wanted <= sockets.listeners([os.getpid()])
        command = [sys.executable, str(REPO / "scripts" / "proof" / "sockets.py"), str(os.getpid())]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        said = {line.split("  ")[-1].strip() for line in lines if str(ports[0]) in line or str(ports[1]) in line}
        assert said == {"users of this machine", "every network"}
        assert any(file in line and line.endswith("whom its directory lets in") for line in lines)
    assert sockets.readable("00000000000000000000000001000000") == "::1"


def test_one_machine_listens_on_loopback_only(tiny_models, tmp_path):
    """torch's store used to listen on all interfaces, in the launcher and in learner 0."""
    flags = f"--model_name_or_path {tiny_models()} --output_dir {tmp_path} {FLAGS}"
    own, below = sockets_of([["grpo_fast.py", *flags.split()]], tmp_path)
    assert below, "gloo listens"
    assert not own and not beyond_loopback(below)


def test_with_torchrun_on_one_machine_only_torchrun_listens_to_others(tiny_models, tmp_path):
    """The stores of its agent. Nothing of the ranks."""
    flags = f"--model_name_or_path {tiny_models()} --output_dir {tmp_path} {FLAGS}"
    command = [*programs.torchrun(2), "grpo_fast.py", *flags.split()]
    own, below = sockets_of([command], tmp_path)
    assert len(beyond_loopback(own)) <= 2
    assert below and not beyond_loopback(below)


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
