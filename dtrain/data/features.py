"""A cache of the feature rows that sampling asks for most, in front of a graph's store.

It never changes a value, so it may differ from worker to worker. It pays where a row of the store
is far away: on a remote store, or on a disk that is slower than memory.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.rows.stored import StoredRows


class Features(Protocol):
    """Where the rows of nodes' features come from."""

    def gather_features(self, nodes: NDArray[np.int64]) -> Tensor | SparseRows:
        """As :meth:`dtrain.data.store.GraphStore.gather_features`."""
        ...

    def stored_features(self, nodes: NDArray[np.int64]) -> StoredRows | None:
        """The same rows where they lie in one matrix, None where they do not."""
        ...


@dataclass
class CacheUse:
    """``rows``: asked for so far; ``hits``: those of them that were in the cache."""

    rows: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of hits; 0 before the first row."""
        return self.hits / self.rows if self.rows else 0.0


class FeatureCache:
    """Keeps ``rows`` feature rows of a store in memory, those of the nodes of highest degree.

    Neighbour sampling meets these most often. They are read when a row is first asked for: a worker
    that never asks has no cache. ``use`` counts from then on. Safe to use from several threads.

    Raises:
        DtrainError: the store's features are sparse.
    """

    def __init__(self, store: GraphStore, rows: int) -> None:
        if store.meta.feature_format != "dense":
            raise DtrainError(
                "memory.feature_cache: expected none for a store of sparse features, got "
                f"{rows} rows; leave it out"
            )
        self._store = store
        self._size = min(rows, store.num_nodes)
        self._lock = threading.Lock()
        self._slot: NDArray[np.int32] | None = None
        self._rows: NDArray[np.float32] = np.empty((0, store.meta.num_features), np.float32)
        self.use = CacheUse()

    def gather_features(self, nodes: NDArray[np.int64]) -> Tensor:
        """Feature rows of ``nodes`` (int64 [n]), float32 [n, F], as the store gives them."""
        nodes = np.ascontiguousarray(nodes, dtype=np.int64)
        if len(nodes) and (nodes.min() < 0 or nodes.max() >= self._store.num_nodes):
            # The store says what is wrong with them.
            return _dense(self._store, nodes)
        slot = self._filled()
        out = torch.empty(len(nodes), self._rows.shape[1])
        missed = np.empty(len(nodes), np.int64)
        count = _take(slot, nodes, self._rows, out.numpy(), missed)
        if count:
            out.numpy()[missed[:count]] = _dense(self._store, nodes[missed[:count]]).numpy()
        with self._lock:
            self.use.rows += len(nodes)
            self.use.hits += len(nodes) - count
        return out

    def stored_features(self, nodes: NDArray[np.int64]) -> None:
        """None: the rows lie in two places."""

    def _filled(self) -> NDArray[np.int32]:
        """int32 [N]: where each node's row lies here, -1 for nowhere."""
        with self._lock:
            if self._slot is None:
                # Of equal degrees the first; in order of their numbers, as they lie in the store.
                order = np.argsort(-self._store.in_degree(), kind="stable")
                hottest = np.sort(order[: self._size])
                self._rows = _dense(self._store, hottest).numpy()
                slot = np.full(self._store.num_nodes, -1, np.int32)
                slot[hottest] = np.arange(self._size, dtype=np.int32)
                self._slot = slot
            return self._slot


def cache_bytes(store: GraphStore, share: float) -> int:
    """What a cache of ``share`` of a store's rows takes: the rows, and a number for each node."""
    return int(share * store.num_nodes) * 4 * store.meta.num_features + 4 * store.num_nodes


def rows_within(store: GraphStore, size_bytes: int) -> int:
    """How many rows a cache of so many bytes has room for."""
    row = 4 * store.meta.num_features
    return max(0, size_bytes - 4 * store.num_nodes) // max(1, row)


def _dense(store: GraphStore, nodes: NDArray[np.int64]) -> Tensor:
    rows = store.gather_features(nodes)
    assert isinstance(rows, Tensor)
    return rows


@numba.njit(cache=True, nogil=True)
def _take(slot: Any, nodes: Any, rows: Any, out: Any, missed: Any) -> Any:
    """Copy the rows that are here; the places of the others, and how many they are."""
    count = 0
    for i in range(len(nodes)):
        at = slot[nodes[i]]
        if at >= 0:
            out[i] = rows[at]
        else:
            missed[count] = i
            count += 1
    return count
