"""A scenario, and its simulation in either fidelity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtrain.scheduler.simulator.failures import (
    CapacityChange,
    FailureModel,
    Incident,
    SplitModel,
    StragglerModel,
    draw_incidents,
    trace_incidents,
)
from dtrain.scheduler.simulator.gang import GangRun
from dtrain.scheduler.simulator.leader import LeaderRun
from dtrain.scheduler.simulator.network import NetworkModel
from dtrain.scheduler.simulator.processes import ProcessRun
from dtrain.scheduler.simulator.report import Report
from dtrain.scheduler.simulator.spec import JobSpec
from dtrain.scheduler.simulator.steptime import EvenCosts

_POINTS = 100


@dataclass(frozen=True)
class Scenario:
    """A job, what happens to it, for how long, and the seed of everything random.

    ``trace``: a spot trace. Failures then strike the workers of the launch alone.
    ``warning_s``: of a removal in the trace.
    """

    job: JobSpec
    duration_s: float
    seed: int = 0
    failures: FailureModel = field(default_factory=FailureModel)
    stragglers: StragglerModel = field(default_factory=StragglerModel)
    splits: SplitModel = field(default_factory=SplitModel)
    trace: Sequence[CapacityChange] = ()
    warning_s: float = 0.0
    network: NetworkModel = field(default_factory=NetworkModel)

    def incidents(self) -> list[Incident]:
        """Everything that happens, in order."""
        drawn = draw_incidents(
            self.seed,
            self.job.workers,
            self.duration_s,
            self.failures,
            self.stragglers,
            self.splits,
        )
        drawn += trace_incidents(self.seed, self.job.workers, self.trace, self.warning_s)
        # What a trace does at one second stays in its order: removed workers may be added again.
        return sorted((i for i in drawn if i.time_s < self.duration_s), key=lambda i: i.time_s)


def simulate(scenario: Scenario, *, processes: bool = False, gang: bool = True) -> Report:
    """Simulate a scenario.

    ``processes``: every process and message; else the leader's view alone. ``gang``: the same
    incidents under gang restart too.

    Raises:
        ValueError: the scenario makes no sense.
    """
    job, incidents = scenario.job, scenario.incidents()
    if scenario.duration_s <= 0 or job.workers < 1:
        raise ValueError("scenario: expected a duration above 0 and at least 1 worker")
    run: ProcessRun | LeaderRun
    if processes:
        run = ProcessRun(
            scenario.seed,
            job,
            incidents,
            scenario.duration_s,
            scenario.failures,
            scenario.network,
        ).run()
    else:
        run = LeaderRun(job, incidents, scenario.duration_s, scenario.failures).run()
    against = None
    if gang:
        against = GangRun(job, incidents, scenario.duration_s, scenario.failures, run.ideal).run()
    return _report(scenario, run, against)


def _report(scenario: Scenario, run: ProcessRun | LeaderRun, gang: GangRun | None) -> Report:
    job, account = scenario.job, run.account
    step_time = job.step_time
    utilisation = None
    if isinstance(step_time, EvenCosts) and run.provisioned_s:
        busy_s = account.committed * step_time.busy_s(job.layout)
        utilisation = busy_s / run.provisioned_s
    if isinstance(run, LeaderRun):
        interval_s: float | None = run.progress.every * run.progress.step_s
        generations, moved = run.generations, run.states_moved
    else:
        interval_s = None
        generations, moved = len(run.world.standing), run.world.states_moved
    quality = [q for _, q in run.quality]
    every = max(1, len(run.quality) // _POINTS)
    share = scenario.duration_s / account.capacity if account.capacity else 0.0
    return Report(
        fidelity="processes" if isinstance(run, ProcessRun) else "leader",
        seed=scenario.seed,
        workers=job.workers,
        duration_s=scenario.duration_s,
        goodput=account.goodput,
        goodput_gang_restart=gang.account.goodput if gang is not None else None,
        utilisation=utilisation,
        lost_by_cause={cause: lost * share for cause, lost in account.lost.items()},
        lost_by_cause_gang_restart=(
            {
                cause: lost * scenario.duration_s / gang.account.capacity
                for cause, lost in gang.account.lost.items()
            }
            if gang is not None and gang.account.capacity
            else {}
        ),
        steps_committed=round(account.committed),
        steps_replayed=run.replayed,
        steps_replayed_gang_restart=gang.replayed if gang is not None else None,
        data_moved_bytes=moved * job.stage_bytes,
        states_moved=moved,
        microbatches_moved=run.microbatches_moved,
        generations=generations,
        tiers={str(tier): count for tier, count in sorted(run.tiers.items())},
        incidents=dict(sorted(Counter(run.seen).items())),
        plan_quality=run.quality[::every],
        plan_quality_mean=sum(quality) / len(quality) if quality else 0.0,
        plan_quality_min=min(quality, default=0.0),
        checkpoint_interval_s=interval_s,
        gang_checkpoint_interval_s=gang.interval_s if gang is not None else None,
        workers_min=run.least,
        workers_max=run.most,
        invariant_violations=len(run.violations),
        violations=run.violations,
    )
