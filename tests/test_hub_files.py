"""Files of the hub, against a stand-in: one question for a commit, the cache from then on, faults, code of a model."""

import contextlib
import errno
import json
import shutil
import socket

import huggingface_hub
import pytest

import grpo
import utils
from scripts.parts import estimate, hub
from scripts.parts import rows as part_of_rows
from tests import hub as stand_in
from tests import programs

CODE = {
    "configuration_mine.py": """
        from transformers import LlamaConfig


        class MineConfig(LlamaConfig):
            model_type = "mine"
    """,
    "modeling_mine.py": """
        from transformers import LlamaForCausalLM, LlamaModel

        from .configuration_mine import MineConfig


        class MineModel(LlamaModel):
            config_class = MineConfig


        class MineForCausalLM(LlamaForCausalLM):
            config_class = MineConfig
    """,
}
CLASSES = {"AutoModel": "MineModel", "AutoModelForCausalLM": "MineForCausalLM"}


def put_own_code(model, target):
    """A copy of a Llama whose classes are in files of its own."""
    shutil.copytree(model, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "configuration_mine.MineConfig"}
    config["auto_map"] |= {auto: f"modeling_mine.{name}" for auto, name in CLASSES.items()}
    (target / "config.json").write_text(json.dumps(config))
    for name, lines in CODE.items():
        (target / name).write_text("\n".join(line[8:] for line in lines.splitlines()[1:]))
    return target


@pytest.fixture
def served(tiny_models, tmp_path, monkeypatch):
    """A hub with tiny/start, which this process asks, and an empty cache."""
    shutil.copytree(tiny_models(), tmp_path / "hub/models/tiny/start")
    made = stand_in.Hub(tmp_path / "hub")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment(tmp_path / "home").items():
            patch.setenv(name, value)
        patch.setattr(hub, "BUSY_S", (0, 0))
        programs.read_hub_variables()
        forget()
        yield made
    made.server.shutdown()
    programs.read_hub_variables()
    forget()


def forget():
    """As a new process: only the cache is known."""
    hub.COMMITS.clear()
    hub.model.cache_clear()
    hub.data_set.cache_clear()


def names_in(directory):
    return {path.name for path in directory.iterdir()}


def asked(served):
    """How many requests the hub has had, without those for who asks."""
    return sum("agent-harnesses" not in line for line in served.log)


def test_a_start_asks_for_the_commit_and_a_run_for_nothing_more(served):
    directory = hub.model("tiny/start")
    assert names_in(served.root / "models/tiny/start") == names_in(directory)
    first = asked(served)
    args = grpo.Args(model_name_or_path="tiny/start", model_dtype="float32")
    utils.load_causal_lm(args)
    utils.eos_token_ids(args, utils.load_tokenizer(args))
    assert asked(served) == first
    forget()
    assert hub.model("tiny/start") == directory and asked(served) == first + 1


def test_a_run_keeps_its_commit_and_a_resumed_one_has_it(served, tmp_path):
    before = hub.model("tiny/start")
    config = served.root / "models/tiny/start/generation_config.json"
    config.write_text(json.dumps({"eos_token_id": 3}))
    assert hub.model("tiny/start") == before
    (tmp_path / "environment.json").write_text(json.dumps({"hub": hub.COMMITS}))
    shutil.rmtree(tmp_path / "home")  # another machine
    forget()
    hub.remember(tmp_path)
    assert hub.model("tiny/start") == before and (before / "config.json").exists()
    forget()
    assert hub.model("tiny/start") != before


def test_files_that_are_not_read_are_not_downloaded():
    files = "config.json tokenizer.json README.md model-00001-of-00002.safetensors model-00002-of-00002.safetensors "
    files += "model.safetensors.index.json consolidated.safetensors pytorch_model.bin original/model.safetensors x.py"
    left = {"README.md", "consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors"}
    assert set(files.split()) - set(hub.read_of_a_model(files.split())) == left
    assert "pytorch_model.bin" in hub.read_of_a_model(["config.json", "pytorch_model.bin", "training_args.bin"])
    assert "adapted.safetensors" in hub.read_of_a_model(["config.json", "adapted.safetensors"])


def test_what_a_cache_that_others_have_filled_lacks_is_downloaded(served):
    for name in ("config.json", "tokenizer_config.json"):
        huggingface_hub.hf_hub_download("tiny/start", name)
    assert names_in(hub.model("tiny/start")) == names_in(served.root / "models/tiny/start")


FAULTS = {
    "gated": (stand_in.fails_with(401, "/resolve/", "GatedRepo"), "HF_TOKEN"),
    "no access": (stand_in.fails_with(403, "/resolve/", "GatedRepo"), "/tiny/start"),
    "limited": (stand_in.fails_with(429), "429"),
    "busy": (stand_in.fails_with(503), "503"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_in_a_line_with_its_fix(served, name, capfd):
    served.fault, words = FAULTS[name]
    with pytest.raises(utils.UserError, match=f"^--model_name_or_path tiny/start: .*{words}.*$"):
        utils.start_dir(grpo.Args(model_name_or_path="tiny/start"))


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_busy_now_and_then_is_waited_for(served, status):
    served.fault = stand_in.fails_with(status, every=9)
    assert (hub.model("tiny/start") / "model.safetensors").exists()


def test_a_file_that_is_cut_off_is_asked_for_again(served):
    content = (served.root / "models/tiny/start/model.safetensors").read_bytes()
    served.fault = stand_in.cuts(content, "model.safetensors", 2)
    assert (hub.model("tiny/start") / "model.safetensors").read_bytes() == content


def test_the_revisions_that_there_are_are_named(served):
    for revision in ("v9", "0" * 40):
        with pytest.raises(utils.UserError, match=f"{revision}.* main"):
            hub.model("tiny/start", revision)


def test_a_full_disk_is_told_with_the_place_of_the_cache(served, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(utils.UserError, match=str(tmp_path / "home")):
        hub.model("tiny/start")


def test_a_hub_without_an_answer_is_asked_once(served, monkeypatch):
    """A socket that accepts and says nothing: what is in the cache is taken, and what is not has an error."""
    directory = hub.model("tiny/start")
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as stack:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        stack.callback(monkeypatch.undo)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # which is set then, for this process and others
        programs.read_hub_variables()
        monkeypatch.setattr(hub, "REACH_S", 0.2)
        forget()
        assert hub.model("tiny/start") == directory
        with pytest.raises(utils.UserError, match="other/model"):
            hub.model("other/model")


def test_rows_are_of_the_commit_and_come_from_the_cache(served):
    folder = served.root / "datasets/tiny/rows"
    for part in ("train-0", "train-1"):
        (folder / "main").mkdir(parents=True, exist_ok=True)
        (folder / f"main/{part}.jsonl").write_text('{"question": "3?"}\n')
    files = "config_name: main\n  data_files:\n  - split: train\n    path: main/train-*"
    (folder / "README.md").write_text(f"---\nconfigs:\n- {files}\n---\n")
    commit = served.commit_of("datasets/tiny/rows")

    def read(name="tiny/rows", split="train", commit=""):
        return [row["question"] for _, row in part_of_rows.read_rows(name, split, commit)]

    assert read() == ["3?", "3?"]
    (folder / "main/train-1.jsonl").write_text('{"question": "4?"}\n')
    forget()
    assert read("tiny/rows:main") == ["3?", "4?"]
    first = asked(served)
    assert read(commit=commit) == ["3?", "3?"] and asked(served) == first
    for name, split, words in (("tiny/rows:x", "train", "main"), ("tiny/rows", "x", "train")):
        with pytest.raises(ValueError, match=words):
            read(name, split)


@pytest.fixture
def own_code(tiny_models, tmp_path):
    return put_own_code(tiny_models(), tmp_path / "mine")


def test_a_models_own_code_runs_with_the_flag_alone(own_code, monkeypatch):
    """Neither a run nor a dry run asks at the terminal; both name the flag and the files."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    args = grpo.Args(model_name_or_path=str(own_code), model_dtype="float32")
    for load in (utils.load_causal_lm, estimate.config_of):
        with pytest.raises(utils.UserError, match=r"modeling_mine\.py.*--trust_remote_code"):
            load(args)
