"""Small graphs for the samplers' tests."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def awkward_store(
    num_nodes: int = 300, partitions: int = 7, train_every: int = 3, seed: int = 0
) -> Any:
    """A graph with a hub, isolated nodes, self loops and duplicate edges, and a split."""
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.integers(0, num_nodes, rng.integers(1, 13))) for _ in range(num_nodes)]
    rows[0] = np.arange(num_nodes)  # the hub, with a self loop
    rows[1] = np.array([1])
    rows[2] = np.array([5, 5, 5, 5, 9])
    for isolated in (3, num_nodes - 1):
        rows[isolated] = np.empty(0, np.int64)
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    train = np.arange(0, num_nodes, train_every)
    offsets = np.linspace(0, num_nodes, partitions + 1).astype(np.int64)
    return SimpleNamespace(
        indptr=indptr,
        indices=np.concatenate(rows).astype(np.int32),
        num_partitions=partitions,
        meta=SimpleNamespace(partition_offsets=tuple(offsets.tolist())),
        split=lambda k: SimpleNamespace(train=train),
    )


@pytest.fixture
def make_store() -> Callable[..., Any]:
    """Builds a stand-in for a graph store; see :func:`awkward_store`."""
    return awkward_store
