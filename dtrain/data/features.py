"""A cache of the feature rows that sampling asks for most, in front of a graph's store.

It never changes a value, so it may differ from worker to worker. It pays where a row of the store
is far away: on a remote store, or on a disk that is slower than memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError

_EMPTY = -1


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
    """Keeps ``share`` of the rows of a store with dense features in memory.

    At first those of the nodes with the highest degree, which neighbour sampling meets most often;
    :meth:`readmit` then goes by what was really asked for. ``use`` counts since the last admission.
    Not safe to use from several threads.

    Raises:
        DtrainError: ``share`` outside (0, 1], or sparse features.
    """

    def __init__(self, store: GraphStore, share: float) -> None:
        if not 0 < share <= 1:
            raise DtrainError(f"feature cache: expected a share in (0, 1], got {share}")
        if store.meta.feature_format != "dense":
            raise DtrainError(
                "feature cache: expected dense features, got sparse ones; leave the cache out"
            )
        self._store = store
        self._size = max(1, int(share * store.num_nodes))
        self._degree = store.in_degree()
        self._asked = np.zeros(store.num_nodes, np.int64)
        self._slot = np.full(store.num_nodes, _EMPTY, np.int32)
        self._rows = torch.empty(self._size, store.meta.num_features)
        self.use = CacheUse()
        self._admit(self._hottest(self._degree))

    def gather(self, nodes: NDArray[np.int64]) -> Tensor:
        """Feature rows of ``nodes`` (int64 [n]), float32 [n, F], as ``gather_features`` gives."""
        slots = self._slot[nodes]
        hit = np.flatnonzero(slots != _EMPTY)
        missed = np.flatnonzero(slots == _EMPTY)
        np.add.at(self._asked, nodes, 1)
        self.use.rows += len(nodes)
        self.use.hits += len(hit)
        out = torch.empty(len(nodes), self._rows.shape[1])
        out[torch.from_numpy(hit)] = self._rows[torch.from_numpy(slots[hit]).long()]
        if len(missed):
            out[torch.from_numpy(missed)] = self._fetch(nodes[missed])
        return out

    def readmit(self) -> None:
        """Keep the rows asked for most so far, of equals those of higher degree."""
        order = np.lexsort((-self._degree, -self._asked))
        self._admit(np.sort(order[: self._size]))
        self.use = CacheUse()

    def _hottest(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.sort(np.argsort(-counts, kind="stable")[: self._size])

    def _admit(self, nodes: NDArray[np.int64]) -> None:
        """Replace what is not among ``nodes`` by those that are not here yet."""
        wanted = np.zeros(len(self._slot), bool)
        wanted[nodes] = True
        leaving = np.flatnonzero((self._slot != _EMPTY) & ~wanted)
        free = np.setdiff1d(np.arange(self._size), self._slot[self._slot != _EMPTY])
        places = np.concatenate([free, self._slot[leaving]]).astype(np.int32)
        self._slot[leaving] = _EMPTY
        coming = nodes[self._slot[nodes] == _EMPTY]
        places = places[: len(coming)]
        self._rows[torch.from_numpy(places).long()] = self._fetch(coming)
        self._slot[coming] = places

    def _fetch(self, nodes: NDArray[np.int64]) -> Tensor:
        rows = self._store.gather_features(nodes)
        assert isinstance(rows, Tensor)
        return rows
