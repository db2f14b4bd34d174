"""Cluster sampling: the subgraph that some of the store's partitions induce.

Cluster-GCN (Chiang et al., KDD 2019), section 3.2: the edges among the union of a few randomly
chosen clusters, those between two of them included.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from dtrain.data.block import Block
from dtrain.data.sample.neighbor import Adjacency, Ids
from dtrain.kernels.csr import Csr


def ranges_of(partitions: Ids, offsets: NDArray[np.int64]) -> tuple[Ids, Ids]:
    """Begin and end of each partition's node range in increasing order, int64 [k] each."""
    chosen = np.sort(partitions)
    return offsets[chosen], offsets[chosen + 1]


def ids_in_ranges(ids: Ids, begins: Ids, ends: Ids) -> Ids:
    """The members of ``ids`` (int64, increasing) that lie in one of the ranges."""
    first, last = np.searchsorted(ids, begins), np.searchsorted(ids, ends)
    parts = [ids[a:b] for a, b in zip(first, last, strict=True)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def induced_block(graph: Adjacency, begins: Ids, ends: Ids) -> tuple[Block, Ids]:
    """The square block among the nodes of disjoint, increasing ranges ``[begins[k], ends[k])``.

    Returns the block and its nodes' global ids (int64 [num_src], increasing). Edges from outside
    the ranges are dropped; ``src_degree`` stays that of the whole graph.
    """
    bases = np.zeros(len(begins) + 1, np.int64)
    np.cumsum(ends - begins, out=bases[1:])
    indptr, columns, nodes, degrees = _induce(graph.indptr, graph.indices, begins, ends, bases)
    csr = Csr(torch.from_numpy(indptr), torch.from_numpy(columns), len(nodes))
    return Block(csr, torch.from_numpy(degrees)), nodes


@numba.njit(nogil=True, cache=True)
def _induce(
    graph_indptr: Any, graph_indices: Any, begins: Any, ends: Any, bases: Any
) -> tuple[Any, Any, Any, Any]:
    num_nodes = bases[len(begins)]
    nodes = np.empty(num_nodes, np.int64)
    degrees = np.empty(num_nodes, np.int64)
    indptr = np.empty(num_nodes + 1, np.int64)
    indptr[0] = 0
    most = 0
    for k in range(len(begins)):
        most += graph_indptr[ends[k]] - graph_indptr[begins[k]]
    columns = np.empty(most, np.int64)
    i = 0
    count: Any = 0
    for k in range(len(begins)):
        for v in range(begins[k], ends[k]):
            nodes[i] = v
            degrees[i] = graph_indptr[v + 1] - graph_indptr[v]
            for e in range(graph_indptr[v], graph_indptr[v + 1]):
                node = np.int64(graph_indices[e])
                # The last range that begins at or before it, or the first one.
                at, left = 0, len(begins)
                while left > 1:
                    half = left // 2
                    if begins[at + half] <= node:
                        at += half
                    left -= half
                # Written always and counted if it is inside: no branch that no predictor learns.
                columns[count] = bases[at] + node - begins[at]
                count += np.int64((node >= begins[at]) & (node < ends[at]))
            indptr[i + 1] = count
            i += 1
    return indptr, columns[:count].copy(), nodes, degrees
