"""Verifiers that err at a known rate, to see what a verifier's mistakes cost.

The true verdict of each response is turned round with probability (1 - J) / 2. So wrong answers are accepted as often
as right ones are refused, and the share of right answers accepted minus the share of wrong ones, Youden's J, is the
number in the function's name. The mistakes are independent of each other and of the response: two equal responses of a
group may get different verdicts. arXiv:2601.04411 predicts for such mistakes that a policy learns where J > 0, drifts
where J = 0, and unlearns where J < 0.

Whether a verdict is turned round depends on a hash of the prompt, of all responses of the group and of the response's
place among them. So a run can be made again to the bit, and runs with other seeds have other mistakes.

    j_06  J = 0.6, 20 % of the verdicts are turned round
    j_03  J = 0.3, 35 %
    j_0   J = 0, 50 %: a coin
    j_minus_03  J = -0.3, 65 %
"""

import hashlib

import rewards


def j_06(responses: list[str], ground_truths: list[str], prompt: str = "") -> list[float]:
    """Verdicts of which 20 % are turned round."""
    return _noisy(responses, ground_truths, prompt, 0.6)


def j_03(responses: list[str], ground_truths: list[str], prompt: str = "") -> list[float]:
    """Verdicts of which 35 % are turned round."""
    return _noisy(responses, ground_truths, prompt, 0.3)


def j_0(responses: list[str], ground_truths: list[str], prompt: str = "") -> list[float]:
    """Verdicts of which half are turned round."""
    return _noisy(responses, ground_truths, prompt, 0.0)


def j_minus_03(responses: list[str], ground_truths: list[str], prompt: str = "") -> list[float]:
    """Verdicts of which 65 % are turned round."""
    return _noisy(responses, ground_truths, prompt, -0.3)


def _noisy(responses: list[str], labels: list[str], prompt: str, youden: float) -> list[float]:
    """The verdicts of gsm8k, each turned round with probability (1 - youden) / 2."""
    records = [rewards.RewardRecord(text, label, "gsm8k") for text, label in zip(responses, labels, strict=True)]
    group = repr((prompt, responses))
    verdicts = []
    for place, record in enumerate(records):
        verdict = float(rewards.VERIFIERS["gsm8k"].verify(record).score)
        if _draw(group, place) < (1 - youden) / 2:
            verdict = 1.0 - verdict
        verdicts.append(verdict)
    return verdicts


def _draw(group: str, place: int) -> float:
    """A number in [0, 1) for a response of a group."""
    digest = hashlib.sha256(f"{group}\n{place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
