"""A graph in memory, on its way from an importer into a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dtrain.data.csr_build import build_csr
from dtrain.errors import DtrainError

__all__ = [
    "CsrFeatures",
    "DenseFeatures",
    "DenseSource",
    "GraphArrays",
    "Split",
    "check_edges",
    "check_graph",
]

SPARSE_BELOW_DENSITY = 0.1
_CHECK_BYTES = 1 << 25


class Split(NamedTuple):
    """Seed nodes of one train/val/test split: int64, increasing, without common members."""

    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]


class DenseSource(Protocol):
    """Dense features that may be made on demand, a range of nodes at a time.

    ``dtype`` is float32 or float16; ``checked`` says that the values are finite by construction.
    """

    num_features: int
    dtype: np.dtype[Any]
    checked: bool

    def rows(self, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """Rows of ``nodes`` (int64 [n]): [n, num_features] of ``dtype``."""


class DenseFeatures:
    """Features in one array [N, F]; anything but float16 is kept as float32."""

    checked = False

    def __init__(self, values: NDArray[Any]) -> None:
        if values.ndim != 2 or values.dtype.kind not in "fiub":
            raise DtrainError(
                f"features: expected a numeric matrix [nodes, features], got {values.dtype} "
                f"of shape {list(values.shape)}"
            )
        keep = values.dtype == np.float16
        self.values = values if keep else np.ascontiguousarray(values, dtype=np.float32)
        self.num_features = int(values.shape[1])
        self.dtype = self.values.dtype

    def rows(self, nodes: NDArray[np.int64]) -> NDArray[Any]:
        """See :class:`DenseSource`."""
        return np.asarray(self.values[nodes])


@dataclass(frozen=True, eq=False)
class CsrFeatures:
    """Sparse features: ``indptr`` int64 [N + 1], ``indices`` int [nnz], ``values`` float [nnz]."""

    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    values: NDArray[Any]
    num_features: int

    def density(self) -> float:
        """Fraction of entries that are stored."""
        return len(self.values) / max(1, (len(self.indptr) - 1) * self.num_features)

    def to_dense(self) -> DenseFeatures:
        """The same values in one array; entries stored twice are summed."""
        dense = np.zeros((len(self.indptr) - 1, self.num_features), dtype=np.float32)
        rows = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        np.add.at(dense, (rows, self.indices), self.values)
        return DenseFeatures(dense)

    @classmethod
    def from_dense(cls, values: NDArray[Any]) -> CsrFeatures:
        """The non-zero entries of an array [N, F]."""
        rows, columns = np.nonzero(values)
        indptr = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(np.bincount(rows, minlength=len(values)), out=indptr[1:])
        numbers = values[rows, columns].astype(np.float32)
        return cls(indptr, columns.astype(np.int32), numbers, int(values.shape[1]))


@dataclass(eq=False)
class GraphArrays:
    """A whole graph in the source's numbering.

    ``indptr`` int64 [N + 1] and ``indices`` int [E]: rows of in-neighbours, increasing within a
    row. ``labels``: int64 [N], -1 where unlabelled, else in [0, num_classes). ``ids``: the source's
    name of each node, int64 or str [N]. ``directed`` is False when each edge is there both ways.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    features: DenseSource | CsrFeatures
    labels: NDArray[np.int64]
    num_classes: int
    splits: Sequence[Split] = field(default_factory=list)
    ids: NDArray[Any] | None = None
    class_names: Sequence[str] | None = None
    directed: bool = False
    source: str = "arrays"

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @classmethod
    def from_edges(
        cls,
        num_nodes: int,
        src: NDArray[Any],
        dst: NDArray[Any],
        features: DenseSource | CsrFeatures | NDArray[Any],
        labels: NDArray[Any] | None = None,
        *,
        undirected: bool = True,
        keep_self_loops: bool = False,
        num_classes: int | None = None,
        **rest: Any,
    ) -> GraphArrays:
        """From edges ``src[i] -> dst[i]`` (integers [n]); duplicates and self loops are removed.

        ``labels`` default to none; ``num_classes`` to the largest label + 1. ``rest`` are the other
        fields. Raises DtrainError as :func:`check_edges`.
        """
        check_edges(src, dst, num_nodes)
        indptr, indices = build_csr(
            num_nodes, src, dst, undirected=undirected, keep_self_loops=keep_self_loops
        )
        if isinstance(features, np.ndarray):
            features = DenseFeatures(features)
        if labels is None:
            labels = np.full(num_nodes, -1, dtype=np.int64)
        labels = np.asarray(labels)
        if num_classes is None:
            num_classes = int(labels.max(initial=-1)) + 1
        return cls(indptr, indices, features, labels, num_classes, directed=not undirected, **rest)


def check_edges(src: NDArray[Any], dst: NDArray[Any], num_nodes: int) -> None:
    """Raise DtrainError unless both ends of every edge are integers in [0, num_nodes)."""
    if len(src) != len(dst):
        raise DtrainError(f"edges: expected as many sources as targets, got {len(src)}, {len(dst)}")
    for name, ids in (("source", src), ("target", dst)):
        if ids.dtype.kind not in "iu":
            raise DtrainError(f"edges: {name} ids: expected integers, got {ids.dtype}")
        if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes):
            row = int(np.flatnonzero((ids < 0) | (ids >= num_nodes))[0])
            raise DtrainError(
                f"edges: row {row}: {name} id: expected a node in [0, {num_nodes - 1}], got "
                f"{ids[row]}; mend the edge or the number of nodes"
            )


def check_graph(graph: GraphArrays) -> None:
    """Check all that a store promises its readers.

    Raises:
        DtrainError: one line that names the array and the place in it.
    """
    num_nodes = graph.num_nodes
    if num_nodes < 1:
        raise DtrainError("graph: expected at least one node, got none")
    indices = graph.indices
    low, high = indices.min(initial=0), indices.max(initial=0)
    if low < 0 or high >= num_nodes:
        raise DtrainError(f"edges: expected node ids in [0, {num_nodes - 1}], got {low}..{high}")
    _check_features(graph.features, num_nodes)
    _check_labels(graph.labels, graph.num_classes, num_nodes)
    if graph.class_names is not None and len(graph.class_names) != graph.num_classes:
        raise DtrainError(
            f"class_names: expected {graph.num_classes} names, got {len(graph.class_names)}"
        )
    if graph.ids is not None and len(graph.ids) != num_nodes:
        raise DtrainError(f"ids: expected {num_nodes} of them, got {len(graph.ids)}")
    for k, split in enumerate(graph.splits):
        _check_split(k, split, graph.labels)


def _check_features(features: DenseSource | CsrFeatures, num_nodes: int) -> None:
    if features.num_features < 1:
        raise DtrainError("features: expected at least one column, got none")
    if isinstance(features, CsrFeatures):
        _check_csr_features(features, num_nodes)
        return
    if features.checked:
        return
    if isinstance(features, DenseFeatures) and len(features.values) != num_nodes:
        raise DtrainError(
            f"features: expected {num_nodes} rows (one for each node), got {len(features.values)}"
        )
    step = max(1, _CHECK_BYTES // (4 * features.num_features))
    for lo in range(0, num_nodes, step):
        rows = features.rows(np.arange(lo, min(lo + step, num_nodes)))
        finite = np.isfinite(rows)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            _not_finite(lo + int(row), int(column), rows[row, column])


def _check_csr_features(features: CsrFeatures, num_nodes: int) -> None:
    indptr, indices, values = features.indptr, features.indices, features.values
    if len(indptr) != num_nodes + 1:
        raise DtrainError(
            f"features: expected {num_nodes} rows (one for each node), got {len(indptr) - 1}"
        )
    ordered = indptr[0] == 0 and bool((np.diff(indptr) >= 0).all())
    if not ordered or not indptr[-1] == len(indices) == len(values):
        raise DtrainError(
            f"features: expected row offsets that rise from 0 to {len(values)} entries, got "
            f"{indptr[0]}..{indptr[-1]} for {len(indices)} columns and {len(values)} values"
        )
    wrong = (indices < 0) | (indices >= features.num_features)
    if wrong.any():
        entry = int(np.flatnonzero(wrong)[0])
        row = int(np.searchsorted(indptr, entry, side="right")) - 1
        raise DtrainError(
            f"features: row {row}: expected columns in [0, {features.num_features - 1}], got "
            f"{indices[entry]}"
        )
    finite = np.isfinite(values)
    if not finite.all():
        entry = int(np.flatnonzero(~finite)[0])
        row = int(np.searchsorted(indptr, entry, side="right")) - 1
        _not_finite(row, int(indices[entry]), values[entry])


def _not_finite(row: int, column: int, value: Any) -> None:
    raise DtrainError(
        f"features: row {row}, column {column}: expected a finite number, got {value}; "
        "mend or fill the value"
    )


def _check_labels(labels: NDArray[Any], num_classes: int, num_nodes: int) -> None:
    if labels.shape != (num_nodes,):
        raise DtrainError(f"labels: expected {num_nodes} of them, got shape {list(labels.shape)}")
    if labels.dtype.kind not in "iu":
        raise DtrainError(f"labels: expected integers, got {labels.dtype}")
    wrong = (labels < -1) | (labels >= num_classes)
    if wrong.any():
        node = int(np.flatnonzero(wrong)[0])
        expected = f"a class in [0, {num_classes - 1}] or -1 (unlabelled)" if num_classes else "-1"
        raise DtrainError(f"labels: node {node}: expected {expected}, got {labels[node]}")


def _check_split(k: int, split: Split, labels: NDArray[Any]) -> None:
    seen = np.full(len(labels), -1, dtype=np.int8)
    for index, (name, nodes) in enumerate(zip(Split._fields, split, strict=True)):
        where = f"split {k}: {name}"
        if len(nodes) == 0:
            raise DtrainError(
                f"{where}: expected at least one node, got none; choose other fractions "
                "or mend the split"
            )
        if nodes.dtype.kind not in "iu" or nodes.min() < 0 or nodes.max() >= len(labels):
            raise DtrainError(
                f"{where}: expected node ids in [0, {len(labels) - 1}], got "
                f"{nodes.min()}..{nodes.max()}"
            )
        ids, counts = np.unique(nodes, return_counts=True)
        if len(ids) != len(nodes):
            raise DtrainError(
                f"{where}: expected every node once, got node {ids[counts > 1][0]} twice"
            )
        taken = nodes[seen[nodes] >= 0]
        if len(taken):
            other = Split._fields[int(seen[taken[0]])]
            raise DtrainError(
                f"{where}: expected nodes of no other part, got node {taken[0]}, which "
                f"is in {other} too"
            )
        unlabelled = nodes[labels[nodes] < 0]
        if len(unlabelled):
            raise DtrainError(
                f"{where}: expected labelled nodes, got node {unlabelled[0]} without a label"
            )
        seen[nodes] = index
