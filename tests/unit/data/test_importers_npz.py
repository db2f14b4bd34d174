"""Numpy archives: the published one, and generic ones."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.errors import DtrainError

EDGES = np.array([[0, 1], [1, 2], [2, 0], [2, 3], [3, 3]])
MASKS = {
    "train_mask": np.array([1, 1, 0, 0], dtype=bool),
    "val_mask": np.array([0, 0, 1, 0], dtype=bool),
    "test_mask": np.array([0, 0, 0, 1], dtype=bool),
}
GOOD = {"x": np.eye(4, dtype=np.float32), "y": np.array([0, 1, 0, 1]), "edges": EDGES, **MASKS}


@pytest.fixture
def save(tmp_path):
    def write(without=(), **arrays):
        kept = {k: v for k, v in (GOOD | arrays).items() if k not in without}
        np.savez(tmp_path / "g.npz", **kept)
        return str(tmp_path / "g.npz")

    return write


def test_tolokers(shared_data):
    source = str(shared_data / "heterophilous" / "tolokers.npz")
    graph = import_graph("npz", source, ImportOptions())
    assert (graph.num_nodes, len(graph.indices)) == (11_758, 2 * 519_000)
    assert (graph.features.num_features, graph.num_classes, len(graph.splits)) == (10, 2, 10)
    with np.load(source) as archive:
        for k in (0, 9):
            np.testing.assert_array_equal(
                graph.splits[k].test, np.flatnonzero(archive["test_masks"][k])
            )
    assert all(sum(map(len, split)) == 11_758 for split in graph.splits)


def test_edges_are_undirected_unless_told_otherwise(save):
    both = import_graph("npz", save(), ImportOptions())
    assert len(both.indices) == 8
    assert not both.directed
    one_way = import_graph("npz", save(), ImportOptions(undirected=False))
    assert one_way.directed
    assert one_way.indices.tolist() == [2, 0, 1, 2]
    kept = import_graph("npz", save(), ImportOptions(keep_self_loops=True))
    assert len(kept.indices) == 9


@pytest.mark.parametrize(
    "edges",
    [
        {"edge_index": EDGES.T},
        {"adj_indptr": np.array([0, 1, 2, 4, 5]), "adj_indices": np.array([1, 2, 0, 3, 3])},
    ],
)
def test_other_layouts_of_edges(save, edges):
    expected = import_graph("npz", save(), ImportOptions(undirected=False))
    found = import_graph("npz", save(without=["edges"], **edges), ImportOptions(undirected=False))
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.indptr, expected.indptr)


def test_sparse_features(save):
    parts = {
        "attr_indptr": np.array([0, 1, 1, 2, 3]),
        "attr_indices": np.array([5, 1, 0]),
        "attr_data": np.array([1.0, 2.0, 3.0], dtype=np.float32),
        "attr_shape": np.array([4, 6]),
    }
    graph = import_graph("npz", save(without=["x"], **parts), ImportOptions())
    dense = graph.features.to_dense().values
    assert dense.shape == (4, 6)
    assert dense[3, 0] == 3.0
    assert dense[1].sum() == 0


def test_masks_by_column_make_several_splits(save):
    masks = {f"{k}": np.stack([v, v[::-1]], axis=1) for k, v in MASKS.items()}
    masks["test_mask"] = MASKS["test_mask"]
    graph = import_graph("npz", save(**masks), ImportOptions())
    assert [split.train.tolist() for split in graph.splits] == [[0, 1], [2, 3]]
    assert [split.test.tolist() for split in graph.splits] == [[3], [3]]


@pytest.mark.parametrize(
    ("arrays", "without", "message"),
    [
        ({}, ["y"], "labels: expected an array named node_labels or labels or y, got x, edges"),
        ({}, ["x"], "features: expected an array named attr_indptr"),
        ({}, ["edges"], "edges: expected an array named adj_indptr"),
        ({"edges": np.zeros((3, 3), dtype=int)}, [], r"expected shape \[E, 2\] or \[2, E\]"),
        (
            {"edges": np.array([[0, 9]])},
            [],
            r"row 0: target id: expected a node in .* got 9",
        ),
        ({"edges": np.array([[0, -9]])}, [], r"row 0: target id: .* got -9"),
        ({"y": np.array([0.5, 1, 2, 3])}, [], "labels: expected integers, got float64"),
        ({"x": np.array([[{}]] * 4, dtype=object)}, [], "x: expected a plain array, got pickled"),
        ({"val_mask": np.array([True])}, [], "val mask: expected 4 flags a split"),
        ({}, ["val_mask"], "val mask: expected one, got none"),
    ],
)
def test_bad_archives_are_explained(save, arrays, without, message):
    with pytest.raises(DtrainError, match=message) as caught:
        import_graph("npz", save(without=without, **arrays), ImportOptions())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"text"])
def test_files_that_are_no_archive_are_named(tmp_path, content):
    (tmp_path / "g.npz").write_bytes(content)
    with pytest.raises(DtrainError, match=r"g.npz: expected an .npz archive"):
        import_graph("npz", str(tmp_path / "g.npz"), ImportOptions())
