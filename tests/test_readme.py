"""The README says what the code does: its commands parse, its metrics table is complete."""

import re
import shlex

import pytest

import grpo
import grpo_fast
import rewards
import utils
from tests.conftest import REPO

README = (REPO / "README.md").read_text()


def commands():
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    return [line for line in blocks.splitlines() if re.search(r" grpo(_fast)?\.py --", line)]


@pytest.mark.parametrize("line", commands())
def test_commands_pass_every_check(line):
    words = shlex.split(line, comments=True)
    ranks = next((int(w.partition("=")[2]) for w in words if w.startswith("--nproc_per_node=")), 1)
    script = next(w for w in words if w.startswith("grpo"))
    args = utils.parse_args(grpo.Args, words[words.index(script) + 1 :])
    utils.check_args(args, ranks, fast=script == "grpo_fast.py")
    if script == "grpo_fast.py":
        grpo_fast.check_fast_args(args, None, 1)
    else:  # what check_args asks for where there is a GPU: learner and engine share it
        assert args.vllm_gpu_memory_utilization <= 0.8 or args.rollout_backend != "vllm"


def test_the_8_gpu_command_is_veRLs_105_steps():
    line = next(c for c in commands() if "Qwen2.5-7B" in c)
    args = utils.parse_args(grpo.Args, shlex.split(line)[3:])
    assert grpo.num_training_steps(args) == 105
    assert "1024 prompts x 5 samples = 5120 rollouts" in utils.batch_arithmetic(args, 8, 105)


def test_every_file_and_function_named_exists():
    for name in re.findall(r"`((?:scripts|tests)/[\w./]+)`", README):
        assert (REPO / name).exists(), name
    table = README.split("## The algorithm")[1].split("`main` in")[0]
    for name in re.findall(r"`(\w+)`", table):
        assert hasattr(grpo, name), name


def undocumented(keys):
    """Keys the metrics table does not have: a key matches itself, a bare last part or a `_suffix`, NAME a verifier."""
    table = README.split("| metric | definition")[1].split("\n## ")[0]
    tokens = set(re.findall(r"`([^`]+)`", table))
    found = []
    for key in keys:
        plain = re.sub(rf"({'|'.join(map(re.escape, rewards.VERIFIERS))})_", "NAME_", key.removeprefix("eval/"))
        plain = plain.replace("objective_kept/", "objective/")
        plain = re.sub(r"pass_at_\d+_unbiased", "pass_at_K_unbiased", re.sub(r"kl[1-3]_avg", "kl0_avg", plain))
        names = {plain, f"eval/{plain}", f"val/{plain}", f"objective/{plain}", plain.rpartition("/")[2]}
        if not names & tokens and not any(t.startswith("_") and plain.endswith(t) for t in tokens):
            found.append(key)
    return found


def test_undocumented_can_fail():
    assert undocumented(["objective/scores", "val/made_up"]) == ["val/made_up"]
