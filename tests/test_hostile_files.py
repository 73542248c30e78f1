"""Files of others: what is read of them runs nothing."""

import base64
import json
import pickle
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp

import grpo
import rewards
import utils
from scripts.align import states
from scripts.parts import checkpoints, environments, plan, turns
from tests.conftest import REPO


class Hostile:
    """A pickle of this runs code when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (exec, (f"open({str(self.mark)!r}, 'w').close()",))


def test_torchscript_archive_is_no_shard(tmp_path):
    """A reader with an unpickler of its own would run its __setstate__."""
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    with pytest.raises(ValueError, match="TorchScript"):
        states.read_shard(path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_a_checkpoint(tmp_path):
    """torch's own metadata is read, one that runs code is refused before it runs."""
    state = tmp_path / "state"
    tensors = {"weight": torch.ones(2, 2), "half": torch.ones(2, dtype=torch.bfloat16), "step": torch.tensor(1.0)}
    groups = {"param_groups": [{"lr": 0.1}]}
    dcp.save({"policy": tensors, "optimizer": groups}, checkpoint_id=state, no_dist=True)
    checkpoints.need_plain(state)

    mark = tmp_path / "ran"
    (state / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(utils.UserError, match="builtins.exec, which no checkpoint needs"):
        checkpoints.need_plain(state)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weight_that_is_a_pickle(tmp_path):
    """torch reads an entry of bytes with a whole unpickler, even where the model has a tensor."""
    state = tmp_path / "state"
    mark = tmp_path / "ran"
    dcp.save({"policy": {"weight": Hostile(mark)}}, checkpoint_id=state, no_dist=True)
    with pytest.raises(utils.UserError, match="its entry policy.weight is no tensor"):
        checkpoints.need_plain(state)
    assert not mark.exists()


ENV = """
import collections, datetime, decimal, random
import numpy as np
class Point:
    def __init__(self): self.x = 1
class Env:
    def __init__(self, config):
        self.all = [{1}, collections.deque([2]), collections.Counter("ab"), random.Random(3), np.arange(3.0),
            np.float32(2), datetime.date(2020, 1, 1), decimal.Decimal("1.5"), Point(), {"a": (None, b"x", 2**70)}]
    def step(self, episode):
        return str(self.all[3].randint(0, 9)) + str(self.all[-2].x) + str(self.all[4].sum())
"""


def test_state_of_an_environment_in_another_s_checkpoint(tmp_path):
    """It is a pickle, which the run that is resumed hands to the environment."""
    path = tmp_path / "env.py"
    path.write_text(ENV)
    episode = {"messages": [], "text": "", "turn": 1, "steps_left": 1, "stopped": True}
    episode |= {"ground_truths": [], "config": {}}
    first = environments.work_environment(str(path), {}, None, episode)()
    second = environments.work_environment(str(path), {}, first["state"], episode)()
    assert second["texts"][0][1:] == "13.0", "plain data and the file's own classes are read"

    mark = tmp_path / "ran"
    for harmful in (Hostile(mark), Popen(mark), OwnFunction()):
        state = base64.b64encode(pickle.dumps(harmful)).decode()
        with pytest.raises(pickle.UnpicklingError, match="has to be plain data: it asks for"):
            environments.work_environment(str(path), {}, state, episode)()
    assert not mark.exists()


def test_a_row_names_no_tools():
    """Data of others would choose which files run, with --tools of whatever kind."""
    flags = {"tools": ["calculator"], "tool_configs": [], "tool_parser_type": "legacy", "seconds": 30.0}
    environment = turns.Environment("calls.py", flags, "tool", (), {})
    row = {"env_config": {"tools": ["/data/evil.py"], "tool_configs": [{"command": ["sh"]}], "seconds": 9e9, "high": 8}}
    _, config = environment.of_row(row)
    assert config == flags | {"high": 8, "active_tools": []}


class Popen(Hostile):
    def __reduce__(self):
        return subprocess.Popen, (["touch", str(self.mark)],)


class OwnFunction:
    def __reduce__(self):
        return environments.load_state, ("",)


CLEARS_SCREEN = "\x1b[2J\x1b]52;c;aGk=\x07 \u202e"  # and writes to the clipboard, and turns the order of letters


def test_what_others_wrote_gives_no_orders_to_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rewards, "WARNED", {})
    rewards.warn_once("judge", "crash", f"judge: {CLEARS_SCREEN}")
    assert capsys.readouterr().err.endswith(r"judge: \x1b[2J\x1b]52;c;aGk=\x07 \u202e" "\n")

    row = utils.Row("rows.jsonl row 1", [], [], [])
    monkeypatch.setattr(utils, "mixed_rows", lambda flag, args: [row])
    monkeypatch.setattr(utils, "make_prompt", lambda *args: rewards.need(False, CLEARS_SCREEN))
    args = types.SimpleNamespace(
        system_prompt_override_file="",
        max_prompt_token_length=8,
        output_dir=str(tmp_path),
        exp_name="run",
        dataset_mixer_list=[],
    )
    with pytest.raises(utils.UserError) as raised:
        utils.load_prompts("dataset_mixer_list", args, None)
    assert str(raised.value) == r"--dataset_mixer_list rows.jsonl row 1: \x1b[2J\x1b]52;c;aGk=\x07 \u202e"


def test_a_run_that_shows_its_rollouts_gives_no_orders_to_the_terminal(tmp_path, world, capsys):
    args = utils.parse_args(grpo.Args, ["--model_name_or_path", "x"])
    prompt = utils.Prompt(0, (1, 2), CLEARS_SCREEN, (CLEARS_SCREEN,), ("math",))
    rollout = grpo.Rollout(prompt, 0, 0, text=CLEARS_SCREEN, score=1.0, finish_reason="stop")
    utils.Logger(args, tmp_path, 8, 0, world).show(1, [[rollout]])
    said = capsys.readouterr().out
    assert said.count(r"\x1b[2J") == 6 and said.replace("\n", "").isprintable(), "of the first and the last: three each"


def test_programs_that_show_texts_of_others_give_no_orders_to_the_terminal(tmp_path):
    """An environment's answer; the name of a verifier."""
    (tmp_path / "env.py").write_text(f"def step(episode):\n    return {CLEARS_SCREEN!r}\n")
    rows = tmp_path / "rows.jsonl"
    row = {"responses": ["a", "b"], "response": "a", "ground_truth": 1, "dataset": CLEARS_SCREEN}
    rows.write_text(json.dumps(row | {"messages": [{"role": "user", "content": "?"}]}) + "\n")
    for line in (["turns.py", tmp_path / "env.py", rows], ["score.py", rows], ["audit.py", rows]):
        done = subprocess.run([sys.executable, REPO / "scripts" / line[0], *line[1:]], capture_output=True, text=True)
        said = done.stdout + done.stderr
        assert r"\x1b[2" in said and said.replace("\n", "").isprintable(), said

    flags = f"--model_name_or_path x --dataset_mixer_list {rows} 1.0"
    said = plan.refused_rows(utils.parse_args(grpo.Args, flags.split()), "dataset_mixer_list")
    assert r"\x1b[2" in said and said.isprintable()
