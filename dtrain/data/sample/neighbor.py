"""Neighbour sampling: one layer's block from its destination nodes.

GraphSAGE (Hamilton, Ying and Leskovec, NeurIPS 2017), section 3.1: each destination keeps at most
``fanout`` of its in-neighbours, drawn uniformly. Every draw is a pure function of
(key, destination, draw number), so a block depends on nothing but the key and its destinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from dtrain.data.block import Block
from dtrain.kernels.csr import Csr
from dtrain.kernels.rng import mix64_jit
from dtrain.kernels.simd import prefetch

Ids = NDArray[np.int64]

ALL_NEIGHBORS = -1
_LAST_VERSION = (1 << 31) - 1
_AHEAD = 16  # places between the request for a piece of memory and its use
_LINE = 16  # node ids in a cache line


@dataclass(frozen=True)
class Adjacency:
    """The whole graph as CSR of in-neighbours.

    ``indptr``: int64 [N + 1]; ``indices``: int32 or int64 [E].
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.integer[Any]]

    @classmethod
    def of(cls, indptr: NDArray[Any], indices: NDArray[Any]) -> Adjacency:
        """View the (memory-mapped) arrays of a store as plain arrays, without a copy."""
        return cls(np.asarray(indptr), np.asarray(indices))

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1


class _Slots:
    """For every node, the version that saw it last (high 32 bits) and its position there."""

    def __init__(self, num_nodes: int) -> None:
        self.array = np.zeros(num_nodes, np.int64)
        self.version = 0

    def next_version(self) -> int:
        if self.version == _LAST_VERSION:
            self.array.fill(0)
            self.version = 0
        self.version += 1
        return self.version


class SlotPool:
    """Lends relabelling memory (8 bytes a node), one array for each thread that samples at once."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._free: list[_Slots] = []  # append and pop are atomic

    @contextmanager
    def borrow(self) -> Iterator[_Slots]:
        """An array that no other thread has until the block ends."""
        try:
            slots = self._free.pop()
        except IndexError:
            slots = _Slots(self._num_nodes)
        try:
            yield slots
        finally:
            self._free.append(slots)


def sample_block(
    graph: Adjacency,
    pool: SlotPool,
    destinations: Ids,
    *,
    fanout: int,
    replace: bool,
    key: int,
) -> tuple[Block, Ids]:
    """Draw the block whose destinations are ``destinations``, and the ids of its sources.

    ``destinations``: int64 [num_dst], distinct global ids. Returns the block and the global ids
    of its sources, int64 [num_src]: the destinations first, then new nodes in the order in which
    they first appear. A row keeps the order of the graph's CSR row.

    Without replacement a destination of at most ``fanout`` in-neighbours keeps them all; with
    replacement every destination that has an in-neighbour gets ``fanout`` edges. A ``fanout`` of
    -1 keeps all in-neighbours either way. ``key``: in [0, 2**64).
    """
    with pool.borrow() as slots:
        indptr, columns, sources, degrees = _sample(
            graph.indptr,
            graph.indices,
            destinations,
            fanout,
            replace,
            np.uint64(key),
            slots.array,
            slots.next_version(),
        )
    csr = Csr(torch.from_numpy(indptr), torch.from_numpy(columns), len(sources))
    return Block(csr, torch.from_numpy(degrees)), sources


@numba.njit(inline="always", cache=True)
def _below(draw: Any, bound: Any) -> Any:
    """A float64 in [0, bound) from the high 53 bits of a draw; never rounds up to ``bound``."""
    return np.float64(np.int64(draw >> np.uint64(11))) * 2.0**-53 * np.float64(bound)


@numba.njit(nogil=True, cache=True)
def _pick_scan(picks: Any, degree: Any, fanout: Any, key: Any) -> None:
    """Choose ``fanout`` of [0, degree) in increasing order, one draw for each candidate.

    Selection sampling: Knuth, TAOCP volume 2, section 3.4.2, algorithm S.
    """
    missing: Any = np.int64(fanout)
    candidate = 0
    while missing > 0:
        picks[fanout - missing] = candidate
        draw = np.int64(_below(mix64_jit(key, np.uint64(candidate)), degree - candidate))
        # Counted, not branched on: the outcome is a coin toss that no predictor learns. Compared
        # as integers: what waits for the last outcome is then a comparison and a subtraction.
        missing -= np.int64(draw < missing)
        candidate += 1


@numba.njit(nogil=True, cache=True)
def _pick_floyd(picks: Any, degree: Any, fanout: Any, key: Any) -> None:
    """Choose ``fanout`` of [0, degree) in increasing order, one draw for each choice.

    Bentley and Floyd, "A sample of brilliance", CACM 1987.
    """
    for chosen in range(fanout):
        top = degree - fanout + chosen
        pick = np.int64(_below(mix64_jit(key, np.uint64(chosen)), top + 1))
        at = chosen
        while at > 0 and picks[at - 1] >= pick:
            at -= 1
        if at < chosen and picks[at] == pick:
            picks[chosen] = top  # larger than all before it
        else:
            for k in range(chosen, at, -1):
                picks[k] = picks[k - 1]
            picks[at] = pick


@numba.njit(nogil=True, cache=True)
def _pick_replace(picks: Any, degree: Any, fanout: Any, key: Any) -> None:
    """Draw ``fanout`` times from [0, degree), in increasing order."""
    for draw in range(fanout):
        picks[draw] = np.int64(_below(mix64_jit(key, np.uint64(draw)), degree))
    if fanout > 64:
        picks[:fanout].sort()
        return
    for k in range(1, fanout):  # insertion: a call of sort costs more than a short row
        pick = picks[k]
        at = k
        while at > 0 and picks[at - 1] > pick:
            picks[at] = picks[at - 1]
            at -= 1
        picks[at] = pick


@numba.njit(nogil=True, cache=True)
def _pick(picks: Any, degree: Any, fanout: Any, replace: bool, key: Any) -> None:
    if replace:
        _pick_replace(picks, degree, fanout, key)
    # A scan costs one draw a candidate, Floyd's method an insertion into a sorted list a pick.
    elif degree <= fanout * (4 + fanout // 8):
        _pick_scan(picks, degree, fanout, key)
    else:
        _pick_floyd(picks, degree, fanout, key)


@numba.njit(nogil=True, cache=True)
def _row_sizes(graph_indptr: Any, destinations: Any, fanout: Any, replace: bool) -> Any:
    """Row pointers of the block: int64 [num_dst + 1]."""
    indptr = np.empty(len(destinations) + 1, np.int64)
    indptr[0] = 0
    last = len(destinations) - 1
    for i in range(len(destinations)):
        prefetch(graph_indptr, destinations[min(i + _AHEAD, last)])
        v = destinations[i]
        size = graph_indptr[v + 1] - graph_indptr[v]
        if fanout >= 0 and size > 0 and (replace or size > fanout):
            size = fanout
        indptr[i + 1] = indptr[i] + size
    return indptr


@numba.njit(nogil=True, cache=True)
def _draw(
    graph_indptr: Any,
    graph_indices: Any,
    destinations: Any,
    indptr: Any,
    fanout: Any,
    replace: bool,
    key: Any,
    columns: Any,
) -> None:
    """Fill the block's rows with the global ids of the neighbours that are kept."""
    picks = np.empty(max(fanout, 1) + 1, np.int64)
    last = len(destinations) - 1
    for i in range(len(destinations)):
        later = graph_indptr[destinations[min(i + _AHEAD, last)]]
        prefetch(graph_indices, later)
        prefetch(graph_indices, later + _LINE)
        v = destinations[i]
        begin = graph_indptr[v]
        degree = graph_indptr[v + 1] - begin
        out = indptr[i]
        size = indptr[i + 1] - out
        if size > 0 and fanout >= 0 and (replace or size < degree):
            _pick(picks, degree, fanout, replace, mix64_jit(key, np.uint64(v)))
            for k in range(size):
                columns[out + k] = graph_indices[begin + picks[k]]
        else:
            for k in range(size):
                columns[out + k] = graph_indices[begin + k]


@numba.njit(nogil=True, cache=True)
def _sample(
    graph_indptr: Any,
    graph_indices: Any,
    destinations: Any,
    fanout: Any,
    replace: bool,
    key: Any,
    slots: Any,
    version: Any,
) -> tuple[Any, Any, Any, Any]:
    # In passes, each of which asks early for the memory that it will read.
    num_dst = len(destinations)
    indptr = _row_sizes(graph_indptr, destinations, fanout, replace)
    nnz = indptr[num_dst]
    columns = np.empty(nnz, np.int64)
    _draw(graph_indptr, graph_indices, destinations, indptr, fanout, replace, key, columns)
    sources = np.empty(min(num_dst + nnz, len(slots)) + 1, np.int64)
    stamp = np.int64(version) << 32
    for i in range(num_dst):
        prefetch(slots, destinations[min(i + _AHEAD, num_dst - 1)])
        sources[i] = destinations[i]
        slots[destinations[i]] = stamp | i
    count: Any = num_dst
    for k in range(nnz):
        prefetch(slots, columns[min(k + _AHEAD, nnz - 1)])
        u = columns[k]
        slot = slots[u]
        # Written whether new or not: a branch on it would be mispredicted every other time.
        seen = slot >> 32 == version
        slot = slot if seen else stamp | count
        slots[u] = slot
        sources[count] = u
        columns[k] = slot & 0xFFFFFFFF
        count += np.int64(not seen)
    degrees = np.empty(count, np.int64)
    for i in range(count):
        prefetch(graph_indptr, sources[min(i + _AHEAD, count - 1)])
        degrees[i] = graph_indptr[sources[i] + 1] - graph_indptr[sources[i]]
    return indptr, columns, sources[:count].copy(), degrees
