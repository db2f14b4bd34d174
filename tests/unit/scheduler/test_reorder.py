"""Orders of a large plan after a loss: only what moved is put elsewhere, and nothing deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.scheduler import Action, Layout, Plan, even_cuts, make_plan, planner, replan
from dtrain.scheduler.costs import Cluster, StepCosts
from dtrain.scheduler.insertion import reorder
from dtrain.scheduler.plan import Orders

layouts = st.builds(
    lambda layers, microbatches, redundancy: Layout(
        even_cuts(layers, layers), microbatches, redundancy
    ),
    st.integers(1, 4),
    st.integers(8, 40),
    st.integers(1, 3),
)


def costs_of(layout: Layout, seed: int) -> StepCosts:
    """Uneven costs that a seed fixes."""

    def row(s: int, factor: int) -> tuple[int, ...]:
        return tuple(
            1 + factor * ((seed * 7 + s * 13 + m * m * 31) % 11) for m in range(layout.microbatches)
        )

    stages = range(layout.num_stages)
    return StepCosts(tuple(row(s, 2) for s in stages), tuple(row(s, 5) for s in stages))


def check_orders(plan: Plan) -> None:
    """All is run once by its executor, nothing deadlocks, and 1F1B's limit in flight is kept."""
    stages, done = plan.num_stages, set[Action]()
    left = {w: list(actions) for w, actions in plan.actions.items()}
    for actions in left.values():
        alive = [0] * stages
        for kind, stage, _ in actions:
            alive[stage] += 1 if kind == "F" else -1
            assert alive[stage] <= stages - stage
    progressed = True
    while progressed:
        progressed = False
        for worker, actions in left.items():
            while actions and ready(actions[0], done, stages):
                assert plan.executors[actions[0].stage][actions[0].microbatch] == worker
                done.add(actions.pop(0))
                progressed = True
    assert not any(left.values()), f"deadlock; left: {left}"
    assert len(done) == 2 * stages * plan.layout.microbatches


def ready(action: Action, done: set[Action], stages: int) -> bool:
    kind, stage, m = action
    if kind == "F":
        return stage == 0 or Action("F", stage - 1, m) in done
    return Action("F" if stage == stages - 1 else "B", min(stage + 1, stages - 1), m) in done


@settings(max_examples=60, deadline=None)
@given(
    layouts,
    st.integers(4, 16),
    st.lists(st.sets(st.integers(0, 18), min_size=1, max_size=2), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_losses_and_returns_in_a_row_leave_orders_that_can_proceed(
    layout: Layout, num_workers: int, changes: list[set[int]], seed: int
) -> None:
    costs = costs_of(layout, seed) if seed % 2 else None
    cluster = Cluster(slowness={0: 3.0}) if seed % 3 == 0 else Cluster()
    members = set(range(num_workers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FULL_ORDER_ACTIONS", 0)
        plan = make_plan(layout, sorted(members), 1, costs, cluster)
        check_orders(plan)
        for number, change in enumerate(changes, start=2):
            members = (members ^ change) or {0}
            old, plan = plan, replan(plan, sorted(members), number, "", costs, cluster)
            check_orders(plan)
            # A member that was not there computes the same from what is told of the old plan.
            told = Plan.from_json(old.as_json(), layout, number - 1)
            assert replan(told, sorted(members), number, "", costs, cluster) == plan


def test_only_orders_of_workers_that_execute_a_moved_microbatch_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "FULL_ORDER_ACTIONS", 0)
    old = make_plan(Layout(even_cuts(4, 4), 64), range(64), 1)
    plan = replan(old, [w for w in range(64) if w != 5], 2)
    pairs = [(s, m) for s in range(4) for m in range(64)]
    moved = {m for s, m in pairs if old.executors[s][m] != plan.executors[s][m]}
    assert 0 < len(moved) <= 8
    touched = {plan.executors[s][m] for s in range(4) for m in moved}
    same = [w for w in plan.workers if w not in touched]
    assert len(same) > 30
    assert all(plan.actions[w] == old.actions[w] for w in same)


def test_a_moved_microbatch_goes_into_a_bubble() -> None:
    # Worker 0 waits from 1 to 20 for microbatch 0 to come back from worker 1; 2 has nothing to do.
    layout = Layout((0, 1, 2), 2)
    executors = ((0, 0), (1, 2))
    former = Orders((0, 1, 2), executors, ((0, 30), (1, 40)), ((20, 50), (18, 41)))
    orders = reorder(layout, (0, 1, 2), executors, former, [1], StepCosts.even(layout))
    assert [str(a) for a in orders[0]] == ["F(0,0)", "F(0,1)", "B(0,1)", "B(0,0)"]
    assert (orders.forward, orders.backward) == (((0, 1), (1, 2)), ((20, 5), (18, 3)))
