"""Exact evaluation: every layer over all nodes before the next one, so that nothing is sampled.

Layer-wise inference as in GraphSAGE's and Cluster-GCN's reference evaluations: a node's row is
computed once a layer, from all its in-neighbours, and memory is bounded by the chunk.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dtrain.data.sample.neighbor import ALL_NEIGHBORS, Adjacency, Ids, SlotPool, sample_block
from dtrain.errors import DtrainError
from dtrain.metrics import classification
from dtrain.models.layer import LayerContext, State

if TYPE_CHECKING:
    from dtrain.data.store import GraphStore

SPLIT_NAMES = ("train", "val", "test")
MEMORY_BYTES = 4 << 30
"""What inference takes at most where nothing else is said."""
_SPARSE_ENTRY_BYTES = 12  # int64 column, float32 value
_EDGE_BYTES = 48  # sampled and final column, a copy with self loops, weights
_NODE_BYTES = 24  # global id, row pointer, degree
# Of each destination: aggregate, two linear maps, their sum, activated, and what else a layer has.
_ROWS_PER_DESTINATION = 6
_METRIC_COPIES = 4


@dataclass(frozen=True)
class Limits:
    """What one chunk may hold: destinations and their in-edges."""

    nodes: int
    edges: int


def evaluate(
    layers: Sequence[nn.Module],
    store: GraphStore,
    split: int,
    *,
    chunk_nodes: int,
    workdir: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    memory_bytes: int = MEMORY_BYTES,
) -> dict[str, dict[str, float]]:
    """Metrics of train, val and test of ``split``, as :func:`dtrain.metrics.classification`.

    Arguments and errors as :func:`layerwise_logits`.
    """
    parts = store.split(split)
    logits = layerwise_logits(
        layers,
        store,
        chunk_nodes=chunk_nodes,
        workdir=workdir,
        device=device,
        memory_bytes=memory_bytes,
    )
    found = {}
    for name in SPLIT_NAMES:
        ids = np.asarray(getattr(parts, name))
        labels = np.asarray(store.labels[ids], dtype=np.int64)
        # Copies of a chunk's rows: as they are, in float64, less their largest, and exponentials.
        rows = memory_bytes // 2 // (_METRIC_COPIES * 8 * logits.shape[1])
        found[name] = classification(logits, labels, ids, chunk_rows=max(1, min(chunk_nodes, rows)))
    return found


def layerwise_logits(
    layers: Sequence[nn.Module],
    store: GraphStore,
    *,
    chunk_nodes: int,
    workdir: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    max_edges: int = 4_000_000,
    memory_bytes: int = MEMORY_BYTES,
) -> NDArray[np.float32]:
    """Logits of every node, float32 [N, C], from all in-neighbours at every layer.

    Goes partition by partition in chunks of at most ``chunk_nodes`` destinations and ``max_edges``
    in-edges, which take at most three eighths of ``memory_bytes`` with what layers make of them; a
    single node beyond them still makes one chunk. A layer's rows of all nodes, kept for at most two
    layers at a time, lie in memory up to a quarter of ``memory_bytes``, else in a nameless file in
    ``workdir`` that the system frees with its last use, also after a crash. ``layers`` must be on
    ``device``; they run in evaluation mode and get their former mode back.

    Raises:
        DtrainError: a layer does not return [num_dst, ...], or the last one not [num_dst, C];
            ``workdir`` cannot hold the file.
    """
    limits = Limits(chunk_nodes, max_edges)
    inference = _Inference(store, limits, memory_bytes, workdir, torch.device(device))
    state: _Rows | None = None
    with _evaluation_mode(layers), torch.inference_mode():
        for layer in layers:
            state = inference.run(layer, state)
    if state is None or len(state.tensors) != 1 or state.tensors[0].dim() != 2:
        shapes = [list(t.shape) for t in state.tensors] if state else []
        raise DtrainError(
            f"model: expected the last layer to return one tensor [num_dst, num_classes], "
            f"got {shapes}; mend the model"
        )
    logits: NDArray[np.float32] = state.tensors[0].numpy()
    # A layer in float64 kept its rows so; all others are float32 already.
    return logits.astype(np.float32, copy=False)


def chunks(
    indptr: NDArray[np.int64], offsets: Sequence[int], limits: Limits
) -> Iterator[tuple[int, int]]:
    """Runs of nodes within one partition and within ``limits``, that together cover all nodes.

    ``indptr``: int64 [N + 1]; ``offsets``: the partitions' first nodes, and N.
    """
    for start, stop in itertools.pairwise(offsets):
        begin = int(start)
        while begin < stop:
            most = np.searchsorted(indptr, indptr[begin] + limits.edges, side="right") - 1
            end = min(max(int(most), begin + 1), begin + limits.nodes, int(stop))
            yield begin, end
            begin = end


@contextmanager
def _evaluation_mode(layers: Sequence[nn.Module]) -> Iterator[None]:
    modules = [module for layer in layers for module in layer.modules()]
    modes = [module.training for module in modules]
    try:
        for layer in layers:
            layer.eval()
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


@dataclass(frozen=True)
class _Rows:
    """What a layer returned, for all nodes: tensors [N, ...] and whether it was a tuple.

    ``dtypes`` are the layer's own; kept are float32 or float64, which a mapped file can hold.
    """

    tensors: tuple[Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    is_tuple: bool

    @property
    def row_bytes(self) -> int:
        return sum(t.element_size() * t[:1].numel() for t in self.tensors)

    def take(self, nodes: Tensor) -> Tensor | tuple[Tensor, ...]:
        picked = tuple(
            rows.index_select(0, nodes).to(dtype)
            for rows, dtype in zip(self.tensors, self.dtypes, strict=True)
        )
        return picked if self.is_tuple else picked[0]

    def put(self, begin: int, end: int, out: Tensor | tuple[Tensor, ...]) -> None:
        for rows, part in zip(self.tensors, _as_tuple(out), strict=True):
            if part.shape != (end - begin, *rows.shape[1:]):
                raise DtrainError(
                    f"model: expected a layer to return {[end - begin, *rows.shape[1:]]} for "
                    f"{end - begin} destinations, got {list(part.shape)}; mend the model"
                )
            rows[begin:end].copy_(part)


class _Inference:
    """Runs one layer over all nodes."""

    def __init__(
        self,
        store: GraphStore,
        limits: Limits,
        memory_bytes: int,
        workdir: str | os.PathLike[str],
        device: torch.device,
    ) -> None:
        self._store = store
        self._graph = Adjacency.of(store.indptr, store.indices)
        self._offsets = store.meta.partition_offsets
        self._pool = SlotPool(self._graph.num_nodes)
        self._limits = limits
        self._memory_bytes = memory_bytes
        self._workdir = workdir
        self._device = device

    def run(self, layer: nn.Module, state: _Rows | None) -> _Rows:
        """The layer's rows for all nodes; ``state``: the layer below's, or None for features."""
        result: _Rows | None = None
        ctx = LayerContext(key=0, training=False)
        row_bytes = state.row_bytes if state else _feature_row_bytes(self._store)
        limits = self._fit(row_bytes, 4 * _widest(layer))
        for begin, end in chunks(self._graph.indptr, self._offsets, limits):
            block, nodes = sample_block(
                self._graph,
                self._pool,
                np.arange(begin, end, dtype=np.int64),
                fanout=ALL_NEIGHBORS,
                replace=False,
                key=0,
            )
            out = layer(block.to(self._device), self._input(state, nodes), ctx)
            if result is None:
                result = self._allocate(out)
            result.put(begin, end, out)
            # Else they are still there while the next chunk is made.
            del block, nodes, out
        assert result is not None, "a store has at least one node"
        return result

    def _fit(self, row_bytes: int, width_bytes: int) -> Limits:
        """Limits under which a chunk stays within three eighths of the memory.

        ``row_bytes``: of a source's row; ``width_bytes``: of the widest row that the layer makes.
        """
        made = max(row_bytes, width_bytes)
        source = row_bytes + made + _NODE_BYTES
        destination = _ROWS_PER_DESTINATION * made
        part = 3 * self._memory_bytes // 16
        if self._graph.num_nodes * source <= part:
            # Whatever the chunk, there are no more sources.
            edges, nodes = part // 2 // _EDGE_BYTES, part // 2 // destination
        else:
            # A chunk has at most as many sources as destinations and edges together.
            edges, nodes = part // (source + _EDGE_BYTES), part // (source + destination)
        return Limits(
            max(1, min(self._limits.nodes, nodes)), max(1, min(self._limits.edges, edges))
        )

    def _input(self, state: _Rows | None, nodes: Ids) -> State:
        if state is None:
            return self._store.gather_features(nodes).to(self._device)
        rows = state.take(torch.from_numpy(nodes))
        if isinstance(rows, Tensor):
            return rows.to(self._device)
        return tuple(part.to(self._device) for part in rows)

    def _allocate(self, out: Tensor | tuple[Tensor, ...]) -> _Rows:
        parts = _as_tuple(out)
        tensors = tuple(self._tensor(part.shape[1:], part.dtype) for part in parts)
        return _Rows(tensors, tuple(part.dtype for part in parts), isinstance(out, tuple))

    def _tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        kept = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        size = (self._graph.num_nodes, *shape)
        num_bytes = int(np.prod(size)) * kept.itemsize
        if num_bytes <= self._memory_bytes // 4:
            return torch.from_numpy(np.empty(size, kept))
        return torch.from_numpy(_map_nameless(self._workdir, size, kept, num_bytes))


def _map_nameless(
    workdir: str | os.PathLike[str], shape: tuple[int, ...], dtype: np.dtype[Any], num_bytes: int
) -> NDArray[Any]:
    """An array over a file without a name, whose disk space is reserved."""
    try:
        with tempfile.TemporaryFile(dir=workdir) as file:
            # Without it a full disk shows only at the first write through the map, as SIGBUS.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
    except OSError as error:
        raise DtrainError(
            f"workdir {os.fspath(workdir)}: expected room for {num_bytes} bytes of hidden rows, "
            f"got: {error.strerror}; free some space or use another folder"
        ) from error


def _widest(layer: nn.Module) -> int:
    """Numbers in the widest row that a layer's matrices make or take."""
    return max((max(p.shape) for p in layer.parameters() if p.dim() == 2), default=1)


def _feature_row_bytes(store: GraphStore) -> int:
    """Bytes of a node's features once gathered; the mean where they are sparse."""
    meta = store.meta
    if meta.feature_format == "dense":
        return 4 * meta.num_features
    entries = meta.arrays["features_indices"].shape[0]
    return -(-entries // meta.num_nodes) * _SPARSE_ENTRY_BYTES


def _as_tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)
