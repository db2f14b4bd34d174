"""What a worker did when in a step: for fitting the cost model and for drawing a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtrain.data.block import Block
from dtrain.scheduler import Action
from dtrain.scheduler.costmodel import BlockSize, CostModel, Direction, LayerShape

Entry = dict[str, Any]


@dataclass(frozen=True)
class LayerRecord:
    """A layer's time in an action, and the block it ran on."""

    layer: int
    nnz: int
    num_src: int
    num_dst: int
    seconds: float


@dataclass(frozen=True)
class ActionRecord:
    """An action's times in seconds of a clock that all processes of a machine share.

    ``kind`` is ``F`` or ``B``. ``cpu_s``: what the thread computed in it, the time aside in which
    other threads had its processor.
    """

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    cpu_s: float
    layers: tuple[LayerRecord, ...]


@dataclass
class StepRecord:
    """One worker's step. ``phases``: what it did besides (sum, vote, apply) -> (start, end)."""

    step: int
    generation: int
    start_s: float
    end_s: float = 0.0
    actions: list[ActionRecord] = field(default_factory=list)
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)


class ActionRecorder:
    """Hands each step to ``write`` as it is committed; without ``write`` it records nothing.

    A step that is discarded is not written: its times are those of a fault.
    """

    def __init__(self, write: Callable[[Entry], None] | None = None) -> None:
        self._write = write
        self._current: StepRecord | None = None

    def begin(self, step: int, generation: int) -> None:
        """A step begins, or begins anew."""
        if self._write is not None:
            self._current = StepRecord(step, generation, time.perf_counter())

    def action(
        self,
        action: Action,
        ran: tuple[float, float],
        cpu_s: float,
        blocks: Mapping[int, Block],
        layer_seconds: Sequence[tuple[int, float]],
    ) -> None:
        """An action has ended; ``ran``: its begin and end, of ``time.perf_counter``.

        ``cpu_s``: what ``time.thread_time`` advanced by meanwhile.
        """
        if self._current is None:
            return
        layers = tuple(
            LayerRecord(i, blocks[i].nnz, blocks[i].num_src, blocks[i].num_dst, seconds)
            for i, seconds in layer_seconds
        )
        record = ActionRecord(*action, *ran, cpu_s, layers)
        self._current.actions.append(record)

    def phase(self, name: str, began: float) -> float:
        """What else a step does, from ``began`` until now; returns now."""
        now = time.perf_counter()
        if self._current is not None:
            self._current.phases[name] = (began, now)
        return now

    def commit(self) -> None:
        """The step is committed."""
        done, self._current = self._current, None
        if done is not None and self._write is not None:
            done.end_s = time.perf_counter()
            self._write(asdict(done))


def step_record(raw: Mapping[str, Any]) -> StepRecord:
    """The record that was written as ``raw``."""
    actions = [
        ActionRecord(
            a["kind"],
            a["stage"],
            a["microbatch"],
            a["start_s"],
            a["end_s"],
            a["cpu_s"],
            tuple(LayerRecord(**layer) for layer in a["layers"]),
        )
        for a in raw["actions"]
    ]
    phases = {name: (start, end) for name, (start, end) in raw["phases"].items()}
    head = (raw["step"], raw["generation"], raw["start_s"], raw["end_s"])
    return StepRecord(*head, actions, phases)


def teach(
    model: CostModel, device: str, shapes: Sequence[LayerShape], records: Iterable[StepRecord]
) -> None:
    """Let a cost model observe the actions of one worker's steps."""
    for record in records:
        for action in record.actions:
            direction: Direction = "forward" if action.kind == "F" else "backward"
            layers = [
                (shapes[r.layer], BlockSize(r.nnz, r.num_src, r.num_dst), r.seconds)
                for r in action.layers
            ]
            model.observe_action(device, direction, layers, action.end_s - action.start_s)
