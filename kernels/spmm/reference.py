"""Sparse-dense products in plain torch operations, on any device, in the order of the entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr


def segment_sum(csr: Csr, entries: Tensor) -> Tensor:
    """Sum of the entries of every row. ``entries``: float [nnz, ...]; returns [num_rows, ...].

    A segment reduction, not ``index_add``: the latter adds with atomics on a GPU, in any order.
    """
    if entries.numel() == 0:
        # Expanded from the sum of nothing, so that autograd still sees the entries.
        return entries.sum(0).expand(csr.num_rows, *entries.shape[1:]).clone()
    return torch.segment_reduce(entries, "sum", offsets=csr.indptr, axis=0, unsafe=True)


def segment_max(csr: Csr, entries: Tensor) -> Tensor:
    """Largest entry of every row, -inf in rows without any; shapes as :func:`segment_sum`."""
    if entries.numel() == 0:
        return entries.new_full((csr.num_rows, *entries.shape[1:]), float("-inf"))
    return torch.segment_reduce(entries, "max", offsets=csr.indptr, axis=0, unsafe=True)


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """Row ``i`` is the sum of ``weight[k] * x[indices[k]]`` over the entries of row ``i``.

    ``x``: float [num_cols, F]; ``weight``: float [nnz] or None for ones; returns [num_rows, F].
    Narrower types than float32 are summed in float32.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    entries = x.to(wide)[csr.indices]
    if weight is not None:
        entries = entries * weight.to(wide)[:, None]
    return segment_sum(csr, entries).to(x.dtype)


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """Row ``i`` is the mean of ``x[indices[k]]`` over its entries; zeros where it has none."""
    counts = csr.row_counts().clamp(min=1).to(torch.promote_types(x.dtype, torch.float32))
    wide = torch.promote_types(x.dtype, torch.float32)
    return (spmm(csr, x.to(wide), None) / counts[:, None]).to(x.dtype)


def spmm_extreme(csr: Csr, x: Tensor, *, largest: bool) -> tuple[Tensor, Tensor]:
    """Elementwise maximum (or minimum) over the entries of every row, and its entry.

    ``x``: float [num_cols, F]; returns values [num_rows, F] (0 in empty rows) and int64
    [num_rows, F] positions of entries, the first of equals, -1 in empty rows.
    """
    if not largest:
        values, argument = spmm_extreme(csr, -x, largest=True)
        return -values, argument
    entries = x.detach().to(torch.promote_types(x.dtype, torch.float32))[csr.indices]
    best = segment_max(csr, entries)
    rows = csr.row_of_entry()
    position = torch.arange(csr.nnz, device=x.device, dtype=torch.float64)
    hits = torch.where(entries == best[rows], position[:, None], float("inf"))
    first = -segment_max(csr, -hits)
    empty = (csr.row_counts() == 0)[:, None].expand_as(first)
    argument = torch.where(empty, -1.0, first).to(torch.int64)
    if csr.nnz == 0:
        return segment_sum(csr, x[csr.indices]), argument
    return torch.where(empty, 0.0, x.gather(0, csr.indices[argument.clamp(min=0)])), argument


def extreme_values(csr: Csr, x: Tensor, *, largest: bool) -> Tensor:
    """The first result of :func:`spmm_extreme`."""
    return spmm_extreme(csr, x, largest=largest)[0]


def spmm_extreme_backward(csr: Csr, grad: Tensor, argument: Tensor) -> Tensor:
    """Gradient of :func:`spmm_extreme` to ``x``. ``grad``, ``argument``: [num_rows, F]."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    rows = csr.row_of_entry()
    position = torch.arange(csr.nnz, device=grad.device)
    entries = torch.where(argument[rows] == position[:, None], grad.to(wide)[rows], 0.0)
    transposed, perm = csr.transpose()
    return segment_sum(transposed, entries[perm]).to(grad.dtype)
