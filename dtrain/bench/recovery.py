"""How fast a job goes on after a kill, against a restart from the newest checkpoint by torchrun.

A real job under plain torchrun trains on a generated graph while trainers are killed. Times are
taken from the job's own records: the kill's wall-clock time, and the time written beside each
committed step.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError

_WAIT_S = 180.0
_DYING_S = 0.1
_TURNS = 9
_TURN_STEPS = 30


@dataclass
class RecoveryResult:
    """Medians over the kills, in milliseconds.

    ``kill_to_commit_ms``: from SIGKILL to the next newly committed step. ``rejoin_ms``: from
    SIGKILL to a generation of all workers again. ``stop_to_commit_ms``: the same from SIGSTOP, less
    the lease. ``torchrun_restart_ms``: kill to next new step with torchrun's restart instead.
    ``step_ms``: an undisturbed step. ``overhead_pct``: cost of redundancy and snapshots in step
    time. ``timeline_ms``: phases of the recoveries, each its median:
    ``notice``, ``agree``, ``plan``, ``groups``, ``state``, ``engines``, ``replay`` (the step), and
    their ``total`` from the notice to the commit.
    """

    kill_to_commit_ms: float
    rejoin_ms: float
    stop_to_commit_ms: float | None
    torchrun_restart_ms: float | None
    step_ms: float
    overhead_pct: float | None
    timeline_ms: dict[str, float]
    restart_ratio: float | None
    kills: int
    workers: int
    all_kill_to_commit_ms: list[float] = field(default_factory=list)


def bench_recovery(
    folder: Path, *, kills: int, workers: int, restarts: int, stops: int, nodes: int
) -> RecoveryResult:
    """Run the benchmark in ``folder``; ``restarts`` and ``stops`` of 0 leave those parts out.

    Raises:
        DtrainError: a job ended before its time.
    """
    store = folder / "store"
    if not store.exists():
        spec = SynthSpec(nodes=nodes, avg_degree=15, classes=10, features=64, seed=0)
        write_store(str(store), synthesize(spec), partitions=4, partitioner="stream")
    in_place = _Job(folder, "in-place", store, workers, {})
    found = [in_place.strike(i % workers, signal.SIGKILL) for i in range(kills)]
    step_ms = in_place.step_ms()
    lease_s = float(in_place.config["robust"]["lease_s"])
    stopped = [in_place.strike(i % workers, signal.SIGSTOP) for i in range(stops)]
    timelines = in_place.timelines()
    in_place.end()
    restart_ms = _torchrun_restarts(folder, store, workers, restarts)
    kill_ms = statistics.median(f.commit_ms for f in found)
    return RecoveryResult(
        kill_to_commit_ms=round(kill_ms, 1),
        rejoin_ms=round(statistics.median(f.rejoin_ms for f in found), 1),
        stop_to_commit_ms=_median([f.commit_ms - lease_s * 1e3 for f in stopped]),
        torchrun_restart_ms=restart_ms,
        step_ms=round(step_ms, 1),
        overhead_pct=_overhead(folder, store, workers),
        timeline_ms=timelines,
        restart_ratio=None if restart_ms is None else round(restart_ms / kill_ms, 1),
        kills=kills,
        workers=workers,
        all_kill_to_commit_ms=[round(f.commit_ms, 1) for f in found],
    )


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 1) if values else None


def _torchrun_restarts(folder: Path, store: Path, workers: int, count: int) -> float | None:
    """The same job restarted by torchrun from its newest checkpoint.

    All workers are killed at once, so that torchrun need not stop those that a kill of one would
    leave: what is measured is the least that its restart takes.
    """
    if not count:
        return None
    changes = {"checkpoint": {"every_steps": 5}}
    job = _Job(folder, "restart", store, workers, changes, max_restarts=count)
    found = [job.restart() for _ in range(count)]
    job.end()
    return _median(found)


def _overhead(folder: Path, store: Path, workers: int) -> float:
    """Step time with standby holders and snapshots, against without, in percent.

    Neither goes over to another plan, which might give both the same holders. Both jobs are there
    all the time and run in turn, the other one stopped, so that whatever else the machine does
    meets both alike.
    """
    patient = {"lease_s": 60.0}
    bare: dict[str, dict[str, Any]] = {
        "parallel": {"redundancy": 1, "rebalance": False},
        "robust": {**patient, "snapshot_every": 1 << 30},
    }
    guarded: dict[str, dict[str, Any]] = {"parallel": {"rebalance": False}, "robust": patient}
    on = _Job(folder, "overhead-on", store, workers, guarded)
    on.stop()
    off = _Job(folder, "overhead-off", store, workers, bare)
    off.stop()
    ratios = []
    for _ in range(_TURNS):
        on_ms, off_ms = on.turn(_TURN_STEPS), off.turn(_TURN_STEPS)
        ratios.append(on_ms / off_ms)
    for job in (on, off):
        job.go_on()
        job.end()
    return round((statistics.median(ratios) - 1) * 100, 2)


@dataclass(frozen=True)
class _Strike:
    commit_ms: float
    rejoin_ms: float


class _Job:
    """A job under plain torchrun, long enough to be struck many times."""

    def __init__(
        self,
        folder: Path,
        name: str,
        store: Path,
        workers: int,
        changes: dict[str, dict[str, Any]],
        max_restarts: int = 0,
    ) -> None:
        self.run_dir = folder / name
        self.notice_ms: list[float] = []
        self.config: dict[str, Any] = {
            "data": {"store": str(store)},
            "model": {"name": "sage", "layers": 2, "hidden": 128, "dropout": 0.2},
            "sampler": {"name": "neighbor", "fanouts": [10, 10]},
            "train": {"max_steps": 1_000_000, "batch_size": 1024},
            "parallel": {"stages": 2, "microbatches": 4},
            "robust": {"respawns": 1000, "lease_s": 2.0},
            "deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.003}}},
        }
        for section, values in changes.items():
            self.config[section] = self.config.get(section, {}) | values
        self._workers = workers
        self.run_dir.mkdir(parents=True)
        file = self.run_dir / "bench.yaml"
        file.write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={workers}", f"--max-restarts={max_restarts}"]
        command += ["-m", "dtrain.train", str(file), "--run-dir", str(self.run_dir)]
        self._log = (self.run_dir / "output.txt").open("w")
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.wait_for_steps(30)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.run_dir / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _steps(self) -> list[dict[str, Any]]:
        return [m for m in self._lines("metrics.jsonl") if "loss" in m]

    def _wait(self, true: Any, what: str) -> None:
        end = time.monotonic() + _WAIT_S
        while not true():
            if self._process.poll() is not None or time.monotonic() > end:
                self.end()
                raise DtrainError(f"bench: {what} did not come; see {self.run_dir}/output.txt")
            time.sleep(0.01)

    def wait_for_steps(self, count: int) -> None:
        """Wait until ``count`` more steps are committed."""
        before = len(self._steps())
        self._wait(lambda: len(self._steps()) >= before + count, f"{count} more steps")

    def step_ms(self) -> float:
        """Median time of a step of a full generation, in milliseconds."""
        times = [m["step_time_s"] for m in self._steps() if "step_time_s" in m]
        return float(statistics.median(times[10:])) * 1e3

    def _processes(self) -> list[int]:
        """Supervisors and trainers."""
        lives = self._newest_lives().values()
        return [e["supervisor_pid"] for e in lives] + [e["pid"] for e in lives]

    def stop(self) -> None:
        """Have all workers stand still, supervisors first: they must not see trainers stopped."""
        for pid in self._processes():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """End :meth:`stop`."""
        for pid in reversed(self._processes()):
            os.kill(pid, signal.SIGCONT)

    def turn(self, steps: int) -> float:
        """Run for so many steps; the median time of a step in ms."""
        self.go_on()
        self.wait_for_steps(5)
        before = len(self._steps())
        self.wait_for_steps(steps)
        times = [m["step_time_s"] for m in self._steps()[before : before + steps]]
        self.stop()
        return float(statistics.median(times)) * 1e3

    def _newest_lives(self) -> dict[int, dict[str, Any]]:
        """Each worker's newest start."""
        started = [e for e in self._lines("events.jsonl") if e["kind"] == "worker_started"]
        return {e["worker"]: e for e in started}

    def restart(self) -> float:
        """Kill every supervisor, whose trainers die with it; ms until the next new step."""
        supervisors = [e["supervisor_pid"] for e in self._newest_lives().values()]
        last = max(m["step"] for m in self._steps())
        struck = time.time()
        for pid in supervisors:
            os.kill(pid, signal.SIGKILL)

        def new() -> list[float]:
            found = [m["time"] for m in self._steps() if m["step"] > last]
            # A step that was being logged when they died is not what a restart gave.
            return [t for t in found if t > struck + _DYING_S]

        self._wait(new, "the next step after a restart")
        self.wait_for_steps(12)
        return (min(new()) - struck) * 1e3

    def strike(self, worker: int, number: signal.Signals) -> _Strike:
        """Signal a trainer, and wait until all is as before."""
        newest = self._newest_lives()[worker]
        last = max(m["step"] for m in self._steps())
        struck = time.time()
        os.kill(newest["pid"], number)

        def committed() -> list[float]:
            new = [m["time"] for m in self._steps() if m["step"] > last + 1]
            return [t for t in new if t > struck]

        def full() -> list[float]:
            return [
                e["time"]
                for e in self._lines("events.jsonl")
                if e["kind"] == "generation_started"
                and e["time"] > struck
                and len(e["workers"]) == self._workers
            ]

        self._wait(committed, "the next step")
        self._wait(full, "a generation of all workers")
        # The step under way may have been voted on already: the first new step after the kill.
        first = min(m["time"] for m in self._steps() if m["step"] > last and m["time"] > struck)
        noticed = [
            e["time"]
            for e in self._lines("events.jsonl")
            if e["kind"] == "generation_broke" and e["time"] > struck
        ]
        if number == signal.SIGKILL and noticed:
            self.notice_ms.append((min(noticed) - struck) * 1e3)
        result = _Strike((first - struck) * 1e3, (min(full()) - struck) * 1e3)
        self.wait_for_steps(12)
        return result

    def timelines(self) -> dict[str, float]:
        """Median milliseconds of each part of the recoveries; ``notice``: from kill to notice."""
        found: dict[str, list[float]] = {"notice": self.notice_ms}
        for event in self._lines("events.jsonl"):
            if event["kind"] == "recovered":
                for phase, value in event["timeline_ms"].items():
                    found.setdefault(phase, []).append(value)
        return {phase: round(statistics.median(v), 2) for phase, v in found.items() if v}

    def end(self) -> None:
        """Stop the job and wait for its end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()
