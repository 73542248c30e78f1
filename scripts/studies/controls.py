"""Rewards that must not win. A study whose controls win has an unfit task.

coin      a coin, thrown for each pair of response and label: it has nothing to do with what is right
inverted  1 for wrong answers and 0 for right ones
"""

import hashlib

import rewards


def coin(response: str, ground_truth: object) -> float:
    """0 or 1 with equal chances, the same for the same response and label."""
    digest = hashlib.sha256(f"{response}\n{ground_truth}".encode()).digest()
    return float(digest[0] % 2)


def inverted(response: str, ground_truth: object) -> float:
    """1 - the score of a number's verifier, whose work is simple enough to be done at once."""
    verdict = rewards.verify_gsm8k(rewards.RewardRecord(response, ground_truth, "gsm8k"))
    return 1.0 - float(verdict.score)
