"""Laying the work out anew: when it is worth it, and that little moves for it."""

from __future__ import annotations

import pytest

from dtrain.scheduler import Layout, Plan, even_cuts, make_plan, replan
from dtrain.scheduler.costs import Cluster
from dtrain.scheduler.relayout import relabelled, replan_or_relayout, takers
from dtrain.scheduler.simulator.invariants import check_plan
from dtrain.scheduler.simulator.steptime import makespan

LAYOUT = Layout(even_cuts(4, 4), 64, 2)


def step(plan: Plan) -> float:
    return makespan(plan, 1.0, 2.0)


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


def test_a_worker_takes_one_place() -> None:
    plan = make_plan(LAYOUT, range(2), 1)
    with pytest.raises(ValueError, match="place"):
        relabelled(plan, {0: 5, 1: 5}, 2, "")
