"""One membership machine that sees a whole job: that of the lowest surviving worker.

What all other workers would say and answer is made up from what they hold; when the worker itself
is lost, the machine of the next one is brought up from what the job's log says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from dtrain.scheduler import events as core
from dtrain.scheduler.events import Announcement, Peer, Proposal
from dtrain.scheduler.membership import Membership
from dtrain.scheduler.risk import RiskLedger
from dtrain.scheduler.simulator.clock import Clock, Do
from dtrain.scheduler.simulator.errors import require
from dtrain.scheduler.simulator.progress import Progress
from dtrain.scheduler.simulator.spec import JobSpec

TICK_S = 0.25
"""Seconds between two looks of a machine that waits."""


@dataclass
class Slot:
    """A slot for a worker: whether it is provisioned, and the life of its process."""

    provisioned: bool
    peer: Peer | None = None
    lives: int = 0
    round: int = 0
    since: int = 0
    stages: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    leaving: bool = False
    away_until_s: float = 0.0


class LeaderView(ABC):
    """The machine, the workers around it, and virtual time.

    ``generations``: the number of the newest proposal. ``voted``: the step that was under way when
    training stopped has been voted on.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.clock = Clock()
        self.workers = {w: Slot(True) for w in range(spec.workers)}
        self.machine: Membership | None = None
        self.ledger = RiskLedger()
        self.progress = Progress(1.0)
        self.generations = 0
        self.voted = False
        self._last: Proposal | None = None
        self._lost: dict[Peer, core.Lost] = {}

    # For the run around it

    @abstractmethod
    def _enter(self, proposal: Proposal) -> None:
        """All have answered."""

    @abstractmethod
    def _ask(self, cause: str) -> None:
        """Somebody wants to join or to leave: let all regroup at the next step boundary."""

    # Time

    @property
    def now(self) -> float:
        """Virtual time, in seconds."""
        return self.clock.now

    def _at(self, time_s: float, action: Do) -> None:
        self.clock.at(time_s, None, action)

    def _later(self, delay_s: float, action: Do) -> None:
        self._at(self.now + delay_s, action)

    def _alive(self, workers: Iterable[int]) -> list[int]:
        return [w for w in workers if w in self.workers and self.workers[w].peer is not None]

    # The leader's machine

    def _members(self) -> frozenset[Peer]:
        if self.machine is None or self.machine.newest is None:
            return frozenset()
        return self.machine.newest.peers()

    def _tell(self, *events: core.Event) -> None:
        """Tell the machine, and do what it says."""
        assert self.machine is not None
        for instruction in self.machine.step(self.now, *events):
            match instruction:
                case core.Interrupt(reason):
                    self._later(self.spec.times.agree_s / 2, partial(self._regroup, reason))
                case core.Announce(announcement):
                    self._announce(announcement)
                case core.Propose(proposal):
                    self._propose(proposal)
                case core.Answer(number) if self.machine.state == "answering":
                    self._later(self.spec.times.agree_s / 2, partial(self._answer, number))
                case core.Enter(proposal):
                    self._enter(proposal)
                case core.Withdraw():
                    self._withdraw()

    def _start_all(self) -> None:
        """The job begins."""
        for w in self.workers:
            self._new_life(w)
        self._look_anew()

    def _new_life(self, w: int) -> Peer | None:
        worker = self.workers[w]
        if not worker.provisioned or worker.peer is not None or worker.away_until_s > self.now:
            return None
        peer = worker.peer = Peer(w, f"{w}.{worker.lives}")
        worker.lives, worker.round, worker.since = worker.lives + 1, 1, 0
        worker.leaving = False
        self.ledger.joined(self.now, w)
        return peer

    def _start(self, w: int) -> None:
        """A process starts, where there is a device for it, and announces itself."""
        peer = self._new_life(w)
        if peer is None:
            return
        if self.machine is None:
            self._look_anew()
            return
        number = self.machine.number
        if self.machine.state == "gathering" and self._leader(self._members()) == peer:
            self._hand_over()
            return
        self._tell(core.Announced(Announcement(peer, seen=number, round=1)))
        self._admit()

    def _admit(self) -> None:
        if self.machine is not None and self.machine.joiners():
            self._ask("join")

    def _notice(self, losses: list[core.Lost]) -> None:
        for lost in losses:
            self._lost[lost.peer] = lost
        if self.machine is not None:
            self._tell(*losses)

    def _regroup(self, reason: str) -> None:
        """All members leave the generation and say where they stand."""
        machine = self.machine
        if machine is not None and machine.state == "member":
            self._tell(core.Regroup(self._standing(machine.me.peer.worker), reason))

    def _standing(
        self, w: int, round: int = 0, seen: int = 0, unreachable: tuple[Peer, ...] = ()
    ) -> Announcement:
        """What a worker says of itself."""
        worker = self.workers[w]
        assert worker.peer is not None
        began = bool(worker.stages) and worker.since > 0
        return Announcement(
            worker.peer,
            worker.since,
            seen,
            self.progress.committed if began else 0,
            began and self.voted,
            began and self.voted,
            () if self.spec.sharded else worker.stages,
            worker.snapshots,
            round,
            worker.leaving,
            unreachable,
        )

    def _announce(self, mine: Announcement) -> None:
        """The leader announced itself; so do all other members that live."""
        said: list[core.Event] = [core.Announced(mine)]
        for peer in sorted(self._members(), key=lambda p: p.worker):
            worker = self.workers[peer.worker]
            if worker.peer == peer and peer != mine.peer:
                worker.round += 1
                says = self._standing(peer.worker, worker.round, mine.seen, mine.unreachable)
                said.append(core.Announced(says))
        self._tell(*said)
        self._tick()

    def _tick(self) -> None:
        """Time passes for a machine that waits."""
        machine = self.machine
        if machine is not None and machine.state == "gathering":
            self._later(TICK_S, lambda: self._wake(machine))

    def _wake(self, machine: Membership) -> None:
        if machine is self.machine and machine.state == "gathering":
            self._tell(core.Tick())
            self._tick()

    def _propose(self, proposal: Proposal) -> None:
        require(proposal.number == self.generations + 1, "a number was left out")
        workers = proposal.workers()
        require(len(set(workers)) == len(workers), "two lives of one worker in a generation")
        require(len(workers) >= self.spec.min_workers, f"{len(workers)} members are too few")
        for peer in proposal.peers():
            gone = self._lost.get(peer)
            require(gone is None, f"{peer} is proposed although it was lost")
        self.generations = proposal.number
        self._tell(core.Proposed(proposal))

    def _answer(self, number: int) -> None:
        machine = self.machine
        if machine is None or machine.state != "answering" or machine.number != number:
            return
        answers = [
            core.Answered(number, peer)
            for peer in sorted(self._members(), key=lambda p: p.worker)
            if self.workers[peer.worker].peer == peer
        ]
        self._tell(*answers)

    def _withdraw(self) -> None:
        """The leader was left out, as it asked: another one leads."""
        assert self.machine is not None
        worker = self.workers[self.machine.me.peer.worker]
        require(worker.leaving, "the leader withdraws without having asked for it")
        worker.peer, worker.stages, worker.snapshots = None, (), ()
        self._depart()
        self._hand_over()

    def _depart(self) -> None:
        """Processes that were left out as they asked end."""
        members = self._members()
        for worker in self.workers.values():
            if worker.leaving and worker.peer is not None and worker.peer not in members:
                worker.peer, worker.stages, worker.snapshots = None, (), ()

    def _hand_over(self) -> None:
        """See things through the machine of the lowest worker that is left."""
        old = self.machine
        assert old is not None
        self.machine, self._last = None, old.newest
        self._look_anew()
        new: Membership | None = self.machine
        if old.state == "gathering" and new is not None and new.state == "member":
            self._later(self.spec.times.agree_s / 2, partial(self._regroup, "the leader is gone"))

    def _leader(self, former: frozenset[Peer]) -> Peer:
        """Who proposes: the lowest of the former members that are left, else of the newcomers."""
        living = [(w.leaving, p) for w in self.workers.values() if (p := w.peer) is not None]
        return min(living, key=lambda found: (found[1] not in former, *found))[1]

    def _look_anew(self) -> None:
        """Bring up a machine with what the job's log says, where anybody is alive."""
        living = [p for w in self.workers.values() if (p := w.peer) is not None]
        if not living:
            return
        newest = self._last
        former = newest.peers() if newest is not None else frozenset()
        me = self._leader(former)
        self.machine = Membership(Announcement(me), self.spec.membership_policy())
        log: list[core.Event] = []
        if newest is not None:
            log += [core.Announced(a) for a in newest.members]
            log.append(core.Proposed(newest))
        if me in former:
            assert newest is not None
            own = next(a for a in newest.members if a.peer == me)
            self.machine.step(self.now, core.Regroup(own, "takes over"), *log)
            if self.workers[me.worker].since == newest.number:
                answers = [core.Answered(newest.number, p) for p in newest.peers()]
                self.machine.step(self.now, *answers)
        else:
            self._tell(*log, core.Regroup(Announcement(me), "started"))
        known = self.machine.number
        losses = [self._lost[p] for p in sorted(former) if p in self._lost]
        newcomers = [
            core.Announced(Announcement(p, seen=known, round=1))
            for p in living
            if p not in former and p != me
        ]
        self._tell(*losses, *newcomers)
        if self.machine is not None and self.machine.state == "answering":
            self._later(self.spec.times.agree_s / 2, lambda: self._answer(known))
        self._tick()
