"""Seeds trained in a second, end to end: 2-layer GraphSAGE on the generated graph.

Every contender is a process (or four) of its own and they take turns. dtrain is the real thing,
``python -m dtrain.train``, with its votes and exact sums.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dtrain.bench.contest import Row, installed
from dtrain.bench.graphs import SYNTHETIC, skewed
from dtrain.data.writer import write_store
from dtrain.environment import with_variables
from dtrain.errors import DtrainError
from dtrain.runfolder import RunFolder

HIDDEN, FANOUTS, BATCH = 128, (10, 10), 1024
_WARM_UP, _WAIT_S = 40, 300.0


@dataclass(frozen=True)
class TrainReport:
    """``seeds_per_s``: medians by contender. ``seeds_per_s_vs_pyg``: one process each, all cores,
    with one thread for compute or all, whichever is faster.

    ``pipeline_vs_ddp``: 4 workers of dtrain in 2 stages over 4 processes of torch's
    DistributedDataParallel with the same layers, sampler, kernels and cores, once the scheduler
    has chosen its plan from measured costs. ``staged_vs_ddp``: the same with
    ``parallel.rebalance: false``, which keeps to two holders of each stage, between which
    activations travel. None: not measured.
    """

    seeds_per_s: dict[str, float]
    seeds_per_s_vs_pyg: float | None
    pipeline_vs_ddp: float | None
    staged_vs_ddp: float | None
    pyg_way: str | None
    threads: int
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def bench_train(
    against: str,
    folder: Path,
    *,
    nodes: int,
    threads: int,
    steps: int,
    repeats: int,
    pipeline: bool,
    say: Callable[[str], None],
) -> TrainReport:
    """Run every contender ``repeats`` times for ``steps`` steps in turns; ``folder`` is scratch.

    Raises:
        DtrainError: an unknown peer in ``against``, or a contender that failed.
    """
    store = folder / "store"
    write_store(str(store), skewed(nodes), partitions=4, partitioner="range")
    alone = _Shape(1, 1)
    # What samples ahead takes a core, too: all threads are not always the fastest.
    ours = {f"dtrain, {count} threads": count for count in sorted({1, threads})}
    contenders: dict[str, Callable[[int], tuple[float, str]]] = {
        name: partial(_ours, folder, store, alone, count, steps) for name, count in ours.items()
    }
    if "pyg" in installed(against):
        contenders["pyg"] = lambda _: _peer("pyg", store, threads, steps, 1)
    if pipeline:
        for name, shape in _PIPELINES.items():
            contenders[name] = partial(_ours, folder, store, shape, 1, steps)
        contenders["ddp"] = lambda _: _peer("ddp", store, 1, steps, 4)
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    ways = {}
    for turn in range(repeats):
        for name, run in contenders.items():
            speed, ways[name] = run(turn)
            taken[name].append(speed)
            say(f"{name}: {speed:.0f} seeds/s ({ways[name]})")
    speeds: dict[str, float] = {
        name: round(statistics.median(values)) for name, values in taken.items()
    }
    faster = max(ours, key=lambda name: speeds[name])
    speeds["dtrain"], ways["dtrain"] = speeds[faster], ways[faster]
    pairs = [("dtrain", "pyg"), *((name, "ddp") for name in _PIPELINES)]
    rows = [_row(speeds, ours, peer, ways) for ours, peer in pairs if peer in speeds]
    ratios = {row.op: row.ratio for row in rows}
    return TrainReport(
        speeds,
        ratios.get("train dtrain"),
        ratios.get("train dtrain pipeline"),
        ratios.get("train dtrain staged"),
        ways.get("pyg"),
        threads,
        rows,
    )


def _row(speeds: dict[str, float], ours: str, peer: str, ways: dict[str, str]) -> Row:
    ms, peer_ms = (BATCH / speeds[name] * 1e3 for name in (ours, peer))
    shape = f"{BATCH} x {FANOUTS[0]} x {FANOUTS[1]}"
    name = f"{peer}: {ways[peer]}"
    return Row(f"train {ours}", SYNTHETIC, shape, ms, name, peer_ms, round(peer_ms / ms, 2))


@dataclass(frozen=True)
class _Shape:
    workers: int
    stages: int
    rebalance: bool = True


_PIPELINES = {"dtrain pipeline": _Shape(4, 2), "dtrain staged": _Shape(4, 2, rebalance=False)}


def _ours(
    folder: Path, store: Path, shape: _Shape, threads: int, steps: int, turn: int
) -> tuple[float, str]:
    workers = shape.workers
    run_dir = folder / f"run-{workers}-{threads}-{shape.rebalance}-{turn}"
    run_dir.mkdir()
    config: dict[str, Any] = {
        "data": {"store": str(store)},
        "model": {
            "name": "sage",
            "layers": len(FANOUTS),
            "hidden": HIDDEN,
            "dropout": 0.2,
            "input_dropout": 0.0,
        },
        "sampler": {"name": "neighbor", "fanouts": list(FANOUTS)},
        "train": {"max_steps": _WARM_UP + steps, "batch_size": BATCH},
        "parallel": {
            "stages": shape.stages,
            "rebalance": shape.rebalance,
            "microbatches": workers,
            "threads_per_worker": threads,
        },
        "deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.003}}},
    }
    file = run_dir / "bench.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable]
    if workers > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["-m", "dtrain.train", str(file), "--run-dir", str(run_dir)]
    _run(command, with_variables({"OMP_NUM_THREADS": str(threads)}))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    done = [m for m in map(json.loads, lines) if "loss" in m][_WARM_UP - 1 :]
    seconds = done[-1]["time"] - done[0]["time"]
    started = [e for e in RunFolder(run_dir).events() if e["kind"] == "generation_started"]
    held = max(map(len, started[-1]["holders"]))
    way = f"{workers} workers of {threads} threads, {shape.stages} stages, {held} holders of each"
    return sum(m["seeds"] for m in done[1:]) / seconds, way


def _peer(peer: str, store: Path, threads: int, steps: int, processes: int) -> tuple[float, str]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "dtrain.bench.train_peers", peer, str(store), "--hidden", str(HIDDEN)]
    command += ["--fanouts", *map(str, FANOUTS), "--batch", str(BATCH)]
    command += ["--steps", str(steps), "--threads", str(threads)]
    output = _run(command, with_variables({"OMP_NUM_THREADS": str(threads)}))
    found = json.loads(output.strip().splitlines()[-1])
    return found["seeds_per_s"], found["way"]


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_WAIT_S, check=False
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise DtrainError(f"bench: {' '.join(command[1:5])} ended with {done.returncode}: {last}")
    return done.stdout
