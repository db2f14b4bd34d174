"""Random numbers from a key and a counter: equal keys give equal numbers, on any machine.

The n-th number of a key is SplitMix64's finalizer of ``key + n * gamma`` (Steele, Lea and Flood,
Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(*words: int) -> float:
    """A number in [0, 1) that ``words`` alone decide."""
    state = 0
    for word in words:
        state = _mix((state + _GAMMA * (word + 1)) & _MASK)
    return _unit(state)


def _unit(bits: int) -> float:
    return (bits >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _fold(state: int, part: int | str) -> int:
    data = part.encode() if isinstance(part, str) else b"%d" % part
    # The length and the type keep parts apart that spell the same bytes together.
    state = _mix(state ^ (2 * len(data) + isinstance(part, str)) * _GAMMA & _MASK)
    for start in range(0, len(data), 8):
        state = _mix((state ^ int.from_bytes(data[start : start + 8], "little")) + _GAMMA & _MASK)
    return state


class Chance:
    """A stream of random numbers that its key alone decides."""

    def __init__(self, *key: int | str) -> None:
        self._key = 0
        for part in key:
            self._key = _fold(self._key, part)
        self._counter = 0

    def branch(self, *key: int | str) -> Chance:
        """A stream of its own, whatever has been drawn from this one."""
        other = Chance()
        other._key = self._key
        for part in key:
            other._key = _fold(other._key, part)
        return other

    def bits(self) -> int:
        """64 random bits."""
        self._counter += 1
        return _mix((self._key + self._counter * _GAMMA) & _MASK)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return _unit(self.bits())

    def uniform(self, low: float, high: float) -> float:
        """Uniform between ``low`` and ``high``."""
        return low + (high - low) * self.random()

    def exponential(self, mean: float) -> float:
        """Exponential with the given mean."""
        return -mean * math.log1p(-self.random())

    def randrange(self, stop: int) -> int:
        """An integer in [0, ``stop``)."""
        if stop < 1:
            raise ValueError(f"stop: expected at least 1, got {stop}")
        return (self.bits() * stop) >> 64

    def randint(self, low: int, high: int) -> int:
        """An integer in [``low``, ``high``]."""
        return low + self.randrange(high - low + 1)

    def choice(self, items: Sequence[_T]) -> _T:
        """One of the items."""
        return items[self.randrange(len(items))]

    def sample(self, items: Sequence[_T], count: int) -> list[_T]:
        """``count`` different ones of the items, in random order."""
        if not 0 <= count <= len(items):
            raise ValueError(f"count: expected 0 to {len(items)}, got {count}")
        pool = list(items)
        for i in range(count):
            j = i + self.randrange(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]
