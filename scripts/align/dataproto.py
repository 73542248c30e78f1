"""Read a pickled veRL batch (verl.protocol.DataProto) and write it as a dumped step, for grpo.py --load_batches.

    python scripts/align/align.py import step_7.pkl OUT

A pickle is a program. This reader runs only what a batch needs, on stand-ins for the classes of veRL, tensordict and
NumPy, and refuses everything else by name. Neither veRL nor tensordict has to be installed. Tried on batches that
tensordict 0.15.3 pickled.
"""

import io
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from scripts.parts import dumps

NEEDED = ("prompts", "responses", "attention_mask", "advantages", "token_level_scores")


class DataProto:
    """Stand-in for verl.protocol.DataProto: its tensors, as torch.save wrote them, and its arrays."""

    saved: bytes
    arrays: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.saved, self.arrays, _ = state


class NumpyThing:
    """Stand-in for an array, a dtype or a number of NumPy. Nothing is made of what the pickle claims of it."""

    state: Any = None

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def objects(self) -> list:
        """The elements of an array of objects; [] for anything else."""
        content = self.state[-1] if isinstance(self.state, tuple) else None
        return content if isinstance(content, list) else []


def _rebuild_consolidated(metadata: dict, storage: torch.Tensor) -> dict[str, torch.Tensor]:
    """A consolidated TensorDict: one byte tensor, and for each leaf (dtype, shape, start, stop, padding)."""
    leaves = metadata["leaves"]
    unknown = metadata.keys() - {"cls", "non_tensors", "leaves", "cls_metadata", "size"}
    nested = any(len(leaf) > 5 or "<NJT" in name for name, leaf in leaves.items())
    if unknown or nested or metadata["non_tensors"]:
        raise pickle.UnpicklingError(f"refused: nested or non-tensor entries in a TensorDict {sorted(unknown)}")
    tensors = {}
    for name, (dtype_name, shape, start, stop, _) in leaves.items():
        dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"refused: {dtype_name} is no dtype")
        tensors[name] = storage[start:stop].view(dtype)[: math.prod(shape)].view(*shape)
    return tensors


TENSORDICT = [
    (_rebuild_consolidated, "tensordict._reductions._rebuild_tensordict_files_consolidated"),
    (dict, "tensordict.utils._StringOnlyDict"),
]


class BatchUnpickler(pickle.Unpickler):
    ALLOWED: dict[str, Any] = {
        "verl.protocol.DataProto": DataProto,
        "numpy.dtype": NumpyThing,
        "numpy.ndarray": NumpyThing,
    }
    for core in ("numpy.core", "numpy._core"):
        for maker in ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer"):
            ALLOWED[f"{core}.{maker}"] = NumpyThing

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"refused: the pickle asks for {module}.{name}, which no batch needs")
        return self.ALLOWED[f"{module}.{name}"]


def load_dataproto(path: Path) -> tuple[dict[str, torch.Tensor], list]:
    """A pickled veRL batch's tensors by name, and the prompt's uid of each row, without veRL or tensordict, and without
    running anything that the pickle asks for. Reads what DataProto.__getstate__ writes by default: torch.save of a
    consolidated TensorDict. Raises ValueError with what was refused or is missing."""
    try:
        with path.open("rb") as file:
            data = BatchUnpickler(file).load()
        if not isinstance(data, DataProto) or not isinstance(data.saved, bytes):
            raise ValueError(f"{path}: holds no DataProto that torch.save wrote")
        with torch.serialization.safe_globals(TENSORDICT):
            tensors = torch.load(io.BytesIO(data.saved), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a batch that can be read: {error}") from error
    missing = [name for name in NEEDED if name not in tensors]
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(tensors))}")
    uids = data.arrays.get("uid")
    if not isinstance(uids, NumpyThing) or len(uids.objects) != len(tensors["responses"]):
        raise ValueError(f"{path} has no uid for each row")
    return tensors, uids.objects


def rows_of_batch(tensors: dict[str, torch.Tensor], uids: list, step: int) -> list[dict[str, Any]]:
    """A batch as veRL has it just before its actor update, as rows of rollouts.jsonl. A prompt's rows (equal uid) are
    put together: veRL balances them over ranks. Raises ValueError on fields that are missing or do not fit."""
    engines = [name for name in ("rollout_log_probs", "old_log_probs") if name in tensors]
    if not engines:
        raise ValueError("the batch has neither rollout_log_probs nor old_log_probs")

    groups: dict[str, list[int]] = {}
    for i, uid in enumerate(uids):
        groups.setdefault(str(uid), []).append(i)
    rows = []
    for position, members in enumerate(groups.values(), start=(step - 1) * len(groups)):
        for sample, i in enumerate(members):
            try:
                row = _row({name: tensor[i] for name, tensor in tensors.items()}, engines[0])
            except ValueError as error:
                raise ValueError(f"row {i}: {error}") from None
            row |= {"training_step": step, "position": position, "sample": sample}
            row["versions"] = [step - 1] * len(row["token_ids"])
            rows.append(row)
    return rows


def _row(tensors: dict[str, torch.Tensor], engine: str) -> dict[str, Any]:
    """A rollout of a batch. tensors: name -> its row. Raises ValueError."""
    widths = (len(tensors["prompts"]), len(tensors["responses"]))
    in_prompt, in_response = tensors["attention_mask"].bool().split(widths)
    length = int(in_response.sum())
    if not in_response[:length].all():
        raise ValueError("the response is not padded on the right")
    mask = in_response
    if "response_mask" in tensors:
        mask = in_response & tensors["response_mask"].bool()
    advantages = tensors["advantages"][mask]
    trained = len(advantages) > 0
    if trained and (advantages - advantages[0]).abs().max() > 1e-6:
        raise ValueError("advantages differ within the response; a dump has one, as GRPO does")

    names = {"token_ids": "responses", "logprobs": engine}
    if trained:
        names |= {"old_logprobs": "old_log_probs", "ref_logprobs": "ref_log_prob"}
    row: dict[str, Any] = {ours: tensors[name][:length].tolist() for ours, name in names.items() if name in tensors}
    score = float(tensors["token_level_scores"].sum())
    row |= {"outcome": score, "score": score, "text": ""}
    row["prompt_ids"] = tensors["prompts"][in_prompt].tolist()
    row["mask"] = mask[:length].tolist()
    row["advantage"] = float(advantages[0]) if trained else 0.0
    row["finish_reason"] = "length" if length == widths[1] else "stop"
    return row


def import_batch(source: Path, out: Path) -> Path:
    """Write a pickled veRL batch as a dumped step of `out`, after those that are there. The step is the last number in
    the file's name. Raises ValueError where there is none, or where `out` has the step already."""
    numbers = re.findall(r"\d+", source.stem)
    if not numbers:
        raise ValueError(f"{source}: no number of a step in its name")
    step = int(numbers[-1])
    path = out / "dumps" / f"step_{step:06d}.json"
    if path.exists():
        raise ValueError(f"{path} is there already")
    rows = rows_of_batch(*load_dataproto(source), step)
    out.mkdir(parents=True, exist_ok=True)
    positions = sorted({row["position"] for row in rows})
    dump = {"training_step": step, "how": "", "weights": "", "positions": positions, "packs": []}
    dumps.append_rows(out, [json.dumps(row) + "\n" for row in rows], dump)
    return path
