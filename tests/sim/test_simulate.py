"""Whole simulations: what they must show, that their fidelities agree, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.cli import main as cli
from dtrain.cli.simulate import read_trace
from dtrain.errors import DtrainError
from dtrain.scheduler import Layout, even_cuts
from dtrain.scheduler.simulator import leader
from dtrain.scheduler.simulator.failures import (
    FailureModel,
    Incident,
    SplitModel,
    StragglerModel,
    draw_spot_trace,
)
from dtrain.scheduler.simulator.gang import GangRun
from dtrain.scheduler.simulator.leader import LeaderRun
from dtrain.scheduler.simulator.network import NetworkModel
from dtrain.scheduler.simulator.processes import ProcessRun
from dtrain.scheduler.simulator.report import Report
from dtrain.scheduler.simulator.scenario import Scenario, simulate
from dtrain.scheduler.simulator.spec import JobSpec
from dtrain.scheduler.simulator.steptime import EvenCosts

HOUR, DAY = 3600.0, 86400.0
TRACE = Path(__file__).resolve().parents[2] / "docs" / "spot-trace.csv"


def job(workers: int, microbatches: int, stages: int = 4) -> JobSpec:
    costs = EvenCosts(0.02, 0.04, 0.01)
    layout = Layout(even_cuts(stages, stages), microbatches, 2)
    return JobSpec(layout, workers, costs, costs.costs(layout))


def is_sound(report: Report) -> None:
    """No invariant broke, and everything that capacity could have given is accounted for."""
    assert report.violations == []
    lost_s = sum(report.lost_by_cause.values())
    assert lost_s == pytest.approx((1 - report.goodput) * report.duration_s, abs=1e-3)
    gang_s = sum(report.lost_by_cause_gang_restart.values())
    assert report.goodput_gang_restart is not None
    assert gang_s == pytest.approx((1 - report.goodput_gang_restart) * report.duration_s, abs=1e-3)


FAULTS = Scenario(
    job(8, 16, stages=2),
    1200.0,
    3,
    FailureModel(every_s=100.0, node_every_s=400.0, node_size=2, rack_size=2, repair_s=60.0),
    splits=SplitModel(every_s=400.0, lasts_s=10.0),
)


def test_both_fidelities_agree() -> None:
    long = simulate(replace(FAULTS, job=replace(FAULTS.job, save_s=0.0)))
    full = simulate(FAULTS, processes=True)
    for report in (long, full):
        is_sound(report)
        assert report.incidents["crash"] >= 5
        assert report.incidents["node"] >= 1
        assert report.goodput_gang_restart is not None
        assert report.goodput > report.goodput_gang_restart
    assert long.incidents == full.incidents
    causes = ("crash", "hang", "node", "partition", "join")
    stops_s = [sum(r.lost_by_cause.get(c, 0.0) for c in causes) for r in (long, full)]
    assert stops_s[1] == pytest.approx(stops_s[0], rel=0.3)
    protocol = full.lost_by_cause["protocol"] / full.duration_s
    assert full.goodput + protocol == pytest.approx(long.goodput, abs=0.03)


def test_a_simulation_is_the_same_whenever_it_is_run() -> None:
    first, second = simulate(FAULTS), simulate(FAULTS)
    assert first.as_json() == second.as_json()
    assert simulate(replace(FAULTS, seed=4)).as_json() != first.as_json()


def test_a_week_of_failures_and_lost_racks() -> None:
    failures = FailureModel(every_s=2 * HOUR, rack_every_s=2 * DAY)
    report = simulate(Scenario(job(64, 256), 7 * DAY, 0, failures))
    is_sound(report)
    assert report.goodput >= 0.97
    assert report.goodput_gang_restart is not None
    assert report.goodput > report.goodput_gang_restart
    assert report.incidents["rack"] >= 1
    assert report.plan_quality_min > 0.95


def test_the_shipped_spot_trace() -> None:
    """Hundreds of arrivals and removals, without warning."""
    trace = read_trace(TRACE)
    assert len(trace) >= 300
    report = simulate(Scenario(job(32, 512, stages=2), 7 * DAY, 0, trace=trace))
    is_sound(report)
    assert report.incidents["added"] + report.incidents["removed"] > 400
    assert report.goodput >= 0.95
    assert report.utilisation is not None
    assert report.utilisation >= 0.9


def test_warnings_save_the_steps_that_removals_cost() -> None:
    spot = Scenario(job(16, 64, stages=2), DAY, 0, trace=draw_spot_trace(0, 16, DAY, HOUR / 4))
    sudden, warned = simulate(spot), simulate(replace(spot, warning_s=30.0))
    is_sound(sudden)
    is_sound(warned)
    assert sudden.steps_replayed > 15
    assert warned.steps_replayed == 0
    assert warned.lost_by_cause["leave"] > 0


QUIET = job(8, 16, stages=2)
SPLIT = Incident(115.0, "partition", (0, 1), 4.9)


def leader_of(*incidents: Incident, spec: JobSpec = QUIET) -> LeaderRun:
    found = LeaderRun(spec, incidents, HOUR, FailureModel()).run()
    assert found.violations == []
    return found


def test_a_worker_that_comes_back_while_the_network_is_split_is_admitted() -> None:
    """In the split, or right before it, so that all wait for the next step boundary."""
    for back_s in (117.0, 114.9):
        found = leader_of(Incident(100.0, "crash", (7,), back_s - 100.5), SPLIT)
        assert found.plan is not None
        assert len(found.plan.workers) == 8
        assert found.account.goodput > 0.99


def test_a_straggler_that_begins_while_the_network_is_split_slows_the_steps() -> None:
    spec = replace(QUIET, rebalance_steps=0)
    slow = Incident(116.0, "straggler", (3,), 600.0, 3.0)
    usual = leader_of(SPLIT, spec=spec)
    gangs = [
        GangRun(spec, incidents, HOUR, FailureModel(), usual.ideal).run()
        for incidents in ([SPLIT], [SPLIT, slow])
    ]
    for before, after in ((usual, leader_of(SPLIT, slow, spec=spec)), gangs):
        assert after.account.committed < before.account.committed - 100
        assert after.account.lost["straggler"] > 100


def test_a_crash_while_the_network_is_split_costs_what_it_costs_elsewhere() -> None:
    """The step under way, and under gang restart all steps since the newest checkpoint."""
    crash = Incident(116.0, "crash", (3,))
    reroute = leader_of(SPLIT, crash)
    gang = GangRun(QUIET, [SPLIT, crash], HOUR, FailureModel(), reroute.ideal).run()
    for run in (reroute, gang):
        account = run.account
        assert sum(account.lost.values()) == pytest.approx(account.capacity - account.committed)
        assert account.lost["crash"] > 0
    assert gang.replayed > 50
    assert leader_of(SPLIT, replace(SPLIT, time_s=118.0)).account.lost["partition"] == (
        pytest.approx(7.9 / reroute.ideal.step_s(8), rel=1e-6)
    )


def committed(*incidents: Incident) -> list[float]:
    """Steps in two minutes: in both fidelities, and under gang restart."""
    spec, failures = replace(QUIET, rebalance_steps=0), FailureModel()
    full = ProcessRun(0, spec, incidents, 120.0, failures, NetworkModel()).run()
    long = LeaderRun(spec, incidents, 120.0, failures).run()
    assert full.violations == long.violations == []
    gang = GangRun(spec, incidents, 120.0, failures, long.ideal).run()
    return [run.account.committed for run in (full, long, gang)]


@pytest.mark.parametrize("begins_s", [20.0, 40.0])
def test_a_worker_is_slow_until_the_last_straggler_of_it_has_passed(begins_s: float) -> None:
    """A short one ends in the time of a long one."""
    long = Incident(30.0, "straggler", (3,), 50.0, 3.0)
    short = Incident(begins_s, "straggler", (3,), 20.0, 3.0)
    one = Incident(min(begins_s, 30.0), "straggler", (3,), 80.0 - min(begins_s, 30.0), 3.0)
    both = sorted([long, short], key=lambda i: i.time_s)
    assert committed(*both) == pytest.approx(committed(one), abs=1)


def test_a_straggler_that_crashes_stays_slow() -> None:
    slow, crash = Incident(20.0, "straggler", (3,), 60.0, 3.0), Incident(20.5, "crash", (3,))
    for crashed, both in zip(committed(crash), committed(slow, crash), strict=True):
        assert crashed - both > 80


def test_load_moves_off_a_straggler() -> None:
    slow = Scenario(job(16, 64), DAY, 1, stragglers=StragglerModel(HOUR, 3.0, HOUR / 2))
    moved = simulate(slow)
    kept = simulate(replace(slow, job=replace(slow.job, rebalance_steps=0)))
    is_sound(moved)
    is_sound(kept)
    assert moved.lost_by_cause["straggler"] < 0.5 * kept.lost_by_cause["straggler"]


def test_workers_that_flap_are_held_off() -> None:
    calm = Scenario(job(16, 64), DAY, 1, FailureModel(flapping=1, flap_every_s=30.0))
    report = simulate(calm)
    is_sound(report)
    # Without back-off it would be let in once for each of its 2880 crashes.
    assert report.generations < 500


def test_everybody_is_lost_at_once() -> None:
    """Nobody has any state: the job goes on from its newest checkpoint."""
    failures = FailureModel(rack_every_s=DAY / 4, rack_size=8, repair_s=600.0)
    report = simulate(Scenario(job(8, 16, stages=2), DAY, 2, failures))
    is_sound(report)
    assert report.tiers["2"] == 1 + report.incidents["rack"]
    assert report.steps_replayed > 100


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_month_on_1024_workers() -> None:
    failures = FailureModel(every_s=2 * HOUR, rack_every_s=7 * DAY)
    report = simulate(Scenario(job(1024, 4096), 30 * DAY, 0, failures))
    is_sound(report)
    assert report.goodput >= 0.97
    assert report.goodput_gang_restart is not None
    assert report.goodput > report.goodput_gang_restart


# The command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", *words])
    out = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out.out, out.err


def test_the_command_says_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--workers=8", "--stages=2", "--duration=6h", "--failures-every=1h", "--json"
    )
    assert code == 0
    found = json.loads(out)
    keys = {"goodput", "goodput_gang_restart", "lost_by_cause", "steps_replayed"}
    assert keys | {"invariant_violations", "seed"} <= set(found)
    assert found["invariant_violations"] == 0


def test_a_broken_invariant_is_shown_with_its_seed_and_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = leader.replan_or_relayout

    def forgets_a_holder(*arguments: object, **named: object) -> object:
        plan = genuine(*arguments, **named)  # type: ignore[arg-type]
        return replace(plan, holders=(plan.holders[0][:-1], *plan.holders[1:]))

    monkeypatch.setattr(leader, "replan_or_relayout", forgets_a_holder)
    words = ["--workers=4", "--stages=2", "--duration=6h", "--failures-every=30m", "--seed=7"]
    monkeypatch.setattr("sys.argv", ["dtrain", "simulate", *words])
    code, out, err = run(capsys, *words)
    assert code == 1
    assert "invariant_violations" in out
    assert "invariant violated: at" in err
    assert f"again: dtrain simulate {' '.join(words)}" in err


def test_a_trace_goes_to_a_file_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spot.csv"
    words = ["--workers=16", "--duration=1d", "--seed=3", "--spot-every=1h"]
    assert run(capsys, *words, f"--make-trace={file}")[0] == 0
    assert read_trace(file) == draw_spot_trace(3, 16, DAY, HOUR)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: expected the header"),
        ("time,kind,count\n1,add,2\n2,sub,1\n", "line 3: expected seconds, add or remove"),
        ("time,kind,count\n1,add\n", "line 2"),
        ("time,kind,count\n-1,add,1\n", "line 2"),
        ("time,kind,count\n1,add,0\n", "line 2"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(DtrainError, match=said):
        read_trace(file)


@pytest.mark.parametrize(
    "words",
    [
        ["--duration", "soon"],
        ["--duration", "0"],
        ["--failures-every", "0"],
        ["--node-size", "64"],
        ["--workers", "16", "--partitions-every", "10m"],
        ["--trace", "/no/such/file"],
        ["--make-trace", "x.csv"],
        ["--forward", "0"],
    ],
)
def test_bad_input_gets_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
