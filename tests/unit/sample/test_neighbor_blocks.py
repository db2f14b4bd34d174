"""One layer's block: which edges, in which order, with which frequencies."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy.stats import chisquare

from dtrain.data.block import Block
from dtrain.data.sample.neighbor import _LAST_VERSION, Adjacency, SlotPool, sample_block


def draw(store, destinations, fanout, replace=False, key=11) -> tuple[Block, np.ndarray]:
    graph = Adjacency.of(store.indptr, store.indices)
    pool = SlotPool(graph.num_nodes)
    nodes = np.asarray(destinations, dtype=np.int64)
    return sample_block(graph, pool, nodes, fanout=fanout, replace=replace, key=key)


def rows_of(block: Block, sources: np.ndarray) -> list[list[int]]:
    """Global ids of every row."""
    indptr, columns = block.csr.indptr.numpy(), block.csr.indices.numpy()
    return [sources[columns[a:b]].tolist() for a, b in pairwise(indptr)]


def graph_row(store, node: int) -> list[int]:
    return store.indices[store.indptr[node] : store.indptr[node + 1]].tolist()


def same_rows(num_rows: int, degree: int) -> Adjacency:
    """``num_rows`` destinations that all have the in-neighbours 0 ... degree - 1."""
    indptr = np.arange(num_rows + 1) * degree
    return Adjacency(indptr, np.tile(np.arange(degree, dtype=np.int64), num_rows))


def picks(num_rows: int, degree: int, fanout: int, replace: bool) -> list[tuple[int, ...]]:
    """What each of ``num_rows`` destinations drew from [0, degree)."""
    graph = same_rows(num_rows, degree)
    block, sources = sample_block(
        graph, SlotPool(num_rows), np.arange(num_rows), fanout=fanout, replace=replace, key=5
    )
    return [tuple(row) for row in rows_of(block, sources)]


@pytest.mark.parametrize("fanout", [-1, 1000])
def test_all_neighbours_are_the_graph_rows(make_store, fanout):
    store = make_store()
    destinations = [7, 3, 0, 2, 1]
    block, sources = draw(store, destinations, fanout)
    rows = rows_of(block, sources)
    assert rows == [graph_row(store, v) for v in destinations]
    # Destinations first, then new nodes as they come.
    assert sources.tolist() == list(dict.fromkeys(destinations + [u for row in rows for u in row]))
    assert block.src_degree.tolist() == [len(graph_row(store, v)) for v in sources]
    assert (block.num_dst, block.num_src) == (5, len(sources))


@pytest.mark.parametrize("fanout", [1, 4, 40, 100])
def test_without_replacement_keeps_a_subsequence_of_each_row(make_store, fanout):
    store = make_store(num_nodes=3000)
    destinations = np.arange(3000)[::-1].copy()
    block, sources = draw(store, destinations, fanout)
    for v, row in zip(destinations, rows_of(block, sources), strict=True):
        whole = graph_row(store, v)
        assert len(row) == min(fanout, len(whole))
        assert not Counter(row) - Counter(whole)
        assert row == sorted(row)
    hub = rows_of(block, sources)[-1]
    assert len(set(hub)) == fanout


def test_with_replacement_every_linked_node_gets_fanout_edges(make_store):
    store = make_store()
    block, sources = draw(store, np.arange(300), 6, replace=True)
    for v, row in enumerate(rows_of(block, sources)):
        whole = graph_row(store, v)
        assert len(row) == (6 if whole else 0)
        assert set(row) <= set(whole)
        assert row == sorted(row)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (9, 2), (7, 6), (20, 3)])
def test_every_subset_is_equally_likely(degree, fanout):
    subsets = list(combinations(range(degree), fanout))
    counts = Counter(picks(len(subsets) * 400, degree, fanout, replace=False))
    assert set(counts) <= set(subsets)
    assert chisquare([counts[subset] for subset in subsets]).pvalue > 0.001


@pytest.mark.parametrize(("degree", "fanout"), [(300, 30), (5000, 100)])
def test_every_neighbour_of_a_hub_is_equally_likely(degree, fanout):
    counts = np.bincount(np.ravel(picks(5000, degree, fanout, replace=False)), minlength=degree)
    # Without replacement the counts vary less than a multinomial's.
    assert chisquare(counts).pvalue > 0.001
    assert chisquare(counts / (1 - fanout / degree)).pvalue < 0.999


@pytest.mark.parametrize("fanout", [3, 80])
def test_replacement_draws_are_uniform_and_independent(fanout):
    rows = np.array(picks(6000, 6, fanout, replace=True))
    assert chisquare(np.bincount(rows.ravel(), minlength=6)).pvalue > 0.001
    all_equal = np.mean(rows.min(axis=1) == rows.max(axis=1))
    assert abs(all_equal - 6.0 ** (1 - fanout)) < 0.01


def test_key_and_node_decide_the_draw_and_nothing_else(make_store):
    store = make_store()
    alone = {v: rows_of(*draw(store, [v], 2))[0] for v in range(300)}
    together = rows_of(*draw(store, np.arange(300), 2))
    assert together == [alone[v] for v in range(300)]
    assert together != rows_of(*draw(store, np.arange(300), 2, key=12))
    assert together != rows_of(*draw(store, np.arange(300), 2, key=11 + 2**63))


def test_no_destinations_and_no_edges(make_store):
    store = make_store()
    block, sources = draw(store, [], 4)
    assert (block.num_dst, block.num_src, block.nnz, len(sources)) == (0, 0, 0, 0)
    block, sources = draw(store, [3], 4)
    assert (block.num_dst, block.num_src, block.nnz, sources.tolist()) == (1, 1, 0, [3])


def test_slots_are_cleared_when_versions_run_out(make_store):
    store = make_store()
    graph, pool = Adjacency.of(store.indptr, store.indices), SlotPool(300)
    wanted, _ = draw(store, np.arange(50), 3)
    with pool.borrow() as slots:
        slots.version = _LAST_VERSION - 1
    for _ in range(3):
        block, _ = sample_block(graph, pool, np.arange(50), fanout=3, replace=False, key=11)
        assert block.csr.indices.equal(wanted.csr.indices)
    with pool.borrow() as slots:
        assert slots.version == 2
