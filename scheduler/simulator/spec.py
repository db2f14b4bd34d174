"""The job that is simulated, and how long the parts of a recovery take."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtrain.scheduler.costs import StepCosts
from dtrain.scheduler.events import MembershipPolicy
from dtrain.scheduler.plan import Layout
from dtrain.scheduler.simulator.steptime import StepTime


@dataclass(frozen=True)
class RecoveryTimes:
    """How long the parts of a recovery take, in seconds.

    ``notice_s``: from a process's end to its peers' notice. ``lease_s``: silence after which a hung
    or unreachable worker is given up. ``agree_s``: from the notice to the agreed generation.
    ``rebuild_s``: from there to the first step: new groups and engines. ``respawn_s``: from the end
    of a process (or the return of its device) to the announcement of its next life. ``vote_s``: at
    the end of a step, in which a loss finds it voted, so that it is applied and not replayed.
    """

    notice_s: float = 0.02
    lease_s: float = 5.0
    agree_s: float = 0.04
    rebuild_s: float = 0.11
    respawn_s: float = 0.5
    vote_s: float = 0.005


@dataclass(frozen=True)
class JobSpec:
    """The job that is simulated.

    ``costs``: what the planner believes of a step; None: all microbatches of all stages are alike.
    ``step_time``: what a plan's step takes. ``stage_bytes``: parameters and optimizer state of a
    stage. ``bandwidth_bytes_s``: of a worker's link. ``sharded``: optimizer state is split over a
    stage's holders. ``save_s``: what a durable checkpoint takes from training; ``load_s``: to start
    from one. ``longest_interval_s``: most time between two checkpoints. ``gang_restart_s``: what a
    restart of all processes takes. ``rebalance_steps``: after so many steps a straggler's speed is
    known and load is moved; 0: never. ``relayout``: the work may be laid out anew at a change of
    membership; else only ``replan`` is used.
    """

    layout: Layout
    workers: int
    step_time: StepTime
    costs: StepCosts | None = None
    min_workers: int = 1
    stage_bytes: int = 100_000_000
    bandwidth_bytes_s: float = 1e9
    sharded: bool = False
    snapshot_every: int = 1
    save_s: float = 1.0
    load_s: float = 5.0
    longest_interval_s: float = 3600.0
    gang_restart_s: float = 6.6
    rebalance_steps: int = 10
    relayout: bool = True
    times: RecoveryTimes = field(default_factory=RecoveryTimes)

    def membership_policy(self) -> MembershipPolicy:
        """How long to wait for whom."""
        return MembershipPolicy(self.workers, self.min_workers)
