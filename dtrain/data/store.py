"""Graphs on disk: a folder of flat arrays that every worker maps, on any fsspec URL."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data.csr_build import take_csr_rows
from dtrain.data.graph import Split
from dtrain.data.location import Location, locate
from dtrain.data.meta import (
    META_FILE,
    SPLIT_PARTS,
    GraphMeta,
    check_sizes,
    parse_meta,
    split_array,
)
from dtrain.data.ranged import CachedFile, RangedArray
from dtrain.errors import DtrainError
from dtrain.kernels.csr import Csr, SparseRows
from dtrain.kernels.rows.stored import StoredRows

__all__ = ["GraphMeta", "GraphStore", "Split"]

_HEADER_PROBE_BYTES = 4096


@dataclass(frozen=True)
class GraphStore:
    """A graph that is read in place.

    Nodes are numbered so that every partition is one contiguous range. ``indptr``: int64 [N + 1],
    ``indices``: int32 or int64 [E]: row ``v`` lists the sources ``u`` of the edges ``u -> v``, in
    increasing order. ``labels``: int64 [N], -1 where unlabelled (never in a split). All arrays are
    read-only; those of a local store are memory-mapped.
    """

    url: str
    meta: GraphMeta
    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    labels: NDArray[np.int64]
    _features: tuple[RangedArray, ...]
    _load: Callable[[str], NDArray[Any]]

    @classmethod
    def open(cls, url: str, cache_dir: str | None = None) -> GraphStore:
        """Open the store at ``url`` (a path or any fsspec URL) without reading it through.

        Arrays of a remote store are kept in ``cache_dir`` (default ``~/.cache/dtrain``), the
        features only as far as they are gathered.

        Raises:
            DtrainError: no store there, not readable, another schema version, or an array of
                another size than ``meta.json`` says.
        """
        place = locate(url)
        if not place.exists(META_FILE):
            raise DtrainError(
                f"store {url}: expected {META_FILE} there, found none; check the path, or make the "
                "store with `dtrain data import` or `dtrain data synth`"
            )
        meta = parse_meta(place.read_bytes(META_FILE), url)
        check_sizes(place, meta)
        arrays = _LocalArrays(place, meta) if place.is_local else _remote(place, meta, cache_dir)
        indptr = arrays.whole("indptr")
        if indptr[0] != 0 or indptr[-1] != meta.num_edges:
            raise DtrainError(
                f"store {url}: indptr.npy: expected it to run from 0 to {meta.num_edges}, got "
                f"{indptr[0]} to {indptr[-1]}; import the graph again"
            )
        features = tuple(
            RangedArray(arrays.whole(name)) if name == "features_indptr" else arrays.ranged(name)
            for name in meta.feature_array_names()
        )
        return cls(
            url,
            meta,
            indptr,
            arrays.whole("indices"),
            arrays.whole("labels"),
            features,
            arrays.whole,
        )

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) that identifies the dataset: content of all arrays and the partitioning."""
        return self.meta.fingerprint

    @property
    def num_nodes(self) -> int:
        return self.meta.num_nodes

    @property
    def num_partitions(self) -> int:
        return self.meta.num_partitions

    def in_degree(self) -> NDArray[np.int64]:
        """int64 [N]: edges that enter each node."""
        return np.diff(self.indptr)

    def feature_counts(self) -> NDArray[np.int64] | None:
        """int64 [N]: stored elements of each node's feature row; None where features are dense."""
        if self.meta.feature_format == "dense":
            return None
        return np.diff(self._features[0].data)

    def original_ids(self) -> NDArray[Any]:
        """[N]: each node's id in the source: int64, or str where the source had string ids."""
        ids = self._load("original_ids")
        return np.char.decode(ids, "utf-8") if ids.dtype.kind == "S" else ids

    def partition_of(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n]: the partition of each of ``nodes`` (int64 [n])."""
        offsets = np.asarray(self.meta.partition_offsets, dtype=np.int64)
        return np.searchsorted(offsets, nodes, side="right") - 1

    def split(self, k: int) -> Split:
        """Split ``k``: sorted int64 node ids of train, val and test.

        Raises:
            DtrainError: the store has no split ``k``.
        """
        if not 0 <= k < self.meta.num_splits:
            have = f"splits 0..{self.meta.num_splits - 1}" if self.meta.num_splits else "no splits"
            raise DtrainError(
                f"data.split: store {self.url} has {have}, got {k}; choose one of them or import "
                "the graph with --splits or --split-fractions"
            )
        return Split(*(self._load(split_array(k, part)) for part in SPLIT_PARTS))

    def gather_features(self, nodes: NDArray[np.int64]) -> Tensor | SparseRows:
        """Feature rows of ``nodes`` (int64 [n]), in that order.

        Dense: a fresh float32 tensor [n, F]. CSR: :class:`SparseRows` of shape [n, F] with float32
        values. Raises IndexError for a node outside [0, N).
        """
        nodes = self._checked(nodes)
        if self.meta.feature_format == "dense":
            return self._gather_dense(nodes)
        return self._gather_sparse(nodes)

    def stored_features(self, nodes: NDArray[np.int64]) -> StoredRows | None:
        """The same rows where they lie, a remote store's once they have been fetched.

        None where they are sparse, or stored in another order or type than float32. Raises
        IndexError for a node outside [0, N).
        """
        features, nodes = self._features[0], self._checked(nodes)
        data = features.data
        if self.meta.feature_format != "dense" or data.dtype != np.float32:
            return None
        features.require(nodes, nodes + 1)
        return StoredRows(data, nodes) if data.flags.c_contiguous else None

    def _checked(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        nodes = np.ascontiguousarray(nodes, dtype=np.int64)
        if len(nodes) and (nodes.min() < 0 or nodes.max() >= self.num_nodes):
            raise IndexError(
                f"nodes: expected ids in [0, {self.num_nodes}), got {nodes.min()}...{nodes.max()}"
            )
        return nodes

    def _gather_dense(self, nodes: NDArray[np.int64]) -> Tensor:
        features = self._features[0]
        features.require(nodes, nodes + 1)
        if features.data.dtype == np.float32:
            return StoredRows(features.data, nodes).gather()
        out = torch.empty((len(nodes), self.meta.num_features), dtype=torch.float32)
        out.numpy()[...] = features.data[nodes]
        return out

    def _gather_sparse(self, nodes: NDArray[np.int64]) -> SparseRows:
        indptr, indices, values = self._features
        starts, stops = indptr.data[nodes], indptr.data[nodes + 1]
        indices.require(starts, stops)
        values.require(starts, stops)
        row_ptr, columns, numbers = take_csr_rows(indptr.data, indices.data, values.data, nodes)
        csr = Csr(torch.from_numpy(row_ptr), torch.from_numpy(columns), self.meta.num_features)
        return SparseRows(csr, torch.from_numpy(numbers))

    def verify(self) -> None:
        """Read every array through and compare its sha256 with ``meta.json``.

        Raises:
            DtrainError: an array's content is not what was written.
        """
        for name, array in self.meta.arrays.items():
            digest = hashlib.sha256()
            data = self._load(name)
            rows = max(1, (1 << 24) // max(1, data[:1].nbytes))
            for lo in range(0, len(data), rows):
                digest.update(data[lo : lo + rows].tobytes())
            if digest.hexdigest() != array.sha256:
                raise DtrainError(
                    f"store {self.url}: {name}.npy: expected sha256 {array.sha256[:16]}..., got "
                    f"{digest.hexdigest()[:16]}...; its content changed, import the graph again"
                )


class _LocalArrays:
    """Arrays of a store on a local disk."""

    def __init__(self, place: Location, meta: GraphMeta) -> None:
        self._place, self._meta = place, meta

    def whole(self, name: str) -> NDArray[Any]:
        return _map_array(self._place.join(f"{name}.npy"), name, self._meta, self._place.url)

    def ranged(self, name: str) -> RangedArray:
        return RangedArray(self.whole(name))


class _RemoteArrays:
    """Arrays of a store elsewhere, through sparse local copies."""

    def __init__(self, place: Location, meta: GraphMeta, folder: Path) -> None:
        self._place, self._meta, self._folder = place, meta, folder

    def whole(self, name: str) -> NDArray[Any]:
        file = self._file(name)
        file.require_all()
        return _map_array(str(file.path), name, self._meta, self._place.url)

    def ranged(self, name: str) -> RangedArray:
        file = self._file(name)
        file.require(np.array([0]), np.array([min(_HEADER_PROBE_BYTES, file.size_bytes)]))
        data = _map_array(str(file.path), name, self._meta, self._place.url)
        return RangedArray(data, file.require, header_bytes=file.size_bytes - data.nbytes)

    def _file(self, name: str) -> CachedFile:
        size = self._meta.arrays[name].file_bytes
        remote = self._place.join(f"{name}.npy")
        return CachedFile(self._place.fs, remote, size, self._folder / f"{name}.npy")


def _remote(place: Location, meta: GraphMeta, cache_dir: str | None) -> _RemoteArrays:
    root = Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "dtrain"
    # Keyed by content as well, so a store written anew at the same URL is never mixed with the old.
    key = hashlib.sha256(f"{place.url}\n{meta.fingerprint}".encode()).hexdigest()[:24]
    return _RemoteArrays(place, meta, root / "stores" / key)


def _map_array(path: str, name: str, meta: GraphMeta, url: str) -> NDArray[Any]:
    """Map ``NAME.npy`` read-only and check its type and shape."""
    expected = meta.arrays[name]
    try:
        # A plain ndarray over the map: numba and torch treat it as any other array. Maps of no
        # bytes do not exist, so an empty array is read.
        empty = 0 in expected.shape
        data = np.asarray(np.load(path, mmap_mode=None if empty else "r", allow_pickle=False))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a .npy array"
        raise DtrainError(f"store {url}: {name}.npy: cannot be read ({reason})") from error
    if data.dtype.str != expected.dtype or data.shape != expected.shape:
        raise DtrainError(
            f"store {url}: {name}.npy: expected {expected.dtype} {list(expected.shape)}, got "
            f"{data.dtype.str} {list(data.shape)}; import the graph again"
        )
    return data
