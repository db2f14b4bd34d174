"""A run in which every process and message is simulated: for some hundred workers at most.

The world of ``world.py`` meets incidents of the same models that the long runs meet, and every
invariant is checked as it goes. At the end the faults stop, and the job must go on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from dtrain.scheduler.membership import ImpossibleTransitionError
from dtrain.scheduler.plan import Plan
from dtrain.scheduler.simulator.errors import InvariantError, require
from dtrain.scheduler.simulator.failures import FailureModel, Incident, Slowness
from dtrain.scheduler.simulator.histories import PEACE_S, make_peace, stays_possible
from dtrain.scheduler.simulator.network import NetworkModel
from dtrain.scheduler.simulator.process import Life
from dtrain.scheduler.simulator.progress import Passed
from dtrain.scheduler.simulator.report import Account, Ideal, moved_microbatches
from dtrain.scheduler.simulator.spec import JobSpec
from dtrain.scheduler.simulator.training import Course
from dtrain.scheduler.simulator.world import Shape, World

_STORY_LINES = 60


class ProcessRun:
    """The run. :meth:`run` lets it pass; then the attributes hold what came of it."""

    def __init__(
        self,
        seed: int,
        spec: JobSpec,
        incidents: Sequence[Incident],
        duration_s: float,
        failures: FailureModel,
        network: NetworkModel,
    ) -> None:
        self.spec, self.duration_s = spec, duration_s
        policy = spec.membership_policy()
        self.ideal = Ideal(spec.layout, spec.step_time)
        every = max(1, round(spec.longest_interval_s / self.ideal.step_s(spec.workers)))
        most = max([spec.workers, *(w + 1 for i in incidents for w in i.workers)])
        shape = Shape(
            spec.layout,
            spec.workers,
            spec.min_workers,
            spec.sharded,
            lease_s=spec.times.lease_s,
            respawn_s=spec.times.respawn_s,
            gather_s=policy.gather_s,
            split_s=policy.split_s,
            snapshot_every=spec.snapshot_every,
            checkpoint_every=every,
            cluster=failures.domains(range(most)),
            relayout=spec.relayout,
        )
        self.world = World(seed, shape, network, story_length=20 * _STORY_LINES)
        self.world.compute_time = self._compute_s
        self.world.on_commit = self._commit
        self.account = Account()
        self.seen: Counter[str] = Counter()
        self.violations: list[str] = []
        self.quality: list[tuple[float, float]] = []
        self.replayed = self.microbatches_moved = 0
        self.provisioned = set(range(spec.workers))
        self.least = self.most = spec.workers
        self.provisioned_s = 0.0
        self._since_s = self._accounted_s = 0.0
        self._capacity = 0.0
        self._cause = "start"
        self._last: tuple[int, int] | None = None
        self._slowness = Slowness()
        self._cuts: list[tuple[float, set[int]]] = []
        self._steps_s: dict[int, float] = {}
        for incident in incidents:
            self.world.at(incident.time_s, partial(self._meet, incident))

    def run(self) -> ProcessRun:
        """Let the time pass, then a time without faults."""
        world = self.world
        try:
            world.start(*range(self.spec.workers))
            world.run(self.duration_s)
            self._provision(())
            self._close()
            world.on_commit = None
            self._cuts = []
            make_peace(world, world.chance)
            settled = world.run(PEACE_S + 2 * world.policy.gather_s, world.settled)
            require(settled or not stays_possible(world), "no progress after the faults stopped")
        except (InvariantError, ImpossibleTransitionError) as error:
            story = world.story(_STORY_LINES)
            self.violations.append(f"at {world.now:.3f} s: {error}\n{story}")
        return self

    @property
    def tiers(self) -> Counter[int]:
        """How many generations started from each tier of recovery."""
        return Counter(self.world.tiers)

    # Steps

    def _step_s(self, plan: Plan) -> float:
        if plan.generation not in self._steps_s:
            self._steps_s[plan.generation] = self.spec.step_time(plan, {})
        return self._steps_s[plan.generation]

    def _compute_s(self, course: Course) -> float:
        return self._step_s(course.plan) * self._slowness.factor(
            course.life.peer.worker, self.world.now
        )

    def _commit(self, number: int, step: int) -> None:
        """A step was committed for the first time in its generation."""
        world, now = self.world, self.world.now
        self._provision(())
        plan = world.plans[number]
        fresh = self._last is None or self._last[0] != number
        ideal_s = self.ideal.step_s(max(1, len(self.provisioned)))
        usual_s = self._step_s(plan)
        if fresh:
            self._new_plan(plan)
        if self._last is not None and step <= self._last[1]:
            again = self._last[1] + 1 - step
            self.replayed += again
            self.account.commit(-again)
            self.account.lose(again, self._cause)
        pace_s = usual_s * max(self._slowness.factor(w, now) for w in plan.workers)
        pace_s = min(pace_s, now - self._since_s)
        there_s = self.ideal.step_s(len(plan.workers))
        paces = [("absent", there_s), ("plan", usual_s), ("straggler", pace_s)]
        before = self.account.capacity
        self.account.train(Passed(1, pace_s, 0.0), ideal_s, paces)
        rest = self._capacity - (self.account.capacity - before)
        self.account.capacity += rest
        self.account.lose(rest, self._cause if fresh else "protocol")
        self._since_s, self._capacity, self._last = now, 0.0, (number, step)

    def _new_plan(self, plan: Plan) -> None:
        usual_s = self._step_s(plan)
        self.ideal.learn(plan, usual_s)
        self.quality.append((self.world.now, self.ideal.step_s(len(plan.workers)) / usual_s))
        if self._last is not None:
            self.microbatches_moved += moved_microbatches(self.world.plans[self._last[0]], plan)
        self.replayed += self.world.settlements[plan.generation].replayed

    def _provision(self, change: Sequence[int], *, there: bool = True) -> None:
        """Capacity up to now, then a change of it."""
        now, count = self.world.now, len(self.provisioned)
        if count:
            seconds = now - self._accounted_s
            self.provisioned_s += seconds * count
            self._capacity += seconds / self.ideal.step_s(count)
        self._accounted_s = now
        if there:
            self.provisioned.update(change)
        else:
            self.provisioned.difference_update(change)
        self.least = min(self.least, len(self.provisioned))
        self.most = max(self.most, len(self.provisioned))

    def _close(self) -> None:
        """What is under way at the end is not lost to a fault."""
        self.account.capacity += self._capacity
        self.account.lose(self._capacity, "unfinished")

    # Incidents

    def _meet(self, incident: Incident) -> None:
        world = self.world
        struck = [w for w in incident.workers if w in world.current and world.current[w].alive]
        match incident.cause:
            case "added":
                self._provision(incident.workers)
                for w in incident.workers:
                    self._start(w)
            case "removed":
                self._provision(incident.workers, there=False)
                self._slowness.replaced(incident.workers)
                self._end(struck, incident)
            case "preempted":
                for w in struck:
                    world.leave(w)
            case "straggler":
                self._slowness.strike(incident)
            case "partition":
                until_s = world.now + incident.away_s
                self._cuts.append((until_s, set(incident.workers)))
                world.at(until_s, self._cut)
                self._cut()
            case "hang":
                for w in struck:
                    life = world.current[w]
                    world.stop(w)
                    kill: Callable[[], None] = partial(self._kill_hung, life, incident)
                    world.at(world.now + self.spec.times.lease_s, kill)
            case _:
                self._end(struck, incident)
        if struck or incident.cause in ("added", "removed"):
            self._cause = "join" if incident.cause == "added" else incident.cause
            count = len(incident.workers)
            many = incident.cause in ("added", "removed", "preempted")
            self.seen[incident.cause] += count if many else 1

    def _cut(self) -> None:
        """Cut off who is cut off now, each group on its own."""
        world = self.world
        self._cuts = [cut for cut in self._cuts if cut[0] > world.now]
        groups = [inside for _, inside in self._cuts]
        if groups:
            world.cut(set(world.current).difference(*groups), *groups)
        else:
            world.heal()

    def _end(self, struck: Sequence[int], incident: Incident) -> None:
        """Processes end; those whose devices are away are not started until they are back."""
        world = self.world
        if incident.away_s > 0:
            world.gone_for_good.update(struck)
            if incident.away_s < math.inf:
                for w in struck:
                    world.at(world.now + incident.away_s, partial(self._start, w))
        for w in struck:
            world.end(world.current[w], f"ends: {incident.cause}")

    def _kill_hung(self, life: Life, incident: Incident) -> None:
        if life.alive and life.stopped:
            worker = life.peer.worker
            if self.world.current[worker] is life:
                self._end([worker], incident)
            else:
                self.world.end(life, "is killed by its supervisor")

    def _start(self, w: int) -> None:
        world = self.world
        world.gone_for_good.discard(w)
        if w in self.provisioned and (w not in world.current or not world.current[w].alive):
            world.start(w)
