"""The promise: one ``weights_sha256`` for any number of workers, any cut, any ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime_jobs import Trainers, merged

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 5e-4}}}

CORA = {
    "seed": 1,
    "model": {"name": "gcn", "layers": 3, "hidden": 16, "dropout": 0.5},
    "sampler": {"name": "full"},
    "train": {"max_steps": 5, "weight_decay_layers": [0]},
    "parallel": {"microbatches": 4},
    "deepspeed": ADAM | {"gradient_clipping": 0.5},
}

TOLOKERS = {
    "seed": 2,
    "model": {
        "name": "sage",
        "layers": 3,
        "hidden": 32,
        "dropout": 0.3,
        "residual": True,
        "norm": "layer",
    },
    "sampler": {"name": "neighbor", "fanouts": [5, 5, 5]},
    "train": {"max_steps": 5, "batch_size": 300},
    "parallel": {"microbatches": 4},
    "deepspeed": ADAM,
}

SYNTHETIC = {
    "seed": 3,
    "model": {"name": "gat", "layers": 2, "hidden": 8, "heads": 2, "dropout": 0.4},
    "sampler": {"name": "cluster", "clusters": 1},
    "train": {"epochs": 2},
    "parallel": {"microbatches": 3},
    "deepspeed": ADAM,
}


def hashes(
    trainers: Trainers, raw: dict[str, Any], cases: list[tuple[int, list[tuple[str, Any]]]]
) -> dict[str, str]:
    found = {}
    for workers, changes in cases:
        name = "-".join([f"w{workers}", *(f"{k.rpartition('.')[2]}={v}" for k, v in changes)])
        record = trainers.train(merged(raw, changes), workers, f"run{len(found)}")
        assert record["status"] == "done"
        assert record["workers"] == workers
        found[name] = record["weights_sha256"]
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("graph", ["cora", "tolokers"])
def test_the_same_bits_for_any_workers_stages_and_zero(
    trainers: Trainers, graphs: Callable[[str], str], graph: str
) -> None:
    raw = merged({"cora": CORA, "tolokers": TOLOKERS}[graph], [("data.store", graphs(graph))])
    cases = [
        (
            workers,
            [("parallel.stages", stages), ("deepspeed.zero_optimization.stage", zero)],
        )
        for workers in (1, 2, 3, 4)
        for stages in (1, 2, 3)
        for zero in (0, 1)
    ]
    found = hashes(trainers, raw, cases)
    assert len(found) == 24
    assert len(set(found.values())) == 1, found


@pytest.mark.timeout(200)
def test_schedule_cut_redundancy_and_zero_2_change_nothing(
    trainers: Trainers, synthetic: str
) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}}
    raw = merged(
        TOLOKERS | {"deepspeed": ADAM | {"scheduler": schedule}},
        [("data.store", synthetic), ("train.batch_size", 500)],
    )
    found = hashes(
        trainers,
        raw,
        [
            (1, []),
            (2, [("parallel.stages", 2), ("parallel.cuts", [2])]),
            (3, [("parallel.stages", 3), ("parallel.schedule", "gpipe")]),
            (4, [("parallel.stages", 2), ("parallel.redundancy", 1)]),
            (3, [("parallel.stages", 2), ("parallel.redundancy", 3)]),
            (3, [("parallel.stages", 2), ("deepspeed.zero_optimization.stage", 2)]),
        ],
    )
    assert len(set(found.values())) == 1, found


@pytest.mark.timeout(200)
def test_clusters_and_attention_keep_the_bits(trainers: Trainers, synthetic: str) -> None:
    raw = merged(SYNTHETIC, [("data.store", synthetic)])
    cases: list[tuple[int, list[tuple[str, Any]]]] = [
        (1, []),
        (2, []),
        (3, [("parallel.stages", 2)]),
    ]
    cases.append((2, [("parallel.stages", 2), ("parallel.recompute", "all")]))
    found = hashes(trainers, raw, cases)
    assert len(set(found.values())) == 1, found


@pytest.mark.timeout(200)
def test_a_users_model_with_two_tensors_and_torchs_dropout_keeps_the_bits(
    trainers: Trainers, synthetic: str
) -> None:
    raw = {
        "data": {"store": synthetic},
        "model": {"name": "user_models:noisy_model", "layers": 3},
        "sampler": {"name": "neighbor", "fanouts": [3, 3, 3]},
        "train": {"max_steps": 3, "batch_size": 40},
        "parallel": {"microbatches": 2},
        "deepspeed": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    }
    again = ("parallel.recompute", "all")
    found = hashes(
        trainers,
        raw,
        [(1, []), (2, [("parallel.stages", 2), again]), (3, [("parallel.stages", 3)])],
    )
    assert len(set(found.values())) == 1, found


@pytest.mark.timeout(200)
def test_bfloat16_keeps_the_bits(trainers: Trainers, synthetic: str) -> None:
    raw = merged(
        TOLOKERS,
        [("data.store", synthetic), ("deepspeed.bf16.enabled", True), ("train.max_steps", 3)],
    )
    found = hashes(
        trainers,
        raw,
        [
            (1, []),
            (2, [("parallel.stages", 2)]),
            (3, [("parallel.stages", 2), ("deepspeed.zero_optimization.stage", 1)]),
        ],
    )
    assert len(set(found.values())) == 1, found
