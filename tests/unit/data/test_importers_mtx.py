"""MatrixMarket files, with and without their first lines."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.errors import DtrainError

BANNER = "%%MatrixMarket matrix coordinate pattern {}\n% a comment\n"


@pytest.fixture
def put(tmp_path):
    def write(text, name="m.mtx"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def edges_of(graph):
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return set(zip(graph.ids[graph.indices].tolist(), graph.ids[rows].tolist(), strict=True))


def test_luxembourg(shared_data):
    source = str(shared_data / "mtx" / "luxembourg_osm.mtx")
    graph = import_graph("mtx", source, ImportOptions())
    assert (graph.num_nodes, len(graph.indices)) == (114_599, 2 * 119_666)
    assert list(graph.splits) == []
    assert (graph.labels == -1).all()


def test_banner_sizes_and_values(put):
    text = BANNER.format("symmetric") + "5 5 2\n2 1 0.5\n4 2 1e3\n"
    graph = import_graph("mtx", put(text), ImportOptions())
    assert graph.ids.tolist() == [1, 2, 3, 4, 5]
    assert edges_of(graph) == {(2, 1), (1, 2), (4, 2), (2, 4)}


def test_a_general_matrix_is_directed_unless_told_otherwise(put):
    source = put(BANNER.format("general") + "3 3 1\n1 3\n")
    assert edges_of(import_graph("mtx", source, ImportOptions())) == {(1, 3)}
    assert len(import_graph("mtx", source, ImportOptions(undirected=True)).indices) == 2


def test_sizes_without_a_banner(put):
    graph = import_graph("mtx", put("4 4 2\n1 2\n2 3\n"), ImportOptions())
    assert (graph.num_nodes, len(graph.indices)) == (4, 4)
    weighted = import_graph("mtx", put("1 2 7\n2 3 7\n"), ImportOptions())
    assert (weighted.num_nodes, len(weighted.indices)) == (3, 4)


def test_labels_use_the_ids_of_the_matrix(put):
    options = ImportOptions(
        labels=put("1,0\n2,1\n3,1\n", "l.csv"), split_fractions=(0.34, 0.33, 0.33)
    )
    graph = import_graph("mtx", put("3 3 1\n1 3\n"), options)
    assert graph.labels.tolist() == [0, 1, 1]
    assert [len(part) for part in graph.splits[0]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n0 3\n", r"line 2: expected two integer ids of at least 1, got '0 3'"),
        ("1 2\n2 x\n", r"line 2: expected two integer ids of at least 1, got '2 x'"),
        ("1 2\n2\n", r"line 2: expected two integer ids"),
        ("1 2\n2 1.5\n", r"line 2: expected two integer ids"),
        (BANNER.format("general") + "3 3 1\n1 4\n", r"line 4: .* ids in \[1, 3\], got '1 4'"),
        (BANNER.format("general") + "3 3 2\n1 2\n", "expected 2 entries .* got 1; the file is cut"),
        (BANNER.format("general") + "3 4 1\n1 2\n", "expected a square matrix, got 3 x 4"),
        (BANNER.format("general") + "1 2\n", "expected rows, columns and entries, got '1 2'"),
        ("%%MatrixMarket matrix array real general\n2 2\n", "line 1: expected %%MatrixMarket"),
        ("% nothing\n", "expected at least one entry"),
    ],
)
def test_mistakes_are_named_with_their_line(put, text, message):
    with pytest.raises(DtrainError, match=message) as caught:
        import_graph("mtx", put(text), ImportOptions())
    assert "\n" not in str(caught.value)
