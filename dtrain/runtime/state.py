"""Saving and restoring a run, whatever the number of workers and stages it goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointInfo, CheckpointStore, PendingSave, Retention
from dtrain.errors import DtrainError
from dtrain.runtime.comm import MAX, SUM, Communicator
from dtrain.runtime.engine import StageEngine
from dtrain.runtime.setup import Job


@dataclass
class Best:
    """The best evaluation so far: its step, its value on val, and the metrics of all splits."""

    step: int
    value: float
    metrics: dict[str, dict[str, float]]


@dataclass
class Progress:
    """How far the run is; saved with every checkpoint.

    ``step``: committed steps. ``seeds_trained``: seed nodes of all of them. ``schedule``: the
    learning-rate schedule.
    """

    step: int = 0
    seeds_trained: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    best: Best | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Progress:
        """From what :meth:`as_json` made."""
        best = Best(**saved["best"]) if saved["best"] else None
        return cls(saved["step"], saved["seeds_trained"], saved["schedule"], best)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


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


class RunState:
    """The checkpoints of one run, as one worker of one generation uses them."""

    def __init__(self, url: str, job: Job, comm: Communicator, leader: bool) -> None:
        self._store = CheckpointStore(url)
        self._job = job
        self._comm = comm
        self._leader = leader
        self.last_saved: int | None = None

    @property
    def url(self) -> str:
        """Where checkpoints lie, without credentials."""
        return self._store.url

    def find(self, on_skip: Callable[[str], None]) -> tuple[CheckpointInfo, Progress] | None:
        """The checkpoint that all workers resume from; None for a fresh start.

        The leader looks for it and tells the others.

        Raises:
            DtrainError: the store cannot be read or written (told to all workers).
        """
        if self._leader:
            self._comm.put("resume", json.dumps(self._look(on_skip)))
        found = json.loads(self._comm.get("resume"))
        if "error" in found:
            raise DtrainError(found["error"])
        if found["info"] is None:
            return None
        self.last_saved = found["progress"]["step"]
        return CheckpointInfo(**found["info"]), Progress.of(found["progress"])

    def _look(self, on_skip: Callable[[str], None]) -> dict[str, Any]:
        try:
            self._store.prepare()
            info = self._store.newest(
                self._job.identity, on_skip, strict=self._job.config.checkpoint.strict
            )
            if info is None:
                return {"info": None}
            saved = self._store.progress(info)
        except (DtrainError, RuntimeError) as error:
            return {"error": str(error)}
        return {"info": asdict(info), "progress": saved["progress"]}

    def load_weights(self, info: CheckpointInfo, layer_range: range) -> None:
        """Fill the weights of layers from a checkpoint."""
        wanted = set(self._job.parameter_names(layer_range))
        tensors: dict[str, Tensor] = {}
        for index in layer_range:
            for name, parameter in self._job.layers[index].named_parameters():
                full = f"layers.{index}.{name}"
                if full in wanted:
                    tensors[f"model/{full}"] = parameter.data
        if self._low_precision():
            # Saved as the engine computes in; the engine casts again.
            for name, saved in self._store.load_tensors(info, list(tensors)).items():
                tensors[name].copy_(saved)
        else:
            self._store.load_into(info, tensors)

    def _low_precision(self) -> bool:
        return bool((self._job.config.deepspeed.get("bf16") or {}).get("enabled"))

    def load_engine(self, info: CheckpointInfo, progress: Progress, engine: StageEngine) -> None:
        """Set an engine's optimizer state and learning-rate schedule from a checkpoint."""
        prefixes = [f"{section}/{n}" for section in ("optim", "master") for n in engine.names]
        names = [
            name
            for name in self._store.names(info)
            if name in prefixes or name.rpartition("/")[0] in prefixes
        ]
        engine.load_optimizer(self._store.load_tensors(info, names))
        engine.load_schedule(progress.schedule)

    def load_best(self, info: CheckpointInfo) -> dict[str, Tensor]:
        """The weights of the best evaluation, by parameter name."""
        names = [n for n in self._store.names(info) if n.startswith("best/")]
        loaded = self._store.load_tensors(info, names)
        return {name.removeprefix("best/"): value for name, value in loaded.items()}

    def save(
        self,
        progress: Progress,
        engines: Mapping[int, StageEngine],
        best_weights: Mapping[str, Tensor],
        on_warning: Callable[[str], None],
    ) -> CheckpointInfo:
        """Save and commit the run at ``progress.step``; every worker calls it.

        Raises:
            CheckpointError: nothing was committed, on any worker.
        """
        info = self._store.save(
            progress.step,
            self._tensors(engines, best_weights),
            self._record(progress),
            exchange=SaveGroup(self._comm),
            retention=self._retention(progress),
            on_warning=on_warning,
        )
        self.last_saved = progress.step
        return info

    def save_async(
        self,
        progress: Progress,
        engines: Mapping[int, StageEngine],
        best_weights: Mapping[str, Tensor],
        on_warning: Callable[[str], None],
    ) -> PendingSave:
        """Begin to save the run at ``progress.step``; every worker calls it.

        Returns once the state is copied; what the save comes to is the result's ``result()``.
        An unfinished earlier save is waited for first. ``on_warning`` is called from a background
        thread.

        Raises:
            PeerLostError: a fault was noticed while the earlier save was waited for.
        """
        return self._store.save_async(
            progress.step,
            self._tensors(engines, best_weights),
            self._record(progress),
            exchange=SaveGroup(self._comm),
            retention=self._retention(progress),
            on_warning=on_warning,
        )

    def _tensors(
        self, engines: Mapping[int, StageEngine], best_weights: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for _, engine in sorted(engines.items()):
            tensors |= engine.state()
        return tensors | {f"best/{name}": value for name, value in best_weights.items()}

    def _record(self, progress: Progress) -> dict[str, Any]:
        return {
            "identity": self._job.identity,
            "config": self._job.config.model_dump(mode="json"),
            "progress": progress.as_json(),
            "workers": len(self._comm.workers),
            "stages": self._job.layout.num_stages,
        }

    def _retention(self, progress: Progress) -> Retention:
        config = self._job.config.checkpoint
        pinned = frozenset([progress.best.step] if progress.best is not None else [])
        return Retention(config.keep, config.keep_every, pinned)
