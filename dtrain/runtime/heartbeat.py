"""The trainer's sign of life: a few numbers in memory that it shares with its supervisor."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from dataclasses import dataclass

_BEAT_S = 0.1
_TEXT_BYTES = 120


class _Shared(ctypes.Structure):
    _fields_ = (
        ("beat_s", ctypes.c_double),
        ("progress_s", ctypes.c_double),
        ("waiting", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * _TEXT_BYTES),
    )


@dataclass(frozen=True)
class Sign:
    """What the supervisor reads.

    ``beat_s``: when the trainer's heart last beat, 0 before its first; ``progress_s``: when its
    main thread last went on to something else (both ``time.monotonic``). ``waiting``: it waits for
    others, so that standing still is not its own fault. ``phase``: the action it is in.
    """

    beat_s: float
    progress_s: float
    waiting: bool
    step: int
    phase: str


class Heartbeat:
    """Memory that a supervisor makes, hands to its trainer, and reads.

    It is a nameless file that travels as a descriptor: nothing is left of it, however its users
    end.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """New memory, or that behind another heartbeat's ``descriptor``, which this one then
        owns."""
        if descriptor is None:
            descriptor = os.memfd_create("dtrain-heartbeat")
            os.ftruncate(descriptor, ctypes.sizeof(_Shared))
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._shared = _Shared.from_buffer(mmap.mmap(descriptor, ctypes.sizeof(_Shared)))
        self._stop = threading.Event()

    def read(self) -> Sign:
        """The newest sign."""
        s = self._shared
        return Sign(
            s.beat_s, s.progress_s, bool(s.waiting), s.step, s.phase.decode("utf-8", "replace")
        )

    def start(self) -> None:
        """In the trainer: beat from a thread of its own, which a stopped or GIL-locked process
        cannot do."""
        self._beat()
        threading.Thread(target=self._run, name="dtrain-heart", daemon=True).start()

    def stop(self) -> None:
        """In the trainer: end the thread."""
        self._stop.set()

    def phase(self, text: str, step: int, *, waiting: bool = False) -> None:
        """In the trainer's main thread: say what comes next."""
        self._shared.phase = text.encode()[: _TEXT_BYTES - 1]
        self._shared.step = step
        self._shared.waiting = int(waiting)
        self._shared.progress_s = time.monotonic()

    def _run(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self._beat()

    def _beat(self) -> None:
        self._shared.beat_s = time.monotonic()
