"""Which sockets a run on one machine listens on."""

import time
from pathlib import Path

from tests import programs
from tests.runs.test_run import data  # noqa: F401 (a fixture)

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


def test_one_machine_listens_on_loopback_only(tiny_models, data, tmp_path):  # noqa: F811
    """torch's store used to listen on all interfaces, in the launcher and in learner 0."""
    flags = f"""--model_name_or_path {tiny_models()} --dataset_mixer_list {data / "train.jsonl"} 1.0 --response_length 8
        --rollout_backend transformers --total_episodes 128 --output_dir {tmp_path} --exp_name run
        --no_filter_zero_std_samples --max_logprob_gap 0"""
    log = tmp_path / "log"
    seen = set()
    run = programs.Program(["grpo_fast.py", *flags.split()], log, address=programs.serve(), children=True)
    while run.poll() is None:
        seen |= listeners(family(run.pid))
        time.sleep(0.05)
    assert run.wait() == 0, log.read_text()[-3000:]
    assert seen, "gloo and the engine's connection listen"
    assert [address for address in seen if address.split(":")[0] not in LOOPBACK] == []
