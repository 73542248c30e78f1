"""Make the player: a model of half a million weights that plays the guessing game of scripts/train/debug/guess.py, by
its rules and badly, for studies with turns.

    python scripts/data/make_player.py [--out scripts/studies/player] [--steps 1200] [--seed 1]

It has the tokenizer of make_tiny_model.py and three layers of 128, as the fruit fly, and starts from random weights.
It is trained with cross-entropy on the guesses of random games. In the last third of the steps a third of the guesses
is any number from 1 to 12, which the hints may have excluded. Before, and in the other two thirds, half of the guesses
are the middle of what the hints leave, the others its lowest or highest number. So it knows what a hint says and what
may be guessed, and not what to guess: a reward can teach it to heed hints and to halve what is left. It is saved in
bfloat16. The repository holds what this command made, so that rows of a record can be made again to the bit.
"""

import argparse
import functools
import random
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rewards import Episode
from scripts.data.make_fruit_fly import HIDDEN, LAYERS, LEARNING_RATE
from scripts.data.make_guess import HIGH, ROOT, make_row
from scripts.data.make_tiny_model import make_tiny_model
from scripts.train.debug.guess import Env

GAMES = 32  # of a step
GUESSES = 4  # of a game
BLIND = 1 / 3  # of the guesses, in the end
LOOK_EVERY = 100  # steps


class Player:
    """Random games as tokens."""

    def __init__(self, tokenizer: Any, seed: int):
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    @functools.cache  # noqa: B019 (one player lives as long as the program)
    def said(self, text: str) -> list[int]:
        """The tokens of what the policy reads, up to where its guess begins."""
        messages = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    @functools.cache  # noqa: B019
    def guessed(self, guess: int) -> list[int]:
        """The tokens of a guess, with the end token."""
        return [*self.tokenizer.encode(str(guess), add_special_tokens=False), self.tokenizer.eos_token_id]

    def guess(self, env: Env, blind: float) -> int:
        """A guess; in a share `blind` of them the hints do not count."""
        if self.rng.random() < blind:
            return self.rng.randint(1, HIGH)
        middle = (env.low + env.high) // 2
        return self.rng.choice([middle, middle, env.low, env.high])

    def game(self, blind: float) -> tuple[list[int], list[int]]:
        """The tokens of a game, and its labels: -100 where the policy reads."""
        row = make_row(self.rng.randint(1, HIGH), HIGH, plain=True)
        env = Env(row["env_config"])
        ids = list(self.said(row["messages"][0]["content"]))
        labels = [-100] * len(ids)
        newline = self.tokenizer.encode("\n", add_special_tokens=False)
        for turn in range(1, GUESSES + 1):
            guess = self.guess(env, blind)
            ids += self.guessed(guess)
            labels += self.guessed(guess)
            answer = env.step(Episode([], str(guess), turn, GUESSES - turn, True, [], row["env_config"]))
            if answer.done or turn == GUESSES:
                break
            read = [*newline, *self.said(answer.text)]
            ids += read
            labels += [-100] * len(read)
        return ids, labels


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "studies" / "player")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_tiny_model(options.out, seed=options.seed, layers=LAYERS, hidden=HIDDEN, deviation=0.02)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.out)
    player = Player(AutoTokenizer.from_pretrained(options.out), options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        blind = BLIND if step > options.steps * 2 / 3 else 0.0
        games = [player.game(blind) for _ in range(GAMES)]
        width = max(len(ids) for ids, _ in games)
        input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in games])
        targets = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in games])
        logits = model(input_ids=input_ids).logits[:, :-1]  # padding is on the right, where nothing attends to it
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOOK_EVERY == 0:
            seconds = time.perf_counter() - start
            print(f"step {step} loss {loss.item():.3f} ({seconds:.0f} s)", flush=True)
    model.to(torch.bfloat16).save_pretrained(options.out)


if __name__ == "__main__":
    main()
