"""Partitions that do not look at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.kernels.rng import derive_key, mix64_array


def range_partition(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    num_partitions: int,
    *,
    seed: int = 0,
    directed: bool = False,
) -> NDArray[np.int32]:
    """Equal runs of the source's numbering, for ids that already have locality: int32 [N]."""
    num_nodes = len(indptr) - 1
    return (np.arange(num_nodes, dtype=np.int64) * num_partitions // num_nodes).astype(np.int32)


def random_partition(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    num_partitions: int,
    *,
    seed: int = 0,
    directed: bool = False,
) -> NDArray[np.int32]:
    """A seeded random permutation cut into equal runs: int32 [N]."""
    num_nodes = len(indptr) - 1
    draws = mix64_array(derive_key(seed, num_nodes), np.arange(num_nodes, dtype=np.uint64))
    part = np.empty(num_nodes, dtype=np.int32)
    part[np.argsort(draws, kind="stable")] = range_partition(indptr, indices, num_partitions)
    return part
