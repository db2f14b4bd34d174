"""The published citation graphs, and pickles that are not what they say."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.data.importers.pickles import CsrMatrix, load_plain
from dtrain.errors import DtrainError


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


def test_a_missing_file_is_named(shared_data, tmp_path):
    for file in (shared_data / "planetoid").glob("ind.cora.*"):
        if not file.name.endswith(".tx"):
            shutil.copyfile(file, tmp_path / file.name)
    with pytest.raises(DtrainError, match=r"ind.cora.tx: expected a file, found none"):
        import_graph("planetoid", str(tmp_path), ImportOptions())


def test_a_damaged_index_is_named_with_its_line(shared_data, tmp_path):
    for file in (shared_data / "planetoid").glob("ind.cora.*"):
        shutil.copyfile(file, tmp_path / file.name)
    index = tmp_path / "ind.cora.test.index"
    lines = index.read_text().splitlines()
    index.write_text("\n".join([*lines[:4], "-3", *lines[5:]]))
    with pytest.raises(DtrainError, match=r"test.index, line 5: expected a node id .* got '-3'"):
        import_graph("planetoid", str(tmp_path), ImportOptions())


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
def test_an_unsafe_pickle_is_refused_and_not_run(
    shared_data, tmp_path, monkeypatch, attack, named, protocol
):
    for file in (shared_data / "planetoid").glob("ind.cora.*"):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "ind.cora.graph").write_bytes(pickle.dumps({0: attack}, protocol=protocol))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DtrainError, match=rf"ind.cora.graph: unsafe pickle: .*{named}") as caught:
        import_graph("planetoid", str(tmp_path), ImportOptions())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "PWNED").exists()


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
