"""The reward of the tiny experiments: one that a random model gets some of, and can learn to get more of."""


def digits(response: str, ground_truth) -> float:
    """Number of digits in the response over 10, at most 1. Independent of how special tokens are decoded."""
    return min(1.0, sum(c.isdigit() for c in response) / 10)
