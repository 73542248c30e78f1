"""The audit of a verifier: a good one, one that accepts the label anywhere, one that always says no; and our own."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest

from rewards import RewardRecord
from scripts import audit
from tests.conftest import REPO

NUMBERS = ("18", "3", "70000", "540", "2.5", "-4")
WORDS = ("Paris", "a red apple", "George Washington", "photosynthesis", "gold", "yes")
TEX = ("\\frac{1}{3}", "x+1", "2\\sqrt{3}", "12")
REWARDS = """
def anywhere(response, ground_truth):
    return float(str(ground_truth) in response)

def never(response, ground_truth):
    return 0.0
"""
RE_SEARCH = {"several, last wrong", "several in a line"}  # the first <finish> ends the search
PAID_IN_PART = {"label or another", "another or label"}  # F1


@pytest.mark.parametrize(
    ("reward", "labels", "status", "least", "most"),
    [
        ("gsm8k", [*NUMBERS, "18 or 19"], 0, 0.95, 1.0),  # the last label is no number
        ("anywhere", NUMBERS, 1, -1.0, 0.5),
        ("never", NUMBERS, 1, 0.0, 0.0),
    ],
)
def test_the_program(tmp_path, reward, labels, status, least, most):
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [json.dumps({"question": "How many?", "ground_truth": label}) for label in labels]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    command = [sys.executable, REPO / "scripts" / "audit.py", "rows.jsonl", "--reward", reward, "--least_j", "0.9"]
    command += ["--reward_file", "mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("Youden's J")]
    assert least <= float(found.split()[2]) <= most
    left_out = sum("left out" in line and "row 7" in line for line in done.stdout.splitlines())
    assert left_out == len(labels) - len(NUMBERS)


def test_labels_that_are_no_text_are_left_out():
    assert not any(map(audit.is_text, ("a\nb", '{"x": 1}', ["assert f()"], {"x": 1}, None, " ")))
    assert audit.is_text(7) and audit.is_text(" x ")


@pytest.mark.parametrize("label", [*NUMBERS, "1,234", "0"])
def test_spellings_of_a_number_have_its_value_and_wrong_ones_another(label):
    value = Fraction(label.replace(",", ""))
    found = audit.spellings(label, "How many?", [])
    assert ("OTHER_SIGN" in found) == (value != 0)
    del found["PROMPT"], found["PADDING"], found["GUESSES"]
    for name in found.keys() - {"TWICE"}:
        plain = found[name].replace("{,}", "").replace(",", "")
        assert (Fraction(plain) == value) == (name not in ("OTHER", "OTHER_SIGN")), name


def test_every_family_is_made_of_some_label_once_a_row():
    made = set()
    for label in ("70000", "2.5", "3", "Paris"):
        row = RewardRecord("", label, "gsm8k", 0)
        cases = audit.cases_of(row, "<ANSWER>", audit.spellings(label, "How many?", ["Paris", "London"]))
        by_family = {case.family: case.record.response for case in cases}
        assert len(by_family) == len(cases) and all(
            case.right or case.record.response != f"<{label}>" for case in cases
        )
        assert by_family["bold"] == f"<**{label}**>" and by_family["empty answer"] == "<>"
        made |= {case.family for case in cases}
    assert made == audit.FAMILIES["right"].keys() | audit.FAMILIES["wrong"].keys()


@pytest.mark.parametrize("verifier, labels, least, accepted", [
    ("gsm8k", NUMBERS, 0.98, set()),
    ("gsm8k_strict", NUMBERS, 0.98, set()),
    ("gsm8k_verl", NUMBERS, 0.2, {"label or another", "thought never closed"}),
    ("math", NUMBERS + TEX, 0.9, set()),
    ("strict_math", NUMBERS + TEX, 0.9, set()),
    ("string_matcher", WORDS, 0.8, set()),
    ("puzzle", WORDS, 0.8, set()),
    ("flan", WORDS, 0.85, set()),
    ("re_search", WORDS, 0.7, RE_SEARCH),
    ("re_search_f1", WORDS, 0.6, RE_SEARCH | PAID_IN_PART),
    ("string_f1", WORDS, 0.8, PAID_IN_PART),
    ("passthrough", WORDS, 0.0, set()),
])  # fmt: skip
def test_our_verifiers_accept_no_wrong_answer_but_by_intent(verifier, labels, least, accepted):
    labelled = [RewardRecord("", label, verifier, 0, "user: Which one?") for label in labels]
    judged = audit.audit(labelled)
    assert {case.family for case in judged if case.accepted and not case.right} == accepted
    assert audit.rate(judged, True) - audit.rate(judged, False) >= least
