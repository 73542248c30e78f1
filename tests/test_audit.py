"""The audit of a verifier: a good one, one that accepts the label anywhere, one that always says no; and our own."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from scripts import audit
from scripts.reports import intervals
from scripts.reports.disguises import RIGHT, WRONG, cases_of, fill, spellings, text_of

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = ("18", "3", "70000", "540", "2.5", "-4")
WORDS = ("Paris", "a red apple", "George Washington", "photosynthesis", "gold", "yes")
TEX = ("\\frac{1}{3}", "x+1", "2\\sqrt{3}", "12")
REWARDS = """
def anywhere(response, ground_truth):
    return float(str(ground_truth) in response)

def never(response, ground_truth):
    return 0.0
"""


def run_audit(folder, labels, *flags):
    """(exit status, output) of the program on rows with these labels."""
    rows = [{"question": "How many?", "ground_truth": label} for label in labels]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def line_of(name, output):
    """The cells of the line that begins with this name, in the table or below it."""
    line = next(line for line in output.splitlines() if line.strip("| ").startswith(name))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_good_verifier_has_a_j_near_1_and_what_has_no_text_is_left_out(tmp_path):
    labels = [*NUMBERS, "18 or 19"]
    status, output = run_audit(tmp_path, labels, "--reward", "gsm8k", "--least_j", "0.95")
    assert status == 0, output
    assert "6 labels, 1 left out" in output and "row 7: label '18 or 19' is not one number" in output
    assert "'#### ANSWER', 100%" in output
    assert float(line_of("Youden's J", output)[0].split()[2]) > 0.95
    assert line_of("one decimal", output) == ["one decimal", "right", "5", "1.00"]
    assert "refused: thousands by space (label '70000', score 0)\n    '#### 70 000'" in output


def test_a_verifier_that_accepts_the_label_anywhere_is_found_out(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    status, output = run_audit(tmp_path, NUMBERS, "--reward", "mine.py:anywhere", "--least_j", "0.9")
    assert status == 1, output
    assert float(line_of("Youden's J", output)[0].split()[2]) < 0.5
    for family in ("label in passing", "label after", "list of guesses", "several, last wrong"):
        assert line_of(family, output)[3] == "1.00"
        assert f"WRONG, but accepted: {family}" in output
    assert line_of("another answer", output)[3] == "0.00"


def test_a_verifier_that_always_says_no_has_j_0(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    status, output = run_audit(tmp_path, NUMBERS, "--reward", "mine.py:never")
    assert (status, line_of("Youden's J", output)[0].split()[2]) == (0, "0.000"), output
    assert "give its own with --answer" in output
    status, output = run_audit(tmp_path, NUMBERS, "--reward", "mine.py")
    assert status == 1 and "give one function as FILE.py:NAME; there are anywhere, never" in output


def test_templates_by_hand():
    names = {"LABEL": "7", "OTHER": "8"}
    assert fill("no @OTHER@.\n[[**@LABEL@**]] [[]]", "<a>ANSWER</a>", names) == "no 8.\n<a>**7**</a> <a></a>"
    assert fill("[[@LABEL@ @WORDS@]]", "ANSWER", names) is None
    assert [text_of(label) for label in ("a\nb", '{"x": 1}', ["assert f()"], {"x": 1}, None, True, "")] == [None] * 7
    assert [text_of(label) for label in (7, " x ", ["Paris", "paris"])] == ["7", "x", "Paris"]


@pytest.mark.parametrize("label", [*NUMBERS, "1,234", "0"])
def test_spellings_of_a_number_have_its_value_and_wrong_ones_another(label):
    value = Fraction(label.replace(",", ""))
    found = spellings(label, "How many?", [])
    for name in ("NUMBER", "ONE_DECIMAL", "TWO_DECIMALS", "ZERO_AT_END", "FRACTION", "POWER", "FULLWIDTH", "ARABIC"):
        assert Fraction(found.get(name, label.replace(",", ""))) == value, name
    for name in ("COMMAS", "SPACES", "TEX_COMMAS"):
        digits = found.get(name, label).replace("{,}", "").replace(",", "").replace(" ", "")
        assert Fraction(digits) == value, name
    for name in ("OTHER", "OTHER_SIGN", "LONGER"):
        assert name not in found or Fraction(found[name]) != value
    assert ("OTHER_SIGN" in found) == (value != 0)


def test_every_family_is_made_of_some_label_once_a_row():
    made = set()
    for label in ("70000", "2.5", "3", "Paris"):
        cases = list(cases_of(0, "#### ANSWER", spellings(label, "How many?", ["Paris", "London"])))
        assert len({(case.right, case.family) for case in cases}) == len(cases)
        made |= {case.family for case in cases}
        wrong = [case.response for case in cases if not case.right]
        assert f"#### {label}" not in wrong
    assert made == RIGHT.keys() | WRONG.keys()


def test_j_and_its_interval_by_hand():
    right = intervals.Estimate(0.9, 0.03, 0.8, 0.95, 10)
    wrong = intervals.Estimate(0.2, 0.04, 0.15, 0.3, 10)
    j = audit.youden(right, wrong)
    assert j == pytest.approx((0.7, 0.05, 0.7 - (0.01 + 0.01) ** 0.5, 0.7 + (0.0025 + 0.0025) ** 0.5, 10))


def false_positives(verifier, labels):
    """(J, families of wrong answers that are accepted) of one of our verifiers."""
    labelled = [audit.Labelled(label, label, verifier, "Which one?", None) for label in labels]
    judged = audit.audit(labelled, audit.CommandLine(data=""))
    right = audit.rate([one for one in judged if one.case.right])
    wrong = audit.rate([one for one in judged if not one.case.right])
    return right.mean - wrong.mean, {one.case.family for one in judged if one.accepted and not one.case.right}


FIRST_COUNTS = {"several, last wrong", "several in a line"}  # re_search: the first <finish> ends the search
PAID_IN_PART = {"label or another", "another or label"}  # F1


@pytest.mark.parametrize("verifier, labels, least, accepted", [
    ("gsm8k", NUMBERS, 0.98, set()),
    ("gsm8k_strict", NUMBERS, 0.98, set()),
    ("gsm8k_verl", NUMBERS, 0.15, {"label or another", "thought never closed"}),
    ("string_matcher", WORDS, 0.8, set()),
    ("puzzle", WORDS, 0.8, set()),
    ("flan", WORDS, 0.85, set()),
    ("re_search", WORDS, 0.7, FIRST_COUNTS),
    ("re_search_f1", WORDS, 0.6, FIRST_COUNTS | PAID_IN_PART),
    ("string_f1", WORDS, 0.8, PAID_IN_PART),
    ("passthrough", WORDS, 0.0, set()),
])  # fmt: skip
def test_our_verifiers_accept_no_wrong_answer_but_by_intent(verifier, labels, least, accepted):
    j, found = false_positives(verifier, labels)
    assert found == accepted
    assert j >= least


@pytest.mark.parametrize("verifier", ["math", "strict_math"])
def test_our_verifiers_of_mathematics_accept_no_wrong_answer(verifier):
    j, found = false_positives(verifier, [*NUMBERS, *TEX])
    assert found == set()
    assert j >= 0.9
