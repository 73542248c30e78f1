"""scripts/study.py: its arms are what they say, its runs have the same seeds, its table is right by hand."""

import json
import subprocess
import sys

import pytest

from scripts import study
from scripts.data import make_tasks
from tests.conftest import REPO

EVAL = study.METRIC
FLAGS = "--dataset_mixer_eval_list e.jsonl 1.0 --local_eval_every 1".split()


def write_run(out, arm, seed, values):
    """A finished run with these held-out accuracies at steps 0, 2, 4, ..."""
    folder = out / "runs" / arm / str(seed)
    folder.mkdir(parents=True)
    rows = []
    for i, value in enumerate(values):
        rows.append({"training_step": 2 * i - 1, "lr": 0.1})  # a step without an evaluation
        rows.append({"training_step": 2 * i, EVAL: value})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_study(out, curves, controls=()):
    """A study whose arms have one curve for each of the seeds 1, 2, ..."""
    out.mkdir()
    arms = {name: study.Arm(name, "grpo.py", [], "", name in controls) for name in curves}
    study.write_study(study.Study("0" * 40, FLAGS, 4, arms), out)
    for name, of_seeds in curves.items():
        for seed, values in enumerate(of_seeds, start=1):
            write_run(out, name, seed, values)
    return out


def rows_of(text):
    """The cells of a printed table, by arm."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines}


def test_a_table_by_hand(tmp_path, capsys):
    """Areas are (v0 / 2 + v1 + v2 / 2) / 2. Base: 0.25, 0.30, 0.35. Mine: 0.35, 0.45, 0.55, so that the differences are
    0.10, 0.15, 0.20: mean 0.15, standard error 0.05 / sqrt(3), t of 2 degrees 4.3027, interval 0.15 -+ 0.1242."""
    base = [(0.2, 0.2, 0.4), (0.2, 0.3, 0.4), (0.2, 0.4, 0.4)]
    mine = [(0.2, 0.4, 0.4), (0.2, 0.4, 0.8), (0.2, 0.6, 0.8)]
    other = [(0.2, 0.3, 0.4), (0.2, 0.2, 0.4), (0.2, 0.41, 0.4)]
    no_label = [(0.2, 0.2, 0.2), (0.2, 0.2, 0.2), (0.2, 0.1, 0.4)]
    curves = {"base": base, "mine": mine, "other": other, "none": no_label}
    out = write_study(tmp_path / "s", curves, controls=["none"])
    assert study.print_table([out], EVAL) is False
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert rows["base"][:2] == ["3", "0.300"]
    assert rows["mine"][1:3] == ["0.450", "+0.150 [+0.026, +0.274]"]
    assert rows["mine"][3:5] == ["0.667", "+0.267 [-0.307, +0.840]"]  # 0, 0.4, 0.4: error 0.1333
    # t = 0.15 / 0.0289 = 5.196, p 0.035: of two arms 2 x 0.035, which is no verdict any more
    assert rows["mine"][5] == "cannot tell (p 0.07)"
    assert rows["control none"][2] == "-0.100 [-0.224, +0.024]"  # -0.05, -0.10, -0.15
    assert "NOT" in rows["control none"][5]  # its interval has 0


def test_a_seed_that_an_arm_lacks_is_left_out_of_its_pairs(tmp_path, capsys):
    """Base 0.3, 0.4, 0.9 of seeds 1 to 3; the arm 0.5, 0.7, 0.1 of seeds 1, 2, 4: +0.2 and +0.3."""
    flat = [(value, value) for value in (0.3, 0.4, 0.9)]
    arm = [(value, value) for value in (0.5, 0.7)]
    out = write_study(tmp_path / "s", {"base": flat, "mine": arm})
    write_run(out, "mine", 4, (0.1, 0.1))
    study.print_table([out], EVAL)
    text = capsys.readouterr().out
    assert rows_of(text)["mine"][2].startswith("+0.250 [")
    assert "no run of seeds 3" in text and "begins at another value" in text and "no control" in text


def test_arms_as_they_are_written(tmp_path):
    diff = tmp_path / "mine.diff"
    diff.write_text("a diff\n")
    arm = study.parse_arm(f"late@{diff}: grpo_fast.py --async_steps 4 --no_x", "HEAD")
    assert arm == study.Arm("late", "grpo_fast.py", ["--async_steps", "4", "--no_x"], "a diff\n")
    assert study.parse_arm("base", "HEAD") == study.Arm("base", "grpo.py", [], "")
    assert study.parse_seeds("1-3,7") == [1, 2, 3, 7]


REFUSED = ["mine: --seed 3", "mine: --no-shuffle", "mine: --local_eval_every=2", "mine: --model_name_or_path other"]
REFUSED += ["mine@no-such-branch", "mine@nothing.diff", "a/b: --beta 0", "mine: beta 0"]
REFUSED += ["mine@HEAD"]  # changes nothing


@pytest.mark.parametrize("text", REFUSED)
def test_arms_that_cannot_be_compared_are_refused(text):
    with pytest.raises(study.StudyError):
        study.parse_arm(text, "HEAD")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with grpo.py, and a branch `mine` that changes it; main has gone on since."""
    root = tmp_path / "checkout"
    root.mkdir()

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True)

    git("init", "-q", "-b", "main")
    (root / "grpo.py").write_text("a = 1\n\n\n\n\nb = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    git("switch", "-q", "-c", "mine")
    (root / "grpo.py").write_text("a = 2\n\n\n\n\nb = 1\n")
    git("commit", "-q", "-a", "-m", "idea")
    git("switch", "-q", "main")
    (root / "grpo.py").write_text("a = 1\n\n\n\n\nb = 3\n")
    git("commit", "-q", "-a", "-m", "later")
    monkeypatch.setattr(study, "ROOT", root)
    return root


def test_a_branch_is_what_it_changes_on_the_study_s_commit(checkout):
    """The copy has main's later line and the branch's, inside of the checkout too. A new version of an arm is
    refused."""
    head = study.git("rev-parse", "HEAD").decode().strip()
    (checkout / "grpo.py").write_text("not committed\n")
    arm = study.parse_arm("mine@mine", head)
    copy = study.make_copy(arm, head, checkout / "runs")
    assert (copy / "grpo.py").read_text() == "a = 2\n\n\n\n\nb = 3\n"
    base = study.make_copy(study.parse_arm("base", head), head, checkout / "runs")
    assert (base / "grpo.py").read_text() == "a = 1\n\n\n\n\nb = 3\n"

    begun = study.Study(head, FLAGS, 4, {"mine": arm})
    assert study.choose_arms(begun, ["mine@mine"], []) == [arm]
    with pytest.raises(study.StudyError):
        study.choose_arms(begun, ["mine@mine: --beta 0.1"], [])
    bad = study.Arm("bad", "grpo.py", [], arm.diff.replace("a = 1", "a = 7"))
    with pytest.raises(study.StudyError):
        study.make_copy(bad, head, checkout / "runs")


FEW = "--total_episodes 64 --num_unique_prompts_rollout 2 --local_eval_every 2".split()  # four steps


def line_of(out, *arms):
    """The command of a study of the fly, whose rows are where it is started."""
    program = [sys.executable, str(REPO / "scripts" / "study.py"), "run", "--out", str(out), "--fly", "last"]
    return [*program, "--jobs", "2", "--seeds", "7", "--arms", *arms, "--", *FEW]


@pytest.mark.house  # of what is committed, with a diff of scripts/forks
@pytest.mark.runs
def test_a_study_of_the_fly(tmp_path):
    """An arm is a diff, with a flag that only it has. All arms have the same prompts, sampled with the same seeds. The
    same line runs what is missing, to the same table."""
    make_tasks.make_task("last", tmp_path / "data" / "tasks")
    rloo = f"rloo@{REPO}/scripts/forks/rloo.diff: --advantage_normalization_type rloo"
    line = line_of(tmp_path / "out", "base", rloo, "--controls")
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert "FAILED" not in done.stdout, done.stdout + done.stderr

    runs = tmp_path / "out" / "runs"
    scores = {}
    for arm in ("base", "rloo"):
        rows = study.read_metrics(runs / arm / "7" / "metrics.jsonl")
        assert rows[-1]["training_step"] == 4
        assert json.loads((runs / arm / "7" / "args.json").read_text())["seed"] == 7
        scores[arm] = [row["objective/scores"] for row in rows if "objective/scores" in row]
        held_out = [row[EVAL] for row in rows if EVAL in row]
        assert len(held_out) == 3
    assert scores["base"][0] == scores["rloo"][0]

    (runs / "rloo" / "7").rename(tmp_path / "gone")
    again = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert "1 of 2 runs are done; 1 to do" in again.stdout, again.stdout + again.stderr
    assert again.stdout.partition("| arm")[2] == done.stdout.partition("| arm")[2]
