"""Events and instructions in a line each, for stories and transcripts."""

from __future__ import annotations

from dtrain.scheduler import events as core
from dtrain.scheduler.events import Announcement


def describe(what: object) -> str:
    """An event or instruction in a line."""
    match what:
        case core.Announced(a):
            return f"Announced {_standing(a)}"
        case core.Announce(a, reason):
            return f"Announce {_standing(a)}: {reason}"
        case core.Regroup(a, reason):
            return f"Regroup at step {a.committed}: {reason}"
        case core.Proposed(p):
            return f"Proposed generation {p.number} {_names(p)}"
        case core.Propose(p, reason):
            return f"Propose generation {p.number} {_names(p)}: {reason}"
        case core.Answered(number, peer):
            return f"Answered generation {number} by {peer.worker}{peer.incarnation}"
        case core.Answer(number, reason):
            return f"Answer generation {number}: {reason}"
        case core.Lost(peer, reason, certain):
            sure = "certainly" if certain else "perhaps"
            return f"Lost {peer.worker}{peer.incarnation} {sure}: {reason}"
        case core.Enter(p, reason):
            return f"Enter generation {p.number}: {reason}"
        case core.Withdraw(reason) | core.Interrupt(reason):
            return f"{type(what).__name__}: {reason}"
    return str(what)


def _names(proposal: core.Proposal) -> str:
    return " ".join(f"{a.peer.worker}{a.peer.incarnation}" for a in proposal.members)


def _standing(a: Announcement) -> str:
    said = f"{a.peer.worker}{a.peer.incarnation} round {a.round} since {a.since} seen {a.seen}"
    said += f" step {a.committed}{'+' if a.pending else ''}{'!' if a.voted else ''}"
    said += f" stages {list(a.stages)}"
    if a.leaving:
        said += " leaving"
    if a.unreachable:
        said += " cannot reach " + " ".join(f"{p.worker}{p.incarnation}" for p in a.unreachable)
    return said
