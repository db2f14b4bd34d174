"""The first and last code that runs in a trainer's process."""

from __future__ import annotations

import fcntl
import importlib
import inspect
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from dtrain.errors import (
    CannotGoOnError,
    DtrainError,
    EvictedError,
    FaultyHardwareError,
    LeftError,
    PeerLostError,
    ShutdownError,
    StoreLostError,
)
from dtrain.launch.report import Kind, Report
from dtrain.launch.signals import STOP_SIGNALS
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.spec import TrainerSpec

EXIT_STOPPED = 128 + signal.SIGTERM


# What else than a failure an exception tells, and the exit code that goes with it. For some the
# cause is another worker or the store, whose own supervisor or host tells it.
_TOLD: tuple[tuple[type[Exception], Kind, int], ...] = (
    (DtrainError, "user_error", 2),
    (ShutdownError, "stopped", EXIT_STOPPED),
    (LeftError, "left", 0),
    (PeerLostError, "lost_peer", 1),
    (EvictedError, "evicted", 1),
    (StoreLostError, "store_lost", 1),
    (CannotGoOnError, "cannot_go_on", 1),
    (FaultyHardwareError, "faulty", 1),
)


def run_trainer(
    entry: str,
    spec: TrainerSpec,
    reports: Connection,
    debug: bool,
    lifeline: int,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Run the trainer ``entry`` (``module:function``) and report how it ended.

    ``entry`` is called as ``entry(spec, heartbeat)`` if it takes two arguments, else as
    ``entry(spec)``. ``lifeline``: the reading end of a pipe whose other end the supervisor alone
    has; this process is killed when that closes. ``heartbeat``: beats from here on.
    The exit code is 0, 1, 2 (user error) or 143 (stopped); what counts is the report.
    """
    _take_signals()
    _die_with_supervisor(lifeline)
    if heartbeat is not None:
        heartbeat.start()
    if forked_after_cuda():
        Report("needs_spawn", "CUDA was initialised before the trainer was forked").send(reports)
        sys.exit(1)
    try:
        _call(_load(entry), spec, heartbeat)
    except Exception as error:
        for kind, told, code in _TOLD:
            if isinstance(error, kind):
                _end(Report(told, _one_line(error)), reports, code, show=debug)
        reason = f"{type(error).__name__}: {_one_line(error)}"
        _end(Report("failed", reason), reports, 1, show=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.flush()
    Report("done", "the job is complete").send(reports)


def forked_after_cuda() -> bool:
    """Whether CUDA was initialised in the process that this one was forked from."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _take_signals() -> None:
    """Undo what the forked process inherited: the supervisor alone decides what Ctrl-C means."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _die_with_supervisor(lifeline: int) -> None:
    """See to it that this process ends with its supervisor: nobody may write unsupervised.

    The kernel sends SIGKILL when the supervisor's end of the pipe closes, because no thread of a
    process that is stopped, or whose interpreter is locked, can see to it.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(lifeline, 0)
    if closed.poll(0):
        # It ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def _load(entry: str) -> Callable[..., None]:
    module, _, name = entry.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    return function


def _call(function: Callable[..., None], spec: TrainerSpec, heartbeat: Heartbeat | None) -> None:
    if len(inspect.signature(function).parameters) > 1:
        function(spec, heartbeat)
    else:
        function(spec)


def _end(report: Report, reports: Connection, code: int, *, show: bool) -> NoReturn:
    # torchrun signals the group and the supervisor its trainer: a second one must not cut this off.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if show:
        traceback.print_exc()
    sys.stdout.flush()
    report.send(reports)
    sys.exit(code)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
