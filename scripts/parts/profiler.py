"""A trace of one step, of each rank that trains: what ran when, and with a GPU what was in its memory.

Open the trace in https://ui.perfetto.dev and the snapshot in https://pytorch.org/memory_viz. In grpo.py the step has
generation, update and weight sync. In grpo_fast.py the engines are other processes, which are not in it.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path

import torch

MOST_EVENTS = 1_000_000  # allocations that a snapshot remembers


@contextlib.contextmanager
def watched(run_dir: Path, step: int, rank: int) -> Generator[None]:
    """Write run_dir/profile/step_N_rank_R.json.gz of what is done inside, and with a GPU step_N_rank_R.pickle."""
    out = run_dir / "profile" / f"step_{step}_rank_{rank}"
    out.parent.mkdir(exist_ok=True)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    with torch.profiler.profile(record_shapes=True) as profile:
        yield
    profile.export_chrome_trace(f"{out}.json.gz")
    if on_gpu:
        torch.cuda.memory._dump_snapshot(f"{out}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
    print(f"profile  {out}.json.gz: open it in https://ui.perfetto.dev", flush=True)
