"""An environment: the policy guesses a number from 1 to `high` (env_config; `number` is what is to be found).

A guess that agrees with all hints so far, and so leaves fewer numbers, is paid a tenth at once; the right one is paid 1
and ends the rollout, as does a turn without a number. So rollouts end at different turns: that is where a baseline for
each turn is easily biased, see scripts/parts/credit.py.
"""

import re

from rewards import Answer, Episode

PAID_ON_THE_WAY = 0.1


class Env:
    """The numbers that the hints leave."""

    def __init__(self, config: dict):
        self.number = int(config["number"])
        self.low = 1
        self.high = int(config["high"])

    def step(self, episode: Episode) -> Answer | None:
        found = re.search(r"\d+", episode.text)
        if found is None:
            return None
        guess = int(found.group()[:9])
        turns = {"guesses": episode.turn}
        if guess == self.number:
            return Answer("Right.", reward=1.0, done=True, metrics=turns | {"found": 1.0})

        agrees = self.low <= guess <= self.high
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            hint = "higher"
        else:
            self.high = min(self.high, guess - 1)
            hint = "lower"
        text = f"No, it is {hint}. It is from {self.low} to {self.high}. Guess again."
        return Answer(text, reward=PAID_ON_THE_WAY * agrees, metrics=turns | {"found": 0.0})
