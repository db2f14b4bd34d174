"""Trainers and faults for whole jobs whose checkpoints are struck; imported by name in them."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileOpener

from dtrain.faults.context import FaultContext
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.spec import TrainerSpec
from dtrain.runtime.worker import trainer_main

ENTRY = "checkpoint_trainers:main"
ENVIRONMENT = "environment.json"


def main(spec: TrainerSpec, heartbeat: Heartbeat | None = None) -> None:
    """Train with the variables in a file beside the run's folder: the fork server has others."""
    file = Path(spec.run_dir).parent / ENVIRONMENT
    if file.exists():
        os.environ.update(json.loads(file.read_text()))
    trainer_main(spec, heartbeat)


def kill_job(state: FaultContext, rng: random.Random) -> None:
    """SIGKILL for all trainers of the job, this one last."""
    events = (state.run_dir / "events.jsonl").read_text().splitlines()
    pids = {e["pid"] for e in map(json.loads, events) if e["kind"] == "worker_started"}
    for pid in pids - {os.getpid()}:
        os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_soon(state: FaultContext, rng: random.Random) -> None:
    """SIGKILL for this trainer, or the whole job, at a random moment of the next ``within_s``."""
    whole = state.options["whole"]

    def wait() -> None:
        time.sleep(rng.uniform(0, state.options["within_s"]))
        if whole:
            kill_job(state, rng)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def refuse(state: FaultContext, rng: random.Random) -> None:
    """What a folder says whose permission was taken away."""
    raise PermissionError(13, "Permission denied")


def write_short(state: FaultContext, rng: random.Random) -> None:
    """The next write to a file takes a byte less than it was given, and says so."""
    whole: Any = LocalFileOpener.write

    def write(opened: LocalFileOpener, data: Any) -> int:
        LocalFileOpener.write = whole  # type: ignore[method-assign]
        return int(opened.f.write(memoryview(data).cast("B")[:-1]))

    LocalFileOpener.write = write  # type: ignore[method-assign]


def dawdle(state: FaultContext, rng: random.Random) -> None:
    """A slow disk: training takes several steps while the save stands here."""
    time.sleep(state.options["seconds"])
