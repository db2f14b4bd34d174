"""Membership as a pure state machine: who is in the next generation, and who says so.

A worker that wants to be in the next generation announces itself: at its start, after a fault, or
at a step boundary when somebody wants to join or leave. One of the announced proposes the next
generation; the first proposal of a number stands. Whoever is named in it by incarnation answers,
and when all have answered, all enter. Whoever was named and is named no more has been evicted and
withdraws: nothing it does afterwards counts.

The machine knows nothing of stores, sockets and clocks: it is told events and time, and returns
instructions, each with its reason. What it is told of announcements, proposals and answers comes
in one order that is the same for all workers (entries may be told twice, and late); losses come
when they come, and stay: a peer that was lost once is not taken back in the same life.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from dtrain.scheduler.events import (
    Announce,
    Announced,
    Announcement,
    Answer,
    Answered,
    Enter,
    Event,
    Instruction,
    Interrupt,
    Lost,
    MembershipPolicy,
    Peer,
    Proposal,
    Propose,
    Proposed,
    Regroup,
    Tick,
    Withdraw,
    told,
)

__all__ = [
    "Announce",
    "Announced",
    "Announcement",
    "Answer",
    "Answered",
    "Enter",
    "Event",
    "ImpossibleTransitionError",
    "Instruction",
    "Interrupt",
    "Lost",
    "Membership",
    "MembershipPolicy",
    "Peer",
    "Proposal",
    "Propose",
    "Proposed",
    "Regroup",
    "Tick",
    "Withdraw",
]

_STORY_LENGTH = 50


class ImpossibleTransitionError(RuntimeError):
    """An event that cannot happen in this state; the message tells the story so far."""


@dataclass
class Membership:
    """One worker's view.

    ``state``: ``out``, ``gathering``, ``answering``, ``member`` or ``evicted``. ``known``: each
    worker's newest announcement. ``lives``: each worker's newest life. ``newest``: the newest
    proposal seen, entered or not. ``current``: the newest one entered. ``named``: the newest
    proposal that names each peer. ``proposed``: the newest number that this worker proposed.
    ``interrupted``: the newest number that it was in and knows to be broken. ``now_s``: the time of
    the newest step; ``since_s``: when it began to gather; ``loss_s``: when it last lost somebody
    who may be alive.
    """

    me: Announcement
    policy: MembershipPolicy
    state: str = "out"
    known: dict[int, Announcement] = field(default_factory=dict)
    lives: dict[int, Peer] = field(default_factory=dict)
    lost: dict[Peer, Lost] = field(default_factory=dict)
    current: Proposal | None = None
    newest: Proposal | None = None
    named: dict[Peer, int] = field(default_factory=dict)
    answers: set[Peer] = field(default_factory=set)
    story: deque[tuple[float, str, Event]] = field(
        default_factory=lambda: deque(maxlen=_STORY_LENGTH)
    )
    now_s: float = 0.0
    since_s: float = 0.0
    loss_s: float = 0.0
    proposed: int = 0
    interrupted: int = 0
    _former: frozenset[Peer] = frozenset()
    _round_at_loss: dict[Peer, int] = field(default_factory=dict)
    _heard_s: dict[Peer, float] = field(default_factory=dict)
    _unsaid: str = ""
    _echoed: bool = False

    def step(self, now: float, *events: Event) -> list[Instruction]:
        """Take events in and return what is to be done. ``now``: seconds on any clock.

        Raises:
            ImpossibleTransitionError: an event that no correct shell can send in this state.
        """
        self.now_s = now
        out: list[Instruction] = []
        for event in events:
            out += self._take(event)
        if self.state == "gathering":
            out += self._say()
            out += self._give_up() or self._try_to_propose()
        if self.state == "answering":
            out += self._try_to_enter()
        return out

    @property
    def number(self) -> int:
        """The number of the newest proposal seen; 0 before the first."""
        return self.newest.number if self.newest is not None else 0

    def watched(self) -> frozenset[Peer]:
        """Peers whose end or silence this worker must be told of, however it comes to know."""
        peers = self._former | {a.peer for a in self.known.values() if not self._evicted(a.peer)}
        ended = {p for p, lost in self.lost.items() if lost.certain}
        return peers - ended - {self.me.peer}

    def watches(self, peer: Peer) -> bool:
        """Whether ``peer`` is one of :meth:`watched`, without making them all out."""
        if peer == self.me.peer or (peer in self.lost and self.lost[peer].certain):
            return False
        known = self.known.get(peer.worker)
        announced = known is not None and known.peer == peer and not self._evicted(peer)
        return announced or peer in self._former

    def joiners(self) -> tuple[Peer, ...]:
        """Newcomers for whom a member should ask all to regroup at the next step boundary."""
        if self.state != "member":
            return ()
        return self._wanted_newcomers()

    # Taking events in

    def _take(self, event: Event) -> list[Instruction]:
        if self.state == "evicted":
            return []
        if not isinstance(event, Tick):
            self.story.append((self.now_s, self.state, event))
        match event:
            case Announced(announcement):
                return self._hear(announcement)
            case Lost():
                return self._lose(event)
            case Regroup(announcement, reason):
                return self._regroup(announcement, reason)
            case Proposed(proposal):
                return self._hear_proposal(proposal)
            case Answered(number, peer):
                if number == self.number:
                    return self._hear_answer(peer)
            case Tick():
                pass
        return []

    def _hear(self, announcement: Announcement) -> list[Instruction]:
        peer = announcement.peer
        if peer == self.me.peer:
            self._echoed = True
            return []
        if peer in self.lost and self.lives.get(peer.worker, peer) != peer:
            return []
        if peer.worker == self.me.peer.worker:
            if self._echoed:
                return self._withdraw("this worker was started again")
            # What was announced before this life announced itself is of an older one.
            self._lose(Lost(peer, "was started again", True))
            return []
        out = self._note_life(peer, newer=True)
        old = self.known.get(peer.worker)
        if old is not None and old.peer == peer and announcement.round <= old.round:
            return out
        self.known[peer.worker] = announcement
        self._heard_s[peer] = self.now_s
        if peer in self._former and announcement.seen >= self.number:
            # Its announcement takes the answer to this proposal back.
            out += self._broken(f"worker {peer.worker} left generation {self.number}")
        if self._vouches() and peer not in self._former and not self._evicted(peer):
            # Newcomers must not take this job for dead, however long its step takes.
            out.append(Answer(self.number, f"generation goes on, newcomer {peer.worker} may know"))
        return out

    def _vouches(self) -> bool:
        """Whether this worker speaks for a generation that is at work."""
        return self.state == "member" and self.me.peer == min(self._former)

    def _hear_answer(self, peer: Peer) -> list[Instruction]:
        if peer in self._former:
            self.answers.add(peer)
        newcomer = self.state == "gathering" and self.me.peer not in self.named and self._echoed
        if newcomer and peer in self.lost and self.lives.get(peer.worker) == peer:
            # It is lost for this worker alone, and a peer that was lost is not taken back.
            return self._withdraw(
                f"generation {self.number} goes on, with worker {peer.worker}, which this worker "
                f"lost: {self.lost[peer].reason}"
            )
        return []

    def _note_life(self, peer: Peer, *, newer: bool) -> list[Instruction]:
        """Learn of a life of a worker; ``newer``: it came after those that were heard of before.

        A worker's old life cannot be alive beside its new one: its supervisor saw it end.
        """
        old = self.lives.setdefault(peer.worker, peer)
        if old == peer:
            return []
        if newer:
            self.lives[peer.worker] = peer
        return self._lose(Lost(old if newer else peer, "was started again", True))

    def _lose(self, event: Lost) -> list[Instruction]:
        peer = event.peer
        if peer == self.me.peer:
            self._fail("this worker was told that it is lost itself")
        old = self.lost.get(peer)
        if old is None or (event.certain and not old.certain):
            self.lost[peer] = event
        if not event.certain:
            known = self.known.get(peer.worker)
            same = known is not None and known.peer == peer
            self._round_at_loss[peer] = known.round if known is not None and same else -1
            if old is None:
                self.loss_s = self.now_s
        if old is None and peer in self._former:
            return self._broken(f"worker {peer.worker} was lost: {event.reason}")
        return []

    def _broken(self, reason: str) -> list[Instruction]:
        """The newest generation cannot go on."""
        if self.state == "answering":
            self._gather(reason)
        elif self.state == "member" and self.interrupted < self.number:
            self.interrupted = self.number
            return [Interrupt(reason, self.number)]
        return []

    def _regroup(self, announcement: Announcement, reason: str) -> list[Instruction]:
        if self.state in ("gathering", "answering"):
            self._fail("Regroup while a generation is being agreed")
        if announcement.peer != self.me.peer:
            self._fail("Regroup of another peer")
        self.me = replace(announcement, round=self.me.round, unreachable=self.me.unreachable)
        self._gather(reason)
        return []

    def _hear_proposal(self, proposal: Proposal) -> list[Instruction]:
        if proposal.number <= self.number:
            return []
        was_named = self.me.peer in self.named
        self.newest = proposal
        self._former = proposal.peers()
        for member in proposal.members:
            if member.peer != self.me.peer:
                self._note_life(member.peer, newer=False)
            self.named[member.peer] = proposal.number
        self._pass_over(proposal)
        if self.me.peer not in self._former:
            return self._left_out(proposal, was_named=was_named)
        if self.state in ("out", "member"):
            self._fail(f"generation {proposal.number} names a worker that did not ask for it")
        lost = sorted(p.worker for p in self._former if p in self.lost)
        if lost:
            self._gather(f"proposed members {lost} are lost")
            return []
        self.state = "answering"
        self.answers = {self.me.peer}
        return [Answer(proposal.number, f"named in generation {proposal.number}")]

    def _pass_over(self, proposal: Proposal) -> None:
        """Newcomers that cannot reach a member, or that a member cannot reach, never get in."""
        unreachable = {p for a in proposal.members for p in a.unreachable}
        for a in self.known.values():
            if a.peer in unreachable or not self._former.isdisjoint(a.unreachable):
                self.named.setdefault(a.peer, proposal.number)

    def _left_out(self, proposal: Proposal, *, was_named: bool) -> list[Instruction]:
        number = proposal.number
        if self.me.leaving and self.state == "gathering":
            return self._withdraw(f"leaves as it asked; generation {number} goes on")
        if was_named:
            return self._withdraw(f"generation {number} goes on without this worker")
        at_odds = [
            a.peer.worker
            for a in proposal.members
            if self.me.peer in a.unreachable or a.peer in self.me.unreachable
        ]
        if self.state == "gathering" and at_odds:
            return self._withdraw(
                f"generation {number} goes on without this worker; no connection with {at_odds}"
            )
        # A newcomer that came too late for this one; its members will let it in.
        return []

    def _gather(self, reason: str) -> None:
        self.state = "gathering"
        self.answers = set()
        self.since_s = self.now_s
        self._unsaid = reason

    def _say(self) -> list[Instruction]:
        """Announce what has changed since this worker last announced itself."""
        unreachable = tuple(
            sorted(
                p
                for p, lost in self.lost.items()
                if not lost.certain and self.lives.get(p.worker) == p and not self._evicted(p)
            )
        )
        reason = self._unsaid
        if not reason and unreachable != self.me.unreachable:
            reason = f"cannot reach workers {[p.worker for p in unreachable]}"
        if not reason:
            return []
        self._unsaid = ""
        since = self.current.number if self.current is not None else 0
        self.me = replace(
            self.me, since=since, seen=self.number, round=self.me.round + 1, unreachable=unreachable
        )
        self.known[self.me.peer.worker] = self.me
        self.lives[self.me.peer.worker] = self.me.peer
        return [Announce(self.me, reason)]

    def _withdraw(self, reason: str) -> list[Instruction]:
        self.state = "evicted"
        return [Withdraw(reason)]

    # Deciding on the next generation

    def _gone(self, peer: Peer) -> bool:
        """Whether ``peer`` is certain not to take part: it ended, or it leaves."""
        if peer in self.lost and self.lost[peer].certain:
            return True
        known = self.known.get(peer.worker)
        return known is not None and known.peer == peer and known.leaving

    def _evicted(self, peer: Peer) -> bool:
        return peer in self.named and peer not in self._former

    def _awaited(self, peer: Peer) -> bool:
        """Whether a member of the newest proposal, as far as is known, will announce itself."""
        known = self.known.get(peer.worker)
        if known is not None and known.peer == peer and known.seen >= self.number:
            return False
        return peer not in self.lost and not self._gone(peer)

    def _make_room(self, veterans: frozenset[Peer]) -> list[Instruction]:
        """Withdraw for a new life that the others can reach, where they are too few without it."""
        if self._waited_s() < self.policy.split_s:
            return []
        # Losses aside: whoever cannot reach this worker may seem to it to have ended.
        chosen = self._chosen(self._present(lost_too=True), veterans)
        if len(chosen) >= self.policy.min_workers or self.me in chosen:
            return []
        return self._withdraw("the others cannot reach it and are too few to go on without it")

    def _present(self, *, lost_too: bool = False) -> list[Announcement]:
        """Announcements that still say where their peers stand, of peers that can take part.

        One that was lost and yet announced itself is there for others if not for this worker, for
        as long as it can be taken to be alive. ``lost_too``: as if nobody were lost.
        """
        out = []
        for a in self.known.values():
            peer = a.peer
            if self._evicted(peer) or a.seen < self.named.get(peer, 0) or a.leaving:
                continue
            if peer not in self._former and a.since > 0:
                continue
            if lost_too or not self._is_silent(a):
                out.append(a)
        return out

    def _is_silent(self, announcement: Announcement) -> bool:
        """Whether a peer was lost and nothing says that it lives for all that."""
        peer = announcement.peer
        if peer not in self.lost:
            return False
        heard_s = self.now_s - self._heard_s[peer]
        return (
            self.lost[peer].certain
            or announcement.round <= self._round_at_loss[peer]
            or heard_s > self.policy.split_s
        )

    def _chosen(self, present: list[Announcement], veterans: frozenset[Peer]) -> list[Announcement]:
        """The largest part of ``present``, roughly, that has no two who cannot reach each other.

        Newcomers give way to members, then whoever has the most that it cannot reach, then the
        higher worker: the same choice for all who heard the same.
        """
        by_peer = {a.peer: a for a in present}
        odds: dict[Peer, set[Peer]] = {}
        for a in present:
            for other in a.unreachable:
                if other in by_peer:
                    odds.setdefault(a.peer, set()).add(other)
                    odds.setdefault(other, set()).add(a.peer)
        while any(odds.values()):
            out = max(
                (p for p in odds if odds[p]),
                key=lambda p: (p not in self._former, p not in veterans, len(odds[p]), p.worker),
            )
            for other in odds.pop(out):
                odds[other].discard(out)
            del by_peer[out]
        return list(by_peer.values())

    def _number_wanted(self, able: int) -> int:
        """How many of so many that could take part are members; the others are spares."""
        spares, launched = self.policy.spares, self.policy.world_size
        return max(able - spares, min(able, launched - spares)) if spares else able

    def _without_spares(self, able: list[Announcement]) -> list[Announcement]:
        """Whom of those that could take part the job wants: members first, then lower workers."""
        order = sorted(able, key=lambda a: (a.peer not in self._former, a.peer.worker))
        return order[: self._number_wanted(len(able))]

    def _wanted_newcomers(self) -> tuple[Peer, ...]:
        """Newcomers that the newest generation's members would let in."""
        stay = sum(not self._gone(p) and p not in self.lost for p in self._former)
        new = sorted(a.peer for a in self._present() if a.peer not in self._former)
        return tuple(new[: max(0, self._number_wanted(stay + len(new)) - stay)])

    def _is_spare(self) -> bool:
        """Whether this worker waits because the job has as many as it wants."""
        return self.policy.spares > 0 and self.me.peer not in self._wanted_newcomers()

    def _waited_s(self) -> float:
        return self.now_s - self.since_s

    def _give_up(self) -> list[Instruction]:
        """Withdraw where waiting cannot help."""
        ignored = self.me.peer not in self.named and self._waited_s() >= self.policy.gather_s
        if not self.me.leaving and (not ignored or self._is_spare()):
            return []
        some_stay = any(not self._gone(p) and p not in self.lost for p in self._former)
        if self.me.leaving and not some_stay:
            return self._withdraw("leaves as it asked; nobody stays")
        if ignored and some_stay:
            # The members may have lost sight of this life, which they then never take in.
            return self._withdraw(
                f"generation {self.number} did not let it in within {self._waited_s():.0f} s"
            )
        return []

    def _try_to_propose(self) -> list[Instruction]:
        number = self.number + 1
        if self.me.leaving or number <= self.proposed:
            return []
        if any(self._awaited(p) for p in self._former):
            return []
        present = self._present()
        here = {a.peer for a in present}
        veterans = self._veterans()
        able = self._chosen(present, veterans)
        chosen = self._without_spares(able)
        survivors = [a for a in chosen if a.peer in self._former]
        if len(chosen) < max(1, self.policy.min_workers) and not self._ends_short(survivors):
            return self._make_room(veterans)
        if self.me.peer != min(survivors or chosen, key=lambda a: a.peer.worker).peer:
            return []
        if self._should_wait(here, veterans, [a for a in survivors if a.peer in veterans]):
            return []
        reason = self._why_now(able, chosen, survivors)
        if reason is None:
            return []
        self.proposed = number
        members = tuple(sorted(chosen, key=lambda a: a.peer))
        return [Propose(Proposal(number, members, reason), reason)]

    def _ends_short(self, survivors: list[Announcement]) -> bool:
        """Whether too few have waited long enough, and meet once more to save what they have."""
        return bool(survivors) and self._waited_s() >= self.policy.wait_s

    def _veterans(self) -> frozenset[Peer]:
        """Members of the newest proposal who may have state that its other members have not.

        From what all have heard alone: two who cannot reach each other must agree on who gives way.
        """
        newest = self.newest
        if newest is None:
            return self._former
        for a in self.known.values():
            # Nothing is committed before all members have the state, so one is as good as all.
            formed = a.since == newest.number and (a.stages or a.snapshots or a.committed)
            if formed and a.peer in self._former:
                return self._former
        had = {a.peer for a in newest.members if a.since > 0 and (a.stages or a.snapshots)}
        return frozenset(had) or self._former

    def _should_wait(
        self, here: set[Peer], veterans: frozenset[Peer], able: list[Announcement]
    ) -> bool:
        """Whether veterans that are not here may be alive and should be let go first."""
        away = [p for p in veterans if p not in here]
        patience_s = self.policy.split_s
        if able:
            # The others may be the larger side of a split network.
            wait = sum(not self._gone(p) for p in away) >= len(able)
        else:
            # Nobody here has any state. Whether the job has stopped is certain where all its
            # members have new lives; where one has ended, because a generation commits nothing
            # without all its members, but others may be about to announce themselves; otherwise
            # only time tells.
            wait = any(self.lives.get(p.worker) == p for p in away)
            if not any(self._gone(p) for p in self._former):
                patience_s = self.policy.gather_s
        return wait and self.now_s - max(self.since_s, self.loss_s) < patience_s

    def _why_now(
        self, able: list[Announcement], chosen: list[Announcement], survivors: list[Announcement]
    ) -> str | None:
        """The reason to propose ``chosen`` of ``able`` at this moment, or None to wait for more."""
        spares = f", {len(able) - len(chosen)} of them as spares" if len(able) > len(chosen) else ""
        if not survivors:
            waited_s = self._waited_s()
            if len(able) >= self.policy.world_size:
                return f"all {len(able)} workers have announced themselves{spares}"
            if waited_s >= self.policy.gather_s:
                came = f"{len(able)} of {self.policy.world_size} workers came in {waited_s:.0f} s"
                return came + spares
            return None
        gone = sorted(p.worker for p in self._former - {a.peer for a in survivors})
        new = sorted(a.peer.worker for a in chosen if a.peer not in self._former)
        return (
            f"{len(survivors)} of {len(self._former)} members go on"
            + (f", without {gone}" if gone else "")
            + (f", with new {new}" if new else "")
        )

    def _try_to_enter(self) -> list[Instruction]:
        standing = self.newest
        assert standing is not None
        if len(self.answers) < len(self._former):
            return []
        self.state = "member"
        self.current = standing
        return [Enter(standing, f"all {len(standing.members)} members answered")]

    def _fail(self, what: str) -> None:
        story = "; ".join(f"{at:.3f} {state}: {told(event)}" for at, state, event in self.story)
        raise ImpossibleTransitionError(f"{what}; story: {story}")
