"""proof/gpu_hour.sh with tiny models on a CPU: it makes its checks, can be stopped, goes on, and writes its page."""

import json
import os
import re
import signal
import subprocess

from scripts.proof import gpu_hour
from scripts.train.debug import smoke
from tests import programs
from tests.conftest import REPO
from tests.runs.test_fast import wait_until


def start(out, *flags, **env):
    log = out.with_suffix(".log")
    with log.open("a") as file:
        line = ["bash", "scripts/proof/gpu_hour.sh", "--tiny", "--out", str(out), *flags]
        how = {"cwd": REPO, "env": os.environ | env, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(line, stdout=file, **how), log


def forks(folder):
    """Environment in which what it starts is forked, and so are the programs that this starts."""
    python = programs.python_that_forks(folder / "python")
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON_OF_FORKS": str(python)}
    return env | {"BASH_FUNC_source%%": smoke.STUBS["source"]}  # of setup.sh, which would put another python first


def results(out):
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_it_is_stopped_goes_on_and_writes_its_page(tmp_path):
    out, forked = tmp_path / "hour", forks(tmp_path)
    process, log = start(out, **forked)
    wait_until((out / "cold_start.log").exists, process, log)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 130, log.read_text()
    page = (out / "README.md").read_text()
    assert {name: found["passed"] for name, found in results(out).items()} == dict.fromkeys(
        ("machine", "kernels", "head"), True
    )
    assert "| kernels | pass |" in page and "| cold_start | not made yet |" in page
    stamp = (out / "kernels.json").stat().st_mtime_ns

    process, log = start(out, **forked)
    assert process.wait(timeout=600) == 0, log.read_text()
    found = results(out)
    skipped = {name for name, result in found.items() if result["passed"] is None}
    on_gpus = {"sleep", "memory", "mfu_small", "load", "stale_fast", "drain", "sharded", "tensor_parallel", "trl"}
    assert skipped == {*on_gpus, "real_model"} and len(found) == 22
    assert all(result["passed"] for name, result in found.items() if name not in skipped)
    assert (out / "kernels.json").stat().st_mtime_ns == stamp, "a check that had passed was made again"
    assert found["synchronous"]["figures"]["debug/vllm_vs_local_logprob_diff_mean"] < 0.05
    assert found["memory"]["figures"]["estimate, GiB"] > 0
    assert "not made yet" not in (out / "README.md").read_text()


def test_a_check_that_fails_says_why_and_is_made_again(tmp_path):
    """At first as it is started by hand, setup.sh included."""
    out = tmp_path / "hour"
    (out / "kernels.log").mkdir(parents=True)  # where the check's output should be
    process, log = start(out, "--only", "kernels")
    assert process.wait(timeout=300) == 1, log.read_text()
    assert results(out)["kernels"]["passed"] is False
    assert re.search(r"\| kernels \| \*\*FAIL\*\* \|.*IsADirectoryError", (out / "README.md").read_text())
    (out / "kernels.log").rmdir()
    process, log = start(out, "--only", "kernels", **forks(tmp_path))
    assert process.wait(timeout=300) == 0, log.read_text()
    assert results(out)["kernels"]["passed"] is True


def test_a_stale_engine_ends_grpo_fast(tmp_path, monkeypatch):
    """The check stale_fast, with ranks that are forked: an engine that ignores every load after the first fails."""
    monkeypatch.setattr(gpu_hour, "GPUS", 1)  # else it is skipped

    class Forked(gpu_hour.Hour):
        def run(self, name, command):
            done = programs.run([*programs.torchrun(2), *command[command.index("scripts/proof/broken.py") :]])
            return done.returncode, done.stdout + done.stderr

    found = gpu_hour.check_stale_fast(Forked(tmp_path, True))
    assert found.passed, found.said
    assert found.figures["gap of the stale engine"] > gpu_hour.GAP
