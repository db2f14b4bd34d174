"""The execution on paper: what it may not depend on, and orders for when a job waits for them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.scheduler import Cluster, Layout, Policy, StepCosts, even_cuts, make_plan, search
from dtrain.scheduler.order import order_actions
from dtrain.scheduler.planner import in_order
from dtrain.scheduler.predict import planned_end, predict
from dtrain.scheduler.relayout import replan_or_relayout
from dtrain.scheduler.search import hardest_first, levelled, quickly_ordered

_DRAW = random.Random(3)
SIZES = [math.exp(_DRAW.gauss(0.0, 0.5)) for _ in range(64)]


def grid(sizes: list[float]) -> tuple[Layout, StepCosts]:
    """Four stages, whose microbatches have these sizes."""
    forward = tuple(round(1e6 * z) for z in sizes)
    costs = StepCosts((forward,) * 4, (tuple(2 * f for f in forward),) * 4)
    return Layout(even_cuts(4, 4), len(sizes)), costs


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_groups_that_share_no_worker_are_ordered_as_if_alone(data: st.DataObject) -> None:
    stages, count = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 12))
    seed = data.draw(st.integers(0, 999))
    draw = random.Random(seed)
    # Microbatches of group g are executed by workers 3 g to 3 g + 2, whose numbers are mixed up.
    group = [draw.randrange(3) for _ in range(count)]
    name = draw.sample(range(100), 9)
    runs = [[name[3 * group[m] + draw.randrange(3)] for m in range(count)] for _ in range(stages)]
    layout = Layout(tuple(range(stages + 1)), count)
    costs = StepCosts.even(layout)
    if seed % 2:
        row = tuple(draw.randint(1, 9) for _ in range(count))
        costs = StepCosts((row,) * stages, (row[::-1],) * stages)
    slow = Cluster(slowness={name[0]: 2.0, name[4]: 3.0} if seed % 3 else {})
    rank = tuple(draw.sample(range(count), count)) if seed % 5 else ()
    policy = Policy(seed % 7 > 0, seed % 4, rank, seed % 11 > 5)
    whole = order_actions(layout, sorted(name), runs, costs, slow, policy)
    for g in set(group):
        mine = [m for m in range(count) if group[m] == g]
        places = sorted(range(len(mine)), key=lambda i: rank[mine[i]]) if rank else []
        alone = order_actions(
            Layout(layout.cuts, len(mine)),
            sorted(name),
            [[row[m] for m in mine] for row in runs],
            StepCosts(
                *([[row[m] for m in mine] for row in t] for t in (costs.forward, costs.backward))
            ),
            slow,
            Policy(
                policy.backwards_first,
                policy.ahead,
                tuple(places.index(i) for i in range(len(mine))) if rank else (),
                policy.rank_first,
            ),
        )
        for table, part in ((whole.forward, alone.forward), (whole.backward, alone.backward)):
            assert [[row[m] for m in mine] for row in table] == [list(row) for row in part]


def test_workers_numbers_decide_nothing() -> None:
    layout, costs = grid(SIZES)
    draw = random.Random(5)
    for policy in (Policy(), Policy(ahead=2, rank=tuple(range(64)), rank_first=True)):
        runs = [[draw.randrange(9) for _ in range(64)] for _ in range(4)]
        to = draw.sample(range(9), 9)
        named = [[to[w] for w in row] for row in runs]
        for known in (costs, StepCosts.even(layout)):
            one = order_actions(layout, range(9), runs, known, policy=policy)
            two = order_actions(layout, range(9), named, known, policy=policy)
            assert (one.forward, one.backward) == (two.forward, two.backward)


def test_a_quick_order_is_never_worse_and_the_same_everywhere() -> None:
    layout, costs = grid(SIZES)
    plan = make_plan(layout, range(16), 1, costs)
    quick = quickly_ordered(plan, costs)
    assert quick == quickly_ordered(plan, costs)
    assert quick.executors == plan.executors
    assert planned_end(quick, costs)[0] < 0.98 * planned_end(in_order(plan, costs), costs)[0]
    alone = make_plan(layout, range(1), 1, costs)
    assert quickly_ordered(alone, costs) == alone


@pytest.mark.parametrize("lost", [(0,), (5,), (10,), (2, 5), (6, 9), (1, 6, 11)])
def test_uneven_microbatches_lose_no_more_than_their_share_at_once(lost: tuple[int, ...]) -> None:
    layout, costs = grid(SIZES)
    old = quickly_ordered(make_plan(layout, range(16), 1, costs), costs)
    left = [w for w in range(16) if w not in lost]
    plan = replan_or_relayout(old, left, 2, "", costs, search=True)
    fault_free, now = (predict(p, costs).step_ticks for p in (old, plan))
    assert fault_free / now >= 0.95 * len(left) / 16


def test_microbatches_that_pass_a_slow_worker_go_first() -> None:
    layout, costs = grid(SIZES)
    usual = quickly_ordered(make_plan(layout, range(16), 1, costs), costs)
    slow = Cluster(slowness={5: 3.0})
    plan = quickly_ordered(levelled(usual, costs, slow, may_hold=False), costs, slow)
    mine = {m for runs in plan.executors for m, w in enumerate(runs) if w == 5}
    rank = hardest_first(plan, costs, slow)
    assert {m for m in range(64) if rank[m] < len(mine)} == mine
    # Its stage has 3 1/3 workers' worth of speed instead of 4.
    assert planned_end(plan, costs, slow)[0] <= 1.2 * planned_end(usual, costs)[0]


def test_a_plan_too_large_to_compare_orders_has_the_most_promising_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, costs = grid(SIZES)
    plan = make_plan(layout, range(8), 1, costs)
    monkeypatch.setattr(search, "QUICK_ACTIONS", 1)
    monkeypatch.setattr(search, "REPLAN_ACTIONS", 1)
    large, choice = quickly_ordered(plan, costs), search.reschedule(plan, costs)
    assert planned_end(large, costs)[0] < 0.95 * planned_end(plan, costs)[0]
    assert choice.prediction.makespan == planned_end(large, costs)[0]
    assert "hardest first, 16 more in flight" in large.reason
    assert list(choice.compared) == ["list scheduling, hardest first, 16 more in flight"]
    limited = Cluster(memory_bytes=dict.fromkeys(range(8), 1 << 40))
    assert search.reschedule(plan, costs, limited).name == "1f1b, longest first"
