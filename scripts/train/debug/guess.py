"""An environment: the policy guesses a number from 1 to `high` (env_config; `number` is what is to be found).

A guess that the hints allow is paid a tenth at once, and the right one is paid 1 and ends the rollout. A guess that
contradicts a hint, or a turn without a number, ends it too and is not paid; so does guess number --max_steps. Rollouts
end at different turns, then, and the policy has a say in it: that is where a baseline for each turn is easily biased,
see scripts/parts/credit.py.
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

    def step(self, episode: Episode) -> Answer:
        found = re.search(r"\d+", episode.text)
        guess = int(found.group()[:9]) if found else 0
        turns = {"guesses": episode.turn, "found": float(guess == self.number)}
        if guess == self.number:
            return Answer("Right.", reward=1.0, done=True, metrics=turns)
        if not self.low <= guess <= self.high:
            return Answer("That cannot be.", done=True, metrics=turns)

        if guess < self.number:
            self.low = guess + 1
            hint = "Higher"
        else:
            self.high = guess - 1
            hint = "Lower"
        text = f"{hint}: {self.low} to {self.high}."
        is_last = episode.steps_left == 0
        return Answer(text, reward=PAID_ON_THE_WAY, done=is_last, metrics=turns)
