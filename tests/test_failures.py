"""A reward or an environment that crashes on every call ends the run, and a share of crashes does not."""

from collections import Counter

import pytest

import rewards
import utils
from scripts.parts import failures


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(failures, "WORKED", set())
    monkeypatch.setattr(failures, "CRASHES", Counter())
    monkeypatch.setattr(rewards, "WARNED", {("mine", "crash"): "TypeError: x (mine.py, line 3)"})


def counts(name, **statuses):
    return {f"reward/{name}_{status}": float(statuses.get(status, 0)) for status in utils.STATUSES}


def test_crashes_alone_end_the_run_with_the_line_of_the_file(fresh):
    failures.check(counts("mine", crash=7))  # too few to tell
    with pytest.raises(rewards.UserError, match=r"verifier mine crashed on every call.*line 3"):
        failures.check(counts("mine", crash=1))


@pytest.mark.parametrize("worked", ["ok", "no_answer", "timeout"])
def test_one_call_that_worked_is_enough_for_the_whole_run(fresh, worked):
    failures.check(counts("mine", crash=64, **{worked: 1}) | counts("my_no", ok=8, crash=8))
    failures.check(counts("mine", crash=64) | counts("my_no", crash=64))


def test_an_environment_ends_it_too(fresh, monkeypatch):
    monkeypatch.setattr(rewards, "WARNED", {("/tmp/bad.py", "crash"): "KeyError: 'x' (bad.py, line 9)"})
    failures.check({"env/good/crash_rate": 0.5})
    failures.check({"env/good/crash_rate": 1.0})
    with pytest.raises(rewards.UserError, match=r"environment bad crashed on every call.*line 9"):
        failures.check({"env/bad/crash_rate": 1.0})
