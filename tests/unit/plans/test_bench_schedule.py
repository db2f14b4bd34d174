"""``dtrain bench schedule`` on a small graph: its keys, and what its numbers must keep to."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dtrain.bench import losses, schedule
from dtrain.errors import DtrainError


def test_cases_beat_1f1b_and_come_near_the_bound(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "_SCALE", ((16, 16), (32, 32)))
    monkeypatch.setattr(losses, "_SAMPLED", 2)
    monkeypatch.setattr(losses, "_MICROBATCHES", 32)
    monkeypatch.setattr(losses, "_SETTLED", 3)
    url = yaml.safe_load(config_file.read_text())["data"]["store"]
    said: list[str] = []
    found = schedule.bench_schedule(
        tmp_path, stores=[url], nodes=0, real=False, steps=5, workers=2, say=said.append
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
            tmp_path, stores=[], nodes=0, real=False, steps=5, workers=2, say=print
        )
