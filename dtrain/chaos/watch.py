"""What can be seen of a job while it runs: events, committed steps, descriptors, threads."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.faults import processes

_LOOKS = 20


class Follower:
    """Reads the complete lines that were added to a JSONL file since the last look."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self.lines: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """The new lines; all are kept in ``lines``."""
        try:
            with self._file.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.lines += new
        return new


@dataclass
class Resources:
    """A trainer's descriptors and threads: after its first committed steps, and last seen.

    The last is the least of some looks: while a generation ends, two are there at once.
    """

    worker: int
    first: tuple[int, int]
    looks: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_LOOKS))

    @property
    def last(self) -> tuple[int, int]:
        """Descriptors and threads, each the least of the last looks."""
        descriptors, threads = zip(*self.looks, strict=True)
        return min(descriptors), min(threads)


@dataclass
class Watch:
    """A job's run folder and trainers. ``struck_s``: when something happened from outside."""

    run_dir: Path
    struck_s: list[float] = field(default_factory=list)
    resources: dict[int, Resources] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events = Follower(self.run_dir / "events.jsonl")
        self._metrics = Follower(self.run_dir / "metrics.jsonl")
        self._outside: dict[int, int] = {}
        self._trainers: dict[int, tuple[int, int]] = {}

    def look(self) -> None:
        """Read what is new and count what the trainers hold."""
        for event in self.events.look():
            if event["kind"] == "worker_started":
                self._outside[event["pid"]] = event["worker"]
            elif event["kind"] == "generation_started":
                # Others may commit many steps before a newcomer is let in.
                for pid, worker in list(self._outside.items()):
                    if worker in event["workers"]:
                        self._trainers[pid] = (self._outside.pop(pid), self.committed)
        self._metrics.look()
        for pid, (worker, since) in self._trainers.items():
            # The first steps open connections and start threads.
            if self.committed < since + 3:
                continue
            counts = processes.counts_of(pid)
            if counts is None:
                continue
            seen = self.resources.setdefault(pid, Resources(worker, counts))
            seen.looks.append(counts)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The metrics of committed steps, in the order in which they were written."""
        return [m for m in self._metrics.lines if "loss" in m and "seeds" in m]

    @property
    def committed(self) -> int:
        """The newest committed step."""
        return max((m["step"] for m in self.steps), default=0)

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds."""
        return [e for e in self.events.lines if e["kind"] in kinds]

    def growth(self) -> tuple[int, int]:
        """The largest growth in descriptors and in threads of a trainer in its life."""
        seen = self.resources.values()
        return (
            max((r.last[0] - r.first[0] for r in seen), default=0),
            max((r.last[1] - r.first[1] for r in seen), default=0),
        )

    def pauses(self) -> list[float]:
        """Seconds from each fault, from within or outside, to the next step committed after it."""
        found = []
        for struck_s in [*self.struck_s, *(e["time"] for e in self.of_kind("fault_injected"))]:
            later = [m["time"] for m in self.steps if m["time"] > struck_s]
            if later:
                found.append(min(later) - struck_s)
        return found
