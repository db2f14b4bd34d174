"""What snapshots in peer memory cost a step, in a real job under torchrun."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError

WORKERS = 4
_WARM_UP = 24
_BATCH = 512
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
    "parallel": {"stages": 3, "microbatches": 4},
    "deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.003}}},
}
_GRAPH = SynthSpec(nodes=11_758, avg_degree=88, classes=2, features=10, seed=0)


@dataclass(frozen=True)
class SnapshotCost:
    """A step with a snapshot to a peer beside one without, medians in milliseconds.

    ``overhead_pct``: the median over pairs of neighbouring steps of what the one with costs more.
    """

    overhead_pct: float
    with_ms: float
    without_ms: float
    pairs: int


def snapshot_cost(folder: Path, store: str | None, pairs: int, zero_stage: int) -> SnapshotCost:
    """Train with a snapshot at every second step, and compare each with its neighbour.

    Both kinds of step are in one job and alternate, so that a busy machine slows them alike. The
    time is that from commit to commit: sending, receiving and what they keep from other threads
    are in it.

    Args:
        folder: where the job may write.
        store: the graph; None for a generated one of the size of Tolokers.
        pairs: of steps, at least 1.
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
        "robust": {"snapshot_every": 2},
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
    """``steps``: their metrics in order. After an even number of steps a snapshot is taken, so that
    the step that follows has its cost; the last step of an epoch has fewer seeds, and is left out
    with its neighbour."""
    costs, with_ms, without_ms = [], [], []
    for before, first, second in zip(steps, steps[1:], steps[2:], strict=False):
        if before["step"] % 2 or min(first["seeds"], second["seeds"]) < _BATCH:
            continue
        on, off = first["time"] - before["time"], second["time"] - first["time"]
        costs.append(on / off - 1)
        with_ms.append(on * 1e3)
        without_ms.append(off * 1e3)
    if not costs:
        raise DtrainError("bench: the graph has too few train nodes for a step of 512 seeds")
    return SnapshotCost(
        round(statistics.median(costs) * 100, 2),
        round(statistics.median(with_ms), 2),
        round(statistics.median(without_ms), 2),
        len(costs),
    )
