"""What the engines of grpo_fast.py did in a step, and who waited for whom."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np


def metrics(spent: Sequence[Any], policy: Any, out: dict[str, float], state: dict[str, Any]) -> dict[str, float]:
    """What the engines did during a step, and how long each side waited for the other."""
    mean = type(spent[0])(*np.mean([astuple(clock) for clock in spent], axis=0).tolist())  # a grpo_fast.Clock
    busy = max(mean.busy, 1e-9)
    seconds = out["time/total"]
    bytes_per_second = state["bytes_per_second"]
    weights_bytes = (policy.matrices + policy.head) * state["itemsize"]
    bytes_read = weights_bytes * mean.steps  # each decoding step reads the weights

    found = {"time/generation": mean.busy}
    found["time/generation_waiting_for_trainer"] = mean.idle
    found["time/weight_sync_floor"] = out.get("val/weight_sync_bytes", 0.0) / bytes_per_second
    found["val/engine_pause_seconds"] = mean.pause
    found["val/engine_idle_share"] = min(mean.idle / seconds, 1.0)  # engines report when a response ends
    found["val/learner_idle_share"] = out["time/trainer_waiting_for_data"] / seconds
    found["val/engine_bandwidth_share"] = bytes_read / busy / bytes_per_second
    found["val/engine_tokens_per_second"] = mean.tokens / busy
    return found
