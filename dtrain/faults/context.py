"""What a fault sees of the trainer that it strikes; the contract for a user's own faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class FaultContext(Protocol):
    """The moment at which a fault strikes.

    ``phase`` and ``step`` (counted from 0) say when; ``pid`` is the trainer's, ``node`` its
    host's name. ``tensors``: those of the phase (send, receive, sum), to be changed in place;
    empty in the others. ``stage`` and ``microbatch``: where the phase has them.
    """

    @property
    def worker(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def phase(self) -> str: ...

    @property
    def node(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def supervisor_pid(self) -> int: ...

    @property
    def run_dir(self) -> Path: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    @property
    def stage(self) -> int | None: ...

    @property
    def microbatch(self) -> int | None: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class FaultEvent:
    """What a fault says for the event log after it acted; ``fields`` are plain JSON values."""

    kind: str
    reason: str
    fields: Mapping[str, Any] = field(default_factory=dict)


OwnFault = Callable[[FaultContext, random.Random], Iterable[FaultEvent] | None]
"""A user's own fault: called as ``fault(state, rng)`` in the trainer, on the thread that reached
the phase. It may raise, stop, spoil tensors or never return."""


@dataclass(frozen=True)
class Moment:
    """A :class:`FaultContext`, as the injector makes it."""

    worker: int
    step: int
    phase: str
    node: str
    pid: int
    supervisor_pid: int
    run_dir: Path
    tensors: Sequence[Tensor] = ()
    stage: int | None = None
    microbatch: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
