"""Audit a verifier: does it accept right answers in disguise, and refuse wrong ones that are dressed up?

    python scripts/audit.py rows.jsonl                                # with the verifier that each row names
    python scripts/audit.py openai/gsm8k:main --split test --reward gsm8k
    python scripts/audit.py rows.jsonl --reward my_reward.py --least_j 0.9
    python scripts/audit.py rows.jsonl --reward my_reward.py:brevity --answer "Answer: ANSWER"

Responses are made of the rows' labels, by family (scripts/reports/disguises.py). A response is accepted if its score
is at least --threshold. Prints for each family the share accepted; the true-positive rate (right answers accepted), the
false-positive rate (wrong ones accepted) and Youden's J, which is their difference: 1 is a perfect verifier, 0 one that
cannot tell; and up to ten cases that were misjudged. A case counts once, whatever its family. Intervals are of 95 %,
over rows; that of J joins the two rates' as if they were independent (Newcombe 1998, method 10).

Exit status 1: J is below --least_j, or nothing could be audited.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import rewards
from rewards import RewardFlags, RewardRecord, UserError, need
from scripts.parts import rows, user_files
from scripts.reports import intervals
from scripts.reports.common import table
from scripts.reports.disguises import FORMS, RIGHT, WRONG, Case, cases_of, spellings, text_of

MOST_SHOWN = 10
LONGEST_SHOWN = 160  # characters of a response
ROWS_OF_A_TRIAL = 20  # on which the form of an answer is found
FAMILIES_OF_A_TRIAL = ("plain", "reasoning before", "talk after")


@dataclass(frozen=True, kw_only=True)
class CommandLine(RewardFlags):
    """Audits a verifier on responses made of the labels of rows."""

    data: tyro.conf.Positional[str]
    """The rows: a file, a directory or a hub data set, as in --dataset_mixer_list."""
    reward: str = ""
    """Verifier for all rows: a name, FILE.py or FILE.py:FUNCTION. Empty: the one that each row names."""
    answer: str = ""
    """Form in which the verifier reads an answer, with ANSWER at its place. Empty: of the known ones, the one in which
    most labels are accepted."""
    most_rows: int = 50
    """Rows that are drawn."""
    split: str = "train"
    """Split of the data set."""
    seed: int = 1
    """Fixes which rows are drawn."""
    threshold: float = 0.5
    """Least score of a response that is accepted."""
    least_j: float = -1.0
    """The exit status is 1 if J is smaller."""
    timeout_s: float = 10.0
    """Deadline of each response in seconds."""


class Labelled(NamedTuple):
    """A label with its verifier, and its row's prompt and columns for a reward file."""

    label: Any
    text: str
    verifier: str
    prompt: str
    columns: Any


class Judged(NamedTuple):
    """A case with its score; nan is none."""

    case: Case
    score: float
    accepted: bool


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def with_reward(flags: CommandLine) -> tuple[CommandLine, str]:
    """(the flags with --reward_file, the verifier's name) of --reward; "" for the rows' own. Raises UserError."""
    path, _, function = flags.reward.partition(".py")
    if not flags.reward.endswith(".py") and not function.startswith(":"):
        rewards.configure(flags, connect=True)
        return flags, flags.reward.lower()

    flags = replace(flags, reward_file=f"{path}.py")
    rewards.configure(flags, connect=True)
    names = list(user_files.FUNCTIONS)
    name = function.removeprefix(":").lower() or names[0]
    known = name in names and (function != "" or len(names) == 1)
    need(known, f"--reward {flags.reward}: give one function as FILE.py:NAME; there are {', '.join(names)}")
    return flags, name


def read(flags: CommandLine, verifier: str) -> tuple[list[Labelled], list[str]]:
    """The labels that cases can be made of, and why the others are left out. Raises ValueError."""
    functions = user_files.FUNCTIONS
    columns = sorted({column for function in functions.values() for column in function.columns})
    scoring = rows.Scoring(tuple(functions), (), tuple(columns))
    found = list(rows.read_rows(flags.data, flags.split))
    labelled = []
    left_out = []
    for where, row in rows.draw(flags.data, found, min(flags.most_rows, len(found)), flags.seed):
        if verifier and isinstance(row, dict):
            row = row | {"dataset": verifier}
        try:
            parsed = rows.fields_of(row, scoring)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        prompt = parsed["messages"][-1]["content"]
        for label, name in zip(parsed["ground_truths"], parsed["verifiers"], strict=True):
            text = text_of(label)
            problem = rewards.check_ground_truth(name, label, f"user: {prompt}", parsed["reward_columns"])
            if text is None:
                problem = f"label {str(label)[:60]!r} is not one line of text"
            if problem:
                left_out.append(f"{where}: {problem}")
            else:
                labelled.append(Labelled(label, str(text), name, prompt, parsed["reward_columns"]))
    return labelled, left_out


# ---------------------------------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------------------------------


def judge(cases: Sequence[Case], labelled: Sequence[Labelled], flags: CommandLine) -> list[Judged]:
    """The cases with their scores."""
    records = []
    for case in cases:
        row = labelled[case.row]
        tokens = len(case.response.split())
        prompt = f"user: {row.prompt}"
        records.append(RewardRecord(case.response, row.label, row.verifier, tokens, prompt, row.columns))
    results = rewards.score(records, flags.timeout_s)
    return [
        Judged(case, result.score, result.score >= flags.threshold) for case, result in zip(cases, results, strict=True)
    ]


def best_form(verifier: str, labelled: Sequence[Labelled], flags: CommandLine) -> str:
    """The form in which most plain answers of this verifier are accepted, also with talk around them. Prints it with
    that share."""
    some = [row for row in labelled if row.verifier == verifier][:ROWS_OF_A_TRIAL]
    forms = (flags.answer,) if flags.answer else FORMS
    shares = {}
    for form in forms:
        cases = []
        for i, row in enumerate(some):
            made = cases_of(i, form, {"LABEL": row.text})
            cases.extend(case for case in made if case.family in FAMILIES_OF_A_TRIAL)
        shares[form] = sum(one.accepted for one in judge(cases, some, flags)) / len(cases)
    best = max(shares, key=shares.__getitem__)
    print(f"{verifier}: answers are written as {best!r}, {shares[best]:.0%} of which are accepted plain or with talk")
    if shares[best] == 0.0:
        print("The verifier reads no such form: give its own with --answer")
    return best


def audit(labelled: Sequence[Labelled], flags: CommandLine) -> list[Judged]:
    """All cases of all labels, with their scores."""
    verifiers = sorted({row.verifier for row in labelled})
    forms = {verifier: best_form(verifier, labelled, flags) for verifier in verifiers}
    labels = [row.text for row in labelled]
    cases = []
    for i, row in enumerate(labelled):
        names = spellings(row.text, row.prompt, labels)
        cases.extend(cases_of(i, forms[row.verifier], names))
    return judge(cases, labelled, flags)


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------


def rate(judged: Sequence[Judged]) -> intervals.Estimate:
    """The share accepted, with its interval over rows. Missing scores do not count. Raises ValueError for no case."""
    known = [one for one in judged if not math.isnan(one.score)]
    need(known != [], "no response has a score: see the warnings above")
    values = [float(one.accepted) for one in known]
    row_of = [one.case.row for one in known]
    count = len(set(row_of))
    error = intervals.mean_of_clusters(values, row_of).error if count > 1 else None
    return intervals.share_of_clusters(sum(values) / len(values), error, count, len(values))


def youden(right: intervals.Estimate, wrong: intervals.Estimate) -> intervals.Estimate:
    """J = TPR - FPR. Its interval is J - sqrt((t - t_low)^2 + (f_high - f)^2) to J + sqrt((t_high - t)^2 +
    (f - f_low)^2), with t and f the two rates: a width also where both are perfect (Newcombe 1998)."""
    j = right.mean - wrong.mean
    below = math.hypot(right.mean - right.low, wrong.high - wrong.mean)
    above = math.hypot(right.high - right.mean, wrong.mean - wrong.low)
    return intervals.Estimate(j, math.hypot(right.error, wrong.error), j - below, j + above, right.n)


def shown(name: str, found: intervals.Estimate) -> str:
    """A rate as a line."""
    mean, low, high = (round(value, 3) + 0.0 for value in (found.mean, found.low, found.high))  # no -0.000
    return f"{name:20} {mean:6.3f}   95 % interval {low:.3f} to {high:.3f}"


def by_family(judged: Sequence[Judged]) -> str:
    """A table: family, whether its answers are right, cases, share accepted."""
    lines = []
    for right, families in ((True, RIGHT), (False, WRONG)):
        for family in families:
            cases = [one for one in judged if one.case.family == family and one.case.right == right]
            if cases:
                accepted = sum(one.accepted for one in cases)
                kind = "right" if right else "wrong"
                lines.append([family, kind, str(len(cases)), f"{accepted / len(cases):.2f}"])
    return table(["family", "answer is", "cases", "accepted"], lines, text=(0, 1))


def telling(judged: Sequence[Judged]) -> list[Judged]:
    """At most MOST_SHOWN misjudged cases: one of each family first, and wrong answers accepted first of all."""
    of_family: dict[tuple[bool, str], int] = {}
    ranked = []
    for place, one in enumerate(judged):
        if one.accepted == one.case.right or math.isnan(one.score):
            continue
        family = (one.case.right, one.case.family)
        seen = of_family.get(family, 0)
        of_family[family] = seen + 1
        ranked.append((seen, one.case.right, place, one))
    return [one for *_, one in sorted(ranked)[:MOST_SHOWN]]


def describe(one: Judged, row: Labelled) -> str:
    """A misjudged case as two lines."""
    verdict = "right, but refused" if one.case.right else "WRONG, but accepted"
    response = repr(one.case.response)
    if len(response) > LONGEST_SHOWN:
        response = response[:LONGEST_SHOWN] + "..."
    return f"{verdict}: {one.case.family} (label {row.text!r}, score {one.score:g})\n    {response}"


def report(judged: Sequence[Judged], labelled: Sequence[Labelled]) -> float:
    """Prints the audit and returns J."""
    right = rate([one for one in judged if one.case.right])
    wrong = rate([one for one in judged if not one.case.right])
    j = youden(right, wrong)
    missing = sum(math.isnan(one.score) for one in judged)
    print()
    print(by_family(judged))
    print()
    print(shown("true positives", right))
    print(shown("false positives", wrong))
    print(shown("Youden's J", j))
    print(f"{len(judged)} responses of {len(labelled)} labels, {missing} without a score")
    for one in telling(judged):
        print()
        print(describe(one, labelled[one.case.row]))
    return j.mean


def main() -> int:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        need("ANSWER" in (flags.answer or "ANSWER"), f"--answer {flags.answer}: write ANSWER where the answer goes")
        flags, verifier = with_reward(flags)
        labelled, left_out = read(flags, verifier)
        for line in left_out[:3]:
            print(f"left out: {line}")
        print(f"{len(labelled)} labels, {len(left_out)} left out")
        need(labelled != [], f"{flags.data}: no label can be audited")
        j = report(audit(labelled, flags), labelled)
    except ValueError as error:
        raise SystemExit(f"audit.py: {error}") from None
    return int(j < flags.least_j)


if __name__ == "__main__":
    sys.exit(main())
