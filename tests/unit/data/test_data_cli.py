"""The commands of ``dtrain data``."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from typer.testing import CliRunner

from dtrain.cli.data import app
from dtrain.errors import DtrainError


def run(*arguments):
    """Standard output of a command; its error is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_synth_then_info(tmp_path):
    store = tmp_path / "s"
    made = json.loads(
        run("synth", "--nodes", 400, "--avg-degree", 6, "--classes", 3, "--features", 8,
            "--homophily", 0.9, "--seed", 4, "--partitions", 4, "--partitioner", "stream",
            "--out", store, "--json")
    )  # fmt: skip
    facts = json.loads(run("info", store, "--verify", "--json"))
    assert made["fingerprint"] == facts["fingerprint"]
    assert made["quality"]["edge_cut"] == facts["partitions"]["edge_cut"]
    assert facts["num_nodes"] == 400
    assert sum(facts["labels"].values()) == 400
    assert facts["homophily"] == pytest.approx(0.9, abs=0.1)
    assert sum(facts["partitions"]["nodes"]) == 400
    assert sum(facts["partitions"]["edges"]) == facts["num_edges"]
    assert facts["splits"] == [{"train": 240, "val": 80, "test": 80}]
    assert facts["degree"]["min"] <= facts["degree"]["median"] <= facts["degree"]["p99"]
    text = run("info", store)
    assert facts["fingerprint"] in text
    assert "partitions   4 by stream" in text


def test_info_counts_by_hand(tmp_path):
    """A directed path of five, one label unknown, one isolated node: 1 of 3 edges joins equals."""
    (tmp_path / "e.csv").write_text("0,1\n1,2\n2,3\n3,4\n")
    (tmp_path / "l.csv").write_text("0,a\n1,b\n2,b\n3,a\n")
    out = run("import", "edges", tmp_path / "e.csv", "--labels", tmp_path / "l.csv",
              "--num-nodes", 6, "--directed", "--out", tmp_path / "s")  # fmt: skip
    assert "no splits" in out
    facts = json.loads(run("info", tmp_path / "s", "--json"))
    assert facts["directed"]
    assert facts["num_edges"] == 4
    assert facts["degree"]["isolated"] == 1
    assert facts["homophily"] == pytest.approx(1 / 3)
    assert facts["labels"] == {"a": 2, "b": 2}
    assert facts["unlabelled"] == 2
    assert facts["features"]["density"] == pytest.approx(10 / 12)


def test_import_cora_prints_the_quality_of_its_partitions(tmp_path, shared_data):
    out = run("import", "planetoid", shared_data / "planetoid", "--name", "cora", "--partitions", 4,
              "--out", tmp_path / "s")  # fmt: skip
    assert "2,708 nodes, 10,556 edges, 1,433 csr features, 7 classes, 1 splits" in out
    assert "4 partitions (metis): edge cut 0.0" in out
    facts = json.loads(run("info", tmp_path / "s", "--json"))
    assert facts["homophily"] == pytest.approx(0.81, abs=0.005)
    assert facts["degree"]["max"] == 168


def test_a_library_source_in_one_word(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ogb", None)
    with pytest.raises(DtrainError, match=r"pip install 'dtrain\[ogb\]'"):
        run("import", "ogb:ogbn-arxiv", "--out", tmp_path / "s")


def test_the_place_is_checked_before_the_work(tmp_path, monkeypatch):
    run("synth", "--nodes", 50, "--avg-degree", 4, "--features", 2, "--out", tmp_path / "s")

    def never(spec):
        raise AssertionError("generated for nothing")

    monkeypatch.setattr("dtrain.data.synth.synthesize", never)
    with pytest.raises(DtrainError, match="--overwrite"):
        run("synth", "--nodes", 50, "--out", tmp_path / "s")


EDGES = "import edges e.csv --out s"
SPLIT = f"{EDGES} --labels l.csv --split-fractions"
BAD_LINES = [
    ("import edges --out s", "SRC: expected a source for edges, got none"),
    ("import pyg:Cora Cora --out s", "SRC: expected none after pyg:Cora"),
    ("import excel x.xls --out s", "FORMAT: expected one of"),
    (f"{EDGES} --ids hex", "--ids: expected one of auto"),
    (f"{SPLIT} 60%", "--split-fractions: expected three numbers"),
    (f"{SPLIT} 0.6,0.2,0.3", "--split-fractions: expected three fractions"),
    (f"{SPLIT} 0.9,0.05,0.05", "--split-fractions: expected at least one node in each part"),
    (f"{EDGES} --partitions 9", "--partitions: expected 1 to 3"),
    (f"{EDGES} --partitioner x", "--partitioner: expected one of metis"),
    ("import edges bad.csv --out s", "bad.csv, line 2: expected ids of at least 0"),
    ("synth --nodes 50 --homophily 2 --out s", "--homophily: expected 0 to 1"),
    ("info nowhere", "store nowhere: expected meta.json"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, line, message):
    (tmp_path / "e.csv").write_text("0,1\n1,2\n")
    (tmp_path / "bad.csv").write_text("0,1\n1,-2\n")
    (tmp_path / "l.csv").write_text("0,0\n1,1\n2,1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DtrainError, match=message) as caught:
        run(*line.split())
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["bad.csv", "e.csv", "l.csv"]


def test_nan_features_in_an_archive_leave_nothing(tmp_path):
    features = np.ones((3, 2), dtype=np.float32)
    features[2, 1] = np.nan
    np.savez(tmp_path / "g.npz", x=features, y=np.array([0, 1, 0]), edges=np.array([[0, 1]]))
    with pytest.raises(DtrainError, match="row 2, column 1: expected a finite number, got nan"):
        run("import", "npz", tmp_path / "g.npz", "--out", tmp_path / "s")
    assert os.listdir(tmp_path) == ["g.npz"]


def test_a_remote_store_is_described(tmp_path):
    url = f"memory://cli-{tmp_path.name}/s"
    run("synth", "--nodes", 50, "--avg-degree", 4, "--features", 2, "--out", url)
    facts = json.loads(run("info", url, "--cache-dir", tmp_path, "--json"))
    assert facts["num_nodes"] == 50
