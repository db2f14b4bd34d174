"""What is left of the throughput of a 4x4 grid after losses, and beside a straggler.

Plans are made as a run makes them: :func:`first_plan`, a :class:`Balancer` that is told what every
action takes, :func:`replan_or_relayout`. How long their steps take is predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dtrain.scheduler import Cluster, Layout, Plan, StepCosts, even_cuts
from dtrain.scheduler.balance import Balancer, times_on
from dtrain.scheduler.bounds import least_step_ticks
from dtrain.scheduler.costs import UNIFORM
from dtrain.scheduler.planner import first_plan
from dtrain.scheduler.predict import predict
from dtrain.scheduler.relayout import replan_or_relayout

_WORKERS, _STAGES, _MICROBATCHES = 16, 4, 64
_SAMPLED = 200
_SETTLED = 40
_STEPS = 10


@dataclass
class LossResult:
    """Throughput after losses over what it should be, and the straggler's step over the best.

    What it should be after ``k`` of ``n`` is ``(n - k) / n`` of fault-free, or that of the best any
    assignment could do. ``even_worst``: with microbatches that are all alike; ``worst``, ``mean``:
    with uneven ones, at once; ``settled_worst``: the same once load was moved for what is measured,
    ten steps later, over the first 40 of the ``losses``. ``below``: losses after which it is less
    than 0.95 at once; ``settled_below`` likewise. ``straggler``: after ten steps.
    """

    even_worst: float
    worst: float
    mean: float
    settled_worst: float
    losses: int
    below: int
    settled_below: int
    straggler: float
    straggler_moved_back: bool


@dataclass
class _Job:
    """A run as the scheduler sees it: its plan, and what it has measured."""

    plan: Plan
    real: StepCosts
    costs: StepCosts | None = None
    cluster: Cluster = UNIFORM
    balancer: Balancer = field(default_factory=Balancer)

    def steps(self, on: Cluster = UNIFORM) -> int:
        """Run ten steps on ``on``; what the next one takes, in ticks."""
        for _ in range(_STEPS):
            times = times_on(self.plan, self.real, on)
            move = self.balancer.observe(self.plan, times, self.cluster)
            if move is not None:
                self.plan, self.costs = move.plan, move.costs
                self.cluster = replace(self.cluster, slowness=move.slowness)
        return predict(self.plan, self.real, on).step_ticks

    def without(self, lost: Sequence[int]) -> _Job:
        """The job after the loss of some workers."""
        left = [w for w in self.plan.workers if w not in lost]
        plan = replan_or_relayout(
            self.plan, left, 2, "", self.costs, self.cluster, search=self.balancer.policy.search
        )
        return _Job(plan, self.real, self.costs, self.cluster)


def measure_losses() -> LossResult:
    """All single losses and 200 sampled double and triple ones of a 4x4 grid, and a slow worker."""
    draw = random.Random(0)
    sizes = [math.exp(draw.gauss(0.0, 0.5)) for _ in range(_MICROBATCHES)]
    members = list(range(_WORKERS))
    losses: list[Sequence[int]] = [[w] for w in members]
    losses += [draw.sample(members, 2 + i % 2) for i in range(_SAMPLED)]
    even, uneven = _begun([1.0] * _MICROBATCHES), _begun(sizes)
    alike = [_kept(even, even.without(lost)) for lost in losses]
    after = [uneven.without(lost) for lost in losses]
    at_once = [_kept(uneven, job) for job in after]
    for job in after[:_SETTLED]:
        job.steps()
    settled = [_kept(uneven, job) for job in after[:_SETTLED]]
    slow, back = _straggler(_begun(sizes))
    return LossResult(
        round(min(alike), 3),
        round(min(at_once), 3),
        round(sum(at_once) / len(losses), 3),
        round(min(settled), 3),
        len(losses),
        sum(ratio < 0.95 for ratio in at_once),
        sum(ratio < 0.95 for ratio in settled),
        round(slow, 3),
        back,
    )


def _begun(sizes: Sequence[float]) -> _Job:
    """A job that has found its plan for microbatches of these sizes."""
    forward = tuple(round(1e6 * z) for z in sizes)
    costs = StepCosts((forward,) * _STAGES, (tuple(2 * f for f in forward),) * _STAGES)
    layout = Layout(even_cuts(_STAGES, _STAGES), len(sizes))
    job = _Job(first_plan(layout, range(_WORKERS), 1), costs)
    job.steps()
    return job


def _kept(before: _Job, after: _Job) -> float:
    """Throughput after a loss over what it should be."""
    fault_free = predict(before.plan, before.real).step_ticks
    left = after.plan.workers
    possible = fault_free / least_step_ticks(before.real, left)
    wanted = min(len(left) / len(before.plan.workers), possible)
    return fault_free / predict(after.plan, before.real).step_ticks / wanted


def _straggler(job: _Job) -> tuple[float, bool]:
    """One worker slowed threefold: the step over the best, and whether the load returns."""
    slow = Cluster(slowness={5: 3.0})
    usual = predict(job.plan, job.real).step_ticks
    best = max(least_step_ticks(job.real, job.plan.workers, slow), usual)
    during = job.steps(slow)
    return during / best, job.steps() <= 1.05 * usual
