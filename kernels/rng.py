"""Counter-based random numbers: every draw is a pure function of a key and a counter.

The mixing function is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014) applied to ``key + (counter + 1) * golden``.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def derive_key(*parts: int) -> int:
    """Fold integers into one 64-bit key, e.g. ``derive_key(seed, step, microbatch, layer)``.

    Order matters; negative parts are taken modulo 2**64. Returns an int in [0, 2**64).
    """
    key = 0
    for part in parts:
        key = mix64(key, part & _MASK)
    return key


def mix64(key: int, counter: int) -> int:
    """One 64-bit draw for ``(key, counter)``; the Python twin of :func:`mix64_jit`."""
    z = (key + ((counter + 1) & _MASK) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _M1) & _MASK
    z = ((z ^ (z >> 27)) * _M2) & _MASK
    return z ^ (z >> 31)


def signed(key: int) -> int:
    """The int64 of the same bits as ``key``, which is in [0, 2**64), for what knows no uint64."""
    return key - (1 << 64) if key >= 1 << 63 else key


def unsigned(bits: int) -> int:
    """The key in [0, 2**64) of the same bits as ``bits``, an int64; see :func:`signed`."""
    return bits & _MASK


@numba.njit(inline="always", cache=True)
def mix64_jit(key: Any, counter: Any) -> Any:
    """One uint64 draw for ``(key, counter)``, both uint64, inside numba code."""
    z = np.uint64(key) + (np.uint64(counter) + np.uint64(1)) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
    return z ^ (z >> np.uint64(31))


def mix64_array(key: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Draws for one key and an array of counters; ``counters``: uint64 [n], returns uint64 [n]."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_M1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_M2)
        return np.asarray(z ^ (z >> np.uint64(31)))
