"""The structure: transpose, self entries, leading rows."""

from __future__ import annotations

import weakref

import pytest
import torch

from dtrain.kernels.csr import Csr, SparseRows


def dense_of(csr: Csr) -> torch.Tensor:
    out = torch.zeros(csr.num_rows, csr.num_cols)
    return out.index_put((csr.row_of_entry(), csr.indices), torch.ones(csr.nnz), accumulate=True)


def test_transpose_is_stable_and_complete(graph: Csr) -> None:
    transposed, perm = graph.transpose()
    order = torch.argsort(graph.indices, stable=True)
    assert torch.equal(perm, order)
    assert torch.equal(transposed.indices, graph.row_of_entry()[order])
    assert torch.equal(dense_of(transposed), dense_of(graph).T)
    assert graph.transpose()[0] is transposed


def test_sorting_transpose_for_other_devices_is_the_same(graph: Csr) -> None:
    transposed, perm = graph.transpose()
    by_sort, perm_by_sort = graph._transpose_by_sort()
    assert torch.equal(perm, perm_by_sort)
    assert torch.equal(transposed.indptr, by_sort.indptr)
    assert torch.equal(transposed.indices, by_sort.indices)


@pytest.mark.parametrize("column", [-1, 3])
def test_column_out_of_range_is_named(column: int) -> None:
    csr = Csr(torch.tensor([0, 2]), torch.tensor([1, column]), 3)
    with pytest.raises(IndexError, match=rf"indices\[1\].*got {column}"):
        csr.transpose()


def test_every_row_gets_itself_exactly_once(graph: Csr) -> None:
    pattern = graph.with_self_entries()
    for row in range(graph.num_rows):
        old = graph.indices[graph.indptr[row] : graph.indptr[row + 1]].tolist()
        new = pattern.indices[pattern.indptr[row] : pattern.indptr[row + 1]].tolist()
        assert new == [row, *(column for column in old if column != row)]
    elsewhere = graph._with_self_by_search()
    assert torch.equal(elsewhere.indptr, pattern.indptr)
    assert torch.equal(elsewhere.indices, pattern.indices)


def test_head_and_dense_of_sparse_rows(graph: Csr) -> None:
    rows = SparseRows(graph, torch.arange(1.0, graph.nnz + 1))
    for count in {0, graph.num_rows // 2, graph.num_rows}:
        assert torch.equal(rows.head(count).to_dense(), rows.to_dense()[:count])
    if graph.nnz:
        assert rows.to_dense().sum() == rows.values.sum()


def test_weights_in_the_order_of_columns_are_kept_until_they_change(large: Csr) -> None:
    perm = large.transpose()[1]
    weight = torch.arange(1.0, large.nnz + 1)
    first = large.by_column(weight)
    assert torch.equal(first, weight[perm])
    assert large.by_column(weight) is first
    weight.mul_(2)
    changed = large.by_column(weight)
    assert torch.equal(changed, weight[perm])
    other = weight.clone()
    other[0] = 7
    assert torch.equal(large.by_column(other), other[perm])
    # Weights that are learnt change at every step: not kept, and without gradients.
    learnt = weight.clone().requires_grad_()
    assert torch.equal(large.by_column(learnt), weight[perm])
    assert large.by_column(learnt) is not large.by_column(learnt)
    assert not large.by_column(learnt).requires_grad


def test_kept_weights_do_not_keep_the_tensor_and_are_not_taken_for_another(large: Csr) -> None:
    perm = large.transpose()[1]
    for value in (1.0, 2.0):
        # The second may lie where the first one lay.
        weight = torch.full((large.nnz,), value)
        assert torch.equal(large.by_column(weight), weight[perm])
        alive = weakref.ref(weight)
        del weight
        assert alive() is None
