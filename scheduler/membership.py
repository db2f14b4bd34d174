"""Membership as a pure state machine: who is in the next generation, and who says so.

A worker that wants to be in the next generation announces itself: at its start, after a fault, or
at a step boundary when somebody wants to join or leave. One of the announced proposes the next
generation; the first proposal of a number stands (the store's compare-and-set sees to that).
Whoever is named in it by incarnation answers, and when all have answered, all enter. Whoever was
a member and is not named has been evicted and withdraws: nothing it does afterwards counts.

The machine knows nothing of stores, sockets and clocks: it is told events and time, and returns
instructions, each with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, order=True)
class Peer:
    """A worker in one of its lives: a worker that was started again is another peer."""

    worker: int
    incarnation: str


@dataclass(frozen=True)
class Announcement:
    """What a peer says of itself.

    ``since``: the generation that it was last a member of, 0 for a newcomer. ``seen``: the newest
    proposal that it knew of, by which an older announcement is told from a new one.
    ``committed``: steps whose updates it has applied. ``pending``: it holds the reduced gradients
    of the step after.
    ``voted``: it saw the full vote on that step. ``stages``: stages whose state it holds at
    ``committed``. ``snapshots``: (step, stage) of the states in its host memory. ``round``: grows
    with each announcement of the peer. ``leaving``: it asks to be left out.
    """

    peer: Peer
    since: int = 0
    seen: int = 0
    committed: int = 0
    pending: bool = False
    voted: bool = False
    stages: tuple[int, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()
    round: int = 0
    leaving: bool = False


@dataclass(frozen=True)
class Proposal:
    """The membership of generation ``number``, with what each member announced."""

    number: int
    members: tuple[Announcement, ...]
    reason: str

    def peers(self) -> frozenset[Peer]:
        """The members."""
        return frozenset(a.peer for a in self.members)

    def workers(self) -> tuple[int, ...]:
        """The members' workers, sorted."""
        return tuple(sorted(a.peer.worker for a in self.members))


# Events


@dataclass(frozen=True)
class Announced:
    """An announcement was seen."""

    announcement: Announcement


@dataclass(frozen=True)
class Lost:
    """A peer is gone. ``certain``: its process ended; else it is only silent or unreachable."""

    peer: Peer
    reason: str
    certain: bool


@dataclass(frozen=True)
class Regroup:
    """This worker left its generation and stands at a step boundary as ``announcement`` says."""

    announcement: Announcement
    reason: str


@dataclass(frozen=True)
class Proposed:
    """A proposal stands."""

    proposal: Proposal


@dataclass(frozen=True)
class Answered:
    """A member answered the proposal of ``number``."""

    number: int
    peer: Peer


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Announced | Lost | Regroup | Proposed | Answered | Tick


# Instructions


@dataclass(frozen=True)
class Announce:
    """Publish the announcement."""

    announcement: Announcement
    reason: str


@dataclass(frozen=True)
class Propose:
    """Publish the proposal unless one of its number stands already."""

    proposal: Proposal
    reason: str


@dataclass(frozen=True)
class Answer:
    """Publish this worker's answer to the proposal of ``number``."""

    number: int
    reason: str


@dataclass(frozen=True)
class Enter:
    """Everybody answered: form the generation."""

    proposal: Proposal
    reason: str


@dataclass(frozen=True)
class Withdraw:
    """This peer has been evicted and must do nothing more."""

    reason: str


Instruction = Announce | Propose | Answer | Enter | Withdraw


@dataclass(frozen=True)
class MembershipPolicy:
    """How long to wait for whom.

    ``world_size``: workers that the job was launched with; the first generation waits for them.
    ``min_workers``: fewest with which to work. ``gather_s``: how long newcomers without a running
    job wait for the rest of ``world_size``. ``split_s``: how much longer the smaller side waits
    when the other side may be alive.
    """

    world_size: int
    min_workers: int = 1
    gather_s: float = 300.0
    split_s: float = 3.0


class ImpossibleTransitionError(RuntimeError):
    """An event that cannot happen in this state; the message tells the story so far."""


@dataclass
class Membership:
    """One worker's view.

    ``state``: ``out``, ``gathering``, ``answering``, ``member`` or ``evicted``. ``newest``: the newest proposal seen, entered or not. ``current``: the newest one entered.
    ``named``: the newest proposal that names each peer.
    """

    me: Announcement
    policy: MembershipPolicy
    state: str = "out"
    known: dict[int, Announcement] = field(default_factory=dict)
    lost: dict[Peer, Lost] = field(default_factory=dict)
    current: Proposal | None = None
    newest: Proposal | None = None
    named: dict[Peer, int] = field(default_factory=dict)
    answers: set[Peer] = field(default_factory=set)
    story: list[str] = field(default_factory=list)
    since_s: float = 0.0
    tried: int = 0

    def step(self, now: float, *events: Event) -> list[Instruction]:
        """Take events in and return what is to be done. ``now``: seconds on any clock.

        Raises:
            ImpossibleTransitionError: an event that no correct shell can send in this state.
        """
        out: list[Instruction] = []
        for event in events:
            out += self._take(now, event)
        if self.state == "gathering":
            out += self._try_to_propose(now)
        if self.state == "answering":
            out += self._try_to_enter()
        return out

    @property
    def number(self) -> int:
        """The number of the newest proposal seen; 0 before the first."""
        return self.newest.number if self.newest is not None else 0

    def _take(self, now: float, event: Event) -> list[Instruction]:
        self.story.append(f"{now:.3f} {self.state}: {type(event).__name__}")
        del self.story[:-50]
        if self.state == "evicted":
            return []
        match event:
            case Announced(announcement):
                self._hear(announcement)
            case Lost(peer):
                return self._lose(now, peer, event)
            case Regroup(announcement, reason):
                return self._regroup(now, announcement, reason)
            case Proposed(proposal):
                return self._hear_proposal(now, proposal)
            case Answered(number, peer):
                if self.state == "answering" and number == self.number:
                    self.answers.add(peer)
            case Tick():
                pass
        return []

    def _hear(self, announcement: Announcement) -> None:
        old = self.known.get(announcement.peer.worker)
        if old is None or old.peer == announcement.peer:
            if old is None or announcement.round >= old.round:
                self.known[announcement.peer.worker] = announcement
        elif announcement.peer not in self.lost:
            # A new life: the old one cannot be alive beside it, its supervisor saw it end.
            self.lost.setdefault(old.peer, Lost(old.peer, "was started again", True))
            self.known[announcement.peer.worker] = announcement

    def _lose(self, now: float, peer: Peer, event: Lost) -> list[Instruction]:
        if peer == self.me.peer:
            self._fail("this worker was told that it is lost itself")
        known = self.lost.setdefault(peer, event)
        if event.certain and not known.certain:
            self.lost[peer] = event
        if self.state == "answering" and self.newest is not None and peer in self.newest.peers():
            return self._announce_again(now, f"worker {peer.worker} was lost: {event.reason}")
        return []

    def _regroup(self, now: float, announcement: Announcement, reason: str) -> list[Instruction]:
        if self.state in ("gathering", "answering"):
            self._fail("Regroup while a generation is being agreed")
        if announcement.peer != self.me.peer:
            self._fail("Regroup of another peer")
        self.me = replace(announcement, round=self.me.round)
        return self._announce_again(now, reason)

    def _announce_again(self, now: float, reason: str) -> list[Instruction]:
        since = self.current.number if self.current is not None else 0
        self.me = replace(self.me, since=since, seen=self.number, round=self.me.round + 1)
        self.known[self.me.peer.worker] = self.me
        self.state = "gathering"
        self.answers = set()
        self.since_s = now
        return [Announce(self.me, reason)]

    def _hear_proposal(self, now: float, proposal: Proposal) -> list[Instruction]:
        if proposal.number <= self.number:
            return []
        self.newest = proposal
        for announcement in proposal.members:
            self._hear(announcement)
            self.named[announcement.peer] = proposal.number
        if self.me.peer not in proposal.peers():
            if self.current is not None or self.state == "answering":
                self.state = "evicted"
                return [Withdraw(f"generation {proposal.number} goes on without this worker")]
            # A newcomer that came too late for this one; its members will let it in.
            return []
        if self.state in ("out", "member"):
            self._fail(f"generation {proposal.number} names a worker that did not ask for it")
        lost = sorted(p.worker for p in proposal.peers() if p in self.lost)
        if lost:
            return self._announce_again(now, f"proposed members {lost} are lost")
        self.state = "answering"
        self.answers = set()
        return [Answer(proposal.number, f"named in generation {proposal.number}")]

    def _try_to_propose(self, now: float) -> list[Instruction]:
        present = self._present()
        if self.me.leaving or self.me not in present:
            return []
        former = self.newest.peers() if self.newest is not None else frozenset()
        survivors = [a for a in present if a.peer in former]
        leader = min(survivors or present, key=lambda a: a.peer.worker)
        number = self.number + 1
        if leader.peer != self.me.peer or number <= self.tried:
            return []
        reason = self._why_now(now, present, survivors)
        if reason is None:
            return []
        self.tried = number
        members = tuple(sorted(present, key=lambda a: a.peer))
        return [Propose(Proposal(number, members, reason), reason)]

    def _present(self) -> list[Announcement]:
        """Announcements that still say where their peers stand, of peers that can take part."""
        return [
            a
            for a in self.known.values()
            if a.peer not in self.lost and not a.leaving and a.seen >= self.named.get(a.peer, 0)
        ]

    def _why_now(
        self, now: float, present: list[Announcement], survivors: list[Announcement]
    ) -> str | None:
        """The reason to propose ``present`` at this moment, or None to wait."""
        waited = now - self.since_s
        former = self.newest.peers() if self.newest is not None else frozenset()
        here = {a.peer for a in present}
        leaving = {a.peer for a in self.known.values() if a.leaving}
        if any(p not in here and p not in self.lost and p not in leaving for p in former):
            return None
        if len(present) < self.policy.min_workers:
            return None
        if not survivors:
            if len(present) >= self.policy.world_size:
                return f"all {len(present)} workers have announced themselves"
            if waited >= self.policy.gather_s:
                return f"{len(present)} of {self.policy.world_size} workers came in {waited:.0f} s"
            return None
        silent = [p for p in former if p in self.lost and not self.lost[p].certain]
        if len(silent) >= len(survivors) and waited < self.policy.split_s:
            # The others may be a larger side of a split network: let them go first.
            return None
        gone = sorted(p.worker for p in former - here)
        new = sorted(a.peer.worker for a in present if a.peer not in former)
        return (
            f"{len(survivors)} of {len(former)} members go on"
            + (f", without {gone}" if gone else "")
            + (f", with new {new}" if new else "")
        )

    def _try_to_enter(self) -> list[Instruction]:
        standing = self.newest
        assert standing is not None
        if not standing.peers() <= self.answers | {self.me.peer}:
            return []
        self.state = "member"
        self.current = standing
        return [Enter(standing, f"all {len(standing.members)} members answered")]

    def _fail(self, what: str) -> None:
        raise ImpossibleTransitionError(f"{what}; story: {'; '.join(self.story)}")
