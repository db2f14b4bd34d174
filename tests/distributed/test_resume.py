"""Resuming: after kills, SIGTERM and plain torchrun's restart, in any later shape of the job."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from runtime_jobs import Job, Trainers, merged, read_lines

RAW: dict[str, Any] = {
    "seed": 5,
    "model": {"name": "sage", "layers": 3, "hidden": 16, "dropout": 0.2, "norm": "layer"},
    "sampler": {"name": "neighbor", "fanouts": [4, 4, 4]},
    "train": {"max_steps": 24, "batch_size": 128},
    "parallel": {"stages": 2, "microbatches": 2},
    # Cuts each step into 4 microbatches, whatever the stages.
    "memory": {"limit": "22MB"},
    "checkpoint": {"every_steps": 5},
    "deepspeed": {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 40, "warmup_max_lr": 0.02, "warmup_num_steps": 10},
        },
    },
}


@pytest.fixture
def raw(synthetic: str) -> dict[str, Any]:
    return merged(RAW, [("data.store", synthetic)])


@pytest.fixture
def wanted(trainers: Trainers, raw: dict[str, Any]) -> dict[str, Any]:
    """The record of the run without a fault."""
    return trainers.train(raw, 2, "undisturbed")


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step; the newest line of a step counts."""
    return {m["step"]: m["loss"] for m in read_lines(folder / "metrics.jsonl") if "loss" in m}


@pytest.mark.timeout(200)
def test_a_run_resumes_in_another_shape_with_more_steps(
    trainers: Trainers, raw: dict[str, Any], wanted: dict[str, Any]
) -> None:
    short = merged(raw, [("train.max_steps", 7), ("deepspeed.zero_optimization.stage", 1)])
    trainers.train(short, 4, "run")
    shapes = [
        (3, [("train.max_steps", 12), ("parallel.stages", 3)]),
        (1, [("train.max_steps", 19), ("deepspeed.zero_optimization.stage", 2)]),
        (4, [("parallel.stages", 1), ("memory.feature_cache", 0.3)]),
    ]
    for workers, changes in shapes:
        record = trainers.train(merged(raw, changes), workers, "run")
    assert record["steps"] == 24
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["seeds_trained"] == wanted["seeds_trained"]
    assert record["steps_lost"] == 0
    assert record["generations"] == 4
    assert 0 < record["feature_cache_hit_rate"] < 1
    assert losses(trainers.folder / "run") == losses(trainers.folder / "undisturbed")


def kill_whole(job: Job) -> int:
    """Kill all trainers at once; the newest step that the run's folder tells of."""
    job.signal(signal.SIGKILL)
    assert set(job.join()) == {-signal.SIGKILL}
    return int([m for m in job.metrics() if "loss" in m][-1]["step"])


@pytest.fixture
def longer(raw: dict[str, Any]) -> dict[str, Any]:
    """A run that a kill meets long before its end."""
    return merged(raw, [("train.max_steps", 72)])


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_a_run_killed_whole_resumes_to_the_same_bits(
    trainers: Trainers, longer: dict[str, Any], seed: int
) -> None:
    wanted = trainers.train(longer, 2, "undisturbed")
    dice = random.Random(seed)
    run = trainers.folder / "run"
    job = trainers.start(longer, 3, "run")
    job.wait_for_event("checkpoint_saved")
    time.sleep(dice.random() * 0.2)
    killed_at = kill_whole(job)
    record = trainers.train(longer, 2, "run")
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["seeds_trained"] == wanted["seeds_trained"]
    assert record["generations"] == 2
    (resumed,) = job.events("resumed")
    assert resumed["step"] > 0
    assert resumed["step"] % 5 == 0
    assert record["steps_lost"] == resumed["steps_lost"] == max(0, killed_at - resumed["step"])
    assert losses(run) == losses(trainers.folder / "undisturbed")


@pytest.mark.timeout(200)
def test_a_run_killed_before_its_first_checkpoint_starts_over_and_says_so(
    trainers: Trainers, longer: dict[str, Any]
) -> None:
    unsaved = merged(longer, [("checkpoint.every_steps", 0)])
    wanted = trainers.train(unsaved, 2, "undisturbed")
    killed_at = [0]
    for further in (3, 1):
        job = trainers.start(unsaved, 3, "run")
        job.wait_for_step(killed_at[-1] + further)
        killed_at.append(kill_whole(job))
    record = trainers.train(unsaved, 2, "run")
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["seeds_trained"] == wanted["seeds_trained"]
    assert [e["steps_lost"] for e in job.events("started_over")] == killed_at[1:]
    assert record["steps_lost"] == sum(killed_at)
    assert not job.events("resumed")


@pytest.mark.timeout(200)
def test_sigterm_to_all_saves_at_step_boundaries_and_loses_nothing(
    trainers: Trainers, raw: dict[str, Any], wanted: dict[str, Any]
) -> None:
    job = trainers.start(merged(raw, [("checkpoint.every_steps", 0)]), 3, "run")
    job.wait_for_step(3)
    job.signal(signal.SIGTERM)
    job.join()
    kinds = [r["kind"] for r in job.reports() if r]
    assert len(kinds) == 3
    assert set(kinds) <= {"left", "stopped"}
    assert "stopped" in kinds
    assert job.record()["status"] == "stopped"
    assert job.record()["steps"] < 24
    record = trainers.train(raw, 2, "run")
    assert record["steps_lost"] == 0
    assert record["weights_sha256"] == wanted["weights_sha256"]


@pytest.mark.timeout(200)
def test_a_damaged_newest_checkpoint_is_passed_over(
    trainers: Trainers, raw: dict[str, Any], wanted: dict[str, Any]
) -> None:
    trainers.train(merged(raw, [("train.max_steps", 12)]), 2, "run")
    newest = trainers.folder / "run/checkpoints/step-00000012"
    victim = max(newest.iterdir(), key=lambda f: f.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(bytes(data))
    record = trainers.train(raw, 2, "run")
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["steps_lost"] == 2
    skipped = [
        e
        for e in read_lines(trainers.folder / "run/events.jsonl")
        if e["kind"] == "checkpoint_skipped"
    ]
    assert victim.name in skipped[0]["reason"]


@pytest.mark.timeout(120)
def test_the_best_weights_and_bfloat16_survive_a_resume(
    trainers: Trainers, raw: dict[str, Any]
) -> None:
    changed = merged(
        raw,
        [
            ("deepspeed.bf16.enabled", True),
            ("eval.every_epochs", 1),
            ("eval.select", "best"),
            ("train.max_steps", 27),
        ],
    )
    whole = trainers.train(changed, 2, "whole")
    trainers.train(merged(changed, [("train.max_steps", 14)]), 1, "run")
    record = trainers.train(changed, 3, "run")
    assert record["weights_sha256"] == whole["weights_sha256"]
    assert record["metrics"] == whole["metrics"]


def torchrun(folder: Path, raw: dict[str, Any], *flags: str) -> subprocess.Popen[str]:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *flags]
    command += ["-m", "dtrain.train", str(config), "--run-dir", str(folder / "run")]
    return subprocess.Popen(
        command,
        env=os.environ | {"DTRAIN_GRACE_S": "5"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.timeout(240)
def test_plain_torchrun_goes_on_in_place_or_restarts_and_ends_with_the_same_bits(
    trainers: Trainers, raw: dict[str, Any]
) -> None:
    """A killed trainer is replaced in place; a killed supervisor makes torchrun start anew."""
    raw = merged(raw, [("train.max_steps", 100)])
    wanted = trainers.train(raw, 2, "undisturbed")
    folder = trainers.folder / "torchrun"
    folder.mkdir()
    job = torchrun(folder, raw, "--nproc-per-node=3", "--max-restarts=3")

    def events(*kinds: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(folder / "run/events.jsonl") if e["kind"] in kinds]

    def wait_for(kind: str, count: int) -> None:
        end = time.monotonic() + 100
        while len(events(kind)) < count:
            assert time.monotonic() < end, f"{kind} did not come"
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.002)

    wait_for("checkpoint_saved", 1)
    victim = next(e for e in events("worker_started") if e["worker"] == 1)
    psutil.Process(victim["pid"]).kill()
    wait_for("generation_started", 2)
    assert not events("resumed")
    psutil.Process(events("worker_started")[2]["supervisor_pid"]).kill()
    output, _ = job.communicate(timeout=200)
    assert job.returncode == 0, output
    record = yaml.safe_load((folder / "run/run.json").read_text())
    assert record["status"] == "done"
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert events("resumed")
    leftover = [
        p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in str(p.info["cmdline"])
    ]
    assert leftover == []
