"""The order in which an epoch visits its seeds (or partitions), and its cut into microbatches."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from dtrain.kernels.rng import derive_key, mix64_array

Ids = NDArray[np.int64]

_EPOCH_TAG = 0x45504F43
_ORDERS_KEPT = 2  # this epoch and the next, which is sampled ahead


def permutation(ids: Ids, key: int) -> Ids:
    """Shuffle ``ids`` (int64 [n], distinct) by one random draw for every id; returns int64 [n].

    A draw is a bijection of the id for a fixed ``key``, so no two draws are equal.
    """
    return ids[np.argsort(mix64_array(key, ids.astype(np.uint64)), kind="stable")]


def part_bounds(count: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of part ``part`` of ``count`` items cut into ``parts`` near-equal runs.

    The first ``count % parts`` parts have one item more, as in ``numpy.array_split``.
    """
    size, longer = divmod(count, parts)
    begin = part * size + min(part, longer)
    return begin, begin + size + (part < longer)


class EpochOrder:
    """A permutation of the same ids for every epoch, a pure function of (seed, epoch).

    Safe to use from several threads; keeps the orders of the two epochs used last.
    """

    def __init__(self, ids: Ids, seed: int, *, shuffle: bool = True) -> None:
        self.ids = ids
        self._seed = seed
        self._shuffle = shuffle
        self._lock = threading.Lock()
        self._orders: OrderedDict[int, Ids] = OrderedDict()

    def order(self, epoch: int) -> Ids:
        """int64 [n]: the ids in the order of ``epoch``; not to be written to."""
        if not self._shuffle:
            return self.ids
        with self._lock:
            if epoch in self._orders:
                self._orders.move_to_end(epoch)
            else:
                key = derive_key(self._seed, _EPOCH_TAG, epoch)
                self._orders[epoch] = permutation(self.ids, key)
                while len(self._orders) > _ORDERS_KEPT:
                    self._orders.popitem(last=False)
            return self._orders[epoch]
