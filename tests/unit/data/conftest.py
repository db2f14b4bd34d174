"""Graphs in memory for the tests of stores and importers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dtrain.data.graph import GraphArrays, Split


def _make(
    num_nodes: int = 60,
    num_edges: int = 240,
    *,
    undirected: bool = True,
    seed: int = 0,
    **rest: Any,
) -> GraphArrays:
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_nodes)
    cut = [0, num_nodes // 2, 3 * num_nodes // 4, num_nodes]
    parts = [np.sort(order[a:b]) for a, b in itertools.pairwise(cut)]
    arguments: dict[str, Any] = {
        # Few enough ends that duplicates, self loops and isolated nodes all occur.
        "src": rng.integers(0, num_nodes - 2, num_edges),
        "dst": rng.integers(0, num_nodes - 2, num_edges),
        "features": rng.normal(size=(num_nodes, 5)).astype(np.float32),
        "labels": rng.integers(0, 3, num_nodes),
        "splits": [Split(*parts)],
        "num_classes": 3,
    }
    return GraphArrays.from_edges(num_nodes, undirected=undirected, **(arguments | rest))


@pytest.fixture
def make_graph() -> Callable[..., GraphArrays]:
    """``make_graph(num_nodes, num_edges, undirected=, seed=, ...)``: random, with one split."""
    return _make
