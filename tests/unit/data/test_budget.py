"""Microbatches that fit ``memory.limit``: bounds that hold, for whoever runs them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dtrain.config import Config
from dtrain.data.budget import Budget, MicrobatchBytes, PeakModel, next_multiple
from dtrain.data.ranged import FETCH_BYTES
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError
from dtrain.planning import batch_source, model_shapes, within_memory
from dtrain.scheduler import Layout, even_cuts, make_plan, replan


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
    model = PeakModel(config, store, model_shapes(config, store))
    source = batch_source(config, store)
    for step in range(3):
        blocks = source.sample(step, 0).blocks
        for block, fanout in zip(blocks, model.fanouts, strict=True):
            assert block.nnz <= model._edges[fanout][block.num_dst]


def test_a_tighter_limit_means_more_and_smaller_microbatches(store: GraphStore) -> None:
    assert within_memory(config_of(store, [5, 5], None), store)[1].microbatches == 2
    counts = []
    for limit in (1_000_000_000, FETCH_BYTES + 12_000_000, FETCH_BYTES + 6_000_000):
        config, budget = within_memory(config_of(store, [5, 5], limit), store)
        assert budget.peak_bytes is not None
        assert budget.peak_bytes <= limit
        assert config.parallel.microbatches == budget.microbatches
        counts.append(budget.microbatches)
    assert counts[0] == 2
    assert counts == sorted(set(counts))
    # It is no result of the search that the search would change.
    again, _ = within_memory(config, store)
    assert again.parallel.microbatches == counts[-1]


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_least_multiple_is_found(store: GraphStore, wanted: int) -> None:
    config = config_of(store, [5, 5], FETCH_BYTES + 7_000_000, parallel={"microbatches": wanted})
    model = PeakModel(config, store, model_shapes(config, store))
    limit = config.memory.limit
    assert limit is not None

    def fits(microbatches: int) -> bool:
        largest = model.sampled(-(-300 // microbatches))
        peak = Budget(microbatches, limit, largest, model.parameters).peak_bytes
        return peak is not None and peak <= limit

    least = next(m for m in range(wanted, 1000, wanted) if fits(m))
    assert least > 4
    assert within_memory(config, store)[1].microbatches == least


def test_the_next_number_worked_by_hand() -> None:
    # 300 seeds in 2: 150 each. For 149 it takes 3 (100 each), which as a multiple of 2 is 4.
    assert next_multiple(-(-300 // 149), 2) == 4
    assert next_multiple(-(-300 // 149), 3) == 3
    assert next_multiple(7, 7) == 7


def test_a_peak_worked_by_hand() -> None:
    each = MicrobatchBytes(1000, (300, 20), (5000, 70))
    budget = Budget(3, 20_000_000, each, parameters=10)
    # Of two layers, each a stage: two in flight on stage 0 and one more on stage 1.
    held = 2 * (1000 + 300 + 5000) + 3 * 20 + 70
    # Weights, moments and sums; three microbatches' gradients; one backward pass; one ahead.
    rest = 40 * 10 + 3 * 10 * 4 + 5000 + (1000 + 300 + 20) + FETCH_BYTES
    assert budget.peak_bytes == held + rest
    # One stage on one worker: one in flight.
    plan = make_plan(Layout((0, 2), 3), [0], 1)
    assert budget.plan_bytes(plan, 0) == held + rest - 1320 - (1000 + 300 + 5000) - 2 * 20
    tight = Budget(3, budget.plan_bytes(plan, 0) + 2 * 1320 + 1, each, parameters=10)
    assert (tight.ahead(plan, 0), budget.ahead(plan, 0), Budget(3).ahead(plan, 0)) == (2, 4, 4)
    # Kept for good, all three have to fit beside the peak.
    assert tight.keeps_fixed() is False
    assert budget.keeps_fixed()
    # A cache gets what the peak leaves.
    assert budget.with_cache(1 << 40).cache_bytes == 20_000_000 - held - rest


def test_what_is_left_between_steps_worked_by_hand() -> None:
    plan, mib = make_plan(Layout((0, 2), 3), [0], 1), 1 << 20
    # Weights, moments and sums; three microbatches' gradients; what a fetch takes.
    always = 40 * 10 + 3 * 10 * 4 + FETCH_BYTES

    def left(room: int) -> int | None:
        each = MicrobatchBytes(0, (mib, 0), (mib // 2, 0))
        return Budget(3, always + room, each, parameters=10).between_steps(plan, 0)

    # One is sampled ahead; the weights are there twice more.
    assert left(3 * mib) == 2 * mib - 2 * 4 * 10
    # All three stay, and one may be on its way.
    assert left(8 * mib) == 4 * mib - 2 * 4 * 10
    assert left(mib) == mib
    assert Budget(3).between_steps(plan, 0) is None


def test_no_plan_needs_more_than_the_peak() -> None:
    for layers, workers, microbatches in product((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 5, 8)):
        each = MicrobatchBytes(
            1 << 20, tuple(1 << (4 + i) for i in range(layers)), tuple([100_000] * layers)
        )
        budget = Budget(microbatches, 1 << 40, each)
        peak = budget.peak_bytes
        assert peak is not None
        for stages in range(1, layers + 1):
            layout = Layout(even_cuts(layers, stages), microbatches)
            plan = make_plan(layout, range(workers), 1)
            plans = [plan, *(replan(plan, range(n), 2, "") for n in range(1, workers))]
            for found in plans:
                for w in found.workers:
                    assert budget.plan_bytes(found, w) + each.inputs() <= peak


def test_neither_the_split_nor_the_place_changes_the_number(
    store: GraphStore, tmp_path: Path
) -> None:
    graph = synthesize(SynthSpec(nodes=2000, avg_degree=12, classes=4, features=256, seed=1))
    write_store("memory://budget/store", graph, partitions=3, partitioner="range")
    far = GraphStore.open("memory://budget/store", str(tmp_path))
    assert far.fingerprint == store.fingerprint
    limit = FETCH_BYTES + 20_000_000
    found = set()
    for stages, where in product((1, 2, "auto"), (store, far)):
        parallel = {"microbatches": 2, "stages": stages}
        config, budget = within_memory(config_of(where, [5, 5], limit, parallel=parallel), where)
        found.add((budget.microbatches, str(config.identity(where.fingerprint))))
    assert len(found) == 1
    other = config_of(store, [5, 5], limit + 1, parallel=parallel)
    assert other.identity("f") != config_of(store, [5, 5], limit, parallel=parallel).identity("f")


def test_what_cannot_be_split_is_refused_in_one_line(store: GraphStore) -> None:
    with pytest.raises(DtrainError, match=r"memory\.limit: expected at least \d+ bytes") as caught:
        within_memory(config_of(store, [5, 5], 1000), store)
    assert "\n" not in str(caught.value)
    clusters = {"sampler": {"name": "cluster"}, "train": {"max_steps": 1}}
    with pytest.raises(DtrainError, match=r"memory\.limit.*1 clusters"):
        within_memory(config_of(store, [], 1000, **clusters), store)
    gpipe = {"parallel": {"microbatches": 2, "schedule": "gpipe"}}
    with pytest.raises(DtrainError, match=r"parallel\.schedule: gpipe keeps all \d+ microbatches"):
        within_memory(config_of(store, [5, 5], FETCH_BYTES + 6_000_000, **gpipe), store)


@pytest.mark.parametrize("limit", ["7 parsecs", "-1GB", "GB", 0])
def test_limits_that_are_none(store: GraphStore, limit: Any) -> None:
    with pytest.raises(ValidationError, match="limit"):
        config_of(store, [5, 5], limit)
