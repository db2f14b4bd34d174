"""The state of a run: what a stage is made of, how far the run is, and where it is saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointInfo, CheckpointStore
from dtrain.errors import DtrainError
from dtrain.runtime.comm import Communicator
from dtrain.runtime.setup import Job


@dataclass
class Best:
    """The best evaluation so far: its step, its value on val, and the metrics of all splits."""

    step: int
    value: float
    metrics: dict[str, dict[str, float]]


@dataclass
class Progress:
    """How far the run is; the same on every worker at a step boundary.

    ``step``: committed steps. ``seeds_trained``: seed nodes of all of them. ``schedule``: the
    learning-rate schedule. ``evaluated``: newest step that was evaluated. ``generations``:
    memberships so far. ``steps_replayed``: steps begun, discarded and run again.
    """

    step: int = 0
    seeds_trained: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    best: Best | None = None
    evaluated: int = 0
    generations: int = 0
    steps_replayed: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Progress:
        """From what :meth:`as_json` made."""
        best = Best(**saved["best"]) if saved["best"] else None
        return cls(**{**saved, "best": best})

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def copy(self) -> Progress:
        """A copy that later progress does not change."""
        return replace(self, schedule=dict(self.schedule))


@dataclass
class StageState:
    """All that makes a holder of a stage, at a step boundary.

    ``tensors``: ``model/``, ``optim/`` and ``master/`` entries as :meth:`StageEngine.state` names
    them, and ``best/{name}``, the stage's weights at the best evaluation.
    """

    tensors: dict[str, Tensor]
    progress: Progress

    def cloned(self) -> StageState:
        """A copy that training does not change."""
        copies = {name: value.detach().clone() for name, value in self.tensors.items()}
        return StageState(copies, self.progress.copy())

    def packed(self) -> list[Tensor]:
        """As tensors that can be sent; the first is a JSON head as uint8 [n]."""
        head = {"names": list(self.tensors), "progress": self.progress.as_json()}
        return [pack_json(head), *self.tensors.values()]

    @classmethod
    def unpacked(cls, tensors: Sequence[Tensor]) -> StageState:
        """From what :meth:`packed` made."""
        head = unpack_json(tensors[0])
        named = dict(zip(head["names"], tensors[1:], strict=True))
        return cls(named, Progress.of(head["progress"]))


def pack_json(value: Any) -> Tensor:
    """A JSON value as uint8 [n]."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def unpack_json(packed: Tensor) -> Any:
    """From what :func:`pack_json` made."""
    return json.loads(bytes(packed.numpy().tobytes()))


class Checkpoints:
    """The durable checkpoints of one run, as one worker uses them."""

    def __init__(self, url: str, job: Job, on_point: Callable[[str], None] | None = None) -> None:
        self._store = CheckpointStore(url, on_point)
        self._job = job
        self.last_saved: int | None = None

    @property
    def url(self) -> str:
        """Where checkpoints lie, without credentials."""
        return self._store.url

    def find(self, on_skip: Callable[[str], None]) -> dict[str, Any]:
        """The newest intact checkpoint of this run, for the leader to tell the others.

        Plain JSON: ``{"info": ..., "progress": ...}``, ``{"info": None}`` where there is none, or
        ``{"error": message}``.
        """
        try:
            self._store.prepare()
            info = self._store.newest(self._job.identity, on_skip)
            if info is None:
                return {"info": None}
            saved = self._store.progress(info)
        except (DtrainError, RuntimeError) as error:
            return {"error": str(error)}
        return {"info": asdict(info), "progress": saved["progress"]}

    def load_stage(self, info: CheckpointInfo, stage: int, progress: Progress) -> StageState:
        """The state of a stage, whatever the cut that it was saved under."""
        wanted = set(self._job.parameter_names(self._job.layout.layers_of(stage)))
        names = []
        for entry in self._store.names(info):
            section, _, rest = entry.partition("/")
            name = rest.rpartition("/")[0] if section == "optim" else rest
            if name in wanted:
                names.append(entry)
        return StageState(self._store.load_tensors(info, names), progress.copy())

    def save(
        self,
        progress: Progress,
        states: Mapping[int, StageState],
        comm: Communicator,
        on_warning: Callable[[str], None],
    ) -> CheckpointInfo:
        """Save and commit the run at ``progress.step``; every worker calls it.

        Raises:
            CheckpointError: nothing was committed, on any worker. PeerLostError: a fault.
        """
        tensors: dict[str, Tensor] = {}
        for _, state in sorted(states.items()):
            tensors |= state.tensors
        record = {
            "identity": self._job.identity,
            "progress": progress.as_json(),
            "workers": len(comm.workers),
            "stages": self._job.layout.num_stages,
        }

        def save() -> CheckpointInfo:
            return self._store.save(
                progress.step,
                tensors,
                record,
                rank=comm.worker,
                process_group=comm.checkpoint_group,
                keep=self._job.config.checkpoint.keep,
                on_warning=on_warning,
            )

        info = comm.run_aside(save, "saving a checkpoint")
        self.last_saved = progress.step
        return info
