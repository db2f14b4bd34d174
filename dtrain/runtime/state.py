"""The state of a run: what a stage is made of, how far the run is, and where it is saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointInfo, CheckpointStore, PendingSave, Retention
from dtrain.checkpoint.partition_state import is_partition_state
from dtrain.errors import DtrainError
from dtrain.runtime.comm import MAX, SUM, Communicator
from dtrain.runtime.setup import Job

_DEPARTURES_KEPT = 100


@dataclass
class Best:
    """The best evaluation so far: its step, its value on val, and the metrics of all splits."""

    step: int
    value: float
    metrics: dict[str, dict[str, float]]


@dataclass
class Progress:
    """How far the run is; the same on every worker at a step boundary.

    ``step``: committed steps. ``seconds``: what they took together, the workers' mean.
    ``seeds_trained``: seed nodes of all of them. ``schedule``: the
    learning-rate schedule. ``evaluated``: newest step that was evaluated. ``generations``:
    memberships so far. ``steps_replayed``: steps begun, discarded and run again.
    ``steps_skipped``: steps left out. ``vote``: (loss, gradient norm) of the newest step.
    ``departures``: worker -> committed steps at which it was lost or left, the newest ones.
    ``memory``: what the scheduler has learnt (its cost model), as JSON under a name for each of
    its parts.
    """

    step: int = 0
    seconds: float = 0.0
    seeds_trained: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    best: Best | None = None
    evaluated: int = 0
    generations: int = 0
    steps_replayed: int = 0
    steps_skipped: int = 0
    vote: tuple[float, float] | None = None
    departures: dict[str, list[int]] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Progress:
        """From what :meth:`as_json` made."""
        best = Best(**saved["best"]) if saved["best"] else None
        vote = tuple(saved["vote"]) if saved.get("vote") else None
        return cls(**{**saved, "best": best, "vote": vote})

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, which share what this has: to be written or sent at once."""
        raw = {field.name: getattr(self, field.name) for field in fields(self)}
        return raw | {"best": asdict(self.best) if self.best is not None else None}

    def copy(self) -> Progress:
        """A copy that later progress does not change."""
        departures = {worker: list(steps) for worker, steps in self.departures.items()}
        return replace(
            self, schedule=dict(self.schedule), departures=departures, memory=dict(self.memory)
        )

    def departed(self, workers: Iterable[int]) -> None:
        """Remember that workers are gone since this step."""
        for worker in workers:
            steps = self.departures.setdefault(str(worker), [])
            self.departures[str(worker)] = [*steps, self.step][-_DEPARTURES_KEPT:]


@dataclass
class StageState:
    """All that makes a holder of a stage, at a step boundary.

    ``tensors``: ``model/``, ``optim/`` and ``master/`` entries as :meth:`StageEngine.state` names
    them, ``best/{name}``, the stage's weights at the best evaluation, and with stage 0 the state of
    all partitions, ``partition/{p}/{component}/{name}``.
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


class SaveGroup:
    """The workers of a generation as a checkpoint's :class:`~dtrain.checkpoint.Exchange`.

    On the group that is there for checkpoints alone, so that a background thread may use it; its
    waits end with a fault or the time-out, as all of the communicator's.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.worker = comm.worker
        self.rank = comm.rank_of(comm.worker)
        self.size = len(comm.workers)

    def all_gather(self, data: bytes) -> list[bytes]:
        """What each worker gave: each adds its words to zeros in a row of its own.

        Raises:
            PeerLostError: a member is gone, a fault was noticed, or the time ran out.
        """
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._comm.all_reduce(sizes, MAX, self._comm.checkpoint_group)
        rows = torch.zeros(self.size, max(1, int(sizes.max())), dtype=torch.uint8)
        rows[self.rank, : len(data)] = torch.tensor(bytearray(data), dtype=torch.uint8)
        self._comm.all_reduce(rows, SUM, self._comm.checkpoint_group)
        return [row[:n].numpy().tobytes() for row, n in zip(rows, sizes.tolist(), strict=True)]

    def check(self) -> None:
        """Raise PeerLostError where a fault of the generation was noticed."""
        self._comm.fault.check()


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
            strict = self._job.config.checkpoint.strict
            info = self._store.newest(self._job.identity, on_skip, strict=strict)
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
            if stage == 0 and is_partition_state(entry):
                names.append(entry)
                continue
            section, _, rest = entry.partition("/")
            name = rest.rpartition("/")[0] if section == "optim" else rest
            if name in wanted:
                names.append(entry)
        return StageState(self._store.load_tensors(info, names), progress.copy())

    def save_async(
        self,
        progress: Progress,
        states: Mapping[int, StageState],
        comm: Communicator,
        on_warning: Callable[[str], None],
    ) -> PendingSave:
        """Begin to save the run at ``progress.step``; every worker calls it.

        Returns once the state is copied; what the save comes to is the result's ``result()``.
        An unfinished earlier save is waited for first. ``on_warning`` is called from a background
        thread.

        Raises:
            PeerLostError: a fault was noticed while the earlier save was waited for.
        """
        pending = self._store.save_async(
            progress.step,
            _tensors(states),
            self._record(progress, comm),
            exchange=SaveGroup(comm),
            retention=self._retention(progress),
            on_warning=on_warning,
        )
        self.last_saved = progress.step
        return pending

    def _record(self, progress: Progress, comm: Communicator) -> dict[str, Any]:
        return {
            "identity": self._job.identity,
            "config": self._job.config.model_dump(mode="json"),
            # Training goes on while it is written.
            "progress": progress.copy().as_json(),
            "workers": len(comm.workers),
            "stages": self._job.layout.num_stages,
        }

    def _retention(self, progress: Progress) -> Retention:
        config = self._job.config.checkpoint
        pinned = frozenset([progress.best.step] if progress.best is not None else [])
        return Retention(config.keep, config.keep_every, pinned)


def _tensors(states: Mapping[int, StageState]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for _, state in sorted(states.items()):
        tensors |= state.tensors
    return tensors
