"""The flag by which anything that notices a fault stops every wait of this worker at once."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from dtrain.errors import PeerLostError


class FaultFlag:
    """Set once with a reason; wakes every thread that waits through it.

    Threads wait on conditions of their own choosing with :meth:`wait_for`, so that no wait in the
    worker can outlast a fault.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reason: str | None = None
        self._descriptor: int | None = None

    @property
    def reason(self) -> str | None:
        """Why the flag was set, or None."""
        return self._reason

    def set(self, reason: str) -> None:
        """Raise the flag; the first reason stays."""
        with self._condition:
            if self._reason is None:
                self._reason = reason
                if self._descriptor is not None:
                    os.eventfd_write(self._descriptor, 1)
            self._condition.notify_all()

    def descriptor(self) -> int:
        """What is readable once the flag is set, for waits on descriptors; it stays the flag's."""
        with self._condition:
            if self._descriptor is None:
                flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
                self._descriptor = os.eventfd(self._reason is not None, flags)
                weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor

    def notify(self) -> None:
        """Let waiting threads look at their conditions again."""
        with self._condition:
            self._condition.notify_all()

    def check(self) -> None:
        """Raise :class:`PeerLostError` if the flag is set."""
        if self._reason is not None:
            raise PeerLostError(self._reason)

    def wait_for(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until ``done()``; whoever makes it true calls :meth:`notify`.

        Raises:
            PeerLostError: the flag was set, or ``timeout_s`` seconds passed.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not done():
                if self._reason is not None:
                    raise PeerLostError(self._reason)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerLostError(f"{what}: nothing came within {timeout_s:g} s")
                self._condition.wait(left)
