"""Whether and when a trainer that died is started anew."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dtrain.config import RobustConfig

YOUNG_S = 5.0
"""A trainer that lived for less has died young: the next one waits before it is started."""

_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0
_SAME_FAILURE = 3


@dataclass(frozen=True)
class Respawn:
    """Start another trainer after ``delay_s`` seconds."""

    delay_s: float
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """Start no other trainer."""

    reason: str


class RespawnPolicy:
    """The budget and the backoff of one worker; times in seconds on any clock."""

    def __init__(self, robust: RobustConfig) -> None:
        self._robust = robust
        self._respawns: deque[float] = deque()
        self._delay_s = 0.0
        self._failure = ""
        self._failures = 0

    def after_death(
        self, now: float, lived_s: float, *, life: int, failure: str | None
    ) -> Respawn | GiveUp:
        """What to do after the trainer of ``life`` (counted from 1) died, ``lived_s`` after its
        start.

        ``failure``: the exception that it ended with, None if it just died. A trainer that ends
        young with the same exception again and again has met a bug that no new life will mend.
        """
        young = lived_s < YOUNG_S
        robust = self._robust
        self._failures = self._failures + 1 if young and failure == self._failure else 1
        self._failure = failure or ""
        if failure is not None and young and self._failures >= _SAME_FAILURE:
            return GiveUp(f"it failed {self._failures} times in a row in the same way")
        while self._respawns and self._respawns[0] <= now - robust.respawn_window_s:
            self._respawns.popleft()
        if len(self._respawns) >= robust.respawns:
            return GiveUp(
                f"{robust.respawns} respawns in {robust.respawn_window_s:g} s are used up "
                "(robust.respawns)"
            )
        if young and life > 1:
            longest_s = max(_LONGEST_BACKOFF_S, robust.respawn_backoff_s)
            self._delay_s = min(longest_s, max(_FIRST_BACKOFF_S, 2 * self._delay_s))
        else:
            self._delay_s = robust.respawn_backoff_s
        self._respawns.append(now)
        used = f"respawn {len(self._respawns)} of {robust.respawns}"
        wait = f" after {self._delay_s:g} s" if self._delay_s else ""
        return Respawn(self._delay_s, used + wait)
