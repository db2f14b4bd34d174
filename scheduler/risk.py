"""How likely each worker is to fail, from its history, and how long to keep it away.

All times are seconds on a clock that all users of one ledger share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dtrain.scheduler.intervals import FailureRate

Fault = Literal["crash", "hang", "numeric", "retry"]

WEIGHTS: Mapping[Fault, float] = {"crash": 1.0, "hang": 1.0, "numeric": 2.0, "retry": 0.1}
"""What each kind counts for. A wrong number is worse than a crash, for it may go unseen; a retry
(of a transfer, of a save) costs little and is a warning."""


@dataclass(frozen=True)
class RiskPolicy:
    """How history is judged.

    ``half_life_s``: after it a fault counts half. ``prior_mtbf_s``: expected time between a
    worker's faults before it has any history, and ``prior_s`` the time of watching that this
    expectation is worth. ``first_s`` and ``longest_s``: the first and the longest back-off of a
    worker that fails again and again. ``healthy_s``: after so long without a fault its back-off
    begins anew.
    """

    half_life_s: float = 12 * 3600.0
    prior_mtbf_s: float = 60 * 24 * 3600.0
    prior_s: float = 24 * 3600.0
    first_s: float = 1.0
    longest_s: float = 1800.0
    healthy_s: float = 1800.0

    def __post_init__(self) -> None:
        times = (self.half_life_s, self.prior_mtbf_s, self.prior_s, self.first_s, self.healthy_s)
        if min(times) <= 0 or self.longest_s < self.first_s:
            raise ValueError("risk policy: expected times above 0, and longest_s >= first_s")


@dataclass
class _History:
    rate: FailureRate
    failures: int = 0
    failed_s: float = -math.inf
    wait_until_s: float = -math.inf


def _rate(
    policy: RiskPolicy, now_s: float, failures: float = 0.0, watched_s: float = 0.0
) -> FailureRate:
    return FailureRate(
        policy.prior_mtbf_s, policy.prior_s, policy.half_life_s, failures, watched_s, now_s
    )


@dataclass(frozen=True)
class Admission:
    """From when on a worker may take part again, and why."""

    at_s: float
    reason: str


@dataclass
class RiskLedger:
    """The faults of every worker, forgotten by and by."""

    policy: RiskPolicy = field(default_factory=RiskPolicy)
    _workers: dict[int, _History] = field(default_factory=dict)

    def joined(self, now_s: float, worker: int) -> None:
        """The worker takes part from now on; a worker that is known already stays as it is."""
        if worker not in self._workers:
            self._workers[worker] = _History(_rate(self.policy, now_s))

    def record(self, now_s: float, worker: int, fault: Fault) -> None:
        """A fault of a worker. Crashes and hangs count towards its back-off."""
        self.joined(now_s, worker)
        history, policy = self._workers[worker], self.policy
        # A run that went back to an older step tells of times before the newest fault.
        history.rate.failed(max(now_s, history.rate.now_s), WEIGHTS[fault])
        if fault == "retry":
            return
        # Healthy is who has not failed since it was let in again.
        let_in_s = max(history.failed_s, history.wait_until_s)
        again = now_s - let_in_s < policy.healthy_s
        history.failures = history.failures + 1 if again else 1
        history.failed_s = now_s
        history.wait_until_s = now_s + self._backoff_s(history.failures)

    def admission(self, worker: int) -> Admission:
        """When the worker may take part again after its newest fault.

        The first failure in a while costs no wait; then the waits double.
        """
        history = self._workers.get(worker)
        if history is None or history.failures <= 1:
            return Admission(-math.inf, "it has not failed repeatedly")
        wait_s = history.wait_until_s - history.failed_s
        return Admission(
            history.wait_until_s,
            f"it failed {history.failures} times in a row, so it waits {wait_s:g} s",
        )

    def rate_per_s(self, now_s: float, worker: int) -> float:
        """Expected faults per second."""
        history = self._workers.get(worker)
        rate = history.rate if history is not None else _rate(self.policy, now_s)
        return rate.at(max(now_s, rate.now_s)).per_s()

    def chance_of_fault(self, now_s: float, worker: int, horizon_s: float) -> float:
        """The probability, from 0 to 1, that the worker has a fault in the next ``horizon_s``."""
        return -math.expm1(-self.rate_per_s(now_s, worker) * horizon_s)

    def wasted_share(self, now_s: float, workers: Iterable[int], cost_s: float) -> dict[int, float]:
        """For each worker, the share of its time that its faults waste.

        ``cost_s``: what one fault costs. This is what the planner takes as a worker's risk.
        """
        return {w: self.rate_per_s(now_s, w) * cost_s for w in workers}

    def safest_first(self, now_s: float, workers: Iterable[int]) -> list[int]:
        """Workers by rising risk, then number."""
        return sorted(workers, key=lambda w: (self.rate_per_s(now_s, w), w))

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint; :meth:`from_json` takes it back."""
        return {
            str(w): [h.rate.failures, h.rate.watched_s, h.rate.now_s]
            for w, h in sorted(self._workers.items())
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], policy: RiskPolicy | None = None) -> RiskLedger:
        """The ledger without its back-offs: whoever starts anew is let in at once."""
        policy = policy or RiskPolicy()
        workers = {
            int(w): _History(_rate(policy, float(now_s), float(failures), float(watched_s)))
            for w, (failures, watched_s, now_s) in raw.items()
        }
        return cls(policy, workers)

    def _backoff_s(self, failures: int) -> float:
        if failures <= 1:
            return 0.0
        # Beyond 60 doublings it is the longest in any case.
        doubled = self.policy.first_s * math.ldexp(1.0, min(failures - 2, 60))
        return min(self.policy.longest_s, doubled)
