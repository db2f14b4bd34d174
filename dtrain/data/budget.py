"""Microbatches that fit a memory budget: cut smaller before the run, never in the middle of it.

The peak of a microbatch is predicted from bounds that hold for every draw of the sampler: a layer's
blocks have at most as many edges as its most connected destinations have, each counted up to the
fanout. So the number of microbatches is a pure function of the configuration and the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.config import Config
from dtrain.data.sample.neighbor import ALL_NEIGHBORS
from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError

# int64 columns and their global ids, and the transposed pattern: rows and positions of entries.
_BYTES_PER_EDGE = 8 + 8 + 8 + 8
_BYTES_PER_NODE = 8 + 8 + 8 + 8  # row pointers of both patterns, degrees, global ids
# Rows of a layer's width that exist at once: the input, what dropout, aggregation and the two
# linear maps make of it, their sum, the activation, and the gradients of the last three.
_ROWS_PER_LAYER = 9
_IN_FLIGHT_MORE = 2  # sampled ahead, beside those that the stages hold


@dataclass(frozen=True)
class Budget:
    """``microbatches`` of a step, each of whose predicted peaks lets the run stay in the limit.

    ``peak_bytes``: predicted for a worker that holds as many microbatches as it ever may; None
    without a limit.
    """

    microbatches: int
    peak_bytes: int | None


class PeakModel:
    """Predicts the memory that a worker needs for microbatches of so many seeds."""

    def __init__(self, config: Config, store: GraphStore) -> None:
        sampler, layers = config.sampler, config.model.layers
        self.fanouts = sampler.fanouts if sampler.name == "neighbor" else []
        self.fanouts = self.fanouts or [ALL_NEIGHBORS] * layers
        degrees = np.sort(store.in_degree())[::-1]
        self._num_nodes = store.num_nodes
        self._fetch_bytes = store.fetch_bytes
        self._edges = {f: _most_edges(degrees, f, sampler.replace) for f in set(self.fanouts)}
        heads = config.model.heads if config.model.name == "gat" else 1
        hidden = [config.model.hidden * heads] * (layers - 1)
        self._widths = [store.meta.num_features, *hidden, store.meta.num_classes]
        stages = config.parallel.stages
        self._stages = layers if stages == "auto" else stages

    def peak_bytes(self, seeds: int, microbatches: int) -> int:
        """For ``microbatches`` a step of at most ``seeds`` seeds each, in bytes."""
        held = min(microbatches, self._stages) + _IN_FLIGHT_MORE
        return held * self._microbatch_bytes(seeds) + self._state_bytes() + self._fetch_bytes

    def _microbatch_bytes(self, seeds: int) -> int:
        total, destinations = 0, min(seeds, self._num_nodes)
        for layer in reversed(range(len(self.fanouts))):
            edges = int(self._edges[self.fanouts[layer]][destinations])
            sources = min(self._num_nodes, destinations + edges)
            total += edges * _BYTES_PER_EDGE + (sources + destinations) * _BYTES_PER_NODE
            total += 4 * 2 * sources * self._widths[layer]
            width = max(self._widths[layer], self._widths[layer + 1])
            total += 4 * _ROWS_PER_LAYER * destinations * width
            destinations = sources
        return total

    def _state_bytes(self) -> int:
        """Weights, gradients, the exact sum in float64, the optimizer's state, a snapshot."""
        pairs = zip(self._widths, self._widths[1:], strict=False)
        return sum(2 * a * b for a, b in pairs) * (4 + 4 + 8 + 8 + 12)


def microbatches_within(config: Config, store: GraphStore) -> Budget:
    """The least multiple of ``parallel.microbatches`` whose microbatches fit ``memory.limit``.

    Without a limit that is ``parallel.microbatches`` itself. The mapped graph and features are the
    system's to keep or drop and do not count, nor do the interpreter and its libraries.

    Raises:
        DtrainError: a microbatch of one seed would not fit, or the sampler cannot split.
    """
    wanted, limit = config.parallel.microbatches, config.memory.limit
    if limit is None:
        return Budget(wanted, None)
    model = PeakModel(config, store)
    if config.sampler.name == "cluster":
        return _clusters(model, config, store, limit)
    batch = config.train.batch_size or len(store.split(config.data.split).train)
    factor = 1
    while True:
        microbatches = wanted * factor
        seeds = -(-batch // microbatches)
        peak = model.peak_bytes(seeds, microbatches)
        if peak <= limit:
            return Budget(microbatches, peak)
        if seeds <= 1:
            raise DtrainError(
                f"memory.limit: expected at least {peak} bytes, which a microbatch of one seed may "
                f"need, got {limit}; raise it, or lower sampler.fanouts or model.hidden"
            )
        # Peaks fall about in proportion to the seeds, so most steps of the search are skipped.
        factor = max(factor + 1, int(factor * min(peak / limit, 2.0) * 0.9))


def _clusters(model: PeakModel, config: Config, store: GraphStore, limit: int) -> Budget:
    offsets = np.asarray(store.meta.partition_offsets, dtype=np.int64)
    nodes = int(np.sort(np.diff(offsets))[::-1][: config.sampler.clusters].sum())
    peak = model.peak_bytes(nodes, config.parallel.microbatches)
    if peak > limit:
        raise DtrainError(
            f"memory.limit: expected at least {peak} bytes for {config.sampler.clusters} clusters, "
            f"got {limit}; lower sampler.clusters or import with more --partitions"
        )
    return Budget(config.parallel.microbatches, peak)


def _most_edges(degrees: NDArray[np.int64], fanout: int, replace: bool) -> NDArray[Any]:
    """int64 [N + 1]: the most edges that so many distinct destinations can have."""
    counts = degrees
    if fanout != ALL_NEIGHBORS:
        drawn = np.where(degrees > 0, fanout, 0)
        counts = drawn if replace else np.minimum(degrees, fanout)
    return np.concatenate([[0], np.cumsum(counts)])
