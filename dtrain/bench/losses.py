"""What is left of the throughput of a 4x4 grid after losses, and beside a straggler."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.scheduler import Cluster, Layout, StepCosts, even_cuts
from dtrain.scheduler.search import Choice, choose_plan, choose_replan

_WORKERS, _STAGES, _MICROBATCHES = 16, 4, 64
_SAMPLED = 200


@dataclass
class LossResult:
    """Throughput after losses over what it should be, and the straggler's step over the best.

    What it should be after ``k`` of ``n`` is ``(n - k) / n`` of fault-free, or that of the best any
    assignment could do. ``below``: losses after which it is less than 0.95 of that.
    """

    worst: float
    mean: float
    losses: int
    below: int
    straggler: float
    straggler_moved_back: bool


def measure_losses() -> LossResult:
    """All single losses and 200 sampled double and triple ones of a 4x4 grid, and a slow worker."""
    draw = random.Random(0)
    sizes = [math.exp(draw.gauss(0.0, 0.5)) for _ in range(_MICROBATCHES)]
    forward = tuple(round(1e6 * z) for z in sizes)
    costs = StepCosts((forward,) * _STAGES, (tuple(2 * f for f in forward),) * _STAGES)
    layout = Layout(even_cuts(_STAGES, _STAGES), _MICROBATCHES)
    members = list(range(_WORKERS))
    before = choose_plan(layout, members, 1, costs)
    losses: list[Sequence[int]] = [[w] for w in members]
    losses += [draw.sample(members, 2 + i % 2) for i in range(_SAMPLED)]
    found = [_after(before, costs, lost) for lost in losses]
    slow, back = _straggler(before, costs)
    return LossResult(
        round(min(found), 3),
        round(sum(found) / len(found), 3),
        len(found),
        sum(ratio < 0.95 for ratio in found),
        round(slow, 3),
        back,
    )


def best_step_ticks(costs: StepCosts, cluster: Cluster, members: Sequence[int]) -> float:
    """No plan on ``members`` can be shorter: each microbatch's chain, and all work shared evenly.

    And by the pigeonhole principle: of the ``k n + 1`` longest pieces one worker has ``k + 1``.
    """
    pieces = sorted((t for row in costs.work() for t in row), reverse=True)
    chain = max(sum(column) for column in zip(*costs.work(), strict=True))
    fastest = min(cluster.slow(w) for w in members)
    power = sum(1.0 / cluster.slow(w) for w in members)
    bound: float = max(chain * fastest, sum(pieces) / power)
    n = len(members)
    for k in range(1, (len(pieces) - 1) // n + 1):
        bound = max(bound, fastest * sum(pieces[k * n - k : k * n + 1]))
    return bound


def _after(before: Choice, costs: StepCosts, lost: Sequence[int]) -> float:
    left = [w for w in before.plan.workers if w not in lost]
    after = choose_replan(before.plan, left, 2, "", costs)
    fault_free = before.prediction.step_ticks
    possible = fault_free / best_step_ticks(costs, Cluster(), left)
    wanted = min(len(left) / len(before.plan.workers), possible)
    return fault_free / after.prediction.step_ticks / wanted


def _straggler(before: Choice, costs: StepCosts) -> tuple[float, bool]:
    """One worker slowed threefold: its plan's step over the best, and whether the load returns."""
    members = before.plan.workers
    slow = Cluster(slowness={5: 3.0})
    during = choose_replan(before.plan, members, 2, "slow", costs, slow)
    after = choose_replan(during.plan, members, 3, "recovered", costs)
    best = best_step_ticks(costs, slow, members)
    back = after.prediction.step_ticks <= 1.05 * before.prediction.step_ticks
    return during.prediction.step_ticks / best, back
