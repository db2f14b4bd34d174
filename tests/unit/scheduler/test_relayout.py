"""Laying the work out anew: when it is worth it, and that little moves for it."""

from __future__ import annotations

import pytest

from dtrain.scheduler import Layout, Plan, even_cuts, make_plan, replan
from dtrain.scheduler.costs import Cluster, StepCosts
from dtrain.scheduler.predict import makespan_ticks, predict
from dtrain.scheduler.relayout import exchangeable, relabelled, replan_or_relayout, takers
from dtrain.scheduler.simulator.invariants import check_plan

LAYOUT = Layout(even_cuts(4, 4), 64, 2)


def step(plan: Plan) -> int:
    return makespan_ticks(plan, StepCosts.even(LAYOUT))


def after_losses(plan: Plan, again: object, rounds: int, cluster: Cluster) -> Plan:
    """A worker is lost and comes back, again and again another one."""
    everyone = plan.workers
    for turn in range(rounds):
        rest = [w for w in everyone if w != everyone[turn * 5 % len(everyone)]]
        for members in (rest, everyone):
            number = plan.generation + 1
            plan = again(plan, members, number, "", None, cluster)  # type: ignore[operator]
            check_plan(plan, number, members, cluster)
    return plan


@pytest.mark.parametrize("domains", [False, True])
def test_plans_do_not_get_worse_with_every_change(domains: bool) -> None:
    cluster = Cluster(domains={w: (f"node {w // 4}",) for w in range(16)} if domains else {})
    first = make_plan(LAYOUT, range(16), 1, None, cluster)
    drifted = after_losses(first, replan, 12, cluster)
    kept = after_losses(first, replan_or_relayout, 12, cluster)
    assert step(drifted) > 1.2 * step(first)
    assert step(kept) <= 1.03 * step(first)


def test_a_plan_that_is_good_enough_stays() -> None:
    plan = make_plan(LAYOUT, range(16), 1)
    again = replan_or_relayout(plan, range(16), 2, "why")
    assert again.executors == plan.executors
    assert "anew" not in again.reason


def test_places_go_to_those_who_hold_their_stage() -> None:
    old = make_plan(LAYOUT, range(16), 1)
    members = tuple(w for w in range(17) if w != 6)
    fresh = make_plan(LAYOUT, range(100, 116), 1)
    to = takers(fresh, old, members)
    assert sorted(to.values()) == list(members)
    new = relabelled(fresh, to, 2, "")
    check_plan(new, 2, members)
    assert step(new) == step(fresh)
    stays = [w for w in members if set(new.stages_held(w)) & set(old.stages_held(w))]
    assert len(stays) == 15


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(slowness={4: 3.0}),
        Cluster(
            domains={w: (f"rack {w % 2}", f"node {w // 8}") for w in range(16)},
            bandwidth_bytes_s=1e6,
            local_bandwidth_bytes_s=1e9,
        ),
    ],
)
def test_workers_that_differ_do_not_change_places(cluster: Cluster) -> None:
    even = StepCosts.even(LAYOUT)
    costs = StepCosts(
        tuple(tuple(10**6 * t for t in row) for row in even.forward),
        tuple(tuple(10**6 * t for t in row) for row in even.backward),
        sent_bytes=((4000,) * 64,) * 4,
    )
    old = make_plan(LAYOUT, range(12), 1, costs)
    plan = replan_or_relayout(old, range(16), 2, "", costs, cluster)
    assert "laid out anew" in plan.reason
    fresh = make_plan(LAYOUT, range(16), 2, costs, cluster)
    assert predict(plan, costs, cluster).makespan == predict(fresh, costs, cluster).makespan


def test_risk_and_memory_tell_workers_apart() -> None:
    cluster = Cluster(risk={1: 0.5}, memory_bytes={2: 1 << 30}, slowness={3: 2.0})
    labels = exchangeable(cluster, range(6), {})
    assert labels[0] == labels[4] == labels[5]
    assert len({labels[w] for w in range(4)}) == 4
    spread = {w: (f"node {w // 2}",) for w in range(6)}
    assert exchangeable(Cluster(), range(6), spread) == spread
    assert len(set(exchangeable(cluster, range(6), spread).values())) == 5


def test_a_worker_takes_one_place() -> None:
    plan = make_plan(LAYOUT, range(2), 1)
    with pytest.raises(ValueError, match="place"):
        relabelled(plan, {0: 5, 1: 5}, 2, "")
