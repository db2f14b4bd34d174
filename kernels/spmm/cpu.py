"""Sparse-dense products on the CPU, by loops compiled to vector code.

Each row is computed by one thread in the order of its entries, so results depend neither on the
number of threads nor on the rows around it. bfloat16 is read as such and computed in float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import array, flat_bits, wide
from dtrain.kernels.csr import Csr
from dtrain.kernels.results import empty
from dtrain.kernels.spmm.tiles import chosen_rows, extreme_rows, sum_rows
from dtrain.kernels.threads import over_rows

_NARROW = 16
"""Columns of a row that is one tile: there is no other to go over."""
_TOGETHER = 64
"""Entries of the rows that a tile goes over before the next: their rows of ``x`` stay at hand."""


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm`, for tensors on the CPU."""
    return _summed(csr, x, weight, mean=False)


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_mean`, for tensors on the CPU."""
    return _summed(csr, x, None, mean=True)


def spmm_extreme(csr: Csr, x: Tensor, *, largest: bool) -> tuple[Tensor, Tensor]:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme`, for tensors on the CPU."""
    argument = empty((csr.num_rows, x.shape[1]), np.int32 if csr.nnz < 2**31 else np.int64)
    return _best(csr, x, argument, largest=largest), torch.from_numpy(argument)


def extreme_values(csr: Csr, x: Tensor, *, largest: bool) -> Tensor:
    """The first result of :func:`spmm_extreme`, for the time of that alone."""
    return _best(csr, x, None, largest=largest)


def spmm_extreme_backward(csr: Csr, grad: Tensor, argument: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme_backward`, for tensors on the CPU."""
    transposed, perm = csr.transpose()
    source, width = wide(grad).numpy(), grad.shape[1]
    out = empty((csr.num_cols, width), source.dtype)
    indptr, indices = transposed.for_loops()
    fixed = (indptr, indices, perm.numpy(), array(argument).reshape(-1), source.reshape(-1))

    def loop(first: int, end: int) -> None:
        _chosen(first, end, *fixed, out.reshape(-1), width)

    over_rows(indptr, 2 * width, loop)
    return torch.from_numpy(out).to(grad.dtype)


def _summed(csr: Csr, x: Tensor, weight: Tensor | None, *, mean: bool) -> Tensor:
    source, width = flat_bits(x), x.shape[1]
    out = empty((csr.num_rows, width), _result_type(x))
    indptr, indices = csr.for_loops()
    numbers = None
    if weight is not None:
        numbers = array(weight.to(torch.float64 if out.dtype == np.float64 else torch.float32))

    def loop(first: int, end: int) -> None:
        _sum(first, end, indptr, indices, numbers, source, out.reshape(-1), width, mean)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(x.dtype)


def _best(csr: Csr, x: Tensor, argument: Any, *, largest: bool) -> Tensor:
    """Extreme values; their entries are written to ``argument`` unless that is None."""
    source, width = flat_bits(x), x.shape[1]
    out = empty((csr.num_rows, width), _result_type(x))
    indptr, indices = csr.for_loops()
    if csr.nnz == 0:
        out[:] = 0
        if argument is not None:
            argument[:] = -1
        return torch.from_numpy(out).to(x.dtype)
    results = (out.reshape(-1), None if argument is None else argument.reshape(-1))

    def loop(first: int, end: int) -> None:
        _extreme(first, end, indptr, indices, source, *results, width, largest)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(x.dtype)


def _result_type(x: Tensor) -> Any:
    return np.float64 if x.dtype == torch.float64 else np.float32


@numba.njit(cache=True, nogil=True)
def _together(indptr: Any, row: Any, end: Any, width: Any) -> Any:
    """Where to stop for rows from ``row`` on with few entries together, one of them at least."""
    if width <= _NARROW:
        return end
    most = indptr[row] + _TOGETHER
    stop = row + 1
    while stop < end and indptr[stop + 1] <= most:
        stop += 1
    return stop


@numba.njit(cache=True, nogil=True)
def _sum(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    weight: Any,
    x: Any,
    out: Any,
    width: Any,
    mean: Any,
) -> None:
    row = first
    while row < end:
        stop = _together(indptr, row, end, width)
        sum_rows(x, indices, indptr, weight, out, row, stop, width, mean)
        row = stop


@numba.njit(cache=True, nogil=True)
def _extreme(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    x: Any,
    out: Any,
    argument: Any,
    width: Any,
    largest: Any,
) -> None:
    row = first
    while row < end:
        stop = _together(indptr, row, end, width)
        if largest:
            extreme_rows(x, indices, indptr, out, argument, row, stop, width, ">")
        else:
            extreme_rows(x, indices, indptr, out, argument, row, stop, width, "<")
        row = stop


@numba.njit(cache=True, nogil=True)
def _chosen(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    perm: Any,
    argument: Any,
    grad: Any,
    out: Any,
    width: Any,
) -> None:
    row = first
    while row < end:
        stop = _together(indptr, row, end, width)
        chosen_rows(grad, indices, indptr, perm, argument, out, row, stop, width)
        row = stop
