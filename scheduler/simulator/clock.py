"""A virtual clock: what happens when is decided by a queue, and no time passes in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

Do = Callable[[], None]


class Actor(Protocol):
    """A process for which something is due: it acts only while it lives and is not stopped."""

    alive: bool
    stopped: bool
    woken: list[Do]


class Clock:
    """Virtual time in seconds. What is due at one time happens in the order of its asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Actor | None, Do]] = []
        self._ticket = 0

    def at(self, time_s: float, actor: Actor | None, action: Do) -> None:
        """Do something at a time: as ``actor`` if it lives then, after it wakes if it is stopped;
        in any case where ``actor`` is None."""
        self._ticket += 1
        heapq.heappush(self._queue, (time_s, self._ticket, actor, action))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; whether ``until`` came true (it is looked at after every event)."""
        end_s = self.now + seconds
        while self.step(end_s):
            if until is not None and until():
                return True
        return False

    def step(self, end_s: float) -> bool:
        """Do what is due next; False, at ``end_s``, where nothing is due before or at that time."""
        queue = self._queue
        if not queue or queue[0][0] > end_s:
            self.now = end_s
            return False
        self.now, _, actor, action = heapq.heappop(queue)
        if actor is None:
            action()
        elif actor.alive and actor.stopped:
            actor.woken.append(action)
        elif actor.alive:
            action()
        return True
