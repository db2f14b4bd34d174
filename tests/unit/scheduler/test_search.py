"""The search and the predictor: bounds, memory, reasons, and torch's own schedules as an oracle."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from dtrain.scheduler import Action, Cluster, Layout, Policy, StepCosts, even_cuts, make_plan
from dtrain.scheduler.predict import predict
from dtrain.scheduler.recompute import recomputed, stages_to_recompute
from dtrain.scheduler.search import (
    BASELINE,
    Choice,
    choose_plan,
    choose_replan,
    reschedule,
)


def uneven(stages: int, microbatches: int, seed: int) -> StepCosts:
    """Costs that differ severalfold between microbatches, with bytes."""
    draw = random.Random(seed)
    sizes = [math.exp(draw.gauss(0.0, 0.6)) for _ in range(microbatches)]
    row = tuple(round(1e6 * z) for z in sizes)
    return StepCosts(
        (row,) * stages,
        (tuple(2 * t for t in row),) * stages,
        sent_bytes=(row,) * stages,
        kept_bytes=(tuple(3 * t for t in row),) * stages,
        state_bytes=(1000,) * stages,
        sum_ticks=(50_000,) * stages,
        fixed_ticks=7_000,
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 10), st.integers(0, 99))
def test_the_choice_is_at_least_as_good_as_1f1b_and_never_under_the_bound(
    stages: int, workers: int, microbatches: int, seed: int
) -> None:
    layout, costs = (
        Layout(even_cuts(stages, stages), microbatches),
        uneven(stages, microbatches, seed),
    )
    cluster = Cluster(slowness={0: 2.0}) if seed % 2 else Cluster(bandwidth_bytes_s=1e10)
    choice = choose_plan(layout, range(workers), 1, costs, cluster)
    found = choice.prediction
    assert found.step_ticks <= choice.compared[BASELINE]
    assert found.makespan >= found.lower_bound
    assert choose_plan(layout, range(workers), 1, costs, cluster).plan == choice.plan
    # What was predicted on the way is what the whole walk over the plan gives, and what workers do
    # that know nothing but their orders.
    assert predict(choice.plan, costs, cluster) == found
    orders = replace(choice.plan, actions=dict(choice.plan.actions))
    assert predict(orders, costs, cluster) == found
    other = uneven(stages, microbatches, seed + 1)
    assert predict(orders, other, cluster) == predict(choice.plan, other, cluster)
    for runs, held in zip(choice.plan.executors, choice.plan.holders, strict=True):
        assert set(runs) <= set(held)
        assert len(held) >= min(2, workers)
    if workers > 1:
        after = choose_replan(choice.plan, range(workers - 1), 2, "lost", costs, cluster)
        assert set(after.plan.workers) == set(range(workers - 1))
        assert predict(after.plan, costs, cluster) == after.prediction


def test_the_predictor_knows_the_published_bubble_of_1f1b() -> None:
    layout = Layout(even_cuts(4, 4), 16)
    found = predict(make_plan(layout, range(4), 1), StepCosts.even(layout))
    # (S - 1) / (M + S - 1) of the time, with three ticks a microbatch.
    assert found.makespan == (16 + 3) * 3
    assert found.bubble == pytest.approx(3 / 19)
    assert found.critical_path == 4 * 3
    assert found.lower_bound == 16 * 3


def test_transfers_and_slow_workers_take_their_time() -> None:
    layout = Layout((0, 1, 2), 1)
    costs = StepCosts(((100,), (100,)), ((200,), (200,)), sent_bytes=((10,), (0,)))
    plan = make_plan(layout, range(2), 1, costs)
    assert predict(plan, costs).makespan == 600
    slow = Cluster(slowness={1: 2.0}, bandwidth_bytes_s=1e9, latency_s=5e-9)
    assert predict(plan, costs, slow).makespan == 100 + 15 + 600 + 15 + 200
    near = Cluster(
        domains={0: ("r", "n"), 1: ("r", "n")}, bandwidth_bytes_s=1e9, local_bandwidth_bytes_s=1e10
    )
    assert predict(plan, costs, near).makespan == 600 + 2


def test_orders_that_wait_for_each_other_are_refused() -> None:
    layout = Layout((0, 1, 2), 1)
    plan = make_plan(layout, range(1), 1)
    bad = dict(plan.actions) | {0: (Action("F", 1, 0), Action("F", 0, 0))}
    with pytest.raises(ValueError, match="wait for each other"):
        predict(type(plan)(**{**plan.__dict__, "actions": bad}), StepCosts.even(layout))


def test_memory_limits_what_is_in_flight_and_only_then_recomputes() -> None:
    layout, costs = Layout(even_cuts(2, 2), 8), uneven(2, 8, 3)
    free = choose_plan(layout, range(2), 1, costs, staged=True)
    peak = max(free.prediction.memory_bytes.values())

    def within(limit: int) -> Choice:
        cluster = Cluster(memory_bytes=dict.fromkeys(range(2), limit))
        return choose_plan(layout, range(2), 1, costs, cluster, staged=True)

    one = max(max(row) for row in costs.kept_bytes)
    tight = within(2000 + one)
    assert 2000 + one < peak
    assert not tight.prediction.over
    assert tight.recompute == (False, False)
    assert max(tight.prediction.memory_bytes.values()) <= 2000 + one
    tighter = within(2000 + one // 2)
    assert any(tighter.recompute)
    assert not tighter.prediction.over
    assert "recompute activations" in tighter.reason
    assert sum(tighter.prediction.busy.values()) > sum(tight.prediction.busy.values())
    hopeless = within(10)
    assert hopeless.prediction.over == (0, 1)
    assert "does not fit in the memory of workers [0, 1]" in hopeless.reason


def test_recomputing_runs_the_forward_again_and_keeps_the_input() -> None:
    costs = StepCosts(((5,), (7,)), ((10,), (14,)), ((3,), (1,)), ((30,), (40,)), (1, 1))
    found = recomputed(costs, (False, True))
    assert found.backward == ((10,), (21,))
    assert found.kept_bytes == ((30,), (3,))


def test_the_stage_that_keeps_most_is_computed_again_first() -> None:
    layout = Layout((0, 1, 2), 2)
    costs = StepCosts(((5,) * 2,) * 2, ((9,) * 2,) * 2, ((1,) * 2,) * 2, ((3,) * 2, (40,) * 2))
    plan = make_plan(layout, range(1), 1, costs)
    assert stages_to_recompute(plan, costs, {0: 90}) == (False, False)
    assert stages_to_recompute(plan, costs, {0: 20}) == (False, True)
    assert stages_to_recompute(plan, costs, {0: 1}) == (True, True)
    assert stages_to_recompute(plan, costs, {0: 1}, "none") == (False, False)


def test_the_order_is_searched_for_a_steps_sizes_without_moving_anything() -> None:
    layout = Layout(even_cuts(3, 3), 12)
    plan = make_plan(layout, range(6), 1)
    costs = uneven(3, 12, 5)
    choice = reschedule(plan, costs)
    assert choice.plan.executors == plan.executors
    assert choice.plan.holders == plan.holders
    assert choice.prediction.step_ticks < predict(plan, costs).step_ticks


@pytest.mark.parametrize(
    ("stages", "microbatches", "policy"),
    [
        (2, 4, Policy()),
        (4, 8, Policy()),
        (4, 8, Policy(backwards_first=False)),
        (3, 7, Policy(ahead=2)),
        (4, 4, Policy(rank=(3, 1, 2, 0))),
        (3, 6, Policy(ahead=1, rank=(5, 4, 3, 2, 1, 0), rank_first=True)),
    ],
)
def test_torchs_validators_accept_the_orders(
    stages: int, microbatches: int, policy: Policy
) -> None:
    layout = Layout(even_cuts(stages, stages), microbatches)
    plan = make_plan(layout, range(stages), 1, policy=policy)
    kinds = {"F": schedules.FORWARD, "B": schedules.FULL_BACKWARD}
    theirs = {
        w: [schedules._Action(a.stage, kinds[a.kind], a.microbatch) for a in actions]
        for w, actions in plan.actions.items()
    }
    mapping = schedules._validate_schedule(theirs, stages, stages, microbatches)
    assert mapping == {s: s for s in range(stages)}
    copied = {w: list(actions) for w, actions in theirs.items()}
    with_transfers = schedules._add_send_recv(copied, lambda s: s, stages)
    simulated = schedules._simulate_comms_compute(with_transfers, lambda s: s, stages)
    assert sum(a is not None for a in simulated[0]) == 4 * microbatches
    swapped = {**theirs, 0: theirs[0][::-1]}
    with pytest.raises(AssertionError, match="without first running Forward"):
        schedules._validate_schedule(swapped, stages, stages, microbatches)
