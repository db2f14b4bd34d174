"""Whatever fails, the job goes on in place, and ends with the bits of the undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest
from runtime_jobs import Job, Trainers, merged, read_lines

RAW: dict[str, Any] = {
    "seed": 7,
    "model": {"name": "sage", "layers": 3, "hidden": 16, "dropout": 0.2, "norm": "layer"},
    "sampler": {"name": "neighbor", "fanouts": [4, 4, 4]},
    "train": {"max_steps": 60, "batch_size": 128},
    "parallel": {"stages": 2, "microbatches": 4},
    "robust": {"lease_s": 3.0},
    "deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
}


@pytest.fixture
def raw(synthetic: str) -> dict[str, Any]:
    return merged(RAW, [("data.store", synthetic)])


@pytest.fixture
def wanted(trainers: Trainers, raw: dict[str, Any]) -> dict[str, Any]:
    return trainers.train(raw, 2, "undisturbed")


def losses(job: Job) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in read_lines(job.run_dir / "metrics.jsonl") if "loss" in m}


def assert_same(trainers: Trainers, job: Job, wanted: dict[str, Any]) -> dict[str, Any]:
    record = job.record()
    assert record["status"] == "done"
    assert record["weights_sha256"] == wanted["weights_sha256"]
    assert record["seeds_trained"] == wanted["seeds_trained"]
    assert record["steps_lost"] == 0
    undisturbed = read_lines(trainers.folder / "undisturbed/metrics.jsonl")
    assert losses(job) == {m["step"]: m["loss"] for m in undisturbed if "loss" in m}
    return record


@pytest.mark.timeout(200)
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_survivors_go_on_and_a_respawned_worker_joins(
    trainers: Trainers, raw: dict[str, Any], wanted: dict[str, Any], victim: int, zero: int
) -> None:
    changed = merged(raw, [("deepspeed.zero_optimization.stage", zero)])
    job = trainers.start(changed, 4, "run")
    job.wait_for_step(5)
    job.kill(victim)
    job.start(victim)
    assert job.join() == [0] * 4
    record = assert_same(trainers, job, wanted)
    assert record["workers"] == 4
    assert record["steps_replayed"] <= 2
    assert not job.events("resumed")
