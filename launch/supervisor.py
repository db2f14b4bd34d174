"""The supervisor of one worker: starts its trainer, watches it, and ends with its verdict.

It imports no torch and opens no device, so that nothing that breaks a trainer can break it. Exit
codes: 0 the job is done, 2 the user's input is bad, 128 + signal when told to stop, 1 otherwise;
torchrun answers 1 with a restart of all workers (``--max-restarts``), which resume from the newest
checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

from dtrain.environment import (
    WorkerPlace,
    grace_s,
    set_variables,
    trainer_variables,
    worker_place,
)
from dtrain.errors import DtrainError
from dtrain.launch.process import PreloadError, StartMethod, TrainerProcess
from dtrain.launch.request import CheckedRun, RunRequest, check
from dtrain.launch.signals import StopSignals
from dtrain.runfolder import RunFolder
from dtrain.runtime.spec import TrainerSpec

TRAINER = "dtrain.runtime.worker:trainer_main"

PRELOAD = (
    "torch",
    "torch.distributed",
    # The first optimizer that is built imports it, which takes longer than importing torch.
    "torch._dynamo",
    "deepspeed",
    # Imported by the first engine, and by the first one with ZeRO: 2 s each.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
    "dtrain.runtime.worker",
)

_QUIET_S = 5.0
"""Longer than torchrun needs to notice that local rank 0 ended."""


@dataclass(frozen=True)
class _End:
    """How one trainer ended: exit code for the supervisor, and the event that says why."""

    code: int
    kind: str
    reason: str


def supervise(
    request: RunRequest, *, entry: str = TRAINER, preload: Sequence[str] = PRELOAD
) -> int:
    """Check the request, run one trainer to its end, and return the exit code for this process.

    ``entry``: the trainer as ``module:function``, called with a :class:`TrainerSpec`.
    ``preload``: modules imported before the trainer is forked.
    """
    started_s = time.time()
    with StopSignals() as signals:
        try:
            place = worker_place()
            wait_s = grace_s()
            run = check(request, place.world_size)
            folder = run.open_folder()
        except DtrainError as error:
            return _refuse(error, signals)
        set_variables(trainer_variables(run.config.parallel.threads_per_worker))
        supervisor = _Supervisor(run, folder, place, wait_s, signals)
        return _conclude(supervisor.run(entry, preload), place, folder, started_s)


class _Supervisor:
    def __init__(
        self,
        run: CheckedRun,
        folder: RunFolder,
        place: WorkerPlace,
        wait_s: float,
        signals: StopSignals,
    ) -> None:
        self._run = run
        self._folder = folder
        self._place = place
        self._wait_s = wait_s
        self._signals = signals
        self._stop: signal.Signals | None = None

    def run(self, entry: str, preload: Sequence[str]) -> _End:
        """Run one trainer; a second one, spawned, only where a forked one cannot use its device."""
        end = self._run_trainer(entry, preload, "forkserver")
        if end.kind == "trainer_needs_spawn" and self._stop is None:
            self._event("start_method", f"{end.reason}: starting it by spawn, which is slower")
            say(f"worker {self._place.worker}: {end.reason}; starting it by spawn, which is slower")
            end = self._run_trainer(entry, preload, "spawn")
        return end

    def _run_trainer(self, entry: str, preload: Sequence[str], method: StartMethod) -> _End:
        spec = self._spec()
        try:
            trainer = TrainerProcess.start(
                entry, spec, method=method, preload=preload, debug=self._run.request.debug
            )
        except PreloadError as error:
            return _End(1, "worker_died", str(error))
        self._event(
            "trainer_started",
            f"{method} by its supervisor, restart {self._place.restart}",
            node=spec.node,
            pid=trainer.pid,
            supervisor_pid=spec.supervisor_pid,
            incarnation=spec.incarnation,
            local_rank=spec.local_rank,
        )
        self._watch(trainer)
        return self._verdict(trainer, trainer.finish())

    def _watch(self, trainer: TrainerProcess) -> None:
        """Wait until the trainer has ended; past its time it is killed."""
        deadline_s: float | None = None
        if self._stop is not None:
            deadline_s = self._forward_stop(trainer)
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            what = trainer.wait(self._signals, left_s)
            if what == "ended":
                return
            if what == "signal":
                number = self._signals.take()
                if number is not None and self._stop is None:
                    self._stop = number
                    deadline_s = self._forward_stop(trainer)
            elif what == "report":
                # It has nothing left to do but to end.
                deadline_s = deadline_s or time.monotonic() + self._wait_s
            else:
                trainer.signal(signal.SIGKILL)
                deadline_s = None

    def _forward_stop(self, trainer: TrainerProcess) -> float:
        trainer.signal(signal.SIGTERM)
        return time.monotonic() + self._wait_s

    def _verdict(self, trainer: TrainerProcess, code: int) -> _End:
        report = trainer.report
        if report is not None and report.kind == "done":
            return _End(0, "trainer_done", report.reason)
        if report is not None and report.kind == "user_error":
            return _End(2, "user_error", report.reason)
        if self._stop is not None:
            reason = report.reason if report is not None else _how_it_ended(code)
            return _End(128 + self._stop, "trainer_stopped", f"{self._stop.name}: {reason}")
        if report is None:
            return _End(1, "worker_died", _how_it_ended(code))
        return _End(1, f"trainer_{report.kind}", report.reason)

    def _spec(self) -> TrainerSpec:
        place = self._place
        return TrainerSpec(
            config=self._run.config.model_dump(mode="json"),
            run_dir=str(self._folder.path),
            worker=place.worker,
            world_size=place.world_size,
            local_rank=place.local_rank,
            node=socket.gethostname(),
            store_host=place.store_host,
            store_port=place.store_port,
            host_store=place.host_store,
            incarnation=uuid.uuid4().hex,
            supervisor_pid=os.getpid(),
            json_output=self._run.request.json_output,
            progress=place.worker == 0,
        )

    def _event(self, kind: str, reason: str, **fields: object) -> None:
        self._folder.event(kind, worker=self._place.worker, reason=reason, **fields)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code == 255:
        return "the process that it was forked from ended"
    return f"ended with exit code {code} before the job was complete"


def _conclude(end: _End, place: WorkerPlace, folder: RunFolder, started_s: float) -> int:
    """Record the end, say what a person must know, and return the exit code."""
    worker, reason = place.worker, end.reason
    if end.kind == "user_error":
        # All workers meet bad input; the first one says so.
        if folder.first_event(end.kind, since=started_s, worker=worker, reason=reason):
            say(f"error: {reason}")
    else:
        folder.event(end.kind, worker=worker, reason=reason, exit_code=end.code)
        if end.kind == "trainer_lost_peer":
            say(f"worker {worker}: lost a peer ({shorten(reason, 100, placeholder='...')})")
        elif end.code == 1:
            say(f"worker {worker}: {reason}")
    return end.code


def _refuse(error: DtrainError, signals: StopSignals) -> int:
    """Say what is wrong with the input, once on each node, and return exit code 2."""
    try:
        local_rank = worker_place().local_rank
    except DtrainError:
        local_rank = 0
    if local_rank == 0:
        say(f"error: {error}")
        return 2
    # torchrun ends all workers as soon as one has failed. Let that be the one that speaks.
    if not signals.wait(_QUIET_S):
        say(f"error: {error}")
    return 2


def say(line: str) -> None:
    """One line on stderr; stdout belongs to the job's result."""
    print(line, file=sys.stderr, flush=True)
