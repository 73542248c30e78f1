"""Runs whose reward or environment crashes on every call: see tests/test_failures.py."""

import pytest

from tests import programs
from tests.runs.test_run import data  # noqa: F401 (a fixture)

REWARD = """def mine(response, ground_truth):
    return len(response) + ground_truth["missing"]
"""
ENVIRONMENT = """def step(episode):
    return episode.ground_truths[99]
"""


@pytest.mark.parametrize("what", ["reward", "environment"])
@pytest.mark.parametrize("script", ["grpo.py", "grpo_fast.py"])
def test_a_run_says_so_at_its_first_step(tiny_models, data, tmp_path, what, script):  # noqa: F811
    """It used to end with status 0 and the words "model saved"."""
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "bad.py").write_text(ENVIRONMENT)
    flags = f"""--model_name_or_path {tiny_models()} --dataset_mixer_list {data / "train.jsonl"} 1.0
        --rollout_backend transformers --total_episodes 64 --num_unique_prompts_rollout 2 --response_length 16
        --num_samples_per_prompt_rollout 8 --output_dir {tmp_path} --exp_name run --temperature 1.0 --beta 0"""
    if what == "reward":
        flags += f" --reward_file {tmp_path / 'mine.py'} --remap_verifier gsm8k=mine"
    else:
        flags += f" --env_file {tmp_path / 'bad.py'} --max_steps 2 --per_turn_max_tokens 4"
    done = programs.run([script, *flags.split()], OMP_NUM_THREADS="1")
    assert done.returncode != 0
    name = "verifier mine" if what == "reward" else "environment bad"
    words = {"reward": "(mine.py, line 2)", "environment": "IndexError: list index out of range"}[what]
    assert f"{name} crashed on every call, nothing can be learned" in done.stderr and words in done.stderr
