"""Cut a graph into partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.partition.metis import metis_partition
from dtrain.data.partition.quality import Quality, fill_empty, quality
from dtrain.data.partition.simple import random_partition, range_partition
from dtrain.data.partition.stream import stream_partition
from dtrain.errors import DtrainError

__all__ = ["PARTITIONERS", "Quality", "partition_graph", "quality"]

PARTITIONERS: dict[str, Callable[..., NDArray[np.int32]]] = {
    "metis": metis_partition,
    "stream": stream_partition,
    "range": range_partition,
    "random": random_partition,
}


def partition_graph(
    method: str,
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    num_partitions: int,
    *,
    seed: int = 0,
    directed: bool = False,
) -> NDArray[np.int32]:
    """The partition of every node: int32 [N], values in [0, num_partitions), each taken.

    ``indptr`` int64 [N + 1], ``indices`` int [E]: rows of in-neighbours. The result is a pure
    function of the arguments.

    Raises:
        DtrainError: unknown ``method``, or not 1 <= num_partitions <= N.
    """
    num_nodes = len(indptr) - 1
    if method not in PARTITIONERS:
        raise DtrainError(
            f"--partitioner: expected one of {', '.join(PARTITIONERS)}, got {method!r}"
        )
    if not 1 <= num_partitions <= num_nodes:
        raise DtrainError(
            f"--partitions: expected 1 to {num_nodes} (the number of nodes), got {num_partitions}"
        )
    if num_partitions == 1:
        return np.zeros(num_nodes, dtype=np.int32)
    part = PARTITIONERS[method](indptr, indices, num_partitions, seed=seed, directed=directed)
    return fill_empty(part, num_partitions)
