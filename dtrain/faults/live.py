"""Faults on a run that is under way, from outside of its trainers."""

from __future__ import annotations

import random
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import DtrainError
from dtrain.faults import actions, processes
from dtrain.faults.inbox import Inbox
from dtrain.faults.spec import FaultSpec
from dtrain.runfolder import RunFolder

_SIGNALS = {
    ("crash", "sigkill"): signal.SIGKILL,
    ("crash", "segfault"): signal.SIGSEGV,
    ("hang", "sigstop"): signal.SIGSTOP,
}
_AROUND = ("store", "agent", "node", "preempt")


@dataclass(frozen=True)
class LiveTrainer:
    """A trainer that runs on this node, as its ``worker_started`` event tells."""

    worker: int
    pid: int
    supervisor_pid: int
    incarnation: str


@dataclass(frozen=True)
class Injected:
    """What was done: ``delivery`` is ``signal`` (done) or ``inbox`` (the trainer does it)."""

    worker: int
    pid: int
    fault: str
    delivery: str
    targets: list[int]


def inject(run_dir: Path, spec: FaultSpec) -> list[Injected]:
    """Make a fault happen to a live run now, or when its trainer reaches the fault's phase.

    Signals are sent from here; what has to happen inside the trainer is handed over to it.

    Raises:
        DtrainError: no such run, no such worker, the run is not live, or a bad combination.
    """
    folder = open_run(run_dir)
    found = []
    for trainer in _victims(folder, spec):
        now = spec.phase is None and spec.step is None and spec.point is None
        number = _SIGNALS.get((spec.kind, str(spec.how)))
        if now and (number is not None or spec.kind in _AROUND):
            found.append(_signal(folder, trainer, spec, number))
        else:
            name = Inbox(folder.path).put(trainer.worker, trainer.incarnation, spec)
            found.append(Injected(trainer.worker, trainer.pid, name, "inbox", []))
    return found


def open_run(run_dir: Path) -> RunFolder:
    """The folder of a run that has begun.

    Raises:
        DtrainError: there is none.
    """
    if not (run_dir / "events.jsonl").is_file():
        raise DtrainError(
            f"RUN_DIR {run_dir}: expected a run's folder with an events.jsonl, got "
            f"{'a folder without one' if run_dir.is_dir() else 'no folder'}; give the --run-dir of "
            "a run that is under way"
        )
    return RunFolder(run_dir)


def live_trainers(folder: RunFolder) -> dict[int, LiveTrainer]:
    """The trainers of a run that are alive on this node, by worker."""
    newest = _newest_starts(folder)
    return {w: t for w, e in sorted(newest.items()) if (t := _living(e)) is not None}


def live_trainer(folder: RunFolder, worker: int) -> LiveTrainer:
    """The trainer of ``worker``.

    Raises:
        DtrainError: there is no such worker, it is on another node, or it is not alive.
    """
    newest, living = _newest_starts(folder), live_trainers(folder)
    if not living and not any(_elsewhere(event) for event in newest.values()):
        record = folder.read_run()
        status = "unknown" if record is None else record.status
        raise DtrainError(
            f"RUN_DIR {folder.path}: expected a live run, got one without a trainer alive "
            f"(status {status}); start it first"
        )
    event = newest.get(worker)
    if event is None:
        raise DtrainError(
            f"--worker: expected one of {', '.join(map(str, sorted(newest)))}, got {worker}"
        )
    if _elsewhere(event):
        raise DtrainError(
            f"--worker {worker}: runs on node {event.get('node')}, this is {socket.gethostname()}; "
            "run the command there"
        )
    if worker not in living:
        raise DtrainError(
            f"--worker {worker}: its trainer (process {event['pid']}) has ended; choose one of "
            f"{', '.join(map(str, living))} or wait until it is back"
        )
    return living[worker]


def _victims(folder: RunFolder, spec: FaultSpec) -> list[LiveTrainer]:
    if isinstance(spec.worker, int):
        return [live_trainer(folder, spec.worker)]
    living = live_trainers(folder)
    if not living:
        live_trainer(folder, 0)
        raise DtrainError(f"RUN_DIR {folder.path}: no trainer of the run is alive on this node")
    if spec.worker == "all":
        return list(living.values())
    return [living[random.Random(spec.seed).choice(sorted(living))]]


def _newest_starts(folder: RunFolder) -> dict[int, dict[str, Any]]:
    return {e["worker"]: e for e in folder.events() if e.get("kind") == "worker_started"}


def _elsewhere(event: dict[str, Any]) -> bool:
    return event.get("node") not in (None, socket.gethostname())


def _living(event: dict[str, Any]) -> LiveTrainer | None:
    """The trainer of an event if this very process is alive here."""
    pid, supervisor = event.get("pid", 0), event.get("supervisor_pid", 0)
    if _elsewhere(event) or not processes.is_alive(pid):
        return None
    # A number that was given to another process since: that one started later.
    began_s = processes.started_at(pid)
    if began_s > event["time"] + 1.0:
        return None
    # It ends with its supervisor, which is older.
    if not processes.is_alive(supervisor) or processes.started_at(supervisor) > began_s:
        return None
    if pid == supervisor:
        return None
    return LiveTrainer(event["worker"], pid, supervisor, event.get("incarnation", ""))


def _signal(
    folder: RunFolder, trainer: LiveTrainer, spec: FaultSpec, number: signal.Signals | None
) -> Injected:
    how = str(spec.how)
    pids = [trainer.pid]
    if number is None:
        pids = actions.targets(spec.kind, how, trainer.supervisor_pid, trainer.pid)
    folder.event(
        "fault_injected",
        worker=trainer.worker,
        reason=f"{spec.kind} ({how}) on worker {trainer.worker}, by dtrain inject",
        fault="inject",
        fault_kind=spec.kind,
        how=how,
        pid=trainer.pid,
        incarnation=trainer.incarnation,
        pids=pids,
    )
    if number is None:
        actions.strike_processes(spec.kind, how, pids, spec.seconds)
    elif number == signal.SIGSTOP:
        actions.stop_for(pids, spec.seconds)
    else:
        processes.signal_all(pids, number)
    return Injected(trainer.worker, trainer.pid, "inject", "signal", pids)
