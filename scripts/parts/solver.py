"""The solver: a frozen model that solves the question of the label with the response as a guideline.

The score is the mean correctness of its solutions, so that the policy learns to write guidelines that help. The solver
is rewards.SOLVER, which rewards.configure makes from --solver_model_name_or_path.
"""

import collections
import contextlib
import json
import math
import os
import re
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import rewards
from rewards import MISSING, NO_ANSWER, RewardFlags, RewardRecord, RewardResult, Scored, Verdict, final_text
from scripts.parts.chat import ChatModel, NoReply, Replies, Reply, neutral, shortened

SOLVER_TEMPERATURE = 0.7  # of several samples; a single sample is greedy
SOLVER_TIMEOUT_S = 600.0  # for the replies to one guideline
GRADING_TIMEOUT_S = 10.0  # of a solver's answer
REPLIES_KEPT = 8192
MAX_CONCURRENCY = 256  # requests to the servers at the same time
# The prompt asks the question first. All prompts of a group have the same question, so they share a cached beginning.
PROMPT = Path(rewards.SCRIPTS, "prompts", "solver.txt").read_text(encoding="utf-8").strip()
PLACEHOLDER = re.compile(r"\{(?:question|guideline)\}")


@dataclass(frozen=True)
class Solver:
    """The model that solves, and the futures of the replies by (question, guideline)."""

    model: ChatModel
    replies: collections.OrderedDict[tuple[str, str | None], Future] = field(default_factory=collections.OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def solver_model(flags: RewardFlags, connect: bool) -> Solver:
    """The solver of --solver_model_name_or_path. connect: send the servers of --solver_base_url, which run already, a
    test message. Raises UserError."""
    chat = ChatModel(
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
        chat.connect(urls, api_key)
    return Solver(chat)


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


def solver_prompt(question: str, guideline: str | None, share: float = 1.0) -> str:
    """The message to the solver, with `share` of the guideline's characters. Without a guideline the paragraph of
    PROMPT that has it is left out."""
    paragraphs = PROMPT.split("\n\n")
    if guideline is None:
        paragraphs = [text for text in paragraphs if "{guideline}" not in text]
        guideline = ""
    guideline = shortened(guideline, int(len(guideline) * share))
    texts = {"{question}": neutral(question), "{guideline}": neutral(guideline)}
    template = "\n\n".join(paragraphs)
    return PLACEHOLDER.sub(lambda match: texts[match[0]], template)


def solve(solver: Solver, question: str, guideline: str | None) -> Future[Replies]:
    """The future of ChatModel.ask for this guideline. The newest REPLIES_KEPT futures are kept: one that did not fail
    is returned again."""
    key = (question, guideline)
    with solver.lock:
        future = solver.replies.get(key)
        if future is None or has_failed(future):
            future = rewards.CALL_THREADS.submit(partial(ask_solver, solver.model, question, guideline))
            solver.replies[key] = future
        solver.replies.move_to_end(key)
        while len(solver.replies) > REPLIES_KEPT:
            solver.replies.popitem(last=False)
    return future


def has_failed(future: Future) -> bool:
    """Whether a future is over without a result."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def ask_solver(model: ChatModel, question: str, guideline: str | None) -> Replies:
    """The solver's solutions. Raises NoReply."""
    prompt = partial(solver_prompt, question, guideline)
    if model.n == 1:
        return model.ask(prompt, beginning=question)
    key = repr((question, guideline)).encode()
    seed = zlib.crc32(key) >> 1  # below 2^31
    return model.ask(prompt, beginning=question, seed=seed)


def grade(replies: Sequence[Reply], answer: str) -> list[RewardResult]:
    """The results of the solver's replies by the verifier math."""
    records = [RewardRecord(reply.text, answer, "math") for reply in replies]
    futures = [rewards.submit(record, GRADING_TIMEOUT_S, "math") for record in records]
    return [future.result() for future in futures]


def mean_score(results: Sequence[RewardResult]) -> float | None:
    """The mean of the scores that are not missing, None if all are."""
    scores = [result.score for result in results if result.status not in MISSING]
    return sum(scores) / len(scores) if scores else None


def verify(record: RewardRecord) -> Verdict:
    """Mean correctness, by the verifier math, of the solver's answers to the label's question with the response as a
    guideline. A reply without an answer, cut or not, is wrong. details: see guideline_score. Raises ValueError for a
    label that can never be scored."""
    guideline = final_text(record.response).strip()
    question, answer = solver_label(record.ground_truth, record.prompt)
    if not guideline:
        return NO_ANSWER
    solver: Any = rewards.SOLVER
    # Threads take calls in order: so a call that waits for the baseline knows that the baseline has begun.
    baseline = solve(solver, question, None)
    guided = solve(solver, question, guideline)
    return Verdict(guideline, partial(guideline_score, guided, baseline, answer))


check = verify  # of a record without a response: only the label is read


def guideline_score(guided: Future[Replies], baseline: Future[Replies], answer: str) -> Scored:
    """The score of verify, from the solutions with a guideline and, for comparison, without one. Waits for them.

    details: solver_texts; solver_correct, None for a text whose grading failed, which the mean leaves out; tokens;
    truncated, how many texts were cut at their limit; guideline_share, below 1 if only the ends of the guideline fit
    into the solver's context; baseline, the mean without a guideline, None if that failed."""
    try:
        replies, tokens, share = guided.result()
    except NoReply as error:
        return Scored(math.nan, error.status, {"problem": str(error)})

    results = grade(replies, answer)
    details: dict[str, Any] = {"baseline": None}
    details["tokens"] = tokens
    details["guideline_share"] = share
    details["solver_texts"] = [reply.text for reply in replies]
    details["solver_correct"] = [None if result.status in MISSING else result.score for result in results]
    details["truncated"] = sum(reply.cut for reply in replies)
    if baseline.exception() is None:
        details["baseline"] = mean_score(grade(baseline.result().replies, answer))
    value = mean_score(results)
    if value is None:
        problem = "the grading of the solver's text failed"
        return Scored(math.nan, results[0].status, details | {"problem": problem})
    return Scored(value, "ok", details)
