"""``dtrain join``: more workers for a job that runs, without a restart."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path

from dtrain.environment import WorkerPlace, place_variables
from dtrain.errors import DtrainError
from dtrain.launch.jobfile import JobFile, free_local_ranks, reserve_workers
from dtrain.launch.request import RunRequest
from dtrain.launch.signals import StopSignals
from dtrain.launch.torchrun import WORKER_MODULE
from dtrain.runfolder import RunFolder

_REACH_S = 5.0
_PR_SET_PDEATHSIG = 1


def join(run_dir: str, workers: int, *, debug: bool = False) -> int:
    """Add ``workers`` workers on this machine to the job of a run folder, until the job ends.

    Told to stop (SIGTERM, SIGINT), they leave at a step boundary and the job goes on. The exit code
    is 0 when all left or the job is done, else that of the worst among them: 1 failed, 2 bad input,
    128 + signal when the whole job was stopped.

    Raises:
        DtrainError: the folder is not that of a job that runs, or its store cannot be reached.
    """
    path = Path(run_dir).absolute()
    job = JobFile.read(path)
    folder = RunFolder(path)
    _check_running(folder, job)
    numbers = reserve_workers(folder, job, workers)
    ranks = free_local_ranks(folder, socket.gethostname(), workers)
    request = RunRequest(str(path / "config.yaml"), run_dir=str(path), debug=debug)
    with StopSignals() as signals:
        supervisors = [
            _start(
                request,
                WorkerPlace(
                    n, job.world_size, r, job.store_host, job.store_port, False, 0, job.run_id
                ),
            )
            for n, r in zip(numbers, ranks, strict=True)
        ]
        return _wait(supervisors, signals)


def _check_running(folder: RunFolder, job: JobFile) -> None:
    record = folder.read_run()
    if record is not None and record.status == "done":
        raise DtrainError(
            f"{folder.path}: expected a job that runs, got one that is done; nothing is left to do"
        )
    try:
        socket.create_connection((job.store_host, job.store_port), _REACH_S).close()
    except OSError as error:
        raise DtrainError(
            f"{folder.path}: expected the store of a job that runs at {job.store_host}:"
            f"{job.store_port}, got {error.strerror or error}; start the job again with dtrain run "
            "or torchrun"
        ) from error


def _start(request: RunRequest, place: WorkerPlace) -> subprocess.Popen[bytes]:
    # In a session of its own, so that a Ctrl-C is told to it once, by this process.
    return subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE, *request.arguments()],
        env=place_variables(place),
        start_new_session=True,
        preexec_fn=_leave_with_parent,
    )


def _leave_with_parent() -> None:
    """In the new process: be told to leave when ``dtrain join`` is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(supervisors: list[subprocess.Popen[bytes]], signals: StopSignals) -> int:
    ends = {os.pidfd_open(process.pid): process for process in supervisors}
    while ends:
        ready = wait([signals.fileno(), *ends])
        if signals.fileno() in ready and signals.take() is not None:
            for process in ends.values():
                process.send_signal(signal.SIGTERM)
        for handle in [handle for handle in ends if handle in ready]:
            ends.pop(handle).wait()
            os.close(handle)
    return max(process.returncode if process.returncode >= 0 else 1 for process in supervisors)
