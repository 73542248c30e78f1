"""Runs that take names of the hub, against a stand-in: online first, then again from the cache alone."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import utils
from tests import programs
from tests.hub import Hub
from tests.runs.test_run import ENV, check
from tests.test_hub_files import put_own_code

SMALL = """--model_dtype float32 --response_length 8 --max_prompt_token_length 48 --temperature 1.0 --learning_rate 1e-3
    --num_unique_prompts_rollout 2 --num_samples_per_prompt_rollout 4 --total_episodes 16""".split()
OF_GRPO = "--pack_length 128 --lr_scheduler_type constant --remap_verifier gsm8k=many --reward_file many.py".split()
TRANSFORMERS = [*OF_GRPO, "--rollout_backend", "transformers"]
VLLM = "--vllm_enforce_eager"
TEACHER = "--ref_model_name_or_path tiny/teacher --no_filter_zero_std_samples".split()
RUNS = {
    "grpo": ["grpo.py", *OF_GRPO, VLLM, *TEACHER],
    "fast": ["grpo_fast.py", *TRANSFORMERS, "--async_steps", "0"],
    "lora": ["grpo.py", *TRANSFORMERS, "--lora_rank", "2"],
}
LEFT_OUT = {".git", ".venv", ".venv-trl", "data", "models", "output", "runs", "tests"}  # of the repository
REWARD = "def many(response, ground_truth):\n    return len(set(response)) / 100\n"  # no two alike: all groups train


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
    models = {"tiny/start": "llama", "tiny/teacher": "qwen3"}
    for name, arch in models.items():
        shutil.copytree(tiny_models(arch), root / "models" / name)
    put_own_code(root / "models/tiny/start", root / "models/tiny/mine")
    others = {"train": [{"text": "no row for a run"}]}
    sums = [{"question": f"What is {i} + 2?", "answer": f"It is #### {i + 2}"} for i in range(4)]
    put_rows(root, "openai/gsm8k", main={"train": sums[:3], "test": sums[3:]})
    put_rows(root, "tiny/rows", sevens={"train": map(row, range(8)), "test": map(row, range(8, 10))}, others=others)
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
        done = check(programs.run([str(word) for word in line], **self.env))
        assert not self.offline or len(self.hub.log) == self.asked
        return done

    def line(self, name, exp_name, *more, out=None, ranks=0):
        flags = ["--exp_name", exp_name, "--output_dir", out or self.out, "--model_name_or_path", "tiny/start"]
        flags += ["--dataset_mixer_list", "tiny/rows:sevens", "1.0", *SMALL, *more]
        line = [*programs.torchrun(ranks if ranks > 1 else 0), *RUNS[name], *flags]
        return [str(word).replace("many.py", str(self.out / "many.py")) for word in line]

    def train(self, name, exp_name, *more, out=None, ranks=0):
        self.program(*self.line(name, exp_name, *more, out=out, ranks=ranks))
        return (out or self.out) / exp_name


def content(folder, *names):
    return [(folder / name).read_bytes() for name in names]


@pytest.mark.parametrize("name", RUNS)
def test_runs_by_name(hub, home, out, name):
    online = Here(hub, home, out, False).train(name, name)
    offline = Here(hub, home, out, True).train(name, f"{name}_offline")
    start = hub.commit_of("models/tiny/start")
    weights = "adapter_model.safetensors" if name == "lora" else "model.safetensors"
    assert content(online / "model", weights) == content(offline / "model", weights)
    hashes = f"{start} {hub.commit_of('models/tiny/teacher')}" if name == "grpo" else start
    assert json.loads((offline / "environment.json").read_text())["model_hash"] == hashes
    if name == "lora":
        base = json.loads((online / "model/adapter_config.json").read_text())
        assert (base["base_model_name_or_path"], base["revision"]) == ("tiny/start", start)
    else:
        files = ("tokenizer.json", "config.json")
        assert content(online / "model", *files) == content(hub.root / "models/tiny/start", *files)


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
    flags = "--model_name_or_path tiny/moving --dump_steps all --checkpoint_state_freq 1".split()
    run = here.train("fast", "moved", *flags, out=tmp_path)
    assert hub.commit_of("models/tiny/moving") != commit
    assert json.loads((run / "environment.json").read_text())["model_hash"] == commit
    saved = json.loads((run / "model/tokenizer_config.json").read_text())
    assert saved.get("model_max_length") == json.loads(before).get("model_max_length")
    shutil.rmtree(run / "checkpoints/step_2")  # as if it had ended before
    asked = len(hub.log)
    here.program("scripts/replay.py", run, "--step", 2)
    here.program("scripts/to_hf.py", run, "--out", tmp_path / "made")
    here.train("fast", "moved", *flags, "--resume", out=tmp_path)
    questions = [line for line in hub.log[asked:] if "/tiny/" in line]
    assert not questions  # what the run began with is in its directory, and in the cache
    assert content(tmp_path / "made", "tokenizer_config.json") == content(run / "model", "tokenizer_config.json")


def test_ranks_ask_no_more_than_one(hub, out, tmp_path):
    asked = []
    for ranks in (1, 2):
        here = Here(hub, tmp_path / f"home_{ranks}", out, False)
        before = len(hub.log)
        here.train("lora", f"ranks_{ranks}", out=tmp_path, ranks=ranks)
        asked.append(len(hub.log) - before)
    assert asked[0] == asked[1]


def test_other_programs_by_name(hub, home, out, tmp_path):
    data = ["tiny/rows:sevens", "1.0"]
    own = ["--remap_verifier", "gsm8k=many", "--reward_file", out / "many.py", "--rollout_backend", "transformers"]
    for offline in (False, True):
        here = Here(hub, home, out, offline)
        place = ["--output_dir", tmp_path, "--exp_name", f"eval_{offline}", *SMALL[:6]]
        here.program("scripts/eval.py", "tiny/start", "--dataset_mixer_eval_list", *data, *own, *place)
        here.program("scripts/data/gsm8k.py", "--out", tmp_path / f"gsm8k_{offline}")
        assert len((tmp_path / f"gsm8k_{offline}/train.jsonl").read_text().splitlines()) == 3
    place = ["--output_dir", tmp_path, *SMALL, VLLM]
    here.program("scripts/minimal.py", "--model_name_or_path", "tiny/start", "--dataset_mixer_list", *data, *place)


def test_a_recipe_by_name(hub, home, out, tmp_path):
    """As it stands but for its size: it makes its data from the hub, and trains the model that it names."""
    shutil.copytree(hub.root / "models/tiny/start", hub.root / "models/Qwen/Qwen2.5-3B")
    sums = [{"problem": f"What is {i} + 2?", "solution": f"It is $\\boxed{{{i + 2}}}$."} for i in range(24)]
    put_rows(hub.root, "DigitalLearningGmbH/MATH-lighteval", default={"train": sums[:16], "test": sums[16:]})
    root = tmp_path / "repository"
    shutil.copytree(utils.REPO, root, ignore=lambda folder, _: LEFT_OUT if folder == str(utils.REPO) else {"runs"})
    (root / ".venv").symlink_to(Path(sys.prefix))
    recipe = ["bash", "scripts/train/qwen/grpo_fast_3b_single_node.sh"]
    size = ["--num_learners_per_node", "1", "--vllm_num_engines", "1", "--rollout_backend", "transformers", *SMALL]
    size += ["--max_prompt_token_length", "512", "--pack_length", "1024", "--warmup_ratio", "0"]
    for offline in (False, True):
        env = os.environ | Here(hub, home, out, offline).env
        line = [*recipe, *size, "--exp_name", f"recipe_{offline}", "--output_dir", str(tmp_path)]
        done = subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "recipe_True/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["training_step"] == 2
    assert len((root / "data/math_zs/train.jsonl").read_text().splitlines()) == 16


@pytest.mark.parametrize("name", ["grpo", "fast"])
def test_code_of_a_model(hub, home, out, name, tmp_path):
    """With the flag it trains, both engines run it, and the model has its files. Without, one line says what to do."""
    here = Here(hub, home, out, False)
    mine = ["--model_name_or_path", "tiny/mine"]
    run = here.train(name, "mine", *mine, "--trust_remote_code", out=tmp_path)
    files = ("modeling_mine.py", "configuration_mine.py")
    assert content(run / "model", *files) == content(hub.root / "models/tiny/mine", *files)
    done = programs.run([*here.line(name, "refused", *mine, out=tmp_path)], **here.env)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode and "--trust_remote_code" in last and "modeling_mine.py" in last
    assert "Traceback" not in done.stdout + done.stderr
