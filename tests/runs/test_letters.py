"""scripts/train/debug/letters.sh, on which forks are tried: it tells a right loss from a wrong one."""

import re
import shlex

from tests import programs
from tests.conftest import REPO
from tests.runs.test_run import read

FLIPPED = """
import dataclasses
import sys

sys.path.insert(0, {root!r})
import grpo
import utils

right = grpo.policy_loss


def wrong(inputs, args):
    loss = right(inputs, args)
    return dataclasses.replace(loss, per_token=-loss.per_token)


grpo.policy_loss = wrong
grpo.main(utils.parse_args(grpo.Args))
"""


def scores(script, model, tmp_path, name):
    """The score of each step of a run with the flags of letters.sh."""
    text = (REPO / "scripts" / "train" / "debug" / "letters.sh").read_text()
    recipe = re.search(r"python grpo\.py (.*)\"\$@\"", text, re.DOTALL)[1].replace("\\\n", " ")
    flags = f"--model_name_or_path {model} --output_dir {tmp_path} --exp_name {name} --total_episodes 384"
    done = programs.run([script, *shlex.split(recipe), *flags.split()], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [row["objective/scores"] for row in read(tmp_path / name / "metrics.jsonl")]


def test_it_tells_a_right_loss_from_a_wrong_one(tiny_models, tmp_path):
    (tmp_path / "flipped.py").write_text(FLIPPED.format(root=str(REPO)))
    right = scores("grpo.py", tiny_models(), tmp_path, "right")
    wrong = scores(str(tmp_path / "flipped.py"), tiny_models(), tmp_path, "wrong")
    assert right[0] == wrong[0] and 6 < right[0] < 8
    assert right[-1] > right[0] + 0.4
    assert wrong[-1] < wrong[0] - 0.2
