"""scripts/study.py: its statistics cover what they promise, its arms are what they say, its rows can be made again."""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import psutil
import pytest
from scipy import stats

import grpo
import utils
from scripts import study as study_program
from scripts.data.make_tasks import make_task
from scripts.reports.intervals import holm, wilson
from scripts.studies import arms, controls, endpoints, lanes, noise, record, report, statistics, tasks
from tests.conftest import REPO

STUDIES = 3000  # simulated studies of a coverage; its standard error is 0.004


def draws(kind, n, rng):
    """(studies, n) differences, means over 5 tasks, around 0.1: normal ones, or with one run in ten that collapses."""
    noise = rng.normal(0.1, 0.05, (STUDIES, n, 5))
    if kind == "collapses":
        noise -= 0.3 * (rng.random(noise.shape) < 0.1)  # of the arm
        noise += 0.3 * (rng.random(noise.shape) < 0.1)  # of the base
    return noise.mean(2)


@pytest.mark.parametrize("kind", ["normal", "collapses"])
@pytest.mark.parametrize("n", [4, 8, 24])
def test_the_t_interval_covers_95_percent(kind, n):
    """93 to 97 %, also where one run in ten collapses."""
    rng = np.random.default_rng(1)
    intervals = [statistics.t_interval(values) for values in draws(kind, n, rng)]
    covered = np.mean([low <= 0.1 <= high for _, low, high in intervals])
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize(
    ("count", "n", "least"), [(1, 8, 0.84), (2, 8, 0.88), (3, 8, 0.90), (3, 24, 0.93), (5, 8, 0.91)]
)
def test_the_t_interval_is_too_short_where_the_arm_alone_collapses(count, n, least):
    """What scripts/studies/README.md says of it: 86 % with one task and 8 seeds, and more with more tasks or seeds."""
    rng = np.random.default_rng(1)
    noise = rng.normal(0.1, 0.05, (STUDIES, n, count))
    noise -= 0.3 * (rng.random(noise.shape) < 0.1)
    intervals = [statistics.t_interval(values) for values in noise.mean(2)]
    covered = np.mean([low <= 0.07 <= high for _, low, high in intervals])
    assert least <= covered <= least + 0.05


def test_areas_that_differ_by_rounding_are_a_tie():
    """A record keeps curves to 5 digits. The areas (6 / 2 + 40 + 60 + 60 + 62 / 2) / 256 and (6 / 2 + 37 + 61 + 62 +
    62 / 2) / 256 are equal, and were 0.7578125 and 0.75781 in its rows."""
    areas = []
    for right in ([6, 40, 60, 60, 62], [6, 37, 61, 62, 62]):
        held_out = [lanes.short(count / 64) for count in right]
        areas.append(endpoints.area(curve(held_out)))
    assert 0 < abs(areas[0] - areas[1]) < statistics.ROUNDING
    differences = np.full((1, 8), areas[0] - areas[1])
    result = statistics.compare({"arm": differences})["arm"]
    assert (result.verdict, result.signs[:2], result.improvement.value) == ("cannot tell", (0, 0), 0.5)


def test_differences_that_are_equal_but_for_rounding():
    """Arms that learn nothing have the same area for each seed: the t test would divide by what float64 rounds."""
    values = [0.7 - 0.6, 0.4 - 0.3, 0.2 - 0.1]
    assert 0 < np.std(values, ddof=1) < 1e-15
    assert statistics.t_test(values) == 0.25  # three of three signs
    assert statistics.seeds_needed(0.1, float(np.std(values, ddof=1))) == 6
    assert statistics.seeds_needed(1e-17, 0.0) is None


def test_the_t_interval_is_scipys():
    values = [0.1, 0.4, -0.2, 0.3]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert statistics.t_interval(values)[1:] == pytest.approx((expected.low, expected.high))
    assert statistics.t_test(values) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert statistics.t_interval([0.2]) == (0.2, -math.inf, math.inf) and statistics.t_test([0.2]) == 1.0
    assert statistics.t_test([0.0, 0.0]) == 1.0 and statistics.t_test([0.5, 0.5]) == 0.5


def test_signs_by_hand():
    """Five of five above: 2 / 32; a tie is left out; the smallest p of n signs is 2 / 2^n."""
    assert statistics.sign_test([1, 2, 3, 4, 5]) == (5, 0, pytest.approx(0.0625), 0.0625)
    assert statistics.sign_test([1, 2, -3, 0]) == (2, 1, pytest.approx(1.0), 0.25)
    assert statistics.sign_test([0, 0]) == (0, 0, 1.0, 1.0)


@pytest.mark.parametrize("is_shared", [False, True])
def test_one_study_in_twenty_finds_what_is_not_there(is_shared):
    """Of studies of 5 arms that are all equal to the base, 5 % call any of them better or worse, also where the arms'
    differences are from the same runs of the base."""
    rng = np.random.default_rng(2)
    differences = rng.normal(0, 0.05, (4000, 5, 6))
    if is_shared:
        differences -= rng.normal(0, 0.05, (4000, 1, 6))
    p_values = stats.ttest_1samp(differences, 0.0, axis=2).pvalue  # as t_test: test_the_t_interval_is_scipys
    wrong = np.mean([min(holm(of_study)) < 0.05 for of_study in p_values.tolist()])
    assert 0.03 <= wrong <= 0.06  # the standard error is 0.003


def test_who_looks_after_each_seed_finds_what_is_not_there():
    """What scripts/studies/README.md says of it: 22 % of studies, from 4 to 24 seeds."""
    rng = np.random.default_rng(3)
    values = rng.normal(0, 0.05, (4000, 24))
    found = np.zeros(4000, dtype=bool)
    for n in range(4, 25):
        found |= stats.ttest_1samp(values[:, :n], 0.0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.22, abs=0.02)  # 3 standard errors


def test_seeds_needed_find_the_difference():
    """With as many seeds 80 % of the studies see it; the smallest effect is the same question turned round."""
    n = statistics.seeds_needed(0.03, 0.03)
    rng = np.random.default_rng(3)
    p_values = stats.ttest_1samp(rng.normal(0.03, 0.03, (STUDIES, n)), 0.0, axis=1).pvalue
    assert 0.78 <= np.mean(p_values < 0.05) <= 0.86  # n is whole
    assert statistics.smallest_effect(0.03, n) <= 0.03 < statistics.smallest_effect(0.03, n - 1)
    assert statistics.seeds_needed(1e-6, 1.0) is None and statistics.seeds_needed(0.1, 0.0) == 6


LEVELS = {"normal": (0.5, 0.5, 0.5), "collapses": (0.5, 0.5, 0.5), "shared": (0.5, 0.5, 0.5), "levels": (0.2, 0.8)}


def areas(kind, n, studies, rng):
    """(studies, tasks, n) areas: normal ones; with one run in ten that collapses; with what a seed has on all tasks; of
    two tasks of very different levels."""
    centres = np.array(LEVELS[kind])[:, None]
    values = rng.normal(centres, 0.05, (studies, len(centres), n))
    if kind == "collapses":
        values -= 0.4 * (rng.random(values.shape) < 0.1)
    if kind == "shared":
        values += rng.normal(0, 0.05, (studies, 1, n))
    return values


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("n", [12, 16, 24])
def test_the_interval_of_the_interquartile_mean_covers_95_percent(kind, n):
    """93 to 97 %, also where one run in ten collapses, where tasks differ and where they are alike. The standard error
    is 0.005."""
    rng = np.random.default_rng(4)
    (many,) = areas(kind, 300_000, 1, rng)
    middle = statistics.interquartile_mean(many.ravel())
    intervals = [statistics.iqm_interval(table, draws=300) for table in areas(kind, n, 2000, rng)]
    covered = np.mean([low <= middle <= high for _, low, high in intervals])
    assert 0.93 <= covered <= 0.97


def test_the_interval_of_the_interquartile_mean_is_too_short_where_tasks_differ_and_runs_collapse():
    """What scripts/studies/README.md says of it: 88 % with 12 seeds."""
    rng = np.random.default_rng(4)
    many = areas("levels", 300_000, 1, rng)
    many -= 0.25 * (rng.random(many.shape) < 0.1)
    middle = statistics.interquartile_mean(many.ravel())
    tables = areas("levels", 12, 2000, rng)
    tables -= 0.25 * (rng.random(tables.shape) < 0.1)
    intervals = [statistics.iqm_interval(table, draws=300) for table in tables]
    covered = np.mean([low <= middle <= high for _, low, high in intervals])
    assert 0.86 <= covered <= 0.91


def test_the_interquartile_mean_is_scipys():
    """The middle half of 8 and of 11 values; a table has it from 12 seeds on."""
    assert statistics.interquartile_mean(np.array([0, 1, 2, 3, 4, 5, 6, 700])) == 3.5
    table = np.random.default_rng(4).random((3, 11))
    assert statistics.interquartile_mean(table) == pytest.approx(stats.trim_mean(table, 0.25, axis=1))
    assert statistics.iqm_interval(table) is None
    table = np.hstack([table, table])
    assert statistics.iqm_interval(table).value == pytest.approx(stats.trim_mean(table, 0.25, axis=None))


def test_no_verdict_comes_of_a_number_that_is_none():
    result = statistics.compare({"x": np.array([[math.nan, 0.1, 0.2]])})["x"]
    assert result.verdict == "cannot tell"


def test_improvement_counts_ties_half():
    """One task is one draw a seed: Wilson's interval of 8 draws. Seeds that are all equal count as one draw each."""
    wins = statistics.improvement(np.array([[1.0, -1.0, 0.0, 1.0, 1.0, -1.0, 0.0, 1.0]]))
    assert wins.value == 0.625 and wins[1:] == pytest.approx(wilson(0.625, 8))
    assert statistics.improvement(np.ones((3, 8)))[:2] == (1.0, pytest.approx(wilson(1.0, 8)[0]))  # as if of one task
    assert statistics.improvement(-np.ones((3, 8))).low == 0.0
    two_of_three = np.repeat([[1.0], [1.0], [-1.0]], 10, axis=1)  # seeds are equal but for what float64 rounds
    assert statistics.improvement(two_of_three)[1:] == pytest.approx(wilson(2 / 3, 10))
    assert statistics.improvement(np.array([[1.0, -1.0, 0.0, 1.0, 1.0]])) == (0.7, -math.inf, math.inf)


@pytest.mark.parametrize("n", [6, 8, 12, 24])
def test_the_interval_of_the_improvement_covers_95_percent(n):
    """93 to 99 % of the studies of 1, 2, 3 and 5 tasks, independent or alike, for three chances. A share of few draws
    has few values, so that its cover differs from chance to chance. Their mean shows that it is not too wide."""
    rng = np.random.default_rng(5)
    covers = []
    for tasks_of_study, alike in [(1, 0.0), (2, 0.0), (3, 0.0), (5, 0.0), (3, 0.5), (5, 0.5), (3, 1.0)]:
        for chance in (0.5, 0.73, 0.9):
            of_seed = rng.normal(size=(1000, 1, n))
            of_run = rng.normal(size=(1000, tasks_of_study, n))
            values = math.sqrt(alike) * of_seed + math.sqrt(1 - alike) * of_run + stats.norm.ppf(chance)
            intervals = [statistics.improvement(differences) for differences in values]
            covers.append(np.mean([low <= chance <= high for _, low, high in intervals]))
    assert min(covers) >= 0.92  # 0.93, less two standard errors
    assert max(covers) <= 0.995 and np.mean(covers) <= 0.98


@pytest.mark.parametrize(("chances", "least"), [((0.5, 0.9), 0.89), ((0.9, 0.99), 0.83)])
def test_the_interval_of_the_improvement_at_its_worst(chances, least):
    """What scripts/studies/README.md says of it: of one task it covers 89 % at worst, and 83 % near 1, exactly."""
    worst = 1.0
    for n in range(6, 25):
        intervals = [statistics.improvement(np.repeat([[1.0, -1.0]], [k, n - k], axis=1)) for k in range(n + 1)]
        for chance in np.linspace(*chances, 101):
            weights = stats.binom.pmf(range(n + 1), n, chance)
            covered = sum(w for w, (_, low, high) in zip(weights, intervals, strict=True) if low <= chance <= high)
            worst = min(worst, covered)
    assert worst == pytest.approx(least, abs=0.005)


# --- Endpoints --------------------------------------------------------------------------------------------------------


def curve(held_out, kl=0.1):
    steps = 2 * (len(held_out) - 1)
    values = [float(i) for i in range(1, steps + 1)]
    return endpoints.Curve(
        evaluated=list(range(0, steps + 1, 2)),
        held_out=held_out,
        sampled=[value / 10 for value in values],
        tokens=list(values),
        seconds=list(values),
        kl=[kl] * steps,
        entropy=list(values),
        gap=list(values),
        informative=[0.5] * steps,
        length=list(values),
        turns=list(values),
    )


def test_endpoints_by_hand():
    """Trapezoids (0 + 0.5) / 2 and (0.5 + 0.9) / 2; the target 0.5 is reached at step 2, after 1 + 2 tokens."""
    values = endpoints.endpoints(curve([0.0, 0.5, 0.9]), 0.5)
    assert values["area"] == pytest.approx((0.25 + 0.7) / 2)
    assert (values["steps"], values["tokens"], values["seconds"]) == (2, 3, 3)
    assert (values["final"], values["sampled"], values["collapsed"]) == (0.9, pytest.approx(0.3), 0)
    late = endpoints.endpoints(curve([0.0, 0.5, 0.1]), 0.9)
    assert (late["steps"], late["tokens"], late["collapsed"]) == (4, 10, 1)  # censored at the horizon
    there = endpoints.endpoints(curve([0.5, 0.6]), 0.5)
    assert (there["steps"], there["tokens"], there["seconds"]) == (0, 0, 0)  # censored at the start


def test_a_task_has_metrics_of_its_own():
    """A game's curves are its score and the share of games won, not the share right; turns are counted."""
    step = {"training_step": 1, "batch/total_prompts": 4, "batch/filtered_prompts": 1}
    step |= {"objective/scores": 0.7, "env/guess/found": 0.3, "val/turns": 2.5}
    step |= {"eval/objective/verifiable_correct_rate": 0.1, "objective/verifiable_correct_rate": 0.2}
    rows = [step, step | {"training_step": 2}]
    game = endpoints.curve_of(rows, tasks.TASKS["guess"].measured)
    assert (game.evaluated, game.held_out, game.sampled, game.turns) == ([1, 2], [0.7] * 2, [0.3] * 2, [2.5] * 2)
    other = endpoints.curve_of(rows, {})
    assert (other.evaluated, other.held_out, other.sampled) == ([1, 2], [0.1] * 2, [0.2] * 2)
    assert endpoints.endpoints(curve([0.0, 0.5]), 0.9)["turns"] == 2.0


# --- Arms -------------------------------------------------------------------------------------------------------------


def test_arms_are_read():
    arm = arms.parse_arm("base", "HEAD")
    assert (arm.name, arm.diff, arm.script, arm.flags) == ("base", "", "grpo.py", ())
    arm = arms.parse_arm("sapo@scripts/forks/sapo.diff: --loss_fn sapo", "HEAD")
    assert arm.diff == (REPO / "scripts/forks/sapo.diff").read_text() and arm.flags == ("--loss_fn", "sapo")
    assert arms.parse_arm("late: grpo_fast.py --async_steps 4", "HEAD").script == "grpo_fast.py"
    for wrong, words in {
        "x: --seed 3": "--seed is the same for all arms",
        "x: --total-episodes 64": "--total_episodes is the same for all arms",
        "x: --no_eval_on_step_0": "--eval_on_step_0 is the same for all arms",
        "x@scripts/forks/nothing.diff": "no file",
        "x: 3": "write NAME",
        ": --beta 1": "write NAME",
        "mine/x: --beta 1": "A name has no /",  # its log would be in another folder
        "x@no-such-branch": "no branch no-such-branch",
        "x: --remap_verifier learned=coin,gsm8k=easy": "gsm8k=easy changes how held-out rows are judged",
        "x: --chat_template_name tulu": "--chat_template_name is the same for all arms",
        f"x: --reward_file {__file__}": "is a file that others do not have",
        "x: --reward_file ../r.py": "../r.py is a file that others do not have",
        "x: --reward_file data/r.py": "data/r.py is a file that others do not have",
        "x: --env_file=~/r.py": "~/r.py is a file that others do not have",
        "x: --eval_freq 1": "--eval_freq: --local_eval_every is the same for all arms",  # open-instruct's names
        "x: --chat_template=tulu": "--chat_template: --chat_template_name is the same for all arms",
        "x: --stop_strings 'a": "No closing quotation",
        "x@HEAD: --beta 1": "Begin it on the code without the idea",  # HEAD is the study's commit, so the base has it
        "x my-branch --beta 1": "NAME@BRANCH: --FLAGS",  # a colon is missing
        "x@my-branch --beta 1": "NAME@BRANCH: --FLAGS",
        "x: --async_steps 4": 'does nothing in grpo.py: write "x: grpo_fast.py --FLAGS"',
    }.items():
        with pytest.raises(arms.ArmError, match=words):
            arms.parse_arm(wrong, "HEAD")


def test_a_value_in_quotes_is_one_value():
    assert arms.parse_arm("x: --stop_strings 'a b'", "HEAD").flags == ("--stop_strings", "a b")
    assert list(arms.flags_of(("--a", "1", "2", "--no_b", "--c=3"))) == [("a", ["1", "2"]), ("b", []), ("c", ["3"])]


def test_a_branch_s_diff_does_not_depend_on_the_settings_of_git(tmp_path, monkeypatch):
    """diff.noprefix, an external diff and colours; a picture, a file that is no UTF-8, a name that git would quote."""
    here = tmp_path / "repository"
    here.mkdir()

    def git(*words):
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, check=True)
        return done.stdout.decode().strip()

    git("init", "-q", "-b", "main")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b")
    (here / "grpo.py").write_text("one\n")
    git("add", "grpo.py")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    git("switch", "-qc", "mine")
    (here / "grpo.py").write_text("two \n")
    (here / "picture.png").write_bytes(bytes(range(256)))
    (here / "größe.txt").write_bytes("größe\n".encode("latin-1"))
    git("add", ".")
    git("commit", "-qm", "idea")
    settings = """diff.noprefix=true diff.external=false color.ui=always diff.context=0 core.abbrev=40
        diff.orderFile=/nonexistent apply.whitespace=error core.autocrlf=true"""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))  # a copy is in no repository
    for setting in settings.split():
        git("config", "--global", *setting.split("="))
    monkeypatch.setattr(arms, "ROOT", here)
    arm = arms.parse_arm("mine@mine", commit)
    (tmp_path / "copies").mkdir()
    facts = json.loads(json.dumps(study_program.arm_row(arm)))  # as a record keeps it
    copy = arms.make_copy(arms.Arm("mine", facts["diff"]), commit, tmp_path / "copies")
    assert (copy / "grpo.py").read_bytes() == b"two \n"
    assert (copy / "picture.png").read_bytes() == bytes(range(256))
    assert (copy / "größe.txt").read_bytes() == "größe\n".encode("latin-1")
    with pytest.raises(arms.ArmError, match="no commit 1111.*git fetch"):
        arms.make_copy(arm, "1" * 40, tmp_path)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository in place of ours: functions that run git and that commit a file, and its commit of grpo.py."""
    here = tmp_path / "repository"
    here.mkdir()

    def git(*words):
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, check=True)
        return done.stdout.decode().strip()

    def commit(name, text):
        (here / name).write_text(text)
        git("add", ".")
        git("commit", "-qm", text.strip())
        return git("rev-parse", "HEAD")

    git("init", "-q", "-b", "main")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b")
    commit("grpo_fast.py", "fast\n")
    monkeypatch.setattr(arms, "ROOT", here)
    return git, commit, commit("grpo.py", "one\n")


def test_a_branch_brings_no_commits_of_others_into_its_arm(repository):
    """A study of an older commit, and a branch that left main later: what main did in between was in the arm alone."""
    git, commit, first = repository
    later = commit("grpo.py", "one\nof others\n")
    git("switch", "-qc", "mine")
    commit("idea.py", "mine\n")
    git("switch", "-q", "main")
    words = f"mine has 1 commits after the study's.*git rebase --onto {first[:12]} {later[:12]} mine"
    with pytest.raises(arms.ArmError, match=words):
        arms.parse_arm("mine@mine", first)
    assert "of others" not in arms.parse_arm("mine@mine", later).diff  # a study of today's code

    git("switch", "-q", "mine")  # main is not asked: a branch on which one stands is taken as it is
    assert "of others" in arms.parse_arm("mine@mine", first).diff
    git("switch", "-q", "main")
    git("branch", "-q", "early", first)
    git("switch", "-q", "early")
    commit("idea.py", "early\n")
    git("switch", "-q", "main")
    assert arms.parse_arm("early@early", first).diff == arms.parse_arm("early@early", later).diff


def test_an_idea_in_grpo_fast_is_not_run_by_grpo(repository):
    """The arm would be the base by another name."""
    git, commit, first = repository
    git("switch", "-qc", "mine")
    commit("grpo_fast.py", "faster\n")
    (arms.ROOT / "tests").mkdir()
    commit("tests/test_mine.py", "a test\n")
    git("switch", "-q", "main")
    with pytest.raises(arms.ArmError, match="changes grpo_fast.py alone, and runs grpo.py"):
        arms.parse_arm("mine@mine", first)
    assert arms.parse_arm("mine@mine: grpo_fast.py", first).script == "grpo_fast.py"


def test_what_a_diff_changes_is_told(capsys):
    """Files with lines; many files by their number. Another rewards.py judges the held-out rows too."""
    diff = "".join(f"--- a/{n}.py\n+++ b/{n}.py\n@@ -1 +1,2 @@\n-old\n+new\n+more\n" for n in ("grpo", "rewards"))
    gone = "--- a/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-old\n"
    assert arms.size_of(diff + gone) == "grpo.py, rewards.py: 4 lines more, 3 less"
    assert arms.size_of(diff * 3) == "6 files: 12 lines more, 6 less"
    study_program.tell_of_diff(arms.Arm("x", diff))
    assert "arm x has another rewards.py, which judges its held-out rows too" in capsys.readouterr().out
    study_program.tell_of_diff(arms.Arm("base"))
    assert capsys.readouterr().out == ""


def test_a_diff_beside_the_user_is_found(tmp_path, monkeypatch):
    (tmp_path / "mine.diff").write_text("a diff\n")
    monkeypatch.chdir(tmp_path)
    assert arms.parse_arm("m@mine.diff", "HEAD").diff == "a diff\n"
    assert arms.parse_arm("r@scripts/forks/rloo.diff", "HEAD").diff  # of the repository
    (tmp_path / "mine.diff").write_bytes("größe\n".encode("latin-1"))
    arm = arms.parse_arm("m@mine.diff", "HEAD")
    assert json.loads(json.dumps(arm.diff)) == arm.diff and arm.diff_hash
    (tmp_path / "mine.diff").write_text("")
    (tmp_path / "folder.diff").mkdir()
    for name, words in {"mine": "is empty", "folder": "no file"}.items():
        with pytest.raises(arms.ArmError, match=words):
            arms.parse_arm(f"m@{name}.diff", "HEAD")


def test_flags_of_an_arm_replace_those_of_the_base():
    base = ("--beta", "0", "--list", "a", "1.0", "--shuffle")
    assert arms.merge_flags(base, ("--beta", "0.05", "--no_shuffle")) == "--list a 1.0 --beta 0.05 --no_shuffle".split()
    twice = ("--length", "14", "--list", "a", "1.0", "--length", "64")  # of a scale, then of a task
    assert arms.merge_flags(twice, ()) == "--list a 1.0 --length 64".split()
    assert arms.merge_flags(("--a_b", "1", "--c"), ("--a-b", "2", "--no-c")) == "--a-b 2 --no-c".split()


@pytest.mark.parametrize("scale", tasks.SCALES)
def test_every_task_s_flags_are_flags(scale):
    """Of all scales, with what a control adds: grpo.py takes the line that a study makes of them."""
    for name in tasks.SCALES[scale].tasks:
        flags = study_program.base_flags(tasks.SCALES[scale], name, 2)
        line = arms.merge_flags(flags, ("--learning_rate", "0"))
        args = utils.parse_args(grpo.Args, line)
        assert args.learning_rate == 0 and grpo.num_training_steps(args) == 2
        assert (args.local_eval_every > 0) == (not name.startswith("guess"))
        assert args.response_length == {"calculator": 64, "guess_plain": 128}.get(name, args.response_length)


def test_a_copy_is_of_the_commit_and_has_the_diff(tmp_path):
    (tmp_path / "x.diff").write_text("")
    commit = arms.git("rev-parse", "HEAD").decode().strip()
    arm = arms.parse_arm("rloo@scripts/forks/rloo.diff", commit)
    plain = arms.make_copy(arms.Arm("base"), commit, tmp_path)
    forked = arms.make_copy(arm, commit, tmp_path)
    assert (plain / "grpo.py").read_bytes() == arms.git("show", f"{commit}:grpo.py")
    assert "rloo" in (forked / "grpo.py").read_text() and arms.code_hash(plain) != arms.code_hash(forked)
    with pytest.raises(arms.ArmError, match="does not apply"):
        bad = "--- a/grpo.py\n+++ b/grpo.py\n@@ -1 +1 @@\n-nothing\n+more\n"
        arms.make_copy(arms.Arm("bad", bad), commit, tmp_path)


# --- Verifiers that err -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judge", "youden"), [(noise.j_06, 0.6), (noise.j_03, 0.3), (noise.j_0, 0), (noise.j_minus_03, -0.3)]
)
def test_a_verifier_errs_as_often_as_its_name_says(judge, youden):
    """Of 8,000 right answers and of as many wrong ones the share (1 - J) / 2 is judged wrongly, whatever the place."""
    answers = ["7", "3"] * 4
    judged = np.array([judge(answers, ["7"] * 8, f"user: question {i}") for i in range(2000)])
    right = judged[:, 0::2]
    wrong = judged[:, 1::2]
    assert right.mean(0) == pytest.approx([(1 + youden) / 2] * 4, abs=0.05)  # 4.5 standard errors
    assert right.mean() - wrong.mean() == pytest.approx(youden, abs=0.03)
    together = (right[:, 0] == right[:, 1]).mean()  # equal responses of a group
    assert together == pytest.approx((1 + youden**2) / 2, abs=0.05)


def test_the_coin_of_the_controls_knows_no_answer(tmp_path):
    """Over the rows of each task of the fly it accepts right answers as often as wrong ones: half of them."""
    for name in tasks.SCALES["fly"].tasks:
        make_task(name, tmp_path)
        lines = (tmp_path / name / "train.jsonl").read_text().splitlines()
        accepted = {True: [], False: []}
        for row in map(json.loads, lines):
            prompt = "user: " + row["messages"][0]["content"]
            for digit in "0123456789":
                accepted[digit == row["ground_truth"]].append(controls.coin(digit, row["ground_truth"], prompt))
        assert np.mean(accepted[True]) == pytest.approx(0.5, abs=0.12)  # 320 throws: 4 standard errors
        assert np.mean(accepted[False]) == pytest.approx(0.5, abs=0.04)


def test_a_verifier_errs_again_in_the_same_way():
    """The same for the same group, so that a run can be made again; another draw for another prompt or group."""
    answers = ["7"] * 64
    labels = ["7"] * 64
    first = noise.j_0(answers, labels, "user: a")
    assert first == noise.j_0(answers, labels, "user: a")
    assert first != noise.j_0(answers, labels, "user: b")
    assert first[1:] != noise.j_0(["3", *answers[1:]], labels, "user: a")[1:]


# --- Records ----------------------------------------------------------------------------------------------------------

STUDY = {
    "commit": "c",
    "scale": "fly",
    "steps": 4,
    "evaluate_every": 2,
    "threads": 1,
    "tasks": {"t": []},
    "targets": {"t": 0.9},
}


def measured(of_run, target=0.9):
    """A run's curve, and what is read off it."""
    return {"curve": vars(of_run), "endpoints": endpoints.endpoints(of_run, target)}


def record_of(*rows):
    """The record of these rows, unchecked."""
    found = record.Record()
    for row in rows:
        found.take(row)
    return found


CONTROL_FLAGS = {arm.name: arm for arm in map(record.control, tasks.CONTROLS)}


def arm_row(name, number):
    """The row of an arm: the base and its noise floor without flags, a control with its own, any other with a flag."""
    row = {"kind": "arm", "name": name, "script": "grpo.py", "flags": [], "diff": ""}
    if name in CONTROL_FLAGS:
        return row | {"flags": list(CONTROL_FLAGS[name].flags), "diff": CONTROL_FLAGS[name].diff}
    if number and name != tasks.AGAIN:
        row["flags"] = ["--vf", str(number)]
    return row


def rows_of(areas, task="t", commit="c", **others):
    """A record of one task in which arm -> areas of seeds 1, 2, ..."""
    content = STUDY | {"commit": commit, "tasks": {task: []}, "targets": {task: 0.9}} | others
    study = {"kind": "study", **content, "hash": record.hash_of(content), "begun": 0}
    rows = [study]
    start = min(value for values in areas.values() for value in values) if areas else 0.0  # one model, one start
    for number, (arm, values) in enumerate(areas.items()):
        rows.append(arm_row(arm, number))
        for seed, value in enumerate(values, 1):
            later = (4 * value - start) / 3
            row = {"kind": "run", "study": study["hash"], "task": task, "arm": arm, "seed": seed}
            row["run_seed"] = seed + tasks.AGAIN_SHIFT * (arm == tasks.AGAIN)
            of_run = curve([start, later, later])
            of_run.seconds[0] += seed / 1e4 + number / 1e6 + (task == "u") / 1e8  # no two runs take the same time
            row |= measured(of_run) | {"code": "of no diff", "packages": {}, "processor": "p"}
            row |= {"omp_num_threads": "1", "data_hash": "d", "model_hash": "m"}
            rows.append(row | {"weights": f"of area {value}"})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_arm_that_changes_nothing_is_told(tmp_path):
    """All of its runs end with the weights of the base."""
    rows = rows_of({"base": [0.5, 0.6, 0.55], "idle": [0.5, 0.6, 0.55], "x": [0.5, 0.6, 0.6]})
    rows[-1]["weights"] = "others"
    text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert re.search("^idle +the same: its 3 runs end with the weights of base, to the bit$", text, re.MULTILINE)
    assert re.search(r"^x +\+0.017 .* cannot tell", text, re.MULTILINE)


def test_a_task_on_which_the_base_learns_nothing_is_told(tmp_path):
    """The fly on a task of the 135M model: all arms are equal there, and the table only said so."""
    rows = rows_of({"base": [0.0, 0.0], "x": [0.0, 0.0]})
    bases = [row for row in rows if row.get("arm") == "base"]
    for row in bases:
        row["curve"]["informative"] = [0.0] * len(row["curve"]["informative"])
    text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert "t: no group of base had a gradient in 2 runs, so it learned nothing there" in text

    bases[1]["curve"]["informative"][-1] = 0.125
    text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert "had a gradient" not in text


def test_verdicts_in_words(tmp_path):
    base = [0.50, 0.52, 0.48, 0.51, 0.49, 0.50]
    areas = {
        "base": base,
        "good": [value + 0.1 + 0.01 * i for i, value in enumerate(base)],
        "bad": [value - 0.1 - 0.01 * i for i, value in enumerate(base)],
        "same": [value + 0.02 * (-1) ** i for i, value in enumerate(base)],
        "coin": [value - 0.3 - 0.01 * i for i, value in enumerate(base)],
        "again": [0.51, 0.49, 0.50, 0.52, 0.48, 0.50],
    }
    path = write(tmp_path / "r.jsonl", rows_of(areas))
    text, fit = report.text_of(record.read([path]))
    lines = {line.split()[0]: line for line in text.splitlines() if re.match(r"\w.*\[", line)}
    assert "  better;" in lines["good"] and "  worse;" in lines["bad"] and "  cannot tell;" in lines["same"]
    assert "this difference needs" in lines["same"] and "above in 6 and below in 0 of 6" in lines["good"]
    assert fit and lines["coin"].endswith("worse") and "holds 0" in lines["noise"]
    report.draw(record.read([path]), tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 1000

    areas["coin"] = areas["good"]
    text, fit = report.text_of(record.read([write(path, rows_of(areas))]))
    assert not fit and "NOT WORSE" in text and "unfit" in text


def test_a_value_that_a_run_has_not_is_null(tmp_path):
    """The KL without a reference policy. Rows of before have NaN there, which is no JSON."""
    rows = rows_of({"base": [0.5, 0.6]})
    for row in rows:
        if row["kind"] == "run":
            row["curve"]["kl"] = [None] * len(row["curve"]["kl"])
            row["endpoints"]["kl"] = None
    path = write(tmp_path / "r.jsonl", rows)
    now = record.read([path])
    path.write_text(path.read_text().replace('"kl": null', '"kl": NaN'))
    assert "NaN" in path.read_text() and record.read([path]) == now
    assert re.search(r"^base +2 .* - ", report.text_of(now)[0], re.MULTILINE)
    with record.appending(tmp_path / "new.jsonl") as append:
        append(rows[0])
        with pytest.raises(ValueError, match="not JSON compliant"):
            append(rows[-1] | {"wall_seconds": math.nan})
    for path in sorted((REPO / "scripts/studies/records").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=lambda word, path=path: pytest.fail(f"{path} has {word}"))


def test_arms_are_shown_task_by_task_where_they_are_few(tmp_path):
    first = rows_of({"base": [0.5, 0.52], "x": [0.6, 0.63]})
    second = rows_of({"base": [0.3, 0.31], "x": [0.2, 0.22]}, "u")
    paths = [write(tmp_path / "t", first), write(tmp_path / "u", second)]
    text, _ = report.text_of(record.read(paths))
    assert re.search(r"^  x +\+0.105 \[.*\]  on t alone, 2 seeds$", text, re.MULTILINE)
    assert re.search(r"^  x +-0.095 \[.*\]  on u alone, 2 seeds$", text, re.MULTILINE)
    assert re.search(r"^the start model: 0.50 on t, 0.20 on u$", text, re.MULTILINE)
    assert "no controls (--controls)" in text


def test_warnings_of_runs_are_in_the_table(tmp_path):
    rows = rows_of({"base": [0.5, 0.52], "x": [0.6, 0.63]})
    for row in rows[-2:]:
        row["warnings"] = ["this copy of grpo.py ignores --beta"]
    text, _ = report.text_of(record.read([write(tmp_path / "t", rows)]))
    assert text.count("arm x: WARNING: this copy of grpo.py ignores --beta") == 1


def test_equal_differences_have_no_interval(tmp_path):
    """Two seeds of 64 questions may well have the same one. Only the sign test judges then, which needs 6 seeds."""
    base = [0.50, 0.52, 0.48, 0.51, 0.49, 0.53]
    lines = []
    for n in (2, 6):
        rows = rows_of({"base": base[:n], "x": [value + 0.1 for value in base[:n]], "again": base[:n]})
        text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
        lines += re.findall("^x .*equal.*", text, re.MULTILINE)
        assert "noise floor: +0.000 without an interval" in text
    few, more = lines
    words = "the differences of its 2 seeds are equal, so they have no interval"
    assert few.split(maxsplit=1)[1] == f"+0.100  cannot tell: {words}; p 0.5 by the sign test"
    assert "+0.100  better: " in more and more.endswith("; p 0.0312 by the sign test")


def test_the_chance_has_an_interval_from_six_seeds_on(tmp_path):
    base = [0.50, 0.52, 0.48, 0.51, 0.49, 0.53]
    shown = []
    for n in (5, 6):
        areas_of_x = [value + 0.01 * i for i, value in enumerate(base[:n], 1)]
        text, _ = report.text_of(
            record.read([write(tmp_path / "r.jsonl", rows_of({"base": base[:n], "x": areas_of_x}))])
        )
        shown += re.findall("above base with chance [^;\n]*", text)
    assert shown == ["above base with chance 1.00", "above base with chance 1.00 [0.61, 1.00]"]


def test_the_numbers_to_beat_are_the_bases_and_those_of_better_arms(tmp_path):
    base = [0.50, 0.52, 0.48, 0.51]
    rows = rows_of({"base": base, "good": [value + 0.1 for value in base], "bad": [value - 0.1 for value in base]})
    for row in rows:
        if row["kind"] == "run" and row["arm"] == "good":  # at the target at step 2, with areas above the base's
            of_run = curve([0.4 + row["seed"] / 1000, 0.9, 0.4])
            of_run.tokens[:2] = [100.0, 100.0 + row["seed"]]
            of_run.seconds = [1.0, 2.0, 3.0, 5.0 + row["seed"]]
            row |= measured(of_run)
    text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    _, shown = text.split("to the target")
    assert "bad" not in shown
    assert re.search(r"^t +base +0.90 +0/4 ", shown, re.MULTILINE)
    # by hand: 201, 202, 203, 204 have the mean 202.5, the deviation 1.291 and t(3) 3.182
    assert re.search(r"^t +good +0.90 +4/4 +2.0 \[2.0, 2.0\] +202 \[200, 205\] ", shown, re.MULTILINE)


def test_holm_is_over_the_arms_that_have_seeds(tmp_path):
    rows = rows_of({"base": [0.5, 0.52, 0.48], "x": [0.6, 0.61, 0.59], "planned": []})
    text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert "Holm over 1 arms" in text


def test_a_control_without_seeds_is_no_proof(tmp_path):
    rows = rows_of({"base": [0.5, 0.52, 0.48], "coin": []})
    text, fit = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert not fit and re.search(
        "^coin +no seed with all tasks yet", text.partition("controls, which")[2], re.MULTILINE
    )


def test_a_control_is_told_task_by_task(tmp_path):
    """It loses in the mean, and wins on one of the two tasks."""
    paths = []
    for task, lost in (("t", 0.4), ("u", -0.1)):
        levels = [0.5, 0.52, 0.47]
        rows = rows_of({"base": levels, "coin": [x - lost - 0.01 * i for i, x in enumerate(levels)]}, task)
        paths.append(write(tmp_path / task, rows))
    text, fit = report.text_of(record.read(paths))
    assert fit
    assert re.search(r"^  coin +-0.410 .* worse on t alone, 3 seeds$", text, re.MULTILINE)
    assert re.search(r"^  coin +\+0.090 .* cannot tell on u alone, 3 seeds$", text, re.MULTILINE)


def test_the_noise_floor_is_that_of_the_base(tmp_path):
    rows = rows_of({"base": [0.5, 0.52, 0.48], "x": [0.6, 0.61, 0.59], "again": [0.5, 0.5, 0.5]})
    next(row for row in rows if row.get("name") == "x")["flags"] = ["--beta", "1"]
    known = record.read([write(tmp_path / "r.jsonl", rows)])
    assert "noise floor, base against itself" in report.text_of(known)[0]
    assert "no noise floor: the arm again is another one than x" in report.text_of(known, "x")[0]
    words = ["run", "--out", "r", "--controls", "--arms", "mine: --beta 1"]
    of_study = study_program.arms_of(study_program.parser().parse_args(words), record.Record({"commit": "HEAD"}))
    assert of_study[-1] == arms.Arm("again", flags=("--beta", "1"))


def test_differences_of_tasks_that_cancel_are_a_tie():
    (result,) = statistics.compare({"x": np.array([[0.1, 0.3, 0.2], [-0.1, -0.3 + 1e-17, 0.1]])}).values()
    assert (result.signs.above, result.signs.below) == (1, 0)
    (result,) = statistics.compare({"x": np.array([[0.1, 0.1]])}).values()  # equal: no deviation to compare with
    assert result.p == 0.5 and result.verdict == "cannot tell"


def test_controls_are_compared_with_the_base_of_the_record(tmp_path):
    """Whatever --base is: with lr0 as the base, no control would lose."""
    rows = rows_of({"base": [0.5, 0.52, 0.48], "lr0": [0.1, 0.13, 0.12], "coin": [0.15, 0.18, 0.16]})
    text, fit = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]), "lr0")
    assert fit and "difference from lr0" in text
    assert re.search(r"^coin +-0.337 \[.*worse$", text, re.MULTILINE)
    assert re.search(r"^lr0 +-0.383 \[.*worse$", text, re.MULTILINE)


def test_a_record_without_a_run_is_told(tmp_path):
    with pytest.raises(record.RecordError, match="has no run yet"):
        report.text_of(record.read([write(tmp_path / "r.jsonl", rows_of({}))]))


def test_failures_are_told_where_there_is_nothing_else(tmp_path):
    study_row, row, first = rows_of({"base": [0.5]})
    failure = {name: first[name] for name in ("study", "task", "arm", "seed")}
    failure |= {"kind": "failure", "code": 1, "log": "no memory"}
    with pytest.raises(record.RecordError, match="no run yet\n.*\nt base seed 1: exit status 1: no memory"):
        report.text_of(record.read([write(tmp_path / "r.jsonl", [study_row, row, failure])]))


def test_equal_weights_with_other_curves_are_not_the_same(tmp_path):
    """Of a game at learning rate 0 the weights are equal, whatever the arm does to the score."""
    rows = rows_of({"base": [0.5, 0.6], "x": [0.7, 0.8]})
    for row in rows:
        row |= {"weights": "w"} if row["kind"] == "run" else {}
    text, _ = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert "the same" not in text and re.search(r"^x +\+0.200", text, re.MULTILINE)


def test_the_seeds_of_a_record_are_told(tmp_path):
    """Those that are gone too."""
    assert report.ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10" and report.ranges([4]) == "4"
    rows = rows_of({"base": [0.5, 0.6, 0.4, 0.5]})
    rows.pop(3)
    assert "; seeds 1, 3-4" in report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))[0]


def test_what_a_study_has_in_another_way_is_told(tmp_path):
    """The base of a study that others send may have a learning rate of 0, or an easy target."""
    flags = list(study_program.base_flags(tasks.SCALES["fly"], "last", 4))
    study = {"scale": "fly", "steps": 4, "tasks": {"last": flags}, "targets": {"last": tasks.TASKS["last"].target}}
    assert study_program.not_of_scale(study) == []
    study["tasks"]["last"] = [*flags, "--learning_rate", "0"]
    study["targets"]["last"] = 0.01
    (line,) = study_program.not_of_scale(study)
    assert line.endswith("--learning_rate, the target, 0.01")
    (line,) = study_program.not_of_scale(study | {"tasks": {"t": []}})
    assert line.startswith("t at the scale fly is not in")


def test_a_seed_counts_when_both_arms_have_it(tmp_path):
    path = write(tmp_path / "r.jsonl", rows_of({"base": [0.5, 0.5, 0.5], "x": [0.6, 0.6]}))
    assert report.paired_seeds(record.read([path]), "x", "base") == [1, 2]


def test_studies_that_differ_in_their_tasks_are_one_record(tmp_path, monkeypatch, capsys):
    """Of other commits, code and processors too, if the runs of a task share theirs. The base's area is the mean over
    the tasks."""
    first = write(tmp_path / "t", rows_of({"base": [0.5, 0.7], "x": [0.6, 0.8]}))
    rows = rows_of({"base": [0.3, 0.3], "x": [0.2, 0.4]}, "u", commit="d")
    second = write(
        tmp_path / "u",
        [row | {"code": "z", "processor": "q"} if row["kind"] == "run" else row for row in rows],
    )
    both = record.read([first, second])
    assert list(both.study["tasks"]) == ["t", "u"]
    assert report.comparisons_of(both, ["x"], "base")["x"].difference.value == pytest.approx(0.05)
    for tasks_asked, value in (("t", "+0.100"), ("u", "+0.000"), ("t u", "+0.050")):
        words = ["study.py", "table", str(first), str(second), "--tasks", *tasks_asked.split()]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            study_program.main()
        printed = capsys.readouterr().out
        assert end.value.code == 0 and re.search(rf"^x +\{value} ", printed, re.MULTILINE)
        processors = re.findall("^processor: (.*)$", printed, re.MULTILINE)
        expected = {"t": ["p"], "u": ["q"], "t u": ["p (t)", "q (u)"]}
        assert [words.replace(", threads: 1", "") for words in processors] == expected[tasks_asked]
    assert {task for task, _, _ in both.of_tasks(["t"]).runs} == {"t"}
    with pytest.raises(record.RecordError, match="no task z: there are t, u"):
        both.of_tasks(["z"])


@pytest.mark.parametrize(
    "rows, words",
    [
        (rows_of({"base": [0.5]}, "u", scale="player"), "differ in scale: fly and player"),
        (rows_of({"base": [0.5]}, "t", commit="d", targets={"t": 0.8}), "differ in targets of t: 0.9 and 0.8"),
        (rows_of({"base": [0.5]}, "t", commit="d", tasks={"t": ["--beta"]}), "differ in tasks of t"),
        (rows_of({"base": [0.4]}, "t", commit="d"), "run t base 1 has two rows that differ"),
    ],
)
def test_studies_that_differ_in_more_are_not(tmp_path, rows, words):
    first = write(tmp_path / "t", rows_of({"base": [0.5]}))
    with pytest.raises(record.RecordError, match=words):
        record.read([first, write(tmp_path / "u", rows)])


def other_code():
    """The rows of another arm, without a diff, whose code is not the base's."""
    return [row | {"code": "z"} if row["kind"] == "run" else row for row in rows_of({"": [], "x": [0.5]})[2:]]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda rows: rows[-1].update(processor="q"), "another processor of t"),
        (lambda rows: rows[-1].update(data_hash="e"), "another data_hash of t"),
        (lambda rows: rows[-1].update(code="z"), "another code of base of t"),
        (lambda rows: rows[-1].update(measured(curve([1.0, 0.6, 0.6]))), "judges or asks held-out rows in another way"),
        (lambda rows: rows.extend(other_code()), "another code of base"),  # of an arm with the same code
        (lambda rows: rows[-1]["endpoints"].update(area=0.7), "has area 0.7, and its curve 0.6"),
        (lambda rows: rows[-1]["endpoints"].update(seconds=1.0), "has seconds 1.0, and its curve 10"),
        (lambda rows: rows[-1].update(run_seed=1), "made with --seed 1"),
        (
            lambda rows: rows[-1].update(measured(curve([0.6, 0.6]))),
            r"evaluated at \[0, 2\], and the study at \[0, 2, 4\]",
        ),
        (lambda rows: rows[-1]["curve"]["tokens"].pop(), "has 3 steps of tokens, and the study 4"),
        (lambda rows: rows[-1]["curve"]["held_out"].__setitem__(2, 7.0), "has 7.0 in its held_out"),
        (lambda rows: rows[-1]["curve"]["seconds"].__setitem__(2, -1.0), "has -1.0 in its seconds"),
        (lambda rows: rows[-1]["curve"]["sampled"].__setitem__(2, None), "has None in its sampled"),
        (lambda rows: rows[-1]["curve"]["length"].__setitem__(2, math.nan), "has None in its length"),
        (lambda rows: rows[-1]["curve"].update(extra=[1]), "there are evaluated, held_out"),
        (lambda rows: rows[-1]["endpoints"].clear(), "has the endpoints ; the study area, collapsed"),
        (lambda rows: rows[-1]["endpoints"].update(speed=1.0), "has the endpoints .*speed.*; the study area"),
        (lambda rows: rows[-1].pop("weights"), "row run t base 2 has no weights that is a str"),
        (lambda rows: rows[-1].update(seed="2"), "has no seed that is a int"),
        (lambda rows: rows[-1]["endpoints"].pop("tokens"), "has the endpoints .*; the study area"),
        (lambda rows: rows[-1]["endpoints"].update(area="x"), "a row has a value that it cannot have"),
        (lambda rows: rows[-1]["curve"].update(held_out=7), "a row has a value that it cannot have"),
        (lambda rows: rows[-1].update(seed=True, run_seed=True), "has no seed that is a int"),
        (lambda rows: rows[-1].update(curve=rows[-2]["curve"], endpoints=rows[-2]["endpoints"]), "it is a copy"),
        (lambda rows: rows.insert(1, rows[1] | {"name": "a/b"}), "A name has no /"),
        (lambda rows: rows.append(rows[1] | {"name": "x"}), "base and x have the same code and flags"),
        (lambda rows: rows.append(rows[1] | {"name": "coin"}), "arm coin is another control"),
        (lambda rows: rows.append(rows[1] | {"name": "again", "flags": ["--beta", "1"]}), "again is another one than"),
        (lambda rows: rows[1].update(script="evil.py"), "has the script evil.py"),
        (lambda rows: rows[1].update(flags=["--eval_temperature", "1"]), "--eval_temperature is the same for all"),
        (lambda rows: rows[1].update(flags=["--remap_verifier", "gsm8k=easy"]), "changes how held-out rows are judged"),
        (lambda rows: rows.append(rows[-1] | measured(curve([0.7] * 3))), "run t base 2 has two rows"),
        (lambda rows: rows[-1].update(arm="x"), "an arm that the record lacks"),
        (lambda rows: rows[-1].update(kind="runs"), "no row of a record"),
        (lambda rows: rows[-1].update(study="z"), "of another study"),
        (lambda rows: rows[0].update(steps=5), "changed after it was written"),
        (lambda rows: rows.append(rows[1] | {"flags": ["--beta", "1"]}), "was another one before"),
        (lambda rows: rows.pop(0), "no row of a study"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(tmp_path, change, words):
    rows = rows_of({"base": [0.5, 0.6]})
    change(rows)
    with pytest.raises(record.RecordError, match=words):
        record.read([write(tmp_path / "r.jsonl", rows)])


def test_an_arm_of_the_record_is_meant_by_its_name(tmp_path):
    """With the diff and flags that it has there. Controls are the record's too."""
    rows = rows_of({"base": [0.5], "x": [0.6], "majority": [0.4]})
    for row in rows:
        if row.get("name") == "x":
            row |= {"diff": "of before", "flags": ["--beta", "0.1"]}
    known = record.read([write(tmp_path / "r.jsonl", rows)])
    options = study_program.parser().parse_args(
        ["run", "--out", "r", "--controls", "--arms", "base", "x", "y: --beta 1"]
    )
    arms_by_name = {arm.name: arm for arm in study_program.arms_of(options, known)}
    assert (arms_by_name["x"].diff, arms_by_name["x"].flags) == ("of before", ("--beta", "0.1"))
    assert arms_by_name["majority"].diff == known.arms["majority"]["diff"]  # and not today's fork
    assert arms_by_name["y"].flags == ("--beta", "1")
    assert set(arms_by_name) == {"base", "x", "y", *tasks.CONTROL_NAMES, tasks.AGAIN}
    options = study_program.parser().parse_args(["run", "--out", "r", "--arms", "base", "x", "rloo"])
    with pytest.raises(arms.ArmError, match="base and rloo have the same code and flags"):
        study_program.arms_of(options, known)
    for words, said in {
        "bb": "arms base and bb have the same code",  # a name that was mistyped
        "again: --beta 2": "arm again: --controls adds the arms",
        "majority: --beta 0.3": "arm majority: --controls adds the arms",
    }.items():
        options = study_program.parser().parse_args(["run", "--out", "r", "--arms", words])
        with pytest.raises(arms.ArmError, match=said):
            study_program.arms_of(options, known)
    options = study_program.parser().parse_args(["run", "--out", "r", "--controls", "--arms", "y: --beta 1"])
    assert study_program.arms_of(options, known)[-1] == arms.Arm("again")  # of the record's base
    with pytest.raises(record.RecordError, match="write x alone"):
        known.take({**known.arms["x"], "diff": "of now"})


def test_a_record_survives_a_kill_and_has_one_writer(tmp_path):
    path = write(tmp_path / "r.jsonl", rows_of({"base": [0.5]}))
    path.write_text(path.read_text() + '{"kind": "run", "cut')
    assert len(record.read([path]).runs) == 1
    with record.appending(path) as append:
        append(
            {
                "kind": "failure",
                "study": record.hash_of(STUDY),
                "task": "t",
                "arm": "base",
                "seed": 2,
                "code": 1,
                "log": "no\nmemory",
            }
        )
        with pytest.raises(record.RecordError, match="another study.py"), record.appending(path):
            pass
    rows = record.read([path])
    assert len(rows.runs) == 1 and "no\nmemory" in rows.failures[0]["log"]
    assert "exit status 1: memory" in report.text_of(rows)[0]


def test_a_control_without_a_seed_leaves_the_tasks_unknown(tmp_path):
    """It does not say that they are unfit."""
    rows = rows_of({"base": [0.5, 0.6, 0.55], "lr0": [0.1, 0.2, 0.15], "coin": []})
    text, fit = report.text_of(record.read([write(tmp_path / "r.jsonl", rows)]))
    assert not fit and "coin                     no seed with all tasks yet" in text
    assert "whether the tasks are fit is not known" in text and "unfit" not in text


def test_a_failed_run_is_made_again_where_that_is_asked_for(tmp_path):
    """Its rows stay, and the table tells of each."""
    study_row, arm_row, first, second = rows_of({"base": [0.5, 0.6]})
    failure = {name: second[name] for name in ("study", "task", "arm", "seed")}
    failure |= {"kind": "failure", "code": -9, "log": "out of memory"}
    path = write(tmp_path / "r.jsonl", [study_row, arm_row, first, failure])
    rows = record.read([path])
    arm = arms.Arm("base")
    assert rows.failed == [("t", "base", 2)] and not study_program.missing_jobs(rows, [arm], [1, 2])
    (job,) = study_program.missing_jobs(rows, [arm], [1, 2], retry_failed=True)
    assert (job.task, job.arm.name, job.seed) == ("t", "base", 2)
    rows = record.read([write(path, [study_row, arm_row, first, failure, failure | {"log": "again"}, second])])
    assert not rows.failed and not study_program.missing_jobs(rows, [arm], [1, 2], retry_failed=True)
    text, _ = report.text_of(rows)
    assert "2 runs, 0 failed" in text
    for words in ("out of memory", "again"):
        assert f"t base seed 2: exit status -9: {words}; made again since, and that one is in the figures" in text
    with pytest.raises(record.RecordError, match="2 has two rows that differ"):
        rows.take(second | {"weights": "0"})
    with pytest.raises(record.RecordError, match="of another study"):
        record.read([write(path, [study_row, arm_row, first, failure | {"study": "0"}, second])])


def test_a_row_that_lacks_only_its_newline_is_kept(tmp_path):
    path = write(tmp_path / "r.jsonl", rows_of({"base": [0.5, 0.6]}))
    path.write_text(path.read_text().removesuffix("\n"))
    assert len(record.read([path]).runs) == 2
    with record.appending(path) as append:
        append({"kind": "arm", "name": "x", "script": "grpo.py", "flags": ["--beta", "1"], "diff": ""})
    rows = record.read([path])
    assert len(rows.runs) == 2 and set(rows.arms) == {"base", "x"}


def test_a_first_row_that_a_kill_cut_short_begins_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind"')
    with record.appending(path) as append:
        append({"kind": "study"})
    assert path.read_text() == '{"kind": "study"}\n'
    with pytest.raises(record.RecordError, match="is a folder"), record.appending(tmp_path):
        pass


@pytest.mark.parametrize("text", ["my thesis, without a newline", "two\nlines\n", '{"kind": "run"}\n'])
def test_a_file_that_is_no_record_is_left_alone(tmp_path, text):
    path = tmp_path / "thesis.txt"
    path.write_text(text)
    with pytest.raises(record.RecordError, match="is no record"), record.appending(path):
        pass
    assert path.read_text() == text
    with pytest.raises(record.RecordError, match="no file"):
        record.read([tmp_path / "turnz.jsonl"])


def test_a_row_that_does_not_fit_is_not_written(tmp_path):
    """It would make the record unreadable. A failure is, and the runs of other lanes go on."""
    study_row, arm_row, first, second = rows_of({"base": [0.5, 0.6]})
    written = []
    rows = record_of(study_row, arm_row)
    running = study_program.Running(rows, written.append, 2)
    running.done(first | {"wall_seconds": 1.0})
    other = running.rows.runs["t", "base", 1] | {"seed": 3, "run_seed": 3, "packages": {"torch": "3"}}
    other |= measured(curve([0.5, 0.6, 0.5]))
    running.done(other)
    assert written[-1]["kind"] == "failure" and "another packages" in written[-1]["log"]
    assert report.reason(written[-1]).startswith("its row does not fit the record: run t base 3")
    running.done(second | {"wall_seconds": 1.0})  # of another lane: it fits
    assert [row["kind"] for row in written] == ["run", "failure", "run"]
    path = write(tmp_path / "r.jsonl", [study_row, arm_row, *written])
    assert len(record.read([path]).runs) == 2 and record.read([path]).failed == [("t", "base", 3)]


def test_a_row_passes_its_own_check(tmp_path):
    """The curve of a row has five digits, and its endpoints are of these: it reaches 0.9."""
    nearly = curve([0.5, 0.899997, 0.6])
    (tmp_path / "environment.json").write_text(
        json.dumps({"data_hash": "d", "model_hash": "m", "packages": {}, "omp_num_threads": "1"})
    )
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.9, steps=4)
    facts = lanes.facts_of(tmp_path, job, nearly)
    assert facts["curve"]["held_out"] == [0.5, 0.9, 0.6] and facts["endpoints"]["steps"] == 2
    rows = rows_of({"base": [0.5]})
    rows[-1] |= {name: facts[name] for name in ("curve", "endpoints")}
    assert record.read([write(tmp_path / "r.jsonl", rows)]).runs


def test_rows_that_name_another_verifier_have_other_data(tmp_path):
    """However the flag is written."""
    rows = rows_of({"base": [0.5], "thrown": [0.4], "late": [0.4]})
    rows[3]["flags"] = ["--remap-verifier=learned=coin"]
    rows[4]["data_hash"] = "of other verifiers"
    rows[5]["flags"] = ["--remap_verifier", "learned=coin"]
    rows[5]["flags"] += ["--beta", "1"]
    rows[6]["data_hash"] = "of yet others"
    assert len(record.read([write(tmp_path / "r.jsonl", rows)]).runs) == 3


def test_files_that_flags_name_are_the_same_in_all_runs_of_an_arm(tmp_path):
    """The code hash has the four files and the parts alone."""
    (tmp_path / "judge.py").write_text("pass\n")
    flags = ("--reward_file", "judge.py", "--env_file=judge.py", "--x", "none.py")
    digest = hashlib.sha256(b"pass\n").hexdigest()
    assert arms.hashes_of_files(tmp_path, flags) == {"judge.py": digest}
    rows = rows_of({"base": [0.5, 0.6]})
    rows[-1]["files"] = {"judge.py": digest}  # the first row is of before
    record.read([write(tmp_path / "r.jsonl", rows)])
    rows[-2]["files"] = {"judge.py": "another"}
    with pytest.raises(record.RecordError, match="another judge.py of t of base"):
        record.read([write(tmp_path / "r.jsonl", rows)])


def test_a_run_that_was_stopped_is_a_failure(tmp_path, monkeypatch):
    """A signal ends it with exit status 0 and all its files."""
    step = {"objective/verifiable_correct_rate": 0.1, "batch/total_prompts": 4, "batch/filtered_prompts": 1}
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.5, steps=3)
    lane = lanes.Lane(0, 1, tmp_path, {"base": tmp_path})
    run_dir = tmp_path / "runs" / "t-base-1"

    class Worker:
        stdin = stdout = None

        def write(self, order):
            run_dir.mkdir()
            rows = [step | {"training_step": i} for i in (1, 2)]
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (tmp_path / "t-base-1.log").write_text("stopped by signal 15\n")

        def flush(self):
            pass

        def readline(self):
            return '{"code": 0, "cpu_seconds": 1.0}\n'

    Worker.stdin = Worker.stdout = Worker()
    monkeypatch.setattr(lane, "start", Worker)
    row = lane.run(job)
    assert row["kind"] == "failure" and row["code"] == 0 and not run_dir.exists()
    assert row["log"].endswith("stopped by signal 15\n\nit made 2 steps, and a run of the study makes 3")


def test_sampled_accuracy_has_its_interval():
    """Seeds 0.1 and 0.3 in the mean over two tasks: 0.2, and t(0.975, 1) = 12.7062 times 0.1."""
    assert report.reach_of(np.array([[0.0, 0.2], [0.2, 0.4]])) == "0.200 ± 1.271"
    assert report.reach_of(np.array([[0.0], [0.2]])) == "0.100"


def test_targets_out_of_reach_on_both_sides_are_told(tmp_path):
    """The start model is there already."""
    path = write(tmp_path / "r.jsonl", rows_of({"base": [0.95] * 4}))
    text, _ = report.text_of(record.read([path]))
    assert re.search(r"^t +base +0.90 +4/4 +0.0 \[.*; 4 of them before the first step$", text, re.MULTILINE)
    # 0, 0, 4 and 4 have the mean 2 and an interval from -1.7, where no count is
    assert report.level([0.0, 0.0, 4.0, 4.0]) == "2.0 [0.0, 5.7]"


def test_an_endpoint_that_no_run_has_is_a_dash(recwarn):
    """The KL of runs without a reference policy."""
    assert report.mean_or_dash(np.array([[math.nan, math.nan]])) == "-"
    assert report.mean_or_dash(np.array([[math.nan, 2.0]])) == "2"
    assert not recwarn.list


# --- A study ----------------------------------------------------------------------------------------------------------


def study(*words):
    command = [sys.executable, str(REPO / "scripts/study.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A record of three runs of the fruit fly, and what was printed."""
    if not (REPO / "data" / "tasks" / "last").exists():
        subprocess.run([sys.executable, REPO / "scripts/data/make_tasks.py"], check=True, capture_output=True)
    path = tmp_path_factory.mktemp("study") / "small.jsonl"
    done = study(*SMALL, "--out", path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path, done.stdout


ENGINE = "--rollout_backend vllm --vllm_enforce_eager --vllm_gpu_memory_utilization 0.4"
ARMS = ("base", "b: --beta 0.05", f"engine: {ENGINE}")
SMALL = ("run", "--steps", 4, "--tasks", "last", "--seeds", "1", "--jobs", 1, "--arms", *ARMS)


def test_a_study_of_three_runs(small):
    """The runs differ in their arm only; what is done is not done again; the table reads it."""
    path, printed = small
    assert "0 of 3 runs are done; 3 to do" in printed and "3 of 3" in printed
    rows = record.read([path])
    base = rows.runs["last", "base", 1]
    other = rows.runs["last", "b", 1]
    assert base["curve"]["evaluated"] == [0, 4] and len(base["curve"]["sampled"]) == 4
    assert base["curve"]["sampled"][0] == other["curve"]["sampled"][0]  # the same prompts and request seeds
    assert base["weights"] != other["weights"] and base["code"] == other["code"]
    again = study(*SMALL, "--out", path)
    assert again.returncode == 0 and "3 of 3 runs are done; 0 to do" in again.stdout
    later = study(*SMALL, "--out", path, "--seeds", "1-2", "--budget_minutes", 0)
    assert "3 runs are left" in later.stdout
    table = study("table", path)
    assert table.returncode == 0 and "cannot tell: one seed" in table.stdout


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_stopped_study_leaves_no_run_behind(small, tmp_path, how):
    """Nor a failure in its record, which would be final. A terminal's Ctrl-C goes to all processes of its group."""
    path = tmp_path / "x"
    words = ["run", "--steps", "4000", "--tasks", "last", "--seeds", "1", "--jobs", "1", "--out", str(path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    process = subprocess.Popen(
        [sys.executable, str(REPO / "scripts/study.py"), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    signal.signal(signal.SIGINT, before)
    study_process = psutil.Process(process.pid)
    family: list[psutil.Process] = []
    try:
        is_begun = False
        while not is_begun or len(family) < 2:  # its worker and the worker's run
            assert process.poll() is None
            time.sleep(0.05)
            is_begun = path.exists() and b'"arm"' in path.read_bytes()  # git and the trial of the flags have ended
            family = study_process.children(recursive=True)
        if how == "SIGINT":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.Signals[how])
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    rows = record.read([path])
    assert list(rows.arms) == ["base"] and not rows.runs and not rows.failures
    if how == "SIGKILL":
        return
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("study.py: stopped.") and "Traceback" not in told
    assert not list(tmp_path.glob("study-*"))


def test_a_row_has_the_bits_of_the_command_line(small, tmp_path):
    """A worker's fork starts with its imports done, vLLM's too, and shares nothing else."""
    rows = record.read([small[0]])
    flags = arms.merge_flags(tuple(rows.study["tasks"]["last"]), tuple(rows.arms["engine"]["flags"]))
    flags += ["--seed", "1", "--exp_name", "run", "--output_dir", str(tmp_path)]
    command = [sys.executable, str(REPO / "grpo.py"), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    digest = hashlib.sha256((tmp_path / "run" / "model" / "model.safetensors").read_bytes())
    assert digest.hexdigest() == rows.runs["last", "engine", 1]["weights"]


def test_a_row_of_the_record_is_made_again():
    """A row of the fruit fly that is published: to the bit on its kind of processor, elsewhere near it."""
    path = REPO / "scripts/studies/records/fly.jsonl"
    commit = record.read([path]).study["commit"]
    if subprocess.run(["git", "-C", REPO, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True).returncode:
        pytest.skip(f"a clone without history: it lacks the record's commit {commit[:12]}")
    done = study("replay", path, "--task", "last", "--arm", "base", "--seed", 7)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("the same to the bit" in done.stdout) != ("another machine: within" in done.stdout)


def test_a_study_of_ones_own_rows_with_ones_own_flags(tmp_path):
    """A folder of data/, a model and a step of one's own: the flags are in the study's row, as for any other task."""
    own = REPO / "data" / "own_task_of_the_tests"
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(REPO / "data" / "tasks" / "last", own)
    model = shutil.copytree(REPO / "scripts/studies/fly", tmp_path / "fly")
    path = tmp_path / "own.jsonl"
    flags = f"--model_name_or_path {model} --num_unique_prompts_rollout 4 --response_length 4"
    words = ["run", "--out", path, "--tasks", f"data/{own.name}/", "--flags", flags, "--target", 0.3, "--steps", 2]
    try:
        done = study(*words, "--seeds", "1-2", "--arms", "base", "coin: --learning_rate 2e-3")
        assert done.returncode == 1 and "--controls adds the arms" in done.stderr and not path.exists()
        done = study(*words, "--seeds", "1", "--controls")
        assert done.returncode == 0, done.stdout + done.stderr
        rows = record.read([path])
        given = dict(arms.flags_of(rows.study["tasks"][own.name]))
        assert given["total_episodes"] == ["64"] and given["model_name_or_path"] == [str(model)]
        assert given["remap_verifier"] == ["learned=gsm8k"] and rows.study["targets"] == {own.name: 0.3}
        weights = {arm: row["weights"] for (_, arm, _), row in rows.runs.items()}
        assert len(weights) == 6 and weights["coin"] != weights["base"]  # it trains on another reward
        done = study(*words, "--seeds", "1", "--arms", "base")  # the same line
        assert done.returncode == 0 and "1 of 1 runs are done" in done.stdout
        for words, said in {
            "--flags=--response_length=8": "--flags differs on",
            "--target 0.5": "has the target 0.3",
            "--flags=--seed=3": "--flags: --seed: --seed is the same",
        }.items():
            done = study("run", "--out", path, "--arms", "base", *words.split())
            assert done.returncode == 1 and said in done.stderr, done.stderr
        assert study_program.jobs_of(rows.study) == 1  # the memory of another model is not known
        assert "is not in scripts/studies/tasks.py" in study("table", path).stdout
    finally:
        shutil.rmtree(own)


def test_rows_of_ones_own_that_are_no_task(tmp_path):
    """Each refusal names the file or the row, and what to write."""
    folder = tmp_path / "mine"
    folder.mkdir()

    def refused(words):
        with pytest.raises(tasks.TaskError, match=words):
            tasks.task_of("mine", tmp_path)

    with pytest.raises(tasks.TaskError, match="no task other: there are largest, .* or a folder data/other"):
        tasks.task_of("other", tmp_path)
    refused("no .*train.jsonl: a task has train.jsonl and eval.jsonl")
    (folder / "train.jsonl").write_text('{"dataset": "gsm8k"}\n')
    refused("no .*eval.jsonl")
    (folder / "eval.jsonl").write_text('{"dataset": "gsm8k"}\n{"dataset": "math"}\n')
    refused("train.jsonl: its rows have the dataset gsm8k. Write learned in all")
    (folder / "train.jsonl").write_text('{"dataset": "learned"}\n')
    refused("eval.jsonl: a task has one verifier, and its rows have the dataset gsm8k, math")
    (folder / "eval.jsonl").write_text('{"dataset": "math"}\n{"dataset": ["math"]}\n')
    refused("eval.jsonl row 2: its dataset must be the name of a verifier")
    (folder / "eval.jsonl").write_text('{"dataset": "math"}\nno\n')
    refused("eval.jsonl row 2 is no JSON")
    (folder / "eval.jsonl").write_text('{"dataset": "math"}\n')
    assert tasks.task_of("mine", tmp_path).flags == ("--remap_verifier", "learned=math")


def test_a_row_is_made_again(small, tmp_path):
    done = study("replay", small[0], "--task", "last", "--arm", "base", "--seed", 1)
    assert done.returncode == 0 and "the same to the bit" in done.stdout, done.stdout + done.stderr


def test_a_row_that_differs_is_told(small):
    """On the same machine by a bit; on another one by more than seeds differ."""
    rows = record.read([small[0]])
    old = rows.runs["last", "base", 1]
    new = old | {"weights": "0" * 64}
    text, good = report.replayed(rows, old, new)
    assert not good and "weights DIFFER" in text
    edited = old | {"curve": old["curve"] | {"held_out": [0.98, 1.0], "tokens": [1, 1, 1, 1]}}
    text, good = report.replayed(rows, edited, old)
    assert not good and "held_out, tokens of the curve NOT the same: the row's is wrong" in text
    _, good = report.replayed(rows, old | {"curve": old["curve"] | {"seconds": [9.0] * 4}}, old)
    assert good

    for name in ("code", "data_hash", "model_hash", "files"):
        text, good = report.replayed(rows, old, old | {name: "another"})
        assert not good and text == f"{name} NOT the same: the row's run was another one"

    far = old["endpoints"] | {"area": old["endpoints"]["area"] + 0.1}
    rows.runs["last", "base", 2] = old | {"endpoints": old["endpoints"] | {"area": old["endpoints"]["area"] + 0.02}}
    text, good = report.replayed(rows, old, new | {"processor": "another"})
    assert good and "within the noise floor of 2 seeds" in text
    text, good = report.replayed(rows, old, new | {"processor": "another", "endpoints": far})
    assert not good and "NOT within" in text


@pytest.mark.parametrize("arm", ["base", "a: 3"])
def test_wrong_arms_are_refused_in_a_line(tmp_path, arm):
    """And begin no study, whose commit would be kept."""
    path = tmp_path / "x.jsonl"
    done = study("run", "--out", path, "--arms", "base", arm)
    assert done.returncode == 1 and done.stderr.startswith("study.py: ") and done.stderr.count("\n") == 1
    assert not path.exists()


def test_the_score_of_a_game_is_no_arm_s_to_change():
    """Nor how its training rollouts, whose score it is, are sampled; by open-instruct's names neither."""
    arms.check_games(arms.Arm("x", flags=("--beta", "1")), ["guess"])
    for flags in ("--verification_reward 10", "--temperature 0.2", "--max_tool_calls 8", "--no_non_stop_penalty"):
        arm = arms.Arm("x", flags=tuple(flags.split()))
        with pytest.raises(arms.ArmError, match="changes the score of guess"):
            arms.check_games(arm, ["guess"])
        arms.check_games(arm, [])


def test_the_base_goes_first_on_each_task():
    """An arm whose rows do not fit is found by the base's, and not the other way round."""
    jobs = []
    for seed in (1, 2):
        for task in ("t", "u"):
            for arm in ("x", "base"):
                jobs.append(lanes.Job(task, arms.Arm(arm), seed, seed, (), 0.5, 4))
    rows = record.Record(runs={("u", "base", 3): {}})
    first = study_program.first_of_base(rows, jobs, "base")
    assert [(job.task, job.arm.name, job.seed) for job in first] == [("t", "base", 1)]


def test_workers_outlive_the_threads_that_use_them(tmp_path, monkeypatch):
    """The base's first runs and all others are two lots. The kernel's signal at a parent's death comes when the thread
    ends that started the worker."""
    program = tmp_path / "worker.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(REPO)!r})\nfrom scripts.studies.worker import end_with_parent\n"
        "end_with_parent(os.getppid())\n"
        'for line in sys.stdin:\n    print(\'{"code": 3, "cpu_seconds": 0.0}\', flush=True)\n'
    )
    monkeypatch.setattr(lanes, "WORKER", program)
    jobs = [lanes.Job("t", arms.Arm("base"), seed, seed, (), 0.5, 4) for seed in (1, 2, 3, 4)]
    rows = []
    with ExitStack() as stack:
        work = [stack.enter_context(lanes.Lane(i, 1, tmp_path, {"base": tmp_path})) for i in range(2)]
        assert lanes.run_all(jobs[:2], work, rows.append, math.inf) == 0
        time.sleep(0.2)
        assert lanes.run_all(jobs[2:], work, rows.append, math.inf) == 0
    assert [row["code"] for row in rows] == [3] * 4


def test_a_worker_that_was_killed_is_told(tmp_path):
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.5, steps=3)
    lane = lanes.Lane(0, 1, tmp_path, {"base": tmp_path})
    killed = [sys.executable, "-c", "import os; input(); os.kill(os.getpid(), 9)"]
    lane.worker = subprocess.Popen(killed, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with pytest.raises(lanes.LaneError, match="worker of t-base-1 ended with exit status -9.*the same line goes on"):
        lane.run(job)


def test_a_run_without_a_held_out_value_is_a_failure(tmp_path, monkeypatch):
    """It ended the study, and the same line could not go on."""
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.5, steps=2)
    lane = lanes.Lane(0, 1, tmp_path, {"base": tmp_path})
    run_dir = tmp_path / "runs" / "t-base-1"

    def ask(job, more=()):
        run_dir.mkdir(parents=True)
        facts = {"data_hash": "d", "model_hash": "m", "packages": {}, "omp_num_threads": "1"}
        (run_dir / "environment.json").write_text(json.dumps(facts))
        step = {"batch/total_prompts": 4, "batch/filtered_prompts": 1}
        steps = [json.dumps(step | {"training_step": i}) for i in (1, 2)]
        (run_dir / "metrics.jsonl").write_text("\n".join(steps))
        return {"code": 0, "cpu_seconds": 1.0}

    monkeypatch.setattr(lane, "ask", ask)
    row = lane.run(job)
    assert row["kind"] == "failure" and "its metrics lack eval/objective/verifiable_correct_rate, obj" in row["log"]


def test_a_worker_that_ended_between_two_runs_is_told(tmp_path):
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.5, steps=3)
    lane = lanes.Lane(0, 1, tmp_path, {"base": tmp_path})
    lane.worker = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    lane.worker.wait()
    with pytest.raises(lanes.LaneError, match="ended with exit status 0"):
        lane.run(job)


def test_a_run_that_leaves_nothing_is_a_failure(tmp_path, monkeypatch):
    """No metrics and no log, or a log that is no UTF-8."""
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.5, steps=3)
    lane = lanes.Lane(0, 1, tmp_path, {"base": tmp_path})
    monkeypatch.setattr(lane, "ask", lambda job, more=(): {"code": 0, "cpu_seconds": 1.0})
    row = lane.run(job)
    assert row["kind"] == "failure" and "it made 0 steps, and a run of the study makes 3" in row["log"]
    (tmp_path / "t-base-1.log").write_bytes(b"caf\xe9\n")
    assert lane.run(job)["log"].startswith("caf\ufffd\n") and not (tmp_path / "t-base-1.log").exists()


@pytest.mark.parametrize(
    ("code", "log", "said"),
    [
        (2, "--beat: no such flag; the nearest is --beta\n", "--beat: no such flag; the nearest is --beta"),
        (1, "", "exit status 1"),
        (0, "run      256 episodes // 64 = 4 steps, 4 optimizer steps\n", None),
        (0, "usage: grpo.py [-h]\n", "prints no plan: is --help among its flags?"),
        (0, "run      256 episodes // 128 = 2 steps, 2 optimizer steps\n", "that makes 2 steps, not 4"),
    ],
)
def test_flags_are_tried_without_a_run(tmp_path, monkeypatch, code, log, said):
    job = lanes.Job("t", arms.Arm("base"), 1, 1, (), 0.5, steps=4)
    lane = lanes.Lane(0, 1, tmp_path, {"base": tmp_path})

    def ask(job, more):
        assert more == ["--dry_run"]
        lane.log(job).write_text(log)
        return {"code": code, "cpu_seconds": 1.0}

    monkeypatch.setattr(lane, "ask", ask)
    found = lane.check(job)
    assert found == said or said in found


def test_flags_that_an_arm_s_code_refuses_begin_no_study(tmp_path):
    """By the real worker: an unknown flag, a value that is none, another number of rollouts, and what contradicts
    itself. Each is told in its own words."""
    if not (REPO / "data" / "tasks" / "last").exists():
        subprocess.run([sys.executable, REPO / "scripts/data/make_tasks.py"], check=True, capture_output=True)
    path = tmp_path / "x.jsonl"
    for flags, words in {
        "--beat 0.05": "arm x cannot run on last: --beat: no such flag; the nearest is --beta",
        "--num_samples_per_prompt_rollout 16": "that makes 2 steps, not 4",
        "--help": "prints no plan: is --help among its flags?",
        "--clip_lower -1": "arm x cannot run on last: grpo.py: --clip_lower -1",
    }.items():
        done = study(
            "run", "--steps", 4, "--tasks", "last", "--seeds", 1, "--out", path, "--arms", "base", f"x: {flags}"
        )
        assert done.returncode == 1 and words in done.stderr, done.stdout + done.stderr
        assert not path.exists()


def test_code_that_is_in_no_arm_is_told(monkeypatch, capsys):
    answers = {"rev-parse": b"new\n", "diff": b"grpo.py\nrewards.py\n"}
    monkeypatch.setattr(arms, "git", lambda command, *_: answers[command])
    study_program.tell_of_code("old")
    said = capsys.readouterr().out
    assert "code is commit old" in said and "WARNING: grpo.py, rewards.py: what is not committed is in no arm" in said
    answers["diff"] = b""
    study_program.tell_of_code("new")
    assert capsys.readouterr().out == ""


def test_a_failures_log_has_no_path_of_the_machine(tmp_path):
    places = (tmp_path / "base" / "grpo.py", sys.prefix + "/lib/x.py", REPO / "scripts" / "studies" / "worker.py")
    log = tmp_path / "run.log"
    log.write_text("".join(f'File "{place}", line 1\n' for place in places))
    said = lanes.told(log, tmp_path)
    assert said.splitlines()[0] == 'File "base/grpo.py", line 1'
    assert 'File "lib/x.py"' in said and 'File "scripts/studies/worker.py"' in said


def test_warnings_of_an_arms_code_are_told_once(tmp_path, capsys):
    """The log of a run is not kept. Those of its copy are in the row."""
    (text,) = lanes.OF_THE_COPY.findall("dtype x\nrank 0: WARNING: this copy of grpo.py: odd; fine if you meant it\n")
    study_row, arm_row, *runs = rows_of({"x": [0.1, 0.2]})
    running = study_program.Running(record_of(study_row, arm_row), lambda row: None, 2)
    failure = {name: runs[0][name] for name in ("study", "task", "arm")}
    running.done(failure | {"kind": "failure", "seed": 3, "code": 1, "log": ""})
    for row in runs:
        running.done(row | {"wall_seconds": 1.0, "warnings": [text]})
    assert capsys.readouterr().out.count("arm x: WARNING: this copy of grpo.py: odd; fine if you meant it\n") == 1


PAGE = REPO / "scripts" / "studies" / "records.md"
SIGNED = re.compile(r"[+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]")  # a difference and its interval


SECTIONS = [text for text in re.split("(?m)^## ", PAGE.read_text()) if "(records/" in text and SIGNED.search(text)]


@pytest.mark.parametrize("section", SECTIONS, ids=[text.partition("\n")[0] for text in SECTIONS])
def test_the_page_claims_what_its_rows_say(section):
    """A difference and its interval are in the table of a record that the section links, or that a command of it reads,
    with a base that it names."""
    records = [record.read([PAGE.parent / name]) for name in re.findall(r"\]\((records/\w+\.jsonl)\)", section)]
    for words in re.findall(r"`study.py table (scripts/[^`]+)`", " ".join(section.split())):
        options = study_program.parser().parse_args(["table", *words.split()])
        rows = record.read([REPO / path for path in options.records])
        records.append(rows.of_tasks(options.tasks or rows.study["tasks"]))
    said = ""
    for rows in records:
        for base in [None, *re.findall(r"--base (\w+)", section)]:
            if base is None or base in rows.arms:
                said += report.text_of(rows, base)[0]
    claims = SIGNED.findall(" ".join(section.split()))
    assert claims
    assert [claim for claim in claims if claim not in said] == []


@pytest.mark.parametrize("seeds", ["1-9999999999", "8-1", "", "1,,3", "-3", "a", "1,1", "1-3,2"])
def test_seeds_that_are_none(seeds):
    with pytest.raises(record.RecordError, match="--seeds"):
        study_program.parse_seeds(seeds)
    assert study_program.parse_seeds("1-3,5") == [1, 2, 3, 5]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--steps 5", "a study with --steps 4: 5 differs"),
        ("--scale smollm2", "a study with --scale fly: smollm2 differs"),
        ("--threads 2", "a study with --threads 1: 2 differs"),
        ("--seeds 8-1", "--seeds '8-1'"),
    ],
)
def test_wrong_words_for_a_study_are_refused_at_start(tmp_path, monkeypatch, words, said):
    path = write(tmp_path / "study.jsonl", rows_of({"base": [0.5]}))
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["study.py", "run", "--out", str(path), *words.split()])
    with pytest.raises(SystemExit, match=said):
        study_program.main()
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", ["--jobs 0", "--jobs -1", "--steps 0", "--threads 0", "--threads one"])
def test_numbers_are_at_least_1(tmp_path, monkeypatch, capsys, words):
    path = tmp_path / "study.jsonl"
    monkeypatch.setattr(sys, "argv", ["study.py", "run", "--out", str(path), *words.split()])
    with pytest.raises(SystemExit):
        study_program.main()
    assert "is no number of at least 1" in capsys.readouterr().err and not path.exists()


def test_an_arm_whose_diff_does_not_apply_keeps_its_name_free(tmp_path, monkeypatch):
    """And begins no study, as any other wrong arm."""
    path = tmp_path / "study.jsonl"
    bad = "--- a/grpo.py\n+++ b/grpo.py\n@@ -1 +1 @@\n-nothing\n+more\n"
    monkeypatch.setattr(arms, "read_diff", lambda name, source, commit: bad if source else "")
    monkeypatch.setattr(study_program, "check_files", lambda study_tasks: None)
    monkeypatch.setattr(sys, "argv", ["study.py", "run", "--out", str(path), "--arms", "base", "bad@x.diff"])
    with pytest.raises(SystemExit, match="arm .*: its diff does not apply"):
        study_program.main()
    assert not path.exists()


@pytest.mark.parametrize(("parent", "code"), [("os.getppid()", 0), ("1 + os.getppid()", 1)])
def test_a_run_whose_worker_died_before_it_began_ends(parent, code):
    if sys.platform != "linux":
        pytest.skip("the kernel's signal at a parent's death is Linux's")
    program = f"import os; from scripts.studies import worker; worker.end_with_parent({parent})"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPO).returncode == code


def test_no_run_is_added_to_a_record_of_another_processor(tmp_path, monkeypatch, capsys):
    """It would make the record unreadable."""
    path = tmp_path / "study.jsonl"
    write(path, rows_of({"base": [0.5, 0.6]}))
    before = path.read_bytes()
    monkeypatch.setattr(lanes, "processor", lambda: "another")
    monkeypatch.setattr(sys, "argv", ["study.py", "run", "--out", str(path), "--arms", "base", "--seeds", "1-3"])
    with pytest.raises(SystemExit, match="and this is another: begin a record with another --out"):
        study_program.main()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--out", "OUT"), "no data/tasks/largest_digit/train.jsonl: run python scripts/data/make_tasks.py"),
        (("run", "--out", "OUT", "--scale", "smollm2"), "no models/SmolLM2.*: run python scripts/data/get_smollm2.py"),
        (("calibrate", "--tasks", "second"), "no data/tasks/second/train.jsonl: run python scripts/data/make_tasks.py"),
        (("calibrate", "--tasks", "guess_plain"), "make_guess.py --plain --out data/guess_plain"),
    ],
)
def test_a_study_without_its_files_is_refused_at_start(tmp_path, monkeypatch, words, said):
    """And begins no record: each run would fail, and a failure is final."""
    (tmp_path / "scripts" / "studies").mkdir(parents=True)
    (tmp_path / "scripts" / "studies" / "fly").symlink_to(REPO / "scripts" / "studies" / "fly")
    commit = arms.git("rev-parse", "HEAD")
    monkeypatch.setattr(arms, "ROOT", tmp_path)
    monkeypatch.setattr(arms, "git", lambda *_: commit)
    path = tmp_path / "study.jsonl"
    monkeypatch.setattr(sys, "argv", ["study.py", *(str(path) if word == "OUT" else word for word in words)])
    with pytest.raises(SystemExit, match=said):
        study_program.main()
    assert not path.exists()


def test_as_many_runs_side_by_side_as_the_machine_holds(monkeypatch):
    """Where --jobs does not say how many. 8 processors and 20 GiB: 8 runs of a thread and 2 GiB, 2 of 4 threads, 2 of 8
    GiB, and one of 30 GiB."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: argparse.Namespace(available=20 * 2**30))
    assert study_program.parser().parse_args(["run", "--out", "x"]).jobs is None
    assert [lanes.most_side_by_side(*of) for of in ((1, 2), (4, 2), (1, 8), (1, 30))] == [8, 2, 2, 1]


def test_no_run_is_added_to_a_record_of_other_packages(tmp_path, monkeypatch):
    rows = rows_of({"base": [0.5]})
    rows[-1] |= {"processor": lanes.processor(), "packages": {"torch": "0.4"}}
    path = write(tmp_path / "study.jsonl", rows)
    before = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["study.py", "run", "--out", str(path), "--arms", "base", "--seeds", "1-3"])
    with pytest.raises(SystemExit, match=f"of torch 0.4, and here is {re.escape(lanes.version_of('torch'))}: begin"):
        study_program.main()
    assert path.read_bytes() == before
    assert lanes.version_of("no-such-package") == "none"


def test_a_row_is_made_again_with_the_code_of_its_own_study(tmp_path, monkeypatch):
    """Of two records that are read as one."""
    paths = [write(tmp_path / "t", rows_of({"base": [0.5]}))]
    paths.append(write(tmp_path / "u", rows_of({"base": [0.5]}, "u", commit="d")))

    def no_copy(arm, commit, folder):
        raise arms.ArmError(f"asked for {commit}")

    monkeypatch.setattr(arms, "make_copy", no_copy)
    monkeypatch.setattr(study_program, "check_files", lambda study_tasks: None)
    for task, commit in (("t", "c"), ("u", "d")):
        monkeypatch.setattr(sys, "argv", ["study.py", "replay", *map(str, paths), "--task", task])
        with pytest.raises(SystemExit, match=f"asked for {commit}"):
            study_program.main()


def test_the_base_that_is_named_is_black(tmp_path, monkeypatch):
    drawn = {}

    def draw_arm(axis, curves, number, label, has_band):
        axis.plot([0], label=label)
        drawn[label] = number

    monkeypatch.setattr(report, "draw_arm", draw_arm)
    rows = record.read([write(tmp_path / "r.jsonl", rows_of({"base": [0.5], "x": [0.5], "y": [0.5]}))])
    report.draw(rows, tmp_path / "plot.png", "y")
    assert drawn == {"y (1)": 0, "base (1)": 1, "x (1)": 2}
    report.draw(rows, tmp_path / "plot.png")
    assert drawn == {"base (1)": 0, "x (1)": 1, "y (1)": 2}
