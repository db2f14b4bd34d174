"""Reading DCP's ``.metadata``, which is a pickle, without trusting it."""

from __future__ import annotations

import enum
import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dtrain.checkpoint.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own plain records, torch sizes and dtypes; refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _enum_member(owner: Any, name: Any) -> enum.Enum:
    """What Python 3.11.2 pickles an enum's member as: ``getattr`` of its class."""
    if not isinstance(owner, enum.EnumMeta) or name not in owner.__members__:
        raise pickle.UnpicklingError("it names builtins.getattr of what is no enum's member")
    member: enum.Enum = owner[name]
    return member


def load_metadata(data: bytes) -> Metadata:
    """Unpickle DCP's metadata with only the classes it is made of, and check its shape.

    Raises:
        CheckpointError: anything else is in it, or it is damaged.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"unsafe or damaged pickle: {error}") from error
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"damaged pickle ({type(error).__name__})") from error
    if not _well_formed(metadata):
        raise CheckpointError("unsafe or damaged pickle: it is not checkpoint metadata")
    return metadata  # type: ignore[no-any-return]


def _well_formed(metadata: Any) -> bool:
    """Only named tensors, each stored in files of the checkpoint's own folder."""
    if type(metadata) is not Metadata:
        return False
    tensors = metadata.state_dict_metadata
    stored = metadata.storage_data
    if not isinstance(tensors, dict) or not isinstance(stored, dict):
        return False
    named = all(
        isinstance(name, str) and type(entry) is TensorStorageMetadata
        for name, entry in tensors.items()
    )
    return named and all(
        type(index) is MetadataIndex
        and type(where) is _StorageInfo
        and isinstance(where.relative_path, str)
        and "/" not in where.relative_path
        for index, where in stored.items()
    )
