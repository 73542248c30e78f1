"""Which sockets a run on one machine listens on."""

import os
import socket
import time
from pathlib import Path

from tests import programs

LOOPBACK = ("0100007F", "00000000000000000000000001000000")  # 127.0.0.1 and ::1, as /proc has them


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # the process has ended
            continue
        for child in children:
            found += family(int(child))
    return found


def listeners(pids: list[int]) -> set[str]:
    """The local addresses, address:port in hexadecimal digits, on which the processes listen."""
    owned = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                owned.add(str(link.readlink()))
            except OSError:  # closed meanwhile
                continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in owned:
                addresses.add(columns[1])
    return addresses


FLAGS = """--dataset_mixer_list reasoning_gym:chain_sum 20 --response_length 8 --rollout_backend transformers
    --total_episodes 128 --no_filter_zero_std_samples --max_logprob_gap 0 --exp_name run"""


def sockets_of(commands: list[list[str]], tmp_path: Path) -> tuple[set[str], set[str]]:
    """The addresses on which the processes of these commands, started together, listened: those of the commands' own
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


def beyond_loopback(addresses: set[str]) -> set[str]:
    return {address for address in addresses if address.split(":")[0] not in LOOPBACK}


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
