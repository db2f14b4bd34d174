"""``dtrain bench schedule`` on a small graph: its keys, and what its numbers must keep to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from dtrain.bench import losses, prediction, schedule
from dtrain.errors import DtrainError
from dtrain.recorded import ActionTimes, Compared
from dtrain.scheduler import Action


def test_cases_beat_1f1b_and_come_near_the_bound(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_SCALE", ((16, 16), (32, 32)))
    monkeypatch.setattr(prediction, "_SEEDS", 64)
    monkeypatch.setattr(losses, "_SAMPLED", 2)
    monkeypatch.setattr(losses, "_MICROBATCHES", 32)
    monkeypatch.setattr(losses, "_SETTLED", 3)
    url = yaml.safe_load(config_file.read_text())["data"]["store"]
    said: list[str] = []
    found = schedule.bench_schedule(
        tmp_path,
        stores=[url],
        nodes=0,
        real=False,
        steps=5,
        workers=2,
        repeats=1,
        say=said.append,
    )
    assert found.step_time_error_median is None
    assert len(found.cases) == 8
    assert found.vs_1f1b_geomean <= 0.85
    assert found.vs_1f1b_max <= 1.0
    assert found.vs_lower_bound_geomean <= 1.1
    assert found.losses.losses == 18
    assert found.losses.even_worst >= 0.95
    assert found.losses.below == found.losses.settled_below == 0
    assert found.losses.straggler <= 1.2
    assert found.losses.straggler_moved_back
    assert [row.workers for row in found.scale] == [16, 32]
    assert all(row.replan_ms > 0 and row.measured_ms > 0 for row in found.scale)
    assert any("lower bound" in line for line in schedule.summary(found))
    assert said


def test_a_graph_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DtrainError, match="expected at least one graph"):
        schedule.bench_schedule(
            tmp_path, stores=[], nodes=0, real=False, steps=5, workers=2, repeats=1, say=print
        )


def test_noise_of_single_runs_does_not_hide_what_is_predicted() -> None:
    draw = random.Random(0)

    def step(number: int) -> Compared:
        times = [1.0 + 0.1 * m for m in range(24)]
        return Compared(
            number,
            1.0,
            1.1,
            [
                ActionTimes(Action("F", 0, m), t, t * draw.choice([1.0, 1.0, 1.0, 1.0, 3.0]), t)
                for m, t in enumerate(times)
            ],
        )

    job = prediction.Job("a graph", "a store", {"name": "neighbor"}, 4, 2)
    found = prediction.summarized(job, [[step(n) for n in range(4)] for _ in range(9)])
    assert (found.steps, found.actions) == (4, 96)
    assert found.errors == pytest.approx([0.1 / 1.1] * 9)
    assert found.error == pytest.approx(0.1 / 1.1)
    assert len(found.single) == 9
    assert max(found.single) < 0.9 < 0.93 < found.correlation
    assert found.single_cpu == pytest.approx([1.0] * 9)
    assert found.correlation_cpu == pytest.approx(1.0)
    assert found.step_ms == pytest.approx(1100.0)
