"""How good a partitioning is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Quality:
    """``edge_cut``: fraction of edges between partitions (0 is best).

    ``node_balance`` and ``edge_balance``: nodes and in-edges of the largest partition over those of
    the mean one (1 is best).
    """

    edge_cut: float
    node_balance: float
    edge_balance: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def quality(
    indptr: NDArray[np.int64], indices: NDArray[Any], part: NDArray[np.int32], num_partitions: int
) -> Quality:
    """Measure ``part`` (int32 [N]) on a graph given as rows of in-neighbours."""
    nodes = np.bincount(part, minlength=num_partitions)
    edges = np.zeros(num_partitions, dtype=np.int64)
    cut = _count_cut(indptr, indices, part, edges)
    total = len(indices)
    return Quality(
        edge_cut=cut / total if total else 0.0,
        node_balance=float(nodes.max() / nodes.mean()),
        edge_balance=float(edges.max() / edges.mean()) if total else 1.0,
    )


def fill_empty(part: NDArray[np.int32], num_partitions: int) -> NDArray[np.int32]:
    """Give every empty partition one node of the largest, so that none is empty: int32 [N]."""
    counts = np.bincount(part, minlength=num_partitions)
    for empty in np.flatnonzero(counts == 0):
        largest = int(np.argmax(counts))
        node = int(np.flatnonzero(part == largest)[-1])
        part[node] = empty
        counts[largest] -= 1
        counts[empty] = 1
    return part


@numba.njit(nogil=True, cache=True)
def _count_cut(indptr: Any, indices: Any, part: Any, edges: Any) -> Any:
    cut = 0
    for v in range(len(indptr) - 1):
        home = part[v]
        edges[home] += indptr[v + 1] - indptr[v]
        for k in range(indptr[v], indptr[v + 1]):
            if part[indices[k]] != home:
                cut += 1
    return cut
