"""Microbatches that fit a memory budget: cut smaller before the run, never in the middle of it.

What a microbatch takes is predicted from bounds that hold for every draw of the sampler: a layer's
blocks have at most as many edges as its most connected destinations have, each counted up to the
fanout. The number of microbatches is a pure function of the model, the batch, the sampler, the
limit and the graph, so it stays the same when a run goes on with other stages, workers or stores.
What depends on those is taken at its worst for it; at run time it decides only how far ahead
microbatches are sampled and whether fixed ones are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.config import Config
from dtrain.data.ranged import FETCH_BYTES
from dtrain.data.sample.neighbor import ALL_NEIGHBORS
from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError
from dtrain.scheduler import Plan
from dtrain.scheduler.costmodel import LayerShape

# int64 columns and their global ids, and the transposed pattern: rows and positions of entries.
_BYTES_PER_EDGE = 8 + 8 + 8 + 8
_BYTES_PER_NODE = 8 + 8 + 8 + 8  # row pointers of both patterns, degrees, global ids
# A stored element of sparse features: column, value and dropped value, and the transposed pattern.
_BYTES_PER_SPARSE = 8 + 4 + 4 + 8 + 8
# Rows of the wider of a layer's widths that exist for each destination: the aggregate, the two
# linear maps, their sum, the normalised and the activated sum, and what a residual adds.
_ROWS_PER_DESTINATION = 7
# For each parameter: weights, their gradients, the exact sum in float64 and in float32, the
# optimizer's two moments, and a snapshot of weights and moments.
_STATE_BYTES = 4 + 4 + 8 + 4 + 8 + 12
_LEAST_BYTES = 1 << 20
_SUM_ROWS = 2  # copies of the microbatches' gradients that the exact sum works on


@dataclass(frozen=True)
class MicrobatchBytes:
    """What one microbatch takes at most.

    ``features``: the rows that layer 0 reads. ``blocks[i]``: the block of layer ``i``. ``kept[i]``:
    what that layer's forward pass leaves for its backward pass, which takes as much again.
    """

    features: int
    blocks: tuple[int, ...]
    kept: tuple[int, ...]

    def inputs(self, first_layer: int = 0) -> int:
        """What is sampled and gathered for a worker whose first layer is ``first_layer``."""
        return sum(self.blocks[first_layer:]) + (0 if first_layer else self.features)


@dataclass(frozen=True)
class Budget:
    """``microbatches`` of a step, and how a worker stays within ``limit`` bytes with them.

    ``each``: the largest of them. ``parameters``: trainable numbers of the model. ``cache_bytes``:
    what a cache of feature rows has of the limit. Without a limit all else is None or 0.
    """

    microbatches: int
    limit: int | None = None
    each: MicrobatchBytes | None = None
    parameters: int = 0
    cache_bytes: int = 0

    @property
    def peak_bytes(self) -> int | None:
        """What any worker of any plan may need that samples one microbatch ahead; None: no limit.

        Under 1F1B a worker has at most ``S - s`` microbatches in flight on stage ``s`` of ``S``,
        which is the most where every layer is a stage.
        """
        if self.each is None:
            return None
        layers, most = len(self.each.blocks), self.microbatches
        held = self.each.features * min(most, layers)
        for layer in range(layers):
            # A worker has the blocks of its first layer and of all that follow.
            holders = sum(layers - stage for stage in range(layer + 1))
            held += self.each.blocks[layer] * min(most, holders)
            held += self.each.kept[layer] * min(most, layers - layer)
        return self._with(held) + self.each.inputs()

    def plan_bytes(self, plan: Plan, worker: int) -> int:
        """What ``worker`` may need under ``plan`` besides what it samples ahead.

        Raises:
            ValueError: there is no limit, so nothing was predicted.
        """
        if self.each is None:
            raise ValueError("plan_bytes: expected a budget with a limit, got none")
        cuts, each = plan.layout.cuts, self.each
        actions = plan.actions[worker]
        first: dict[int, int] = {}
        uses: dict[int, int] = {}
        for action in actions:
            m, layer = action.microbatch, cuts[action.stage]
            first[m] = min(layer, first.get(m, layer))
            uses[m] = uses.get(m, 0) + 1
        held = most = 0
        begun: set[int] = set()
        for kind, stage, m in actions:
            if m not in begun:
                begun.add(m)
                held += each.inputs(first[m])
            kept = sum(each.kept[cuts[stage] : cuts[stage + 1]])
            held += kept if kind == "F" else 0
            most = max(most, held)
            held -= kept if kind == "B" else 0
            uses[m] -= 1
            if not uses[m]:
                held -= each.inputs(first[m])
        return self._with(most)

    def in_flight(self, cuts: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """What a microbatch in flight takes on each stage, and how much all may on a worker.

        Whatever plan keeps to it, with states and one microbatch ahead, stays within the limit;
        also where all microbatches stay in memory because they are the same in every step.

        Raises:
            ValueError: there is no limit, so nothing was predicted.
        """
        if self.each is None or self.limit is None:
            raise ValueError("in_flight: expected a budget with a limit, got none")
        each = self.each
        stages = tuple(each.inputs(a) + sum(each.kept[a:b]) for a, b in pairwise(cuts))
        rest = self._always() + max(each.kept) + each.inputs()
        if self.keeps_fixed():
            rest += each.inputs() * self.microbatches
        return stages, max(0, self.limit - rest)

    def ahead(self, plan: Plan, worker: int) -> int:
        """How many microbatches ``worker`` may sample before it uses them, at least 1.

        As many as it has in a step and one more, or as many as the limit leaves room for.
        """
        wanted = len({action.microbatch for action in plan.actions[worker]}) + 1
        if self.limit is None or self.each is None:
            return wanted
        room = self.limit - self.plan_bytes(plan, worker)
        return max(1, min(wanted, room // self.each.inputs()))

    def between_steps(self, plan: Plan, worker: int) -> int | None:
        """What ``worker`` has left when no microbatch is in flight; None: no limit.

        For an evaluation, say, whose weights have their place in it. At least a megabyte, with
        which it is slow but goes on.
        """
        if self.limit is None or self.each is None:
            return None
        ahead = self.microbatches + 1 if self.keeps_fixed() else self.ahead(plan, worker)
        weights = 8 * self.parameters
        left = self.limit - self._always() - ahead * self.each.inputs() - weights
        return max(_LEAST_BYTES, left)

    def keeps_fixed(self) -> bool:
        """Whether all microbatches can stay in memory where they are the same in every step."""
        peak = self.peak_bytes
        if self.limit is None or self.each is None or peak is None:
            return True
        return peak + self.each.inputs() * self.microbatches <= self.limit

    def with_cache(self, wanted_bytes: int) -> Budget:
        """The budget in which a cache of feature rows has what is left, at most what is wanted.

        The number of microbatches stays: it must not depend on the cache.
        """
        peak = self.peak_bytes
        if self.limit is None or peak is None:
            return replace(self, cache_bytes=wanted_bytes)
        return replace(self, cache_bytes=max(0, min(wanted_bytes, self.limit - peak)))

    def bytes_in_flight(self, microbatches: int) -> int:
        """What a worker may need that has so many whole microbatches in flight, and one ahead.

        Raises:
            ValueError: there is no limit, so nothing was predicted.
        """
        if self.each is None:
            raise ValueError("bytes_in_flight: expected a budget with a limit, got none")
        each = self.each.inputs() + sum(self.each.kept)
        return self._with(each * microbatches) + self.each.inputs()

    def _with(self, held: int) -> int:
        """``held`` bytes of microbatches in flight, and what is there besides."""
        assert self.each is not None
        # One layer's backward pass runs at a time, and none is in flight during the exact sum.
        return self._always() + max(held + max(self.each.kept), _SUM_ROWS * self._gradients)

    def _always(self) -> int:
        """Bytes that are there all the time."""
        state = _STATE_BYTES * self.parameters
        return self._gradients + state + FETCH_BYTES + self.cache_bytes

    @property
    def _gradients(self) -> int:
        return 4 * self.microbatches * self.parameters


class PeakModel:
    """Predicts the memory that microbatches of so many seeds need.

    ``shapes``: the model's layers.
    """

    def __init__(self, config: Config, store: GraphStore, shapes: Sequence[LayerShape]) -> None:
        sampler, layers = config.sampler, config.model.layers
        self.fanouts = sampler.fanouts if sampler.name == "neighbor" else []
        self.fanouts = self.fanouts or [ALL_NEIGHBORS] * layers
        degrees = np.sort(store.in_degree())[::-1]
        self._num_nodes = store.num_nodes
        self._edges = {f: _most_edges(degrees, f, sampler.replace) for f in set(self.fanouts)}
        self._shapes = shapes
        heads = config.model.output_heads if config.model.name == "gat" else 1
        # Attention averages its last heads only after each has made its row.
        self._inner = [s.fan_out for s in shapes[:-1]] + [s.fan_out * heads for s in shapes[-1:]]
        counts = store.feature_counts()
        self._elements = None if counts is None else _prefix_sums(np.sort(counts)[::-1])
        self._width = store.meta.num_features
        self.parameters = sum(shape.parameters for shape in shapes)

    def sampled(self, seeds: int) -> MicrobatchBytes:
        """Of at most ``seeds`` seeds, whose blocks grow downwards from them."""
        blocks, kept = [], []
        destinations = sources = min(seeds, self._num_nodes)
        for layer in reversed(range(len(self.fanouts))):
            edges = int(self._edges[self.fanouts[layer]][destinations])
            sources = min(self._num_nodes, destinations + edges)
            blocks.append(edges * _BYTES_PER_EDGE + (sources + destinations) * _BYTES_PER_NODE)
            kept.append(self._kept(layer, sources, destinations))
            destinations = sources
        return MicrobatchBytes(self._features(sources), tuple(blocks[::-1]), tuple(kept[::-1]))

    def induced(self, nodes: int) -> MicrobatchBytes:
        """On at most ``nodes`` nodes, the sources and the destinations of one block for all."""
        layers = len(self.fanouts)
        edges = int(self._edges[ALL_NEIGHBORS][nodes])
        block = edges * _BYTES_PER_EDGE + 2 * nodes * _BYTES_PER_NODE
        kept = tuple(self._kept(layer, nodes, nodes) for layer in range(layers))
        return MicrobatchBytes(self._features(nodes), (0,) * (layers - 1) + (block,), kept)

    def _features(self, rows: int) -> int:
        if self._elements is None:
            return 4 * rows * self._width
        return int(self._elements[rows]) * _BYTES_PER_SPARSE + rows * _BYTES_PER_NODE

    def _kept(self, layer: int, sources: int, destinations: int) -> int:
        fan_in, inner = self._shapes[layer].fan_in, self._inner[layer]
        # For each source: the row that came from the layer before (the features count by
        # themselves), the dropped row, and the linear map where it comes before the aggregation.
        rows = 2 * fan_in if layer else fan_in * (self._elements is None)
        per_source = rows + inner
        return 4 * (
            sources * per_source + destinations * _ROWS_PER_DESTINATION * max(fan_in, inner)
        )


def microbatches_within(config: Config, store: GraphStore, shapes: Sequence[LayerShape]) -> Budget:
    """The least multiple of ``parallel.microbatches`` whose microbatches fit ``memory.limit``.

    Without a limit that is ``parallel.microbatches`` itself. The mapped graph and features are the
    system's to keep or drop and do not count, nor do the interpreter and its libraries. ``shapes``:
    the model's layers.

    Raises:
        DtrainError: no number of microbatches fits, or the sampler cannot split, or the schedule
            keeps more of them in flight than fit.
    """
    wanted, limit = config.parallel.microbatches, config.memory.limit
    if limit is None:
        return Budget(wanted)
    model = PeakModel(config, store, shapes)
    if config.sampler.name == "cluster":
        budget = _clusters(model, config, store, limit)
    else:
        batch = config.train.batch_size or len(store.split(config.data.split).train)
        budget = _least(model, batch, wanted, limit)
    _check_schedule(config, budget)
    return budget


def _least(model: PeakModel, batch: int, wanted: int, limit: int) -> Budget:
    microbatches, least = wanted, 0
    while True:
        seeds = -(-batch // microbatches)
        budget = Budget(microbatches, limit, model.sampled(seeds), model.parameters)
        peak = budget.peak_bytes
        assert peak is not None
        if peak <= limit:
            return budget
        least = min(least or peak, peak)
        if seeds <= 1:
            raise DtrainError(
                f"memory.limit: expected at least {least} bytes, which the smallest microbatches "
                f"may need, got {limit}; raise it, or lower sampler.fanouts or model.hidden"
            )
        # The next number with which the largest microbatch has fewer seeds.
        microbatches = next_multiple(-(-batch // (seeds - 1)), wanted)


def next_multiple(number: int, of: int) -> int:
    """The least multiple of ``of`` that is at least ``number``."""
    return -(-number // of) * of


def _clusters(model: PeakModel, config: Config, store: GraphStore, limit: int) -> Budget:
    offsets = np.asarray(store.meta.partition_offsets, dtype=np.int64)
    nodes = int(np.sort(np.diff(offsets))[::-1][: config.sampler.clusters].sum())
    budget = Budget(config.parallel.microbatches, limit, model.induced(nodes), model.parameters)
    peak = budget.peak_bytes
    assert peak is not None
    if peak > limit:
        raise DtrainError(
            f"memory.limit: expected at least {peak} bytes for {config.sampler.clusters} clusters, "
            f"got {limit}; lower sampler.clusters or import with more --partitions"
        )
    return budget


def _check_schedule(config: Config, budget: Budget) -> None:
    """GPipe has all microbatches in flight, so that cutting them smaller does not help it."""
    if config.parallel.schedule != "gpipe":
        return
    assert budget.limit is not None
    peak = budget.bytes_in_flight(budget.microbatches)
    if peak > budget.limit:
        raise DtrainError(
            f"parallel.schedule: gpipe keeps all {budget.microbatches} microbatches in flight, "
            f"which may need {peak} bytes, got memory.limit {budget.limit}; set it to 1f1b"
        )


def _most_edges(degrees: NDArray[np.int64], fanout: int, replace: bool) -> NDArray[Any]:
    """int64 [N + 1]: the most edges that so many distinct destinations can have."""
    counts = degrees
    if fanout != ALL_NEIGHBORS:
        drawn = np.where(degrees > 0, fanout, 0)
        counts = drawn if replace else np.minimum(degrees, fanout)
    return _prefix_sums(counts)


def _prefix_sums(counts: NDArray[np.int64]) -> NDArray[Any]:
    return np.concatenate([[0], np.cumsum(counts)])
