"""A reader for the metadata of a sharded checkpoint. The file is a pickle, which is a program: torch would run it.

This reader goes through the file first. It knows the plain classes that torch writes there, and it refuses all others.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import utils

MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
CLASSES = """BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
    TensorStorageMetadata _MEM_FORMAT_ENCODING _StorageInfo""".split()
OTHERS = (
    "collections.OrderedDict",
    "collections.defaultdict",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
)


class MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of a checkpoint's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        known = (module in MODULES and name in CLASSES) or f"{module}.{name}" in OTHERS
        known = known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        if not known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def need_tensors(content: Any) -> None:
    """Raises UnpicklingError for an entry that is no tensor: torch would unpickle its bytes. The optimizer's groups are
    such entries, but a run never reads them."""
    for name, entry in content.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if not is_tensor and not name.startswith("optimizer.param_groups"):
            raise pickle.UnpicklingError(f"its entry {name} is no tensor")


def need_plain(state: Path) -> None:
    """Raises UserError unless every `.metadata` in the directory of a sharded state is plain data."""
    for path in sorted(state.glob("*.metadata")):
        try:
            with path.open("rb") as file:
                need_tensors(MetadataUnpickler(file).load())
        except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
            raise utils.UserError(f"{path} is refused, it may be a program: {error}") from None
