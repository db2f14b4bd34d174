"""A run goes over to a plan with further holders where the steps that are left make that worth."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from dtrain.scheduler import Cluster, Layout, Plan, StepCosts, even_cuts, make_plan
from dtrain.scheduler.balance import Move, times_on
from dtrain.scheduler.overhaul import Overhaul, OverhaulPolicy, Trial
from dtrain.scheduler.planner import in_order
from dtrain.scheduler.predict import predict
from dtrain.scheduler.simulator.invariants import check_plan

LAYOUT = Layout(even_cuts(4, 4), 16, redundancy=2)
STEP_S = 0.05


def costs(seed: int = 1, stages: int = 4) -> StepCosts:
    draw = random.Random(seed)
    row = tuple(round(1e6 * math.exp(draw.gauss(0.0, 0.6))) for _ in range(LAYOUT.microbatches))
    return StepCosts((row,) * stages, (tuple(2 * t for t in row),) * stages)


def looked(plan: Plan, steps_left: int = 10_000, cluster: Cluster | None = None) -> Move | None:
    known = cluster or Cluster(latency_s=1e-3)
    return Overhaul().look(plan, [times_on(plan, costs(), known)] * 4, STEP_S, steps_left, known)


@pytest.mark.parametrize("workers", [3, 4, 7, 8])
def test_the_best_plan_found_is_taken_and_keeps_every_rule(workers: int) -> None:
    plan = make_plan(LAYOUT, [w + 2 for w in range(workers)], 3)
    cluster = Cluster(latency_s=1e-3, domains={w: ("rack", f"node{w % 2}") for w in plan.workers})
    move = looked(plan, cluster=cluster)
    assert move is not None
    check_plan(move.plan, 4, plan.workers, cluster)
    assert move.plan.generation == 4
    before, after = (predict(p, costs(), cluster).step_ticks for p in (plan, move.plan))
    assert after <= 0.9 * before
    assert 1 - after / before == pytest.approx(move.gain, abs=0.01)
    more = sum(map(len, move.plan.holders)) - sum(map(len, plan.holders))
    assert more > 0
    assert "with further holders" in move.reason


def test_those_that_hold_a_stage_go_on_with_it() -> None:
    plan = make_plan(LAYOUT, range(8), 1)
    move = looked(plan)
    assert move is not None
    for old, new in zip(plan.holders, move.plan.holders, strict=True):
        assert set(old) & set(new)


def test_members_that_are_told_the_same_say_the_same() -> None:
    plan = make_plan(LAYOUT, range(6), 1)
    assert looked(plan) == looked(plan)


def test_it_is_left_as_it_is_where_too_few_steps_are_left_to_gain_by_it() -> None:
    plan = make_plan(LAYOUT, range(8), 1)
    move = looked(plan)
    assert move is not None
    enough = math.ceil(OverhaulPolicy().worth_s / (move.gain * STEP_S))
    assert looked(plan, enough + 10) is not None
    assert looked(plan, enough // 2) is None


def test_a_plan_that_cannot_be_bettered_is_kept_and_looked_at_ever_more_seldom() -> None:
    overhaul, cluster = Overhaul(), Cluster(latency_s=1e-3)
    move = looked(make_plan(LAYOUT, range(8), 1))
    assert move is not None
    plan = in_order(move.plan, costs(), cluster)
    times = [times_on(plan, costs(), cluster)] * 4
    assert [overhaul.look(plan, times, STEP_S, 10_000, cluster) for _ in range(30)] == [None] * 30
    rests = overhaul.policy.most_rest
    staged = make_plan(LAYOUT, range(8), 2)
    window = [times_on(staged, costs(), cluster)] * 4
    waited = next(
        n
        for n in range(rests + 2)
        if overhaul.look(staged, window, STEP_S, 10_000, cluster) is not None
    )
    assert 0 < waited <= rests


def test_memory_has_the_last_word() -> None:
    plan = make_plan(LAYOUT, range(4), 1)
    state = 1 << 20
    sized = StepCosts(
        costs().forward,
        costs().backward,
        kept_bytes=((1 << 10,) * LAYOUT.microbatches,) * 4,
        state_bytes=(state,) * 4,
    )

    def held(states: float, costs_: StepCosts = sized, *, recompute: bool = True) -> int | None:
        limit = dict.fromkeys(plan.workers, int(states * state))
        cluster = Cluster(latency_s=1e-3, memory_bytes=limit)
        window = [times_on(plan, costs(), cluster)] * 4
        overhaul = Overhaul(OverhaulPolicy(recompute=recompute))
        move = overhaul.look(plan, window, STEP_S, 10_000, cluster, lambda: costs_)
        return None if move is None else max(len(move.plan.stages_held(w)) for w in plan.workers)

    assert held(6.0) == 4
    assert held(2.5) is None
    # Nothing fits.
    assert held(0.5) is None
    # Activations do not fit, unless they are computed again, which not every run may.
    kept = replace(sized, kept_bytes=((5 * state,) * LAYOUT.microbatches,) * 4)
    assert held(5.5, kept) == 4
    assert held(5.5, kept, recompute=False) is None


def test_a_slow_worker_keeps_a_share_by_which_it_is_seen_to_recover() -> None:
    def share(factor: float) -> int | None:
        move = looked(make_plan(LAYOUT, range(8), 1), cluster=Cluster({1: factor}, latency_s=1e-3))
        return None if move is None else move.plan.share_of(1)

    assert share(1.5) in range(1, 8)
    assert share(20.0) is None


def test_a_plan_that_turns_out_slower_is_gone_back_from() -> None:
    plan = make_plan(LAYOUT, range(8), 1)
    move = looked(plan)
    assert move is not None
    taken = in_order(move.plan, costs(), Cluster())
    window = [times_on(taken, costs(), Cluster())] * 4
    trial = Trial(plan, 0.1)
    assert Overhaul().judge(taken, window, trial, 0.105) is None
    back = Overhaul().judge(taken, window, trial, 0.2)
    assert back is not None
    assert (back.plan.holders, back.plan.executors) == (plan.holders, plan.executors)
    assert back.plan.generation == taken.generation + 1
    assert "steps take 200.00 ms, and took 100.00 ms" in back.reason
