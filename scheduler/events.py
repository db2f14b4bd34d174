"""What the membership machine is told and what it answers: announcements, events, instructions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True, order=True)
class Peer:
    """A worker in one of its lives: a worker that was started again is another peer."""

    worker: int
    incarnation: str

    def __hash__(self) -> int:
        # Incarnations differ, and Python remembers a string's hash.
        return hash(self.incarnation)


@dataclass(frozen=True)
class Announcement:
    """What a peer says of itself.

    ``since``: the generation that it was last a member of, 0 for a newcomer. ``seen``: the newest
    proposal that it knew of, by which an older announcement is told from a new one.
    ``committed``: steps whose updates it has applied. ``pending``: it holds the reduced gradients
    of the step after. ``voted``: it saw the full vote on that step. ``stages``: stages whose state
    it holds at ``committed``, complete and without the others. ``snapshots``: (step, stage) of the
    states in its host memory. ``round``: grows with each announcement of the peer. ``leaving``: it
    asks to be left out. ``unreachable``: peers that it has lost without knowing that they ended.

    The machine itself fills ``since``, ``seen``, ``round`` and ``unreachable``.
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
    unreachable: tuple[Peer, ...] = ()

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Announcement:
        """From ``dataclasses.asdict`` of an announcement, also after a way through JSON."""
        fields = dict(raw)
        fields["peer"] = Peer(**raw["peer"])
        fields["stages"] = tuple(raw["stages"])
        fields["snapshots"] = tuple((step, stage) for step, stage in raw["snapshots"])
        fields["unreachable"] = tuple(Peer(**p) for p in raw["unreachable"])
        return cls(**fields)


@dataclass(frozen=True)
class Proposal:
    """The membership of generation ``number``, with what each member announced."""

    number: int
    members: tuple[Announcement, ...]
    reason: str

    def peers(self) -> frozenset[Peer]:
        """The members."""
        return self._peers

    @cached_property
    def _peers(self) -> frozenset[Peer]:
        return frozenset(a.peer for a in self.members)

    def workers(self) -> tuple[int, ...]:
        """The members' workers, sorted."""
        return tuple(sorted(a.peer.worker for a in self.members))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Proposal:
        """From ``dataclasses.asdict`` of a proposal, also after a way through JSON."""
        members = tuple(Announcement.from_json(m) for m in raw["members"])
        return cls(raw["number"], members, raw["reason"])


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


@dataclass(frozen=True)
class Interrupt:
    """Generation ``number``, that this worker is in, is broken: leave it and send ``Regroup``."""

    reason: str
    number: int


Instruction = Announce | Propose | Answer | Enter | Withdraw | Interrupt


def told(event: Event) -> str:
    """An event in a few words, for a story."""
    match event:
        case Announced(a) | Regroup(a, _):
            what = f"worker {a.peer.worker} ({a.peer.incarnation}) round {a.round} seen {a.seen}"
        case Proposed(p):
            what = f"generation {p.number} of {list(p.workers())}"
        case Answered(number, peer):
            what = f"generation {number} by worker {peer.worker}"
        case Lost(peer, reason, certain):
            what = f"worker {peer.worker} ({peer.incarnation}) {reason}, certain: {certain}"
        case _:
            what = ""
    return f"{type(event).__name__} {what}".rstrip()


@dataclass(frozen=True)
class MembershipPolicy:
    """How long to wait for whom.

    ``world_size``: workers that the job was launched with; the first generation waits for them.
    ``min_workers``: fewest with which to work. ``gather_s``: how long newcomers without a running
    job wait for the rest of ``world_size``, how long they wait before they replace a job whose
    members are all out of their reach, and how long a newcomer waits to be let in before it makes
    room for a new life of the worker. Members that cannot reach the store must have stopped by
    then. ``split_s``: how much longer the smaller side waits when the other may be alive.
    ``wait_s``: how long members that are fewer than ``min_workers`` wait for more, before they form
    a last generation, to save what they hold. ``spares``: how many workers wait, ready, until a
    member is lost.
    """

    world_size: int
    min_workers: int = 1
    gather_s: float = 300.0
    split_s: float = 3.0
    wait_s: float = math.inf
    spares: int = 0
