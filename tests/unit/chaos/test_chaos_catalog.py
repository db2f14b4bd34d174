"""Scenarios and random schedules: all can be configured, all that was promised is there."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from dtrain.chaos import base
from dtrain.chaos.catalog import catalog, scenario_named
from dtrain.chaos.scenario import Scenario
from dtrain.chaos.soak import schedule, schedules
from dtrain.cli import main as cli
from dtrain.config import Config
from dtrain.errors import DtrainError
from dtrain.faults.spec import HOW, PHASES


def configured(scenario: Scenario, model: str, zero: int) -> Config:
    raw = base.with_overrides(base.base_config("store", model, zero), scenario.overrides)
    shape = base.shape_of(base.checked(raw, scenario.name), scenario.workers)
    raw["faults"] = list(scenario.faults(shape))
    return base.checked(raw, scenario.name)


@pytest.mark.parametrize("name", catalog())
def test_a_scenario_is_a_valid_job(name: str) -> None:
    scenario = scenario_named(name)
    for model in base.MODELS:
        for zero in base.ZERO_STAGES:
            config = configured(scenario, model, zero)
            steps = config.train.max_steps or 0
            assert all(act.step < steps for act in scenario.acts)
            for fault in config.faults:
                assert isinstance(fault.step, int)
                assert fault.step < steps
                assert fault.worker == "all" or int(fault.worker) < scenario.workers
    assert scenario.workers % scenario.hosts == 0
    assert config.faults or scenario.acts, "nothing happens"
    if not scenario.expect.fired:
        assert not config.faults


def test_every_phase_and_every_way_of_every_kind_is_in_some_scenario() -> None:
    configs = [configured(s, "sage", 0) for s in catalog().values()]
    faults = [fault for config in configs for fault in config.faults]
    kills = {f.phase for f in faults if (f.kind, f.how) == ("crash", "sigkill")}
    assert kills >= set(PHASES)
    # Stopped agents and nodes are for dtrain inject.
    elsewhere = {("agent", "stop"), ("node", "stop")}
    wanted = {(kind, how) for kind, ways in HOW.items() for how in ways or (None,)}
    assert wanted - {(f.kind, f.how) for f in faults} == elsewhere


def test_stages_are_told_apart_by_the_plan_of_the_job() -> None:
    victims = {
        part: configured(scenario_named(f"kill-{part}-stage"), "sage", 0).faults[0].worker
        for part in ("first", "middle", "last")
    }
    assert len(set(victims.values())) == 3
    both = configured(scenario_named("two-at-once"), "sage", 0).faults
    assert both[0].worker != both[1].worker


def test_a_seed_gives_the_same_schedules_again() -> None:
    once = [(s.name, s.faults, m, z) for s, m, z in islice(schedules(5), 6)]
    for number, (name, faults, model, zero) in enumerate(once):
        scenario, its_model, its_zero = schedule(5, number)
        shape = base.shape_of(configured(scenario, its_model, its_zero), scenario.workers)
        assert (scenario.name, its_model, its_zero) == (name, model, zero)
        assert scenario.faults(shape) == faults(shape)
        forced, its_model, its_zero = schedule(5, number, model="gcn", zero=1)
        assert (its_model, its_zero) == ("gcn", 1)
        assert forced.faults(shape) == faults(shape)
    others = [str(s.faults(shape)) for s, _, _ in islice(schedules(6), 6)]
    assert len(set(others)) == 6


def test_random_schedules_are_valid_jobs() -> None:
    for scenario, model, zero in islice(schedules(0), 40):
        config = configured(scenario, model, zero)
        assert 2 <= len(config.faults) <= 6


def test_an_unknown_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DtrainError, match="did you mean kill-forward"):
        scenario_named("kill-foward")
    for words, message in (
        (["--scenario", "kill-foward"], "did you mean kill-forward?"),
        ([], "expected one of --list"),
        (["--list", "--soak", "1"], ""),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["chaos", *words])
        assert caught.value.code == (2 if message else 0)
        assert message in capsys.readouterr().err


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["chaos", "--list", "--json"])
    listed = json.loads(capsys.readouterr().out)["scenarios"]
    assert [s["name"] for s in listed] == list(catalog())
