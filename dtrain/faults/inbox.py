"""Faults handed to a trainer that runs, through files in ``RUN_DIR/faults/inbox``."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path

from dtrain.faults.spec import FaultSpec

_GRAIN_NS = 100_000_000


class Inbox:
    """The faults that wait for one life of one worker.

    A fault is addressed to an incarnation: what a trainer did not take before its end concerns
    nobody afterwards.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "faults" / "inbox"
        self._seen_ns = 0

    def put(self, worker: int, incarnation: str, fault: FaultSpec) -> str:
        """Hand a fault over; returns the name under which its firings are booked."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"injected-{time.time_ns()}-{uuid.uuid4().hex[:8]}"
        target = self._folder / f"{worker}.{incarnation}.{name}.json"
        temporary = self._folder / f".{name}"
        temporary.write_text(json.dumps(fault.model_dump(mode="json", exclude_unset=True)))
        temporary.rename(target)
        return name

    def changed(self) -> bool:
        """Whether files may have come since the last look; one ``stat``."""
        try:
            now_ns = os.stat(self._folder).st_mtime_ns
        except FileNotFoundError:
            return False
        changed = now_ns != self._seen_ns
        # A file that comes within the clock's grain of this look leaves the same time behind.
        settled = time.time_ns() - now_ns > _GRAIN_NS
        self._seen_ns = now_ns if settled else 0
        return changed

    def take(self, worker: int, incarnation: str) -> list[tuple[str, str]]:
        """Take what is addressed to this incarnation: (name, fault as JSON), oldest first.

        Files for earlier incarnations of the worker are removed.
        """
        taken = []
        for file in sorted(self._folder.glob(f"{worker}.*.json")):
            _, addressee, name, _ = file.name.split(".")
            try:
                text = file.read_text()
                file.unlink()
            except FileNotFoundError:
                continue
            if addressee == incarnation:
                taken.append((name, text))
        return taken
