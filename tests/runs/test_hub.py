"""Runs that take names of the hub, against a stand-in: online first, then again from the cache alone."""

import json
import shutil
import threading
import time

import pytest

from tests import programs
from tests.hub import Hub
from tests.runs.test_run import ENV, check

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
    others = {"train": [{"text": "no row for a run"}]}
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
    run = here.train("fast", "moved", "--model_name_or_path", "tiny/moving", out=tmp_path)
    assert hub.commit_of("models/tiny/moving") != commit
    assert json.loads((run / "environment.json").read_text())["model_hash"] == commit
    saved = json.loads((run / "model/tokenizer_config.json").read_text())
    assert saved.get("model_max_length") == json.loads(before).get("model_max_length")
