"""A store gives back the graph that went in, and refuses what is damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dtrain.data.graph import CsrFeatures, GraphArrays, Split
from dtrain.data.store import GraphStore
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError
from dtrain.kernels.csr import SparseRows


def edge_set(indptr, indices, names=None):
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    if names is None:
        return set(zip(indices.tolist(), rows.tolist(), strict=True))
    return set(zip(names[indices].tolist(), names[rows].tolist(), strict=True))


@pytest.mark.parametrize("undirected", [True, False])
@pytest.mark.parametrize("partitioner", ["metis", "stream", "range", "random"])
def test_renumbering_preserves_the_graph(tmp_path, make_graph, partitioner, undirected):
    graph = make_graph(undirected=undirected)
    write_store(str(tmp_path / "s"), graph, partitions=4, partitioner=partitioner)
    store = GraphStore.open(str(tmp_path / "s"))
    ids = store.original_ids()
    assert sorted(ids.tolist()) == list(range(graph.num_nodes))
    expected = edge_set(graph.indptr, graph.indices)
    assert edge_set(store.indptr, store.indices, ids) == expected
    assert len(store.indices) == len(expected)
    for v in range(store.num_nodes):
        row = store.indices[store.indptr[v] : store.indptr[v + 1]]
        assert (np.diff(row) > 0).all()
    np.testing.assert_array_equal(store.labels, graph.labels[ids])
    np.testing.assert_array_equal(store.in_degree(), np.diff(graph.indptr)[ids])
    rows = store.gather_features(np.arange(store.num_nodes))
    np.testing.assert_array_equal(rows.numpy(), graph.features.values[ids])
    for ours, theirs in zip(store.split(0), graph.splits[0], strict=True):
        assert (np.diff(ours) > 0).all()
        np.testing.assert_array_equal(np.sort(ids[ours]), theirs)


def test_partitions_are_contiguous_ranges(tmp_path, make_graph):
    meta = write_store(str(tmp_path / "s"), make_graph(), partitions=3, partitioner="random")
    store = GraphStore.open(str(tmp_path / "s"))
    assert store.num_partitions == 3
    assert meta.partition_offsets == (0, 20, 40, 60)
    np.testing.assert_array_equal(store.partition_of(np.array([0, 19, 20, 59])), [0, 0, 1, 2])


def test_gathered_rows_come_in_the_order_asked_for_in_an_aligned_tensor(tmp_path, make_graph):
    graph = make_graph()
    write_store(str(tmp_path / "s"), graph)
    nodes = np.array([7, 3, 3, 59, 0])
    rows = GraphStore.open(str(tmp_path / "s")).gather_features(nodes)
    assert rows.data_ptr() % 64 == 0
    np.testing.assert_array_equal(rows.numpy(), graph.features.values[nodes])


@pytest.mark.parametrize("node", [-1, 60])
def test_gather_refuses_nodes_that_are_not_there(tmp_path, make_graph, node):
    write_store(str(tmp_path / "s"), make_graph())
    with pytest.raises(IndexError):
        GraphStore.open(str(tmp_path / "s")).gather_features(np.array([1, node]))


def test_half_precision_stays_half_on_disk(tmp_path, make_graph):
    values = np.linspace(1, 2, 300, dtype=np.float16).reshape(60, 5)
    meta = write_store(str(tmp_path / "s"), make_graph(features=values))
    store = GraphStore.open(str(tmp_path / "s"))
    assert meta.feature_dtype == "float16"
    np.testing.assert_array_equal(store.gather_features(np.array([5, 2])).numpy(), values[[5, 2]])


def test_sparse_features_stay_sparse_and_dense_ones_dense(tmp_path, make_graph):
    values = np.zeros((60, 40), dtype=np.float32)
    values[np.arange(60), np.arange(60) % 40] = np.arange(1, 61)
    meta = write_store(str(tmp_path / "s"), make_graph(features=values), partitions=4)
    store = GraphStore.open(str(tmp_path / "s"))
    assert meta.feature_format == "csr"
    nodes = np.array([11, 0, 11, 59])
    rows = store.gather_features(nodes)
    assert isinstance(rows, SparseRows)
    assert rows.shape == (4, 40)
    dense = np.zeros(rows.shape, dtype=np.float32)
    dense[rows.csr.row_of_entry().numpy(), rows.csr.indices.numpy()] = rows.values.numpy()
    np.testing.assert_array_equal(dense, values[store.original_ids()[nodes]])
    full = CsrFeatures.from_dense(np.ones((60, 4), dtype=np.float32))
    meta = write_store(str(tmp_path / "d"), make_graph(features=full))
    assert meta.feature_format == "dense"


def test_fingerprint_is_of_content_and_partitioning_not_of_the_place(tmp_path, make_graph):
    def fingerprint(name, graph, **options):
        return write_store(str(tmp_path / name), graph, **options).fingerprint

    base = fingerprint("a", make_graph(), partitions=2)
    assert fingerprint("b", make_graph(), partitions=2) == base
    assert GraphStore.open(str(tmp_path / "b")).fingerprint == base
    assert fingerprint("c", make_graph(), partitions=3) != base
    other = make_graph()
    other.features.values[3, 1] += 1
    assert fingerprint("d", other, partitions=2) != base


def test_string_ids_come_back(tmp_path, make_graph):
    names = np.array([f"knoten-ä{k}" for k in range(60)])
    write_store(str(tmp_path / "s"), make_graph(ids=names), partitions=3, partitioner="random")
    ids = GraphStore.open(str(tmp_path / "s")).original_ids()
    assert sorted(ids.tolist()) == sorted(names.tolist())


def test_a_store_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DtrainError, match=r"store .*nowhere: expected meta.json there, found none"):
        GraphStore.open(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["indptr", "indices", "features", "labels", "split_0_train"])
def test_a_truncated_array_is_named_with_its_sizes(tmp_path, make_graph, name):
    write_store(str(tmp_path / "s"), make_graph())
    file = tmp_path / "s" / f"{name}.npy"
    size = file.stat().st_size
    os.truncate(file, size - 8)
    with pytest.raises(DtrainError, match=rf"{name}.npy: expected {size} bytes, got {size - 8}"):
        GraphStore.open(str(tmp_path / "s"))


def test_a_lost_array_is_named(tmp_path, make_graph):
    write_store(str(tmp_path / "s"), make_graph())
    (tmp_path / "s" / "labels.npy").unlink()
    with pytest.raises(DtrainError, match=r"labels.npy: expected a file, found none"):
        GraphStore.open(str(tmp_path / "s"))


def test_an_array_of_another_kind_is_named(tmp_path, make_graph):
    write_store(str(tmp_path / "s"), make_graph())
    file = tmp_path / "s" / "labels.npy"
    np.save(file, np.zeros(60, dtype=np.float64))
    with pytest.raises(DtrainError, match=r"labels.npy: expected <i8 \[60\], got <f8 \[60\]"):
        GraphStore.open(str(tmp_path / "s"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "schema_version: expected 1, got 99"),
        ({"num_nodes": 61}, "partition_offsets: expected 0 ... 61"),
        ({"colour": "red"}, "colour"),
        (None, "not valid JSON"),
    ],
)
def test_a_wrong_meta_file_is_explained(tmp_path, make_graph, change, message):
    write_store(str(tmp_path / "s"), make_graph())
    file = tmp_path / "s" / "meta.json"
    text = "{" if change is None else json.dumps(json.loads(file.read_text()) | change)
    file.write_text(text)
    with pytest.raises(DtrainError, match=message) as caught:
        GraphStore.open(str(tmp_path / "s"))
    assert "\n" not in str(caught.value)


def test_an_unreadable_store_is_named(tmp_path):
    (tmp_path / "s" / "meta.json").mkdir(parents=True)
    with pytest.raises(DtrainError, match=r"s: meta.json: cannot be read"):
        GraphStore.open(str(tmp_path / "s"))


def test_verify_finds_a_changed_byte(tmp_path, make_graph):
    write_store(str(tmp_path / "s"), make_graph())
    GraphStore.open(str(tmp_path / "s")).verify()
    with open(tmp_path / "s" / "features.npy", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(DtrainError, match=r"features.npy: expected sha256"):
        GraphStore.open(str(tmp_path / "s")).verify()


def test_a_split_that_is_not_there_is_named(tmp_path, make_graph):
    write_store(str(tmp_path / "s"), make_graph())
    write_store(str(tmp_path / "none"), make_graph(splits=[]))
    with pytest.raises(DtrainError, match=r"has splits 0..0, got 1"):
        GraphStore.open(str(tmp_path / "s")).split(1)
    with pytest.raises(DtrainError, match=r"has no splits, got 0"):
        GraphStore.open(str(tmp_path / "none")).split(0)


def test_an_existing_store_is_replaced_only_when_told(tmp_path, make_graph):
    place = str(tmp_path / "s")
    first = write_store(place, make_graph(seed=1))
    with pytest.raises(DtrainError, match="--overwrite"):
        write_store(place, make_graph(seed=2))
    assert GraphStore.open(place).fingerprint == first.fingerprint
    second = write_store(place, make_graph(seed=2), overwrite=True)
    assert GraphStore.open(place).fingerprint == second.fingerprint != first.fingerprint
    assert os.listdir(tmp_path) == ["s"]


def test_a_folder_that_is_no_store_is_never_replaced(tmp_path, make_graph):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(DtrainError, match="expected a new or empty folder"):
        write_store(str(tmp_path / "home"), make_graph(), overwrite=True)
    assert (tmp_path / "home" / "thesis.txt").exists()


class BreaksHalfway:
    """Features whose second chunk cannot be made."""

    num_features = 1 << 20
    dtype = np.dtype(np.float32)
    checked = True

    def rows(self, nodes):
        if nodes[0] > 0:
            raise RuntimeError("no more")
        return np.zeros((len(nodes), self.num_features), dtype=np.float32)


def test_a_write_that_fails_leaves_the_old_store_and_nothing_else(tmp_path, make_graph):
    place = str(tmp_path / "s")
    old = write_store(place, make_graph())
    with pytest.raises(RuntimeError, match="no more"):
        write_store(place, make_graph(features=BreaksHalfway()), overwrite=True)
    assert os.listdir(tmp_path) == ["s"]
    assert GraphStore.open(place).fingerprint == old.fingerprint


def test_a_place_that_cannot_be_written_is_named(tmp_path, make_graph):
    (tmp_path / "file").write_text("")
    with pytest.raises(DtrainError, match=r"--out .*file/s: cannot be written \(Not a directory\)"):
        write_store(str(tmp_path / "file" / "s"), make_graph())


def test_opening_maps_and_does_not_read(tmp_path, make_graph):
    write_store(str(tmp_path / "s"), make_graph())
    store = GraphStore.open(str(tmp_path / "s"))
    assert isinstance(store.indices.base, np.memmap)
    shutil.rmtree(tmp_path / "s")
    assert len(store.gather_features(np.array([1]))) == 1


def split(train, val, test):
    return [Split(*(np.array(part, dtype=np.int64) for part in (train, val, test)))]


def nan_at(row, column):
    values = np.ones((60, 5), dtype=np.float32)
    values[row, column] = np.nan
    return values


BAD_GRAPHS = {
    "edge outside": (
        {"src": np.array([0, 60]), "dst": np.array([1, 2])},
        "row 1: source id.*got 60",
    ),
    "edge negative": ({"src": np.array([0]), "dst": np.array([-1])}, "row 0: target id.*got -1"),
    "edge float": (
        {"src": np.array([0.5]), "dst": np.array([1])},
        "expected integers, got float64",
    ),
    "edge ends": ({"src": np.array([0, 1]), "dst": np.array([1])}, "as many sources as targets"),
    "nan": ({"features": nan_at(17, 2)}, "row 17, column 2: expected a finite number, got nan"),
    "feature rows": ({"features": np.ones((59, 5))}, "expected 60 rows"),
    "no columns": ({"features": np.ones((60, 0))}, "at least one column"),
    "label above": ({"labels": np.full(60, 3)}, r"node 0: expected a class in \[0, 2\]"),
    "label below": ({"labels": np.full(60, -2)}, r"node 0: .*got -2"),
    "empty part": ({"splits": split([1], [], [2])}, "split 0: val: expected at least one node"),
    "overlap": ({"splits": split([1, 2], [3], [2])}, "node 2, which is in train too"),
    "duplicate": ({"splits": split([1, 1], [3], [2])}, "expected every node once, got node 1"),
    "split outside": ({"splits": split([1], [3], [60])}, r"test: expected node ids in \[0, 59\]"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_bad_graphs_are_refused_in_one_line_with_nothing_written(tmp_path, make_graph, case):
    change, message = BAD_GRAPHS[case]
    with pytest.raises(DtrainError, match=message) as caught:
        write_store(str(tmp_path / "s"), make_graph(**change))
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_an_unlabelled_node_in_a_split_is_refused(tmp_path, make_graph):
    labels = np.zeros(60, dtype=np.int64)
    labels[5] = -1
    write_store(str(tmp_path / "s"), make_graph(labels=labels, splits=split([1], [2], [3])))
    with pytest.raises(DtrainError, match="node 5 without a label"):
        write_store(str(tmp_path / "t"), make_graph(labels=labels, splits=split([1], [2], [5])))


@pytest.mark.parametrize("values", [[1.0, np.inf], [1.0, 2.0]])
def test_sparse_features_are_checked(tmp_path, make_graph, values):
    indptr = np.zeros(61, dtype=np.int64)
    indptr[31:] = 2
    columns = np.array([0, 7 if np.isfinite(values[1]) else 4])
    features = CsrFeatures(indptr, columns, np.array(values, dtype=np.float32), 5)
    expected = (
        r"row 30: expected columns in" if columns[1] == 7 else r"row 30, column 4: .* got inf"
    )
    with pytest.raises(DtrainError, match=expected):
        write_store(str(tmp_path / "s"), make_graph(features=features))


def test_a_graph_without_edges_is_a_graph(tmp_path):
    empty = np.array([], dtype=np.int64)
    graph = GraphArrays.from_edges(3, empty, empty, np.ones((3, 1), dtype=np.float32))
    write_store(str(tmp_path / "s"), graph, partitions=3)
    store = GraphStore.open(str(tmp_path / "s"))
    assert store.in_degree().tolist() == [0, 0, 0]
    assert Path(tmp_path / "s" / "indices.npy").exists()
