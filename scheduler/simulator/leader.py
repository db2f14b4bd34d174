"""A long run of a large job as its leader sees it.

One membership machine, that of the lowest surviving worker, goes through every change of membership
with the real planner and recovery; what all other workers would say and answer is made up from what
they hold. Between two changes steps pass at the pace of the plan. Messages are not simulated: how
long it takes to notice, to agree and to rebuild is given by :class:`RecoveryTimes`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from dtrain.scheduler import events as core
from dtrain.scheduler.costs import Cluster
from dtrain.scheduler.events import Announcement, Proposal
from dtrain.scheduler.intervals import FailureRate, IntervalPolicy, SaveCost
from dtrain.scheduler.membership import ImpossibleTransitionError
from dtrain.scheduler.plan import Orders, Plan
from dtrain.scheduler.planner import make_plan, replan
from dtrain.scheduler.recovery import Settlement, Transfer, settle, transfers
from dtrain.scheduler.relayout import replan_or_relayout
from dtrain.scheduler.simulator.errors import InvariantError, require
from dtrain.scheduler.simulator.failures import FailureModel, Incident, Slowness
from dtrain.scheduler.simulator.invariants import check_plan
from dtrain.scheduler.simulator.progress import MOMENT_S
from dtrain.scheduler.simulator.report import Account, Ideal, moved_microbatches
from dtrain.scheduler.simulator.spec import JobSpec
from dtrain.scheduler.simulator.training import Memory, best_step
from dtrain.scheduler.simulator.view import LeaderView, Slot


class LeaderRun(LeaderView):
    """The run. :meth:`run` goes through all incidents; then the attributes hold what came of it.

    ``account``: capacity and where it went. ``replayed``: steps begun or committed that had to be
    done again. ``violations``: invariants that did not hold. ``quality``: (time, step time of a
    plan made afresh over the plan's), at each generation.
    """

    def __init__(
        self,
        spec: JobSpec,
        incidents: Sequence[Incident],
        duration_s: float,
        failures: FailureModel,
    ) -> None:
        super().__init__(spec)
        self.duration_s, self.failures = duration_s, failures
        self.account = Account()
        self.ideal = Ideal(spec.layout, spec.step_time, spec.costs)
        mtbf_s = 1 / max(failures.losses_per_s(spec.workers), 1e-9)
        # Losses that need a checkpoint are rare, so that little is known and it is kept for long.
        rate = FailureRate(mtbf_s, prior_s=2 * 3600.0, half_life_s=7 * 86400.0)
        self.intervals = IntervalPolicy(rate, SaveCost(spec.save_s), spec.longest_interval_s)
        self.replayed = self.states_moved = self.microbatches_moved = 0
        self.tiers: Counter[int] = Counter()
        self.seen: Counter[str] = Counter()
        self.violations: list[str] = []
        self.quality: list[tuple[float, float]] = []
        self.least = self.most = spec.workers
        self.provisioned_s = 0.0
        self.plan: Plan | None = None
        self.phase = "idle"
        self._cause = "start"
        self._accounted_s = 0.0
        self._pace = (1.0, 1.0)
        self._step_s: dict[int, float] = {}
        self._slowness = Slowness()
        self._known_slow: dict[int, float] = {}
        self._allows_for_slow = False
        self._asked = 0
        self._wanted = ""
        self._whole_at_s = 0.0
        self._began_at_step = 0
        for incident in incidents:
            self._at(incident.time_s, partial(self._meet, incident))

    def run(self) -> LeaderRun:
        """Go through everything that happens before the end."""
        self._at(0.0, self._start_all)
        try:
            while self.clock.step(self.duration_s):
                self._check()
            self._account()
        except (InvariantError, ImpossibleTransitionError, ValueError) as error:
            self.violations.append(f"at {self.now:.3f} s: {error}")
        left_s = self.progress.trained_s()
        if left_s and self.phase in ("running", "paused"):
            self.account.lose(left_s / self.progress.step_s, "unfinished")
        return self

    # Time and accounts

    def _provisioned(self) -> int:
        return sum(1 for w in self.workers.values() if w.provisioned)

    def _account(self) -> None:
        """Account for the time since the last change."""
        seconds = self.now - self._accounted_s
        self._accounted_s = self.now
        count = self._provisioned()
        self.least, self.most = min(self.least, count), max(self.most, count)
        if seconds <= 0 or not count:
            return
        self.provisioned_s += seconds * count
        ideal_s = self.ideal.step_s(count)
        if self.phase != "running":
            self.account.idle(seconds, ideal_s, self._cause)
            return
        assert self.plan is not None
        passed = self.progress.run_to(self.now)
        there_s = self.ideal.step_s(len(self.plan.workers))
        usual_s, pace_s = self._pace
        if self._allows_for_slow:
            # The plan itself allows for a straggler.
            usual_s = there_s
        paces = [("absent", there_s), ("plan", usual_s), ("straggler", pace_s)]
        self.account.train(passed, ideal_s, paces)

    def _stop(self, cause: str) -> None:
        """Training stops because of ``cause``; the step under way is discarded unless voted."""
        self._account()
        if self.phase in ("running", "paused"):
            self._take_snapshots()
            under_way_s = self.progress.trained_s()
            near_end = self.progress.step_s - under_way_s <= self.spec.times.vote_s
            self.voted = near_end and not self.progress.is_saving
            self.progress.break_off()
            if under_way_s > 0:
                self.account.lose(under_way_s / self.progress.step_s, cause)
                self.replayed += under_way_s > MOMENT_S and not self.voted
        self.phase, self._cause, self._wanted = "stopped", cause, ""

    def _take_snapshots(self) -> None:
        """What the members' memories have of the newest two snapshot steps."""
        assert self.plan is not None
        every, committed = self.spec.snapshot_every, self.progress.committed
        newest = committed - committed % every
        steps = [s for s in (newest - every, newest) if s > self._began_at_step]
        if not steps:
            return
        members = [self.workers[w] for w in self.plan.workers]
        for i, mine in enumerate(members):
            # Each sends its own to its neighbour.
            stages = {*mine.stages, *members[i - 1].stages}
            kept = {snapshot for snapshot in mine.snapshots if len(steps) < 2}
            if kept:
                last = max(step for step, _ in kept)
                kept = {snapshot for snapshot in kept if snapshot[0] == last}
            mine.snapshots = tuple(sorted(kept | {(s, stage) for s in steps for stage in stages}))

    # Incidents

    def _meet(self, incident: Incident) -> None:
        self._account()
        match incident.cause:
            case "straggler":
                self._slow_down(incident)
            case "added":
                for w in incident.workers:
                    worker = self.workers.setdefault(w, Slot(False))
                    worker.provisioned, worker.away_until_s = True, self.now
                    self._later(self.spec.times.respawn_s, partial(self._start, w))
                self.seen["added"] += len(incident.workers)
            case "preempted":
                self._leave(incident)
            case "removed":
                for w in incident.workers:
                    self.workers[w].provisioned = False
                self._slowness.replaced(incident.workers)
                self.seen["removed"] += len(incident.workers)
                self._end(incident, self.spec.times.notice_s, certain=True)
            case "partition":
                self._split(incident)
            case cause:
                hung = cause == "hang"
                times = self.spec.times
                self._end(incident, times.lease_s if hung else times.notice_s, certain=True)

    def _end(self, incident: Incident, notice_s: float, *, certain: bool) -> None:
        """Processes end or fall silent, and come back when their devices do."""
        for w in incident.workers:
            if w in self.workers:
                worker = self.workers[w]
                worker.away_until_s = max(worker.away_until_s, self.now + incident.away_s)
        struck = self._alive(incident.workers)
        if not struck:
            return
        if incident.cause != "removed":
            self.seen[incident.cause] += 1
            self.intervals.rate.watch(self.now)
        members = self._members()
        if any(self.workers[w].peer in members for w in struck):
            self._stop(incident.cause)
        ended = []
        for w in struck:
            worker = self.workers[w]
            assert worker.peer is not None
            ended.append(worker.peer)
            worker.peer, worker.stages, worker.snapshots = None, (), ()
            wait_s = self.now + (notice_s if incident.cause == "hang" else 0.0)
            if incident.cause in ("crash", "hang"):
                self.ledger.record(self.now, w, "hang" if incident.cause == "hang" else "crash")
                wait_s = max(wait_s, self.ledger.admission(w).at_s)
            back_s = max(wait_s, worker.away_until_s)
            if worker.provisioned and back_s < math.inf:
                self._at(back_s + self.spec.times.respawn_s, partial(self._start, w))
        what = "has ended" if certain else f"was silent for {self.spec.times.lease_s:g} s"
        losses = [core.Lost(peer, what, certain) for peer in ended]
        if self.machine is not None and self.machine.me.peer in ended:
            self._hand_over()
        self._later(notice_s, lambda: self._notice(losses))

    def _split(self, incident: Incident) -> None:
        """A group is cut off; it ends without the log, unless it is back before it is missed."""
        lease_s = self.spec.times.lease_s
        if incident.away_s >= lease_s:
            self._end(incident, lease_s, certain=False)
        elif self.phase in ("running", "paused") and self._alive(incident.workers):
            self.seen["partition"] += 1
            self.phase, self._cause = "paused", "partition"
            self._whole_at_s = max(self._whole_at_s, self.now + incident.away_s)
            self._later(incident.away_s, self._resume)

    def _resume(self) -> None:
        """The network is whole again: what could not be done meanwhile is done now."""
        if self.phase != "paused" or self.now < self._whole_at_s:
            return
        self._account()
        self.phase = "running"
        self.progress.at_s = self.now
        self._set_pace()
        wanted, self._wanted = self._wanted, ""
        if wanted:
            self._ask(wanted)

    def _leave(self, incident: Incident) -> None:
        going = self._alive(incident.workers)
        for w in going:
            self.workers[w].leaving = True
        if not going:
            return
        self.seen["preempted"] += len(going)
        if self.machine is not None and self.machine.me.peer.worker in going:
            # Who leaves does not lead.
            self._hand_over()
        self._ask("leave")

    def _slow_down(self, incident: Incident) -> None:
        self._at(self._slowness.strike(incident), self._recover)
        self.seen["straggler"] += len(self._alive(incident.workers))
        self._set_pace()
        self._watch_speeds()

    def _recover(self) -> None:
        self._account()
        self._set_pace()
        self._watch_speeds()

    def _watch_speeds(self) -> None:
        """After some steps at the new speeds the load is moved."""
        if self.spec.rebalance_steps:
            self._later(self.spec.rebalance_steps * self.progress.step_s, self._rebalance)

    def _rebalance(self) -> None:
        slow = self._slowness.slow(self.now)
        if slow == self._known_slow:
            return
        self._known_slow = slow
        self._ask("straggler")

    def _set_pace(self) -> None:
        if self.plan is None or self.phase != "running":
            return
        members = set(self.plan.workers)
        slow = {w: f for w, f in self._slowness.slow(self.now).items() if w in members}
        usual_s = self._usual_s()
        pace_s = self.spec.step_time(self.plan, slow) if slow else usual_s
        self._pace = (usual_s, pace_s)
        self.progress.change_pace(pace_s)

    def _usual_s(self) -> float:
        """Seconds of a step where nobody is slow."""
        assert self.plan is not None
        number = self.plan.generation
        if number not in self._step_s:
            count = len(self.plan.workers)
            # A plan that was laid out anew is the ideal one with other workers in its places.
            same = _starts(self.plan) is _starts(self.ideal.plan(count)) is not None
            step_s = self.ideal.step_s(count) if same else self.spec.step_time(self.plan, {})
            self._step_s = {number: step_s}
        return self._step_s[number]

    def _ask(self, cause: str) -> None:
        """Let all regroup at the next step boundary, because somebody joins or leaves."""
        if self.phase == "paused":
            self._wanted = cause
        if self.phase != "running" or self._asked == self.generations:
            return
        self._account()
        self._asked = number = self.generations
        wait_s = self.progress.to_boundary_s() + MOMENT_S / 2
        self._later(wait_s, partial(self._at_boundary, number, cause))

    def _at_boundary(self, number: int, cause: str) -> None:
        if number != self.generations:
            return
        if self.phase == "paused":
            self._asked, self._wanted = 0, cause
        elif self.phase == "running":
            self._stop(cause)
            self._later(
                self.spec.times.agree_s / 2, lambda: self._regroup(f"somebody wants to {cause}")
            )

    # A generation

    def _enter(self, proposal: Proposal) -> None:
        """All have answered: plan, settle, move states, rebuild."""
        number, members = proposal.number, proposal.members
        require(number == self.generations, "enters another generation than the newest")
        self._depart()
        workers = proposal.workers()
        plan = self._plan(proposal)
        settlement = settle(members, plan.num_stages, sharded=self.spec.sharded)
        moves = transfers(plan, settlement, members)
        check_plan(plan, number, workers, self._cluster(workers))
        self._check_settlement(proposal, settlement, plan.num_stages)
        self.tiers[settlement.tier] += 1
        for w in workers:
            self.workers[w].since = number
        load_s = self.spec.load_s if settlement.tier == 2 and number > 1 else 0.0
        ready_s = self.spec.times.rebuild_s + self._transfer_s(moves) + load_s
        slow = not self._known_slow.keys().isdisjoint(workers)
        self._later(ready_s, partial(self._begin, proposal, plan, settlement, slow))

    def _plan(self, proposal: Proposal) -> Plan:
        number, reason = proposal.number, proposal.reason
        workers, spec = proposal.workers(), self.spec
        cluster = self._cluster(workers)
        if self.plan is None or not any(a.since for a in proposal.members):
            return make_plan(spec.layout, workers, number, spec.costs, cluster)
        if not spec.relayout:
            return replan(self.plan, workers, number, reason, spec.costs, cluster)
        # Where nobody is slow, one plan does for all sets of so many workers.
        fresh = self.ideal.plan(len(workers)) if not cluster.slowness else None
        return replan_or_relayout(
            self.plan, workers, number, reason, spec.costs, cluster, fresh=fresh, search=True
        )

    def _cluster(self, workers: Iterable[int]) -> Cluster:
        """What is known of the workers: where they stand, and who has been slow for a while."""
        slowness = {w: self._known_slow[w] for w in workers if w in self._known_slow}
        return replace(self.failures.domains(workers), slowness=slowness)

    def _check_settlement(self, proposal: Proposal, settled: Settlement, num_stages: int) -> None:
        memories = [(a, self._memory(a)) for a in proposal.members]
        best = best_step(memories, num_stages, sharded=self.spec.sharded)
        require(settled.step == best, f"goes on from {settled.step} where {best} is to be had")
        if settled.tier == 0 and not self.spec.sharded:
            require(settled.step >= self.progress.committed, "committed steps were lost")  # type: ignore[operator]

    def _memory(self, announcement: Announcement) -> Memory:
        """What a member really holds, whatever it announced."""
        worker = self.workers[announcement.peer.worker]
        if worker.peer != announcement.peer or not worker.stages:
            return Memory(snapshots=set(announcement.snapshots))
        at = self.progress.committed
        return Memory(
            committed=at,
            pending=self.voted,
            voted=self.voted,
            knows_vote=True,
            stages=dict.fromkeys(worker.stages, at),
            snapshots=set(worker.snapshots),
        )

    def _transfer_s(self, moves: Sequence[Transfer]) -> float:
        """Seconds until all states have moved: the busiest link decides."""
        links: Counter[tuple[str, int]] = Counter()
        for move in moves:
            links["from", move.source] += 1
            links["to", move.target] += 1
        self.states_moved += len(moves)
        busiest = max(links.values(), default=0)
        return busiest * self.spec.stage_bytes / self.spec.bandwidth_bytes_s

    def _begin(
        self, proposal: Proposal, plan: Plan, settlement: Settlement, allows_for_slow: bool
    ) -> None:
        """The first step of a generation begins, unless it has been broken since."""
        machine, number = self.machine, proposal.number
        if machine is None or machine.state != "member" or machine.number != number:
            return
        peers = {p.worker: p for p in proposal.peers()}
        if machine.interrupted >= number or any(
            self.workers[w].peer != p for w, p in peers.items()
        ):
            return
        self._account()
        self._go_on_from(settlement)
        if self.plan is not None:
            self.microbatches_moved += moved_microbatches(self.plan, plan)
        self.plan = plan
        held: dict[int, list[int]] = {w: [] for w in plan.workers}
        for stage, holders in enumerate(plan.holders):
            for w in holders:
                held[w].append(stage)
        for w, stages in held.items():
            self.workers[w].stages = tuple(stages)
        self.voted = False
        self._allows_for_slow = allows_for_slow
        self._began_at_step = self.progress.committed
        self.phase = "running"
        self.progress.at_s, self.progress.into_s = self.now, 0.0
        self._set_pace()
        interval = self.intervals.interval(self.progress.step_s)
        self.progress.every, self.progress.save_s = interval.steps, self.spec.save_s
        if not self._allows_for_slow:
            self.ideal.learn(plan, self._pace[0])
            quality = self.ideal.step_s(len(plan.workers)) / self._pace[0]
            self.quality.append((self.now, quality))
        if machine.me.peer != self._leader(self._members()):
            self._hand_over()
        self._admit()
        if any(self.workers[w].leaving for w in plan.workers):
            self._ask("leave")

    def _go_on_from(self, settlement: Settlement) -> None:
        """Go back or forward to the settled step."""
        progress = self.progress
        step = settlement.step if settlement.step is not None else progress.durable
        if settlement.tier == 2 and self.plan is not None:
            self.intervals.rate.failed(self.now)
        if step > progress.committed:
            require(self.voted and step == progress.committed + 1, "a step from nowhere")
            progress.committed = step
            self.account.commit(1)
            self.account.lose(-1.0, self._cause)
        elif step < progress.committed:
            again = progress.roll_back(step)
            self.replayed += again
            self.account.commit(-again)
            self.account.lose(again, self._cause)

    def _check(self) -> None:
        """What must hold after every event."""
        progress = self.progress
        require(progress.durable <= progress.committed, "a save of what is not committed")
        if self.phase != "running":
            return
        assert self.plan is not None
        require(self.machine is not None and self.machine.state == "member", "runs leaderless")
        require(self.plan.generation == self.generations, "runs an older plan")


def _starts(plan: Plan) -> object:
    """The table of planned starts, by which equal orders are known; None where there is none."""
    return plan.actions.forward if isinstance(plan.actions, Orders) else None
