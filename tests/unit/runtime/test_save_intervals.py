"""When saves are due, by measured costs and faults."""

from __future__ import annotations

from dtrain.config import Config
from dtrain.runtime.intervals import Intervals, SaveInterval


def test_dear_saves_are_rare_and_faults_make_them_frequent() -> None:
    steps = []
    for cost_s, faults in ((0.01, 0), (1.0, 0), (1.0, 50)):
        interval = SaveInterval.of(3600.0, 0.5)
        assert not interval.due(10**9), "nothing is known of steps yet"
        interval.stepped(0.1)
        interval.cost(cost_s)
        for _ in range(faults):
            interval.fault()
        found = interval.interval()
        assert found is not None
        assert interval.due(found.steps)
        assert not interval.due(found.steps - 1)
        steps.append(found.steps)
    assert steps[0] < steps[1]
    assert steps[2] < steps[1] / 2
    # Daly: about sqrt(2 * 1 s * 3600 s) = 85 s.
    assert 750 < steps[1] < 900


def test_only_what_is_left_open_is_estimated_and_the_newest_save_counts() -> None:
    raw = {"data": {"store": "x"}, "train": {"epochs": 1}}
    assert Intervals.of(Config.model_validate(raw)).checkpoint is None
    raw |= {"checkpoint": {"every_steps": "auto"}, "robust": {"snapshot_every": "auto"}}
    intervals = Intervals.of(Config.model_validate(raw))
    assert intervals.checkpoint is not None
    assert intervals.snapshot is not None
    intervals.stepped(0.1)
    intervals.checkpoint.last = intervals.snapshot.last = 40
    intervals.recovered(39, 1, resumed=False)
    assert (intervals.checkpoint.last, intervals.snapshot.last) == (39, 39)
    assert intervals.snapshot.policy.rate.failures == 1
    assert intervals.checkpoint.policy.rate.failures == 0
    intervals.recovered(20, 2, resumed=True)
    assert intervals.checkpoint.last == 20
    assert intervals.checkpoint.policy.rate.failures == 1
