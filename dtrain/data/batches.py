"""The microbatches of every step: which seeds, and the blocks their layers compute on.

Microbatch ``m`` of step ``t`` is a pure function of (seed, t, m). It never depends on the process,
the thread or what was asked before, so any worker can run any microbatch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor, from_numpy

from dtrain.config import SamplerConfig
from dtrain.data.block import Block
from dtrain.data.sample.cluster import ids_in_ranges, induced_block, ranges_of
from dtrain.data.sample.neighbor import ALL_NEIGHBORS, Adjacency, Ids, SlotPool, sample_block
from dtrain.data.sample.seeds import EpochOrder, part_bounds
from dtrain.errors import DtrainError
from dtrain.kernels.rng import derive_key

if TYPE_CHECKING:
    from dtrain.data.store import GraphStore

_SAMPLE_TAG = 0x53414D50


@dataclass
class MicrobatchSample:
    """What one microbatch computes on, from layer ``first_layer`` up.

    ``blocks``: one for each layer from ``first_layer`` on. ``input_nodes``: int64 [num_src of the
    first block], global ids of its sources. ``seeds``: int64 [B], global ids. ``seed_rows``: int64
    [B], the seeds' rows among the last block's destinations; None where they are rows 0 to B - 1.
    """

    blocks: list[Block]
    input_nodes: Ids
    seed_rows: Tensor | None
    seeds: Ids


class BatchSource:
    """The microbatches of a run; see :class:`MicrobatchSample`.

    ``full``: every in-neighbour at every layer. Without ``batch_size`` a step is all train nodes
    in increasing order and a microbatch the same at every step; then its blocks are kept, and are
    the same objects (``static``), unless ``keep`` is false for want of memory.
    ``neighbor``: at most ``fanouts[i]`` in-neighbours at layer ``i``, layer 0 being the one that
    reads the features. ``cluster``: a microbatch is the subgraph induced by ``clusters``
    partitions, every layer's block is that one, and its seeds are the train nodes in it.

    ``steps_per_epoch``: steps in which every train node is a seed exactly once.

    Safe to use from several threads.

    Raises:
        DtrainError: an empty train split, or settings that do not fit the sampler or the store.
    """

    def __init__(
        self,
        store: GraphStore,
        *,
        split: int,
        sampler: SamplerConfig,
        batch_size: int | None,
        microbatches: int,
        num_layers: int,
        seed: int,
        keep: bool = True,
    ) -> None:
        train = np.ascontiguousarray(store.split(split).train, dtype=np.int64)
        if not len(train):
            raise DtrainError(
                f"data.split: expected split {split} to have train nodes, got none; "
                "choose another split or import the graph with one"
            )
        fixed = sampler.name == "full" and batch_size is None
        self.static = fixed and keep
        self._source: _Source
        if sampler.name == "cluster":
            if batch_size is not None:
                raise DtrainError(
                    f"train.batch_size: expected none with the cluster sampler, got {batch_size}; "
                    "set sampler.clusters instead"
                )
            self._source = _ClusterSource(
                store, train, sampler.clusters, microbatches, num_layers, seed
            )
        else:
            fanouts = sampler.fanouts if sampler.name == "neighbor" else []
            fanouts = fanouts or [ALL_NEIGHBORS] * num_layers
            if len(fanouts) != num_layers:
                raise DtrainError(
                    f"sampler.fanouts: expected one number for each of {num_layers} layers, "
                    f"got {len(fanouts)}: {fanouts}"
                )
            order = EpochOrder(train, seed, shuffle=not fixed)
            seeds = _SeedSlices(order, batch_size or len(train), microbatches)
            graph = Adjacency.of(store.indptr, store.indices)
            layers = _LayerSampler(graph, fanouts, sampler.replace, seed)
            self._source = _StaticSource(seeds, layers) if self.static else _Drawn(seeds, layers)
        self._microbatches = microbatches
        self._num_layers = num_layers
        self.steps_per_epoch: int = self._source.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch that ``step`` belongs to, both from 0."""
        return step // self.steps_per_epoch

    def seeds(self, step: int, microbatch: int) -> Ids:
        """int64 [B]: global ids of the microbatch's seeds, without sampling; B may be 0."""
        self._check(step, microbatch, 0)
        return self._source.seeds(step, microbatch)

    def step_seeds(self, step: int) -> int:
        """Number of seeds of all microbatches of ``step``, without sampling."""
        self._check(step, 0, 0)
        return self._source.step_seeds(step)

    def sample(self, step: int, microbatch: int, first_layer: int = 0) -> MicrobatchSample:
        """Draw the microbatch's blocks from ``first_layer`` up.

        Sampling starts at the seeds and goes down, so the blocks equal the last ones of a sample
        of all layers, and layers below ``first_layer`` cost nothing.
        """
        self._check(step, microbatch, first_layer)
        return self._source.sample(step, microbatch, first_layer)

    def _check(self, step: int, microbatch: int, first_layer: int) -> None:
        if step < 0 or not 0 <= microbatch < self._microbatches:
            raise IndexError(
                f"step {step}, microbatch {microbatch}: expected a step of at least 0 and a "
                f"microbatch in [0, {self._microbatches})"
            )
        if not 0 <= first_layer < self._num_layers:
            raise IndexError(f"first_layer {first_layer}: expected [0, {self._num_layers})")


class _Source(Protocol):
    """What a sampler has to give."""

    steps_per_epoch: int

    def seeds(self, step: int, microbatch: int) -> Ids: ...

    def step_seeds(self, step: int) -> int: ...

    def sample(self, step: int, microbatch: int, first_layer: int) -> MicrobatchSample: ...


class _SeedSlices:
    """Seeds of a microbatch as a slice of the epoch's order."""

    def __init__(self, order: EpochOrder, batch_size: int, microbatches: int) -> None:
        self._order = order
        self._batch_size = batch_size
        self._microbatches = microbatches
        self.steps_per_epoch = -(-len(order.ids) // batch_size)

    def count(self, step: int) -> int:
        begin = step % self.steps_per_epoch * self._batch_size
        return min(self._batch_size, len(self._order.ids) - begin)

    def seeds(self, step: int, microbatch: int) -> Ids:
        epoch, number = divmod(step, self.steps_per_epoch)
        begin, end = part_bounds(self.count(step), self._microbatches, microbatch)
        base = number * self._batch_size
        return self._order.order(epoch)[base + begin : base + end].copy()


class _LayerSampler:
    """Draws blocks downwards from destinations, layer by layer."""

    def __init__(self, graph: Adjacency, fanouts: list[int], replace: bool, seed: int) -> None:
        self._graph = graph
        self._fanouts = fanouts
        self._replace = replace
        self._seed = seed
        self._pool = SlotPool(graph.num_nodes)
        self.num_layers = len(fanouts)

    def descend(
        self, step: int, microbatch: int, destinations: Ids, first: int, end: int
    ) -> tuple[list[Block], Ids]:
        """Blocks of layers [first, end), ``destinations`` being those of layer ``end - 1``.

        Also returns the global ids of the sources of layer ``first``.
        """
        blocks: list[Block] = []
        nodes = destinations
        for layer in range(end - 1, first - 1, -1):
            block, nodes = sample_block(
                self._graph,
                self._pool,
                nodes,
                fanout=self._fanouts[layer],
                replace=self._replace,
                key=derive_key(self._seed, _SAMPLE_TAG, step, microbatch, layer),
            )
            blocks.append(block)
        return blocks[::-1], nodes


class _Drawn:
    """New blocks for every microbatch."""

    def __init__(self, slices: _SeedSlices, layers: _LayerSampler) -> None:
        self._slices = slices
        self._layers = layers
        self.steps_per_epoch = slices.steps_per_epoch

    def seeds(self, step: int, microbatch: int) -> Ids:
        return self._slices.seeds(step, microbatch)

    def step_seeds(self, step: int) -> int:
        return self._slices.count(step)

    def sample(self, step: int, microbatch: int, first_layer: int) -> MicrobatchSample:
        seeds = self._slices.seeds(step, microbatch)
        blocks, nodes = self._layers.descend(
            step, microbatch, seeds, first_layer, self._layers.num_layers
        )
        return MicrobatchSample(blocks, nodes, None, seeds)


class _StaticSource(_Drawn):
    """One set of blocks for each microbatch, made when first asked for and kept for the run."""

    def __init__(self, slices: _SeedSlices, layers: _LayerSampler) -> None:
        super().__init__(slices, layers)
        self._lock = threading.Lock()
        self._made: dict[int, tuple[list[Block], Ids]] = {}

    def sample(self, step: int, microbatch: int, first_layer: int) -> MicrobatchSample:
        seeds = self._slices.seeds(step, microbatch)
        with self._lock:
            # The blocks made so far are those of the last layers; their sources go on downwards.
            blocks, nodes = self._made.get(microbatch, ([], seeds))
            lowest = self._layers.num_layers - len(blocks)
            if first_layer < lowest:
                below, nodes = self._layers.descend(0, microbatch, nodes, first_layer, lowest)
                blocks = below + blocks
                self._made[microbatch] = (blocks, nodes)
        wanted = blocks[first_layer - self._layers.num_layers :]
        # A layer's sources are the first ones of the sources of every layer below it.
        return MicrobatchSample(wanted, nodes[: wanted[0].num_src].copy(), None, seeds)


class _ClusterSource:
    """Induced subgraphs of a few partitions, dealt out in a new order every epoch."""

    def __init__(
        self,
        store: GraphStore,
        train: Ids,
        clusters: int,
        microbatches: int,
        num_layers: int,
        seed: int,
    ) -> None:
        partitions = store.num_partitions
        if partitions < clusters:
            raise DtrainError(
                f"sampler.clusters: expected at most the store's {partitions} partitions, "
                f"got {clusters}; import the graph again with --partitions {clusters} or more"
            )
        self._graph = Adjacency.of(store.indptr, store.indices)
        self._offsets = np.asarray(store.meta.partition_offsets, dtype=np.int64)
        self._train = train
        self._clusters = clusters
        self._microbatches = microbatches
        self._num_layers = num_layers
        self._order = EpochOrder(np.arange(partitions, dtype=np.int64), seed)
        self.steps_per_epoch = -(-partitions // (clusters * microbatches))

    def _ranges(self, step: int, microbatch: int, count: int = 1) -> tuple[Ids, Ids]:
        epoch, number = divmod(step, self.steps_per_epoch)
        begin = (number * self._microbatches + microbatch) * self._clusters
        chosen = self._order.order(epoch)[begin : begin + count * self._clusters]
        return ranges_of(chosen, self._offsets)

    def seeds(self, step: int, microbatch: int) -> Ids:
        return ids_in_ranges(self._train, *self._ranges(step, microbatch))

    def step_seeds(self, step: int) -> int:
        begins, ends = self._ranges(step, 0, self._microbatches)
        counts = np.searchsorted(self._train, ends) - np.searchsorted(self._train, begins)
        return int(counts.sum())

    def sample(self, step: int, microbatch: int, first_layer: int) -> MicrobatchSample:
        begins, ends = self._ranges(step, microbatch)
        block, nodes = induced_block(self._graph, begins, ends)
        seeds = ids_in_ranges(self._train, begins, ends)
        rows = from_numpy(np.searchsorted(nodes, seeds).astype(np.int64))
        return MicrobatchSample([block] * (self._num_layers - first_layer), nodes, rows, seeds)
