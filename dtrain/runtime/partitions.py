"""What a run keeps for each partition of the graph, and the ledger of the seeds of an epoch.

State of partitions belongs to the holders of stage 0, the stage that reads the graph. It is part of
that stage's state: every holder advances its copy at each committed step, a new holder gets it with
the stage, snapshots hold it, and a checkpoint has it once, under ``partition/{p}/{component}/``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dtrain.checkpoint import PartitionState
from dtrain.runtime.setup import Job


class SeedLedger:
    """Counts how often each train node was a seed in the epoch under way.

    An epoch trains each exactly once, however often the run was interrupted in it: the ledger is
    saved in mid-epoch, goes on where it is restored, and is checked when the epoch is complete.
    """

    def __init__(self, job: Job, step: int) -> None:
        """``step``: committed steps; in mid-epoch the counts have to be loaded, or this epoch is
        not checked."""
        self._source = job.source
        self._microbatches = job.config.parallel.microbatches
        self._train = np.asarray(job.store.split(job.config.data.split).train)
        self._cuts = np.searchsorted(self._train, job.store.meta.partition_offsets)
        self._counts = torch.zeros(len(self._train), dtype=torch.uint8)
        first = step % job.source.steps_per_epoch == 0
        self._missing = set() if first else set(range(job.store.num_partitions))

    def partition_state(self, partition: int) -> Mapping[str, Tensor]:
        """``seeds``: uint8 [train nodes of the partition], in their order; empty if unknown."""
        if self._missing:
            return {}
        return {"seeds": self._counts[self._range(partition)]}

    def load_partition_state(self, partition: int, tensors: Mapping[str, Tensor]) -> None:
        """Go on from saved counts; of another size, they are of another split and left."""
        target = self._counts[self._range(partition)]
        saved = tensors.get("seeds")
        if saved is not None and saved.shape == target.shape:
            target.copy_(saved)
            self._missing.discard(partition)

    def _range(self, partition: int) -> slice:
        return slice(int(self._cuts[partition]), int(self._cuts[partition + 1]))

    def advance(self, step: int) -> None:
        """Count the seeds of a step that was committed.

        Raises:
            AssertionError: the epoch is complete and a seed was not trained exactly once.
        """
        if step % self._source.steps_per_epoch == 0:
            self._counts.zero_()
            self._missing.clear()
        counts = self._counts.numpy()
        of_all = [self._source.seeds(step, m) for m in range(self._microbatches)]
        # In order, they are looked up in half the time.
        counts[np.searchsorted(self._train, np.sort(np.concatenate(of_all)))] += 1
        if (step + 1) % self._source.steps_per_epoch == 0 and not self._missing:
            wrong = np.flatnonzero(counts != 1)
            if len(wrong):
                node, times = self._train[wrong[0]], counts[wrong[0]]
                raise AssertionError(
                    f"epoch {self._source.epoch_of(step)}: {len(wrong)} seeds were not trained "
                    f"exactly once; node {node} {times} times"
                )


class Partitions:
    """The state of all partitions on one holder of stage 0."""

    def __init__(self, job: Job, step: int, saved: Mapping[str, Tensor]) -> None:
        """``saved``: tensors of stage 0 at ``step`` committed steps, or none at the start."""
        self._all = range(job.store.num_partitions)
        self._ledger = SeedLedger(job, step)
        self._state = PartitionState()
        self._state.register("ledger", self._ledger)
        self._state.load(saved, self._all)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors as ``partition/{p}/{component}/{name}``."""
        return self._state.tensors(self._all)

    def advance(self, step: int) -> None:
        """Book a committed step."""
        self._ledger.advance(step)
