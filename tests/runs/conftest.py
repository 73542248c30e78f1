import functools
import multiprocessing.util
import os
import subprocess
import tempfile
import time

import pytest


@pytest.fixture(scope="module", autouse=True)
def temporary(tmp_path_factory):
    """The temporary directory of this file's tests and of what they start; made before other fixtures start runs. Not
    one of pytest's: sockets need a short path."""
    multiprocessing.util.get_temp_dir()  # this process' own, of tests/programs.py, which its end removes
    tmp_path_factory.getbasetemp()  # pytest's own: made later it would be among what a test left
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield directory


@pytest.fixture(autouse=True)
def nothing_is_left(temporary):
    """Runs that ended, were stopped or were killed have left nothing in the temporary directory."""
    yield
    kept = ("torchinductor_", ".lock")  # one cache for all runs; vLLM's locks of models of the hub
    end = time.monotonic() + 20  # for utils.sweep, a process that outlives the run
    while True:
        left = [name for name in os.listdir(temporary) if not name.startswith(kept) and not name.endswith(kept)]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.1)
    subprocess.run(["rm", "-rf", *left], cwd=temporary)  # the next test is not to blame
    assert not left


@pytest.fixture(scope="session")
def five_steps(tiny_models, tmp_path_factory):
    """Function () -> directory of a run of grpo.py that others have to repeat; made once per session."""
    from tests.runs import test_run

    @functools.cache
    def get():
        out = tmp_path_factory.mktemp("five")
        flags = f"--exp_name five --total_episodes 320 --save_freq 1 --save_traces {test_run.VLLM}"
        test_run.run(tiny_models(), test_run.write_data(out), out, flags)
        return out / "five"

    return get
