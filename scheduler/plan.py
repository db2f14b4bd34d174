"""The plan: holders and executors of every stage, and each worker's ordered actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["F", "B"]
Schedule = Literal["1f1b", "gpipe"]
Table = tuple[tuple[int, ...], ...]
"""One whole number for each stage and microbatch: ``table[s][m]``."""

_FEW = 4


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


def executed_by(worker: int, runs: Sequence[int]) -> list[int]:
    """The microbatches of a stage that ``worker`` executes, of the executors of all."""
    found, at = [], -1
    for _ in range(runs.count(worker)):
        at = runs.index(worker, at + 1)
        found.append(at)
    return found


class Orders(Mapping[int, tuple[Action, ...]]):
    """Each worker's actions, sorted by their planned starts when they are first asked for.

    ``forward[s][m]`` and ``backward[s][m]``: planned starts, in ticks of the costs that the plan
    was made with. Along the chain of a microbatch (its forwards up the stages, its backwards down)
    they increase, and no action waits for another microbatch but by its place in an order: so the
    unfinished action that starts first can always run, and following the orders never deadlocks,
    whoever the executors are.
    """

    def __init__(
        self,
        workers: tuple[int, ...],
        executors: Sequence[Sequence[int]],
        forward: Table,
        backward: Table,
    ) -> None:
        self.workers = workers
        self.executors = executors
        self.forward = forward
        self.backward = backward
        self._members = frozenset(workers)
        self._work: dict[int, list[tuple[int, int]]] | None = None
        self._sorted: dict[int, tuple[Action, ...]] = {}

    def __len__(self) -> int:
        return len(self.workers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.workers)

    def __contains__(self, worker: object) -> bool:
        return worker in self._members

    def __repr__(self) -> str:
        return repr(dict(self))

    def work_of(self, worker: int) -> Sequence[tuple[int, int]]:
        """The (stage, microbatch) pairs that a worker executes."""
        if worker not in self._members:
            raise KeyError(worker)
        if self._work is not None:
            return self._work.get(worker, ())
        if len(self._sorted) < _FEW:
            # A running worker asks for itself alone.
            return [
                (s, m) for s, runs in enumerate(self.executors) for m in executed_by(worker, runs)
            ]
        work: dict[int, list[tuple[int, int]]] = {}
        for s, runs in enumerate(self.executors):
            for m, w in enumerate(runs):
                work.setdefault(w, []).append((s, m))
        self._work = work
        return self.work_of(worker)

    def __getitem__(self, worker: int) -> tuple[Action, ...]:
        found = self._sorted.get(worker)
        if found is None:
            found = self._sorted[worker] = self._sort(worker)
        return found

    def _sort(self, worker: int) -> tuple[Action, ...]:
        timed: list[tuple[int, int, Action]] = []
        for s, m in self.work_of(worker):
            timed.append((self.forward[s][m], 1, Action("F", s, m)))
            timed.append((self.backward[s][m], 0, Action("B", s, m)))
        return tuple(action for _, _, action in sorted(timed))


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

    def share_of(self, worker: int) -> int:
        """How many (stage, microbatch) pairs ``worker`` executes."""
        return sum(runs.count(worker) for runs in self.executors)

    def describe(self) -> str:
        """Holders and executors in a line, for logs."""
        parts = []
        for stage, members in enumerate(self.holders):
            runs = {w: self.executors[stage].count(w) for w in members}
            who = " ".join(f"w{w}:{n}" for w, n in runs.items())
            layers = self.layout.layers_of(stage)
            parts.append(f"stage {stage} (layers {layers.start}-{layers.stop - 1}) on {who}")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """What :func:`dtrain.scheduler.replan` needs of this plan, for a worker without it."""
        return {
            "workers": list(self.workers),
            "holders": [list(held) for held in self.holders],
            "executors": [list(runs) for runs in self.executors],
        }

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Any], layout: Layout, generation: int, reason: str = ""
    ) -> Plan:
        """The plan that :meth:`as_json` describes, without orders of actions."""
        holders, executors = (tuple(map(tuple, raw[name])) for name in ("holders", "executors"))
        return cls(generation, layout, tuple(raw["workers"]), holders, executors, {}, reason)
