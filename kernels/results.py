"""Memory for the results of compiled loops, used again when nobody holds a result any more.

The C library gives large blocks back to the system at once: those above 32 MB always, and smaller
ones as it goes. A fresh 100 MB are as many page faults, and zeros written by the system, as take
longer than the sum that fills them where rows have two entries (a road network, F=256: 42 ms, and
25 in memory that was used before).
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LINE = 64  # bytes: a row of 16 floats that begins with a line is read in one access
_LARGE = 4 << 20
"""Bytes from which the C library may take fresh memory for each result."""
_KEPT_BYTES = 512 << 20


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised numpy array that begins with a cache line.

    Numpy asks for huge pages where the array is large, which torch's allocator does not by default.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _LARGE:
        return _fresh(size).view(dtype).reshape(shape)
    raw = _kept().take(size)
    # Of a memoryview: views of this array then hold the array itself, not the memory behind it.
    array = np.frombuffer(memoryview(raw), dtype, count)
    _kept().lend(raw, array)
    return array.reshape(shape)


def result(like: Tensor, rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """An uninitialised tensor [rows, width] that begins with a cache line, and its elements as a
    flat array; ``dtype``: float32 or float64; ``like``: any tensor on the CPU."""
    if rows * width * dtype.itemsize < _LARGE:
        # Torch's allocator begins with a line, too, and costs a third of the steps of empty().
        tensor = like.new_empty((rows, width), dtype=dtype)
        return tensor, tensor.numpy().reshape(-1)
    array = empty((rows * width,), np.float64 if dtype is torch.float64 else np.float32)
    return torch.from_numpy(array.reshape(rows, width)), array


def release() -> None:
    """Give the memory that is held for later results back to the system."""
    _kept().limit(0)


def keep_nothing() -> None:
    """Keep no memory from now on, for a process whose memory is limited."""
    _kept().most = 0
    release()


def _fresh(size: int) -> Any:
    """Bytes [size] that begin with a cache line."""
    raw = np.empty(size + _LINE, np.uint8)
    begin = -raw.ctypes.data % _LINE
    return raw[begin : begin + size]


class _Lent(weakref.ref):  # type: ignore[type-arg]
    """A result that is in use, and its memory."""

    __slots__ = ("raw",)
    raw: Any


class _Kept:
    """Memory of former results, at most ``most`` bytes.

    Every step is one operation on a dict: results end on any thread, and even within these methods,
    where a lock would wait for itself.
    """

    def __init__(self) -> None:
        self._free: dict[int, Any] = {}
        self._lent: dict[int, _Lent] = {}
        self.most = _KEPT_BYTES

    def take(self, size: int) -> Any:
        """Bytes [at least ``size``], from what is kept if some of that is no more than twice it."""
        # In steps of an eighth: blocks of about one size come in every step of a training.
        step = 1 << max(0, size.bit_length() - 4)
        wanted = -(-size // step) * step
        latest = list(self._free.values())
        latest.reverse()
        # The smallest, and of equals the latest: caches may still hold it.
        for raw in latest:
            if raw.size == wanted and self._free.pop(id(raw), None) is not None:
                return raw
        for raw in sorted((raw for raw in latest if size <= raw.size <= 2 * size), key=len):
            if self._free.pop(id(raw), None) is not None:
                return raw
        return _fresh(wanted)

    def lend(self, raw: Any, array: Any) -> None:
        """Have ``raw`` back when nothing refers to ``array`` any more."""
        lent = _Lent(array, self._ended)
        lent.raw = raw
        self._lent[id(lent)] = lent

    def _ended(self, lent: Any) -> None:
        del self._lent[id(lent)]
        self.give_back(lent.raw)

    def give_back(self, raw: Any) -> None:
        """Keep ``raw``, which nothing refers to any more."""
        self._free[id(raw)] = raw
        self.limit(self.most)

    def limit(self, size: int) -> None:
        """Let the oldest go until ``size`` bytes are left."""
        kept = list(self._free.items())
        excess = sum([raw.size for _, raw in kept]) - size
        for key, raw in kept:
            if excess <= 0:
                break
            self._free.pop(key, None)
            excess -= raw.size


@functools.cache
def _kept() -> _Kept:
    return _Kept()
