"""Generated graphs are what was asked for, whatever the number of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError

SPEC = SynthSpec(20_000, avg_degree=10, classes=5, features=16, homophily=0.8, seed=7)


@pytest.fixture(scope="module")
def graph():
    return synthesize(SPEC)


def test_threads_change_nothing(graph):
    alone = synthesize(SPEC, threads=1)
    np.testing.assert_array_equal(alone.indices, graph.indices)
    nodes = np.arange(0, 20_000, 7)
    one, many = alone.features.rows(nodes), synthesize(SPEC, threads=5).features.rows(nodes)
    np.testing.assert_array_equal(one, many)


def test_a_node_has_its_features_wherever_it_is_asked_for(graph):
    nodes = np.array([19_999, 3, 3, 512])
    rows = graph.features.rows(nodes)
    for row, node in zip(rows, nodes, strict=True):
        np.testing.assert_array_equal(graph.features.rows(np.array([node]))[0], row)


def test_seeds_give_different_graphs(graph):
    other = synthesize(replace(SPEC, seed=8))
    assert len(other.indices) != len(graph.indices) or (other.indices != graph.indices).any()


def test_the_graph_is_the_same_everywhere(tmp_path):
    """Pins the generator: a changed draw would change every stored fingerprint and result."""
    spec = SynthSpec(500, avg_degree=6, classes=3, features=4, homophily=0.7, seed=1)
    meta = write_store(str(tmp_path / "s"), synthesize(spec), partitions=2, partitioner="stream")
    assert meta.fingerprint == "9d0122be596ea419a7139e3880f8c73f131edf731c2f3c0f3e5b4b087002c332"


def test_degree_and_homophily_are_as_asked(graph):
    degree = np.diff(graph.indptr)
    assert degree.mean() == pytest.approx(10, rel=0.05)
    # A power law: the most popular node has many times the median's neighbours.
    assert degree.max() > 20 * np.median(degree)
    rows = np.repeat(np.arange(20_000), degree)
    assert (graph.labels[rows] == graph.labels[graph.indices]).mean() == pytest.approx(
        0.8, abs=0.02
    )
    assert (rows != graph.indices).all()


@pytest.mark.parametrize("homophily", [0.0, 1.0])
def test_homophily_at_its_ends_is_exact(homophily):
    spec = SynthSpec(2000, avg_degree=8, classes=4, features=2, homophily=homophily)
    graph = synthesize(spec)
    rows = np.repeat(np.arange(2000), np.diff(graph.indptr))
    assert (graph.labels[rows] == graph.labels[graph.indices]).mean() == homophily


def test_features_inform_and_neighbours_inform_more(graph):
    features = graph.features.rows(np.arange(20_000)).astype(np.float64)
    means = np.stack([features[graph.labels == c].mean(axis=0) for c in range(5)])
    sums = np.add.reduceat(features[graph.indices], graph.indptr[:-1][np.diff(graph.indptr) > 0])
    connected = np.diff(graph.indptr) > 0

    def accuracy(x, labels):
        return (np.argmax(x @ means.T, axis=1) == labels).mean()

    alone = accuracy(features, graph.labels)
    with_neighbours = accuracy((features[connected] + sums), graph.labels[connected])
    assert 0.3 < alone < 0.8
    assert with_neighbours > alone + 0.1
    assert features.std(axis=0).mean() == pytest.approx(1.0, abs=0.1)


def test_splits_follow_the_fractions_and_cover_all(graph):
    train, val, test = graph.splits[0]
    assert (len(train), len(val), len(test)) == (12_000, 4_000, 4_000)
    assert sorted(np.concatenate([train, val, test]).tolist()) == list(range(20_000))


def test_half_precision_is_kept(tmp_path):
    spec = SynthSpec(300, avg_degree=4, classes=3, features=4, feature_dtype="float16")
    assert write_store(str(tmp_path / "s"), synthesize(spec)).feature_dtype == "float16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 1}, "--nodes: expected 2 to"),
        ({"classes": 1}, "--classes: expected 2 to"),
        ({"homophily": 1.5}, "--homophily: expected 0 to 1, got 1.5"),
        ({"avg_degree": -1}, "--avg-degree: expected 0 to"),
        ({"features": 0}, "--features: expected 1 to"),
        ({"feature_dtype": "int8"}, "--feature-dtype: expected float32 or float16, got int8"),
        ({"train_fraction": 0.9}, "--train-fraction.*expected three fractions"),
    ],
)
def test_options_out_of_range_are_named(change, message):
    with pytest.raises(DtrainError, match=message):
        synthesize(replace(SPEC, **change))
