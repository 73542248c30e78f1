"""--turn_credit: an advantage for each turn, whose expectation is the policy gradient.

Rollout i of a group has turns k = 0, 1, ..., each of which the environment may answer with a reward. Its score is the
sum of these rewards, g_i0 + g_i1 + ..., and of the rest, final_i (verifiers, format, penalties). A turn cannot change
what was paid before it, so it gets the rewards from its own answer on, and the rest:

    G_ik = sum_{j >= k} g_ij,   0 where the rollout has ended before turn k
    A_ik = final_i - mean_{j != i} final_j + G_ik - mean_{j != i} G_jk

Why no bias: the gradient of the expected score is E[sum_k grad log pi(turn k) (final_i + G_ik)], because
E[grad log pi(turn k) g] = 0 for each g that is known before turn k. For the same reason any baseline may be taken off
that turn k does not influence. The others are sampled apart from rollout i, and G_jk is defined for every k, so the
mean has the same G - 1 terms whatever i does, how many turns it takes included.

The usual mean, over those rollouts that have reached turn k, has not this property: in a game where the policy decides
when to stop it keeps 35 % of the gradient (tests/test_credit.py). One advantage for all turns has twice the variance.

Missing scores (NaN) are left out of the means, and their rollouts have the advantage 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from utils import Group, Rollout


def set_advantages(groups: Sequence[Group], args: Any) -> None:
    """Fill advantage of each rollout: a list with a number for each token, the same for all tokens of a turn and of its
    answer. A rollout that no environment answered is one turn."""
    weight = args.verification_reward if args.apply_verifiable_reward else 0.0
    for group in groups:
        scored = [r for r in group if not math.isnan(r.score)]
        for r in group:
            r.advantage = 0.0
        if len(scored) > 1:
            compare(scored, weight)


def compare(group: Sequence[Rollout], weight: float) -> None:
    """Fill advantage of a prompt's rollouts, two at least, all with scores. A reward counts `weight` in a score."""
    most_turns = max(len(r.turns) for r in group) + 1
    worth = np.array([worth_of_turns(r, weight, most_turns) for r in group])  # (G, turns)
    for i, r in enumerate(group):
        others = np.delete(worth, i, axis=0)
        baseline = others.mean(axis=0)
        advantages = worth[i] - baseline
        turns = turns_of_tokens(r)
        r.advantage = advantages[turns].tolist()


def worth_of_turns(r: Rollout, weight: float, most_turns: int) -> np.ndarray:
    """final + G_k of a rollout for each k below `most_turns`."""
    gained = np.zeros(most_turns)
    for k, turn in zip(numbers_of(r), r.turns, strict=True):
        if turn["role"] != "assistant":
            gained[k] += weight * turn["reward"]
    to_go = np.cumsum(gained[::-1])[::-1]
    final = r.score - to_go[0]
    return final + to_go


def numbers_of(r: Rollout) -> np.ndarray:
    """k for each turn of the policy and each answer. What is said before the first turn counts to that."""
    numbers = []
    k = -1
    for turn in r.turns:
        if turn["role"] == "assistant":
            k += 1
        numbers.append(max(k, 0))
    return np.array(numbers, int)


def turns_of_tokens(r: Rollout) -> np.ndarray:
    """k for each token of r."""
    if not r.turns:
        return np.zeros(len(r.token_ids), int)
    lengths = [turn["tokens"] for turn in r.turns]
    return np.repeat(numbers_of(r), lengths)
