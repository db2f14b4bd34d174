"""Lower bounds: no plan is under them, and what is decided by them is decided as without."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.scheduler import (
    Cluster,
    Layout,
    Plan,
    Policy,
    StepCosts,
    even_cuts,
    make_plan,
    relayout,
)
from dtrain.scheduler.bounds import least_load, least_staged_ticks, least_step_ticks
from dtrain.scheduler.planner import team_sizes
from dtrain.scheduler.predict import predict
from dtrain.scheduler.search import choose_plan

rows = st.lists(st.integers(1, 9), min_size=1, max_size=7)


def costs_of(stages: int, microbatches: int, seed: int) -> StepCosts:
    draw = random.Random(seed)

    def table() -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(draw.randint(1, 900) for _ in range(microbatches)) for _ in range(stages)
        )

    return StepCosts(table(), table())


@given(rows, st.integers(1, 3))
def test_the_least_load_is_under_that_of_every_assignment(row: list[int], workers: int) -> None:
    loads = []
    for who in product(range(workers), repeat=len(row)):
        load = [0] * workers
        for ticks, w in zip(row, who, strict=True):
            load[w] += ticks
        loads.append(max(load))
    assert least_load(row, workers) <= min(loads)
    if len(set(row)) == 1:
        assert least_load(row, workers) == min(loads)


def test_pieces_that_cannot_be_divided_are_known_as_such() -> None:
    assert least_load([5, 5, 5], 2) == 10
    assert least_load([4, 7, 1, 6, 5], 3) == 9


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
def test_no_plan_is_under_the_bounds(
    stages: int, workers: int, microbatches: int, seed: int
) -> None:
    layout = Layout(even_cuts(stages, stages), microbatches)
    costs = costs_of(stages, microbatches, seed) if seed % 3 else StepCosts.even(layout)
    # 1.4 of an even forward is one whole tick, as is the forward.
    cluster = Cluster(slowness={0: 1.4, 1: 0.7} if seed % 2 else {})
    members = range(workers)
    least = least_step_ticks(costs, members, cluster)
    if seed % 2 == 0:
        assert least <= choose_plan(layout, members, 1, costs).prediction.makespan
    if workers >= stages:
        sizes = team_sizes(costs, workers)
        fastest = min(map(cluster.slow, members))
        plan = make_plan(layout, members, 1, costs, cluster)
        found = predict(plan, costs, cluster).makespan
        assert least_staged_ticks(costs, sizes, fastest) <= found


def test_the_staged_bound_is_reached_where_microbatches_divide_evenly() -> None:
    layout = Layout(even_cuts(4, 4), 8)
    plan, costs = make_plan(layout, range(8), 1), StepCosts.even(layout)
    assert least_staged_ticks(costs, [2] * 4) == predict(plan, costs).makespan == (4 + 3) * 3


def test_a_stage_waits_for_the_shortest_way_to_it() -> None:
    layout = Layout((0, 1, 2), 2)
    costs = StepCosts(((1, 9), (5, 5)), ((1, 1), (5, 5)))
    plan = make_plan(layout, range(2), 1, costs, policy=Policy())
    assert least_staged_ticks(costs, [1, 1]) == predict(plan, costs).makespan == 1 + 20 + 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 300))
def test_teams_are_those_of_dealing_workers_out_one_by_one(work: list[int], more: int) -> None:
    sizes = [1] * len(work)
    for _ in range(more):
        sizes[min(range(len(work)), key=lambda s: (-work[s] / sizes[s], s))] += 1
    costs = StepCosts(tuple((2 * w,) for w in work), tuple((w,) for w in work))
    assert team_sizes(costs, len(work) + more) == sizes


@pytest.mark.parametrize("uneven", [False, True])
def test_a_plan_made_afresh_is_left_out_only_where_it_could_not_win(
    uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, draw = Layout(even_cuts(4, 4), 64), random.Random(1)
    costs = costs_of(4, 64, 7) if uneven else None
    plan = make_plan(layout, range(16), 1, costs)
    left_out = 0
    genuine = relayout.assigned
    made: list[int] = []

    def counted(*arguments: object) -> Plan:
        made.append(1)
        return genuine(*arguments)  # type: ignore[arg-type]

    for number in range(2, 26):
        members = sorted(draw.sample(range(16), draw.randint(3, 16)))
        made.clear()
        with monkeypatch.context() as patch:
            patch.setattr(relayout, "assigned", counted)
            again = relayout.replan_or_relayout(plan, members, number, "", costs)
        with monkeypatch.context() as patch:
            patch.setattr(relayout, "_cannot_win", lambda *a: False)
            assert relayout.replan_or_relayout(plan, members, number, "", costs) == again
        left_out += not made
        plan = again
    assert uneven or left_out
