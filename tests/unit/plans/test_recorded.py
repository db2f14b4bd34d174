"""Recorded steps: what a cost model learns from some predicts the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dtrain.data.block import Block
from dtrain.recorded import RecordedRun, rank_correlation
from dtrain.runtime.recorder import ActionRecorder, step_record
from dtrain.scheduler import Action
from dtrain.scheduler.costmodel import CostModel


def test_steps_are_predicted_from_others(recorded_run: Callable[..., str]) -> None:
    run = RecordedRun(recorded_run(steps=18))
    fit, rest = run.steps[:12], run.steps[12:]
    assert run.steps[0] == 2
    assert len(rest) == 4
    model = CostModel()
    run.teach(model, fit)
    assert model.overhead_s == pytest.approx(0.002, abs=5e-4)
    for step in rest:
        found = run.compare(step, model)
        assert found.error < 0.03
        assert found.rank_correlation > 0.95
        assert len(found.actions) == 24


def test_steps_that_not_all_members_recorded_are_left_out(
    recorded_run: Callable[..., str],
) -> None:
    folder = recorded_run(steps=6)
    run = RecordedRun(folder)
    lines = (run.folder.path / "actions-1.jsonl").read_text().splitlines(keepends=True)
    (run.folder.path / "actions-1.jsonl").write_text("".join(lines[:-1]))
    assert RecordedRun(folder).steps == run.steps[:-1]


def test_rank_correlation_shares_ranks() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 2, 2], [5, 6, 7, 8]) == pytest.approx(0.894, abs=1e-3)
    assert rank_correlation([1, 1], [5, 6]) == 0.0


def test_the_recorder_writes_committed_steps_and_forgets_discarded_ones() -> None:
    written: list[dict[str, Any]] = []
    recorder = ActionRecorder(written.append)
    blocks: dict[int, Block] = {}
    recorder.begin(3, 1)
    recorder.action(Action("F", 0, 0), 0.0, 0.0, blocks, [])
    # A fault: the step is begun again under the next generation.
    recorder.begin(3, 2)
    recorder.action(Action("F", 0, 1), 0.0, 0.0, blocks, [])
    at = recorder.phase("sum", 1.0)
    recorder.commit()
    recorder.commit()
    step = step_record(json.loads(json.dumps(written.pop())))
    assert not written
    assert (step.step, step.generation) == (3, 2)
    assert [a.microbatch for a in step.actions] == [1]
    assert step.phases == {"sum": (1.0, at)}
    assert step.end_s >= at


def test_a_recorder_that_is_switched_off_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ActionRecorder()
    monkeypatch.setattr("dtrain.runtime.recorder.StepRecord", None)
    monkeypatch.setattr("dtrain.runtime.recorder.ActionRecord", None)
    recorder.begin(3, 1)
    recorder.action(Action("F", 0, 0), 0.0, 0.0, {}, [(0, 1.0)])
    assert recorder.phase("sum", 1.0) > 1.0
    recorder.commit()
