"""Metrics of rollouts with turns: who made how many tokens, the calls of tools, and what environments count."""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rewards
from scripts.parts.environments import CUT_MARK

if TYPE_CHECKING:
    from utils import Metrics, Rollout

Calls = dict[tuple[str, str], float]  # (tool, "calls", "failures" or "seconds") -> number
COUNTED: dict[str, set[str]] = defaultdict(set)  # environment -> numbers of its own that this process has seen
CUT = "val/answers_cut"
TOLD: set[str] = set()  # warnings that have been printed


def note(rollouts: "Sequence[Rollout]", metrics: "Metrics") -> None:
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
    note_numbers(rollouts, metrics)
    metrics.add_all("val/turns", [sum(turn["role"] == "assistant" for turn in r.turns) for r in rollouts])

    tools |= {tool for tool, _ in calls}
    for tool in sorted(tools):
        number = calls[tool, "calls"]
        metrics.add(f"tools/{tool}/avg_calls_per_rollout", number, len(rollouts))
        metrics.add(f"tools/{tool}/failure_rate", calls[tool, "failures"], number)
        metrics.add(f"tools/{tool}/avg_runtime", calls[tool, "seconds"], number)


def note_tokens(r: "Rollout", metrics: "Metrics") -> None:
    """Who made a rollout's tokens, and which share of each request the engine found in its prefix cache."""
    sampled = int(r.mask.sum())
    metrics.add("val/policy_tokens", sampled)
    metrics.add("val/environment_tokens", len(r.mask) - sampled)
    length = len(r.prompt.token_ids)  # of the request for the next turn
    for turn in r.turns:
        if turn["role"] == "assistant":
            metrics.add("val/prefix_cached_share", turn["cached"], length)
        length += turn["tokens"]


def note_environment(r: "Rollout", metrics: "Metrics") -> None:
    """A rollout's reward from its environment, the environment's failures, and which of its answers were cut."""
    name = environment_of(r)
    answers = answers_of(r)
    metrics.add(f"env/{name}/reward", sum(turn["reward"] for turn in answers))
    for status in rewards.MISSING:
        failures = sum(turn["status"] == status for turn in answers)
        metrics.add(f"env/{name}/{status}_rate", failures, len(answers))
    cut = sum(f"{CUT_MARK}\n" in turn["content"] + "\n" for turn in answers)
    metrics.add(CUT, cut, len(answers))
    if cut and CUT not in TOLD and os.environ.get("RANK", "0") == "0":
        TOLD.add(CUT)
        fix = "raise --response_length, which counts answers too, or lower --max_steps"
        print(f"WARNING: an answer of {name} did not fit and was cut ({CUT} counts them): {fix}", flush=True)


def note_numbers(rollouts: "Sequence[Rollout]", metrics: "Metrics") -> None:
    """The last value in each rollout of the numbers that its environment counts: 0 where it gave none, once any rollout
    has given one. Else a number that only failures have, and which is then 1, would be 1 on average."""
    found = []
    for r in rollouts:
        numbers: dict[str, float] = {}
        for turn in r.turns:
            numbers |= turn.get("metrics", {})
        own = {key: value for key, value in numbers.items() if not key.startswith("tools/")}
        COUNTED[environment_of(r)] |= own.keys()
        found.append(own)
    for r, numbers in zip(rollouts, found, strict=True):
        name = environment_of(r)
        for key in sorted(COUNTED[name]):
            metrics.add(f"env/{name}/{key}", numbers.get(key, 0.0))


def environment_of(r: "Rollout") -> str:
    """The name of a rollout's environment: that of its file."""
    environment = r.prompt.environment
    return "environment" if environment is None else Path(environment.path).stem


def answers_of(r: "Rollout") -> list[dict[str, Any]]:
    """The turns of a rollout that are not the policy's."""
    return [turn for turn in r.turns if turn["role"] != "assistant"]


def count_calls(turn: dict[str, Any], calls: Calls) -> None:
    """Add a turn's `tools/TOOL/calls`, `/failures` and `/seconds` to those of its tool and of all tools."""
    for key, value in turn.get("metrics", {}).items():
        if key.count("/") == 2 and key.startswith("tools/"):
            _, tool, quantity = key.split("/")
            calls[tool, quantity] += value
            calls["aggregate", quantity] += value
