"""Runs training runs, one after the other, each in a fork of this process, which has imported the libraries once.

    python scripts/studies/worker.py

It reads a job as JSON from each line of stdin, {"copy", "script", "flags", "log"}, and answers a line {"code",
"cpu_seconds"} when the run has ended: its exit status (negative: the signal that ended it) and the processor time of it
and of the processes that it started. A fork imports the code of its copy, which takes half a second, and shares nothing
else with the others, so a run in it has the bits of a run on the command line; tests/test_study.py compares them.
grpo_fast.py starts processes of its own, so that a fork has nothing to give: it is started as on the command line.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

LIBRARIES = """numpy scipy.stats torch torch.distributed.checkpoint torch.distributed.fsdp tyro
    transformers.generation.logits_process transformers.models.auto.modeling_auto
    transformers.models.auto.tokenization_auto transformers.models.llama.modeling_llama transformers.optimization"""
# what a start of the engine imports, 8 seconds of it
ENGINE_LIBRARIES = "vllm vllm.entrypoints.llm vllm.v1.worker.cpu_worker vllm.model_executor.models.llama"


def no_picture(run_dir: Path) -> str:
    """In place of utils.draw_report: nobody looks at a run's directory, which is removed."""
    return f"no report of {run_dir}"


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process with the one that started it: kill -9 of a study leaves no run behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before it was asked for
            os._exit(1)


def run(job: dict[str, Any], worker: int) -> None:
    """In the fork of the worker with this process id: the run, with its output in the log."""
    end_with_parent(worker)
    copy = job["copy"]
    os.chdir(copy)
    sys.path.insert(0, copy)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job["script"] != "grpo.py":
        os.execv(sys.executable, [sys.executable, job["script"], *job["flags"]])

    import grpo
    import utils

    utils.draw_report = no_picture
    sys.argv = [job["script"], *job["flags"]]
    utils.STOP.listen()
    try:
        grpo.main(utils.parse_args(grpo.Args))
    except utils.UserError as error:
        raise SystemExit(f"{job['script']}: {error}") from None
    utils.exit_process()


def import_all(names: str) -> None:
    """Import the modules that are not imported yet. Garbage collections in the forks need not look at them."""
    for name in names.split():
        importlib.import_module(name)
    gc.freeze()


def serve() -> None:
    """Run jobs until stdin ends."""
    worker = os.getpid()
    for line in sys.stdin:
        job = json.loads(line)
        if "transformers" not in job["flags"]:  # as the value of --rollout_backend
            import_all(ENGINE_LIBRARIES)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(job, worker)  # exit_process ends one that goes well
            except SystemExit as end:  # its words, or a number if the words have been told
                if isinstance(end.code, int):
                    code = end.code
                else:
                    print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

        _, status, usage = os.wait4(child, 0)
        answer = {"code": os.waitstatus_to_exitcode(status), "cpu_seconds": usage.ru_utime + usage.ru_stime}
        print(json.dumps(answer), flush=True)


def main() -> None:
    end_with_parent(os.getppid())
    sys.path.pop(0)  # this directory, whose statistics.py is not the library's
    import_all(LIBRARIES)
    serve()


if __name__ == "__main__":
    main()
