"""Stage cuts: against every cut there is, memory, and the choice of the number of stages."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from dtrain.scheduler import make_plan
from dtrain.scheduler.costs import Cluster, StepCosts
from dtrain.scheduler.cuts import LayerCosts, choose_stages, cut_stages, layer_costs
from dtrain.scheduler.predict import predict


def costs_for(ticks: list[int]) -> LayerCosts:
    zeros = (0,) * len(ticks)
    return LayerCosts(tuple(ticks), zeros, zeros, (10,) * len(ticks), (1,) * len(ticks))


def slowest_by_trying(ticks: list[int], stages: int, workers: int) -> float:
    """The least time of the slowest stage over all cuts and all numbers of workers."""
    best = float("inf")
    for inner in combinations(range(1, len(ticks)), stages - 1):
        cuts = (0, *inner, len(ticks))
        works = [sum(ticks[a:b]) for a, b in pairwise(cuts)]
        for split in combinations(range(1, workers), stages - 1):
            ends = (0, *split, workers)
            sizes = [b - a for a, b in pairwise(ends)]
            best = min(best, max(w / r for w, r in zip(works, sizes, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_slowest_stage_is_as_fast_as_any_cut_makes_it(seed: int) -> None:
    draw = random.Random(seed)
    ticks = [draw.randint(1, 50) for _ in range(draw.randint(3, 7))]
    stages = draw.randint(1, 3)
    workers = draw.randint(stages, 8)
    cuts = cut_stages(costs_for(ticks), stages, workers)
    assert cuts is not None
    works = [sum(ticks[a:b]) for a, b in pairwise(cuts)]
    best = slowest_by_trying(ticks, stages, workers)
    found = min(
        max(w / (b - a) for w, a, b in zip(works, (0, *split), (*split, workers), strict=True))
        for split in combinations(range(1, workers), stages - 1)
    )
    assert found == pytest.approx(best)


def test_expensive_transfers_move_the_cut() -> None:
    layers = LayerCosts((40, 40, 40, 40), (0, 500, 5, 0), (0,) * 4, (0,) * 4, (0,) * 4)
    assert cut_stages(costs_for([40] * 4), 2, 2) == (0, 2, 4)
    assert cut_stages(layers, 2, 2) in ((0, 1, 4), (0, 3, 4))


def test_what_does_not_fit_is_not_cut_so() -> None:
    layers = costs_for([10, 10, 10, 10])
    assert cut_stages(layers, 1, 4, memory_bytes=39) is None
    cuts = cut_stages(layers, 2, 4, memory_bytes=24)
    assert cuts == (0, 2, 4)


def even(cuts: tuple[int, ...], kept: int = 0) -> StepCosts:
    """Every layer takes 1 and 2 ticks of a million on each of 8 microbatches."""
    sizes = [b - a for a, b in pairwise(cuts)]

    def table(unit: int) -> tuple[tuple[int, ...], ...]:
        return tuple((unit * size,) * 8 for size in sizes)

    return StepCosts(
        table(10**6),
        table(2 * 10**6),
        kept_bytes=table(kept),
        sent_bytes=table(1),
        state_bytes=tuple(1000 * size for size in sizes),
    )


def test_data_parallelism_is_taken_where_memory_allows() -> None:
    found = choose_stages(even, 4, 8, range(4), 1)
    assert found.stages == 1
    assert "pure data parallelism" in found.reason
    assert "4: " in found.reason


def test_stages_are_taken_where_a_worker_cannot_hold_all_layers() -> None:
    cluster = Cluster(memory_bytes=dict.fromkeys(range(4), 2500))
    found = choose_stages(even, 4, 8, range(4), 1, redundancy=1, cluster=cluster)
    assert found.stages in (2, 3, 4)
    assert not found.prediction.over
    assert found.predictions[1].over
    assert "predicted fastest of a run's plans" in found.reason
    assert "1: 24.00 ms (does not fit in memory)" in found.reason


def test_what_has_to_compute_activations_again_is_charged_for_it() -> None:
    def costs(cuts: tuple[int, ...]) -> StepCosts:
        return even(cuts, kept=900)

    assert choose_stages(costs, 4, 8, range(4), 1).stages == 1
    # A worker with all four layers would keep 3600 bytes besides a state of 4000.
    tight = Cluster(memory_bytes=dict.fromkeys(range(4), 5500))
    found = choose_stages(costs, 4, 8, range(4), 1, redundancy=1, cluster=tight)
    # Two microbatches of four layers, each forward twice: less than any pipeline's bubbles.
    assert found.stages == 1
    assert found.recompute[1] == (True,)
    assert found.prediction.step_ticks == 2 * 4 * (1 + 1 + 2) * 10**6
    assert not found.prediction.over
    assert "1: 32.00 ms (stages [0] recompute activations), 2: " in found.reason
    never = choose_stages(costs, 4, 8, range(4), 1, redundancy=1, cluster=tight, recompute="none")
    assert never.stages > 1
    assert never.predictions[1].over
    assert not never.prediction.over
    always = choose_stages(costs, 4, 8, range(4), 1, recompute="all")
    assert all(all(again) for again in always.recompute.values())


def test_stages_that_keep_all_are_taken_where_computing_again_costs_more() -> None:
    def costs(cuts: tuple[int, ...]) -> StepCosts:
        plain = even(cuts, kept=500)
        # Forwards that take ten times as long as backwards.
        return replace(plain, forward=plain.backward, backward=plain.forward)

    tight = Cluster(memory_bytes=dict.fromkeys(range(4), 5500))
    found = choose_stages(costs, 4, 8, range(4), 1, redundancy=1, cluster=tight)
    assert found.stages > 1
    assert not any(found.recompute[found.stages])
    assert found.recompute[1] == (True,)


def test_where_nothing_fits_the_least_excess_is_taken() -> None:
    hopeless = Cluster(memory_bytes=dict.fromkeys(range(4), 10))
    found = choose_stages(even, 4, 8, range(4), 1, redundancy=1, cluster=hopeless)
    assert found.stages == 4
    assert "4 stages nearest to fitting in memory" in found.reason


def test_the_plans_compared_are_those_that_a_run_makes() -> None:
    # A search would give the long microbatches to workers of their own; a run deals in turn.
    def costs(cuts: tuple[int, ...]) -> StepCosts:
        rows = [
            (10**6 * (b - a) * (9 if m % 2 else 1) for m in range(8)) for a, b in pairwise(cuts)
        ]
        table = tuple(tuple(row) for row in rows)
        return StepCosts(table, table)

    found = choose_stages(costs, 2, 8, range(2), 1)
    for stages, plan in found.plans.items():
        assert plan == make_plan(plan.layout, range(2), 1)
        assert found.predictions[stages] == predict(plan, costs(plan.layout.cuts))
    assert found.predictions[1].step_ticks == 4 * 9 * 4 * 10**6


def test_layer_costs_of_a_step_cut_into_layers() -> None:
    found = layer_costs(even((0, 1, 2)), Cluster(bandwidth_bytes_s=1e9))
    assert found.ticks == (24 * 10**6, 24 * 10**6)
    assert found.transfer_ticks == (2 * 8 * 1, 2 * 8 * 1)
