"""Whole jobs whose saves are struck: what they resume from, and that the result is the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_trainers
import pytest
import torch
from runtime_jobs import Job, Trainers, merged, read_lines
from torch import Tensor

from dtrain.checkpoint import CheckpointInfo, CheckpointStore
from dtrain.checkpoint.diff import diff
from dtrain.data.store import GraphStore
from dtrain.faults.spec import POINTS

RAW: dict[str, Any] = {
    "seed": 3,
    "model": {"name": "sage", "layers": 3, "hidden": 8, "dropout": 0.2},
    "sampler": {"name": "neighbor", "fanouts": [3, 3, 3]},
    "train": {"max_steps": 24, "batch_size": 150},
    "parallel": {"stages": 2, "microbatches": 4},
    "checkpoint": {"every_steps": 3, "keep": 1},
    "deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
}
OWN = "checkpoint_trainers"
# Points that only a store with a rename has.
LOCAL_ONLY = {"rename"}


@pytest.fixture(scope="module")
def raw(synthetic: str) -> dict[str, Any]:
    return merged(RAW, [("data.store", synthetic)])


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and record of a run without a fault, which keeps all its checkpoints."""
    trainers = Trainers(tmp_path_factory.mktemp("undisturbed"))
    keep = [("checkpoint.keep", 100), ("checkpoint.async_save", False)]
    yield trainers.folder / "run", trainers.train(merged(raw, keep), 2, "run")
    trainers.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(tmp_path, checkpoint_trainers.ENTRY)
    yield made
    made.close()


def checkpoints(folder: Path) -> CheckpointStore:
    return CheckpointStore(str(folder / "checkpoints"))


def fault(kind: str, point: str, step: int, **fields: Any) -> dict[str, Any]:
    own = f"{OWN}:{kind}" if hasattr(checkpoint_trainers, kind) else kind
    return {"kind": own, "point": point, "step": step, "worker": 0, **fields}


@pytest.mark.timeout(200)
def test_a_failing_store_stops_no_training_and_a_save_has_the_values_of_its_step(
    jobs: Trainers, raw: dict[str, Any], undisturbed: tuple[Path, dict[str, Any]]
) -> None:
    """Every second save fails, in another way each; the others take longer than some steps."""
    folder, wanted = undisturbed
    causes = {
        6: ({"kind": "disk", "how": "full", "step": 6, "worker": 0}, "No space left on device"),
        12: (fault("refuse", "file.open", 12, worker=1), "Permission denied"),
        18: ({"kind": "disk", "how": "rename", "step": 18, "worker": 0}, ""),
        21: (fault("write_short", "file.open", 21, worker=1), "short write: "),
    }
    slow = [fault("dawdle", "data.write", step, options={"seconds": 0.2}) for step in (3, 9, 15)]
    faults = [struck for struck, _ in causes.values()] + slow
    job = jobs.start(merged(raw, [("faults", faults), ("checkpoint.keep", 100)]), 2, "run")
    assert job.join() == [0, 0], job.reports()
    assert job.record()["weights_sha256"] == wanted["weights_sha256"]
    failed = {e["step"]: e["reason"] for e in job.events("checkpoint_failed")}
    assert sorted(failed) == sorted(causes)
    for step, (_, cause) in causes.items():
        assert cause in failed[step]
    saved = [e["step"] for e in job.events("checkpoint_saved")]
    assert saved == [3, 9, 15, 24], "the next save succeeds each time"
    theirs, ours = checkpoints(folder), checkpoints(job.run_dir)
    assert [info.step for info in ours.list()] == saved
    assert ours.unfinished() == []
    for step in saved:
        found = diff(theirs, CheckpointInfo(step), ours, CheckpointInfo(step))
        assert not found.changed, step
        assert not found.only_left + found.only_right
        assert found.equal > 40


def struck_at(jobs: Trainers, raw: dict[str, Any], point: str, whole: bool) -> Job:
    """A job of three in which worker 0, or all, are killed at a point of the second save."""
    step = 2 * raw["checkpoint"]["every_steps"]
    what = fault("kill_job" if whole else "crash", point, step)
    return jobs.start(merged(raw, [("faults", [what])]), 3, "run")


def resume(jobs: Trainers, raw: dict[str, Any], wanted: dict[str, Any], run: str) -> dict[str, Any]:
    """Start the killed job anew: it goes on from a committed checkpoint, to the same bits."""
    record = jobs.train(raw, 2, run)
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["seeds_trained"] == wanted["seeds_trained"]
    return record


def resumed_step(folder: Path) -> int:
    """The step of the checkpoint that the newest start went on from; 0 without one."""
    resumed = [e for e in read_lines(folder / "events.jsonl") if e["kind"] == "resumed"]
    return int(resumed[-1]["step"]) if resumed else 0


WHOLE = ("stage.tensor", "metadata.write")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "point",
    [p if p in WHOLE else pytest.param(p, marks=pytest.mark.chaos) for p in POINTS],
)
def test_a_job_killed_at_a_point_of_a_save(
    jobs: Trainers, raw: dict[str, Any], undisturbed: tuple[Path, dict[str, Any]], point: str
) -> None:
    job = struck_at(jobs, raw, point, True)
    assert job.join() == [-signal.SIGKILL] * 3
    resume(jobs, raw, undisturbed[1], "run")
    done = POINTS.index(point) >= POINTS.index("committed")
    assert resumed_step(job.run_dir) == (6 if done else 3)


@pytest.mark.chaos
@pytest.mark.timeout(200)
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_a_point_of_a_save(
    jobs: Trainers, raw: dict[str, Any], undisturbed: tuple[Path, dict[str, Any]], point: str
) -> None:
    """Its own saves are at an end; the others' go on, without another start."""
    job = struck_at(jobs, raw, point, False)
    assert job.join() == [-signal.SIGKILL, 0, 0], job.reports()
    assert job.record()["weights_sha256"] == undisturbed[1]["weights_sha256"]
    assert resumed_step(job.run_dir) == 0
    newest = checkpoints(job.run_dir).newest(on_skip=lambda _: None)
    assert newest == CheckpointInfo(24)
    assert newest is not None
    departures = checkpoints(job.run_dir).progress(newest)["progress"]["departures"]
    assert [*departures] == ["0"], "what is known of workers is saved"


@pytest.fixture
def on_s3(s3: Any, jobs: Trainers, raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a job that saves to S3."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    (jobs.folder / checkpoint_trainers.ENVIRONMENT).write_text(json.dumps(variables))
    url = f"s3://{s3.bucket}/{jobs.folder.name}"
    return merged(raw, [("checkpoint.url", url), ("checkpoint.every_steps", 6)])


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("whole", [True, False], ids=["job", "worker"])
@pytest.mark.parametrize("point", [p for p in POINTS if p not in LOCAL_ONLY])
def test_killed_at_a_point_of_a_save_to_s3(
    jobs: Trainers,
    on_s3: dict[str, Any],
    undisturbed: tuple[Path, dict[str, Any]],
    point: str,
    whole: bool,
) -> None:
    job = struck_at(jobs, on_s3, point, whole)
    ends = job.join()
    if whole:
        assert ends == [-signal.SIGKILL] * 3
        resume(jobs, on_s3, undisturbed[1], "run")
        assert resumed_step(job.run_dir) in (6, 12)
    else:
        assert ends == [-signal.SIGKILL, 0, 0], job.reports()
        assert job.record()["weights_sha256"] == undisturbed[1]["weights_sha256"]
    store = CheckpointStore(on_s3["checkpoint"]["url"])
    newest = store.newest(on_skip=lambda _: None)
    assert newest == CheckpointInfo(24)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("whole", [True, False], ids=["job", "worker"])
def test_killed_at_random_moments_of_a_save(
    jobs: Trainers,
    raw: dict[str, Any],
    undisturbed: tuple[Path, dict[str, Any]],
    whole: bool,
    store: str,
    request: pytest.FixtureRequest,
) -> None:
    config = request.getfixturevalue("on_s3") if store == "s3" else raw
    for number in range(5):
        within = {"within_s": 1.0 if store == "s3" else 0.1, "whole": whole}
        step = 2 * config["checkpoint"]["every_steps"]
        what = fault("kill_soon", "stage.begin", step, options=within, seed=number)
        changes: list[tuple[str, Any]] = [("faults", [what])]
        if store == "s3":
            changes.append(("checkpoint.url", f"{config['checkpoint']['url']}/{number}"))
        changed = merged(config, changes)
        job = jobs.start(changed, 3, f"run-{number}")
        ends = job.join()
        if whole:
            assert ends == [-signal.SIGKILL] * 3
            resume(jobs, merged(changed, [("faults", [])]), undisturbed[1], f"run-{number}")
        else:
            assert ends == [-signal.SIGKILL, 0, 0], job.reports()
            assert job.record()["weights_sha256"] == undisturbed[1]["weights_sha256"]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_store_that_is_away_for_half_a_minute(
    jobs: Trainers, on_s3: dict[str, Any], undisturbed: tuple[Path, dict[str, Any]], s3: Any
) -> None:
    """Training goes on, the failed saves are told, and saving goes on when it is back."""
    job = jobs.start(merged(on_s3, [("train.max_steps", 6000)]), 2, "run")
    job.wait_for_step(4)
    s3.down.set()
    began, before = time.monotonic(), job.metrics()[-1]["step"]
    time.sleep(30)
    s3.down.clear()
    passed = job.metrics()[-1]["step"] - before
    failed = job.events("checkpoint_failed")
    assert passed > 0, "training goes on"
    back = time.time()
    while not any(e["time"] > back for e in job.events("checkpoint_saved")):
        assert time.monotonic() - began < 120
        time.sleep(0.1)
    job.signal(signal.SIGTERM)
    job.join()
    assert failed or job.events("checkpoint_failed")
    assert all("s3://" in e["reason"] for e in failed)
    stopped = job.record()
    assert stopped["status"] == "stopped"
    store = CheckpointStore(on_s3["checkpoint"]["url"])
    newest = store.newest(on_skip=lambda _: None)
    assert newest is not None
    assert newest.step == stopped["steps"]
    for file in jobs.folder.rglob("*"):
        if file.is_file() and file.name != checkpoint_trainers.ENVIRONMENT:
            assert s3.secret.encode() not in file.read_bytes(), file


STOPPED_AT = 13
SHAPES = [
    (workers, stages, zero)
    for workers in (1, 2, 3, 4)
    for stages in (1, 2, 3)
    for zero in (0, 1, 2)
]


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]) -> Iterator[Path]:
    """A run of 4 workers in 2 stages that was stopped in mid-epoch, after some steps."""
    trainers = Trainers(tmp_path_factory.mktemp("two-by-two"))
    trainers.train(merged(raw, [("train.max_steps", STOPPED_AT)]), 4, "run")
    yield trainers.folder / "run"
    trainers.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("workers", "stages", "zero"),
    [
        shape if shape == (3, 3, 1) else pytest.param(*shape, marks=pytest.mark.chaos)
        for shape in SHAPES
    ],
)
def test_any_later_shape_of_the_job_ends_with_the_same_bits(
    jobs: Trainers,
    raw: dict[str, Any],
    undisturbed: tuple[Path, dict[str, Any]],
    two_by_two: Path,
    workers: int,
    stages: int,
    zero: int,
) -> None:
    shutil.copytree(two_by_two, jobs.folder / "run")
    ours, train = checkpoints(jobs.folder / "run"), GraphStore.open(raw["data"]["store"], None)
    seeds = len(train.split(0).train)
    assert 24 * 150 % seeds == 0, "the run ends with an epoch"
    before = ledger(ours, CheckpointInfo(STOPPED_AT))
    assert len(before) == seeds
    assert sorted(before.unique().tolist()) == [0, 1], "it was stopped in mid-epoch"
    assert int(before.sum()) == STOPPED_AT * 150 % seeds
    shape = [("parallel.stages", stages), ("deepspeed.zero_optimization.stage", zero)]
    record = jobs.train(merged(raw, [*shape, ("checkpoint.keep", 100)]), workers, "run")
    assert record["weights_sha256"] == undisturbed[1]["weights_sha256"]
    assert resumed_step(jobs.folder / "run") == STOPPED_AT
    assert record["steps_lost"] == 0
    assert record["seeds_trained"] == undisturbed[1]["seeds_trained"]
    between = ledger(ours, CheckpointInfo(15))
    assert int(between.max()) == 1
    assert int(between.sum()) == 15 * 150 % seeds, "the ledger went on where it stood"
    # The run itself checks that every epoch's ledger is full; this is the last one's.
    assert bool((ledger(ours, CheckpointInfo(24)) == 1).all())


def ledger(store: CheckpointStore, info: CheckpointInfo) -> Tensor:
    """How often each train node was trained in the epoch under way, by partition."""
    names = [name for name in store.names(info) if name.startswith("partition/")]
    return torch.cat([*store.load_tensors(info, names).values()])
