"""The simulator's parts: its random numbers, its pace of steps, its step times and incidents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrain.scheduler import Layout, Plan, even_cuts, make_plan
from dtrain.scheduler.chance import Chance
from dtrain.scheduler.costs import UNIFORM, Cluster
from dtrain.scheduler.simulator.errors import InvariantError
from dtrain.scheduler.simulator.failures import (
    CapacityChange,
    FailureModel,
    SplitModel,
    StragglerModel,
    draw_incidents,
    draw_spot_trace,
    trace_incidents,
)
from dtrain.scheduler.simulator.invariants import check_plan
from dtrain.scheduler.simulator.leader import LeaderRun
from dtrain.scheduler.simulator.network import Network
from dtrain.scheduler.simulator.progress import Progress
from dtrain.scheduler.simulator.scenario import Scenario
from dtrain.scheduler.simulator.spec import JobSpec
from dtrain.scheduler.simulator.steptime import EvenCosts


def test_chance_is_a_function_of_its_key() -> None:
    first = Chance("a", 1)
    numbers = [first.bits() for _ in range(4)]
    again = Chance("a", 1)
    assert [again.bits() for _ in range(4)] == numbers
    assert {Chance(*key).bits() for key in (("a", 2), ("a", "1"), ("a1",), (1, "a"))}.isdisjoint(
        numbers
    )
    first.random()
    assert first.branch("x").bits() == Chance("a", 1, "x").bits()


def test_chance_is_evenly_distributed() -> None:
    chance = Chance(3)
    draws = [chance.randrange(10) for _ in range(20_000)]
    assert all(abs(draws.count(n) - 2000) < 250 for n in range(10))
    mean = sum(chance.exponential(5.0) for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(5.0, rel=0.03)
    assert sorted(chance.sample(range(9), 9)) == list(range(9))


def test_groups_that_are_kept_apart_both_reach_the_log() -> None:
    network = Network()
    network.cut([0, 1], [2], log_with=1)
    network.keep_apart([0, 1], [2])
    assert all(network.reaches_log(worker) for worker in range(3))
    assert network.connected(0, 1)
    assert not network.connected(0, 2)


def test_progress_equals_step_by_step() -> None:
    """Against the same run taken in many small pieces."""
    whole = Progress(0.7, every=5, save_s=1.1)
    pieces = replace(whole)
    whole.run_to(1000.0)
    saved_s = sum(pieces.run_to(t * 0.13).saved_s for t in range(1, 7693))
    saved_s += pieces.run_to(1000.0).saved_s
    assert (pieces.committed, pieces.durable) == (whole.committed, whole.durable)
    assert pieces.into_s == pytest.approx(whole.into_s, abs=1e-6)
    assert saved_s == pytest.approx(whole.durable / 5 * 1.1 + (1000.0 % 4.6 > 3.5) * 0.3, abs=1.1)
    rounds = int(1000.0 / 4.6)
    assert whole.durable == 5 * rounds


def test_progress_discards_and_goes_back() -> None:
    progress = Progress(2.0, every=10, save_s=1.0)
    progress.run_to(2.0 * 13 + 1.0 + 0.5)
    assert (progress.committed, progress.durable) == (13, 10)
    assert progress.break_off() == pytest.approx(0.5)
    assert progress.roll_back(progress.durable) == 3
    progress.every = 4
    assert progress.to_boundary_s() == 2.0


def test_step_times_of_textbook_pipelines() -> None:
    """1F1B of M microbatches on S workers takes (M + S - 1) (F + B)."""
    step_time = EvenCosts(1.0, 2.0, 0.5)
    for stages, microbatches in ((1, 5), (2, 4), (4, 8)):
        plan = make_plan(Layout(even_cuts(stages, stages), microbatches, 1), range(stages), 1)
        assert step_time(plan, {}) == 0.5 + 3.0 * (microbatches + stages - 1)
    assert step_time(plan, {0: 2.0}) >= 2 * 3.0 * microbatches
    stuck = replace(plan, actions={w: tuple(reversed(a)) for w, a in plan.actions.items()})
    with pytest.raises(ValueError, match="wait for each other"):
        step_time(stuck, {})


def test_incidents_come_at_the_rates_that_were_asked_for() -> None:
    day = 86400.0
    model = FailureModel(every_s=1800.0, worker_every_s=64 * 3600.0, rack_every_s=day)
    found = draw_incidents(5, 64, 30 * day, model, StragglerModel(3600.0))
    counts = {c: sum(i.cause == c for i in found) for c in ("crash", "hang", "rack", "straggler")}
    assert counts["crash"] + counts["hang"] == pytest.approx(2160, rel=0.07)
    assert counts["hang"] == pytest.approx(216, rel=0.2)
    assert 15 < counts["rack"] < 50
    assert counts["straggler"] == pytest.approx(720, rel=0.12)
    assert all(len(i.workers) == 32 for i in found if i.cause == "rack")
    assert [i.time_s for i in found] == sorted(i.time_s for i in found)
    fewer = draw_incidents(5, 64, 30 * day, replace(model, rack_every_s=None))
    assert [i for i in found if i.cause in ("crash", "hang")] == fewer


def test_a_trace_becomes_workers() -> None:
    trace = [CapacityChange(10.0, "remove", 2), CapacityChange(20.0, "add", 3)]
    removed, added = trace_incidents(0, 4, trace)
    assert len(removed.workers) == 2
    assert len(added.workers) == 3
    assert set(removed.workers) < set(added.workers) == {*removed.workers, 4}
    warned = trace_incidents(0, 4, trace, 30.0)[0]
    assert (warned.cause, warned.time_s) == ("preempted", 0.0)
    with pytest.raises(ValueError, match="at most the 2 workers"):
        trace_incidents(0, 4, [trace[0], CapacityChange(11.0, "remove", 3)])


def test_a_partition_leaves_somebody_outside() -> None:
    splits = SplitModel(every_s=600.0)
    # The example of docs/simulation.md.
    racks = FailureModel(every_s=120.0, rack_size=8)
    found = draw_incidents(0, 16, 1800.0, racks, splits=splits)
    cut_off = [i for i in found if i.cause == "partition"]
    assert cut_off
    assert all(len(i.workers) == 8 for i in cut_off)
    with pytest.raises(ValueError, match="rack_size"):
        draw_incidents(0, 16, 1800.0, FailureModel(), splits=splits)


def test_what_a_trace_removes_and_adds_at_one_second_is_there_afterwards() -> None:
    trace = [CapacityChange(10.0, "remove", 2), CapacityChange(10.0, "add", 2)]
    layout = Layout(even_cuts(2, 2), 4, 2)
    scenario = Scenario(JobSpec(layout, 4, EvenCosts(0.1, 0.2)), 60.0, trace=trace)
    run = LeaderRun(scenario.job, scenario.incidents(), 60.0, scenario.failures).run()
    assert run.violations == []
    assert run.provisioned_s == pytest.approx(4 * 60.0)


def test_a_made_up_trace_stays_within_its_bounds() -> None:
    trace = draw_spot_trace(2, 64, 7 * 86400.0, 1200.0)
    now, sizes = 64, []
    for change in trace:
        now += change.count if change.kind == "add" else -change.count
        sizes.append(now)
    assert len(trace) > 300
    assert 32 <= min(sizes) < 50
    assert 64 < max(sizes) <= 80


def _with(plan: Plan, **changed: object) -> Plan:
    return replace(plan, **changed)  # type: ignore[arg-type]


GOOD = make_plan(Layout(even_cuts(2, 2), 4, 2), range(4), 3)
NODES = Cluster(domains={w: (f"node {w // 2}",) for w in range(4)})


@pytest.mark.parametrize(
    ("plan", "cluster", "said"),
    [
        (GOOD, UNIFORM, ""),
        (GOOD, NODES, "one domain has all copies of stage 0"),
        (_with(GOOD, generation=2), UNIFORM, "a plan of generation 2 in 3"),
        (_with(GOOD, workers=(0, 1, 2)), UNIFORM, "not for the members"),
        (_with(GOOD, holders=((0,), (2, 3))), UNIFORM, "stage 0 has holders"),
        (_with(GOOD, holders=((0, 9), (2, 3))), UNIFORM, "held by strangers"),
        (_with(GOOD, holders=((2, 3), (2, 3))), UNIFORM, "executed by others than its holders"),
        (_with(GOOD, executors=((0,) * 3, (2,) * 4)), UNIFORM, "stage 0 runs 3 microbatches"),
        (_with(GOOD, executors=((0,) * 4, (2,) * 4)), UNIFORM, "orders of other executors"),
        (_with(GOOD, actions={w: GOOD.actions[w] for w in range(3)}), UNIFORM, "worker 3 does 0"),
    ],
)
def test_a_broken_plan_is_seen(plan: Plan, cluster: Cluster, said: str) -> None:
    if not said:
        check_plan(plan, 3, range(4), cluster)
        return
    with pytest.raises(InvariantError, match=said):
        check_plan(plan, 3, range(4), cluster)
