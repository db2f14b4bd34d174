"""Risk from history: what counts, how it is forgotten, and who has to wait."""

from __future__ import annotations

import json

import pytest

from dtrain.scheduler.risk import RiskLedger, RiskPolicy

HOUR = 3600.0


def test_faults_raise_the_risk_and_are_forgotten() -> None:
    ledger = RiskLedger()
    for worker in (0, 1):
        ledger.joined(0.0, worker)
    before = ledger.rate_per_s(HOUR, 0)
    ledger.record(HOUR, 0, "crash")
    after = ledger.rate_per_s(HOUR, 0)
    assert after > 5 * before
    assert ledger.safest_first(HOUR, [0, 1]) == [1, 0]
    later = [ledger.rate_per_s(HOUR * (1 + h), 0) for h in (0, 12, 24, 240)]
    assert later == sorted(later, reverse=True)
    assert later[-1] == pytest.approx(ledger.rate_per_s(241 * HOUR, 1), rel=0.01)


def test_kinds_count_for_more_or_less() -> None:
    ledger = RiskLedger()
    for worker, fault in enumerate(("retry", "crash", "numeric")):
        ledger.record(0.0, worker, fault)  # type: ignore[arg-type]
    assert ledger.safest_first(0.0, [2, 1, 0]) == [0, 1, 2]


def test_the_rate_tends_to_the_true_one() -> None:
    ledger = RiskLedger(RiskPolicy(half_life_s=100 * HOUR))
    ledger.joined(0.0, 3)
    for hour in range(2, 1000, 2):
        ledger.record(hour * HOUR, 3, "crash")
    assert 1 / ledger.rate_per_s(1000 * HOUR, 3) == pytest.approx(2 * HOUR, rel=0.3)
    assert ledger.chance_of_fault(1000 * HOUR, 3, 20 * HOUR) > 0.99
    assert ledger.wasted_share(1000 * HOUR, [3], 72.0)[3] == pytest.approx(0.01, rel=0.3)


def test_who_fails_again_and_again_waits_longer_and_longer() -> None:
    policy = RiskPolicy(first_s=1.0, longest_s=60.0, healthy_s=600.0)
    ledger = RiskLedger(policy)
    now, waits = 0.0, []
    for _ in range(10):
        ledger.record(now, 7, "crash")
        wait_s = max(0.0, ledger.admission(7).at_s - now)
        waits.append(wait_s)
        now += wait_s + 5.0
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert "10 times in a row" in ledger.admission(7).reason
    ledger.record(now + policy.healthy_s + 60.0, 7, "crash")
    assert ledger.admission(7).at_s == float("-inf")


def test_faults_may_be_told_of_in_any_order() -> None:
    """As by a run that went back to an older step."""
    ledger = RiskLedger()
    for time_s in (100.0, 90.0):
        ledger.record(time_s, 1, "crash")
    assert ledger.safest_first(80.0, [1, 2]) == [2, 1]


def test_retries_make_nobody_wait() -> None:
    ledger = RiskLedger()
    for _ in range(5):
        ledger.record(1.0, 0, "retry")
    assert ledger.admission(0).at_s == float("-inf")


def test_the_ledger_survives_a_checkpoint() -> None:
    ledger = RiskLedger()
    ledger.record(5.0, 2, "hang")
    again = RiskLedger.from_json(json.loads(json.dumps(ledger.as_json())))
    assert again.rate_per_s(50.0, 2) == ledger.rate_per_s(50.0, 2)
