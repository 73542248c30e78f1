"""Files of others: what is read of them runs nothing."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

import utils
from scripts.align import states
from scripts.parts import metadata
from scripts.reports import report


class Hostile:
    """A pickle of this runs code when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (exec, (f"open({str(self.mark)!r}, 'w').close()",))


def test_torchscript_archive_is_no_shard(tmp_path):
    """torch.load would run its __setstate__, although the unpickler is a restricted one."""
    path = tmp_path / "model_world_size_1_rank_0.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    with pytest.raises(ValueError, match="TorchScript program"):
        states.read_shard(path)


def test_shard_of_tensors_is_read(tmp_path):
    torch.save({"weight": torch.arange(3.0)}, tmp_path / "shard.pt")
    assert states.read_shard(tmp_path / "shard.pt")["weight"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_of_a_checkpoint(tmp_path):
    """torch's own metadata is read, one that runs code is refused before it runs."""
    state = tmp_path / "state"
    tensors = {"weight": torch.ones(2, 2), "half": torch.ones(2, dtype=torch.bfloat16), "step": torch.tensor(1.0)}
    groups = {"param_groups": [{"lr": 0.1}]}
    dcp.save({"policy": tensors, "optimizer": groups}, checkpoint_id=state, no_dist=True)
    metadata.need_plain(state)

    mark = tmp_path / "ran"
    (state / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(utils.UserError, match="builtins.exec, which no checkpoint needs"):
        metadata.need_plain(state)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weight_that_is_a_pickle(tmp_path):
    """torch reads an entry of bytes with a whole unpickler, even where the model has a tensor."""
    state = tmp_path / "state"
    mark = tmp_path / "ran"
    dcp.save({"policy": {"weight": Hostile(mark)}}, checkpoint_id=state, no_dist=True)
    with pytest.raises(utils.UserError, match="its entry policy.weight is no tensor"):
        metadata.need_plain(state)
    dcp.load({"policy": {"weight": torch.ones(2)}}, checkpoint_id=state, no_dist=True)
    assert mark.exists(), "torch runs it without the check"


def test_page_of_one_huge_group_ends(tmp_path, monkeypatch):
    """Half of one group is that group: the loop never ended."""
    monkeypatch.setattr(report, "MAX_ROLLOUT_BYTES", 2000)
    shown = [{"step": 1, "position": 0, "text": "x" * 100} for _ in range(64)]
    kept = report.fit_page(shown)
    assert 0 < len(kept) < 20
    assert kept == shown[: len(kept)]
