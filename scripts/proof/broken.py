"""Run grpo.py or grpo_fast.py with one thing broken, to see that it is noticed.

    python scripts/proof/broken.py stale grpo.py FLAGS...     the engine gets its first weights again at every load
    python scripts/proof/broken.py killed grpo.py FLAGS...    kill -9 of every rank that saves, once step 3 is on disk

With torchrun before it, grpo_fast.py too: ranks that it starts itself are not broken. scripts/proof/gpu_hour.py asks.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import utils  # isort: skip  # noqa: E402 (pins thread counts, so it comes before torch)

from scripts.parts.transformers_engine import TransformersEngine  # noqa: E402

KILLED_AFTER = 3  # steps


def stale(engine_class: type) -> None:
    """Have engines of a class load, whatever comes, the weights that came first. All of it is taken from the sender,
    and the version counts on, as with weights that arrive at the wrong place."""
    load: Callable[..., None] = engine_class.load_weights  # ty: ignore[missing-attribute]

    def load_first(self: Any, named_tensors: utils.NamedTensors, version: int) -> None:
        came = [(name, tensor.detach().clone()) for name, tensor in named_tensors]
        if not hasattr(self, "first_weights"):
            self.first_weights = came
        load(self, iter(self.first_weights), version)

    engine_class.load_weights = load_first  # ty: ignore[missing-attribute]


def killed() -> None:
    """Have each rank end itself where the checkpoint after KILLED_AFTER would begin."""
    save = utils.Checkpoints.save

    def save_or_end(self: utils.Checkpoints, step: int, *others: Any) -> None:
        if step > KILLED_AFTER:
            self.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, step, *others)

    utils.Checkpoints.save = save_or_end


def main() -> None:
    what, script, *flags = sys.argv[1:]
    if what == "stale":
        stale(utils.VLLMEngine)
        stale(TransformersEngine)
    elif what == "killed":
        killed()
    else:
        raise SystemExit(f"broken.py: {what}: stale or killed")
    module = importlib.import_module(Path(script).stem)
    sys.argv = [script, *flags]
    utils.STOP.listen()
    module.main(utils.parse_args(module.Args))
    utils.exit_process()


if __name__ == "__main__":
    main()
