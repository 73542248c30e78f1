"""Rewards that must not win. A study whose controls win has an unfit task.

coin      a coin, thrown for each pair of prompt and response: it has nothing to do with what is right
inverted  1 for wrong answers and 0 for right ones
"""

import hashlib

import rewards


def coin(response: str, ground_truth: object, prompt: object = "") -> float:
    """0 or 1 with equal chances, the same for the same response to a prompt. Thrown for the label, it would pay for the
    right answer to many questions at once, or to none of them, where few labels are frequent."""
    digest = hashlib.sha256(f"{prompt}\n{response}".encode()).digest()
    return float(digest[0] % 2)


def inverted(response: str, ground_truth: object) -> float:
    """1 - the score of the verifier of numbers, or of words where the label is no number."""
    label = str(ground_truth)
    name = "gsm8k" if label.isdigit() else "puzzle"
    record = rewards.RewardRecord(response, label, name)
    verify = rewards.VERIFIERS[name].verify
    return 1.0 - float(verify(record).score)
