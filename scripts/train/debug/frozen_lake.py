"""A live environment: gymnasium's FrozenLake as text (`pip install gymnasium`, which nothing else here needs).

    python grpo.py --env_file scripts/train/debug/frozen_lake.py ...   # rows {"prompt": "?", "env_config": {"seed": 3}}

All rollouts of a row cross the same lake: its seed draws it.
"""

import re

import gymnasium  # ty: ignore[import-not-found]
from gymnasium.envs.toy_text.frozen_lake import generate_random_map  # ty: ignore[import-not-found]

from rewards import Answer, Episode

MOVES = ("left", "down", "right", "up")
RULES = "Go from S to G over the ice F, not into a hole H. You are at [ ]. Answer with left, down, right or up."


class Env:
    def __init__(self, config: dict):
        self.seed = config.get("seed", 0)
        lake = generate_random_map(size=4, seed=self.seed)
        self.game = gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=False, render_mode="ansi")

    def reset(self, row: Episode) -> str:
        self.game.reset(seed=self.seed)
        return f"{RULES}\n{self.picture()}"

    def step(self, episode: Episode) -> Answer:
        said = re.findall("|".join(MOVES), episode.text.lower())
        if not said:
            return Answer("That is no move.", done=True)
        _, reward, ended, was_cut, _ = self.game.step(MOVES.index(said[-1]))
        return Answer(self.picture(), float(reward), done=ended or was_cut)

    def picture(self) -> str:
        """The lake, with the player's place in brackets."""
        lines = self.game.render().splitlines()[1:]
        return re.sub("\x1b\\[41m(.)\x1b\\[0m", r"[\1]", "\n".join(lines)).strip()

    def close(self) -> None:
        self.game.close()
