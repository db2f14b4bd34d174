"""Stragglers: the load moves within a few steps, nobody is left out, and it comes back."""

from __future__ import annotations

import math
import random

import pytest

from dtrain.scheduler import Cluster, Layout, Plan, StepCosts, even_cuts
from dtrain.scheduler.balance import BalancePolicy, Balancer
from dtrain.scheduler.predict import predict
from dtrain.scheduler.search import choose_plan

GRID = Layout(even_cuts(4, 4), 32)
SLOW = Cluster(slowness={5: 3.0})


def costs() -> StepCosts:
    draw = random.Random(1)
    row = tuple(round(1e6 * math.exp(draw.gauss(0.0, 0.4))) for _ in range(GRID.microbatches))
    return StepCosts((row,) * 4, (tuple(2 * t for t in row),) * 4)


def ratios(plan: Plan, real: Cluster) -> dict[int, float]:
    """What the workers of a cluster would be seen to take over what is predicted."""
    took, expected = predict(plan, costs(), real).busy, predict(plan, costs()).busy
    return {w: took[w] / expected[w] for w in plan.workers if expected[w]}


class Job:
    """Steps of a job whose balancer is listened to."""

    def __init__(self, plan: Plan, policy: BalancePolicy) -> None:
        self.plan, self.cluster, self.balancer = plan, Cluster(), Balancer(policy)
        self.moves: list[int] = []
        self.took: list[int] = []

    def step(self, real: Cluster) -> None:
        self.took.append(predict(self.plan, costs(), real).step_ticks)
        seen = ratios(self.plan, real)
        move = self.balancer.observe(self.plan, seen, costs(), self.cluster)
        if move is not None:
            self.moves.append(len(self.took))
            self.plan, self.cluster = move.plan, move.cluster


@pytest.mark.parametrize(("staged", "may_hold"), [(True, True), (False, False)])
def test_a_worker_slowed_threefold_gets_less_and_then_its_share_back(
    staged: bool, may_hold: bool
) -> None:
    first = choose_plan(GRID, range(16), 1, costs(), staged=staged)
    best = choose_plan(GRID, range(16), 1, costs(), SLOW)
    job = Job(first.plan, BalancePolicy(may_hold=may_hold))
    for _ in range(10):
        job.step(SLOW)
    during = job.plan
    reachable = max(best.prediction.step_ticks, first.prediction.step_ticks)
    assert job.took[0] > 1.5 * reachable
    assert job.took[-1] <= 1.2 * reachable
    assert during.generation == first.plan.generation
    assert during.workers == first.plan.workers
    assert 0 < during.share_of(5) < first.plan.share_of(5)
    if not may_hold:
        assert during.holders == first.plan.holders
    for _ in range(10):
        job.step(Cluster())
    assert job.plan.share_of(5) > during.share_of(5)
    assert job.took[-1] <= 1.1 * first.prediction.step_ticks
    # Hysteresis: once there and once back, not at every look.
    assert len(job.moves) <= 3


def test_small_and_passing_differences_move_nothing() -> None:
    plan = choose_plan(GRID, range(16), 1, costs()).plan
    job = Job(plan, BalancePolicy())
    draw = random.Random(2)
    for step in range(24):
        real = {w: draw.uniform(0.95, 1.1) for w in range(16)}
        if step % 8 == 0:
            real[3] = 4.0
        job.step(Cluster(slowness=real))
    assert job.moves == []
