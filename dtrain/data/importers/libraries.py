"""Data sets that other libraries download and keep."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.graph import DenseFeatures, GraphArrays, Split
from dtrain.data.importers.options import ImportOptions
from dtrain.data.splits import masks_to_splits, random_split
from dtrain.errors import DtrainError

_PYG_CITATION = ("Cora", "CiteSeer", "PubMed")


def read_pyg(name: str, options: ImportOptions) -> GraphArrays:
    """A node-level data set of PyTorch Geometric: ``Cora``, ``Reddit``, ``Amazon/Computers``...

    ``CLASS`` or ``CLASS/NAME``, as in ``torch_geometric.datasets``. Raises DtrainError where the
    library or the data set is missing, or it is not one graph with ``x``, ``edge_index`` and ``y``.
    """
    datasets = _library("torch_geometric.datasets", "pyg")
    class_name, _, argument = name.partition("/")
    if class_name in _PYG_CITATION and not argument:
        class_name, argument = "Planetoid", class_name
    dataset_class = _attribute(datasets, class_name, f"pyg:{name}")
    root = str(_download_dir(options) / "pyg" / name.replace("/", "-"))
    dataset = _call(f"pyg:{name}", dataset_class, root, *([argument] if argument else []))
    if len(dataset) != 1:
        raise DtrainError(f"pyg:{name}: expected a single graph, got {len(dataset)}")
    return from_pyg_data(dataset[0], f"pyg {name}", options)


def from_pyg_data(data: Any, source: str, options: ImportOptions) -> GraphArrays:
    """A graph from ``x`` [N, F], ``edge_index`` [2, E], ``y`` [N] and the masks there are."""
    for field in ("x", "edge_index", "y"):
        if getattr(data, field, None) is None:
            raise DtrainError(f"{source}: expected a graph with {field}, got none")
    labels = _labels(data.y)
    masks = {part: _array(getattr(data, f"{part}_mask", None)) for part in Split._fields}
    found = {part: mask for part, mask in masks.items() if mask is not None}
    splits = masks_to_splits(found, len(labels), source) if found else []
    edges = _array(data.edge_index)
    assert edges is not None
    return _graph(edges, _array(data.x), labels, splits, source, options)


def read_ogb(name: str, options: ImportOptions) -> GraphArrays:
    """A node property prediction data set of OGB, such as ``ogbn-arxiv``.

    Raises DtrainError where the library or the data set is missing, or it has no node features.
    """
    module = _library("ogb.nodeproppred", "ogb")
    root = str(_download_dir(options) / "ogb")
    dataset = _call(f"ogb:{name}", module.NodePropPredDataset, name=name, root=root)
    graph, labels = dataset[0]
    if graph.get("node_feat") is None:
        raise DtrainError(f"ogb:{name}: expected node features, got none")
    index = dataset.get_idx_split()
    split = Split(*(np.sort(np.asarray(index[part])) for part in ("train", "valid", "test")))
    features = np.asarray(graph["node_feat"])
    return _graph(graph["edge_index"], features, _labels(labels), [split], f"ogb {name}", options)


def read_dgl(name: str, options: ImportOptions) -> GraphArrays:
    """A node-level data set of DGL by its class, such as ``CoraGraphDataset``.

    Raises DtrainError where the library or the data set is missing, or it lacks ``feat`` or
    ``label``.
    """
    module = _library("dgl.data", "dgl")
    dataset_class = _attribute(module, name, f"dgl:{name}")
    dataset = _call(f"dgl:{name}", dataset_class, raw_dir=str(_download_dir(options) / "dgl"))
    graph = dataset[0]
    for field in ("feat", "label"):
        if field not in graph.ndata:
            raise DtrainError(f"dgl:{name}: expected node data {field!r}, got none")
    edges = np.stack([np.asarray(ends) for ends in graph.edges()])
    labels = _labels(graph.ndata["label"])
    masks = {
        p: _array(graph.ndata[f"{p}_mask"]) for p in Split._fields if f"{p}_mask" in graph.ndata
    }
    splits = masks_to_splits(masks, len(labels), f"dgl:{name}") if masks else []  # type: ignore[arg-type]
    return _graph(edges, _array(graph.ndata["feat"]), labels, splits, f"dgl {name}", options)


def _graph(
    edges: NDArray[Any],
    features: NDArray[Any] | None,
    labels: NDArray[np.int64],
    splits: list[Split],
    source: str,
    options: ImportOptions,
) -> GraphArrays:
    assert features is not None
    if options.split_fractions:
        fractions, seed = options.split_fractions, options.split_seed
        splits = [random_split(labels, fractions, seed, field="--split-fractions")]
    if options.normalize_features:
        sums = features.sum(axis=1, keepdims=True, dtype=np.float64)
        features = features / np.where(sums == 0, 1.0, sums)
    return GraphArrays.from_edges(
        len(labels), edges[0], edges[1], DenseFeatures(features), labels,
        undirected=options.undirected is not False,
        keep_self_loops=options.keep_self_loops,
        splits=splits,
        source=source,
    )  # fmt: skip


def _array(value: Any) -> NDArray[Any] | None:
    return None if value is None else np.asarray(value)


def _labels(value: Any) -> NDArray[np.int64]:
    """One class a node; float labels (OGB marks unlabelled nodes by NaN) become -1 there."""
    labels = np.asarray(value)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DtrainError(f"labels: expected one class a node, got shape {list(labels.shape)}")
    if labels.dtype.kind == "f":
        labels = np.where(np.isnan(labels), -1, labels)
    return labels.astype(np.int64)


def _library(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DtrainError(
            f"{extra}: expected the library {module.split('.')[0]}, got none; "
            f"pip install 'dtrain[{extra}]'"
        ) from error


def _attribute(module: Any, name: str, what: str) -> Any:
    found = getattr(module, name, None) if name.isidentifier() else None
    if not isinstance(found, type):
        raise DtrainError(f"{what}: expected a data set of {module.__name__}, got no such name")
    return found


def _call(what: str, dataset_class: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return dataset_class(*args, **kwargs)
    except Exception as error:
        # Whatever the library raises: network, disk, a wrong name.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DtrainError(f"{what}: cannot be loaded ({reason})") from error


def _download_dir(options: ImportOptions) -> Path:
    if options.download_dir:
        return Path(options.download_dir).expanduser()
    return Path.home() / ".cache" / "dtrain" / "datasets"
