"""Stop signals as something to wait for."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import wait
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequested(Exception):
    """A stop signal came during a wait for something else."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class StopSignals:
    """While entered, SIGTERM and SIGINT make ``fileno()`` readable and do nothing else.

    They are written to a pipe by the interpreter itself, so that none is missed between a check
    and a wait. Only for the main thread.
    """

    def __enter__(self) -> StopSignals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._read

    def take(self) -> signal.Signals | None:
        """The first stop signal since the last call."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return None
        stops = [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]
        return stops[0] if stops else None

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal; False when none came within ``timeout_s`` seconds."""
        return bool(wait([self._read], timeout_s))


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler must exist, or the signal ends the process; the pipe carries the news."""
