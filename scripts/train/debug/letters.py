"""A reward that a model with random weights can earn and raise: a wrong loss shows on it within half a minute.

reward = small letters / characters of the response, 0 for an empty one
"""


def letters(response: str, ground_truth: object) -> float:
    """The share of small letters. The label of the row does not matter."""
    return sum(character.islower() for character in response) / max(len(response), 1)
