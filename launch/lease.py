"""When a trainer counts as hung."""

from __future__ import annotations

from dtrain.runtime.heartbeat import Sign

_START_S = 60.0
"""Silence allowed before the first beat: a spawned interpreter has yet to start."""

_AFTER_S = 0.005
"""So that a look at the end of the allowed time is not just before it."""


class Lease:
    """A trainer's right to be taken for alive, renewed by its signs of life.

    All times are seconds on one monotonic clock. A supervisor that was itself late (descheduled,
    suspended, stopped) cannot blame its trainer for the same time: all silence then counts anew.
    """

    def __init__(self, lease_s: float, progress_s: float, now: float) -> None:
        """``lease_s``: silence that is allowed. ``progress_s``: longest stay of the main thread in
        one action in which it does not wait for others; 0 for no limit."""
        self._lease_s = lease_s
        self._progress_s = progress_s
        self._looked_s = now
        self._floor_s = now
        self._due_s = now

    @property
    def tick_s(self) -> float:
        """The longest time between two looks."""
        return min(1.0, self._lease_s / 5)

    def next_look_s(self, now: float) -> float:
        """Seconds until the next look: a tick, or less where the allowed time ends sooner."""
        left_s = self._due_s - now
        return min(self.tick_s, left_s + _AFTER_S) if left_s > 0 else self.tick_s

    def look(self, now: float, sign: Sign) -> str | None:
        """The reason why the trainer counts as hung, or None."""
        if now - self._looked_s > self.tick_s + self._lease_s / 2:
            self._floor_s = now
        self._looked_s = now
        started = sign.beat_s > 0
        allowed_s = self._lease_s if started else max(self._lease_s, _START_S)
        since_s = max(sign.beat_s, self._floor_s)
        self._due_s = since_s + allowed_s
        if now > self._due_s:
            return f"no sign of life for {now - since_s:.1f} s (robust.lease_s), {_where(sign)}"
        if not self._progress_s or sign.waiting or not sign.progress_s:
            return None
        since_s = max(sign.progress_s, self._floor_s)
        self._due_s = min(self._due_s, since_s + self._progress_s)
        if now > since_s + self._progress_s:
            return f"no progress for {now - since_s:.1f} s (robust.progress_s), {_where(sign)}"
        return None


def _where(sign: Sign) -> str:
    if not sign.progress_s:
        return "before its first action"
    return f"in {sign.phase or 'an unnamed action'} of step {sign.step}"
