"""Features, labels and splits that come in files of their own, keyed by node id."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.graph import CsrFeatures, DenseFeatures, GraphArrays, Split
from dtrain.data.importers.options import ImportOptions
from dtrain.data.importers.planetoid import normalize_rows
from dtrain.data.importers.tables import (
    IdPairs,
    is_parquet,
    open_binary,
    parquet_ids,
    parse_id,
    read_parquet_columns,
    text_rows,
)
from dtrain.data.splits import random_split
from dtrain.errors import DtrainError

_PART_OF = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}


@dataclass(frozen=True)
class KeyedFeatures:
    """Feature rows and the id of each: ``ids`` int64 [n] or list of str."""

    ids: Any
    features: DenseFeatures | CsrFeatures


class NodeIndex:
    """The nodes of a graph: their ids in increasing order, and each id's place in it."""

    def __init__(self, is_text: bool, groups: Sequence[Any]) -> None:
        """``groups``: id arrays (int64) or lists of str; a node is an id in any of them."""
        self.is_text = is_text
        if is_text:
            names = sorted(set().union(*groups))
            self.ids: NDArray[Any] = np.array(names, dtype=np.str_)
            self._place = {name: k for k, name in enumerate(names)}
            return
        arrays = [np.asarray(group, dtype=np.int64) for group in groups if len(group)]
        largest = max((int(array.max()) for array in arrays), default=-1)
        if largest < 8 * sum(len(array) for array in arrays) + 1024:
            seen = np.zeros(largest + 1, dtype=bool)
            for array in arrays:
                seen[array] = True
            self.ids = np.flatnonzero(seen)
        else:
            self.ids = np.unique(np.concatenate([np.unique(array) for array in arrays]))
        self._is_range = len(self.ids) == largest + 1

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Any) -> NDArray[np.int64]:
        """int64 [n]: the place of every id, -1 for those that are no node."""
        if self.is_text:
            return np.array([self._place.get(name, -1) for name in ids], dtype=np.int64)
        wanted = np.asarray(ids, dtype=np.int64)
        if self._is_range:
            return np.where(wanted < len(self.ids), wanted, -1)
        place = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        return np.where(self.ids[place] == wanted, place, -1)


def assemble(pairs: IdPairs, universe: Any, source: str, options: ImportOptions) -> GraphArrays:
    """The graph of an edge list and of the feature, label and split files that ``options`` name.

    ``universe``: further ids that are nodes (int64 array or list of str). The nodes are all ids of
    edges, features and labels, in increasing order. Without a feature file a node's features are 1
    and ``log(1 + in-degree)``. Without labels all nodes are unlabelled.

    Raises:
        DtrainError: one line that names the file and the line or id.
    """
    is_text = pairs.is_text
    keyed = read_features(options.features, is_text) if options.features else None
    labelled = read_labels(options, is_text) if options.labels else None
    groups = [pairs.src, pairs.dst, universe]
    groups += [keyed.ids] if keyed else []
    groups += [list(labelled)] if labelled else []
    index = NodeIndex(is_text, groups)
    labels, names = _label_array(labelled, index, options)
    src, dst = index.find(pairs.src), index.find(pairs.dst)
    placeholder = DenseFeatures(np.ones((len(index), 1), dtype=np.float32))
    graph = GraphArrays.from_edges(
        len(index), src, dst, placeholder, labels,
        undirected=options.undirected is not False,
        keep_self_loops=options.keep_self_loops,
        num_classes=len(names) if names else options.num_classes,
        ids=index.ids,
        class_names=names,
        source=source,
    )  # fmt: skip
    if keyed:
        graph.features = _align(keyed, index, options)
    else:
        degree = np.log1p(np.diff(graph.indptr).astype(np.float32))
        graph.features = DenseFeatures(np.stack([np.ones_like(degree), degree], axis=1))
    if options.splits:
        graph.splits = [read_split(options.splits, index)]
    elif options.split_fractions:
        fractions, seed = options.split_fractions, options.split_seed
        graph.splits = [random_split(labels, fractions, seed, field="--split-fractions")]
    return graph


def read_features(url: str, is_text: bool) -> KeyedFeatures:
    """A feature file: JSON ``{id: [feature ids]}``, or a table whose first column is the id.

    Raises DtrainError for an id that is given twice, a number that is not finite, and what else is
    wrong.
    """
    if url.lower().removesuffix(".gz").endswith(".json"):
        return _json_features(url, is_text)
    if is_parquet(url):
        return _parquet_features(url, is_text)
    return _text_features(url, is_text)


def read_labels(options: ImportOptions, is_text: bool) -> dict[Any, str]:
    """Label text by id; the first column is the id, the label is the last unless named.

    Empty labels and ``-1`` are left out.
    """
    assert options.labels is not None
    found: dict[Any, str] = {}
    for where, key, label in _keyed_column(options.labels, "labels", is_text, options.label_column):
        if key in found:
            raise DtrainError(f"{where}: expected every id once, got {key!r} again")
        found[key] = label
        if options.num_classes is not None and label not in ("", "-1"):
            ok = label.isdigit() and int(label) < options.num_classes
            if not ok:
                raise DtrainError(
                    f"{where}: expected a class in [0, {options.num_classes - 1}] or -1, "
                    f"got {label!r}"
                )
    return found


def read_split(url: str, index: NodeIndex) -> Split:
    """A split file: id, and ``train``, ``val`` or ``test``; other nodes are in no part."""
    parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    seen: set[Any] = set()
    for where, key, word in _keyed_column(url, "splits", index.is_text, None):
        part = _PART_OF.get(word.lower())
        if part is None:
            raise DtrainError(f"{where}: expected train, val or test, got {word!r}")
        if key in seen:
            raise DtrainError(f"{where}: expected every id once, got {key!r} again")
        if index.find([key])[0] < 0:
            raise DtrainError(f"{where}: expected the id of a node, got {key!r}")
        seen.add(key)
        parts[part].append(key)
    return Split(*(np.sort(index.find(part)) for part in parts))


def _keyed_column(
    url: str, what: str, is_text: bool, column: str | None
) -> Iterator[tuple[str, Any, str]]:
    """Place, id and value of every row; the value is the named column or the last."""
    if is_parquet(url):
        table = read_parquet_columns(url, what, [column] if column else None)
        if column:
            table = read_parquet_columns(url, what, None)
        ids = parquet_ids(table.column(0), f"{what} {url}", "string" if is_text else "auto")
        if isinstance(ids, list) != is_text:
            raise DtrainError(f"{what} {url}: expected ids of the same type as the edges' ids")
        values = table.column(column or table.num_columns - 1).to_pylist()
        for row, (key, value) in enumerate(zip(ids, values, strict=True)):
            key = key if is_text else int(key)
            yield f"{what} {url}, row {row}", key, "" if value is None else str(value)
        return
    place = -1
    first = True
    for number, fields in text_rows(url, what):
        where = f"{what} {url}, line {number}"
        if len(fields) < 2:
            raise DtrainError(f"{where}: expected an id and a value, got {fields}")
        if first:
            first = False
            if column is not None:
                if column not in fields:
                    raise DtrainError(
                        f"{where}: expected a column named {column!r}, got {', '.join(fields)}"
                    )
                place = fields.index(column)
                continue
            if _is_label_header(fields, is_text):
                continue
        if place >= len(fields):
            raise DtrainError(f"{where}: expected {place + 1} fields, got {len(fields)}")
        yield where, parse_id(fields[0], is_text, where), fields[place]


def _is_label_header(fields: list[str], is_text: bool) -> bool:
    if is_text:
        return fields[0].lower() in ("id", "node", "node_id", "name")
    return not fields[0].lstrip("+-").replace(".", "", 1).isdigit()


def _label_array(
    labelled: dict[Any, str] | None, index: NodeIndex, options: ImportOptions
) -> tuple[NDArray[np.int64], list[str] | None]:
    """int64 [N] and the class names; whole numbers are sorted as numbers, all else as text."""
    labels = np.full(len(index), -1, dtype=np.int64)
    if labelled is None:
        return labels, None
    known = {key: text for key, text in labelled.items() if text not in ("", "-1")}
    if not known:
        raise DtrainError(f"labels {options.labels}: expected at least one label, got none")
    places = index.find(list(known))
    if options.num_classes is not None:
        labels[places] = [int(text) for text in known.values()]
        return labels, None
    words = set(known.values())
    numbers = all(word.lstrip("-").isdigit() for word in words)
    names = sorted(words, key=int) if numbers else sorted(words)
    class_of = {name: k for k, name in enumerate(names)}
    labels[places] = [class_of[text] for text in known.values()]
    return labels, names


def _align(
    keyed: KeyedFeatures, index: NodeIndex, options: ImportOptions
) -> DenseFeatures | CsrFeatures:
    """Feature rows in the order of the nodes."""
    places = index.find(keyed.ids)
    row_of = np.full(len(index), -1, dtype=np.int64)
    row_of[places] = np.arange(len(places))
    missing = np.flatnonzero(row_of < 0)
    if len(missing):
        raise DtrainError(
            f"features {options.features}: expected a row for each of {len(index)} nodes, got none "
            f"for id {index.ids[missing[0]]} and {len(missing) - 1} more; add them"
        )
    features = keyed.features
    if isinstance(features, DenseFeatures):
        if options.normalize_features:
            sums = features.values.sum(axis=1, keepdims=True, dtype=np.float64)
            features = DenseFeatures(features.values / np.where(sums == 0, 1.0, sums))
        return DenseFeatures(features.rows(row_of))
    lengths = np.diff(features.indptr)[row_of]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    entries = np.arange(indptr[-1]) + np.repeat(features.indptr[row_of] - indptr[:-1], lengths)
    aligned = replace(
        features, indptr=indptr, indices=features.indices[entries], values=features.values[entries]
    )
    return normalize_rows(aligned) if options.normalize_features else aligned


def _json_features(url: str, is_text: bool) -> KeyedFeatures:
    with open_binary(url, "features") as file:
        try:
            bags = json.load(file)
        except (ValueError, OSError, EOFError) as error:
            raise DtrainError(f"features {url}: expected JSON, got something else") from error
    if not isinstance(bags, dict) or not bags:
        raise DtrainError(f"features {url}: expected an object {{id: [feature ids]}}")
    ids, lengths, columns = [], [], []
    for key, bag in bags.items():
        where = f"features {url}, id {key!r}"
        ids.append(parse_id(key, is_text, where))
        ok = isinstance(bag, list) and all(type(f) is int and 0 <= f < 2**31 for f in bag)
        if not ok:
            raise DtrainError(f"{where}: expected a list of feature ids (integers of at least 0)")
        members = sorted(set(bag))
        lengths.append(len(members))
        columns.extend(members)
    if not columns:
        raise DtrainError(f"features {url}: expected at least one feature, got none")
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = np.ones(len(columns), dtype=np.float32)
    indices = np.array(columns, dtype=np.int32)
    features = CsrFeatures(indptr, indices, values, int(indices.max()) + 1)
    return KeyedFeatures(ids if is_text else np.array(ids, dtype=np.int64), features)


def _text_features(url: str, is_text: bool) -> KeyedFeatures:
    ids: list[Any] = []
    rows: list[NDArray[np.float32]] = []
    seen: set[Any] = set()
    first, width = True, 0
    for number, fields in text_rows(url, "features"):
        where = f"features {url}, line {number}"
        if first:
            first, width = False, len(fields)
            if width < 2:
                raise DtrainError(f"{where}: expected an id and numbers, got {fields}")
            if not any(_is_float(field) for field in fields[1:]):
                continue
        if len(fields) != width:
            raise DtrainError(f"{where}: expected {width} fields, got {len(fields)}")
        key = parse_id(fields[0], is_text, where)
        if key in seen:
            raise DtrainError(f"{where}: expected every id once, got {key!r} again")
        seen.add(key)
        ids.append(key)
        rows.append(_numbers(fields[1:], where))
    if not rows:
        raise DtrainError(f"features {url}: expected at least one row, got none")
    features = DenseFeatures(np.stack(rows))
    return KeyedFeatures(ids if is_text else np.array(ids, dtype=np.int64), features)


def _numbers(fields: list[str], where: str) -> NDArray[np.float32]:
    try:
        row = np.array(fields, dtype=np.float32)
        if np.isfinite(row).all():
            return row
    except ValueError:
        row = None
    for column, text in enumerate(fields):
        if not _is_float(text) or not math.isfinite(np.float32(text)):
            raise DtrainError(
                f"{where}, column {column + 2}: expected a finite number, got {text!r}; "
                "mend or fill the value"
            )
    raise DtrainError(f"{where}: expected numbers, got {fields}")


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parquet_features(url: str, is_text: bool) -> KeyedFeatures:
    table = read_parquet_columns(url, "features", None)
    if table.num_columns < 2 or table.num_rows == 0:
        raise DtrainError(f"features {url}: expected an id column and numbers, got none")
    ids = parquet_ids(table.column(0), f"features {url}", "string" if is_text else "auto")
    if isinstance(ids, list) != is_text:
        raise DtrainError(f"features {url}: expected ids of the same type as the edges' ids")
    if len(set(ids if is_text else ids.tolist())) != len(ids):
        raise DtrainError(f"features {url}: expected every id once, got one twice")
    matrix = np.empty((table.num_rows, table.num_columns - 1), dtype=np.float32)
    for k, name in enumerate(table.column_names[1:]):
        column = table.column(name)
        values = column.to_numpy()
        if values.dtype.kind not in "fiub":
            raise DtrainError(f"features {url}, column {name}: expected numbers, got {column.type}")
        wrong = np.flatnonzero(~np.isfinite(values.astype(np.float64)))
        if len(wrong):
            raise DtrainError(
                f"features {url}, column {name}, row {wrong[0]}: expected a finite number, got "
                f"{values[wrong[0]]}; mend or fill the value"
            )
        matrix[:, k] = values
    return KeyedFeatures(ids, DenseFeatures(matrix))
