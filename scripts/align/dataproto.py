"""Read a pickled veRL batch (verl.protocol.DataProto) and write it as a dumped step, for grpo.py --load_batches.

    python scripts/align/align.py import BATCH.pkl OUT

A pickle is a program. This reader runs only what a batch needs, on stand-ins for the classes of veRL, tensordict and
NumPy. It refuses everything else by name. Neither veRL nor tensordict has to be installed. Tried on batches that
tensordict 0.15.3 pickled.
"""

import io
import json
import math
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch


class DataProto:
    """Stand-in for verl.protocol.DataProto: batch (name -> tensor), non_tensor_batch (name -> array), meta_info."""

    batch: Any = None
    non_tensor_batch: Any = None
    meta_info: Any = None

    def __setstate__(self, state: Any) -> None:
        self.batch, arrays, info = state
        self.non_tensor_batch = plain(arrays)
        self.meta_info = plain(info)


class TensorDict(dict):
    """Stand-in for tensordict's TensorDict: its tensors, nothing else."""

    def __setstate__(self, state: dict) -> None:
        self.update(state["_tensordict"])


def _make_td(cls: type, state: dict) -> TensorDict:
    tensors = TensorDict()
    tensors.__setstate__(state)
    return tensors


def _rebuild_consolidated(metadata: dict, storage: torch.Tensor) -> TensorDict:
    """A consolidated TensorDict: one byte tensor, and for each leaf (dtype, shape, start, stop, padding)."""
    leaves = metadata["leaves"]
    unknown = metadata.keys() - {"cls", "non_tensors", "leaves", "cls_metadata", "size"}
    nested = any(len(leaf) > 5 or "<NJT" in name for name, leaf in leaves.items())
    if unknown or nested or metadata["non_tensors"]:
        raise pickle.UnpicklingError(f"refused: nested or non-tensor entries in a TensorDict {sorted(unknown)}")
    tensors = TensorDict()
    for name, (dtype, shape, start, stop, _) in leaves.items():
        values = storage[start:stop].view(_dtype(dtype.removeprefix("torch.")))
        tensors[name] = values[: math.prod(shape)].view(*shape)
    return tensors


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise pickle.UnpicklingError(f"refused: {name} is no dtype")
    return dtype


TENSORDICT = [
    (TensorDict, "tensordict._td.TensorDict"),
    (TensorDict, "tensordict.tensordict.TensorDict"),
    (_make_td, "tensordict._reductions._make_td"),
    (_rebuild_consolidated, "tensordict._reductions._rebuild_tensordict_files_consolidated"),
    (dict, "tensordict.utils._StringOnlyDict"),
]


def _load_bytes(data: bytes) -> Any:
    """torch.load of bytes inside a pickle, which torch itself would unpickle without restriction."""
    with torch.serialization.safe_globals(TENSORDICT):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class NumpyDtype:
    """Stand-in for numpy.dtype: numpy's own would believe the flags and sizes that a pickle claims."""

    def __init__(self, code: str, *_: Any):
        if not re.fullmatch(r"[<>|=]?(?:[?bBhHiIlLqQefdO]|[biuf]\d+|[SUV]\d+|O8)", code) or "V" in code:
            raise pickle.UnpicklingError(f"refused: numpy dtype {code!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if self.dtype != object and state[1] in "<>":
            self.dtype = self.dtype.newbyteorder(state[1])


class NumpyArray:
    """Stand-in for numpy.ndarray until `plain` takes the array out."""

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, fortran, content = state
        if isinstance(content, list):
            self.array = np.empty(len(content), object)
            for i, item in enumerate(content):  # numpy would try to make more dimensions of lists
                self.array[i] = item
        else:
            self.array = np.frombuffer(content, dtype.dtype)
        self.array = self.array.reshape(shape, order="F" if fortran else "C")


def _numpy_buffer(content: Any, dtype: NumpyDtype, shape: tuple, order: str) -> NumpyArray:
    array = NumpyArray()
    array.__setstate__((1, shape, dtype, order == "F", bytes(content)))
    return array


def _numpy_scalar(dtype: NumpyDtype, content: bytes) -> Any:
    return np.frombuffer(content, dtype.dtype)[0]


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"refused: bytes encoded as {encoding}")
    return text.encode("latin1")


def _rebuild_tensor(storage: Any, offset: int, size: tuple, stride: tuple, *_: Any) -> torch.Tensor:
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


class BatchUnpickler(pickle.Unpickler):
    ALLOWED = {
        "collections.OrderedDict": OrderedDict,
        "_codecs.encode": _latin1,
        "numpy.dtype": NumpyDtype,
        "numpy.ndarray": NumpyArray,
        "torch.Size": tuple,
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch.storage._load_from_bytes": _load_bytes,
        "verl.protocol.DataProto": DataProto,
    }
    ALLOWED |= {name: value for value, name in TENSORDICT}
    for core in ("numpy.core", "numpy._core"):
        ALLOWED[f"{core}.multiarray._reconstruct"] = lambda *_: NumpyArray()
        ALLOWED[f"{core}.multiarray.scalar"] = _numpy_scalar
        ALLOWED[f"{core}.numeric._frombuffer"] = _numpy_buffer

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"refused: the pickle asks for {module}.{name}, which no batch needs")
        return self.ALLOWED[f"{module}.{name}"]


def plain(thing: Any) -> Any:
    """A copy in which arrays replace their stand-ins, in containers and in arrays of objects too."""
    if isinstance(thing, NumpyArray):
        array = thing.array
        if array.dtype == object:
            for i, item in enumerate(array.flat):
                array.flat[i] = plain(item)
        return array
    if isinstance(thing, dict):
        return {plain(key): plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)(map(plain, thing))
    return thing


def load_dataproto(path: Path) -> DataProto:
    """A pickled veRL batch, without veRL or tensordict, and without running anything that the pickle asks for.

    Reads what DataProto.__getstate__ writes (torch.save of a TensorDict, consolidated or not;
    VERL_DATAPROTO_SERIALIZATION_METHOD=numpy) and plain dicts of tensors. Raises ValueError with what was refused.
    """
    try:
        with path.open("rb") as file:
            data = BatchUnpickler(file).load()
        if not isinstance(data, DataProto):
            raise ValueError(f"{path}: holds a {type(data).__name__}, not a DataProto")
        batch = data.batch
        if isinstance(batch, bytes):
            batch = _load_bytes(batch)
        batch = plain(batch)
        if isinstance(batch, tuple):
            _size, _device, leaves = batch  # veRL's numpy form
            batch = {name: _tensor(*leaf) for name, leaf in leaves.items()}
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a batch that can be read: {error}") from error
    data.batch = dict(batch or {})
    return data


def _tensor(dtype: str, shape: tuple, content: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=_dtype(dtype)).view(*shape)


def rows_of_dataproto(data: DataProto, step: int) -> tuple[list[dict[str, Any]], str]:
    """A batch as veRL has it just before its actor update, as rows of rollouts.jsonl, and which logprobs stand for
    the engine's. A prompt's rows (equal uid) are put together: veRL balances them over ranks.
    Raises ValueError on fields that are missing or do not fit."""
    needed = {"prompts", "responses", "attention_mask", "advantages", "token_level_scores"}
    missing = needed - data.batch.keys() | ({"uid"} - data.non_tensor_batch.keys())
    if missing:
        raise ValueError(f"the batch lacks {', '.join(sorted(missing))}; it has {', '.join(sorted(data.batch))}")
    engines = [name for name in ("rollout_log_probs", "old_log_probs") if name in data.batch]
    if not engines:
        raise ValueError("the batch has neither rollout_log_probs nor old_log_probs")

    groups: dict[str, list[int]] = {}
    for i, uid in enumerate(data.non_tensor_batch["uid"]):
        groups.setdefault(str(uid), []).append(i)
    rows = []
    for position, members in enumerate(groups.values(), start=(step - 1) * len(groups)):
        for sample, i in enumerate(members):
            tensors = {name: tensor[i] for name, tensor in data.batch.items()}
            try:
                row = _row(tensors, engines[0])
            except ValueError as error:
                raise ValueError(f"row {i}: {error}") from None
            row |= {"training_step": step, "position": position, "sample": sample}
            row["versions"] = [step - 1] * len(row["token_ids"])
            rows.append(row)
    return rows, engines[0]


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


def import_batch(source: Path, out: Path, step: int | None) -> Path:
    """Write a pickled veRL batch as a dumped step of `out`, after those that are there.

    Without `step`, the step is the last number in the file's name.
    """
    from scripts.parts import dumps

    numbers = re.findall(r"\d+", source.stem)
    if step is None and not numbers:
        raise ValueError(f"{source}: no number in its name; say --step")
    step = int(numbers[-1]) if step is None else step
    rows, engine = rows_of_dataproto(load_dataproto(source), step)
    path = out / "dumps" / f"step_{step:06d}.json"
    if path.exists():
        raise ValueError(f"{path} is there already")
    out.mkdir(parents=True, exist_ok=True)
    positions = sorted({row["position"] for row in rows})
    dump = {"training_step": step, "how": "", "weights": "", "positions": positions, "packs": []}
    dump |= {"source": f"veRL DataProto, logprobs from {engine}"}
    dumps.append_rows(out, [json.dumps(row) + "\n" for row in rows], dump)
    return path
