"""Streaming partitioning, for graphs that METIS has no memory for."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

PASSES = 8
BALANCE_SLACK = 1.05
EDGE_SLACK = 1.2
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
    ``|N(v) in p| - alpha * gamma * |p|**(gamma - 1)`` among those that stay below ``BALANCE_SLACK``
    times the mean of nodes and ``EDGE_SLACK`` times the mean of in-edges (hubs would crowd into one
    partition otherwise), with gamma = 1.5, alpha = m * k**(gamma - 1) / n**gamma for m undirected
    edges (Tsourakakis et al., "FENNEL", WSDM 2014). Later passes see the whole previous assignment,
    with alpha growing from pass to pass (Nishimura and Ugander, "Restreaming graph partitioning",
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
    loads = np.zeros(num_partitions, dtype=np.int64)
    most_edges = int(EDGE_SLACK * len(indices) / num_partitions + 1)
    for k in range(max(1, passes)):
        _pass(indptr, indices, part, sizes, capacity, loads, most_edges, alpha * price * 1.2**k)
    return part


@numba.njit(nogil=True, cache=True)
def _pass(
    indptr: Any,
    indices: Any,
    part: Any,
    sizes: Any,
    capacity: Any,
    loads: Any,
    most_edges: Any,
    price: Any,
) -> None:
    neighbours = np.zeros(len(sizes), dtype=np.int64)
    for v in range(len(indptr) - 1):
        degree = indptr[v + 1] - indptr[v]
        neighbours[:] = 0
        for k in range(indptr[v], indptr[v + 1]):
            home = part[indices[k]]
            if home >= 0:
                neighbours[home] += 1
        if part[v] >= 0:
            sizes[part[v]] -= 1
            loads[part[v]] -= degree
        best, best_score, emptiest = -1, 0.0, -1
        for p in range(len(sizes)):
            if sizes[p] >= capacity:
                continue
            if emptiest < 0 or loads[p] < loads[emptiest]:
                emptiest = p
            if loads[p] + degree <= most_edges:
                score = neighbours[p] - price[sizes[p]]
                if best < 0 or score > best_score:
                    best, best_score = p, score
        if best < 0:
            best = emptiest
        part[v] = best
        sizes[best] += 1
        loads[best] += degree
