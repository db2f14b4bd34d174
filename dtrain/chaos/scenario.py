"""What a scenario is: a job, what happens to it, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Ends = Literal["done", "resumable", "either"]
Deed = Literal["kill", "cut", "mute", "delay", "heal", "start", "join", "sigterm", "stop", "cont"]


@dataclass(frozen=True)
class Shape:
    """The job's first plan.

    ``holders[s]``: the workers that hold stage ``s``; ``executors[s]``: those of them that run it.
    """

    workers: int
    holders: tuple[tuple[int, ...], ...]
    executors: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Act:
    """Something that happens to a whole host, from outside.

    ``step``: once so many steps are committed; ``event``: after the first such event instead;
    ``after_s``: so many seconds later still. ``host``: its number. Deeds: ``kill`` every process
    at once; ``cut`` its network; ``mute`` it (what it sends is dropped, one way); ``delay`` what it
    sends and receives by ``delay_s``; ``heal`` the network; ``start`` an agent there; ``join``:
    two workers by dtrain join there; ``sigterm`` its agent; ``stop`` and ``cont`` every process
    (SIGSTOP, SIGCONT).
    """

    deed: Deed
    host: int
    step: int = 0
    event: str | None = None
    after_s: float = 0.0
    delay_s: float = 0.2

    def describe(self) -> str:
        """In a few words."""
        when = f"after event {self.event}" if self.event else f"at step {self.step}"
        late = f" + {self.after_s:g} s" if self.after_s else ""
        return f"{self.deed} host {self.host} {when}{late}"


@dataclass(frozen=True)
class Expectation:
    """What must come of a scenario, besides the promise.

    The promise is always checked: in the end the weights, the loss of every step and the seeds are
    those of the run without a fault, every step is committed once, and nothing is left behind.

    ``ends``: the job is ``done`` with exit code 0; or ends in a ``resumable`` state, is started
    again without faults and then is done; or ``either``. ``replayed``: most steps discarded and
    run again. ``lost``: most steps rolled back to a checkpoint or snapshot, 0 means that
    metrics.jsonl names every step once. ``recovery_s``: longest pause from a fault to the next
    committed step. ``fired``: faults that must have struck. ``evicted``: whether workers may be
    evicted. ``says``: a text that must stand in the output or among the events' reasons.
    ``workers``: fewest at the end. ``scratch``: temporary folders may stay, because all processes
    that could remove them were killed at once.
    """

    ends: Ends = "done"
    replayed: int = 1
    lost: int = 0
    recovery_s: float = 10.0
    fired: int = 1
    evicted: bool = True
    says: str | None = None
    workers: int = 1
    scratch: bool = False


Faults = Callable[[Shape], Sequence[dict[str, Any]]]


def no_faults(shape: Shape) -> Sequence[dict[str, Any]]:
    """Of a job that nothing happens to from within."""
    return ()


@dataclass(frozen=True)
class Scenario:
    """A job and what happens to it.

    ``workers`` over all ``hosts``; ``overrides``: ``section.field`` -> value on the base
    configuration. ``faults(shape)``: the configuration's ``faults``, for the job's first plan.
    ``spare_hosts``: further hosts, without workers at first. ``elastic``: torchrun may be joined by
    their agents (--nnodes). ``torchrun``: further flags. ``limit_s``: longest that one start may
    take.
    """

    name: str
    about: str
    faults: Faults = no_faults
    acts: tuple[Act, ...] = ()
    workers: int = 4
    hosts: int = 1
    spare_hosts: int = 0
    elastic: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    torchrun: tuple[str, ...] = ()
    expect: Expectation = Expectation()
    limit_s: float = 180.0
