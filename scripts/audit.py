"""Audit a verifier: does it accept right answers in disguise, and refuse wrong ones that are dressed up?

    python scripts/audit.py rows.jsonl                                # with the verifier that each row names
    python scripts/audit.py openai/gsm8k:main --reward gsm8k
    python scripts/audit.py rows.jsonl --reward_file my_reward.py --reward brevity --least_j 0.9

Responses are made of the labels of 50 rows, by family (scripts/prompts/disguises.toml), in the form of answers that the
verifier accepts most. One is accepted if it scores at least 0.5. Prints the share accepted of each family, of the right
answers and of the wrong ones, and Youden's J, their difference. Exit status 1: J is below --least_j, or no label can be
audited.
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
from scripts.reports.common import table

FAMILIES = tomllib.loads(Path(rewards.SCRIPTS, "prompts", "disguises.toml").read_text(encoding="utf-8"))
MOST_ROWS = 50
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
    """Verifier for all rows, also a function of --reward_file. Empty: the ones that each row names."""
    least_j: float = -1.0
    """The exit status is 1 if J is smaller."""


class Case(NamedTuple):
    """A response to the row of a number, its family, whether its answer is right, and its score; nan is none."""

    row: int
    family: str
    right: bool
    response: str
    score: float = math.nan

    @property
    def accepted(self) -> bool:
        return self.score >= 0.5


def read(flags: CommandLine) -> list[RewardRecord]:
    """The labels that cases can be made of. Prints why a row is left out. Raises ValueError."""
    functions = user_files.FUNCTIONS
    columns = {column for function in functions.values() for column in function.columns}
    scoring = rows.Scoring(tuple(functions), (), tuple(columns))
    found = list(rows.read_rows(flags.data, "train"))
    labelled = []
    for where, row in rows.draw(flags.data, found, min(MOST_ROWS, len(found)), seed=1):
        if flags.reward and isinstance(row, dict):
            row = row | {"dataset": flags.reward.lower()}
        try:
            labelled += records_of(rows.fields_of(row, scoring))
        except ValueError as error:
            print(f"left out: {where}: {rewards.printable(str(error))}")
    return labelled


def records_of(fields: dict[str, Any]) -> list[RewardRecord]:
    """A record without a response for each label of a row. Raises ValueError for a label of which no case is made."""
    prompt = f"user: {fields['messages'][-1]['content']}"
    columns = fields["reward_columns"]
    records = []
    for label, name in zip(fields["ground_truths"], fields["verifiers"], strict=True):
        problem = rewards.check_ground_truth(name, label, prompt, columns)
        need(not problem, str(problem))
        need(text_of(label) != "", f"label {str(label)[:60]!r} is not one line of text")
        records.append(RewardRecord("", label, name, 0, prompt, columns))
    return records


def text_of(label: Any) -> str:
    """The answer that a label names as one line of text; the first of several. "" for objects, code and JSON."""
    if isinstance(label, (list, tuple)) and label:
        label = label[0]
    if isinstance(label, bool) or not isinstance(label, (str, int, float)):
        return ""
    text = str(label).strip()
    is_data = text.startswith(("{", "[", "assert ", "def "))
    return "" if is_data or "\n" in text else text


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
    if NUMBER.fullmatch(label):
        return found | spellings_of_number(Decimal(label.replace(",", "")))

    others = sorted({other for other in labels if other.lower() != label.lower() and not NUMBER.fullmatch(other)})
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
    """The cases of a row: a family each, but for those of which a spelling is missing."""
    cases = []
    for kind in ("right", "wrong"):
        for family, template in FAMILIES[kind].items():
            response = fill(template, form, names)
            if response is not None:
                cases.append(Case(row, family, kind == "right", response))
    return cases


def judge(cases: Sequence[Case], labelled: Sequence[RewardRecord]) -> list[Case]:
    """The cases with their scores."""
    records = []
    for case in cases:
        tokens = len(case.response.split())
        records.append(replace(labelled[case.row], response=case.response, num_tokens=tokens))
    results = rewards.score(records)
    return [case._replace(score=result.score) for case, result in zip(cases, results, strict=True)]


def best_form(labelled: Sequence[RewardRecord]) -> str:
    """The known form in which most answers are accepted, plain and with talk around them."""
    accepted = {}
    for form in FAMILIES["forms"]:
        made = []
        for i, row in enumerate(labelled):
            made += cases_of(i, form, {"LABEL": text_of(row.ground_truth)})
        tried = judge([case for case in made if case.family in FAMILIES_OF_A_TRIAL], labelled)
        accepted[form] = sum(case.accepted for case in tried)
    return max(accepted, key=accepted.__getitem__)


def audit(labelled: Sequence[RewardRecord]) -> list[Case]:
    """All cases of all labels, with their scores."""
    forms = {}
    for verifier in sorted({row.dataset for row in labelled}):
        own = [row for row in labelled if row.dataset == verifier]
        forms[verifier] = best_form(own[:ROWS_OF_A_TRIAL])
        print(f"{verifier}: answers are written as {forms[verifier]!r}")
    labels = [text_of(row.ground_truth) for row in labelled]
    cases: list[Case] = []
    for i, row in enumerate(labelled):
        names = spellings(labels[i], row.prompt.removeprefix("user: "), labels)
        cases += cases_of(i, forms[row.dataset], names)
    return judge(cases, labelled)


def rate(cases: Sequence[Case], right: bool) -> float:
    """The share accepted of the cases with right or wrong answers. Missing scores do not count. Raises ValueError for
    no case."""
    known = [case for case in cases if case.right == right and not math.isnan(case.score)]
    need(known != [], "no response has a score: see the warnings above")
    return sum(case.accepted for case in known) / len(known)


def report(cases: Sequence[Case]) -> float:
    """Prints the audit and returns J."""
    families: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: not case.right):
        families.setdefault(case.family, []).append(case)
    lines = []
    for family, of_family in families.items():
        right = of_family[0].right
        share = sum(case.accepted for case in of_family) / len(of_family)
        misjudged = [repr(case.response)[:60] for case in of_family if case.accepted != right]
        shown = misjudged[0] if misjudged else ""
        lines.append([family, "right" if right else "wrong", str(len(of_family)), f"{share:.2f}", shown])
    print("\n" + table(["family", "answer is", "cases", "accepted", "misjudged"], lines, text=(0, 1, 4)))
    true_positives = rate(cases, True)
    false_positives = rate(cases, False)
    print(f"\nright accepted {true_positives:.3f}, wrong accepted {false_positives:.3f}")
    print(f"Youden's J {true_positives - false_positives:.3f}")
    return true_positives - false_positives


def main() -> int:
    flags = tyro.cli(CommandLine, use_underscores=True)
    try:
        rewards.configure(flags, connect=True)
        labelled = read(flags)
        need(labelled != [], f"{flags.data}: no label can be audited")
        j = report(audit(labelled))
    except ValueError as error:
        raise SystemExit(f"audit.py: {error}") from None
    return int(j < flags.least_j)


if __name__ == "__main__":
    sys.exit(main())
