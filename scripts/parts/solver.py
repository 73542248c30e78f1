"""The solver: a frozen model that solves the question of the label with the response as a guideline.

The policy learns to write guidelines that help. The solver is rewards.SETTINGS.solver, made from
--solver_model_name_or_path.
"""

import contextlib
import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rewards
from rewards import MISSING, NO_ANSWER, RewardFlags, RewardRecord, RewardResult, Scored, Verdict, final_text
from scripts.parts.chat import ChatModel, NoReply, Replies, Reply, neutral

SOLVER_TEMPERATURE = 0.7  # of several samples; a single sample is greedy
SOLVER_TIMEOUT_S = 600.0  # for the replies to one guideline
GRADING_TIMEOUT_S = 10.0  # of a solver's answer
MAX_CONCURRENCY = 256  # requests to the servers at the same time
# The prompt asks the question first. All prompts of a group have the same question, so they share a cached beginning.
PROMPT = Path(rewards.SCRIPTS, "prompts", "solver.txt").read_text(encoding="utf-8").strip()
PLACEHOLDER = re.compile(r"\{(?:question|guideline)\}")


class Solver(ChatModel):
    def solve(self, question: str, guideline: str) -> Replies:
        """Its solutions. Raises NoReply."""
        prompt = solver_prompt(question, guideline)
        if self.n == 1:
            return self.ask(prompt, beginning=question)
        key = repr((question, guideline)).encode()
        seed = zlib.crc32(key) >> 1  # below 2^31
        return self.ask(prompt, beginning=question, seed=seed)


def solver_model(flags: RewardFlags, connect: bool) -> Solver:
    """The solver of --solver_model_name_or_path. connect: send the servers of --solver_base_url, which run already, a
    test message. Raises UserError."""
    solver = Solver(
        flags.solver_model_name_or_path,
        MAX_CONCURRENCY,
        SOLVER_TIMEOUT_S,
        n=flags.solver_num_samples,
        max_tokens=flags.solver_response_length,
        temperature=SOLVER_TEMPERATURE if flags.solver_num_samples > 1 else 0.0,
    )
    if connect and flags.solver_base_url:
        urls = [url.strip() for url in flags.solver_base_url.split(",")]
        api_key = os.environ.get("SOLVER_API_KEY") or "EMPTY"
        solver.connect(urls, api_key)
    return solver


def solver_label(ground_truth: Any, prompt: str) -> tuple[str, str]:
    """(question, answer) of {"question", "answer"}, a dict or its JSON, or of a bare answer, whose question is the last
    turn of the prompt. Raises ValueError if there is no question or no answer."""
    label = ground_truth
    if isinstance(label, str) and label.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):  # a bare answer such as the set {1, 2}
            label = json.loads(label)
    if not isinstance(label, dict):
        last_turn = f"\n{prompt}".rpartition("\nuser: ")[2]
        label = {"question": last_turn, "answer": label}
    question = label.get("question")
    answer = label.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("a solver label needs a question: {question, answer}, or a prompt that ends in one")
    if not rewards.canonical_tex(rewards.math_label(answer)):
        raise ValueError(f"solver answer {answer!r} is empty")
    return question.strip(), str(answer)


def solver_prompt(question: str, guideline: str) -> str:
    """The message to the solver."""
    texts = {"{question}": neutral(question), "{guideline}": neutral(guideline)}
    return PLACEHOLDER.sub(lambda match: texts[match[0]], PROMPT)


def grade(replies: Sequence[Reply], answer: str) -> list[RewardResult]:
    """The results of the solver's replies by the verifier math."""
    records = [RewardRecord(reply.text, answer, "math") for reply in replies]
    futures = [rewards.submit(record, GRADING_TIMEOUT_S, "math") for record in records]
    return [future.result() for future in futures]


def verify(record: RewardRecord) -> Verdict:
    """Mean correctness, by the verifier math, of the solver's answers to the label's question with the response as a
    guideline. A reply without an answer, cut or not, is wrong. Raises ValueError for a label that has none."""
    guideline = final_text(record.response).strip()
    question, answer = solver_label(record.ground_truth, record.prompt)
    if not guideline:
        return NO_ANSWER
    return Verdict(guideline, partial(guideline_score, question, guideline, answer))


check = verify  # of a record without a response: only the label is read


def guideline_score(question: str, guideline: str, answer: str) -> Scored:
    """The score of verify, from the solutions with a guideline. Waits for them.

    Of the details, solver_correct is None for a text whose grading failed, which the mean leaves out; truncated counts
    the texts cut at their limit."""
    solver: Any = rewards.SETTINGS.solver
    try:
        replies, tokens = solver.solve(question, guideline)
    except NoReply as error:
        return Scored(math.nan, error.status, {"problem": str(error)})
    results = grade(replies, answer)
    details: dict[str, Any] = {"tokens": tokens}
    details["solver_texts"] = [reply.text for reply in replies]
    details["solver_correct"] = [None if result.status in MISSING else result.score for result in results]
    details["truncated"] = sum(reply.cut for reply in replies)
    scores = [result.score for result in results if result.status not in MISSING]
    if not scores:
        problem = "the grading of the solver's text failed"
        return Scored(math.nan, results[0].status, details | {"problem": problem})
    return Scored(sum(scores) / len(scores), "ok", details)
