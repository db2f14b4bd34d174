"""What is in a store, in numbers."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from dtrain.data.meta import SPLIT_PARTS
from dtrain.data.partition import quality
from dtrain.data.store import GraphStore
from dtrain.kernels.csr import SparseRows

_DENSITY_SAMPLE = 16384


def describe(store: GraphStore) -> dict[str, Any]:
    """Counts, degrees, homophily, partition quality, splits and identity of ``store``, for JSON.

    ``degree`` is of in-edges; ``isolated`` nodes have no edge at all. ``homophily`` is the fraction
    of edges between labelled nodes whose ends have one label, None where there is none.
    ``features.density`` is the fraction of non-zero values, of dense features over at most 16,384
    evenly spaced nodes.
    """
    meta = store.meta
    offsets = np.asarray(meta.partition_offsets)
    sizes = np.diff(offsets)
    part = np.repeat(np.arange(meta.num_partitions, dtype=np.int32), sizes)
    found = quality(store.indptr, store.indices, part, meta.num_partitions)
    edges = np.diff(store.indptr[offsets])
    same, known = _count_same(store.indptr, store.indices, store.labels)
    return {
        "url": store.url,
        "source": meta.source,
        "fingerprint": meta.fingerprint,
        "num_nodes": meta.num_nodes,
        "num_edges": meta.num_edges,
        "directed": meta.directed,
        "degree": _degrees(store),
        "homophily": same / known if known else None,
        "num_classes": meta.num_classes,
        "labels": _label_counts(store),
        "unlabelled": int(np.count_nonzero(store.labels < 0)),
        "features": {
            "count": meta.num_features,
            "format": meta.feature_format,
            "dtype": meta.feature_dtype,
            "density": _density(store),
        },
        "partitions": {
            "count": meta.num_partitions,
            "partitioner": meta.partitioner,
            **found.as_dict(),
            "nodes": [int(n) for n in sizes],
            "edges": [int(n) for n in edges],
        },
        "splits": [
            {name: len(nodes) for name, nodes in zip(SPLIT_PARTS, store.split(k), strict=True)}
            for k in range(meta.num_splits)
        ],
        "bytes": sum(array.file_bytes for array in meta.arrays.values()),
    }


def summary_lines(facts: dict[str, Any]) -> list[str]:
    """The lines that ``dtrain data info`` prints for :func:`describe`'s result."""
    degree, features, parts = facts["degree"], facts["features"], facts["partitions"]
    homophily = "-" if facts["homophily"] is None else f"{facts['homophily']:.4f}"
    labels = ", ".join(f"{name}: {count:,}" for name, count in list(facts["labels"].items())[:20])
    more = len(facts["labels"]) - 20
    direction = "directed" if facts["directed"] else "in both directions"
    rows = [
        ("store", facts["url"]),
        ("source", facts["source"]),
        ("fingerprint", facts["fingerprint"]),
        ("size", f"{facts['bytes'] / 2**20:,.1f} MiB"),
        ("nodes", f"{facts['num_nodes']:,}"),
        (
            "edges",
            f"{facts['num_edges']:,} {direction}",
        ),
        (
            "degree",
            f"mean {degree['mean']:.2f}, min {degree['min']}, median {degree['median']:g}, p90 "
            f"{degree['p90']:g}, p99 {degree['p99']:g}, max {degree['max']:,}; isolated nodes "
            f"{degree['isolated']:,}",
        ),
        (
            "features",
            f"{features['count']:,} {features['format']} {features['dtype']}, density "
            f"{features['density']:.4g}",
        ),
        ("classes", f"{facts['num_classes']}"),
        ("labels", (labels or "none") + (f", and {more} more" if more > 0 else "")),
        ("unlabelled", f"{facts['unlabelled']:,}"),
        ("homophily", homophily),
        ("partitions", f"{parts['count']} by {parts['partitioner']}"),
        *quality_rows(parts),
    ]
    for k, split in enumerate(facts["splits"]):
        sizes = ", ".join(f"{name} {count:,}" for name, count in split.items())
        rows.append((f"split {k}", sizes))
    if not facts["splits"]:
        rows.append(("splits", "none; training needs one"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def quality_rows(found: dict[str, float]) -> list[tuple[str, str]]:
    """Partition quality as name and text."""
    balance = f"nodes {found['node_balance']:.3f}, edges {found['edge_balance']:.3f} (max / mean)"
    return [("edge cut", f"{found['edge_cut']:.4f} of all edges"), ("balance", balance)]


def _degrees(store: GraphStore) -> dict[str, float | int]:
    degree = store.in_degree()
    median, p90, p99 = (float(q) for q in np.percentile(degree, [50, 90, 99]))
    alone = degree == 0
    if store.meta.directed:
        alone &= ~_has_out_edge(store.indices, store.num_nodes)
    return {
        "mean": float(degree.mean()),
        "min": int(degree.min()),
        "median": median,
        "p90": p90,
        "p99": p99,
        "max": int(degree.max()),
        "isolated": int(np.count_nonzero(alone)),
    }


def _has_out_edge(indices: NDArray[Any], num_nodes: int) -> NDArray[np.bool_]:
    seen = np.zeros(num_nodes, dtype=bool)
    seen[indices] = True
    return seen


def _label_counts(store: GraphStore) -> dict[str, int]:
    if not store.meta.num_classes:
        return {}
    known = store.labels[store.labels >= 0]
    counts = np.bincount(known, minlength=store.meta.num_classes)
    names = store.meta.class_names or [str(k) for k in range(store.meta.num_classes)]
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def _density(store: GraphStore) -> float:
    meta = store.meta
    if meta.feature_format == "csr":
        return meta.arrays["features_values"].shape[0] / (meta.num_nodes * meta.num_features)
    step = -(-meta.num_nodes // _DENSITY_SAMPLE)
    rows = store.gather_features(np.arange(0, meta.num_nodes, step))
    assert not isinstance(rows, SparseRows)
    return float(rows.count_nonzero()) / rows.numel()


@numba.njit(nogil=True, cache=True)
def _count_same(indptr: Any, indices: Any, labels: Any) -> Any:
    same, known = 0, 0
    for v in range(len(indptr) - 1):
        mine = labels[v]
        if mine < 0:
            continue
        for k in range(indptr[v], indptr[v + 1]):
            other = labels[indices[k]]
            if other >= 0:
                known += 1
                if other == mine:
                    same += 1
    return same, known
