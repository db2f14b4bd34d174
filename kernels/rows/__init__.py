"""Rows of dense matrices by number, and reductions over segments of rows."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.spmm import spmm, spmm_max, spmm_mean, spmm_min, weighted_sum

Reduction = Literal["sum", "mean", "max", "min"]


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """``x[rows]``: float [n, F] of ``x`` (float [N, F]) and ``rows`` (int64 [n]).

    The gradient of a row that is taken several times is summed in their order, without atomics.

    Raises:
        IndexError: a number outside [0, N).
    """
    taken: Tensor = call(_GatherRows, x, rows)
    return taken


def scatter_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """float [num_rows, F] whose row ``r`` is the sum of the values with ``rows[i] == r``.

    ``values``: float [n, F]; ``rows``: int64 [n]. Summed in their order, without atomics; the
    transpose of :func:`gather_rows`.

    Raises:
        IndexError: a number outside [0, num_rows).
    """
    transposed, _ = _selection(rows, num_rows).transpose()
    return spmm(transposed, values)


def segment_reduce(values: Tensor, indptr: Tensor, reduce: Reduction = "sum") -> Tensor:
    """Reduce the rows ``indptr[i]`` to ``indptr[i + 1] - 1`` to row ``i``; zeros of no rows.

    ``values``: float [n, F]; ``indptr``: int64 [S + 1]; returns [S, F].

    Raises:
        ValueError: an unknown reduction, or segments that are not those of ``values``' rows.
    """
    if len(indptr) == 0 or int(indptr[-1]) != len(values):
        raise ValueError(f"segment_reduce: expected segments of {len(values)} rows in all")
    csr = Csr(indptr, torch.arange(len(values), device=values.device), len(values))
    if reduce == "sum":
        return spmm(csr, values)
    if reduce == "mean":
        return spmm_mean(csr, values)
    if reduce in ("max", "min"):
        return (spmm_max if reduce == "max" else spmm_min)(csr, values)[0]
    raise ValueError(f"segment_reduce: expected sum, mean, max or min, got {reduce!r}")


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return weighted_sum(_selection(rows, ctx.num_rows).transpose()[0], grad, None), None


def _selection(rows: Tensor, num_rows: int) -> Csr:
    """The pattern [n, num_rows] with one entry a row."""
    return Csr(torch.arange(len(rows) + 1, device=rows.device), rows, num_rows)
