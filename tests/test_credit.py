"""--turn_credit: its expectation is the policy gradient, exactly; its numbers by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

import grpo
import utils
from scripts.parts import credit

ARGS = grpo.Args(model_name_or_path="x", turn_credit=True, advantage_normalization_type="centered")


def rollout(final, rewards, ended_by_answer=True, weight=10.0, sample=0):
    """Turns of 2 tokens with answers of 3, which have `rewards`; after the last answer a turn or, if that answer ended
    the rollout, nothing. `final` is what a verifier gave the last turn."""
    prompt = utils.Prompt(0, (1, 2, 3), "", (), ())
    r = grpo.Rollout(prompt, 0, sample)
    turns = []
    for k, reward in enumerate(rewards):
        tokens = 0 if ended_by_answer and k == len(rewards) - 1 else 3
        turns.append({"role": "assistant", "tokens": 2})
        turns.append({"role": "user", "tokens": tokens, "reward": reward})
    if not ended_by_answer:
        turns.append({"role": "assistant", "tokens": 2})
    for turn in turns:
        if turn["role"] == "assistant":
            r.append(utils.Generation([5, 6], [-1.0, -1.0], "stop", [0, 0]))
        else:
            r.append_answer([7] * turn["tokens"])
    r.turns = turns
    r.score = r.outcome = weight * (final + sum(rewards))
    return r


# --- A game of four turns, by enumeration ----------------------------------------------------------------------------

GO = 1 / (1 + math.exp(-0.3))  # the policy's probability to go on; its parameter is the logit, 0.3
TURNS = 4


def games():
    """(probability, d log probability / d logit of each turn's decision, rewards of the answers, final) of each
    rollout: a turn goes on and is paid a half, or stops. Who went on twice gets 1 more at the end, with probability a
    half."""
    made = []
    for gone in range(TURNS + 1):
        slopes = [1 - GO] * gone + [-GO] * (gone < TURNS)
        probability = GO**gone * (1 - GO if gone < TURNS else 1)
        rewards = [0.5] * gone
        for final in (0.0, 1.0) if gone == 2 else (0.0,):
            made.append((probability / (2 if gone == 2 else 1), slopes, rewards, final))
    return made


def played(game, weight=1.0):
    """A game as a rollout: a turn of one token for each decision, an answer of none."""
    _, slopes, rewards, final = game
    r = grpo.Rollout(utils.Prompt(0, (1, 2), "", (), ()), 0, 0)
    for k in range(len(slopes)):
        r.append(utils.Generation([5], [-1.0], "stop", [0]))
        r.turns.append({"role": "assistant", "tokens": 1})
        if k < len(rewards):
            r.turns.append({"role": "user", "tokens": 0, "reward": rewards[k]})
    r.score = weight * (final + sum(rewards))
    return r


def by_turn_credit(group):
    rollouts = [played(game) for game in group]
    credit.set_advantages([rollouts], dataclasses.replace(ARGS, verification_reward=1.0))
    return [r.advantage for r in rollouts]


def by_scores(group):
    """One advantage for all turns: the score less the mean of the others'."""
    scores = [sum(game[2]) + game[3] for game in group]
    mean = sum(scores) / len(scores)
    factor = len(group) / (len(group) - 1)
    return [[(score - mean) * factor] * len(game[1]) for score, game in zip(scores, group, strict=True)]


def moments(advantages_of, size):
    """Mean and second moment, over all groups of `size`, of a rollout's sum_k d log pi_k * A_k."""
    first = second = 0.0
    for group in itertools.product(games(), repeat=size):
        probability = math.prod(game[0] for game in group)
        advantages = advantages_of(group)
        for (_, slopes, _, _), values in zip(group, advantages, strict=True):
            term = float(np.dot(slopes, values))
            first += probability * term / size
            second += probability * term**2 / size
    return first, second


def test_the_expectation_is_the_policy_gradient():
    """All 1,296 groups of 4: one advantage for all turns has no bias either, but twice the variance."""
    assert sum(game[0] for game in games()) == pytest.approx(1)
    truth = sum(p * sum(slopes) * (sum(rewards) + final) for p, slopes, rewards, final in games())
    ours, ours_squared = moments(by_turn_credit, 4)
    scalar, scalar_squared = moments(by_scores, 4)
    assert ours == pytest.approx(truth, rel=1e-12) and scalar == pytest.approx(truth, rel=1e-12)
    assert (scalar_squared - scalar**2) / (ours_squared - ours**2) == pytest.approx(2.2, abs=0.1)
    assert moments(by_turn_credit, 2)[0] == pytest.approx(truth, rel=1e-12)


# --- By hand ---------------------------------------------------------------------------------------------------------


def group_by_hand():
    """Four rollouts with finals 1, 0, 0 and missing, answers' rewards (0.5, 0.2), (0.3) and none."""
    group = [rollout(1.0, [0.5, 0.2], ended_by_answer=False), rollout(0.0, [0.3], sample=1), rollout(0.0, [], False)]
    group[2].turns = []  # without an environment
    group.append(rollout(math.nan, [0.9], sample=3))
    group[2].sample = 2
    grpo.set_advantages([group], ARGS)
    return group


# worth of turns 0, 1, 2, in tens: 1.7 1.2 1; 0.3 0 0; 0 0 0
WANT = [
    [17 - 1.5] * 5 + [12 - 0.0] * 5 + [10 - 0.0] * 2,
    [3 - 8.5] * 2,
    [0 - 10.0] * 2,
]


def test_a_group_by_hand():
    group = group_by_hand()
    for r, want in zip(group, WANT, strict=False):
        assert r.advantage == pytest.approx(want)
    assert group[3].advantage == 0.0 and grpo.trainable([group], dataclasses.replace(ARGS)) == group[:3]
