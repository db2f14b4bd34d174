"""Partitioners: complete, balanced, repeatable, and better than chance where they look at edges."""

from __future__ import annotations

import numpy as np
import pytest

from dtrain.data.csr_build import build_csr
from dtrain.data.partition import PARTITIONERS, partition_graph, quality
from dtrain.data.partition.quality import fill_empty
from dtrain.data.partition.stream import BALANCE_SLACK, EDGE_SLACK
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.errors import DtrainError


@pytest.fixture(scope="module")
def communities():
    """Four planted communities of about 250 nodes with 9 of 10 edges inside."""
    return synthesize(SynthSpec(1000, avg_degree=12, classes=4, features=2, homophily=0.9))


@pytest.mark.parametrize("method", PARTITIONERS)
@pytest.mark.parametrize("num_partitions", [1, 2, 7])
def test_every_node_has_a_partition_and_none_is_empty(communities, method, num_partitions):
    indptr, indices = communities.indptr, communities.indices
    part = partition_graph(method, indptr, indices, num_partitions, seed=3)
    assert part.dtype == np.int32
    assert part.shape == (1000,)
    sizes = np.bincount(part, minlength=num_partitions)
    assert len(sizes) == num_partitions
    assert sizes.min() > 0
    assert sizes.max() <= BALANCE_SLACK * 1000 / num_partitions + 1
    again = partition_graph(method, indptr, indices, num_partitions, seed=3)
    np.testing.assert_array_equal(part, again)


def test_the_seed_matters_where_chance_does(communities):
    arguments = communities.indptr, communities.indices, 4
    one, two = (partition_graph("random", *arguments, seed=s) for s in (1, 2))
    assert (one != two).any()


@pytest.mark.parametrize(("method", "at_most"), [("metis", 0.2), ("stream", 0.3), ("random", 0.8)])
def test_edge_cut_on_planted_communities(communities, method, at_most):
    part = partition_graph(method, communities.indptr, communities.indices, 4)
    found = quality(communities.indptr, communities.indices, part, 4)
    assert found.edge_cut < at_most
    if method == "random":
        assert found.edge_cut > 0.7


def test_streaming_balances_edges_as_well():
    """Hubs of a power law differ a hundredfold in edges."""
    graph = synthesize(SynthSpec(20_000, avg_degree=15, features=2))
    part = partition_graph("stream", graph.indptr, graph.indices, 8)
    assert quality(graph.indptr, graph.indices, part, 8).edge_balance <= EDGE_SLACK + 0.01


def test_quality_by_hand():
    src, dst = np.array([0, 1, 2, 3, 0]), np.array([1, 2, 3, 0, 3])
    indptr, indices = build_csr(4, src, dst, undirected=False)
    found = quality(indptr, indices, np.array([0, 0, 0, 1], dtype=np.int32), 2)
    # Cut: 2->3, 3->0, 0->3. In-edges: 3 of nodes 0..2, 2 of node 3.
    assert found.edge_cut == pytest.approx(3 / 5)
    assert found.node_balance == pytest.approx(3 / 2)
    assert found.edge_balance == pytest.approx(3 / 2.5)


def test_directed_graphs_and_self_loops_are_symmetrised_for_metis():
    # Two directed rings with one edge between them and a self loop.
    ring = np.arange(10)
    src = np.concatenate([ring, ring + 10, [0, 5]])
    dst = np.concatenate([(ring + 1) % 10, (ring + 1) % 10 + 10, [10, 5]])
    indptr, indices = build_csr(20, src, dst, undirected=False, keep_self_loops=True)
    part = partition_graph("metis", indptr, indices, 2, directed=True)
    assert len(set(part[:10])) == 1
    assert len(set(part[10:])) == 1
    assert part[0] != part[10]


def test_empty_partitions_get_a_node_of_the_largest():
    part = fill_empty(np.array([0, 0, 0, 0, 2], dtype=np.int32), 4)
    assert sorted(np.bincount(part).tolist()) == [1, 1, 1, 2]


@pytest.mark.parametrize("method", PARTITIONERS)
def test_as_many_partitions_as_nodes(method):
    indptr, indices = build_csr(5, np.array([0, 0, 0]), np.array([1, 2, 3]), undirected=True)
    part = partition_graph(method, indptr, indices, 5)
    assert sorted(part.tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("method", "count", "message"),
    [
        ("metis", 0, r"--partitions: expected 1 to 1000 .* got 0"),
        ("range", 1001, r"--partitions: expected 1 to 1000 .* got 1001"),
        ("kernighan", 2, r"--partitioner: expected one of metis, stream, range, random"),
    ],
)
def test_wrong_options_are_named(communities, method, count, message):
    with pytest.raises(DtrainError, match=message):
        partition_graph(method, communities.indptr, communities.indices, count)
