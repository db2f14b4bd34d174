"""What snapshots in peer memory cost a step, in a real job under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError

WORKERS = 4
_WARM_UP = 24
_EVERY = 3
_BATCH = 512
_RESAMPLED = 2000
_JOB_S = 900.0

# The model and sampler of configs/tolokers-sage.yaml, and a graph of the size of Tolokers.
_CONFIG: dict[str, Any] = {
    "model": {
        "name": "sage",
        "layers": 3,
        "hidden": 128,
        "dropout": 0.1,
        "norm": "layer",
        "residual": True,
    },
    "sampler": {"name": "neighbor", "fanouts": [10, 10, 10]},
    "parallel": {"stages": 3, "microbatches": 4, "rebalance": False},
    "deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.003}}},
}
_GRAPH = SynthSpec(nodes=11_758, avg_degree=88, classes=2, features=10, seed=0)


@dataclass(frozen=True)
class SnapshotCost:
    """Steps with a snapshot to a peer beside steps without, medians in milliseconds.

    ``overhead_pct``: by how much the one median is above the other. ``interval_pct``: where that
    lies with 95 % confidence (percentile bootstrap). ``with_steps``, ``without_steps``: how many.
    """

    overhead_pct: float
    interval_pct: tuple[float, float]
    with_ms: float
    without_ms: float
    with_steps: int
    without_steps: int


def snapshot_cost(folder: Path, store: str | None, pairs: int, zero_stage: int) -> SnapshotCost:
    """Train with a snapshot at every third step, and compare these steps with the others.

    Both kinds of step are in one job and take turns, so that a busy machine slows them alike, and
    at an interval that shares no period with anything else that a run does. The time is that from
    commit to commit: sending, receiving and what they keep from other threads are in it.

    Args:
        folder: where the job may write.
        store: the graph; None for a generated one of the size of Tolokers.
        pairs: steps with a snapshot, at least 1; there are twice as many without.
        zero_stage: ZeRO stage of the job.

    Raises:
        DtrainError: the job failed.
    """
    if store is None:
        store = str(folder / "store")
        write_store(store, synthesize(_GRAPH), partitions=WORKERS, partitioner="stream")
    config = {
        **_CONFIG,
        "data": {"store": store},
        "train": {"max_steps": _WARM_UP + 3 * pairs, "batch_size": _BATCH},
        "robust": {"snapshot_every": _EVERY},
    }
    config["deepspeed"] = {**_CONFIG["deepspeed"], "zero_optimization": {"stage": zero_stage}}
    file, run_dir = folder / "snapshots.yaml", folder / "snapshots"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={WORKERS}", "-m", "dtrain.train", str(file)]
    with (folder / "snapshots.log").open("w+") as log:
        code = subprocess.run(
            [*command, "--run-dir", str(run_dir)], stdout=log, stderr=log, timeout=_JOB_S
        ).returncode
        if code:
            log.seek(0)
            last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
            raise DtrainError(f"bench: the job with snapshots ended with {code}: {last}")
    text = (run_dir / "metrics.jsonl").read_text()
    return _compare([m for m in map(json.loads, text.splitlines()) if "loss" in m][_WARM_UP:])


def _compare(steps: list[dict[str, Any]]) -> SnapshotCost:
    """``steps``: their metrics in order. The step that follows a snapshot has its cost; the last
    step of an epoch has fewer seeds and is left out."""
    taken_ms: dict[bool, list[float]] = {True: [], False: []}
    for before, step in pairwise(steps):
        if step["seeds"] >= _BATCH:
            seconds = step["time"] - before["time"]
            taken_ms[before["step"] % _EVERY == 0].append(seconds * 1e3)
    if not all(taken_ms.values()):
        raise DtrainError("bench: the graph has too few train nodes for a step of 512 seeds")
    on, off = np.array(taken_ms[True]), np.array(taken_ms[False])
    rng = np.random.default_rng(0)
    again = [np.median(rng.choice(x, (_RESAMPLED, len(x))), axis=1) for x in (on, off)]
    low, high = np.percentile(again[0] / again[1], [2.5, 97.5])
    with_ms, without_ms = float(np.median(on)), float(np.median(off))
    return SnapshotCost(
        round((with_ms / without_ms - 1) * 100, 2),
        (round((low - 1) * 100, 2), round((high - 1) * 100, 2)),
        round(with_ms, 2),
        round(without_ms, 2),
        len(on),
        len(off),
    )
