"""The plan: holders and executors of every stage, and each worker's ordered actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]
Schedule = Literal["1f1b", "gpipe"]


class Action(NamedTuple):
    """Forward (``F``) or backward (``B``) of one stage on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage},{self.microbatch})"


@dataclass(frozen=True)
class Layout:
    """What a plan must respect, whoever the workers are.

    ``cuts``: the first layer of every stage and, last, the number of layers: ``(0, c1, ..., L)``.
    """

    cuts: tuple[int, ...]
    microbatches: int
    redundancy: int = 2
    schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        if len(self.cuts) < 2 or self.cuts[0] != 0 or list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"cuts: expected 0 and then increasing layer numbers, got {self.cuts}")
        if self.microbatches < 1 or self.redundancy < 1:
            raise ValueError("microbatches and redundancy: expected at least 1")

    @property
    def num_stages(self) -> int:
        return len(self.cuts) - 1

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.cuts[stage], self.cuts[stage + 1])


@dataclass(frozen=True)
class Plan:
    """One generation's division of work.

    ``holders[s]``: workers with the parameters of stage ``s``, lowest first; ``executors[s][m]``:
    the holder that runs microbatch ``m`` on stage ``s``; ``actions[w]``: what worker ``w`` runs,
    in order. ``reason`` says how the plan came to be.
    """

    generation: int
    layout: Layout
    workers: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]
    executors: tuple[tuple[int, ...], ...]
    actions: Mapping[int, tuple[Action, ...]]
    reason: str

    @property
    def num_stages(self) -> int:
        return self.layout.num_stages

    def stages_held(self, worker: int) -> tuple[int, ...]:
        """The stages whose parameters ``worker`` holds, lowest first."""
        return tuple(s for s, members in enumerate(self.holders) if worker in members)

    def describe(self) -> str:
        """Holders and executors in a line, for logs."""
        parts = []
        for stage, members in enumerate(self.holders):
            runs = {w: self.executors[stage].count(w) for w in members}
            who = " ".join(f"w{w}:{n}" for w, n in runs.items())
            layers = self.layout.layers_of(stage)
            parts.append(f"stage {stage} (layers {layers.start}-{layers.stop - 1}) on {who}")
        return "; ".join(parts)
