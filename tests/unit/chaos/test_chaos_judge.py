"""The judge: what it lets pass, and each thing that it must see."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.chaos.judge import Twin, expectation_missed, promise_broken, resources_kept, twin_of
from dtrain.chaos.scenario import Expectation, Scenario
from dtrain.chaos.watch import Resources, Watch
from dtrain.runfolder import RunRecord

STEPS = [{"step": s, "loss": 1.0 / s, "seeds": 8} for s in range(1, 6)]
RECORD = RunRecord(
    status="done",
    steps=5,
    loss=0.2,
    metrics={"val": {"accuracy": 0.5}},
    weights_sha256="ab",
    seeds_trained=40,
    workers=4,
)


@pytest.fixture
def twin() -> Twin:
    return twin_of(RECORD, STEPS)


def test_the_same_run_keeps_the_promise(twin: Twin) -> None:
    other = replace(RECORD, generations=4, wall_s=9.0, workers=2, steps_replayed=1)
    assert promise_broken(twin, other, STEPS, 0) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_sha256": "ac"}, "weights_sha256: expected ab as without faults, got ac"),
        ({"seeds_trained": 41}, "seeds_trained: expected 40"),
        ({"steps": 4}, "steps: expected 5"),
        ({"metrics": {}}, "metrics: expected"),
        ({"status": "stopped"}, "run.json: expected status done, got stopped"),
    ],
)
def test_another_record_is_seen(twin: Twin, changes: dict[str, Any], message: str) -> None:
    reasons = promise_broken(twin, replace(RECORD, **changes), STEPS, 0)
    assert len(reasons) == 1
    assert message in reasons[0]


def _without_a_step(steps: list[dict[str, Any]]) -> None:
    del steps[2]


def _another_loss(steps: list[dict[str, Any]]) -> None:
    steps[3]["loss"] += 1e-16


def _seeds_missing(steps: list[dict[str, Any]]) -> None:
    steps[0]["seeds"] = 7


def _twice(steps: list[dict[str, Any]]) -> None:
    steps.append(dict(steps[1]))


def _one_too_many(steps: list[dict[str, Any]]) -> None:
    steps.append({"step": 6, "loss": 0.1, "seeds": 8})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_step, "steps 3 are missing"),
        (_another_loss, "loss of steps 4 differ"),
        (_seeds_missing, "seeds of steps 1 differ"),
        (_twice, "expected at most 0 steps committed again, got 1: 2"),
        (_one_too_many, "loss of steps 6 differ"),
    ],
)
def test_another_course_is_seen(
    twin: Twin, change: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    steps = json.loads(json.dumps(STEPS))
    change(steps)
    assert any(message in r for r in promise_broken(twin, RECORD, steps, 0))


def test_a_rollback_may_repeat_steps_but_not_change_them(twin: Twin) -> None:
    again = [*STEPS[:4], *STEPS[2:]]
    assert promise_broken(twin, RECORD, again, 2) == []
    assert promise_broken(twin, RECORD, again, 1) != []
    again[4] = {**again[4], "loss": 0.3}
    assert promise_broken(twin, RECORD, again, 2) != []


def watch_of(folder: Path, *events: dict[str, Any], steps: list[float] = ()) -> Watch:  # type: ignore[assignment]
    lines = [json.dumps({"time": 0.0, "worker": 0, "reason": "", **e}) for e in events]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    metrics = [{"time": t, "step": s, "loss": 1.0, "seeds": 8} for s, t in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(m)}\n" for m in metrics))
    watch = Watch(folder)
    watch.look()
    return watch


def test_a_newcomer_is_counted_when_it_takes_part(tmp_path: Path) -> None:
    """What it holds before is no measure of what it may hold later."""
    watch = watch_of(
        tmp_path, {"kind": "worker_started", "worker": 1, "pid": os.getpid()}, steps=[1.0] * 9
    )
    watch.look()
    assert watch.resources == {}
    with (tmp_path / "events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "generation_started", "workers": [0, 1]}) + "\n")
    watch.look()
    assert watch.resources == {}
    with (tmp_path / "metrics.jsonl").open("a") as metrics:
        for step in range(10, 13):
            metrics.write(json.dumps({"time": 2.0, "step": step, "loss": 1.0, "seeds": 8}) + "\n")
    watch.look()
    assert [seen.worker for seen in watch.resources.values()] == [1]


FAULT = {"kind": "fault_injected", "time": 10.0}


@pytest.mark.parametrize(
    ("events", "steps", "record", "expect", "message"),
    [
        ([FAULT], [9.0, 10.5], {}, {}, None),
        ([], [9.0], {}, {}, "faults: expected at least 1 to strike, got 0"),
        ([FAULT], [9.0, 25.0], {}, {}, "recovery: expected at most 10 s"),
        ([FAULT], [9.0, 25.0], {}, {"recovery_s": 20.0}, None),
        ([FAULT], [11.0], {"steps_replayed": 2}, {}, "steps_replayed: expected at most 1, got 2"),
        ([FAULT], [11.0], {"steps_lost": 1}, {}, "steps_lost: expected at most 0, got 1"),
        ([FAULT], [11.0], {"workers": 3}, {"workers": 4}, "workers: expected at least 4"),
        ([FAULT, {"kind": "trainer_hung"}], [11.0], {}, {}, None),
        ([FAULT, {"kind": "trainer_hung"}], [11.0], {}, {"evicted": False}, "eviction: expected"),
        ([FAULT], [11.0], {}, {"says": "no disk"}, "message: expected 'no disk'"),
        ([{**FAULT, "reason": "no disk left"}], [11.0], {}, {"says": "no disk"}, None),
    ],
)
def test_an_expectation_is_checked(
    tmp_path: Path,
    events: list[dict[str, Any]],
    steps: list[float],
    record: dict[str, Any],
    expect: dict[str, Any],
    message: str | None,
) -> None:
    watch = watch_of(tmp_path, *events, steps=steps)
    scenario = Scenario("x", "x", expect=Expectation(**expect))
    reasons = expectation_missed(scenario, watch, replace(RECORD, **record), "output")
    if message is None:
        assert reasons == []
    else:
        assert len(reasons) == 1
        assert message in reasons[0]


def test_what_grows_with_every_generation_is_seen(tmp_path: Path) -> None:
    watch = watch_of(tmp_path)
    watch.resources = {
        1: Resources(0, (50, 20), deque([(90, 40), (60, 22)])),
        2: Resources(1, (50, 20), deque([(150, 20)])),
    }
    assert resources_kept(watch, 10) == [
        "descriptors: expected growth of at most 16 in 10 generations, got 100"
    ]
    del watch.resources[2]
    assert resources_kept(watch, 10) == []
    # Stages that it comes to hold with others bring groups.
    plans = [
        {"kind": "generation_started", "reason": "", "workers": [0, 1], "holders": held}
        for held in ([[0], [1], [1]], [[0, 1], [0, 1], [0, 1]])
    ]
    watch = watch_of(tmp_path, *plans)
    for last, limit in ((90, 40), (91, 40)):
        watch.resources = {1: Resources(0, (50, 20), deque([(last, 20)]))}
        assert bool(resources_kept(watch, 2)) == (last - 50 > limit)


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    watch = watch_of(tmp_path, FAULT)
    with (tmp_path / "events.jsonl").open("a") as stream:
        stream.write('{"kind": "ha')
        stream.flush()
        watch.look()
        assert len(watch.events.lines) == 1
        stream.write('lf", "reason": ""}\n')
    watch.look()
    assert [e["kind"] for e in watch.events.lines] == ["fault_injected", "half"]
