"""Small stores for the evaluation's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtrain.data.graph import CsrFeatures, DenseFeatures, GraphArrays, Split
from dtrain.data.store import GraphStore
from dtrain.data.writer import write_store

NODES, FEATURES = 120, 10


def small_graph(classes: int = 3, sparse: bool = False, seed: int = 0) -> GraphArrays:
    """A directed graph with a hub, isolated nodes, self loops and duplicate edges."""
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.integers(0, NODES, rng.integers(0, 7))) for _ in range(NODES)]
    rows[4] = np.arange(NODES)
    rows[5] = np.empty(0, np.int64)
    values = rng.normal(size=(NODES, FEATURES)).astype(np.float32)
    values[rng.random(values.shape) < 0.8] = 0
    order = rng.permutation(NODES)
    return GraphArrays(
        indptr=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        indices=np.concatenate(rows).astype(np.int32),
        features=CsrFeatures.from_dense(values) if sparse else DenseFeatures(values),
        labels=rng.integers(0, classes, NODES),
        num_classes=classes,
        splits=[Split(*(np.sort(part) for part in np.split(order, [60, 90])))],
        directed=True,
    )


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., GraphStore]:
    """Writes :func:`small_graph` in three partitions and opens it."""

    def make(name: str = "store", **options: int) -> GraphStore:
        url = str(tmp_path / name)
        write_store(url, small_graph(**options), partitions=3, partitioner="random")
        return GraphStore.open(url)

    return make
