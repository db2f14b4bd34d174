"""How long a plan's step takes, by executing its orders on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain.scheduler.costs import TICKS_PER_S, Cluster, StepCosts
from dtrain.scheduler.plan import Layout, Plan
from dtrain.scheduler.predict import makespan_ticks

StepTime = Callable[[Plan, Mapping[int, float]], float]
"""Seconds of one step of a plan, where ``slow[w]`` times the usual time is what ``w`` takes."""


@dataclass(frozen=True)
class EvenCosts:
    """Every forward of a microbatch on a stage takes the same time, and so every backward.

    ``fixed_s``: what a step takes besides (exact sum, vote, update). Transfers take no time.
    """

    forward_s: float
    backward_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.forward_s, self.backward_s) * TICKS_PER_S < 1 or self.fixed_s < 0:
            raise ValueError(
                "step cost: expected forward and backward of 1 ns or more and the rest of 0 or "
                f"more, got {self.forward_s}, {self.backward_s} and {self.fixed_s} s"
            )

    def costs(self, layout: Layout) -> StepCosts:
        """What the planner is told."""
        forward = (round(self.forward_s * TICKS_PER_S),) * layout.microbatches
        backward = (round(self.backward_s * TICKS_PER_S),) * layout.microbatches
        return StepCosts((forward,) * layout.num_stages, (backward,) * layout.num_stages)

    def __call__(self, plan: Plan, slow: Mapping[int, float]) -> float:
        """Seconds of one step, every worker following its order in the plan."""
        cluster = Cluster(slowness=slow)
        return self.fixed_s + makespan_ticks(plan, self.costs(plan.layout), cluster) / TICKS_PER_S

    def busy_s(self, layout: Layout) -> float:
        """Seconds of compute in one step, over all workers."""
        return layout.num_stages * layout.microbatches * (self.forward_s + self.backward_s)
