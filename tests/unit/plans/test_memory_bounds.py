"""What a run may keep in flight under ``memory.limit`` is what the scheduler plans with."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from itertools import product

from dtrain.config import check_config
from dtrain.data.budget import Budget, MicrobatchBytes
from dtrain.planning import balance_policy, counted, known_cluster, overhaul_policy
from dtrain.scheduler import Cluster, Layout, Plan, StepCosts, even_cuts, make_plan
from dtrain.scheduler.balance import Balancer, Move, times_on
from dtrain.scheduler.links import LinkSpeeds
from dtrain.scheduler.overhaul import Overhaul
from dtrain.scheduler.predict import predict
from dtrain.scheduler.relayout import put_in_order, replan_or_relayout

MIB = 1 << 20
EACH = MicrobatchBytes(4 * MIB, (2 * MIB, MIB, MIB), (8 * MIB, 4 * MIB, 2 * MIB))
MICROBATCHES = 12
FEW_AND_MANY = (2, 3, 4, MICROBATCHES)


def config_of(**parallel: object):
    raw = {
        "data": {"store": "unused"},
        "model": {"name": "sage", "layers": 3, "hidden": 16},
        "train": {"max_steps": 10_000},
        "parallel": {"stages": 3, "microbatches": MICROBATCHES, "redundancy": 1} | parallel,
        "memory": {"limit": "100GB"},
        "deepspeed": {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}},
    }
    return check_config(raw, "test")


def costs(seed: int, layout: Layout) -> StepCosts:
    draw = random.Random(seed)
    rows = [
        tuple(round(1e6 * math.exp(draw.gauss(0.0, 0.6))) for _ in range(layout.microbatches))
        for _ in range(layout.num_stages)
    ]
    kept = ((MIB,) * layout.microbatches,) * layout.num_stages
    state = (MIB,) * layout.num_stages
    return StepCosts(
        tuple(rows), tuple(tuple(2 * t for t in r) for r in rows), kept, kept, state, ()
    )


def budget_of(room: float, microbatches: int = MICROBATCHES) -> Budget:
    """A limit that leaves ``room`` times as much as the most that any plan by 1F1B may need."""
    most = Budget(microbatches, 1 << 50, EACH, parameters=1000).peak_bytes
    assert most is not None
    return Budget(microbatches, round(room * most), EACH, parameters=1000)


def fits(budget: Budget, plan: Plan) -> bool:
    assert budget.limit is not None
    stay = EACH.inputs() * budget.microbatches if budget.keeps_fixed() else 0
    return all(
        budget.plan_bytes(plan, w) + EACH.inputs() + stay <= budget.limit for w in plan.workers
    )


def known(budget: Budget, plan: Plan) -> Cluster:
    cuts = plan.layout.cuts
    return LinkSpeeds().of(known_cluster(config_of(), budget, cuts, plan.workers, {}))


def overhauled(budget: Budget, plan: Plan, real: StepCosts) -> Move | None:
    policy = overhaul_policy(config_of())
    assert policy is not None
    cluster = known(budget, plan)
    times = [times_on(plan, real, cluster)] * 4

    def besides() -> StepCosts:
        return counted(config_of(), budget, real, plan.layout.cuts)

    return Overhaul(policy).look(plan, times, 0.05, 10_000, cluster, besides)


def test_plans_that_a_run_goes_over_to_stay_within_the_limit() -> None:
    taken = 0
    for seed, room, many in product(range(6), (1.0, 1.3, 3.0), FEW_AND_MANY):
        layout = Layout(even_cuts(3, 1 + seed % 3), many)
        plan = make_plan(layout, range(2 + seed % 4), 1)
        budget, real = budget_of(room, many), costs(seed, layout)
        move = overhauled(budget, plan, real)
        if move is not None:
            taken += 1
            assert fits(budget, move.plan)
            # As the next generation puts it in order.
            assert fits(
                budget, put_in_order(move.plan, move.costs, known(budget, plan), search=True)
            )
    assert taken > 10


def test_plans_after_losses_stay_within_the_limit() -> None:
    for seed, room, many in product(range(6), (1.0, 1.3, 3.0), FEW_AND_MANY):
        layout = Layout(even_cuts(3, 2 + seed % 2), many, redundancy=2)
        plan = make_plan(layout, range(3 + seed % 3), 1)
        budget, real = budget_of(room, many), costs(seed, layout)
        cluster, sized = known(budget, plan), counted(config_of(), budget, real, layout.cuts)
        left = plan.workers[1:]
        for measured in (sized, replace(sized, kept_bytes=()), None):
            found = replan_or_relayout(plan, left, 2, "", measured, cluster, search=True)
            assert fits(budget, found)


def test_load_moves_to_orders_that_stay_within_the_limit() -> None:
    moved = 0
    policy = balance_policy(config_of())
    assert policy is not None
    for seed, room, many in product(range(4), (1.0, 1.3, 3.0), FEW_AND_MANY):
        layout = Layout(even_cuts(3, 3), many, redundancy=2)
        plan = make_plan(layout, range(3 + seed % 3), 1)
        budget, real = budget_of(room, many), costs(seed, layout)
        balancer, cluster = Balancer(policy), known(budget, plan)
        sized = partial(counted, config_of(), budget, real, layout.cuts)
        for _ in range(8):
            times = times_on(plan, real, Cluster({0: 3.0}))
            move = balancer.observe(plan, times, cluster, sized)
            if move is not None:
                moved += 1
                assert fits(budget, move.plan)
                plan, cluster = move.plan, replace(cluster, slowness=move.slowness)
    assert moved > 10


def test_where_there_is_room_more_is_in_flight_than_by_the_schedule() -> None:
    layout = Layout(even_cuts(3, 3), MICROBATCHES, redundancy=1)
    real = costs(5, layout)
    plan = make_plan(layout, range(6), 1)
    found = {room: overhauled(budget_of(room), plan, real) for room in (1.0, 5.0)}
    times = {
        room: predict(move.plan, real, LinkSpeeds().of(Cluster())).step_ticks
        for room, move in found.items()
        if move is not None
    }
    assert times[5.0] <= times[1.0]


def test_memory_of_the_device_counts_too() -> None:
    config = config_of(memory_mib=64)
    layout = Layout(even_cuts(3, 3), MICROBATCHES)
    cluster = known_cluster(config, budget_of(5.0), layout.cuts, range(2), {})
    assert cluster.memory_bytes == dict.fromkeys(range(2), 64 * MIB - 16 * 1000)
    unlimited = config_of(memory_mib=64)
    cluster = known_cluster(unlimited, Budget(MICROBATCHES), layout.cuts, range(2), {})
    assert cluster.memory_bytes == dict.fromkeys(range(2), 64 * MIB)
    real = costs(1, layout)
    assert counted(unlimited, Budget(MICROBATCHES), real, layout.cuts) is real
