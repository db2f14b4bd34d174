"""Replanning: little is moved, the load is level, and what results is a plan like any other."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtrain.scheduler import (
    Action,
    Cluster,
    Layout,
    Plan,
    StepCosts,
    even_cuts,
    make_plan,
    replan,
)
from dtrain.scheduler.predict import predict

layouts = st.builds(
    lambda layers, stages, microbatches, redundancy, schedule: Layout(
        even_cuts(layers, min(stages, layers)), microbatches, redundancy, schedule
    ),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(["1f1b", "gpipe"]),
)
memberships = st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=2, max_size=6)


def load_of(plan: Plan) -> dict[int, int]:
    """How many (stage, microbatch) each worker executes."""
    counted = Counter(w for runs in plan.executors for w in runs)
    return {w: counted[w] for w in plan.workers}


def check(plan: Plan, workers: set[int]) -> None:
    """What holds of every plan."""
    assert set(plan.workers) == workers == set(plan.actions)
    for stage, runs in enumerate(plan.executors):
        held = plan.holders[stage]
        assert len(runs) == plan.layout.microbatches
        assert set(runs) <= set(held) <= workers
        assert list(held) == sorted(set(held))
        assert len(held) >= min(plan.layout.redundancy, len(workers))
    assert all(plan.stages_held(w) for w in workers)
    done: set[Action] = set()
    left = {w: list(actions) for w, actions in plan.actions.items()}
    if plan.layout.schedule == "1f1b":
        for actions in left.values():
            alive = Counter[int]()
            for kind, stage, _ in actions:
                alive[stage] += 1 if kind == "F" else -1
                assert alive[stage] <= plan.num_stages - stage
    progressed = True
    while progressed:
        progressed = False
        for worker, actions in left.items():
            while actions and _ready(actions[0], done, plan.num_stages):
                assert plan.executors[actions[0].stage][actions[0].microbatch] == worker
                done.add(actions.pop(0))
                progressed = True
    assert not any(left.values()), f"deadlock; left: {left}"
    assert len(done) == 2 * plan.num_stages * plan.layout.microbatches


def _ready(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, m = action
    if kind == "F":
        return stage == 0 or Action("F", stage - 1, m) in done
    return Action("F" if stage == stages - 1 else "B", min(stage + 1, stages - 1), m) in done


@settings(max_examples=200, deadline=None)
@given(layouts, memberships)
@example(Layout(even_cuts(3, 3), 9, redundancy=1), [{0, 1, 2}, {0, 1, 2, 3}])
@example(Layout(even_cuts(5, 5), 5, redundancy=1), [{0}, {0, 1, 2, 4, 5, 6}, {0, 3}])
def test_any_sequence_of_memberships_gives_level_executable_plans(
    layout: Layout, sequence: list[set[int]]
) -> None:
    plan = make_plan(layout, sorted(sequence[0]), 1)
    for number, workers in enumerate(sequence[1:], start=2):
        old, plan = plan, replan(plan, sorted(workers), number)
        assert plan.generation == number
        check(plan, workers)
        if workers != set(old.workers):
            load = load_of(plan)
            assert max(load.values()) - min(load.values()) <= 1
        assert replan(old, sorted(workers, reverse=True), number) == plan
        # A member that was not there computes the same from what it is told of the old plan.
        told = Plan.from_json(json.loads(json.dumps(old.as_json())), layout, number - 1)
        assert replan(told, sorted(workers), number) == plan


@settings(max_examples=60, deadline=None)
@given(layouts, memberships, st.integers(0, 99))
def test_uneven_costs_and_speeds_give_executable_plans_too(
    layout: Layout, sequence: list[set[int]], seed: int
) -> None:
    def table(factor: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(1 + factor * ((seed * 7 + s * 13 + m * m * 31) % 11) for m in every)
            for s in range(layout.num_stages)
        )

    every = range(layout.microbatches)
    costs, cluster = StepCosts(table(2), table(5)), Cluster(slowness={0: 3.0}, risk={1: 0.2})
    plan = make_plan(layout, sorted(sequence[0]), 1, costs, cluster)
    for number, workers in enumerate(sequence[1:], start=2):
        plan = replan(plan, sorted(workers), number, "", costs, cluster)
        check(plan, workers)


@settings(max_examples=200, deadline=None)
@given(layouts, memberships)
def test_no_more_is_moved_than_must_be(layout: Layout, sequence: list[set[int]]) -> None:
    plan = make_plan(layout, sorted(sequence[0]), 1)
    for number, workers in enumerate(sequence[1:], start=2):
        old, plan = plan, replan(plan, sorted(workers), number)
        pairs = [(s, m) for s in range(plan.num_stages) for m in range(layout.microbatches)]
        orphans = {p for p in pairs if old.executors[p[0]][p[1]] not in workers}
        moved = {
            p for p in pairs if old.executors[p[0]][p[1]] != plan.executors[p[0]][p[1]]
        } - orphans
        torn = {m for _, m in orphans}
        # What lost an executor may move whole. Of the rest only what lies above the mean is moved,
        # counting what the lost left to each.
        mean = len(pairs) // len(workers)
        before = load_of(old)
        surplus = sum(max(0, before.get(w, 0) - mean) for w in workers)
        assert len(moved) <= surplus + plan.num_stages * len(torn)


@settings(max_examples=100, deadline=None)
@given(layouts, st.sets(st.integers(0, 11), min_size=1))
def test_an_unchanged_membership_changes_nothing(layout: Layout, workers: set[int]) -> None:
    old = make_plan(layout, sorted(workers), 1)
    plan = replan(old, sorted(workers), 2)
    assert (plan.executors, plan.actions) == (old.executors, old.actions)
    assert plan.holders == tuple(tuple(sorted(h)) for h in old.holders)
    assert plan.reason == "nothing changed"


def test_what_lost_an_executor_goes_whole_to_its_pipelines_survivors_or_to_another() -> None:
    old = make_plan(Layout(even_cuts(4, 4), 16), range(16), 1)
    plan = replan(old, [w for w in range(16) if w != 5], 2)
    # 64 on 15 workers: five at most, where stage 1 alone would have left six on one.
    assert sorted(load_of(plan).values()) == [4] * 11 + [5] * 4
    routes = list(zip(*old.executors, strict=True))
    survivors = set(routes[1]) - {5}
    after = list(zip(*plan.executors, strict=True))
    for m in range(16):
        if 5 not in routes[m]:
            assert after[m] == routes[m]
        elif len(set(after[m])) == 1:
            assert after[m][0] in survivors
        else:
            assert after[m] in routes
    assert {routes[m][1] for m in range(16) if len(set(after[m])) == 1} == {5}


def test_a_worker_that_comes_back_takes_its_share() -> None:
    first = make_plan(Layout(even_cuts(4, 4), 16), range(16), 1)
    second = replan(first, [w for w in range(16) if w != 5], 2)
    third = replan(second, range(16), 3)
    assert set(load_of(third).values()) == {4}
    assert all(len(held) <= 8 for held in third.holders)


@pytest.mark.parametrize(("workers", "microbatches"), [(16, 64), (64, 256)])
def test_a_step_without_a_worker_is_near_the_shortest_possible(
    workers: int, microbatches: int
) -> None:
    layout = Layout(even_cuts(4, 4), microbatches)
    old, costs = make_plan(layout, range(workers), 1), StepCosts.even(layout)
    for lost in range(workers):
        plan = replan(old, [w for w in range(workers) if w != lost], 2)
        # A forward takes 1 and a backward 2; nobody can do part of them.
        ideal = 3 * math.ceil(4 * microbatches / (workers - 1))
        assert predict(plan, costs).step_ticks <= 1.25 * ideal


@pytest.mark.parametrize("lost", [(0, 5), (4, 5), (0, 1, 15), (3, 7, 11)])
def test_two_or_three_losses_at_once_cost_about_their_share(lost: tuple[int, ...]) -> None:
    layout = Layout(even_cuts(4, 4), 64)
    old, costs = make_plan(layout, range(16), 1), StepCosts.even(layout)
    plan = replan(old, [w for w in range(16) if w not in lost], 2)
    fault_free, now = (predict(p, costs).step_ticks for p in (old, plan))
    assert fault_free / now >= 0.95 * (16 - len(lost)) / 16


def test_a_survivor_without_the_memory_for_all_stages_takes_no_whole_microbatch() -> None:
    layout = Layout(even_cuts(2, 2), 8)
    costs = replace(StepCosts.even(layout), state_bytes=(10, 10))
    old = make_plan(layout, range(4), 1, costs)
    tight = Cluster(memory_bytes=dict.fromkeys(range(4), 15))
    plan = replan(old, [0, 1, 3], 2, "", costs, tight)
    routes = set(zip(*plan.executors, strict=True))
    assert all(a != b for a, b in routes)
    alone = replan(make_plan(layout, range(2), 1, costs), [1, 2], 2, "", costs, tight)
    assert set(alone.executors[0]) == {2}


def test_what_a_lost_worker_left_goes_to_its_replacement_and_the_rest_stays() -> None:
    plan = replan(make_plan(Layout((0, 1), 4), [0, 1], 1), [0, 2], 2)
    assert plan.executors == ((0, 2, 0, 2),)
    plan = replan(make_plan(Layout(even_cuts(2, 2), 1), [0, 1], 1), [0, 2], 2)
    assert plan.executors == ((0,), (2,))


def test_standbys_beyond_redundancy_are_let_go() -> None:
    layout = Layout(even_cuts(2, 2), 4, redundancy=1)
    alone = replan(make_plan(layout, range(4), 1), [0], 2)
    assert alone.holders == ((0,), (0,))
    plan = replan(alone, [0, 1, 2, 3], 3)
    for stage, held in enumerate(plan.holders):
        idle = set(held) - set(plan.executors[stage])
        assert all(plan.stages_held(w) == (stage,) for w in idle)


def test_a_worker_without_work_stands_by_somewhere() -> None:
    plan = replan(make_plan(Layout((0, 1), 2), [0, 1], 1), [0, 1, 2], 2)
    assert plan.holders == ((0, 1, 2),)
    assert plan.actions[2] == ()


@pytest.mark.parametrize("workers", [[], [1, 1]])
def test_bad_workers_are_refused(workers: list[int]) -> None:
    with pytest.raises(ValueError, match="workers: expected distinct"):
        replan(make_plan(Layout((0, 1), 1), [0], 1), workers, 2)


def test_a_large_cluster_is_replanned_with_few_moves() -> None:
    old = make_plan(Layout(even_cuts(4, 4), 512), range(1280), 1)
    plan = replan(old, [w for w in range(1280) if w not in (7, 600)], 2)
    lost = sum(load for w, load in load_of(old).items() if w in (7, 600))
    changed = sum(
        a != b
        for before, after in zip(old.executors, plan.executors, strict=True)
        for a, b in zip(before, after, strict=True)
    )
    # Each of the lost worker's microbatches on all four stages, and as much to level the load.
    assert changed <= 2 * 4 * lost
