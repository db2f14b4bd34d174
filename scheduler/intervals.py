"""How often to save: Young's and Daly's intervals from measured cost and failure rate.

A tier of recovery (snapshots in peer memory, durable checkpoints) is paid for with the time that
its saves take from training, and repays in work that need not be done again. What counts for a
tier are the failures that it is needed for: with several holders a lost worker needs no snapshot,
and with snapshots it takes the loss of all copies of a stage to need a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dtrain.scheduler.fit import median


def young_s(cost_s: float, mtbf_s: float) -> float:
    """The time between two saves after Young (CACM 17(9), 1974): ``sqrt(2 C M)``, in seconds.

    ``cost_s``: what a save takes from training. ``mtbf_s``: mean time between failures.
    """
    _check(cost_s, mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The time between two saves after Daly (FGCS 22(3), 2006, eq. 37), in seconds.

    Arguments are as in :func:`young_s`. It is better than Young's where a save is not much shorter
    than the time between failures, and ``M`` where ``C >= 2 M``.
    """
    _check(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _check(cost_s: float, mtbf_s: float) -> None:
    if cost_s < 0 or mtbf_s <= 0:
        raise ValueError(
            f"interval: expected a cost >= 0 and a time between failures > 0, got {cost_s} s and "
            f"{mtbf_s} s"
        )


@dataclass
class FailureRate:
    """An estimate of failures per second, from what was expected and what was seen.

    Failures come as a Poisson process whose rate may drift: seen failures and the time over which
    they were seen are forgotten alike, by half in ``half_life_s``. The prior is worth ``prior_s``
    seconds of observation at ``prior_mtbf_s`` between failures and is not forgotten, so that the
    estimate is finite without a single failure (the mean of a Gamma posterior).
    """

    prior_mtbf_s: float
    prior_s: float = 6 * 3600.0
    half_life_s: float = 24 * 3600.0
    failures: float = 0.0
    watched_s: float = 0.0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prior_mtbf_s <= 0 or self.prior_s <= 0 or self.half_life_s <= 0:
            raise ValueError("failure rate: expected prior and half-life above 0")

    def watch(self, now_s: float) -> None:
        """Time has passed without a failure, up to ``now_s`` on a clock that begins at 0.

        Raises:
            ValueError: it runs backwards.
        """
        passed = now_s - self.now_s
        if passed < 0:
            raise ValueError(f"now: expected at least {self.now_s} s, got {now_s} s")
        keep = math.exp2(-passed / self.half_life_s)
        self.failures *= keep
        # The time passed is itself forgotten as it passes.
        mean_life_s = self.half_life_s / math.log(2)
        self.watched_s = self.watched_s * keep + mean_life_s * (1 - keep)
        self.now_s = now_s

    def failed(self, now_s: float, count: float = 1.0) -> None:
        """``count`` failures happened at ``now_s``."""
        self.watch(now_s)
        self.failures += count

    def at(self, now_s: float) -> FailureRate:
        """What the estimate will be if nothing fails until ``now_s``."""
        later = replace(self)
        later.watch(now_s)
        return later

    def per_s(self) -> float:
        """Failures per second."""
        prior = self.prior_s / self.prior_mtbf_s
        return (prior + self.failures) / (self.prior_s + self.watched_s)

    def mtbf_s(self) -> float:
        """Mean time between failures, in seconds."""
        return 1.0 / self.per_s()


@dataclass
class SaveCost:
    """What a save takes from training, in seconds: the median of the last ``kept`` saves.

    The median, because a save now and then meets a busy store.
    """

    first_guess_s: float
    kept: int = 9
    seen: list[float] = field(default_factory=list)

    def measured(self, cost_s: float) -> None:
        """A save took ``cost_s`` from training."""
        if cost_s < 0:
            raise ValueError(f"cost: expected at least 0 s, got {cost_s} s")
        self.seen = [*self.seen, cost_s][-self.kept :]

    def estimate_s(self) -> float:
        """What the next one will take."""
        if not self.seen:
            return self.first_guess_s
        return median(self.seen)


@dataclass(frozen=True)
class Interval:
    """Save every ``steps`` steps, because of ``reason``."""

    steps: int
    reason: str


@dataclass
class IntervalPolicy:
    """When to save next, estimated anew as the run goes.

    The interval stays as it is until the best one differs from it by more than ``slack``, so that
    noise in the measurements does not move it. It is ``longest_s`` at most, since a failure may
    come that no estimate has foreseen.
    """

    rate: FailureRate
    cost: SaveCost
    longest_s: float = 3600.0
    slack: float = 0.2
    steps: int = 0

    def interval(self, step_s: float) -> Interval:
        """The interval for steps of ``step_s`` seconds.

        All workers must take the same one, so one of them decides and the others are told.
        """
        if step_s <= 0:
            raise ValueError(f"step: expected more than 0 s, got {step_s} s")
        cost_s, mtbf_s = self.cost.estimate_s(), self.rate.mtbf_s()
        best_s = daly_s(cost_s, mtbf_s)
        most = max(1, int(self.longest_s / step_s))
        best = min(max(1, round(best_s / step_s)), most)
        off = abs(best - self.steps) > self.slack * self.steps
        if not self.steps or off or self.steps > most:
            self.steps = best
        limit = f", at most {self.longest_s:g} s" if best_s > self.longest_s else ""
        reason = (
            f"every {self.steps} steps of {step_s:.3g} s: a save costs {cost_s:.3g} s, and a "
            f"failure that needs it comes every {mtbf_s:.3g} s (Daly: {best_s:.3g} s{limit})"
        )
        return Interval(self.steps, reason)
