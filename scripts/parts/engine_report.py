"""What the engines of grpo_fast.py did in a step, who waited for whom, and how the weights travelled."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

EVERY = 10  # steps


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


def shows(out: dict[str, float], step: int, args: Any) -> bool:
    """Whether a step prints text: with --show_engines each does, else every tenth, and those that waste time.

    A step wastes time if the learners or the engines waited for the other side for more than half of it, or if the
    engines stood still for more than a tenth of it while they took weights. With --async_steps 0 both sides take turns,
    so only the weights count. A wrong account and a dead engine need no line: they end the run.
    """
    if args.show_engines or step % EVERY == 0:
        return True
    idle = max(out["val/learner_idle_share"], out["val/engine_idle_share"])
    pause_share = out.get("time/weight_sync_pause", 0.0) / out["time/total"]
    return (args.async_steps > 0 and idle > 0.5) or pause_share > 0.1


def lines(out: dict[str, float], step: int, args: Any) -> str:
    """A step's account, bottleneck and weight sync, in lines of at most 120 columns; "" for a step that prints none."""
    if not shows(out, step, args):
        return ""
    learner = out["val/learner_idle_share"]
    engine = out["val/engine_idle_share"]
    bottleneck = "none, both sides are busy"
    if learner > max(engine, 0.05):
        bottleneck = "generation"
    elif engine > 0.05:
        bottleneck = "training"
    lines = [
        f"groups: {out['batch/groups_started']:.0f} started = {out['batch/groups_trained']:.0f} trained + "
        f"{out['batch/groups_filtered']:.0f} filtered + {out['batch/groups_expired']:.0f} expired + "
        f"{out['batch/groups_in_flight']:.0f} in flight",
        f"idle: learner {learner:.0%}, engines {engine:.0%}; bottleneck: {bottleneck}",
    ]
    if "time/weight_sync" in out:
        lines.append(
            f"weights v{out['val/weight_sync_version']:.0f}: {out['val/weight_sync_bytes'] / 1e6:.0f} MB, wire "
            f"{out['time/weight_sync_wire']:.2f} s, load {out['time/weight_sync_load']:.2f} s, pause "
            f"{out['time/weight_sync_pause']:.2f} s, {out['val/weight_sync_gb_per_second']:.1f} GB/s (a copy: "
            f"{out['time/weight_sync_floor']:.2f} s)"
        )
    return "\n".join(f"          {line}" for line in lines)
