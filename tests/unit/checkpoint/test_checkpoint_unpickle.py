"""Metadata that other releases of Python pickled, and what takes their way to do harm."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import Metadata

from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.unpickle import load_metadata


class EarlyPickler(pickle.Pickler):
    """Pickles members of enums as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


class Reach:
    """Pickles as ``getattr(owner, name)``."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        return getattr, (self.owner, self.name)


@pytest.fixture
def metadata(tmp_path: Path) -> Metadata:
    state = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    save(state, storage_writer=FileSystemWriter(tmp_path / "saved"), no_dist=True)
    found: Metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    return found


def test_enums_of_early_python_are_read(metadata: Metadata) -> None:
    metadata.storage_meta = None
    metadata.planner_data = None
    out = io.BytesIO()
    EarlyPickler(out, protocol=4).dump(metadata)
    assert b"getattr" in out.getvalue()
    assert load_metadata(out.getvalue()) == metadata


@pytest.mark.parametrize("name", ["__init__", "mro", "__subclasses__"])
def test_no_other_attribute_is_reached(metadata: Metadata, name: str) -> None:
    metadata.planner_data = Reach(Metadata, name)
    with pytest.raises(CheckpointError, match=r"getattr of what is no enum's member"):
        load_metadata(pickle.dumps(metadata))
