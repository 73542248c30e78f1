"""Everything that takes a name of the hub, against a stand-in: online first, then again from the cache alone."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import programs
from tests.conftest import REPO
from tests.hub import Hub
from tests.runs.test_run import ENV, check

SMALL = """--model_dtype float32 --response_length 8 --max_prompt_token_length 48 --temperature 1.0 --learning_rate 1e-3
    --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 4 --total_episodes 16""".split()
OF_GRPO = "--pack_length 128 --lr_scheduler_type constant --remap_verifier gsm8k=many --reward_file many.py".split()
TRANSFORMERS = [*OF_GRPO, "--rollout_backend", "transformers"]
VLLM = "--vllm_enforce_eager"
KEEPING = "--save_freq 1 --checkpoint_state_freq 1 --dump_steps all".split()
TEACHER = "--ref_model_name_or_path tiny/teacher --no_filter_zero_std_samples".split()
RUNS = {
    "grpo": ["grpo.py", *OF_GRPO, VLLM, *KEEPING, *TEACHER],
    "two_ranks": [*programs.torchrun(2), "grpo.py", *TRANSFORMERS, "--deepspeed_stage", "3"],
    "fast": ["grpo_fast.py", *OF_GRPO, VLLM, "--async_steps", "0"],
    "lora": ["grpo.py", *TRANSFORMERS, "--lora_rank", "2"],
    "minimal": ["scripts/minimal.py", VLLM],
}
REWARD = "def many(response, ground_truth):\n    return len(set(response)) / 100\n"  # no two alike: all groups train
GSM8K = [{"question": f"How many are {i} and 7?", "answer": f"{i} + 7 = {i + 7}\n#### {i + 7}"} for i in range(16)]
MATH = [{"problem": row["question"], "solution": f"\\boxed{{{i + 7}}}"} for i, row in enumerate(GSM8K)]


def row(number):
    turns = [{"role": "user", "content": f"Say {number}, then 7."}]
    return {"messages": turns, "ground_truth": "7", "dataset": "gsm8k"}


def put_rows(hub_root, name, **configs):
    """A data set with configs of splits: {split: rows}."""
    folder = hub_root / "datasets" / name
    head = ""
    for config, splits in configs.items():
        head += f"- config_name: {config}\n  data_files:\n"
        for split, rows in splits.items():
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            head += f"  - split: {split}\n    path: {config}/{split}.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n{head}---\n")


@pytest.fixture(scope="module")
def hub(tiny_models, tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    models = {"tiny/start": "llama", "tiny/teacher": "qwen3", "Qwen/Qwen2.5-3B": "llama"}
    for name, arch in models.items():
        shutil.copytree(tiny_models(arch), root / "models" / name)
    others = {"train": [{"text": "no row for a run"}]}
    put_rows(root, "tiny/rows", sevens={"train": map(row, range(8)), "test": map(row, range(8, 10))}, others=others)
    put_rows(root, "openai/gsm8k", main={"train": GSM8K, "test": GSM8K})
    put_rows(root, "DigitalLearningGmbH/MATH-lighteval", default={"train": MATH, "test": MATH})
    hub = Hub(root)
    yield hub
    hub.server.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The hub's cache on this machine."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    (path / "many.py").write_text(REWARD)
    return path


class Here:
    """Programs with the hub, or with its cache alone."""

    def __init__(self, hub, home, out, offline):
        self.hub, self.out, self.offline = hub, out, offline
        self.env = ENV | hub.environment(home, offline)
        self.asked = len(hub.log)

    def program(self, *line):
        done = check(
            programs.run([str(word).replace("many.py", str(self.out / "many.py")) for word in line], **self.env)
        )
        assert not self.offline or len(self.hub.log) == self.asked
        return done

    def train(self, name, exp_name, *more, out=None):
        flags = ["--exp_name", exp_name, "--output_dir", out or self.out, "--model_name_or_path", "tiny/start"]
        flags += ["--dataset_mixer_list", "tiny/rows:sevens", "1.0", *SMALL, *more]
        self.program(*RUNS[name], *flags)
        return (out or self.out) / exp_name


@pytest.fixture(params=["online", "from the cache"])
def here(hub, home, out, request):
    return Here(hub, home, out, request.param != "online")


def content(folder, *names):
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.parametrize("name", RUNS)
def test_runs_by_name(hub, home, out, name):
    online = Here(hub, home, out, False).train(name, name)
    offline = Here(hub, home, out, True).train(name, f"{name}_offline")
    start = hub.commit_of("models/tiny/start")
    weights = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    assert content(online / "model", weights) == content(offline / "model", weights)
    if name != "minimal":
        hashes = f"{start} {hub.commit_of('models/tiny/teacher')}" if name == "grpo" else start
        assert json.loads((offline / "environment.json").read_text())["model_hash"] == hashes
    if name == "lora":
        base = json.loads((online / "model/adapter_config.json").read_text())
        assert (base["base_model_name_or_path"], base["revision"]) == ("tiny/start", start)
    elif name != "minimal":
        files = ("tokenizer.json", "config.json")
        assert content(online / "model", *files) == content(hub.root / "models/tiny/start", *files)


def test_programs_of_a_run_by_name(here, tmp_path):
    run = here.out / "grpo"
    copy = shutil.copytree(run, tmp_path / "grpo")
    shutil.rmtree(copy / "checkpoints/step_2")
    shutil.rmtree(copy / "model")
    here.train("grpo", "grpo", "--resume", out=tmp_path)
    assert content(copy / "model", "model.safetensors") == content(run / "model", "model.safetensors")

    replayed = here.program("scripts/replay.py", copy, "--step", 2, "--from_start")
    assert "before step 1: the start model" in replayed and "equal: replayed weights" in replayed
    here.program("scripts/to_hf.py", copy, "--step", 1, "--out", tmp_path / "hf")
    assert content(tmp_path / "hf", "model.safetensors") == content(run / "step_1", "model.safetensors")

    weights_alone = tmp_path / "step_1"
    weights_alone.mkdir()
    shutil.copy(run / "step_1/model.safetensors", weights_alone)
    here.program("scripts/align/states.py", tmp_path, 1, tmp_path / "states", "--model", "tiny/start")


def test_evaluation_by_name(here, tmp_path):
    rows = "--dataset_mixer_eval_list tiny/rows:sevens 1.0 --rollout_backend transformers --model_dtype float32".split()
    sizes = "--response_length 8 --max_prompt_token_length 48 --pack_length 128 --output_dir".split()
    told = here.program("scripts/eval.py", "tiny/start", *rows, *sizes, tmp_path)
    assert "tiny/start" in told


@pytest.mark.parametrize("maker", ["gsm8k", "competition_math", "rlvr"])
def test_data_makers_by_name(here, tmp_path, maker):
    mix = ["--dataset_mixer_list", "openai/gsm8k:main", "1.0"] if maker == "rlvr" else []
    here.program(f"scripts/data/{maker}.py", *mix, "--out", tmp_path)
    assert (tmp_path / "train.jsonl").read_text().count("\n") == len(GSM8K)


RECIPE = "scripts/train/qwen/grpo_fast_3b_single_node.sh"  # makes its data, too, by a name of the hub
SMALLER = """--num_learners_per_node 1 --vllm_num_engines 1 --num_unique_prompts_rollout 2
    --num_samples_per_prompt_rollout 2 --total_episodes 8 --response_length 8 --max_prompt_token_length 512
    --rollout_backend transformers --model_dtype float32""".split()


@pytest.mark.house
def test_a_recipe_as_it_stands(here, tmp_path):
    """In a copy of the repository, whose Python is this one; flags that make it smaller follow."""
    if not Path(sys.prefix, "setup.stamp").exists():
        pytest.skip("this Python was not installed by scripts/setup.sh, which a recipe starts with")
    tops = [
        name for name in subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).split() if "/" not in name
    ]
    for name in tops:
        shutil.copy(REPO / name, tmp_path)
    shutil.copytree(REPO / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("records"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    command = ["bash", RECIPE, *SMALLER]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | here.env, capture_output=True, text=True, timeout=300)
    check(done)
    model = tmp_path / "output/qwen2.5_3b_grpo_fast_zero/model"
    assert content(model, "tokenizer.json") == content(here.hub.root / "models/Qwen/Qwen2.5-3B", "tokenizer.json")
    assert (tmp_path / "data/math_zs/train.jsonl").read_text().count("\n") == len(MATH)
    assert not here.offline or len(here.hub.log) == here.asked


def test_a_run_keeps_its_commit_though_main_moves(hub, out, tmp_path):
    """Main moves when the weights have been asked for: what is saved is of the commit of the weights."""
    folder = hub.root / "models/tiny/moving"
    shutil.copytree(hub.root / "models/tiny/start", folder)
    config = folder / "tokenizer_config.json"
    before = config.read_bytes()
    commit = hub.commit_of("models/tiny/moving")

    def move_main():
        while not any("tiny/moving" in line and "model.safetensors" in line for line in hub.log):
            time.sleep(0.01)
        config.write_text(json.dumps(json.loads(before) | {"model_max_length": 7}))

    threading.Thread(target=move_main, daemon=True).start()
    here = Here(hub, tmp_path / "home", out, offline=False)
    run = here.train("two_ranks", "moved", "--model_name_or_path", "tiny/moving", out=tmp_path)
    assert hub.commit_of("models/tiny/moving") != commit
    assert json.loads((run / "environment.json").read_text())["model_hash"] == commit
    saved = json.loads((run / "model/tokenizer_config.json").read_text())
    assert saved.get("model_max_length") == json.loads(before).get("model_max_length")
