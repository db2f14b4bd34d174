"""The supervisor of one worker: starts its trainer, watches it, starts it anew when it dies.

It imports no torch and opens no device, so that nothing that breaks a trainer can break it. Plain
torchrun kills every worker as soon as one exits non-zero, so a supervisor exits only when the job
is done, cannot go on in place, or was told to stop. Exit codes: 0 the job is done, or goes on
without this worker, which was told to leave; 2 the user's input is bad; 128 + signal the job was
told to stop; 1 the job cannot go on in place, and torchrun may restart it (``--max-restarts``) from
the newest checkpoint.
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
from typing import Any, Literal

from dtrain.config import Config
from dtrain.deepspeed_options import zero_stage
from dtrain.environment import (
    WorkerPlace,
    failure_domains,
    grace_s,
    set_variables,
    trainer_variables,
    worker_place,
)
from dtrain.errors import DtrainError
from dtrain.launch.completion import Completion
from dtrain.launch.fork_client import ForkClient, PreloadError
from dtrain.launch.handover import STANDARD, Handover
from dtrain.launch.jobfile import JobFile
from dtrain.launch.lease import Lease
from dtrain.launch.life import Hang, Life, LifeEnd
from dtrain.launch.process import Spawner, Starter, TrainerProcess
from dtrain.launch.request import CheckedRun, RunRequest, check
from dtrain.launch.respawn import GiveUp, RespawnPolicy
from dtrain.launch.signals import StopRequested, StopSignals
from dtrain.runfolder import RunFolder
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.spec import TrainerSpec

TRAINER = "dtrain.runtime.worker:trainer_main"

PRELOAD = (
    "torch",
    "torch.distributed",
    # The first optimizer that is built imports it, which takes longer than importing torch.
    "torch._dynamo",
    "deepspeed",
    # Imported by the first engine that is built.
    "deepspeed.module_inject.auto_ep_layer",
    "dtrain.runtime.preload",
)
PRELOAD_ZERO = (
    # Imported by the first engine with ZeRO, in 2 s.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._inductor.compile_fx",
)

_QUIET_S = 5.0
"""Longer than torchrun needs to notice that local rank 0 ended."""


@dataclass(frozen=True)
class _End:
    """How a supervisor ends: its exit code, and the event that says why."""

    code: int
    kind: str
    reason: str


def supervise(
    request: RunRequest, *, entry: str = TRAINER, preload: Sequence[str] | None = None
) -> int:
    """Check the request, keep one trainer running, and return the exit code for this process.

    ``entry``: the trainer as ``module:function``, called with a :class:`TrainerSpec` and, if it
    takes two arguments, a :class:`Heartbeat`. ``preload``: modules imported before the trainer is
    forked.
    """
    started_s = time.time()
    _open_streams()
    with StopSignals() as signals:
        try:
            place = worker_place()
            wait_s = grace_s()
            run = check(request, place.world_size)
            folder = run.open_folder()
        except DtrainError as error:
            return _refuse(error, signals)
        set_variables(trainer_variables(run.config.parallel.threads_per_worker))
        if place.worker == 0:
            _tell_address(folder, place)
        supervisor = _Supervisor(run, folder, place, wait_s, signals)
        end = supervisor.run(entry, _preload(run.config) if preload is None else preload)
        return _conclude(end, place, folder, started_s)


def _open_streams() -> None:
    """Have all standard streams open, so that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) in STANDARD:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _preload(config: Config) -> tuple[str, ...]:
    """What trainers of ``config`` need, imported once before they are forked."""
    sharded = zero_stage(config.deepspeed) or (config.deepspeed.get("bf16") or {}).get("enabled")
    return PRELOAD + PRELOAD_ZERO if sharded else PRELOAD


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
        self._completion = Completion(folder)
        self._policy = RespawnPolicy(run.config.robust)
        self._method: Literal["forkserver", "spawn"] = "forkserver"
        self._stop: signal.Signals | None = None
        self._life = 0
        self._incarnation = ""

    def run(self, entry: str, preload: Sequence[str]) -> _End:
        """Run one trainer after the other until the job is done or cannot go on in place."""
        starter: Starter = ForkClient(self._folder.path, preload)
        while True:
            try:
                end = self._live(entry, starter)
            except StopRequested as request:
                self._stop = request.number
                left = self._life > 1 and self._has_others
                return self._left_without_trainer("before a trainer was forked", left)
            except PreloadError as error:
                if self._life == 1:
                    return _End(1, "worker_died", str(error))
                verdict = self._next_life("worker_died", str(error), 0.0, failure=str(error))
            else:
                verdict = self._after(end)
            if verdict is not None:
                return verdict
            if self._method == "spawn" and isinstance(starter, ForkClient):
                starter.close()
                starter = Spawner()

    def _live(self, entry: str, starter: Starter) -> LifeEnd:
        self._life += 1
        robust = self._run.config.robust
        spec, heartbeat = self._spec(), Heartbeat()
        handover = Handover.of_this_process(entry, spec, self._run.request.debug)
        trainer = TrainerProcess.start(handover, heartbeat, starter, self._signals)
        self._event(
            "trainer_started",
            f"{self._method} by its supervisor, restart {self._place.restart}",
            node=spec.node,
            pid=trainer.pid,
            supervisor_pid=spec.supervisor_pid,
            incarnation=spec.incarnation,
            local_rank=spec.local_rank,
            life=self._life,
        )
        lease = Lease(robust.lease_s, robust.progress_s, time.monotonic())
        life = Life(
            trainer,
            heartbeat,
            lease,
            self._signals,
            self._completion,
            self._wait_s,
            self._tell_hang,
        )
        end, self._stop = life.watch(self._stop)
        return end

    def _after(self, end: LifeEnd) -> _End | None:
        """The supervisor's own end after that of its trainer; None when another one is to live."""
        report, reason = end.report, end.reason
        kind = report.kind if report is not None else None
        if kind == "done":
            return _End(0, "trainer_done", reason)
        if kind == "user_error":
            return _End(2, "user_error", reason)
        if kind == "left":
            return _End(0, "trainer_left", reason)
        if kind == "faulty":
            # The device stays out of the job; a new trainer would get the same one.
            return _End(0 if self._has_others else 1, "trainer_faulty", reason)
        if self._completion.done(now=True):
            return self._late()
        if kind == "needs_spawn" and self._stop is None and self._method == "forkserver":
            self._method = "spawn"
            self._event("start_method", f"{reason}: starting it by spawn, which is slower")
            say(f"worker {self._place.worker}: {reason}; starting it by spawn, which is slower")
            return None
        if self._stop is not None:
            return self._stopped(end)
        if kind == "stopped":
            return _End(128 + signal.SIGTERM, "trainer_stopped", reason)
        if kind in ("store_lost", "cannot_go_on", "needs_spawn"):
            return _End(1, f"trainer_{kind}", reason)
        name = "worker_died" if kind is None else f"trainer_{kind}"
        failure = reason if kind == "failed" else None
        return self._next_life(name, reason, end.lived_s, failure=failure, exit=end.exit_code)

    def _stopped(self, end: LifeEnd) -> _End:
        """The end of a supervisor that was told to stop, when its trainer did not say ``left``."""
        assert self._stop is not None
        reason = f"{self._stop.name}: {end.reason}"
        evicted = end.report is not None and end.report.kind == "evicted"
        # What a trainer that was started again had not yet joined goes on without it.
        unborn = end.report is None and not end.began and self._life > 1
        if evicted or (unborn and self._has_others):
            return _End(0, "trainer_left", reason)
        return _End(128 + self._stop, "trainer_stopped", reason)

    def _next_life(
        self, kind: str, reason: str, lived_s: float, *, failure: str | None, **fields: Any
    ) -> _End | None:
        """Book a death and wait until the next trainer may start; an end if there will be none."""
        worker = self._place.worker
        life = {"incarnation": self._incarnation, "life": self._life}
        decision = self._policy.after_death(
            time.monotonic(), lived_s, life=self._life, failure=failure
        )
        self._event(kind, reason, lived_s=round(lived_s, 3), **life, **fields)
        if isinstance(decision, GiveUp):
            return _End(1, "gave_up", f"{reason}; {decision.reason}")
        self._event(
            "trainer_respawn", f"{reason}; {decision.reason}", delay_s=decision.delay_s, **life
        )
        say(f"worker {worker}: {_short(reason)}; starting it anew ({decision.reason})")
        return self._pause(decision.delay_s)

    def _pause(self, delay_s: float) -> _End | None:
        """Wait before a respawn; an end if the job is done or a stop signal comes meanwhile."""
        end_s = time.monotonic() + delay_s
        while True:
            left_s = end_s - time.monotonic()
            if self._signals.wait(max(0.0, min(left_s, 1.0))):
                self._stop = self._signals.take() or self._stop
            if self._stop is not None:
                return self._left_without_trainer("between two trainers", self._has_others)
            if left_s <= 0:
                return None
            if self._completion.done():
                return self._late()

    def _left_without_trainer(self, when: str, left: bool) -> _End:
        """The end of a supervisor that was told to stop while it had none; ``left``: the job goes
        on without this worker."""
        assert self._stop is not None
        reason = f"{self._stop.name} came {when}"
        if left:
            return _End(0, "trainer_left", reason)
        return _End(128 + self._stop, "trainer_stopped", reason)

    @property
    def _has_others(self) -> bool:
        """Whether the job has other workers; one that joined it later has, in any case."""
        return self._place.world_size > 1 or self._place.worker >= self._place.world_size

    def _late(self) -> _End:
        return _End(0, "trainer_done", "the others completed the job")

    def _tell_hang(self, hang: Hang) -> None:
        self._event(
            "trainer_hung",
            hang.reason,
            phase=hang.sign.phase,
            step=hang.sign.step,
            incarnation=self._incarnation,
            life=self._life,
        )

    def _spec(self) -> TrainerSpec:
        place = self._place
        self._incarnation = uuid.uuid4().hex
        return TrainerSpec(
            config=self._run.config.model_dump(mode="json"),
            run_dir=str(self._folder.path),
            worker=place.worker,
            world_size=place.world_size,
            local_rank=place.local_rank,
            node=socket.gethostname(),
            domains=failure_domains(socket.gethostname()),
            store_host=place.store_host,
            store_port=place.store_port,
            host_store=place.host_store,
            incarnation=self._incarnation,
            supervisor_pid=os.getpid(),
            json_output=self._run.request.json_output,
            progress=place.worker == 0,
        )

    def _event(self, kind: str, reason: str, **fields: Any) -> None:
        _record(self._folder, kind, self._place.worker, reason, **fields)


def _record(folder: RunFolder, kind: str, worker: int, reason: str, **fields: Any) -> None:
    """Append an event; a disk that takes none must not end a supervisor."""
    try:
        folder.event(kind, worker=worker, reason=reason, **fields)
    except OSError as error:
        say(f"worker {worker}: {kind} ({reason}) could not be written to the run folder: {error}")


def _tell_address(folder: RunFolder, place: WorkerPlace) -> None:
    try:
        JobFile.of(place).write(folder.path)
    except OSError as error:
        say(f"worker {place.worker}: the job's address could not be written: {error}")


def _conclude(end: _End, place: WorkerPlace, folder: RunFolder, started_s: float) -> int:
    """Record the end, say what a person must know, and return the exit code."""
    worker, reason = place.worker, end.reason
    if end.kind == "user_error":
        # All workers meet bad input; the first one says so.
        if folder.first_event(end.kind, since=started_s, worker=worker, reason=reason):
            say(f"error: {reason}")
        return end.code
    _record(folder, end.kind, worker, reason, exit_code=end.code)
    if end.code == 1 or end.kind in ("trainer_left", "trainer_faulty"):
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


def _short(reason: str) -> str:
    return shorten(reason, 160, placeholder="...")
