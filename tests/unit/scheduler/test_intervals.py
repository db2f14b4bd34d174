"""Intervals between saves: the formulas, and that estimates follow what is measured."""

from __future__ import annotations

import math

import pytest

from dtrain.scheduler.intervals import FailureRate, IntervalPolicy, SaveCost, daly_s, young_s

HOUR = 3600.0


def expected_waste(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Daly's complete model of a run's time, over its useful time, for restarts that cost 0."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(1.0, 2 * HOUR), (60.0, 2 * HOUR), (300.0, HOUR)])
def test_dalys_interval_is_near_the_best_of_the_model(cost_s: float, mtbf_s: float) -> None:
    best = min(expected_waste(t, cost_s, mtbf_s) for t in range(1, int(2 * mtbf_s)))
    daly = expected_waste(daly_s(cost_s, mtbf_s), cost_s, mtbf_s)
    assert daly <= best * 1.0005
    assert daly <= expected_waste(young_s(cost_s, mtbf_s), cost_s, mtbf_s)


def test_a_save_longer_than_the_time_between_failures() -> None:
    assert daly_s(100.0, 40.0) == 40.0
    with pytest.raises(ValueError, match="a time between failures"):
        daly_s(1.0, 0.0)


def test_the_rate_follows_what_is_seen_and_forgets() -> None:
    rate = FailureRate(prior_mtbf_s=100 * HOUR)
    assert rate.mtbf_s() == pytest.approx(100 * HOUR)
    for hour in range(1, 49):
        rate.failed(hour * HOUR)
    assert rate.mtbf_s() == pytest.approx(HOUR, rel=0.3)
    rate.watch(30 * 24 * HOUR)
    assert rate.mtbf_s() > 20 * HOUR
    with pytest.raises(ValueError, match="now"):
        rate.watch(0.0)


def test_one_slow_save_does_not_move_the_cost() -> None:
    cost = SaveCost(first_guess_s=5.0)
    assert cost.estimate_s() == 5.0
    for measured in (1.0, 1.1, 40.0):
        cost.measured(measured)
    assert cost.estimate_s() == 1.1


def test_the_interval_is_estimated_anew_but_not_for_noise() -> None:
    policy = IntervalPolicy(FailureRate(2 * HOUR), SaveCost(2.0))
    first = policy.interval(1.0)
    assert first.steps == round(daly_s(2.0, 2 * HOUR))
    policy.cost.measured(2.2)
    assert policy.interval(1.0).steps == first.steps
    policy.cost.measured(20.0)
    policy.cost.measured(20.0)
    changed = policy.interval(1.0)
    assert changed.steps > 2 * first.steps
    assert "20 s" in changed.reason


def test_the_interval_has_a_limit() -> None:
    policy = IntervalPolicy(FailureRate(1e9), SaveCost(10.0), longest_s=600.0)
    assert policy.interval(2.0).steps == 300
    assert policy.interval(2.1).steps == 285
