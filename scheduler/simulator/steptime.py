"""How long a plan's step takes, by executing its orders on paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain.scheduler.costs import TICKS_PER_S, StepCosts
from dtrain.scheduler.plan import Layout, Plan

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
        """Seconds of one step of a plan that was made with :meth:`costs`."""
        return self.fixed_s + makespan(plan, self.forward_s, self.backward_s, slow)

    def busy_s(self, layout: Layout) -> float:
        """Seconds of compute in one step, over all workers."""
        return layout.num_stages * layout.microbatches * (self.forward_s + self.backward_s)


def makespan(
    plan: Plan, forward_s: float, backward_s: float, slow: Mapping[int, float] | None = None
) -> float:
    """Seconds until all workers are through their actions, each in its order.

    An action begins when its worker is free and its input is there: a forward's from the stage
    before, a backward's from the stage after, the last stage's from its own forward.

    Raises:
        ValueError: the orders wait for each other for ever.
    """
    slow = slow or {}
    last, count = plan.num_stages - 1, plan.layout.microbatches
    # Ends of forwards, then of backwards, by stage and microbatch; -1: not yet known.
    ends = [[-1.0] * count for _ in range(2 * last + 2)]
    waiting: dict[tuple[int, int], int] = {}
    at: dict[int, int] = {}
    free_s: dict[int, float] = {}
    ready = list(plan.workers)
    while ready:
        w = ready.pop()
        order, i, now = plan.actions[w], at.get(w, 0), free_s.get(w, 0.0)
        factor = slow.get(w, 1.0)
        forward, backward = forward_s * factor, backward_s * factor
        for kind, s, m in order[i:]:
            # Rows in the order of a microbatch's chain: forwards up, then backwards down.
            row = s if kind == "F" else 2 * last + 1 - s
            if row:
                end = ends[row - 1][m]
                if end < 0:
                    waiting[row - 1, m] = w
                    break
                if end > now:
                    now = end
            now += forward if kind == "F" else backward
            ends[row][m] = now
            i += 1
            heir = waiting.pop((row, m), None)
            if heir is not None:
                ready.append(heir)
        at[w], free_s[w] = i, now
    if any(at[w] < len(plan.actions[w]) for w in plan.workers):
        raise ValueError("the plan's orders wait for each other for ever")
    return max(free_s.values())
