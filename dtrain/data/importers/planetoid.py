"""The citation graphs of Planetoid, as published."""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.csr_build import take_csr_rows
from dtrain.data.graph import CsrFeatures, GraphArrays, Split
from dtrain.data.importers.options import ImportOptions
from dtrain.data.importers.pickles import CsrMatrix, load_plain
from dtrain.data.location import Location, locate, unreadable
from dtrain.data.splits import random_split
from dtrain.errors import DtrainError

VAL_NODES = 500
_PARTS = ("allx", "ally", "tx", "ty", "y", "graph", "test.index")


def read_planetoid(src: str, options: ImportOptions) -> GraphArrays:
    """A folder with ``ind.NAME.{x,tx,allx,y,ty,ally,graph,test.index}``.

    (Yang, Cohen and Salakhutdinov, "Revisiting semi-supervised learning with graph embeddings",
    ICML 2016.) ``options.name`` is needed where the folder holds several data sets. The split is
    the public one: train are the first ``len(y)`` nodes, val the 500 after them, test those listed.
    Test ids that are missing from the list are nodes without features and label.
    Features are divided by their row's sum unless ``normalize_features`` is False.

    Raises:
        DtrainError: a file is missing, damaged or unsafe, or the files contradict each other.
    """
    place = locate(src)
    name = options.name or _only_name(place)
    where = f"planetoid {src}: ind.{name}"
    raw = {part: place.read_bytes(f"ind.{name}.{part}") for part in _PARTS}
    test_ids = _test_ids(raw.pop("test.index"), f"{where}.test.index")
    loaded = {part: load_plain(raw[part], f"{where}.{part}") for part in raw}
    allx, tx = (_matrix(loaded[part], f"{where}.{part}") for part in ("allx", "tx"))
    ally, ty, y = (_one_hot(loaded[part], f"{where}.{part}") for part in ("ally", "ty", "y"))
    first_test, num_nodes = allx.shape[0], int(test_ids.max()) + 1
    if len(ally) != first_test or not len(ty) == tx.shape[0] == len(test_ids):
        raise DtrainError(
            f"{where}: expected as many labels as feature rows, got {first_test}, "
            f"{len(ally)} and {tx.shape[0]}, {len(ty)}, {len(test_ids)}"
        )
    if test_ids.min() < first_test or len(np.unique(test_ids)) != len(test_ids):
        raise DtrainError(f"{where}.test.index: expected distinct ids from {first_test} on")
    labels = np.full(num_nodes, -1, dtype=np.int64)
    labels[:first_test], labels[test_ids] = ally, ty
    features = _stack(allx, tx, test_ids, num_nodes)
    if options.normalize_features is not False:
        features = normalize_rows(features)
    src_ids, dst_ids = _edges(loaded["graph"], num_nodes, f"{where}.graph")
    val = np.arange(len(y), min(len(y) + VAL_NODES, first_test))
    split = Split(np.arange(len(y)), val, np.sort(test_ids))
    if options.split_fractions:
        split = random_split(
            labels, options.split_fractions, options.split_seed, field="--split-fractions"
        )
    return GraphArrays.from_edges(
        num_nodes, src_ids, dst_ids, features, labels,
        undirected=options.undirected is not False,
        keep_self_loops=options.keep_self_loops,
        num_classes=int(max(ally.max(), ty.max())) + 1,
        splits=[split],
        source=f"planetoid {name}",
    )  # fmt: skip


def normalize_rows(features: CsrFeatures) -> CsrFeatures:
    """Divide every row by its sum; rows that sum to zero stay as they are."""
    rows = np.repeat(np.arange(len(features.indptr) - 1), np.diff(features.indptr))
    values = features.values.astype(np.float64)
    sums = np.bincount(rows, weights=values, minlength=len(features.indptr) - 1)
    sums[sums == 0] = 1.0
    return replace(features, values=(values / sums[rows]).astype(np.float32))


def _only_name(place: Location) -> str:
    try:
        files = [posixpath.basename(str(path)) for path in place.fs.ls(place.path, detail=False)]
    except FileNotFoundError as error:
        raise DtrainError(
            f"planetoid {place.url}: expected a folder with files such as ind.cora.allx, found "
            "none; give the folder, and --name where it holds several data sets"
        ) from error
    except Exception as error:
        unreadable(f"planetoid {place.url}", error)
    names = sorted(m[1] for f in files if (m := re.fullmatch(r"ind\.(.+)\.allx", f)))
    if len(names) != 1:
        raise DtrainError(
            f"--name: expected one data set in {place.url}, got {', '.join(names) or 'none'}; "
            + ("choose one with --name" if names else "expected files such as ind.cora.allx")
        )
    return names[0]


def _test_ids(content: bytes, where: str) -> NDArray[np.int64]:
    ids = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        text = line.strip()
        if text and not text.isdigit():
            raise DtrainError(
                f"{where}, line {number}: expected a node id (an integer of at least 0), got "
                f"{text.decode(errors='replace')!r}"
            )
        if text:
            ids.append(int(text))
    if not ids:
        raise DtrainError(f"{where}: expected test node ids, got none")
    return np.array(ids, dtype=np.int64)


def _matrix(loaded: Any, where: str) -> CsrMatrix:
    if not isinstance(loaded, CsrMatrix):
        raise DtrainError(f"{where}: expected a sparse matrix, got {type(loaded).__name__}")
    return loaded


def _one_hot(loaded: Any, where: str) -> NDArray[np.int64]:
    if not isinstance(loaded, np.ndarray) or loaded.ndim != 2 or loaded.shape[1] < 1:
        raise DtrainError(f"{where}: expected one-hot labels [nodes, classes]")
    return np.where(loaded.any(axis=1), loaded.argmax(axis=1), -1).astype(np.int64)


def _stack(
    allx: CsrMatrix, tx: CsrMatrix, test_ids: NDArray[np.int64], num_nodes: int
) -> CsrFeatures:
    """Rows of ``allx``, then those of ``tx`` at their ids; ids that are missing have none."""
    if allx.shape[1] != tx.shape[1]:
        raise DtrainError(
            f"planetoid tx: expected {allx.shape[1]} features as in allx, got {tx.shape[1]}"
        )
    rows = allx.shape[0] + tx.shape[0]
    indptr = np.concatenate([allx.indptr.astype(np.int64), tx.indptr[1:] + allx.indptr[-1], [0]])
    indptr[-1] = indptr[-2]
    columns = np.concatenate([allx.indices, tx.indices])
    values = np.concatenate([allx.data, tx.data])
    ok = len(indptr) == rows + 2 and indptr[0] == 0 and bool((np.diff(indptr) >= 0).all())
    if not ok or not indptr[-1] == len(columns) == len(values):
        raise DtrainError("planetoid allx, tx: expected row offsets that match the entries")
    row_of_node = np.full(num_nodes, rows, dtype=np.int64)
    row_of_node[: allx.shape[0]] = np.arange(allx.shape[0])
    row_of_node[test_ids] = allx.shape[0] + np.arange(len(test_ids))
    new_ptr, new_columns, new_values = take_csr_rows(indptr, columns, values, row_of_node)
    return CsrFeatures(new_ptr, new_columns.astype(np.int32), new_values, allx.shape[1])


def _edges(graph: Any, num_nodes: int, where: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not isinstance(graph, dict):
        raise DtrainError(f"{where}: expected neighbours by node, got {type(graph).__name__}")
    pairs = []
    for node, neighbours in graph.items():
        for other in neighbours:
            if not (_is_node(node, num_nodes) and _is_node(other, num_nodes)):
                raise DtrainError(
                    f"{where}: edge {node!r} -> {other!r}: expected nodes in [0, {num_nodes - 1}]"
                )
            pairs.append((node, other))
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]


def _is_node(value: Any, num_nodes: int) -> bool:
    return isinstance(value, int) and 0 <= value < num_nodes
