"""An environment for the curve of echo.diff: after each turn it says how many small letters there were.

A policy that learns what its turns bring about can foretell that.
"""

from rewards import Episode


def step(episode: Episode) -> str:
    """The answer to a turn of the policy."""
    letters = sum(character.islower() for character in episode.text)
    return f"You wrote {letters} small letters."
