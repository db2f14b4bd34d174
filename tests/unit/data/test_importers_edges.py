"""Edge lists with their feature, label and split files."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.data.importers import tables as tables_module
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError


@pytest.fixture
def put(tmp_path):
    def write(name, content):
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(file)

    return write


def edges_of(graph):
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return set(zip(graph.ids[graph.indices].tolist(), graph.ids[rows].tolist(), strict=True))


def read(src, **options):
    return import_graph("edges", src, ImportOptions(undirected=False, **options))


def test_musae_facebook(shared_data, tmp_path):
    folder = shared_data / "musae"
    options = ImportOptions(
        features=str(folder / "facebook_features.json"),
        labels=str(folder / "facebook_target.csv"),
        split_fractions=(0.6, 0.2, 0.2),
    )
    graph = import_graph("edges", str(folder / "facebook_edges.csv"), options)
    # 171,002 rows, 179 of them self loops.
    assert (graph.num_nodes, len(graph.indices)) == (22_470, 2 * (171_002 - 179))
    assert graph.class_names == ["company", "government", "politician", "tvshow"]
    assert graph.class_names[graph.labels[0]] == "tvshow"
    bags = json.loads((folder / "facebook_features.json").read_text())
    start, stop = graph.features.indptr[10_772:10_774]
    assert graph.features.indices[start:stop].tolist() == sorted(bags["10772"])
    assert [len(part) for part in graph.splits[0]] == [13_482, 4_494, 4_494]
    again = import_graph("edges", str(folder / "facebook_edges.csv"), options)
    np.testing.assert_array_equal(graph.splits[0].val, again.splits[0].val)
    assert write_store(str(tmp_path / "s"), graph, partitions=4).feature_format == "csr"


@pytest.mark.parametrize(
    "text",
    [
        "0,1\n1,2\n5,0\n",
        "id_1,id_2\n0,1\n1,2\n5,0",
        "weird,words\r\n0,1\r\n1,2\r\n5,0\r\n",
        "# a comment\n0\t1\n\n1\t2\n% another\n5\t0\n",
        "source target\n0  1\n 1 2 \n5 0 0.25\n",
        '"0";"1"\n"1";"2"\n5;0\n',
        "\ufeff0,1\n1,2\n5,0\n",
    ],
)
def test_layouts_of_integer_ids(put, text):
    graph = read(put("e.csv", text))
    assert graph.ids.tolist() == [0, 1, 2, 5]
    assert edges_of(graph) == {(0, 1), (1, 2), (5, 0)}


def test_string_ids(put):
    graph = read(put("e.csv", "source,target\nanna,bo\nbo,cäcilie\n"))
    assert edges_of(graph) == {("anna", "bo"), ("bo", "cäcilie")}
    assert edges_of(read(put("f.csv", "anna,bo\nbo,7\n"))) == {("anna", "bo"), ("bo", "7")}
    assert edges_of(read(put("g.csv", "1,2\n"), ids="string")) == {("1", "2")}


def test_named_columns_and_a_compressed_file(put):
    text = "time,to,who\n9,1,0\n9,2,1\n"
    for name, content in (("e.csv", text), ("e.csv.gz", gzip.compress(text.encode()))):
        graph = read(put(name, content), src_column="who", dst_column="to")
        assert edges_of(graph) == {(0, 1), (1, 2)}


def test_a_file_longer_than_one_piece(put, monkeypatch):
    """Pieces end anywhere in a line; the line of a mistake is still right."""
    monkeypatch.setattr(tables_module, "_READ_BYTES", 7)
    lines = [f"{k},{k + 1}" for k in range(90, 120)]
    graph = read(put("e.csv", "a,b\n" + "\n".join(lines)))
    assert edges_of(graph) == {(k, k + 1) for k in range(90, 120)}
    lines[20] = "110,x"
    with pytest.raises(DtrainError, match=r"line 22: expected integer ids .* got '110,x'"):
        read(put("f.csv", "a,b\n" + "\n".join(lines)))


def test_parquet_gives_the_same_graph_as_text(tmp_path, put):
    table = pa.table({"when": [9, 9], "a": [0, 5], "b": [5, 2]})
    pq.write_table(table, tmp_path / "e.parquet")
    graph = read(str(tmp_path / "e.parquet"), src_column="a", dst_column="b")
    assert edges_of(graph) == {(0, 5), (5, 2)}
    pq.write_table(pa.table({"a": ["x", "y"], "b": ["y", "z"]}), tmp_path / "s.parquet")
    pq.write_table(pa.table({"id": ["x", "y", "z"], "label": [0, 1, 1]}), tmp_path / "l.parquet")
    pq.write_table(
        pa.table({"id": ["z", "y", "x"], "f": [3.0, 2.0, 1.0], "g": [0, 1, 0]}),
        tmp_path / "f.parquet",
    )
    graph = read(
        str(tmp_path / "s.parquet"),
        labels=str(tmp_path / "l.parquet"),
        features=str(tmp_path / "f.parquet"),
    )
    assert edges_of(graph) == {("x", "y"), ("y", "z")}
    assert graph.labels.tolist() == [0, 1, 1]
    assert graph.features.values.tolist() == [[1, 0], [2, 1], [3, 0]]


def test_features_labels_and_splits_are_matched_by_id(put):
    graph = read(
        put("e.csv", "10,30\n"),
        features=put("f.csv", "id,a,b\n30,3,-3\n10,1,-1\n20,2,-2\n"),
        labels=put("l.csv", "id,group\n20,blue\n10,red\n30,red\n"),
        splits=put("s.csv", "10,train\n30,test\n20,valid\n"),
    )
    assert graph.ids.tolist() == [10, 20, 30]
    assert graph.features.values.tolist() == [[1, -1], [2, -2], [3, -3]]
    assert graph.class_names == ["blue", "red"]
    assert graph.labels.tolist() == [1, 0, 1]
    assert [part.tolist() for part in graph.splits[0]] == [[0], [1], [2]]


def test_labels_in_numbers_and_gaps(put):
    graph = read(put("e.csv", "0,1\n1,2\n2,3\n"), labels=put("l.csv", "0,10\n1,9\n2,-1\n"))
    assert graph.class_names == ["9", "10"]
    assert graph.labels.tolist() == [1, 0, -1, -1]
    told = read(put("e.csv", "0,1\n"), labels=put("l.csv", "0,3\n1,0\n"), num_classes=5)
    assert told.labels.tolist() == [3, 0]
    assert told.num_classes == 5


def test_without_features_there_are_a_constant_and_the_degree(put):
    graph = read(put("e.csv", "0,1\n2,1\n"))
    np.testing.assert_allclose(graph.features.values, [[1, 0], [1, np.log(3)], [1, 0]], rtol=1e-6)
    assert graph.num_classes == 0
    assert list(graph.splits) == []


def test_isolated_nodes_come_with_num_nodes(put):
    assert read(put("e.csv", "0,1\n"), num_nodes=4).num_nodes == 4


E = "0,1\n1,2\n"
BAD = [
    ("0,1\n1,-2\n", {}, "e.csv, line 2: expected ids of at least 0, got '1,-2'"),
    ("-1,1\n", {}, "e.csv, line 1: expected ids of at least 0, got '-1,1'"),
    ("0,1\n\n1,2.5\n", {}, "e.csv, line 3: expected integer ids .* got '1,2.5'"),
    ("0,1\n1,b\n", {}, "line 2: expected integer ids"),
    ("a,b\n0,1\n1\n", {}, "line 3: expected two ids, got '1'"),
    ("0,1\n1,9223372036854775808\n", {}, r"line 2: expected ids below 2\*\*63"),
    ("0,1\n1,9\n", {"num_nodes": 9}, r"line 2: expected ids in \[0, 8\], got '1,9'"),
    ("anna,bo\nbo\n", {}, "line 2: expected two ids"),
    ("src,dst\n", {}, "expected at least one edge, got none"),
    ("", {}, "expected at least one edge, got none"),
    (E, {"src_column": "x", "dst_column": "y"}, "expected a column named 'x', got 0, 1"),
    (
        E,
        {"features": "id,a\n0,1\n1,nan\n2,1\n"},
        "line 3, column 2: expected a finite.*'nan'",
    ),
    (E, {"features": "0,1\n1,inf\n2,1\n"}, "line 2, column 2: expected a finite number, got 'inf'"),
    (E, {"features": "0,1\n1,one\n2,1\n"}, "line 2, column 2: expected a finite number, got 'one'"),
    (E, {"features": "0,1\n1,1,1\n2,1\n"}, "line 2: expected 2 fields, got 3"),
    (E, {"features": "0,1\n1,1\n"}, "a row for each of 3 nodes, got none for id 2"),
    (E, {"features": "0,1\n1,1\n1,1\n2,1"}, "line 3: expected every id once, got 1 again"),
    (E, {"features": "0,1\n1.5,1\n2,1"}, "line 2: expected a node id .* got '1.5'"),
    (E, {"labels": "0,0\n1,7\n", "num_classes": 3}, r"line 2: expected a class in \[0, 2\].* '7'"),
    (E, {"labels": "0,0\n0,1\n"}, "line 2: expected every id once, got 0 again"),
    (E, {"labels": "0\n"}, "line 1: expected an id and a value"),
    (E, {"labels": "0,\n"}, "expected at least one label, got none"),
    (E, {"labels": "0,0\n1,1\n", "splits": "0,train\n1,exam\n"}, "expected train, val or test"),
    (
        E,
        {"labels": "0,0\n1,1\n", "splits": "0,train\n8,val\n"},
        "line 2: expected the id of",
    ),
    (E, {"splits": "0,train\n"}, "--labels: expected a file where splits are asked for"),
]


@pytest.mark.parametrize(("text", "options", "message"), BAD)
def test_mistakes_are_named_with_their_line(put, text, options, message):
    files = ("features", "labels", "splits")
    given = {k: put(f"{k}.csv", v) if k in files else v for k, v in options.items()}
    with pytest.raises(DtrainError, match=message) as caught:
        read(put("e.csv", text), **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[1]", '{"0": [1.5], "1": [], "2": []}', '{"0": [-1]}', '{"a": [1]}', "{", "{}"]
)
def test_feature_bags_that_are_wrong_are_named(put, text):
    with pytest.raises(DtrainError, match=r"features .*f.json"):
        read(put("e.csv", E), features=put("f.json", text))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([0, -4], "column b, row 1: expected ids of at least 0, got -4"),
        ([0, None], "column b, row 1: expected an id, got none"),
        ([0.5, 1.0], "column b: expected integer or string ids"),
        (["x", "y"], "expected both id columns of one type"),
    ],
)
def test_parquet_mistakes_are_named(tmp_path, column, message):
    pq.write_table(pa.table({"a": [0, 1], "b": column}), tmp_path / "e.parquet")
    with pytest.raises(DtrainError, match=message):
        read(str(tmp_path / "e.parquet"))


def test_a_file_that_is_not_parquet_is_named(put):
    with pytest.raises(DtrainError, match=r"e.parquet: expected a Parquet file"):
        read(put("e.parquet", "0,1\n"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DtrainError, match=r"edges .*none.csv: expected a file, found none"):
        read(str(tmp_path / "none.csv"))


def test_without_pyarrow_the_extra_is_named(put, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(DtrainError, match=r"pip install 'dtrain\[parquet\]'"):
        read(put("e.parquet", "0,1\n"))


def test_options_of_another_format_are_refused(put):
    with pytest.raises(DtrainError, match="--labels: expected with edges or mtx only"):
        import_graph("npz", "x.npz", ImportOptions(labels="l.csv"))
