"""Audit a verifier: does it accept right answers in disguise, and refuse wrong ones that are dressed up?

    python scripts/audit.py rows.jsonl                                # with the verifier that each row names
    python scripts/audit.py openai/gsm8k:main --split test --reward gsm8k
    python scripts/audit.py rows.jsonl --reward my_reward.py --least_j 0.9
    python scripts/audit.py rows.jsonl --reward my_reward.py:brevity --answer "Answer: ANSWER"

Responses are made of the rows' labels, by family (scripts/prompts/disguises.toml). A family of which a label has no
spelling is left out for that label. A response is accepted if its score is at least --threshold. Prints for each family
the share accepted; the true-positive rate (right answers accepted), the false-positive rate (wrong ones accepted) and
Youden's J, which is their difference: 1 is a perfect verifier, 0 one that cannot tell; and ten cases that were
misjudged. A case counts once, whatever its family. Intervals are of 95 %, over rows; that of J joins the two rates' as
if they were independent (Newcombe 1998, method 10).

Exit status 1: J is below --least_j, or nothing could be audited.
"""

import math
import re
import string
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import tyro

if not __package__:  # run as a file: imports start at the root, from whatever directory it is run
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import rewards
from rewards import RewardFlags, RewardRecord, need
from scripts.parts import equality, rows, user_files
from scripts.reports import intervals
from scripts.reports.common import table

FAMILIES = tomllib.loads(Path(rewards.SCRIPTS, "prompts", "disguises.toml").read_text(encoding="utf-8"))
MOST_SHOWN = 10
LONGEST_SHOWN = 160  # characters of a response
ROWS_OF_A_TRIAL = 20  # on which the form of an answer is found
FAMILIES_OF_A_TRIAL = ("plain", "reasoning before", "talk after")
NUMBER = re.compile(r"-?(?:\d{1,12}|\d{1,3}(?:,\d{3}){1,3})(?:\.\d{1,6})?")
ONLY_LETTERS = re.compile(r"[a-z][a-z ]{2,}", re.IGNORECASE)
FULLWIDTH_DIGITS = str.maketrans(string.digits, "０１２３４５６７８９")
ARABIC_DIGITS = str.maketrans(string.digits, "٠١٢٣٤٥٦٧٨٩")
IN_WORDS = {number: word for word, number in equality.WORDS.items()}


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


class Case(NamedTuple):
    """A response to the row of a number, its family, whether its answer is right, and its score; nan is none."""

    row: int
    family: str
    right: bool
    response: str
    score: float = math.nan
    accepted: bool = False


# --- Rows, as records without a response ------------------------------------------------------------------------------


def set_reward(flags: CommandLine) -> str:
    """Set the flags up; returns the name of the verifier of --reward, "" for the rows' own. Raises UserError."""
    path, _, function = flags.reward.partition(".py")
    if not flags.reward.endswith(".py") and not function.startswith(":"):
        rewards.configure(flags, connect=True)
        return flags.reward.lower()

    rewards.configure(replace(flags, reward_file=f"{path}.py"), connect=True)
    names = list(user_files.FUNCTIONS)
    only_name = names[0] if len(names) == 1 else ""
    name = function.removeprefix(":").lower() or only_name
    need(name in names, f"--reward {flags.reward}: give one function as FILE.py:NAME; there are {', '.join(names)}")
    return name


def read(flags: CommandLine, verifier: str) -> tuple[list[RewardRecord], list[str]]:
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
            left_out.append(f"{where}: {error}")
            continue
        prompt = f"user: {parsed['messages'][-1]['content']}"
        for label, name in zip(parsed["ground_truths"], parsed["verifiers"], strict=True):
            problem = rewards.check_ground_truth(name, label, prompt, parsed["reward_columns"])
            if text_of(label) == "":
                problem = f"label {str(label)[:60]!r} is not one line of text"
            if problem:
                left_out.append(f"{where}: {problem}")
            else:
                labelled.append(RewardRecord("", label, name, 0, prompt, parsed["reward_columns"]))
    return labelled, left_out


def text_of(label: Any) -> str:
    """The answer that a label names as one line of text; the first of several. "" for objects, code and JSON."""
    if isinstance(label, (list, tuple)) and label:
        label = label[0]
    if isinstance(label, bool) or not isinstance(label, (str, int, float)):
        return ""
    text = str(label).strip()
    is_data = text.startswith(("{", "[", "assert ", "def "))
    return "" if is_data or "\n" in text else text


# --- Cases ------------------------------------------------------------------------------------------------------------


def number_of(text: str) -> Decimal | None:
    """The value of a text that is one plain number, else None."""
    return Decimal(text.replace(",", "")) if NUMBER.fullmatch(text) else None


def spellings_of_number(value: Decimal) -> dict[str, str]:
    """The spellings of a number and the wrong answers near it, by the names in templates."""
    plain = f"{value:f}"
    found = {"NUMBER": plain, "OTHER": f"{value + 1:f}", "LONGER": f"{plain}7"}
    found["GUESSES"] = ", ".join(f"{value + step:f}" for step in range(-5, 6))
    if value:
        found["OTHER_SIGN"] = f"{-value:f}"
    whole = int(value)
    if value != whole:
        return found | {"DECIMAL_COMMA": plain.replace(".", ","), "ZERO_AT_END": f"{plain}0"}

    digits = str(whole)
    found |= {"ONE_DECIMAL": f"{whole}.0", "TWO_DECIMALS": f"{whole}.00"}
    found |= {"FRACTION": f"{2 * whole}/2", "TEX_FRACTION": f"\\frac{{{2 * whole}}}{{2}}"}
    found |= {"FULLWIDTH": digits.translate(FULLWIDTH_DIGITS), "ARABIC": digits.translate(ARABIC_DIGITS)}
    if whole in IN_WORDS:
        found["WORDS"] = IN_WORDS[whole]
    if whole >= 10:
        found["POWER"] = f"{digits[0]}.{digits[1:]}e{len(digits) - 1}"
    if abs(whole) >= 1000:
        commas = f"{whole:,}"
        found |= {"COMMAS": commas, "SPACES": commas.replace(",", " "), "TEX_COMMAS": commas.replace(",", "{,}")}
    return found


def spellings(label: str, prompt: str, labels: Sequence[str]) -> dict[str, str]:
    """What the @NAMES@ of templates stand for. `labels` are those of all rows: others' are wrong answers for words."""
    found = {"LABEL": label, "PADDING": "Let me check this once more. " * 100}
    if prompt.strip() != label:
        found["PROMPT"] = prompt
    value = number_of(label)
    if value is not None:
        return found | spellings_of_number(value)

    others = sorted({other for other in labels if other.lower() != label.lower() and number_of(other) is None})
    if others:
        found["OTHER"] = others[sum(map(ord, label)) % len(others)]
        found["GUESSES"] = ", ".join([*others[:5], label, *others[5:10]])
    if ONLY_LETTERS.fullmatch(label) and label.upper() != label:
        found["CAPITALS"] = label.upper()
    return found


def fill(template: str, form: str, names: dict[str, str]) -> str | None:
    """The response of a template, with answers in this form, or None if a spelling is missing."""
    if not set(re.findall(r"@(\w+)@", template)) <= names.keys():
        return None
    formed = re.sub(r"\[\[(.*?)\]\]", lambda answer: form.replace("ANSWER", answer[1]), template)
    return re.sub(r"@(\w+)@", lambda name: names[name[1]], formed)


def cases_of(row: int, form: str, names: dict[str, str]) -> list[Case]:
    """The cases of a row, a family each."""
    cases = []
    for kind in ("right", "wrong"):
        for family, template in FAMILIES[kind].items():
            response = fill(template, form, names)
            if response is not None:
                cases.append(Case(row, family, kind == "right", response))
    return cases


# --- Scores -----------------------------------------------------------------------------------------------------------


def judge(cases: Sequence[Case], labelled: Sequence[RewardRecord], flags: CommandLine) -> list[Case]:
    """The cases with their scores."""
    records = []
    for case in cases:
        tokens = len(case.response.split())
        records.append(replace(labelled[case.row], response=case.response, num_tokens=tokens))
    scores = [result.score for result in rewards.score(records, flags.timeout_s)]
    scored = zip(cases, scores, strict=True)
    return [case._replace(score=score, accepted=score >= flags.threshold) for case, score in scored]


def best_form(verifier: str, labelled: Sequence[RewardRecord], flags: CommandLine) -> str:
    """The form in which most plain answers of this verifier are accepted, also with talk around them. Prints it with
    that share."""
    some = [row for row in labelled if row.dataset == verifier][:ROWS_OF_A_TRIAL]
    shares = {}
    for form in [flags.answer] if flags.answer else FAMILIES["forms"]:
        made = [case for i, row in enumerate(some) for case in cases_of(i, form, {"LABEL": text_of(row.ground_truth)})]
        tried = judge([case for case in made if case.family in FAMILIES_OF_A_TRIAL], some, flags)
        shares[form] = sum(case.accepted for case in tried) / len(tried)
    best = max(shares, key=shares.__getitem__)
    print(f"{verifier}: answers are written as {best!r}, {shares[best]:.0%} of which are accepted plain or with talk")
    if shares[best] == 0.0:
        print("The verifier reads no such form: give its own with --answer")
    return best


def audit(labelled: Sequence[RewardRecord], flags: CommandLine) -> list[Case]:
    """All cases of all labels, with their scores."""
    verifiers = sorted({row.dataset for row in labelled})
    forms = {verifier: best_form(verifier, labelled, flags) for verifier in verifiers}
    labels = [text_of(row.ground_truth) for row in labelled]
    cases: list[Case] = []
    for i, row in enumerate(labelled):
        names = spellings(labels[i], row.prompt.removeprefix("user: "), labels)
        cases += cases_of(i, forms[row.dataset], names)
    return judge(cases, labelled, flags)


# --- Report -----------------------------------------------------------------------------------------------------------


def rate(cases: Sequence[Case], right: bool) -> intervals.Estimate:
    """The share accepted of the cases with right or wrong answers, with its interval over rows. Missing scores do not
    count. Raises ValueError for no case."""
    known = [case for case in cases if case.right == right and not math.isnan(case.score)]
    need(known != [], "no response has a score: see the warnings above")
    values = [float(case.accepted) for case in known]
    row_of = [case.row for case in known]
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


def report(cases: Sequence[Case], labelled: Sequence[RewardRecord]) -> float:
    """Prints the audit and returns J."""
    rates = {"true positives": rate(cases, True), "false positives": rate(cases, False)}
    rates["Youden's J"] = youden(*rates.values())
    families: dict[tuple[bool, str], list[Case]] = {}
    for case in sorted(cases, key=lambda case: not case.right):
        families.setdefault((case.right, case.family), []).append(case)
    lines = []
    misjudged = []
    for (right, family), of_family in families.items():
        accepted = sum(case.accepted for case in of_family)
        lines.append([family, "right" if right else "wrong", str(len(of_family)), f"{accepted / len(of_family):.2f}"])
        misjudged += [case for case in of_family if case.accepted != right and not math.isnan(case.score)][:1]
    print()
    print(table(["family", "answer is", "cases", "accepted"], lines, text=(0, 1)))
    print()
    for name, found in rates.items():
        mean, low, high = (round(value, 3) + 0.0 for value in (found.mean, found.low, found.high))  # no -0.000
        print(f"{name:20} {mean:6.3f}   95 % interval {low:.3f} to {high:.3f}")
    missing = sum(math.isnan(case.score) for case in cases)
    print(f"{len(cases)} responses of {len(labelled)} labels, {missing} without a score")
    for case in sorted(misjudged, key=lambda case: case.right)[:MOST_SHOWN]:
        verdict = "right, but refused" if case.right else "WRONG, but accepted"
        label = text_of(labelled[case.row].ground_truth)
        print(f"\n{verdict}: {case.family} (label {label!r}, score {case.score:g})")
        print(f"    {case.response[:LONGEST_SHOWN]!r}")
    return rates["Youden's J"].mean


def main() -> int:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        need("ANSWER" in (flags.answer or "ANSWER"), f"--answer {flags.answer}: write ANSWER where the answer goes")
        labelled, left_out = read(flags, set_reward(flags))
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
