"""Graphs in one numpy archive."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.csr_build import is_symmetric
from dtrain.data.graph import CsrFeatures, DenseFeatures, GraphArrays, Split
from dtrain.data.importers.options import ImportOptions
from dtrain.data.importers.planetoid import normalize_rows
from dtrain.data.location import locate, unreadable
from dtrain.data.splits import masks_to_splits, random_split
from dtrain.errors import DtrainError


class _Archive:
    """The arrays of a file, each read when asked for, under any of several names."""

    def __init__(self, src: str) -> None:
        place = locate(src)
        self.where = f"npz {src}"
        try:
            content = place.fs.cat_file(place.path)
        except Exception as error:
            unreadable(self.where, error)
        try:
            self._file = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise DtrainError(
                f"{self.where}: expected an .npz archive of plain arrays, got another file"
            ) from error
        if not isinstance(self._file, np.lib.npyio.NpzFile):
            raise DtrainError(f"{self.where}: expected an .npz archive, got a single array")

    def find(self, *names: str) -> NDArray[Any] | None:
        """The first array there is of ``names``."""
        for name in names:
            if name in self._file.files:
                try:
                    return np.asarray(self._file[name])
                except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
                    raise DtrainError(
                        f"{self.where}: {name}: expected a plain array, got pickled objects"
                    ) from error
        return None

    def need(self, what: str, *names: str) -> NDArray[Any]:
        """As :meth:`find`; raises DtrainError where there is none."""
        found = self.find(*names)
        if found is None:
            raise DtrainError(
                f"{self.where}: {what}: expected an array named {' or '.join(names)}, got "
                f"{', '.join(self._file.files)}"
            )
        return found


def read_npz(src: str, options: ImportOptions) -> GraphArrays:
    """An ``.npz`` archive; arrays go by these names.

    Edges: ``edges`` [E, 2], ``edge_index`` [2, E], or CSR as ``adj_indptr``, ``adj_indices`` (row =
    source). Features: ``node_features``, ``features`` or ``x`` [N, F], or CSR as ``attr_indptr``,
    ``attr_indices``, ``attr_data``, ``attr_shape``. Labels: ``node_labels``, ``labels`` or ``y``
    [N]. Splits: ``train_masks``, ``val_masks``, ``test_masks`` [K, N] (or ``train_mask`` ... [N],
    [N, K]); none is no error. Edges are made undirected unless ``undirected`` is False.
    ``heterophilous`` graphs (Platonov et al., ICLR 2023) are of this kind.

    Raises:
        DtrainError: an array is missing, pickled or of a wrong shape, or an edge leads nowhere.
    """
    archive = _Archive(src)
    labels = archive.need("labels", "node_labels", "labels", "y").reshape(-1)
    if labels.dtype.kind not in "iu":
        raise DtrainError(f"{archive.where}: labels: expected integers, got {labels.dtype}")
    labels = labels.astype(np.int64)
    src_ids, dst_ids = _edges(archive)
    features = _features(archive)
    if options.normalize_features:
        as_csr = features if isinstance(features, CsrFeatures) else None
        features = normalize_rows(as_csr or CsrFeatures.from_dense(_dense(features)))
    graph = GraphArrays.from_edges(
        len(labels), src_ids, dst_ids, features, labels,
        undirected=options.undirected is not False,
        keep_self_loops=options.keep_self_loops,
        splits=_splits(archive, labels, options),
        source=f"npz {src.rsplit('/', 1)[-1]}",
    )  # fmt: skip
    if graph.directed:
        graph.directed = not is_symmetric(graph.indptr, graph.indices)
    return graph


def _dense(features: DenseFeatures | CsrFeatures) -> NDArray[Any]:
    assert isinstance(features, DenseFeatures)
    return features.values


def _edges(archive: _Archive) -> tuple[NDArray[Any], NDArray[Any]]:
    pairs = archive.find("edges", "edge_index")
    if pairs is not None:
        if pairs.ndim == 2 and pairs.shape[1] == 2:
            return pairs[:, 0], pairs[:, 1]
        if pairs.ndim == 2 and pairs.shape[0] == 2:
            return pairs[0], pairs[1]
        raise DtrainError(
            f"{archive.where}: edges: expected shape [E, 2] or [2, E], got {list(pairs.shape)}"
        )
    indptr = archive.need("edges", "adj_indptr")
    targets = archive.need("edges", "adj_indices")
    counts = np.diff(indptr)
    if indptr[0] != 0 or bool((counts < 0).any()) or indptr[-1] != len(targets):
        raise DtrainError(
            f"{archive.where}: adj_indptr: expected offsets that rise from 0 to {len(targets)}"
        )
    return np.repeat(np.arange(len(counts)), counts), targets


def _features(archive: _Archive) -> DenseFeatures | CsrFeatures:
    values = archive.find("node_features", "features", "x")
    if values is not None:
        return DenseFeatures(values)
    parts = [archive.need("features", f"attr_{part}") for part in ("indptr", "indices", "data")]
    shape = archive.need("features", "attr_shape")
    return CsrFeatures(parts[0].astype(np.int64), parts[1], parts[2], int(shape[1]))


def _splits(archive: _Archive, labels: NDArray[np.int64], options: ImportOptions) -> list[Split]:
    if options.split_fractions:
        return [
            random_split(
                labels, options.split_fractions, options.split_seed, field="--split-fractions"
            )
        ]
    masks = {part: archive.find(f"{part}_masks", f"{part}_mask") for part in Split._fields}
    found = {part: mask for part, mask in masks.items() if mask is not None}
    return masks_to_splits(found, len(labels), archive.where) if found else []
