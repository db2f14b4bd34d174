"""Whose turn a worker's only core is: the thread's that computes, or the one's that samples ahead.

Where every core of a node has a worker of one thread, threads that sample ahead take the cores away
from actions for slices of some milliseconds each, as long as an action. Here they run while the
computing thread waits, for a peer's activations or for the vote, and nothing is computed less.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_S = 0.02
"""For what is being sampled when the core is wanted back: what takes longer waits for a disk."""


def cores_are_scarce(threads: int, workers: int, cores: int) -> bool:
    """Whether ``workers`` of so many ``threads`` leave none of a node's ``cores`` for sampling.

    A worker of several threads computes in parallel only now and then, and has one to spare.
    """
    return threads == 1 and workers >= cores


class CoreTurns:
    """Turns of one computing and one sampling thread.

    Without ``scarce`` both run when they like. No result depends on turns, and no fault can make
    anybody wait for ever: the computing thread waits a short time at most, the sampling one until
    the other has nothing to do or :meth:`end` is called.
    """

    def __init__(self, *, scarce: bool) -> None:
        self._scarce = scarce
        self._changed = threading.Condition()
        self._computing = False
        self._sampling = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """For the computing thread: the core is its own, but for :meth:`waiting`."""
        self._take()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For the computing thread: it waits for somebody else, and goes on as before."""
        computing = self._computing
        self._leave()
        try:
            yield
        finally:
            if computing:
                self._take()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """For the sampling thread: wait for the core, and have it until the end of the block."""
        self._begin()
        try:
            yield
        finally:
            with self._changed:
                self._sampling = False
                self._changed.notify_all()

    def give_way(self) -> None:
        """Within :meth:`sampling`: let the other thread go first if it wants the core."""
        if self._computing:
            with self._changed:
                self._sampling = False
                self._changed.notify_all()
            self._begin()

    def end(self) -> None:
        """Both run when they like from now on."""
        with self._changed:
            self._scarce = self._computing = False
            self._changed.notify_all()

    def _take(self) -> None:
        if not self._scarce:
            return
        with self._changed:
            self._computing = True
            self._changed.wait_for(lambda: not self._sampling, _LONGEST_S)

    def _leave(self) -> None:
        with self._changed:
            self._computing = False
            self._changed.notify_all()

    def _begin(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._computing)
            self._sampling = self._scarce
