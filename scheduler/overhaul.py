"""Going over to the best plan found once costs are measured, further holders included.

A run begins with a plan that knows nothing of costs, and moving load changes only who executes what
among the holders of a stage. The search over assignments may find that the step is much shorter if
workers become holders of further stages. Then all members regroup at the same step boundary, as for
a newcomer: nobody loses work, and what they hold moves to whoever is to hold it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dtrain.scheduler.balance import Move, StepTimes, fitted
from dtrain.scheduler.bounds import least_step_ticks
from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts
from dtrain.scheduler.domains import domain_labels
from dtrain.scheduler.plan import Plan
from dtrain.scheduler.predict import predict
from dtrain.scheduler.relayout import exchangeable, relabelled, takers
from dtrain.scheduler.search import choose_plan


@dataclass(frozen=True)
class OverhaulPolicy:
    """When a run goes over to another plan with other holders.

    ``gain``: share of the step time that it must save. ``worth_s``: seconds that the steps that are
    left must save in all; to regroup takes a tenth of a second or so. ``most_rest``: how many looks
    to leave out at most, twice as many after each in vain. ``regret``: by what share steps may take
    longer than before until it goes back. ``recompute``: as in :class:`BalancePolicy`.
    """

    gain: float = 0.1
    worth_s: float = 1.0
    most_rest: int = 8
    regret: float = 0.1
    recompute: bool = True


@dataclass(frozen=True)
class Trial:
    """The plan that a run went over from, and the seconds that a step took under it."""

    plan: Plan
    seconds: float


@dataclass
class Overhaul:
    """Looks now and then for a plan that is worth to regroup for.

    A pure function of what it is told: members that are told the same say the same.
    """

    policy: OverhaulPolicy = OverhaulPolicy()
    _rest: int = 0
    _resting: int = 0

    def look(
        self,
        plan: Plan,
        window: Sequence[StepTimes],
        seconds: float,
        steps_left: int,
        cluster: Cluster = UNIFORM,
        besides: Callable[[], StepCosts | None] = lambda: None,
    ) -> Move | None:
        """A plan of the same members with further holders, if one is worth it.

        ``window``: what the actions of the last steps of ``plan`` took. ``seconds``: that a step
        takes, whose share the prediction says is saved. ``cluster``: with the slowness that
        ``plan`` was made for, and the members' memory. ``besides()``: costs whose bytes, and sums'
        times, count besides those actions; asked for only where it matters.
        """
        if self._resting:
            self._resting -= 1
            return None
        found = self._better(plan, window, steps_left * seconds, cluster, besides)
        if found is None:
            self._rest = self._resting = min(2 * self._rest + 1, self.policy.most_rest)
        return found

    def judge(
        self,
        plan: Plan,
        window: Sequence[StepTimes],
        trial: Trial,
        seconds: float,
        cluster: Cluster = UNIFORM,
    ) -> Move | None:
        """Back to the plan before, where ``seconds``, which steps of ``plan`` take, are more.

        The prediction may leave out what the machine does not.
        """
        if seconds <= (1.0 + self.policy.regret) * trial.seconds:
            return None
        costs, _ = fitted(plan, window)
        reason = (
            f"steps take {1e3 * seconds:.2f} ms, and took {1e3 * trial.seconds:.2f} ms under the "
            "plan before: back to it"
        )
        former = replace(trial.plan, generation=plan.generation + 1, reason=reason)
        return Move(former, costs, cluster.slowness, 1.0 - trial.seconds / seconds, reason)

    def _better(
        self,
        plan: Plan,
        window: Sequence[StepTimes],
        left_s: float,
        cluster: Cluster,
        besides: Callable[[], StepCosts | None],
    ) -> Move | None:
        measured, _ = fitted(plan, window)
        now = predict(plan, measured, cluster).step_ticks
        if not self._worth(now, least_step_ticks(measured, plan.workers, cluster), left_s):
            return None
        sized = besides()
        costs = measured
        if sized is not None:
            costs = replace(sized, forward=measured.forward, backward=measured.backward)
            measured = measured.with_bytes_of(sized)
            now = predict(plan, costs, cluster).step_ticks
        choice = choose_plan(plan.layout, plan.workers, plan.generation + 1, costs, cluster)
        then = choice.prediction.step_ticks
        if choice.prediction.over or (any(choice.recompute) and not self.policy.recompute):
            return None
        if not self._worth(now, then, left_s):
            return None
        reason = (
            f"{choice.name}: predicted step {now / 1e6:.2f} -> {then / 1e6:.2f} ms, "
            f"with further holders; steps for {left_s:.1f} s are left"
        )
        spread = domain_labels(cluster, plan.workers) if plan.layout.redundancy > 1 else {}
        labels = exchangeable(cluster, plan.workers, spread)
        places = takers(choice.plan, plan, plan.workers, labels)
        better = relabelled(choice.plan, places, plan.generation + 1, reason)
        if all(set(new) <= set(old) for new, old in zip(better.holders, plan.holders, strict=True)):
            # Load moves among holders without regrouping.
            return None
        if any(plan.share_of(w) and not better.share_of(w) for w in cluster.slowness):
            # Nobody would learn when it is fast again.
            return None
        return Move(better, measured, cluster.slowness, 1.0 - then / now, reason)

    def _worth(self, now: int, then: int, left_s: float) -> bool:
        share = 1.0 - then / now
        return share >= self.policy.gain and share * left_s >= self.policy.worth_s
