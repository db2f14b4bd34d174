"""The published citation graphs, and pickles that are not what they say."""

from __future__ import annotations

import os
import pickle
import subprocess

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.data.importers.pickles import CsrMatrix, load_plain
from dtrain.errors import DtrainError

NEIGHBOURS = {0: [1, 1, 0], 1: [0, 2], 2: [1], 3: [4], 4: [3], 5: [], 6: [0], 8: [4]}


@pytest.fixture
def tiny(tmp_path):
    """A data set of 9 nodes in the published format: 2 train, 3 test (7 is missing), 3 features."""
    features = np.arange(27, dtype=np.float32).reshape(9, 3)
    labels = np.eye(2, dtype=np.int32)[[0, 1, 0, 1, 0, 1, 0, 0, 1]]
    parts = {
        "x": csr_matrix(features[:2]), "allx": csr_matrix(features[:5]), "y": labels[:2],
        "ally": labels[:5], "tx": csr_matrix(features[[8, 5, 6]]), "ty": labels[[8, 5, 6]],
        "graph": NEIGHBOURS,
    }  # fmt: skip
    for part, content in parts.items():
        (tmp_path / f"ind.tiny.{part}").write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "ind.tiny.test.index").write_text("8\n5\n6\n")
    return tmp_path


def test_test_rows_go_to_their_ids_and_gaps_stay_empty(tiny):
    options = ImportOptions(normalize_features=False)
    graph = import_graph("planetoid", str(tiny), options)
    expected = np.arange(27).reshape(9, 3)
    expected[7] = 0
    np.testing.assert_array_equal(graph.features.to_dense().values, expected)
    assert graph.labels.tolist() == [0, 1, 0, 1, 0, 1, 0, -1, 1]
    assert [part.tolist() for part in graph.splits[0]] == [[0, 1], [2, 3, 4], [5, 6, 8]]
    assert np.diff(graph.indptr).tolist() == [2, 2, 1, 1, 2, 0, 1, 0, 1]


def test_an_edge_to_a_node_that_is_not_there_is_named(tiny):
    (tiny / "ind.tiny.graph").write_bytes(pickle.dumps({0: [1], 1: [9]}))
    with pytest.raises(DtrainError, match=r"ind.tiny.graph: edge 1 -> 9: expected nodes in \[0, 8"):
        import_graph("planetoid", str(tiny), ImportOptions())


def test_cora(shared_data):
    graph = import_graph("planetoid", str(shared_data / "planetoid"), ImportOptions(name="cora"))
    assert (graph.num_nodes, len(graph.indices), graph.num_classes) == (2708, 10_556, 7)
    assert graph.features.num_features == 1433
    train, val, test = graph.splits[0]
    assert (train.tolist(), val.tolist()) == (list(range(140)), list(range(140, 640)))
    assert test.tolist() == list(range(1708, 2708))
    assert np.bincount(graph.labels[train]).tolist() == [20] * 7
    sums = np.add.reduceat(graph.features.values, graph.features.indptr[:-1])
    np.testing.assert_allclose(sums, 1.0, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Please import")
def test_cora_features_and_labels_are_those_that_scipy_reads(shared_data):
    """Against an unrestricted reading by the libraries themselves, in the published order."""
    folder = shared_data / "planetoid"

    def load(part):
        return pickle.loads((folder / f"ind.cora.{part}").read_bytes(), encoding="latin1")

    order = np.loadtxt(folder / "ind.cora.test.index", dtype=np.int64)
    dense = np.zeros((2708, 1433), dtype=np.float32)
    dense[:1708], dense[order] = load("allx").toarray(), load("tx").toarray()
    labels = np.zeros((2708, 7), dtype=np.int64)
    labels[:1708], labels[order] = load("ally"), load("ty")
    options = ImportOptions(name="cora", normalize_features=False)
    graph = import_graph("planetoid", str(folder), options)
    np.testing.assert_array_equal(graph.features.to_dense().values, dense)
    np.testing.assert_array_equal(graph.labels, labels.argmax(axis=1))


def test_citeseer_gaps_have_no_features_and_no_label(shared_data):
    options = ImportOptions(name="citeseer")
    graph = import_graph("planetoid", str(shared_data / "planetoid"), options)
    assert (graph.num_nodes, len(graph.indices), graph.num_classes) == (3327, 9104, 6)
    assert graph.features.num_features == 3703
    assert [len(part) for part in graph.splits[0]] == [120, 500, 1000]
    gaps = np.flatnonzero(graph.labels < 0)
    assert len(gaps) == 15
    assert np.diff(graph.features.indptr)[gaps].sum() == 0


def test_one_of_several_data_sets_must_be_named(shared_data):
    with pytest.raises(DtrainError, match=r"--name: expected one data set .* got citeseer, cora"):
        import_graph("planetoid", str(shared_data / "planetoid"), ImportOptions())


def test_a_missing_file_is_named(tiny):
    (tiny / "ind.tiny.tx").unlink()
    with pytest.raises(DtrainError, match=r"ind.tiny.tx: expected a file, found none"):
        import_graph("planetoid", str(tiny), ImportOptions())


def test_a_damaged_index_is_named_with_its_line(tiny):
    (tiny / "ind.tiny.test.index").write_text("8\n-3\n6\n")
    with pytest.raises(DtrainError, match=r"test.index, line 2: expected a node id .* got '-3'"):
        import_graph("planetoid", str(tiny), ImportOptions())


class Calls:
    """Pickles as a call of ``function(*arguments)``."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (Calls(os.system, "touch PWNED"), r"(posix|nt)\.system"),
        (Calls(eval, "open('PWNED', 'w')"), r"(__builtin__|builtins)\.eval"),
        (Calls(subprocess.check_call, ["touch", "PWNED"]), r"(commands|subprocess)\.check_call"),
        (Calls(np.fromfile, "secret"), r"numpy.*fromfile"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_an_unsafe_pickle_is_refused_and_not_run(tiny, monkeypatch, attack, named, protocol):
    (tiny / "ind.tiny.graph").write_bytes(pickle.dumps({0: attack}, protocol=protocol))
    monkeypatch.chdir(tiny)
    with pytest.raises(DtrainError, match=rf"ind.tiny.graph: unsafe pickle: .*{named}") as caught:
        import_graph("planetoid", str(tiny), ImportOptions())
    assert "\n" not in str(caught.value)
    assert not (tiny / "PWNED").exists()


@pytest.mark.parametrize(
    "content", [b"", b"not a pickle", pickle.dumps([1, 2])[:-2], b"\x80\x02R."]
)
def test_a_damaged_pickle_is_named(content):
    with pytest.raises(DtrainError, match="FILE: expected a pickle of plain arrays"):
        load_plain(content, "FILE")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("dtype", ["<f4", ">i4", "u1", "?"])
def test_arrays_pickled_by_this_python_are_read(protocol, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for version in (array, np.asfortranarray(array)):
        loaded = load_plain(pickle.dumps(version, protocol=protocol), "FILE")
        np.testing.assert_array_equal(loaded, array)
        assert loaded.dtype == array.dtype


def test_sparse_matrices_pickled_by_this_scipy_are_read():
    matrix = csr_matrix(np.array([[0, 2.0], [0, 0], [3, 4]]))
    loaded = load_plain(pickle.dumps(matrix, protocol=2), "FILE")
    assert isinstance(loaded, CsrMatrix)
    assert loaded.shape == (3, 2)
    np.testing.assert_array_equal(loaded.data, matrix.data)
    np.testing.assert_array_equal(loaded.indptr, matrix.indptr)


def test_arrays_of_objects_are_refused():
    with pytest.raises(DtrainError, match="expected a pickle of plain arrays"):
        load_plain(pickle.dumps(np.array([{}, 1], dtype=object), protocol=2), "FILE")
