"""Metrics of rollouts with turns: who made how many tokens, the calls of tools, and what environments count."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rewards
from utils import Metrics, Rollout

Calls = dict[tuple[str, str], float]  # (tool, "calls", "failures" or "seconds") -> number


def note(rollouts: Sequence[Rollout], metrics: Metrics) -> None:
    """Add the metrics of those rollouts that have turns."""
    rollouts = [r for r in rollouts if r.turns]
    tools: set[str] = set()
    calls: Calls = defaultdict(float)
    for r in rollouts:
        if r.prompt.environment is not None:
            tools |= r.prompt.environment.schemas.keys()
        note_tokens(r, metrics)
        note_environment(r, metrics)
        for turn in r.turns:
            count_calls(turn, calls)
    metrics.add_all("val/turns", [sum(turn["role"] == "assistant" for turn in r.turns) for r in rollouts])

    tools |= {tool for tool, _ in calls}
    for tool in sorted(tools):
        number = calls[tool, "calls"]
        metrics.add(f"tools/{tool}/avg_calls_per_rollout", number, len(rollouts))
        metrics.add(f"tools/{tool}/failure_rate", calls[tool, "failures"], number)
        metrics.add(f"tools/{tool}/avg_runtime", calls[tool, "seconds"], number)


def note_tokens(r: Rollout, metrics: Metrics) -> None:
    """Who made a rollout's tokens, and which share of each request the engine found in its prefix cache."""
    sampled = int(r.mask.sum())
    metrics.add("val/policy_tokens", sampled)
    metrics.add("val/environment_tokens", len(r.mask) - sampled)
    length = len(r.prompt.token_ids)  # of the request for the next turn
    for turn in r.turns:
        if turn["role"] == "assistant":
            metrics.add("val/prefix_cached_share", turn["cached"], length)
        length += turn["tokens"]


def note_environment(r: Rollout, metrics: Metrics) -> None:
    """A rollout's reward from its environment, the environment's failures, and the last value of each number that it
    counts."""
    environment = r.prompt.environment
    name = "environment" if environment is None else Path(environment.path).stem
    answers = [turn for turn in r.turns if turn["role"] != "assistant"]
    metrics.add(f"env/{name}/reward", sum(turn["reward"] for turn in answers))
    for status in rewards.MISSING:
        failures = sum(turn["status"] == status for turn in answers)
        metrics.add(f"env/{name}/{status}_rate", failures, len(answers))
    numbers: dict[str, Any] = {}
    for turn in r.turns:
        numbers |= turn.get("metrics", {})
    for key, value in numbers.items():
        if not key.startswith("tools/"):
            metrics.add(f"env/{name}/{key}", value)


def count_calls(turn: dict[str, Any], calls: Calls) -> None:
    """Add a turn's `tools/TOOL/calls`, `/failures` and `/seconds` to those of its tool and of all tools."""
    for key, value in turn.get("metrics", {}).items():
        if key.count("/") == 2 and key.startswith("tools/"):
            _, tool, quantity = key.split("/")
            calls[tool, quantity] += value
            calls["aggregate", quantity] += value
