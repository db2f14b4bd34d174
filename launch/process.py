"""A trainer's process, seen from its supervisor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Literal, Protocol

from dtrain.launch.fork_client import interpreter, module_environment
from dtrain.launch.handover import STANDARD, Handover
from dtrain.launch.report import Report
from dtrain.launch.signals import StopSignals
from dtrain.runtime.heartbeat import Heartbeat

_KILL_S = 30.0
"""A killed process ends at once unless the kernel is busy on its behalf, with a dead disk, say."""


class Starter(Protocol):
    """Makes processes that become trainers."""

    def start(self, descriptors: Sequence[int], signals: StopSignals) -> tuple[int, int]:
        """Start one with a handover's ``descriptors``; its pid and its process descriptor."""

    def exit_code(self, pid: int) -> int | None:
        """The exit code of one that has ended, negative for a signal; None where unknown."""


class Spawner:
    """Starts a new interpreter for each trainer: slow, for what does not survive a fork."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, descriptors: Sequence[int], signals: StopSignals) -> tuple[int, int]:
        """Spawn a trainer; returns its pid and its process descriptor."""
        numbers = ",".join(str(descriptor) for descriptor in descriptors)
        process = subprocess.Popen(
            [*interpreter(), "-m", "dtrain.launch.handover", numbers],
            env=module_environment(),
            pass_fds=[descriptor for descriptor in descriptors if descriptor not in STANDARD],
        )
        self._processes[process.pid] = process
        return process.pid, os.pidfd_open(process.pid)

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a trainer that has ended."""
        return self._processes.pop(pid).wait()


class TrainerProcess:
    """One running trainer: its process, the pipe that its report comes by, and its lifeline."""

    def __init__(
        self, starter: Starter, pid: int, handle: int, reports: Connection, lifeline: int
    ) -> None:
        """``handle``: the process's descriptor. Its pid may be used again as soon as it is reaped,
        which is not this process's doing."""
        self._starter = starter
        self._handle = handle
        self._reports: Connection | None = reports
        self._lifeline = lifeline
        self.report: Report | None = None
        self.pid = pid

    @classmethod
    def start(
        cls, handover: Handover, heartbeat: Heartbeat, starter: Starter, signals: StopSignals
    ) -> TrainerProcess:
        """Start a trainer.

        Raises:
            PreloadError: the fork server ended (its own message is on stderr).
            StopRequested: a stop signal came before there was a trainer.
        """
        receive, send = multiprocessing.Pipe(duplex=False)
        words, (end, lifeline) = handover.write(), os.pipe()
        try:
            descriptors = (words, end, send.fileno(), heartbeat.descriptor, *STANDARD)
            pid, handle = starter.start(descriptors, signals)
        except BaseException:
            receive.close()
            os.close(lifeline)
            raise
        finally:
            send.close()
            os.close(words)
            os.close(end)
        return cls(starter, pid, handle, receive, lifeline)

    def wait(
        self, signals: StopSignals, timeout_s: float | None
    ) -> Literal["ended", "signal", "report", "time"]:
        """Wait for the trainer's end, a stop signal or a report; no polling.

        Returns which came (the end before the others), ``"time"`` after ``timeout_s`` seconds.
        """
        sources: list[Connection | int] = [self._handle, signals.fileno()]
        if self._reports is not None:
            sources.append(self._reports)
        ready = wait(sources, timeout_s)
        if self._handle in ready:
            return "ended"
        if signals.fileno() in ready:
            return "signal"
        if ready:
            self._receive()
            return "report"
        return "time"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the trainer has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def finish(self) -> int | None:
        """Kill the trainer if it still runs, take its last report, free everything.

        Returns the exit code, negative for a signal; None where nobody can tell, because the fork
        server is gone or the kernel has not let go of the process yet.
        """
        self.signal(signal.SIGKILL)
        ended = bool(wait([self._handle], _KILL_S))
        os.close(self._handle)
        os.close(self._lifeline)
        code = self._starter.exit_code(self.pid) if ended else None
        while self._reports is not None and self._reports.poll(0):
            self._receive()
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        return code

    def _receive(self) -> None:
        assert self._reports is not None
        report = Report.receive(self._reports)
        if report is None:
            self._reports.close()
            self._reports = None
        else:
            self.report = report
