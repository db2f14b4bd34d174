"""What a simulation found, and how capacity is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtrain.scheduler.costs import StepCosts
from dtrain.scheduler.plan import Layout, Plan
from dtrain.scheduler.planner import make_plan, replan
from dtrain.scheduler.relayout import relabelled
from dtrain.scheduler.simulator.progress import Passed
from dtrain.scheduler.simulator.steptime import StepTime


class Ideal:
    """What a plan made afresh for so many workers would do without any fault."""

    def __init__(self, layout: Layout, step_time: StepTime, costs: StepCosts | None = None) -> None:
        self._layout, self._step_time, self._costs = layout, step_time, costs
        self._plans: dict[int, Plan] = {}
        self._steps_s: dict[int, float] = {}

    def plan(self, workers: int) -> Plan:
        """The plan on workers 0 to ``workers - 1``, at least 1."""
        if workers not in self._plans:
            costs = self._costs or StepCosts.even(self._layout)
            plan = make_plan(self._layout, range(workers), 1, costs)
            levelled = replan(plan, range(workers), 1, "levelled", costs)
            # Where the work cannot be divided evenly, workers of several stages may do better.
            self._plans[workers] = min(plan, levelled, key=lambda p: self._step_time(p, {}))
        return self._plans[workers]

    def step_s(self, workers: int) -> float:
        """Seconds of its step."""
        if workers not in self._steps_s:
            self._steps_s[workers] = self._step_time(self.plan(workers), {})
        return self._steps_s[workers]

    def learn(self, plan: Plan, step_s: float) -> None:
        """A plan that came about is better than the one made afresh: from now on it is ideal."""
        count = len(plan.workers)
        if step_s < self.step_s(count):
            self._steps_s[count] = step_s
            places = {w: i for i, w in enumerate(plan.workers)}
            self._plans[count] = relabelled(plan, places, 1, plan.reason)


@dataclass
class Account:
    """Capacity and where it went.

    The unit is the step: capacity is how many steps the provisioned workers would have committed
    without faults, under a plan made afresh for their number; what was not committed of it was lost
    to some cause.
    """

    capacity: float = 0.0
    committed: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)

    def idle(self, seconds: float, ideal_s: float, cause: str) -> None:
        """No step was under way for ``seconds``."""
        self.capacity += seconds / ideal_s
        self.lose(seconds / ideal_s, cause)

    def train(self, passed: Passed, ideal_s: float, paces_s: Sequence[tuple[str, float]]) -> None:
        """Steps and saves passed.

        ``paces_s``: (cause, seconds of a step), from what would be best on the workers that are
        there down to what was: each cause lost what lies between the pace before it and its own.
        """
        self.capacity += (passed.trained_s + passed.saved_s) / ideal_s
        self.committed += passed.steps
        self.lose(passed.saved_s / ideal_s, "checkpoint")
        before_s = ideal_s
        for cause, pace_s in paces_s:
            self.lose(passed.trained_s / before_s - passed.trained_s / pace_s, cause)
            before_s = pace_s

    def commit(self, steps: float) -> None:
        """Steps were committed; fewer than 0 where committed ones have to be done again."""
        self.committed += steps

    def lose(self, steps: float, cause: str) -> None:
        """``steps`` of capacity were lost."""
        if steps:
            self.lost[cause] = self.lost.get(cause, 0.0) + steps

    @property
    def goodput(self) -> float:
        """Committed steps over those that capacity could have given."""
        return self.committed / self.capacity if self.capacity else 0.0


@dataclass
class Report:
    """One simulation's result.

    ``goodput``: steps committed over those that the provisioned workers would have committed
    without faults. ``goodput_gang_restart``: the same where every loss stops all workers, which
    start again from the newest checkpoint. ``utilisation``: seconds of compute that count, over all
    provisioned workers' seconds; bubbles and uneven shares count as lost here (None where the cost
    of an action is not known).
    ``lost_by_cause``: seconds of the whole cluster; they sum to ``(1 - goodput) * duration_s``.
    ``steps_replayed``: steps that were begun or committed and had to be done again.
    ``plan_quality``: (time in s, step time of a plan made afresh over that of the plan in use).
    """

    fidelity: str
    seed: int
    workers: int
    duration_s: float
    goodput: float
    goodput_gang_restart: float | None
    utilisation: float | None
    lost_by_cause: dict[str, float]
    lost_by_cause_gang_restart: dict[str, float]
    steps_committed: int
    steps_replayed: int
    steps_replayed_gang_restart: int | None
    data_moved_bytes: int
    states_moved: int
    microbatches_moved: int
    generations: int
    tiers: dict[str, int]
    incidents: dict[str, int]
    plan_quality: list[tuple[float, float]]
    plan_quality_mean: float
    plan_quality_min: float
    checkpoint_interval_s: float | None
    gang_checkpoint_interval_s: float | None
    workers_min: int
    workers_max: int
    invariant_violations: int
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded to what they mean."""
        raw = asdict(self)
        for name, value in raw.items():
            if isinstance(value, float):
                raw[name] = round(value, 6)
        for name in ("lost_by_cause", "lost_by_cause_gang_restart"):
            raw[name] = {k: round(v, 3) for k, v in sorted(raw[name].items())}
        raw["plan_quality"] = [[round(t, 3), round(q, 4)] for t, q in self.plan_quality]
        return raw


def moved_microbatches(old: Plan, new: Plan) -> int:
    """Microbatches of all stages that another worker executes now."""
    return sum(
        a != b
        for before, after in zip(old.executors, new.executors, strict=True)
        for a, b in zip(before, after, strict=True)
    )
