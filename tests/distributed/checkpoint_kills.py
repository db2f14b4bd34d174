"""Processes that are killed while they save; imported by name in each of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
from checkpoint_workers import LAYERS, killer, stage_tensors

from dtrain.checkpoint import CheckpointStore, Retention

STEPS = (1, 2, 3)
KEEP = 2


def save_steps(url: str, steps: tuple[int, ...], store: CheckpointStore) -> None:
    """Save steps in the background, one after the other."""
    for step in steps:
        tensors = stage_tensors(range(LAYERS), step)
        store.save_async(step, tensors, {}, retention=Retention(KEEP)).result()


def kill_each(
    answer: str, environment: dict[str, str], urls: list[str], moments: list[float]
) -> None:
    """For each URL fork a process that saves all steps and is killed during the last one.

    A moment is the number of a point (an int), or seconds after the last save has begun (a
    float). How each process ended (minus the signal) is left in the file ``answer``.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    CheckpointStore(urls[0])  # imports the library of the store once, and connects to nothing
    ends = []
    for url, moment in zip(urls, moments, strict=True):
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            _save_and_die(url, moment, tell)
        os.close(tell)
        if isinstance(moment, float):
            os.read(ready, 1)
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        os.close(ready)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    Path(answer).write_text(json.dumps(ends))


def _save_and_die(url: str, moment: float, tell: int) -> None:
    try:
        on_point = None if isinstance(moment, float) else killer(int(moment))
        store = CheckpointStore(url, on_point)
        os.write(tell, b"x")
        save_steps(url, STEPS[-1:], store)
    finally:
        os._exit(0)
