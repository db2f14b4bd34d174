"""Moving load as workers' speeds change: each few steps, with hysteresis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts
from dtrain.scheduler.fit import median
from dtrain.scheduler.plan import Plan
from dtrain.scheduler.predict import predict
from dtrain.scheduler.search import choose_balance

_GRAIN = 0.05
_SLACK = 0.05


@dataclass(frozen=True)
class BalancePolicy:
    """When load is moved.

    ``every``: steps between two looks. ``gain``: share of the step time that a move must save.
    ``looks``: how many looks in a row must find so. ``deadband``: a slowness within so much of 1
    counts as 1. ``most``: slowness that counts at most. ``may_hold``: load may go to workers that
    do not hold the stage yet, which takes a transfer of its state and hence a new generation.
    """

    every: int = 2
    gain: float = 0.08
    looks: int = 2
    deadband: float = 0.15
    most: float = 20.0
    may_hold: bool = False


@dataclass(frozen=True)
class Move:
    """A better plan for the same members. ``cluster``: with the slowness that it was made for."""

    plan: Plan
    cluster: Cluster
    reason: str


@dataclass
class Balancer:
    """Watches how long workers take against what is predicted, and moves load when it pays.

    Every member must tell it the same: the ratios come out of the step's vote, which all see.
    """

    policy: BalancePolicy = BalancePolicy()
    _ratios: dict[int, list[float]] = field(default_factory=dict)
    _seen: int = 0
    _streak: int = 0

    def observe(
        self,
        plan: Plan,
        ratios: Mapping[int, float],
        costs: StepCosts,
        cluster: Cluster = UNIFORM,
    ) -> Move | None:
        """Take in a step, and say what to change after it, if anything.

        ``ratios[w]``: time that the actions of ``w`` took in the step over their predicted time on
        a worker of slowness 1. ``costs``: of a step to come, or of this one. A worker that executed
        nothing tells nothing, and is taken for as slow as it was when it last did.
        """
        for w, ratio in ratios.items():
            self._ratios.setdefault(w, []).append(ratio)
        self._seen += 1
        if self._seen % self.policy.every:
            return None
        slowness = self._slowness(plan, cluster)
        for ratios_of in self._ratios.values():
            ratios_of.clear()
        wanted = replace(cluster, slowness=slowness)
        # What the present plan takes at the present speeds, against work shared out evenly.
        now = predict(plan, costs, wanted).step_ticks
        even = sum(map(sum, costs.work())) / sum(1.0 / wanted.slow(w) for w in plan.workers)
        # Who has recovered gets its load back even where the step gains nothing by it: what was
        # moved away may matter at the next step's sizes.
        recovered = any(f > 1.0 and w not in slowness for w, f in cluster.slowness.items())
        most = (1.0 + _SLACK if recovered else 1.0 - self.policy.gain) * now
        if even > most:
            self._streak = 0
            return None
        choice = choose_balance(plan, costs, wanted, may_hold=self.policy.may_hold)
        better, then = choice.plan, choice.prediction.step_ticks
        if then > most or better.executors == plan.executors:
            self._streak = 0
            return None
        self._streak += 1
        if self._streak < self.policy.looks:
            return None
        self._streak = 0
        told = ", ".join(f"{w}: {f:.2f}" for w, f in sorted(slowness.items())) or "all alike"
        reason = f"slowness {told}; predicted step {now / 1e6:.2f} -> {then / 1e6:.2f} ms"
        return Move(replace(better, reason=reason), wanted, reason)

    def _slowness(self, plan: Plan, cluster: Cluster) -> dict[int, float]:
        """Slowness of the workers that differ from the ordinary, in steps of 5 %."""
        found = {w: median(ratios) for w, ratios in self._ratios.items() if ratios}
        # The model may be off for all alike, or the whole cluster slow: only differences count.
        usual = median(list(found.values())) if found else 1.0
        out: dict[int, float] = {}
        for w in plan.workers:
            value = found[w] / usual if w in found else cluster.slow(w)
            value = min(value, self.policy.most)
            if abs(value - 1.0) > self.policy.deadband:
                out[w] = max(_GRAIN, round(value / _GRAIN) * _GRAIN)
        return out
