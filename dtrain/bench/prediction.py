"""How well the cost model predicts real runs: their steps, and every single action.

An action takes a few milliseconds, and whatever else runs on the machine, the run's own threads for
transfers included, takes its core away for as long. So a job is run several times: its microbatches
are functions of the step, hence every run executes the very same actions, and an action's time is
the median over the runs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtrain.config import Config, check_config
from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError
from dtrain.recorded import ActionTimes, Compared, RecordedRun, medians, rank_correlation
from dtrain.scheduler.costmodel import CostModel

_FIT_STEPS = 20
_STAGES, _MICROBATCHES = 3, 8
_SEEDS = 128
"""Of a microbatch: 1,024 in a step."""


@dataclass(frozen=True)
class Job:
    """A job to be run and predicted; ``steps``: those after the fit."""

    graph: str
    url: str
    sampler: dict[str, Any]
    steps: int
    workers: int


@dataclass
class RealRuns:
    """Runs of one job, each predicted by what was fitted to its own first 20 steps.

    ``error``: median relative error of step times, over the other steps of all runs; ``errors``: of
    each run. ``correlation``: Spearman's over all actions of these steps, between the medians over
    the runs of their predicted and of their measured times; ``correlation_cpu``: with what their
    threads computed, the time aside in which others had their cores. ``single``, ``single_cpu``:
    the same of each run alone. ``step_ms``: median over all runs.
    """

    graph: str
    sampler: str
    workers: int
    steps: int
    actions: int
    error: float
    errors: list[float]
    correlation: float
    correlation_cpu: float
    single: list[float]
    single_cpu: list[float]
    step_ms: float


def job_config(url: str, sampler: dict[str, Any], stages: int, microbatches: int) -> Config:
    """The configuration of the benchmark's jobs: GraphSAGE of three layers."""
    raw: dict[str, Any] = {
        "data": {"store": url},
        "model": {"name": "sage", "layers": 3, "hidden": 128, "norm": "layer"},
        "sampler": sampler,
        "train": {"max_steps": 1},
        "parallel": {"stages": stages, "microbatches": microbatches},
    }
    if sampler["name"] == "neighbor":
        raw["train"]["batch_size"] = _SEEDS * microbatches
    return check_config(raw, "of the benchmark")


def samplers(url: str) -> list[dict[str, Any]]:
    """Neighbour sampling, and clusters where the store has enough of them."""
    found: list[dict[str, Any]] = [{"name": "neighbor", "fanouts": [10, 10, 10]}]
    if GraphStore.open(url).num_partitions >= 16:
        found.append({"name": "cluster", "clusters": 1})
    return found


def real_runs(folder: Path, job: Job, repeats: int, model: CostModel) -> RealRuns:
    """Run a job ``repeats`` times, one after the other, and compare with what is predicted.

    ``model`` learns from the fitted steps too; the comparisons' own ones know nothing else.

    Raises:
        DtrainError: the job failed.
    """
    runs = [_run(folder, job, number) for number in range(repeats)]
    for run in runs:
        run.teach(model, run.steps[:_FIT_STEPS])
    return summarized(job, [compared(run) for run in runs])


def compared(run: RecordedRun) -> list[Compared]:
    """The steps after the fit, predicted by a model that knows those before alone."""
    model = CostModel()
    run.teach(model, run.steps[:_FIT_STEPS])
    return [run.compare(step, model) for step in run.steps[_FIT_STEPS:]]


def summarized(job: Job, runs: Sequence[Sequence[Compared]]) -> RealRuns:
    """What the runs of a job say together."""
    together = medians(runs)
    alone = [[times for step in run for times in step.actions] for run in runs]
    return RealRuns(
        job.graph,
        job.sampler["name"],
        job.workers,
        min(len(run) for run in runs),
        len(together),
        statistics.median(step.error for run in runs for step in run),
        [statistics.median(step.error for step in run) for run in runs],
        _correlation(together),
        _correlation(together, cpu=True),
        [_correlation(times) for times in alone],
        [_correlation(times, cpu=True) for times in alone],
        1e3 * statistics.median(step.measured_s for run in runs for step in run),
    )


def _correlation(times: Sequence[ActionTimes], *, cpu: bool = False) -> float:
    measured = [t.cpu_s if cpu else t.measured_s for t in times]
    return rank_correlation([t.predicted_s for t in times], measured)


def _run(folder: Path, job: Job, number: int) -> RecordedRun:
    config = job_config(job.url, job.sampler, _STAGES, _MICROBATCHES)
    raw = config.model_dump(mode="json")
    # The first two of a run warm up and are not looked at.
    raw["train"]["max_steps"] = job.steps + _FIT_STEPS + 2
    raw["parallel"]["record_actions"] = True
    run = folder / f"run-{job.graph}-{job.sampler['name']}-{number}"
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "dtrain", "run", str(file)]
    command += [f"--nproc-per-node={job.workers}", f"--run-dir={run}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DtrainError(f"the job on {job.graph} failed: {done.stderr.strip()[-400:]}")
    return RecordedRun(str(run))
