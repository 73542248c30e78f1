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
from scripts.parts import rows, user_files
from scripts.reports.common import table

FAMILIES = tomllib.loads(Path(rewards.SCRIPTS, "prompts", "disguises.toml").read_text(encoding="utf-8"))
MOST_ROWS = 50
ROWS_OF_A_TRIAL = 10  # on which the form of an answer is found
NUMBER = re.compile(r"-?(?:\d{1,12}|\d{1,3}(?:,\d{3}){1,3})(?:\.\d{1,6})?")


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
    """A response to a row, its family, whether its answer is right, and its score; nan is none."""

    family: str
    right: bool
    record: RewardRecord
    score: float = math.nan

    @property
    def accepted(self) -> bool:
        return self.score >= 0.5


def read(flags: CommandLine) -> list[RewardRecord]:
    """A record without a response for each label that cases can be made of. Prints why a row is left out."""
    functions = user_files.FUNCTIONS
    columns = {column for function in functions.values() for column in function.columns}
    scoring = rows.Scoring(tuple(functions), (), tuple(columns))
    found = list(rows.read_rows(flags.data, "train"))
    labelled = []
    for where, row in rows.draw(flags.data, found, min(MOST_ROWS, len(found)), seed=1):
        if flags.reward and isinstance(row, dict):
            row = row | {"dataset": flags.reward.lower()}
        try:
            fields = rows.fields_of(row, scoring)
            prompt = f"user: {fields['messages'][-1]['content']}"
            for label, name in zip(fields["ground_truths"], fields["verifiers"], strict=True):
                problem = rewards.check_ground_truth(name, label, prompt, fields["reward_columns"])
                need(not problem, str(problem))
                need(is_text(label), f"label {str(label)[:60]!r} is not one line of text")
                labelled.append(RewardRecord("", label, name, 0, prompt, fields["reward_columns"]))
        except ValueError as error:
            print(f"left out: {where}: {rewards.printable(str(error))}")
    return labelled


def is_text(label: Any) -> bool:
    """Whether an answer can be made of a label: it is a number or one line, and no object, code or JSON."""
    text = str(label).strip()
    is_data = "\n" in text or text.startswith(("{", "[", "assert ", "def "))
    return isinstance(label, (str, int, float)) and text != "" and not is_data


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
    if label.upper() != label and re.fullmatch("[A-Za-z][A-Za-z ]{2,}", label):
        found["CAPITALS"] = label.upper()
    return found


def spellings_of_number(value: Decimal) -> dict[str, str]:
    """The spellings of a number and the wrong answers near it, by the names in templates."""
    found = {"NUMBER": f"{value:f}", "OTHER": f"{value + 1:f}"}
    found["GUESSES"] = ", ".join(f"{value + step:f}" for step in range(-5, 6))
    if value:
        found["OTHER_SIGN"] = f"{-value:f}"
    if value == int(value):
        found |= {"WHOLE": f"{int(value)}", "TWICE": f"{2 * int(value)}"}
    if abs(value) >= 1000:
        found["COMMAS"] = f"{value:,f}"
        found["TEX_COMMAS"] = found["COMMAS"].replace(",", "{,}")
    return found


def cases_of(row: RewardRecord, form: str, names: dict[str, str]) -> list[Case]:
    """The cases of a row, answers in this form: a family each, but for those of which a spelling is missing."""
    cases = []
    for kind in ("right", "wrong"):
        for family, template in FAMILIES[kind].items():
            if set(re.findall(r"@(\w+)@", template)) <= names.keys():
                formed = re.sub(r"\[\[(.*?)\]\]", lambda answer: form.replace("ANSWER", answer[1]), template)
                response = re.sub(r"@(\w+)@", lambda name: names[name[1]], formed)
                record = replace(row, response=response, num_tokens=len(response.split()))
                cases.append(Case(family, kind == "right", record))
    return cases


def judge(cases: Sequence[Case]) -> list[Case]:
    """The cases with their scores."""
    results = rewards.score([case.record for case in cases])
    return [case._replace(score=result.score) for case, result in zip(cases, results, strict=True)]


def best_form(labelled: Sequence[RewardRecord]) -> str:
    """The known form in which most right answers are accepted, of those that are made of the label alone."""

    def accepted(form: str) -> int:
        cases = [case for row in labelled for case in cases_of(row, form, {"LABEL": str(row.ground_truth)})]
        return sum(case.accepted for case in judge([case for case in cases if case.right]))

    return max(FAMILIES["forms"], key=accepted)


def audit(labelled: Sequence[RewardRecord]) -> list[Case]:
    """All cases of all labels, with their scores."""
    labels = [str(row.ground_truth).strip() for row in labelled]
    cases = []
    for verifier in sorted({row.dataset for row in labelled}):
        own = [row for row in labelled if row.dataset == verifier]
        form = best_form(own[:ROWS_OF_A_TRIAL])
        print(f"{verifier}: answers are written as {form!r}")
        for row in own:
            names = spellings(str(row.ground_truth).strip(), row.prompt.removeprefix("user: "), labels)
            cases += cases_of(row, form, names)
    return judge(cases)


def rate(cases: Sequence[Case], right: bool) -> float:
    """The share accepted of the cases with right or wrong answers. Missing scores do not count. Raises ValueError for
    no case."""
    known = [case.accepted for case in cases if case.right == right and not math.isnan(case.score)]
    need(known != [], "no response has a score: see the warnings above")
    return sum(known) / len(known)


def report(cases: Sequence[Case]) -> float:
    """Prints the audit and returns J."""
    lines = []
    for kind in ("right", "wrong"):
        for family in FAMILIES[kind]:
            tried = [case for case in cases if case.family == family]
            misjudged = [repr(case.record.response)[:60] for case in tried if case.accepted != case.right]
            accepted = sum(case.accepted for case in tried)
            lines.append([family, kind, f"{accepted} of {len(tried)}", *misjudged[:1]])
    print("\n" + table(["family", "answer is", "accepted", "misjudged"], lines, text=(0, 1, 3)))
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
