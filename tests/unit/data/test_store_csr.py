"""Adjacency built by compiled loops, against sets of pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.csr_build import build_csr, is_symmetric, symmetrize_csr, transpose_csr

GRAPHS = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=40)
    )
)


def pairs(indptr, indices):
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return list(zip(indices.tolist(), rows.tolist(), strict=True))


@settings(max_examples=150, deadline=None)
@given(graph=GRAPHS, undirected=st.booleans(), loops=st.booleans())
def test_rows_hold_each_edge_once_in_order(graph, undirected, loops):
    num_nodes, edges = graph
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    indptr, indices = build_csr(
        num_nodes, ends[:, 0], ends[:, 1], undirected=undirected, keep_self_loops=loops
    )
    expected = {(u, v) for u, v in edges if u != v or loops}
    if undirected:
        expected |= {(v, u) for u, v in expected}
    assert pairs(indptr, indices) == sorted(expected, key=lambda edge: (edge[1], edge[0]))
    assert indices.dtype == np.int32

    back = pairs(*transpose_csr(indptr, indices))
    assert back == sorted(((v, u) for u, v in expected), key=lambda edge: (edge[1], edge[0]))
    both = pairs(*symmetrize_csr(indptr, indices))
    union = {(u, v) for u, v in expected | {(v, u) for u, v in expected} if u != v}
    assert both == sorted(union, key=lambda edge: (edge[1], edge[0]))
    assert is_symmetric(indptr, indices) == ({(v, u) for u, v in expected} == expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_any_integer_type_of_ids_will_do(dtype):
    indptr, indices = build_csr(
        3, np.array([0, 1], dtype=dtype), np.array([1, 2], dtype=dtype), undirected=False
    )
    assert pairs(indptr, indices) == [(0, 1), (1, 2)]
