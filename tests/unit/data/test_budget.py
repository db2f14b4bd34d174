"""Microbatches that fit ``memory.limit``: bounds that hold, and a number that only grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dtrain.config import Config
from dtrain.data.batches import BatchSource
from dtrain.data.budget import PeakModel, microbatches_within
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> GraphStore:
    folder: Path = tmp_path_factory.mktemp("budget") / "store"
    graph = synthesize(SynthSpec(nodes=2000, avg_degree=12, classes=4, features=256, seed=1))
    write_store(str(folder), graph, partitions=3, partitioner="range")
    return GraphStore.open(str(folder))


def config_of(store: GraphStore, fanouts: list[int], limit: Any, **changes: Any) -> Config:
    return Config.model_validate(
        {
            "data": {"store": store.url},
            "model": {"name": "sage", "layers": len(fanouts) or 2, "hidden": 16},
            "sampler": {"name": "neighbor", "fanouts": fanouts} if fanouts else {"name": "full"},
            "train": {"max_steps": 1, "batch_size": 300},
            "parallel": {"microbatches": 2},
            "memory": {"limit": limit},
        }
        | changes
    )


@pytest.mark.parametrize("fanouts", [[4, 3], [-1, 2], [2, -1], []])
def test_no_draw_has_more_edges_than_the_bound(store: GraphStore, fanouts: list[int]) -> None:
    config = config_of(store, fanouts, "1GB")
    model = PeakModel(config, store)
    source = BatchSource(
        store, split=0, sampler=config.sampler, batch_size=300, microbatches=2, num_layers=2, seed=0
    )
    for step in range(3):
        blocks = source.sample(step, 0).blocks
        for block, fanout in zip(blocks, model.fanouts, strict=True):
            assert block.nnz <= model._edges[fanout][block.num_dst]


def test_a_tighter_limit_means_more_and_smaller_microbatches(store: GraphStore) -> None:
    assert microbatches_within(config_of(store, [5, 5], None), store).microbatches == 2
    found = {}
    for limit in ("1GB", "20MB", "10MB", "5 MiB"):
        budget = microbatches_within(config_of(store, [5, 5], limit), store)
        assert budget.peak_bytes is not None
        assert budget.peak_bytes <= config_of(store, [5, 5], limit).memory.limit
        assert budget.microbatches % 2 == 0
        found[limit] = budget.microbatches
    counts = list(found.values())
    assert counts[0] == 2
    assert counts == sorted(counts)
    assert counts[-1] > 4


def test_what_cannot_be_split_is_refused_in_one_line(store: GraphStore) -> None:
    with pytest.raises(DtrainError, match=r"memory\.limit: expected at least \d+ bytes") as caught:
        microbatches_within(config_of(store, [5, 5], 1000), store)
    assert "\n" not in str(caught.value)
    clusters = {"sampler": {"name": "cluster"}, "train": {"max_steps": 1}}
    with pytest.raises(DtrainError, match=r"memory\.limit.*1 clusters"):
        microbatches_within(config_of(store, [], 1000, **clusters), store)


@pytest.mark.parametrize("limit", ["7 parsecs", "-1GB", "GB", 0])
def test_limits_that_are_none(store: GraphStore, limit: Any) -> None:
    with pytest.raises(ValidationError, match="limit"):
        config_of(store, [5, 5], limit)
