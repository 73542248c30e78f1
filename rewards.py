"""Rewards: text in, score out.

What comes in is a RewardRecord, what comes out a RewardResult. `score` scores a list of records and waits; `submit`
gives a future for one of them. `configure` makes the flags of a run the settings of all verifiers, and
`combine_rewards` turns the scores of a response into its reward. The last section runs the worker processes.

A verifier is two functions and a row of the table VERIFIERS:

    def check_x(record) -> None        raises ValueError for a label that can never be scored, at the start of a run
    def verify_x(record) -> Verdict    finds the one answer in the response and scores it

    "x": Verifier(verify_x, check_x)

verify_x runs in the trainer, so its time must be linear in the length of the text. Scoring that may hang, crash or
exhaust memory runs in a worker process: verify_x then returns Job("x.work_x", arguments), which calls the function
work_x of scripts/parts/x.py there. Scoring that waits for a server or a sandbox returns a function, which is called in
a thread. A verifier that few runs need is such a part as a whole: its row names the two functions, see part_verifier.

A --reward_file needs no change here: scripts/parts/rewards.md.

Rules for all verifiers: only the text after the last </think> counts, and a <think> that is never closed means no
answer. One candidate is scored, so a list of guesses earns nothing. Code written by the model runs in a sandbox only.
Names are open-instruct's; docstrings say where a score differs from open-instruct's or verl's on purpose.

    python scripts/score.py CASES.jsonl      # rows {response, ground_truth, dataset} -> one JSON result per row
"""

import atexit
import collections
import contextlib
import difflib
import importlib
import json
import math
import os
import re
import string
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from scripts.parts import chat, solver

# --- The way in -------------------------------------------------------------------------------------------------------

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "scripts")
NUM_WORKERS = min(os.cpu_count() or 1, 8)
MISSING = frozenset({"timeout", "crash", "infra_error"})
STATUSES = ("ok", "no_answer", "timeout", "crash", "infra_error")


@dataclass(frozen=True)
class RewardRecord:
    """One response to score.

    dataset is the name of the verifier, in any case. ground_truth is the label. num_tokens is the length of the
    response; only max_length and up_to_max_length need it. prompt is the conversation before the response, as lines
    "role: content"; only judges and the solver need it. columns is a dict of what a reward file takes of the row."""

    response: str
    ground_truth: Any
    dataset: str
    num_tokens: int | None = None
    prompt: str = ""
    columns: Any = None


@dataclass(frozen=True)
class RewardResult:
    """A score in [0, 1] (any number for a reward file). It is nan if `status` is in MISSING: missing, not wrong.

    ok           an answer was scored, right or wrong
    no_answer    no answer was found; the score is 0
    timeout      scoring the label takes longer than the deadline
    crash        scoring the label ends the worker, or raises
    infra_error  the verifier could not run, or something else killed it
    seconds is the wall time of scoring, without the wait for a free worker and without the worker's start. details is
    plain data from the verifier: results of single tests, texts of a solver or judge, why a score is missing.
    """

    score: float
    status: str
    extracted: str | None
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)


class Scored(NamedTuple):
    """The score of a Job or a call; fields as in RewardResult. waited: seconds until a worker or sandbox was free."""

    score: float
    status: str
    details: dict[str, Any] = {}
    waited: float = 0.0


class Job(NamedTuple):
    """A score that a worker process computes.

    work names a function: "gym.work_reasoning_gym" is work_reasoning_gym of scripts/parts/gym.py. The worker calls
    work(**arguments), which imports and builds what is needed. The function that it returns gives the score, or a dict
    of fields of Scored, within the deadline. Arguments are plain data.

    blameless replaces the arguments that come from the response, to find out what is to blame for a timeout or a crash.
    If the harmless arguments can be scored, the response is to blame, and it is wrong. Otherwise the label is to blame,
    and the score is missing.

    prints is the name under which the run shows what the job prints; without one it is dropped."""

    work: str
    arguments: dict[str, Any]
    blameless: dict[str, Any] = {}
    prints: str = ""


class Verdict(NamedTuple):
    """The answer found in a response (None: no answer) and its score.

    A score that takes time is a Job for a worker, or a function that is called in a thread."""

    extracted: str | None
    score: float | Job | Callable[[], Scored]


NO_ANSWER = Verdict(None, 0.0)


def accept_any_label(record: RewardRecord) -> None:
    """The check of a verifier that can score every label."""


class Verifier(NamedTuple):
    """A row of VERIFIERS. check raises ValueError or TypeError for a label that can never be scored. needs is the name
    of a flag that must be set."""

    verify: Callable[[RewardRecord], Verdict]
    check: Callable[[RewardRecord], None] = accept_any_label
    needs: str = ""


def check_verifier(name: str) -> str:
    """The key in VERIFIERS for this name, in any case. Raises ValueError, with the nearest name, if there is none."""
    name = SETTINGS.renamed.get(name.lower(), name.lower())
    if name not in VERIFIERS:
        known = ", ".join(VERIFIERS)
        near = difflib.get_close_matches(name, VERIFIERS, n=1)
        perhaps = f"perhaps {near[0]}, or " if near else ""
        raise ValueError(
            f"unknown verifier {name!r}: {perhaps}a function of your own, for --reward_file of grpo.py; its "
            f"--remap_verifier {name}=NAME names another for these rows. Known are {known}"
        )

    needs = VERIFIERS[name].needs
    flags = SETTINGS.flags
    if needs and not getattr(flags, needs) and not getattr(flags, "dry_run", False):
        raise ValueError(f"verifier {name} needs a model: set --{needs}")
    return name


def check_ground_truth(name: str, ground_truth: Any, prompt: str = "user: ?", columns: Any = None) -> str | None:
    """Why this verifier can never score this label of a row with these columns, or None. Raises ValueError for an
    unknown verifier."""
    name = check_verifier(name)
    is_nan = isinstance(ground_truth, float) and math.isnan(ground_truth)
    if is_nan and name in BUILT_IN and name != "passthrough":
        return "the label is NaN, as pandas has it for a missing value"
    try:
        record = RewardRecord("", ground_truth, name, None, prompt, columns)
        VERIFIERS[name].check(record)
        if SETTINGS.flags.audit_verifier:
            from scripts.parts import audit

            audit.check_label(record)
    except Exception as error:  # whatever a library makes of such a label
        return str(error) or name
    return None


def submit(record: RewardRecord, timeout_s: float = 10.0, verifier: str = "") -> Future[RewardResult]:
    """Starts to score a record; the result of the future is a RewardResult.

    timeout_s is the wall-clock deadline of a worker's job, in seconds. verifier replaces the verifier of the record and
    ignores --remap_verifier. A failure of a verifier becomes a status and one warning per kind, not an exception.
    Raises ValueError for an unknown verifier."""
    start = time.monotonic()
    name = verifier or check_verifier(record.dataset)
    try:
        extracted, found = VERIFIERS[name].verify(record)
    except Exception as error:  # check_ground_truth would have refused this record
        extracted = None
        found = partial(Scored, math.nan, "infra_error", {"problem": str(error)})

    if isinstance(found, Job):
        call = partial(run_in_worker, found, timeout_s)
        job = partial(finish, name, extracted, call)
        return JOB_THREADS.submit(job)
    if not isinstance(found, (int, float)):
        job = partial(finish, name, extracted, found)
        return CALL_THREADS.submit(job)

    status = "no_answer" if extracted is None else "ok"
    future: Future[RewardResult] = Future()
    future.set_result(RewardResult(found, status, extracted, time.monotonic() - start))
    return future


def finish(name: str, extracted: str | None, call: Callable[[], Scored]) -> RewardResult:
    """Calls `call` and makes a result of it. A call that raises is a crash of the verifier `name`."""
    start = time.monotonic()
    try:
        scored = call()
    except Exception as error:
        scored = Scored(math.nan, "crash", {"problem": f"{type(error).__name__}: {error}"})
    if isinstance(scored.score, dict):
        scored = scored._replace(**scored.score)

    seconds = time.monotonic() - start - scored.waited
    problem = scored.details.get("problem")
    if problem and scored.status in MISSING:
        warn_once(name, scored.status, problem)
    return RewardResult(scored.score, scored.status, extracted, seconds, scored.details)


WARNED: dict[tuple[str, str], str] = {}  # (verifier or other name, status) -> what the last one said
WARNING = threading.Lock()  # of the threads that find the same problem at the same time, one tells it


def warn_once(name: str, status: str, problem: str) -> None:
    with WARNING:
        if (name, status) not in WARNED:
            print(printable(f"WARNING: {name}: {status} (others are not shown): {problem}"), file=sys.stderr)
        WARNED[name, status] = problem


def printable(text: str) -> str:
    """A text for the terminal: files of others and replies of servers may hold what clears the screen, writes to the
    clipboard or turns the order of letters, which is shown as in Python's source."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1] for letter in text)


def score(records: Sequence[RewardRecord], timeout_s: float = 10.0) -> list[RewardResult]:
    """Scores the records at the same time; the results are in the same order. See submit.

    A record that ends its worker (timeout, crash) costs no other record anything. Threads may call this at the same
    time; they share the workers. Raises ValueError for an unknown verifier, before anything is scored."""
    for name in {record.dataset for record in records}:
        check_verifier(name)
    futures = [submit(record, timeout_s) for record in records]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:  # after an interrupt, records that are still waiting are not scored
            future.cancel()


# --- Flags, and what they make of the verifiers' scores ---------------------------------------------------------------


class UserError(ValueError):
    """A flag, file or row is wrong; the message names it, its value and the fix. Shown without a traceback."""


def need(condition: bool, message: str) -> None:
    """Raises UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


class Bound(NamedTuple):
    """What a flag's number must be: it stands in the flag's type, and RewardFlags.check refuses other numbers."""

    must: str
    holds: Callable[[float], bool]


T = TypeVar("T")
Positive = Annotated[T, Bound("be positive and finite", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[T, Bound("not be negative", lambda x: x >= 0)]
Share = Annotated[T, Bound("be in [0, 1]", lambda x: 0 <= x <= 1)]
ShareAboveZero = Annotated[T, Bound("be in (0, 1]", lambda x: 0 < x <= 1)]
ShareBelowOne = Annotated[T, Bound("be in [0, 1)", lambda x: 0 <= x < 1)]
ShareBetween = Annotated[T, Bound("be in (0, 1)", lambda x: 0 < x < 1)]
Seed = Annotated[T, Bound("be in [0, 2**32), as numpy and vLLM take it", lambda x: 0 <= x < 2**32)]


class Refusing:
    """Base of all classes of flags: refusals that name flags with their values."""

    def refuse(self, text: str) -> NoReturn:
        """Raise UserError(text). Flags before the first colon of the text get their values behind them."""
        flags, colon, fix = text.partition(":")
        flags = re.sub(r"--(\w+)", lambda match: self.with_value(match[1]), flags)
        raise UserError(flags + colon + fix)

    def with_value(self, name: str) -> str:
        """`--name value`; a yes/no flag, or one that is None, without a value."""
        value = getattr(self, name, None)
        values = value if isinstance(value, list) else [value]
        shown = [str(value) for value in values if not isinstance(value, bool | None)]
        return " ".join([f"--{name}", *shown])


@dataclass(frozen=True)
class RewardFlags(Refusing):
    """Rewards: how responses are scored."""

    apply_verifiable_reward: bool = True
    """Score each response with the verifier that its row names."""
    verification_reward: NotNegative[float] = 10.0
    """The verifier's score, from 0 to 1, is multiplied by this."""
    reward_file: str = ""
    """Python file of rewards: NAME(response, ground_truth) -> number scores the rows whose dataset is NAME, and those
    without a dataset; 1.0 is the full score. More parameters are columns. Rewards of a group, of TRL and of verl:
    scripts/parts/rewards.md. Empty is off."""
    remap_verifier: str | None = None
    """OLD=NEW, several separated by commas: verifier NEW scores the rows that name OLD. None is off."""
    audit_verifier: str = ""
    """A second verifier, or a function of --reward_file, whose scores are only logged. The run warns if the reward
    holds while this score falls behind. Empty is off."""
    code_max_execution_time: Positive[float] = 1.0
    """Verifiers code and code_stdio: seconds of processor time for each test, and five times as many by the clock."""
    code_pass_rate_reward_threshold: Share[float] = 0.0
    """Verifiers code and code_stdio: a smaller share of passed tests scores 0. At 1.0 all tests must pass."""
    allow_unsafe_code: bool = False
    """Run the model's programs even where this machine cannot isolate them."""
    llm_judge_model: str = ""
    """Model of the verifiers general-*. Empty is none."""
    llm_judge_base_url: str = ""
    """OpenAI-compatible server of the judge, such as http://localhost:8000/v1. Empty: $OPENAI_BASE_URL, else
    $HOSTED_VLLM_API_BASE, else OpenAI's server."""
    llm_judge_max_tokens: Positive[int] = 2048
    """Most tokens of a verdict."""
    llm_judge_max_context_length: int = 8192
    """Most tokens of question, response and verdict together. Longer responses are cut in the middle."""
    llm_judge_timeout: Positive[float] = 60.0
    """Seconds for a verdict, with retries. After that the score is missing."""
    solver_model_name_or_path: str = ""
    """Frozen model of the verifier solver, which gets the response as a guideline. Empty is none."""
    solver_base_url: str = ""
    """Servers that already run the solver, separated by commas; their key is in $SOLVER_API_KEY. Empty: the run starts
    servers."""
    solver_num_engines: Positive[int] = 1
    """Servers that the run starts for the solver. Each has a GPU of its own, after those of the run."""
    solver_num_samples: Positive[int] = 1
    """Solutions for each guideline; their mean correctness is the score. 1 is greedy."""
    solver_response_length: Positive[int] = 1024
    """Most tokens of a solution."""
    apply_r1_style_format_reward: bool = False
    """Reward the format `...</think> <answer>...</answer>`."""
    r1_style_format_reward: float = 1.0
    """Score of a response in the right format."""
    additive_format_reward: bool = False
    """Add the format's score to the verifier's. Off: without the format the verifier's score does not count
    (open-instruct PR 659)."""
    non_stop_penalty: bool = False
    """A response that did not stop by itself has the score non_stop_penalty_value."""
    non_stop_penalty_value: float = 0.0
    """Score of such a response: see non_stop_penalty."""
    overlong_buffer_length: NotNegative[int] = 0
    """DAPO's soft length penalty: it grows from 0 to 1 over this many tokens before response_length
    (arXiv:2503.14476, eq. 13). 0 is off."""

    def check(self) -> None:
        """Refuse what cannot work before anything starts: numbers out of their flags' bounds, of all flags that `self`
        has, and rewards that contradict themselves. Raises UserError with flag, value and fix."""
        for flag in fields(self):
            value = getattr(self, flag.name)
            need(value == value, f"--{flag.name} nan: must be a number")
            marks = getattr(flag.type, "__metadata__", ())
            for bound in [mark for mark in marks if isinstance(mark, Bound)]:
                need(value is None or bound.holds(value), f"--{flag.name} {value}: must {bound.must}")
        if not (self.apply_verifiable_reward or self.apply_r1_style_format_reward):
            self.refuse("--no_apply_verifiable_reward without --apply_r1_style_format_reward leaves no reward")
        if self.additive_format_reward and not self.apply_r1_style_format_reward:
            self.refuse("--additive_format_reward needs --apply_r1_style_format_reward")
        if self.llm_judge_model and self.llm_judge_max_tokens > self.llm_judge_max_context_length - 1024:
            self.refuse(
                "--llm_judge_max_tokens of --llm_judge_max_context_length must leave 1024 tokens to judge: lower it"
            )


@dataclass
class Settings:
    """What the flags of a run make of the verifiers."""

    flags: RewardFlags = field(default_factory=RewardFlags)
    judge: "chat.ChatModel | None" = None
    solver: "solver.Solver | None" = None
    renamed: dict[str, str] = field(default_factory=dict)  # --remap_verifier: old name -> verifier


SETTINGS = Settings()


def configure(flags: RewardFlags, connect: bool) -> None:
    """Makes `flags` the settings of all verifiers. Call it before a label is checked or a response is scored.

    connect: send a test request to the servers of judge and solver that run already. Raises UserError for flags that
    cannot work; then no judge and no solver is set."""
    global SETTINGS
    SETTINGS = Settings()
    RewardFlags.check(flags)  # not Args.check, which checks the flags of the training script as well

    settings = Settings(flags)
    if flags.llm_judge_model:
        from scripts.parts import judges

        settings.judge = judges.judge_model(flags, connect)
    if flags.solver_model_name_or_path:
        from scripts.parts import solver

        settings.solver = solver.solver_model(flags, connect)
    SETTINGS = settings

    if flags.reward_file:
        from scripts.parts import user_files

        user_files.load_reward_file(flags.reward_file)
    if flags.audit_verifier:
        from scripts.parts import audit

        audit.check_name(flags)
    settings.renamed = renamed_verifiers(flags.remap_verifier or "")


def renamed_verifiers(pairs: str) -> dict[str, str]:
    """Old name -> verifier of --remap_verifier. Raises UserError."""
    renamed = {}
    for pair in filter(None, pairs.split(",")):
        old, _, new = (name.strip().lower() for name in pair.partition("="))
        need(bool(old and new), f"--remap_verifier {pairs}: {pair!r} is not OLD=NEW")
        try:
            check_verifier(new)
        except ValueError as error:
            raise UserError(f"--remap_verifier {pairs}: {error}") from None
        renamed[old] = new
    return renamed


FORMAT_START = re.compile(r"</think>\s*<answer>")


def format_reward(response: str) -> float:
    """1.0 if the response matches `.*?</think>\\s*<answer>.*?</answer>` from its start, newlines included, else 0.0.

    This is open-instruct's R1-style format. It is searched in two steps, because the pattern as a whole takes time
    quadratic in the number of tags that are never closed."""
    start = FORMAT_START.search(response)
    return float(start is not None and response.find("</answer>", start.end()) >= 0)


def combine_rewards(
    flags: RewardFlags, verifiable: float, format_score: float, stopped: bool = True, tokens_left: float = math.inf
) -> tuple[float, float]:
    """(outcome, score) from v = verification_reward * verifiable and f = r1_style_format_reward * format_score.

    outcome  apply_r1_style_format_reward off:    v
             apply_verifiable_reward off:         f
             additive_format_reward:              v + f
             gated, the default:                  v if format_score == 1 else 0
             non_stop_penalty:                    non_stop_penalty_value if the response did not stop by itself
    score    outcome - min(max(overlong_buffer_length - tokens_left, 0) / overlong_buffer_length, 1):
             DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13; a buffer of 0 is off

    verifiable is the sum of the verifiers' scores. format_score is 0 or 1. tokens_left is response_length minus the
    length of the response. Groups are filtered by outcome, so a penalty alone never makes a gradient. With
    --kl_in_reward the learner subtracts beta * KL from the score as well. A nan verifiable (missing) always gives nan.
    Departs from open-instruct: its gate asks f == 1, and so gives 0 for every r1_style_format_reward except 1.
    """
    v = flags.verification_reward * verifiable if flags.apply_verifiable_reward else 0.0
    f = flags.r1_style_format_reward * format_score if flags.apply_r1_style_format_reward else 0.0
    gated = flags.apply_verifiable_reward and flags.apply_r1_style_format_reward and not flags.additive_format_reward
    if math.isnan(v):
        outcome = math.nan
    elif flags.non_stop_penalty and not stopped:
        outcome = flags.non_stop_penalty_value
    elif gated:
        outcome = v if format_score == 1 else 0.0
    else:
        outcome = v + f

    overlong = 0.0
    buffer = flags.overlong_buffer_length
    if buffer:
        used = max(buffer - tokens_left, 0)
        overlong = min(used / buffer, 1.0)
    return outcome, outcome - overlong


def max_score(flags: RewardFlags, verifiers: int = 1) -> float:
    """The highest score that combine_rewards gives a response which stopped by itself and has this many verifiers."""
    return combine_rewards(flags, float(verifiers), 1.0)[0]


# --- Finding the answer. All of this runs in the trainer, so it is linear in the length of the text -------------------


def final_text(response: str) -> str:
    """The text after the last </think>, or "" while a <think> is still open."""
    tail = response.rpartition("</think>")[2]
    return "" if "<think>" in tail else tail


def answer_tag(text: str) -> str | None:
    """The stripped content of the last <answer>...</answer>, or None."""
    # A pattern like <answer>(.*?)</answer> is quadratic in the number of tags that are never closed.
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def answer_text(response: str) -> str:
    """The last <answer> block of final_text, or all of final_text, stripped, if there is no block."""
    text = final_text(response)
    tagged = answer_tag(text)
    return text.strip() if tagged is None else tagged


BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)(?:\s*(\{)|\s+(-?[\w.,]+))|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""The stripped content of a \boxed{}, or None. Of the boxes with balanced braces, the one that opens last counts;
    "" if one that opens later is cut off. `\boxed 42` is a box as well."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    open_braces: list[re.Match | None] = []  # the match of a box, None for any other brace
    last_start = -1
    content = None
    for token in BOX_TOKEN.finditer(text):
        if token[2]:
            last_start = token.start()
            content = token[2].rstrip(".,")
        elif token[1]:
            open_braces.append(token)
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            box = open_braces.pop()
            if box and box.start() > last_start:
                last_start = box.start()
                content = text[box.end() : token.start()].strip()
    is_cut_off = any(box and box.start() > last_start for box in open_braces)
    return "" if is_cut_off else content


# --- Numbers: gsm8k, gsm8k_strict, gsm8k_verl -------------------------------------------------------------------------

# A minus is a sign only if no operand stands before it: 10-5 ends in 5, not in -5.
NUMBER = re.compile(r"(?:(?<![\w.)\]}])[-+])?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
QUOTIENT = re.compile(rf"({NUMBER.pattern})(?:\s*/\s*({NUMBER.pattern}))?")
MIXED_NUMBER = re.compile(r"\d\s{0,8}(?:and\s{1,8})?(?:\\[dtc]?frac|\d{1,9}/\d|(?:a|one)[\s-]half)|[¼-¾⅐-⅞]|frac\s?\d")
ANOTHER_NUMBER = re.compile(
    r"[\s%°]{0,8}(?:[-,;:|&+*/^x×÷~–—→?<>≠≈.]{1,3}|(?:and|to)\b)?\s{0,8}[-+]?\.?\d"  # 5 - 4
    r"|\s{0,8}[(\[]\s{0,8}[-+]?[\d.]{1,20}\s{0,8}[)\]]"  # 5 (4)
    r"|\s{0,8}(?:days?|hours?|feet|dollars?)(?:,| and)?\s{1,8}(?!0)\d{1,4}\s(?:hour|minute|inch|cent)"  # 5 feet 9 inch
    # 5 apples or maybe 4
    r"|(?:\s{0,8}[a-z%°]{1,20}){0,3}[\W_]{0,8}(?:(?:or|vs|versus|maybe|perhaps|possibly)\b(?:[\W_]|boxed|text){0,12}){1,3}"
    r"(?:\d|(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w{3,5}teen"
    r"|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)\b)",
    re.IGNORECASE,
)
EQUATION_LEFT = re.compile(r"^[\W\d_x]*=")
TAKEN_BACK = re.compile(
    r"_|(?:[\W_]|text|mathrm|mbox|is){0,8}\b(?:not|wrong|incorrect)\b", re.IGNORECASE
)  # 5_4, 5 is not
TEX_UNIT = re.compile(r"\\(?:text|mathrm)\{(?![^{}]*\b(?:not|wrong|incorrect)\b)[^{}\d]*\}(?:\^\{?\d\}?)?")
TEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
MAX_DIGITS = 20_000  # of a number, with the zeros of its exponent
UNICODE_MINUS = str.maketrans("\u2212\uff0d", "--")
CURRENCY = str.maketrans("", "", "$£€")


class Number(NamedTuple):
    """A number as text and as a value. The value is None if the text has none, or one with too many digits."""

    text: str | None
    value: Fraction | None


NO_NUMBER = Number(None, None)


def plain_numbers(text: str) -> str:
    """Text with unicode minus as -, 2 1/2 as 5/2, and without currency signs, digit-group commas and TeX of numbers."""
    text = text.translate(UNICODE_MINUS).replace("\\$", "$").translate(CURRENCY)
    if MIXED_NUMBER.search(text):
        from scripts.parts import mixed_numbers

        text = mixed_numbers.without_mixed_numbers(text)
    if "\\" in text or "{" in text:
        text = re.sub(r"\\!|(?<=\d)(?:\\,|\{,\})(?=\d{3}(?!\d))", "", text)
        text = TEX_UNIT.sub(" ", text)
        text = TEX_FRACTION.sub(r"\1/\2", text)
    return re.sub(r"(?<=\d),(?=(?:\d\d,){0,9}\d{3}(?!\d))", "", text)


def read_number(match: re.Match) -> Number:
    """The exact number of a match of QUOTIENT."""
    nothing = Number(match[0], None)  # equal to no label
    try:
        parts = [Decimal(part) for part in match.groups() if part]
    except ArithmeticError:  # an exponent beyond Decimal's range
        return nothing
    value = Fraction(1)
    for part in reversed(parts):
        if abs(part.adjusted()) > MAX_DIGITS or not value:
            return nothing
        value = Fraction(part) / value
    return Number(match[0], value)


def single_number(text: str, rest_may_hold_numbers: bool) -> Number:
    """The first number of the first line that has one, NO_NUMBER if there is none or if the text offers several.

    Of an equation the right side counts (9 * 2 = 18), and a/b and 2 1/2 are one number. A text without a digit may
    begin with a number in words. With rest_may_hold_numbers, numbers in a later phrase are allowed (72 clips over 2
    months), but 18 or 19, 18-19, 18 vs 19 and 18 (or 19) are still several."""
    if not re.search(r"\d", text):
        from scripts.parts import mixed_numbers

        text = mixed_numbers.digits_of_words(text)
    lines = plain_numbers(text).splitlines()
    line = next(filter(NUMBER.search, lines), "")
    line = EQUATION_LEFT.sub("", line)
    first = QUOTIENT.search(line)
    if first is None:
        return NO_NUMBER
    after = line[first.end() :]
    another = ANOTHER_NUMBER.match(after) if rest_may_hold_numbers else NUMBER.search(after)
    if another or TAKEN_BACK.match(after):
        return NO_NUMBER
    return read_number(first)


def last_number(text: str) -> Number:
    """The last number of a text, or NO_NUMBER. a/b is one number."""
    for line in reversed(text.splitlines()):
        numbers = list(QUOTIENT.finditer(plain_numbers(line)))
        if numbers:
            return read_number(numbers[-1])
    return NO_NUMBER


def number_of_label(ground_truth: Any) -> Fraction | None:
    """The value of a label that is one number, else None."""
    return single_number(str(ground_truth), rest_may_hold_numbers=False).value


def check_number(record: RewardRecord) -> None:
    if number_of_label(record.ground_truth) is None:
        raise ValueError(f"label {record.ground_truth!r} is not one number")


def verify_gsm8k(record: RewardRecord, strict: bool = False) -> Verdict:
    r"""1.0 if the final number equals the label's number exactly (72.00 = 72, 1,080 = 1080), else 0.0.

    The final number is the first one after the last `####`; without `####`, the number in the last \boxed{}; without a
    box, the last number of the text. Several values after `####` or in the box are no answer. strict: only `####`
    counts. A label without a number equals nothing. Format of the data: GSM8K, arXiv:2110.14168.
    open-instruct compares the last number of the text as a string; verl reads #### in the last 300 characters only.
    """
    text = final_text(record.response)
    _, marker, after_marker = text.rpartition("####")
    box = last_box(text)
    if marker:
        number = single_number(after_marker, rest_may_hold_numbers=True)
    elif strict:
        number = NO_NUMBER
    elif box is not None:
        number = single_number(box, rest_may_hold_numbers=False)
    else:
        number = last_number(text)

    label = number_of_label(record.ground_truth)
    return Verdict(number.text, float(number.value is not None and number.value == label))


VERL_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def check_verl(record: RewardRecord) -> None:
    if not re.fullmatch(r"-?[0-9.]+", str(record.ground_truth)):
        raise ValueError(f"label {record.ground_truth!r} equals no number as veRL's rule finds it, without commas")


def verify_gsm8k_verl(record: RewardRecord) -> Verdict:
    """1.0 if the text after the last `#### ` of the last 300 characters, without commas, is the label's, else 0.0.

    This is veRL's rule for its GSM8K to the letter (verl/utils/reward_score/gsm8k.py, strict). It compares texts, so
    72. and 72.00 and $72 are not 72, and it also reads the text in <think>. scripts/parts/rewards.md compares it with
    gsm8k."""
    answers = VERL_ANSWER.findall(record.response[-300:])
    answer = answers[-1].replace(",", "") if answers else None
    return Verdict(answer, float(answer == str(record.ground_truth)))


# --- Mathematics: math, strict_math -----------------------------------------------------------------------------------

TEX_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
TEX_NOISE = re.compile(
    r"\\(?:left|right)(?![a-zA-Z])|\\!|\$"
    r"|(?!(?<=,)(?:\\[,;: ]|\s)\s*\d{3}(?!\d))"  # 1, 234 is two numbers
    r"(?:(?:\\[,;: ]|\s)+(?!\d)|(?<!\d)(?:\\[,;: ]|\s)+)"
)
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)?(?:(?<=\d)\.|\.\d+)?")
NUMBER_IN_BASE = re.compile(r"\d[\dA-F]*_\d+")
ANSWER_PHRASE = re.compile(r"answer\s{0,8}(?:is|:)[\s:*]{0,8}", re.IGNORECASE)


def math_answer(text: str) -> str | None:
    r"""The last \boxed{}; else the last <answer> block; else the text after the last `answer is` or `answer:`."""
    for candidate in (last_box(text), answer_tag(text)):
        if candidate is not None:
            return candidate or None

    phrase_start = max((match.end() for match in ANSWER_PHRASE.finditer(text)), default=len(text))
    phrase = text[phrase_start:].partition("\n")[0]
    dollars = phrase.split("$", 2)
    if len(dollars) == 3:  # the TeX of `is $\frac12$ meters`
        phrase = dollars[1]
    else:  # the first sentence
        phrase = re.split(r"\.\s", phrase, maxsplit=1)[0]
    return phrase.strip(" *.") or None


MINERVA_START = "Final Answer: The final answer is"
MINERVA_END = "I hope it is correct"


def minerva_answer(text: str) -> str | None:
    """X of the last `Final Answer: The final answer is X. I hope it is correct.`, or None."""
    start = text.rfind(MINERVA_START)
    end = text.rfind(MINERVA_END)
    if not 0 <= start < end:
        return None
    answer = text[start + len(MINERVA_START) : end].strip(" .\n")
    return last_box(answer) or answer or None


def trim_tex(text: str) -> str:
    r"""`text` without wrappings that never change a value: $..$, a final stop, 1\,000 for 1000."""
    text = text.translate(UNICODE_MINUS).strip().removesuffix(".").strip().strip("$").strip()
    return re.sub(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))", "", text)


def canonical_tex(text: str) -> str:
    """A spelling of trim_tex'ed `text` for string equality: same letters and case, one form of fractions and fonts."""
    text = TEX_WORDS.sub(r"\1", text).replace("\\$", "")
    text = TEX_NOISE.sub("", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text).replace("\\varnothing", "\\emptyset")
    return re.sub(r"([_^])\{(\w|\d+)\}", r"\1\2", text)


PLAIN_RATIONAL = re.compile(r"(-?)(?:\\frac\{(\d{1,9})\}\{(\d{1,9})\}|(\d{1,9})/(\d{1,9})|(\d{1,9}(?:\.\d{1,9})?))")
RATIONALS_MAY_AGREE = 1e-4  # 1/3 is 0.333333, cut short: a worker tells, but for numbers further apart


def plain_rational(key: str) -> Fraction | None:
    r"""The value of -\frac{1}{2}, 1/2 or 0.5 in canonical_tex; None for everything else."""
    match = PLAIN_RATIONAL.fullmatch(key)
    if match is None:
        return None
    numerator = match[2] or match[4] or match[6]
    denominator = int(match[3] or match[5] or 1)
    return Fraction(f"{match[1]}{numerator}") / denominator if denominator else None


def plain_number(key: str) -> Decimal | None:
    """The value of 1,000 or -0.5 in canonical_tex; None for everything else."""
    if not re.search(r"\d", key) or not PLAIN_NUMBER.fullmatch(key):
        return None
    return Decimal(key.replace(",", ""))


def plainly_equal(gold: str, answer: str) -> bool | None:
    """Whether two texts in canonical_tex are equal; None if only math-verify can tell.

    Decided here: equal texts, numbers with a base (as texts only, because math-verify drops the base), two plain
    fractions or decimals that are equal or clearly apart, two plain numbers of which the gold one is an integer."""
    if not gold or gold == answer:
        return bool(gold)
    if NUMBER_IN_BASE.fullmatch(gold):
        return False

    gold_rational = plain_rational(gold)
    answer_rational = plain_rational(answer)
    if gold_rational is not None and answer_rational is not None:
        distance = abs(gold_rational - answer_rational)
        if distance == 0 or distance > RATIONALS_MAY_AGREE:
            return distance == 0

    gold_number = plain_number(gold)
    answer_number = None if gold_number is None else plain_number(answer)
    if gold_number is None or answer_number is None:
        return None
    if gold_number == answer_number:
        return True
    return False if gold_number == gold_number.to_integral_value() else None


def math_label(ground_truth: Any) -> str:
    r"""The label's TeX: the content of its last \boxed{} if it has one, without $ signs; "" for None."""
    label = "" if ground_truth is None else str(ground_truth)
    box = last_box(label)
    return trim_tex(label if box is None else box)


def check_tex(record: RewardRecord) -> None:
    label = math_label(record.ground_truth)
    if isinstance(record.ground_truth, (list, dict)) or not canonical_tex(label) or label.lower() == "nan":
        raise ValueError(f"label {record.ground_truth!r} is no text, or empty, or no number")


def verify_math(record: RewardRecord, strict: bool = False) -> Verdict:
    """1.0 if the answer equals the label, by plainly_equal or else by scripts/parts/equality.py in a worker.

    One candidate counts: the one of math_answer, or with strict the one of minerva_answer. open-instruct accepts any of
    its candidates, the whole text among them, and its symbolic comparison never runs off the main thread.

    math-verify's own timeouts are off: they use SIGALRM, which fails off the main thread and inside C calls. The
    deadline of the worker replaces them. Source: github.com/huggingface/Math-Verify 0.9.0.
    """
    text = final_text(record.response)
    answer = minerva_answer(text) if strict else math_answer(text)
    if answer is None:
        return NO_ANSWER

    gold = math_label(record.ground_truth)
    trimmed = trim_tex(answer)
    equal = plainly_equal(canonical_tex(gold), canonical_tex(trimmed))
    if equal is not None:
        return Verdict(answer, float(equal))
    return Verdict(answer, Job("equality.work_math", {"gold": gold, "answer": trimmed}, {"answer": "0.7310585786"}))


# --- Words: string_matcher, string_f1, puzzle, flan, re_search, re_search_f1 ------------------------------------------


def squad_words(text: str) -> str:
    """Lower case, no punctuation, no articles (a, an, the), single spaces. Source: SQuAD, arXiv:1606.05250."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def label_texts(ground_truth: Any, as_json: bool = False) -> list[str]:
    """The alternatives of a label in squad_words, without empty ones. The label is one text or a list of texts; with
    as_json it may also be JSON of these."""
    if as_json and isinstance(ground_truth, str):
        with contextlib.suppress(ValueError):  # a plain text
            ground_truth = json.loads(ground_truth)
    texts = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    normalized = [squad_words(str(text)) for text in texts if text is not None]
    return [text for text in normalized if text]


def check_words(record: RewardRecord, as_json: bool = False) -> None:
    if not label_texts(record.ground_truth, as_json):
        raise ValueError(f"label {record.ground_truth!r} has no words")


def token_f1(answer: str, label: str) -> float:
    """Harmonic mean of precision and recall over words; both texts in squad_words. Source: SQuAD, arXiv:1606.05250."""
    answer_words = answer.split()
    label_words = label.split()
    common = (collections.Counter(answer_words) & collections.Counter(label_words)).total()
    return 2 * common / (len(answer_words) + len(label_words))


def best_match(answer: str | None, labels: list[str], f1: bool = False, floor: float = 0.0) -> Verdict:
    """1.0 for a text that is one of the labels, or with f1 the best token_f1; at least `floor`. No answer if there are
    no words."""
    text = squad_words(answer or "")
    if not text:
        return NO_ANSWER
    scores = [token_f1(text, label) for label in labels] if f1 else [float(text in labels)]
    return Verdict(answer, max([floor, *scores]))


def verify_string_matcher(record: RewardRecord) -> Verdict:
    """1.0 if the last <answer>...</answer> equals the label in squad_words, else 0.0. An empty label equals nothing."""
    return best_match(answer_tag(final_text(record.response)), label_texts(record.ground_truth))


def verify_text(record: RewardRecord, f1: bool) -> Verdict:
    """puzzle and string_f1: the last <answer> block, or the whole text, against the label by exact match or F1.
    open-instruct removes only the tags, so that words around them count."""
    return best_match(answer_text(record.response), label_texts(record.ground_truth), f1)


def verify_flan(record: RewardRecord) -> Verdict:
    """Exact match, in squad_words, of the text after the last `The answer is: `, or of the whole text without it."""
    answer = re.split(r"The answer is:?\s", answer_text(record.response))[-1].strip()
    return best_match(answer, label_texts(record.ground_truth))


def verify_re_search(record: RewardRecord, f1: bool) -> Verdict:
    """The first <finish>...</finish> against the label. With f1, an answer with words earns at least 0.1. The first
    block counts because it ends a search. This is open-instruct's rule, except for the rule on <think>."""
    _, start, after_start = final_text(record.response).partition("<finish>")
    content, end, _ = after_start.partition("</finish>")
    answer = content.strip() if start and end else None
    return best_match(answer, label_texts(record.ground_truth, as_json=True), f1, floor=0.1 if f1 else 0.0)


# --- Lengths: max_length, up_to_max_length; no score: passthrough -----------------------------------------------------

WORST_LENGTH_ERROR = 32768  # tokens; a response that is as far from its target, or farther, scores 0


def check_length(record: RewardRecord) -> None:
    if not 0 <= float(record.ground_truth) < math.inf:
        raise ValueError(f"label {record.ground_truth!r} is not a number of tokens")


def verify_length(record: RewardRecord, shorter_is_fine: bool) -> Verdict:
    """max(1 - |num_tokens - label| / WORST_LENGTH_ERROR, 0).

    shorter_is_fine: only tokens beyond the label lower the score. All tokens of the response count, the thinking
    included. open-instruct goes below 0."""
    num_tokens = record.num_tokens
    if num_tokens is None:
        raise ValueError("the length verifiers need num_tokens, the number of tokens of the response")
    excess = num_tokens - float(record.ground_truth)
    excess = max(excess, 0.0) if shorter_is_fine else abs(excess)
    error = excess / WORST_LENGTH_ERROR
    return Verdict(str(num_tokens), max(0.0, 1.0 - error))


def verify_passthrough(record: RewardRecord) -> Verdict:
    """0.0, for rows whose reward comes from elsewhere, such as an environment."""
    return Verdict("", 0.0)


# --- Verifiers in scripts/parts/. Each part is imported when a row of the data names its verifier ---------------------


def in_part(record: RewardRecord, work: str, **options: Any) -> Any:
    """Calls a function of a part, named as in Job, with the record and the options."""
    part, name = work.split(".")
    function = getattr(importlib.import_module(f"scripts.parts.{part}"), name)
    return function(record, **options)


def part_verifier(verify: str, check: str, needs: str = "", **options: Any) -> Verifier:
    """The row of a verifier whose two functions are in parts."""
    return Verifier(partial(in_part, work=verify, **options), partial(in_part, work=check, **options), needs)


# --- The verifiers by name --------------------------------------------------------------------------------------------


QUESTIONS = (
    "general-quality",
    "general-quality_ref",
    "general-quality_rubric",
    "general-factuality",
    "general-creative_writing",
    "general-safety",
    "general-refusal",
    "general-web_instruct_general_verifier",
)


VERIFIERS: dict[str, Verifier] = {
    "gsm8k": Verifier(verify_gsm8k, check_number),
    "gsm8k_strict": Verifier(partial(verify_gsm8k, strict=True), check_number),
    "gsm8k_verl": Verifier(verify_gsm8k_verl, check_verl),
    "math": Verifier(verify_math, check_tex),
    "strict_math": Verifier(partial(verify_math, strict=True), check_tex),
    "string_matcher": Verifier(verify_string_matcher, check_words),
    "string_f1": Verifier(partial(verify_text, f1=True), check_words),
    "puzzle": Verifier(partial(verify_text, f1=False), check_words),
    "flan": Verifier(verify_flan, check_words),
    "re_search": Verifier(partial(verify_re_search, f1=False), partial(check_words, as_json=True)),
    "re_search_f1": Verifier(partial(verify_re_search, f1=True), partial(check_words, as_json=True)),
    "max_length": Verifier(partial(verify_length, shorter_is_fine=False), check_length),
    "up_to_max_length": Verifier(partial(verify_length, shorter_is_fine=True), check_length),
    "passthrough": Verifier(verify_passthrough),
    "ifeval": part_verifier("ifeval.verify", "ifeval.check"),
    "ifeval_mean": part_verifier("ifeval.verify_mean", "ifeval.check"),
    "reasoning_gym": part_verifier("gym.verify", "gym.check"),
    "code": part_verifier("run_code.verify", "run_code.check", stdio=False),
    "code_stdio": part_verifier("run_code.verify", "run_code.check", stdio=True),
    "solver": part_verifier("solver.verify", "solver.check", "solver_model_name_or_path"),
}
for _question in QUESTIONS:
    VERIFIERS[_question] = part_verifier("judges.verify", "judges.check", "llm_judge_model", question_name=_question)
BUILT_IN = frozenset(VERIFIERS)

# --- Environments, which answer the policy between its turns: scripts/parts/environments.py ---------------------------


@dataclass(frozen=True)
class Episode:
    """What an environment gets after a turn of the policy.

    An environment is a Python file that defines step(episode), or, if it has a state, a class Env with
    __init__(config) and step(episode). step returns None (the rollout is over, without a last word), a text, or an
    Answer. An Env may have reset(row), which gets an Episode before the first turn and returns what is put behind the
    prompt, or None. Between two turns an Env is pickled if it is plain data and has no close(). Any other lives in a
    process of its own until the rollout ends. The file may define about(config), which returns a dict: "role" of the
    answers ("user", the default; "tool"; "" appends them to the policy's own turn), "stop": texts that end a turn,
    "schemas": the tools by name, for the chat template.
    """

    messages: list[dict[str, str]]  # role, content: the messages of the row, then all turns and answers so far
    text: str  # the policy's last turn
    turn: int  # 1, 2, ...; 0 for reset
    steps_left: int  # the most times that the environment will be asked again
    stopped: bool  # the turn ended by itself, not at a limit
    ground_truths: list[Any]
    config: dict[str, Any]  # env_config of the row, with the row's tools as active_tools


@dataclass(frozen=True)
class Answer:
    """What an environment answers.

    text: one text, or several, each a message of its own. reward is added to the scores of the verifiers. done: the
    rollout is over after this answer. metrics: name -> number; the last number of a rollout counts, except for
    tools/NAME/calls, tools/NAME/failures and tools/NAME/seconds, which are summed."""

    text: str | list[str] = ""
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


# --- Threads and workers, which wait so that the trainer need not ----------------------------------------------------


def run_in_worker(job: Job, timeout_s: float) -> Scored:
    """Runs the job in the first worker that is free, and asks Job.blameless what is to blame if it ends the worker."""
    from scripts.parts import worker

    start = time.monotonic()
    with worker.OF_VERIFIERS.one() as own:
        outcome = own.run(job.work, job.arguments, timeout_s)
        if job.prints:
            from scripts.parts import user_files

            user_files.PRINTS.add(job.prints, outcome.printed)
        if outcome.status in ("timeout", "crash") and job.blameless:
            harmless = own.run(job.work, job.arguments | job.blameless, timeout_s)
            if harmless.status == "ok":
                outcome = worker.Outcome(0.0, "ok", outcome.seconds, outcome.problem or outcome.status)
    waited = time.monotonic() - start - outcome.seconds
    details = {"problem": outcome.problem} if outcome.problem else {}
    return Scored(outcome.value, outcome.status, details, waited)


@atexit.register
def close() -> None:
    """Kills the workers, whose running jobs become crashes, and ends the idle fork servers of the sandbox. A busy fork
    server ends when it notices the end of this process. The next score() starts new ones."""
    worker = sys.modules.get("scripts.parts.worker")
    if worker is not None:
        worker.close()
    run_code = sys.modules.get("scripts.parts.run_code")
    if run_code is not None:
        run_code.SANDBOXES.stop()


JOB_THREADS = ThreadPoolExecutor(NUM_WORKERS)  # each drives a worker
CALL_THREADS = ThreadPoolExecutor(512)  # each waits for a sandbox or a server
ENV_THREADS = ThreadPoolExecutor(512)  # each waits for a worker


if __name__ == "__main__":
    raise SystemExit("python scripts/score.py CASES.jsonl scores a file of {response, ground_truth, dataset}")
