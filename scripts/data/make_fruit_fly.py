"""Make the fruit fly: a model of half a million weights that knows the tasks of make_tasks.py a little, so that a run
takes seconds.

    python scripts/data/make_tasks.py
    python scripts/data/make_fruit_fly.py [--out scripts/studies/fly] [--data data/tasks] [--tasks last ...]
        [--until 0.9] [--max_steps 4000] [--seed 1]

It has the tokenizer of make_tiny_model.py and three layers of 128, and starts from random weights. It is trained with
cross-entropy on answers to fresh questions of each task, whose numbers are in none of the task's rows. Only one
answer in four is right. The others answer another question about the same number, as the first digit where the last one
is asked for. So the model can give the answer and does not know that it is asked for it: a reward can teach that.

Every 100 steps it answers 64 more questions of each task, sampled at temperature 1. A task is known while --until of
its answers are among those that the model was shown, and then has fewer questions. It ends when all tasks are known, or
after --max_steps. It is saved in bfloat16. scripts/studies/fly is what this command made.
"""

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.data.make_addition import ROOT
from scripts.data.make_tasks import TASKS, Question
from scripts.data.make_tiny_model import make_tiny_model

QUESTIONS = 48  # of a step, of each task that is not known yet
QUESTIONS_TO_KEEP = 8  # of a task that is known: it would be forgotten without
LEARNING_RATE = 2e-3
LOOK_EVERY = 100  # steps
MOST_ANSWER_TOKENS = 14
LAYERS = 3
HIDDEN = 128


def numbers_of(path: Path) -> set[int]:
    """The numbers of the questions of a task's rows."""
    known = set()
    for split in ("train", "eval"):
        for line in (path / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["messages"][0]["content"]
            known.update(map(int, re.findall(r"\d+", text)))
    return known


def draw(name: str, rng: random.Random, known: set[int]) -> Question:
    """A question of a task whose number is in none of its rows."""
    question = TASKS[name](rng)
    while question.number in known:
        question = TASKS[name](rng)
    return question


def prompt_ids(tokenizer: Any, question: Question) -> list[int]:
    """The question's tokens, up to where the answer begins."""
    messages = [{"role": "user", "content": question.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """The answer's tokens, with the end token."""
    return [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def answer_loss(model: Any, tokenizer: Any, questions: Sequence[Question], rng: random.Random) -> Any:
    """Mean cross-entropy of the tokens of an answer to each question, right or not, in nats."""
    import torch

    ids = []
    labels = []
    for question in questions:
        prompt = prompt_ids(tokenizer, question)
        answer = answer_ids(tokenizer, rng.choice([question.answer, *question.others]))
        ids.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    width = max(map(len, ids))
    input_ids = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    targets = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
    logits = model(input_ids=input_ids).logits[:, :-1]  # padding is on the right, where nothing attends to it
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())


def shares(model: Any, tokenizer: Any, questions: Sequence[Question]) -> tuple[float, float]:
    """The shares of questions that the model answers right, and with one of the answers that it was shown. Sampled at
    temperature 1."""
    import torch

    messages = [[{"role": "user", "content": question.text}] for question in questions]
    options: dict[str, Any] = {"padding": True, "return_tensors": "pt", "return_dict": True}
    prompts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    with torch.no_grad():
        ids = model.generate(**prompts, do_sample=True, top_k=0, max_new_tokens=MOST_ANSWER_TOKENS)
    width = prompts["input_ids"].shape[1]
    texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
    right = 0
    known = 0
    for text, question in zip(texts, questions, strict=True):
        right += text.strip() == question.answer
        known += text.strip() in (question.answer, *question.others)
    return right / len(questions), known / len(questions)


def train(model: Any, tokenizer: Any, rows: dict[str, set[int]], options: argparse.Namespace) -> None:
    """Train until all tasks are known. rows: the numbers of each task's rows."""
    import torch

    rng = random.Random(options.seed)
    test_rng = random.Random(options.seed + 1)
    tests = {name: [draw(name, test_rng, rows[name]) for _ in range(64)] for name in rows}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    counts = dict.fromkeys(rows, QUESTIONS)
    start = time.perf_counter()
    for step in range(1, options.max_steps + 1):
        questions = []
        for name, count in counts.items():
            questions += [draw(name, rng, rows[name]) for _ in range(count)]
        loss = answer_loss(model, tokenizer, questions, rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOOK_EVERY:
            continue

        words = []
        for name, test in tests.items():
            right, known = shares(model, tokenizer, test)
            counts[name] = QUESTIONS if known < options.until else QUESTIONS_TO_KEEP
            words.append(f"{name} {right:.2f} of {known:.2f}")
        seconds = time.perf_counter() - start
        print(f"step {step} loss {loss.item():.3f} {', '.join(words)} ({seconds:.0f} s)", flush=True)
        if QUESTIONS not in counts.values():
            break


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "studies" / "fly")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "tasks")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--until", type=float, default=0.9)
    parser.add_argument("--max_steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in options.tasks:
        if not (options.data / name).is_dir():
            raise SystemExit(f"{options.data / name} is not there: python scripts/data/make_tasks.py writes it")
    rows = {name: numbers_of(options.data / name) for name in options.tasks}

    make_tiny_model(options.out, seed=options.seed, layers=LAYERS, hidden=HIDDEN, deviation=0.02)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.out)
    tokenizer = AutoTokenizer.from_pretrained(options.out, padding_side="left")
    train(model, tokenizer, rows, options)
    model.to(torch.bfloat16).save_pretrained(options.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"wrote {options.out}: {count / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
