"""State of partitions that goes from one owner to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointError, CheckpointStore
from dtrain.checkpoint.partition_state import PartitionState


class History:
    """Keeps embeddings and a cursor for each partition."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Tensor]] = {}

    def fill(self, partition: int) -> None:
        self.kept[partition] = {
            "layers/1": torch.full((partition + 2, 3), float(partition)),
            "cursor": torch.tensor(partition * 10),
        }

    def partition_state(self, partition: int) -> Mapping[str, Tensor]:
        return self.kept.get(partition, {})

    def load_partition_state(self, partition: int, tensors: Mapping[str, Tensor]) -> None:
        self.kept[partition] = dict(tensors)


def worker(*owned: int) -> tuple[PartitionState, History]:
    state, history = PartitionState(), History()
    state.register("history", history)
    for partition in owned:
        history.fill(partition)
    return state, history


def test_the_next_owner_gets_what_the_last_one_saved(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    first, second = worker(0, 1), worker(2, 3)
    tensors = first[0].tensors([1, 0]) | second[0].tensors([2, 3])
    assert "partition/2/history/layers/1" in tensors
    assert tensors["partition/2/history/cursor"] is second[1].kept[2]["cursor"], "live, not a copy"
    info = store.save(1, {**tensors, "model/layers.0.weight": torch.ones(3)}, {})

    for owned in ([0], [1, 2, 3], [3]):
        state, history = worker()
        state.load(store.load_tensors(info), owned)
        assert sorted(history.kept) == owned
        for partition in owned:
            expected = History()
            expected.fill(partition)
            for name, tensor in expected.kept[partition].items():
                assert torch.equal(history.kept[partition][name], tensor)


def test_what_nobody_claims_is_passed_over() -> None:
    state, history = worker(0)
    other = History()
    other.fill(0)
    state.register("cache", other)

    fresh, kept = worker()
    cursor = History()
    fresh.register("cursor", cursor)
    fresh.load(state.tensors([0, 1]), [0, 1])
    assert history.kept.keys() == kept.kept.keys() == {0}
    assert not cursor.kept


def test_names_that_would_collide_are_refused(tmp_path: Path) -> None:
    state, _ = worker()
    with pytest.raises(ValueError, match="history is registered already"):
        state.register("history", History())
    with pytest.raises(ValueError, match=r"expected letters, digits, _, \. or -, got 'a/b'"):
        state.register("a/b", History())
    store = CheckpointStore(str(tmp_path))
    info = store.save(1, {"partition/x/history/cursor": torch.ones(1)}, {})
    with pytest.raises(CheckpointError, match="expected partition/NUMBER/COMPONENT/NAME"):
        state.load(store.load_tensors(info), [0])
