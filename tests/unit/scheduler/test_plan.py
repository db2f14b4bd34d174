"""Plans and orders of actions: complete, executable, redundant, and the published schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.scheduler import Action, Layout, Plan, even_cuts, make_plan

layouts = st.builds(
    lambda layers, stages, microbatches, redundancy, schedule: Layout(
        even_cuts(layers, min(stages, layers)), microbatches, redundancy, schedule
    ),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(["1f1b", "gpipe"]),
)


def execute(plan: Plan) -> list[Action]:
    """Follow every worker's order, one action at a time; fails where nobody can go on."""
    orders = {w: list(actions) for w, actions in plan.actions.items()}
    done: list[Action] = []
    finished: set[Action] = set()
    while any(orders.values()):
        progressed = False
        for order in orders.values():
            while order and _ready(order[0], finished, plan.num_stages):
                done.append(order.pop(0))
                finished.add(done[-1])
                progressed = True
        assert progressed, f"deadlock; left: {orders}"
    return done


def _ready(action: Action, finished: set[Action], stages: int) -> bool:
    kind, stage, microbatch = action
    if kind == "F":
        return stage == 0 or Action("F", stage - 1, microbatch) in finished
    if stage == stages - 1:
        return Action("F", stage, microbatch) in finished
    return Action("B", stage + 1, microbatch) in finished


@settings(max_examples=200, deadline=None)
@given(layouts, st.integers(1, 12))
def test_every_action_is_run_once_by_a_holder_in_an_order_that_can_proceed(
    layout: Layout, num_workers: int
) -> None:
    plan = make_plan(layout, range(10, 10 + num_workers), 7)
    done = execute(plan)
    expected = {
        Action(kind, stage, m)
        for kind in ("F", "B")
        for stage in range(layout.num_stages)
        for m in range(layout.microbatches)
    }
    assert sorted(done) == sorted(expected)
    for stage, runs in enumerate(plan.executors):
        assert len(runs) == layout.microbatches
        assert set(runs) <= set(plan.holders[stage])
        assert len(plan.holders[stage]) >= min(layout.redundancy, num_workers)
        assert len(set(plan.holders[stage])) == len(plan.holders[stage])
        for m, worker in enumerate(runs):
            assert Action("F", stage, m) in plan.actions[worker]
            assert Action("B", stage, m) in plan.actions[worker]


@settings(max_examples=100, deadline=None)
@given(layouts, st.integers(1, 12))
def test_1f1b_bounds_the_activations_in_flight(layout: Layout, num_workers: int) -> None:
    plan = make_plan(layout, range(num_workers), 0)
    for actions in plan.actions.values():
        alive: dict[int, int] = {}
        for action in actions:
            alive[action.stage] = alive.get(action.stage, 0) + (1 if action.kind == "F" else -1)
            if layout.schedule == "1f1b":
                assert alive[action.stage] <= layout.num_stages - action.stage


def test_1f1b_on_four_stages_is_the_published_one() -> None:
    plan = make_plan(Layout(even_cuts(4, 4), 4), range(4), 1)
    lines = {w: " ".join(f"{a.kind}{a.microbatch}" for a in plan.actions[w]) for w in range(4)}
    assert lines == {
        0: "F0 F1 F2 F3 B0 B1 B2 B3",
        1: "F0 F1 F2 B0 F3 B1 B2 B3",
        2: "F0 F1 B0 F2 B1 F3 B2 B3",
        3: "F0 B0 F1 B1 F2 B2 F3 B3",
    }


def test_gpipe_runs_all_forwards_first() -> None:
    plan = make_plan(Layout(even_cuts(2, 2), 3, schedule="gpipe"), range(2), 1)
    for worker in range(2):
        assert [a.kind for a in plan.actions[worker]] == ["F"] * 3 + ["B"] * 3


def test_workers_beyond_the_microbatches_stand_by_and_the_plan_says_so() -> None:
    plan = make_plan(Layout((0, 2), 2), range(4), 1)
    assert plan.executors == ((0, 1),)
    assert plan.holders == ((0, 1, 2, 3),)
    assert plan.actions[3] == ()
    assert "workers [2, 3] without work" in plan.reason


def test_standby_holders_come_from_other_stages() -> None:
    plan = make_plan(Layout((0, 1, 2, 3), 4), range(3), 1)
    assert plan.holders == ((0, 1), (1, 2), (0, 2))
    assert plan.stages_held(0) == (0, 2)


@pytest.mark.parametrize("workers", [[], [1, 1]])
def test_bad_workers_are_refused(workers: list[int]) -> None:
    with pytest.raises(ValueError, match="workers: expected distinct"):
        make_plan(Layout((0, 1), 1), workers, 1)


@pytest.mark.parametrize("cuts", [(0,), (1, 2), (0, 2, 2), (0, 3, 1)])
def test_bad_cuts_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cuts: expected"):
        Layout(cuts, 1)
