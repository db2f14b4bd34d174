"""Recorded steps: what a cost model learns from some predicts the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dtrain.data.block import Block
from dtrain.recorded import ActionTimes, Compared, RecordedRun, medians, rank_correlation
from dtrain.runtime.recorder import ActionRecorder, step_record
from dtrain.scheduler import Action
from dtrain.scheduler.costmodel import CostModel
from dtrain.scheduler.costs import TICKS_PER_S, Cluster


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
        times = [(a.predicted_s, a.measured_s) for a in found.actions]
        assert rank_correlation(*zip(*times, strict=True)) > 0.95
        assert {(a.action.kind, a.action.stage, a.action.microbatch) for a in found.actions} == {
            (kind, stage, m) for kind in "FB" for stage in range(2) for m in range(6)
        }
        spans = {span.action: span for spans in run.spans(step).values() for span in spans}
        for a in found.actions:
            took = spans[a.action].end - spans[a.action].start
            assert a.measured_s == pytest.approx(took / TICKS_PER_S)


def test_links_are_learnt_from_what_waited_for_them(recorded_run: Callable[..., str]) -> None:
    links = Cluster(bandwidth_bytes_s=2e8, latency_s=7e-4)
    run = RecordedRun(recorded_run(steps=18, links=links))
    model = CostModel()
    assert model.link == (None, 0.0)
    run.teach(model, run.steps[:12])
    assert model.link == pytest.approx((2e8, 7e-4), rel=0.02)
    assert model.overhead_s == pytest.approx(0.002, abs=5e-4)
    for step in run.steps[12:]:
        assert run.compare(step, model).error < 0.03


def test_transfers_that_take_no_time_have_no_links(recorded_run: Callable[..., str]) -> None:
    model = CostModel()
    run = RecordedRun(recorded_run())
    run.teach(model, run.steps)
    bandwidth, latency_s = model.link
    assert bandwidth is None
    assert latency_s == pytest.approx(0.0, abs=1e-6)


def test_an_action_takes_its_median_over_runs_that_all_have_it() -> None:
    def step(number: int, *times: tuple[str, float, float, float]) -> Compared:
        return Compared(
            number, 1.0, 1.0, [ActionTimes(Action("F", 0, int(m)), *t) for m, *t in times]
        )

    runs = [
        [step(2, ("0", 1.0, 5.0, 2.0), ("1", 4.0, 4.0, 4.0)), step(3, ("0", 7.0, 7.0, 7.0))],
        [step(2, ("1", 5.0, 9.0, 5.0), ("0", 2.0, 4.0, 1.0))],
        [step(2, ("0", 3.0, 30.0, 3.0), ("1", 6.0, 5.0, 6.0)), step(3, ("0", 8.0, 8.0, 8.0))],
    ]
    assert medians(runs) == [
        ActionTimes(Action("F", 0, 0), 2.0, 5.0, 2.0),
        ActionTimes(Action("F", 0, 1), 5.0, 5.0, 5.0),
    ]


def test_what_steps_take_besides_is_that_of_the_newest_assignment(
    recorded_run: Callable[..., str],
) -> None:
    run = RecordedRun(recorded_run(steps=18))
    files = [run.folder.path / f"actions-{w}.jsonl" for w in range(2)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for zero, one in zip(*lines, strict=True):
        for record in (zero, one):
            # Before step 8 each did the other's work, and all took half a second more.
            record["end_s"] += 0.5 if record["step"] < 8 else 0.0
    for file, own, other in zip(files, lines, reversed(lines), strict=True):
        told = [b if a["step"] < 8 else a for a, b in zip(own, other, strict=True)]
        file.write_text("".join(json.dumps(record) + "\n" for record in told))
    run = RecordedRun(str(run.folder.path))
    for count, overhead_s in [(12, 0.002), (11, 0.002), (10, 0.5)]:
        model = CostModel()
        run.teach(model, run.steps[:count])
        assert model.overhead_s == pytest.approx(overhead_s, abs=0.005), count


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
    recorder.action(Action("F", 0, 0), (0.0, 1.0), 0.0, blocks, [])
    # A fault: the step is begun again under the next generation.
    recorder.begin(3, 2)
    recorder.action(Action("F", 0, 1), (0.0, 1.0), 0.0, blocks, [])
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
    recorder.action(Action("F", 0, 0), (0.0, 1.0), 0.0, {}, [(0, 1.0)])
    assert recorder.phase("sum", 1.0) > 1.0
    recorder.commit()
