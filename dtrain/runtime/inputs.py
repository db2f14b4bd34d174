"""What a worker's actions need of each microbatch, sampled and fetched ahead of compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.batches import BatchSource
from dtrain.data.block import Block
from dtrain.data.features import Features
from dtrain.data.store import GraphStore
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.rows.stored import StoredRows
from dtrain.models.layer import Prepared
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.staging import Arrival, SideStream, side_stream
from dtrain.runtime.turns import CoreTurns
from dtrain.scheduler import Plan

Prepare = Callable[[int, int, Block, Tensor | StoredRows], Prepared | None]
"""Of step, microbatch, block and features: as :meth:`dtrain.models.layer.PreparingLayer.prepare`"""


@dataclass
class MicrobatchInputs:
    """One microbatch as one worker needs it.

    ``blocks``: layer -> block, for the layers of the stages that the worker executes on it (and
    those between). ``features``: rows for the sources of layer 0, float32 [num_src, F] or sparse,
    or what that layer prepared of them, where the worker executes stage 0, else None. ``labels``:
    int64 [B] of the seeds and ``seed_rows``: int64 [B], their rows among the last layer's
    destinations, where it executes the last stage, else None. ``arrival``: set while they may still
    be on their way to the device.
    """

    blocks: dict[int, Block]
    features: Tensor | SparseRows | Prepared | None
    labels: Tensor | None
    seed_rows: Tensor | None
    arrival: Arrival | None = None

    def map(self, move: Callable[[Tensor], Tensor]) -> MicrobatchInputs:
        """The same inputs of tensors that ``move`` made of ours."""
        features, labels, rows = self.features, self.labels, self.seed_rows
        if features is not None:
            features = move(features) if isinstance(features, Tensor) else features.map(move)
        return MicrobatchInputs(
            {layer: block.map(move) for layer, block in self.blocks.items()},
            features,
            None if labels is None else move(labels),
            None if rows is None else move(rows),
        )

    def sent_on(self, side: SideStream) -> MicrobatchInputs:
        """The same inputs on a device, as soon as they have arrived there (:meth:`ready`)."""
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            tensors.append(side.copy(tensor))
            return tensors[-1]

        moved = self.map(copy)
        moved.arrival = Arrival(side, side.mark(), tensors)
        return moved

    def ready(self) -> MicrobatchInputs:
        """These inputs, for the thread that computes with them to begin once they are there."""
        if self.arrival is not None:
            self.arrival.wait()
        return self


class InputFetcher:
    """Makes :class:`MicrobatchInputs`, a pure function of step, microbatch and plan.

    ``features``: where feature rows come from, ``store`` if not given. ``prepare``: what layer 0
    makes of them ahead of its turn, if it does. ``between``: called between sampling and gathering.
    """

    def __init__(
        self,
        source: BatchSource,
        store: GraphStore,
        plan: Plan,
        worker: int,
        device: torch.device,
        features: Features | None = None,
        prepare: Prepare | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._between = between
        self._source = source
        self._store = store
        self._features: Features = store if features is None else features
        self._prepare = prepare
        self._device = device
        self._side = side_stream(device)
        self._cuts = plan.layout.cuts
        self._stages: dict[int, list[int]] = {}
        for stage, runs in enumerate(plan.executors):
            for microbatch, executor in enumerate(runs):
                if executor == worker:
                    self._stages.setdefault(microbatch, []).append(stage)
        # Microbatches in the order in which this worker first meets them.
        self.order = list(dict.fromkeys(a.microbatch for a in plan.actions[worker]))
        self._static: dict[int, MicrobatchInputs] = {}

    def take_over(self, former: InputFetcher) -> None:
        """Keep what ``former`` has made of static batches and this one would make alike."""
        for microbatch, inputs in former._static.items():
            if self._stages.get(microbatch) == former._stages[microbatch]:
                self._static[microbatch] = inputs

    def fetch(self, step: int, microbatch: int) -> MicrobatchInputs:
        """Sample the blocks and gather features and labels; kept where the batches are static.

        What it gives is to be computed with after ``ready()`` only.
        """
        if microbatch in self._static:
            return self._static[microbatch]
        inputs = self._make(step, microbatch)
        if self._side is not None:
            inputs = inputs.sent_on(self._side)
        elif self._device.type != "cpu":
            inputs = inputs.map(lambda tensor: tensor.to(self._device))
        if self._source.static:
            self._static[microbatch] = inputs
        return inputs

    def _make(self, step: int, microbatch: int) -> MicrobatchInputs:
        stages = self._stages[microbatch]
        first_layer = self._cuts[min(stages)]
        sample = self._source.sample(step, microbatch, first_layer)
        self._between()
        blocks = {first_layer + i: block for i, block in enumerate(sample.blocks)}
        features = labels = rows = None
        if min(stages) == 0:
            features = self._input(step, microbatch, blocks[0], sample.input_nodes)
        if max(stages) == len(self._cuts) - 2:
            labels = torch.from_numpy(self._store.labels[sample.seeds].astype("int64"))
            rows = sample.seed_rows
            if rows is None:
                rows = torch.arange(len(sample.seeds))
        return MicrobatchInputs(blocks, features, labels, rows)

    def _input(
        self, step: int, microbatch: int, block: Block, nodes: NDArray[np.int64]
    ) -> Tensor | SparseRows | Prepared:
        if self._prepare is None:
            return self._features.gather_features(nodes)
        stored = self._features.stored_features(nodes)
        x = self._features.gather_features(nodes) if stored is None else stored
        if isinstance(x, SparseRows):
            return x
        prepared = self._prepare(step, microbatch, block, x)
        if prepared is not None:
            return prepared
        return x if isinstance(x, Tensor) else x.gather()


class Prefetcher:
    """Runs an :class:`InputFetcher` in a thread, at most ``ahead`` microbatches before use.

    ``turns``: when the thread may run.
    """

    def __init__(
        self,
        fetcher: InputFetcher,
        source: BatchSource,
        steps: range,
        ahead: int,
        fault: FaultFlag,
        timeout_s: float,
        turns: CoreTurns | None = None,
    ) -> None:
        self.fetcher = fetcher
        self.turns = turns or CoreTurns(scarce=False)
        self._source = source
        self._steps = steps
        self._fault = fault
        self._timeout_s = timeout_s
        self._ready: dict[tuple[int, int], MicrobatchInputs] = {}
        self._room = threading.Semaphore(max(1, ahead))
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dtrain-prefetch", daemon=True)
        if fetcher.order:
            self._thread.start()

    def take(self, step: int, microbatch: int) -> MicrobatchInputs:
        """The inputs of one microbatch; each is given out once.

        Raises:
            PeerLostError: a fault was noticed meanwhile. Errors of sampling are raised as they
                were.
        """
        key = (step, microbatch)
        if key not in self._ready:
            with self.turns.waiting():
                self._fault.wait_for(
                    lambda: key in self._ready or self._error is not None,
                    self._timeout_s,
                    f"sampling microbatch {microbatch} of step {step}",
                )
        if self._error is not None and key not in self._ready:
            raise self._error
        self._room.release()
        return self._ready.pop(key).ready()

    def close(self) -> None:
        """Stop the thread."""
        self._stopping = True
        self.turns.end()
        self._room.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _keys(self) -> Iterator[tuple[int, int]]:
        for step in self._steps:
            for microbatch in self.fetcher.order:
                if len(self._source.seeds(step, microbatch)):
                    yield step, microbatch

    def _run(self) -> None:
        try:
            for step, microbatch in self._keys():
                self._room.acquire()
                if self._stopping:
                    return
                with self.turns.sampling():
                    inputs = self.fetcher.fetch(step, microbatch)
                self._ready[step, microbatch] = inputs
                self._fault.notify()
        except Exception as error:
            # Handed to the thread that waits for these inputs.
            self._error = error
            self._fault.notify()
