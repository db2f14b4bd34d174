"""A trainer's process, seen from its supervisor."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Literal

from dtrain.launch.report import Report
from dtrain.launch.signals import STOP_SIGNALS, StopSignals
from dtrain.launch.trainer import run_trainer
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.spec import TrainerSpec

StartMethod = Literal["forkserver", "spawn"]

_KILL_S = 30.0
"""A killed process ends at once unless the kernel is busy on its behalf, with a dead disk, say."""

_FORK_SERVER_GONE = 255
"""Multiprocessing's exit code for a process whose fork server died."""

_TELL_S = 5.0
"""Longer than the process that trainers are forked from needs to pass on an exit code."""


class PreloadError(RuntimeError):
    """The process that trainers are forked from ended before it could fork one."""


class TrainerProcess:
    """One running trainer: its process, and the pipe that its report comes by.

    ``lingers``: it was killed but the kernel has not ended it yet; none of its code runs again.
    """

    def __init__(self, process: BaseProcess, reports: Connection) -> None:
        self._process = process
        self._reports: Connection | None = reports
        self.report: Report | None = None
        self.lingers = False
        self.pid: int = process.pid or 0
        # The trainer is the fork server's child and not ours: the descriptor names this very
        # process even when the fork server is gone or the pid is used again.
        try:
            self._handle: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self._handle = None

    @classmethod
    def start(
        cls,
        entry: str,
        spec: TrainerSpec,
        heartbeat: Heartbeat,
        *,
        method: StartMethod,
        preload: Sequence[str],
        debug: bool,
    ) -> TrainerProcess:
        """Start the trainer ``entry`` (``module:function``) on ``spec``.

        ``preload``: modules that the process trainers are forked from has imported.

        Raises:
            PreloadError: that process ended (its own message is on stderr).
        """
        if method == "forkserver":
            _ensure_fork_server(preload)
        receive, send = multiprocessing.Pipe(duplex=False)
        process = _new_process(
            method, f"trainer-{spec.worker}", (entry, spec, send, debug, heartbeat)
        )
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            receive.close()
            raise PreloadError("the process that preloads the trainer's modules ended") from error
        finally:
            send.close()
        return cls(process, receive)

    def wait(
        self, signals: StopSignals, timeout_s: float | None
    ) -> Literal["ended", "signal", "report", "time"]:
        """Wait for the trainer's end, a stop signal or a report; no polling.

        Returns which came (the end before the others), ``"time"`` after ``timeout_s`` seconds.
        """
        if self._handle is None:
            return "ended"
        # The process itself and not its sentinel, which also fires when the fork server dies.
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
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def finish(self) -> int | None:
        """Kill the trainer if it still runs, take its last report, free everything.

        Returns the exit code, negative for a signal; None where nobody can tell, because the fork
        server is gone or the kernel has not let go of the process yet.
        """
        self.signal(signal.SIGKILL)
        if self._handle is not None:
            wait([self._handle], _KILL_S)
            os.close(self._handle)
            self._handle = None
        self._process.join(_TELL_S)
        code = self._process.exitcode
        while self._reports is not None and self._reports.poll(0):
            self._receive()
        if self._reports is not None:
            self._reports.close()
            self._reports = None
        if code is None:
            self.lingers = True
            return None
        self._process.close()
        return None if code == _FORK_SERVER_GONE else code

    def _receive(self) -> None:
        assert self._reports is not None
        report = Report.receive(self._reports)
        if report is None:
            self._reports.close()
            self._reports = None
        else:
            self.report = report


def _new_process(method: StartMethod, name: str, args: tuple[object, ...]) -> BaseProcess:
    if method == "forkserver":
        return multiprocessing.get_context("forkserver").Process(
            target=run_trainer, name=name, args=args
        )
    return multiprocessing.get_context("spawn").Process(target=run_trainer, name=name, args=args)


def _ensure_fork_server(preload: Sequence[str]) -> None:
    """Start the fork server unless it runs, with the stop signals blocked.

    torchrun signals the whole process group. A fork server that died of it would take the news of
    its trainer's end along; blocked, the signals pass it by and it ends with the last process that
    holds its pipe. The trainer unblocks them for itself.
    """
    multiprocessing.set_forkserver_preload(["dtrain.launch.supervisor", *preload])
    # First, because its start unblocks the stop signals in this process.
    multiprocessing.resource_tracker.ensure_running()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
