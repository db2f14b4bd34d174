"""The first and last code that runs in a trainer's process."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from dtrain.errors import DtrainError, PeerLostError, ShutdownError
from dtrain.launch.report import Report
from dtrain.launch.signals import STOP_SIGNALS
from dtrain.runtime.spec import TrainerSpec

EXIT_STOPPED = 128 + signal.SIGTERM


def run_trainer(
    entry: str, spec: TrainerSpec, reports: Connection, scratch: str | None, debug: bool
) -> None:
    """Run the trainer ``entry`` (``module:function``) and report how it ended.

    ``scratch``: the supervisor's folder of sockets, removed should the supervisor be killed.
    The exit code is 0, 1, 2 (user error) or 143 (stopped); what counts is the report.
    """
    _take_signals()
    threading.Thread(
        target=_die_with_supervisor, args=(scratch,), name="supervisor-watch", daemon=True
    ).start()
    if forked_after_cuda():
        Report("needs_spawn", "CUDA was initialised before the trainer was forked").send(reports)
        sys.exit(1)
    try:
        _load(entry)(spec)
    except DtrainError as error:
        _end(Report("user_error", _one_line(error)), reports, 2, show=debug)
    except ShutdownError as error:
        _end(Report("stopped", _one_line(error)), reports, EXIT_STOPPED, show=debug)
    except PeerLostError as error:
        # The cause is another worker, whose own supervisor tells it.
        _end(Report("lost_peer", _one_line(error)), reports, 1, show=debug)
    except Exception as error:
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


def _die_with_supervisor(scratch: str | None) -> None:
    """End this process at once when the supervisor is gone: nobody may write unsupervised."""
    supervisor = multiprocessing.parent_process()
    if supervisor is None:
        return
    supervisor.join()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _load(entry: str) -> Callable[[TrainerSpec], None]:
    module, _, name = entry.partition(":")
    function: Callable[[TrainerSpec], None] = getattr(importlib.import_module(module), name)
    return function


def _end(report: Report, reports: Connection, code: int, *, show: bool) -> None:
    # torchrun signals the group and the supervisor its trainer: a second one must not cut this off.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if show:
        traceback.print_exc()
    report.send(reports)
    sys.exit(code)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
