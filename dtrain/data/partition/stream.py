"""Streaming partitioning, for graphs that METIS has no memory for."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

PASSES = 8
BALANCE_SLACK = 1.05
_GAMMA = 1.5


def stream_partition(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    num_partitions: int,
    *,
    seed: int = 0,
    directed: bool = False,
    passes: int = PASSES,
) -> NDArray[np.int32]:
    """Fennel with restreaming: int32 [N]; memory is 4 bytes a node, edges are read in order.

    Each pass visits the nodes in order and puts node ``v`` into the partition ``p`` that maximises
    ``|N(v) in p| - alpha * gamma * |p|**(gamma - 1)`` among those below ``BALANCE_SLACK`` times the
    mean size, with gamma = 1.5 and alpha = m * k**(gamma - 1) / n**gamma for m undirected edges
    (Tsourakakis et al., "FENNEL", WSDM 2014). Later passes see the whole previous assignment, with
    alpha growing from pass to pass (Nishimura and Ugander, "Restreaming graph partitioning",
    KDD 2013). The numbering of the nodes is the stream's order, so there is no use for ``seed``.
    """
    num_nodes = len(indptr) - 1
    part = np.full(num_nodes, -1, dtype=np.int32)
    sizes = np.zeros(num_partitions, dtype=np.int64)
    capacity = max(1, int(BALANCE_SLACK * num_nodes / num_partitions + 1))
    edges = len(indices) if directed else len(indices) / 2
    alpha = edges * num_partitions ** (_GAMMA - 1) / num_nodes**_GAMMA
    # The price of size by size: no power in the inner loop, and the same value on every machine.
    price = _GAMMA * np.sqrt(np.arange(capacity + 1, dtype=np.float64))
    for k in range(max(1, passes)):
        _pass(indptr, indices, part, sizes, capacity, alpha * price * 1.2**k)
    return part


@numba.njit(nogil=True, cache=True)
def _pass(indptr: Any, indices: Any, part: Any, sizes: Any, capacity: Any, price: Any) -> None:
    neighbours = np.zeros(len(sizes), dtype=np.int64)
    for v in range(len(indptr) - 1):
        neighbours[:] = 0
        for k in range(indptr[v], indptr[v + 1]):
            home = part[indices[k]]
            if home >= 0:
                neighbours[home] += 1
        if part[v] >= 0:
            sizes[part[v]] -= 1
        best, best_score = -1, 0.0
        for p in range(len(sizes)):
            if sizes[p] < capacity:
                score = neighbours[p] - price[sizes[p]]
                if best < 0 or score > best_score:
                    best, best_score = p, score
        part[v] = best
        sizes[best] += 1
