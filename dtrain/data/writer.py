"""Write a graph as a store: all of it, or nothing that counts as one."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.csr_build import renumber_csr, take_csr_rows
from dtrain.data.graph import (
    SPARSE_BELOW_DENSITY,
    CsrFeatures,
    DenseFeatures,
    DenseSource,
    GraphArrays,
    check_graph,
)
from dtrain.data.location import Location, locate
from dtrain.data.meta import (
    META_FILE,
    SCHEMA_VERSION,
    SPLIT_PARTS,
    ArrayMeta,
    GraphMeta,
    QualityMeta,
    compute_fingerprint,
    parse_meta,
    split_array,
)
from dtrain.data.partition import partition_graph, quality
from dtrain.errors import DtrainError

_CHUNK_BYTES = 1 << 25


def write_store(
    url: str,
    graph: GraphArrays,
    *,
    partitions: int = 1,
    partitioner: str = "metis",
    seed: int = 0,
    overwrite: bool = False,
) -> GraphMeta:
    """Check ``graph``, cut it into ``partitions``, renumber its nodes by partition and write it.

    A local store is built beside ``url`` and renamed into place; elsewhere ``meta.json`` is
    written last. On any failure what was written is removed. ``seed`` is the partitioner's. Returns
    the new store's meta data.

    Raises:
        DtrainError: the graph is not sound (see :func:`check_graph`), a partitioning option is
            wrong, or ``url`` is taken (another store needs ``overwrite``) or cannot be written.
    """
    place = check_target(url, overwrite)
    check_graph(graph)
    part = partition_graph(
        partitioner, graph.indptr, graph.indices, partitions, seed=seed, directed=graph.directed
    )
    found = quality(graph.indptr, graph.indices, part, partitions)
    order = np.argsort(part, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(part, minlength=partitions))])
    with _Target(place) as target:
        features = _choose_format(graph.features)
        arrays = _write_arrays(target, graph, features, order)
        if isinstance(features, CsrFeatures):
            feature_format, feature_dtype = "csr", "float32"
        else:
            feature_format, feature_dtype = "dense", features.dtype.name
        facts = {
            "num_classes": graph.num_classes,
            "num_features": features.num_features,
            "directed": graph.directed,
            "partition_offsets": [int(offset) for offset in offsets],
        }
        meta = GraphMeta(
            schema_version=SCHEMA_VERSION,
            num_nodes=graph.num_nodes,
            num_edges=len(graph.indices),
            num_splits=len(graph.splits),
            partitioner=partitioner if partitions > 1 else "none",
            quality=QualityMeta(**found.as_dict()),
            feature_format=feature_format,
            feature_dtype=feature_dtype,
            source=graph.source,
            class_names=None if graph.class_names is None else tuple(graph.class_names),
            arrays=arrays,
            fingerprint=compute_fingerprint(facts, arrays),
            **facts,
        )
        target.commit(meta)
    return meta


def _write_arrays(
    target: _Target,
    graph: GraphArrays,
    features: DenseSource | CsrFeatures,
    order: NDArray[np.int64],
) -> dict[str, ArrayMeta]:
    indptr, indices = renumber_csr(graph.indptr, graph.indices, order)
    arrays = {"indptr": target.write("indptr", indptr), "indices": target.write("indices", indices)}
    del indices
    arrays |= _write_features(target, features, order)
    arrays["labels"] = target.write("labels", graph.labels.astype(np.int64)[order])
    ids: NDArray[Any] = np.arange(graph.num_nodes) if graph.ids is None else graph.ids
    # Text is kept as UTF-8 bytes: a quarter of numpy's own, and readable without pickle.
    ids = np.char.encode(ids, "utf-8") if ids.dtype.kind == "U" else ids.astype(np.int64)
    arrays["original_ids"] = target.write("original_ids", ids[order])
    new_id = np.empty(graph.num_nodes, dtype=np.int64)
    new_id[order] = np.arange(graph.num_nodes)
    for k, split in enumerate(graph.splits):
        for part, nodes in zip(SPLIT_PARTS, split, strict=True):
            arrays[split_array(k, part)] = target.write(
                split_array(k, part), np.sort(new_id[nodes])
            )
    return arrays


def _write_features(
    target: _Target, features: DenseSource | CsrFeatures, order: NDArray[np.int64]
) -> dict[str, ArrayMeta]:
    if isinstance(features, CsrFeatures):
        indptr, columns, values = take_csr_rows(
            features.indptr, features.indices, features.values, order
        )
        return {
            "features_indptr": target.write("features_indptr", indptr),
            "features_indices": target.write("features_indices", columns.astype(np.int32)),
            "features_values": target.write("features_values", values),
        }
    row_bytes = features.num_features * features.dtype.itemsize
    step = max(1, _CHUNK_BYTES // row_bytes)
    chunks = (features.rows(order[lo : lo + step]) for lo in range(0, len(order), step))
    shape = (len(order), features.num_features)
    return {"features": target.write_chunks("features", features.dtype, shape, chunks)}


def _choose_format(features: DenseSource | CsrFeatures) -> DenseSource | CsrFeatures:
    """Keep what is mostly zeros sparse, and nothing else."""
    if isinstance(features, CsrFeatures):
        return features if features.density() < SPARSE_BELOW_DENSITY else features.to_dense()
    if isinstance(features, DenseFeatures):
        values = features.values
        if np.count_nonzero(values) < SPARSE_BELOW_DENSITY * values.size:
            return CsrFeatures.from_dense(values)
    return features


def check_target(url: str, overwrite: bool) -> Location:
    """Where a store may be written.

    Raises:
        DtrainError: there is a store and not ``overwrite``, or something that is no store.
    """
    place = locate(url)
    if place.exists(META_FILE):
        if not overwrite:
            raise DtrainError(
                f"--out {place.url}: expected no store there, found one; pass --overwrite or "
                "choose another place"
            )
        parse_meta(place.read_bytes(META_FILE), place.url)
    elif place.is_local and os.path.lexists(place.path):
        # Only ever replace a store: a mistyped --out must not cost somebody's folder.
        taken = not os.path.isdir(place.path) or bool(os.listdir(place.path))
        if taken:
            raise DtrainError(
                f"--out {place.url}: expected a new or empty folder, found something that is no "
                "store; choose another place"
            )
    return place


@dataclass
class _Sink:
    """One array on its way to a file: a .npy header, then its bytes, hashed as they pass."""

    file: Any
    digest: Any

    def put(self, data: NDArray[Any]) -> None:
        content = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        self.digest.update(content)
        self.file.write(content)


class _Target:
    """The place a store is written to; leaving the context without ``commit`` removes it."""

    def __init__(self, place: Location) -> None:
        self._place, self._committed = place, False
        self._staging = place
        if place.is_local:
            path = f"{place.path.rstrip('/')}.incomplete-{uuid.uuid4().hex[:8]}"
            self._staging = Location(place.url, place.fs, path)
        self._written: list[str] = []

    def __enter__(self) -> _Target:
        try:
            if self._place.is_local:
                Path(self._staging.path).mkdir(parents=True)
            elif self._place.exists(META_FILE):
                # From here on the old store no longer counts, whatever becomes of the new one.
                self._place.fs.rm(self._place.path, recursive=True)
        except Exception as error:
            raise _unwritable(self._place, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._committed:
            return
        if self._place.is_local:
            shutil.rmtree(self._staging.path, ignore_errors=True)
        else:
            for name in self._written:
                if self._staging.exists(name):
                    self._staging.fs.rm(self._staging.join(name))

    def write(self, name: str, array: NDArray[Any]) -> ArrayMeta:
        """Write one array, little-endian, row-major."""
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        step = max(1, _CHUNK_BYTES // max(1, array[:1].nbytes))
        chunks: Iterator[NDArray[Any]] = (
            array[lo : lo + step] for lo in range(0, len(array), step)
        )
        return self.write_chunks(name, array.dtype, array.shape, chunks)

    def write_chunks(
        self,
        name: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        chunks: Iterable[NDArray[Any]],
    ) -> ArrayMeta:
        """Write one array that comes as consecutive groups of rows."""
        dtype = dtype.newbyteorder("<")
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header, {"descr": dtype.str, "fortran_order": False, "shape": shape}
        )
        digest = hashlib.sha256()
        self._written.append(f"{name}.npy")
        # Only the file's own errors are reworded: those of ``chunks`` have their own message.
        with _WritableFile(self._staging, f"{name}.npy") as file:
            file.write(header.getvalue())
            sink = _Sink(file, digest)
            rows = 0
            for chunk in chunks:
                sink.put(chunk.astype(dtype, copy=False))
                rows += len(chunk)
        assert rows == shape[0], f"{name}: {rows} rows written, {shape[0]} announced"
        size = len(header.getvalue()) + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return ArrayMeta(dtype=dtype.str, shape=shape, file_bytes=size, sha256=digest.hexdigest())

    def commit(self, meta: GraphMeta) -> None:
        """Make it a store: ``meta.json``, then, on a local disk, the rename into place."""
        self._written.append(META_FILE)
        with _WritableFile(self._staging, META_FILE) as file:
            file.write(meta.to_json().encode())
        if self._place.is_local:
            try:
                self._rename_into_place()
            except OSError as error:
                raise _unwritable(self._place, error) from error
        self._committed = True

    def _rename_into_place(self) -> None:
        final, old = self._place.path, f"{self._staging.path}.replaced"
        replaces = os.path.exists(os.path.join(final, META_FILE))
        if replaces:
            os.rename(final, old)
        try:
            os.rename(self._staging.path, final)
        except OSError:
            if replaces:
                os.rename(old, final)
            raise
        if replaces:
            shutil.rmtree(old)


class _WritableFile:
    """An open file of a location whose failures become DtrainErrors."""

    def __init__(self, place: Location, name: str) -> None:
        self._place = place
        try:
            self._file = place.fs.open(place.join(name), "wb")
        except Exception as error:
            raise _unwritable(place, error) from error

    def write(self, data: Any) -> None:
        try:
            self._file.write(data)
        except Exception as error:
            raise _unwritable(self._place, error) from error

    def __enter__(self) -> _WritableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except Exception as closing:
            if error is None:
                raise _unwritable(self._place, closing) from closing


def _unwritable(place: Location, error: Exception) -> DtrainError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DtrainError(f"--out {place.url}: cannot be written ({' '.join(str(reason).split())})")
