"""Whether the job is complete, as a supervisor learns it from the run's record."""

from __future__ import annotations

import os
import time

from dtrain.errors import DtrainError
from dtrain.runfolder import RunFolder

_POLL_S = 1.0


class Completion:
    """Looks for a record that says ``done`` and was written after this object was made.

    The record of an earlier run in the same folder, which this job resumes with more steps, does
    not count. Told apart by the file itself, since the clocks of several nodes need not agree.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._read = self._version()
        self._done = False
        self._next_s = 0.0

    def done(self, *, now: bool = False) -> bool:
        """Whether the job is complete; looks once a second, or at once with ``now``."""
        if self._done or (not now and time.monotonic() < self._next_s):
            return self._done
        self._next_s = time.monotonic() + _POLL_S
        version = self._version()
        if version is not None and version != self._read:
            try:
                record = self._folder.read_run()
            except DtrainError:
                # Unreadable at this moment, on a network's file system say; looked at again.
                return False
            self._read = version
            self._done = record is not None and record.status == "done"
        return self._done

    def _version(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._folder.path / "run.json")
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
