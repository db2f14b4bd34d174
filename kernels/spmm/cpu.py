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
from dtrain.kernels.spmm.tiles import extreme_row, sum_row
from dtrain.kernels.threads import empty, over_range, over_rows

_LINE = 16  # elements in a cache line


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm`, for tensors on the CPU."""
    return _sum(csr, x, weight, mean=False)


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_mean`, for tensors on the CPU."""
    return _sum(csr, x, None, mean=True)


def spmm_extreme(csr: Csr, x: Tensor, *, largest: bool) -> tuple[Tensor, Tensor]:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme`, for tensors on the CPU."""
    source, width = flat_bits(x), x.shape[1]
    out = empty((csr.num_rows, width), _result_type(x))
    argument = empty(out.shape, np.int32 if csr.nnz < 2**31 else np.int64)
    indptr, indices = csr.indptr.numpy(), csr.indices.numpy()
    results = (out.reshape(-1), argument.reshape(-1))

    def loop(first: int, end: int) -> None:
        _extreme_rows(first, end, indptr, indices, source, *results, width, largest)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(x.dtype), torch.from_numpy(argument)


def spmm_extreme_backward(csr: Csr, grad: Tensor, argument: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme_backward`, for tensors on the CPU."""
    source, width = wide(grad).numpy(), grad.shape[1]
    out = np.zeros((csr.num_cols, width), source.dtype)
    indices, chosen = csr.indices.numpy(), array(argument)

    # Rows scatter to any source, so it is columns that are dealt to threads, by cache lines.
    def loop(first: int, end: int) -> None:
        _scatter(first * _LINE, min(end * _LINE, width), indices, source, chosen, out)

    over_range(-(-width // _LINE), len(source) * _LINE, loop)
    return torch.from_numpy(out).to(grad.dtype)


def _sum(csr: Csr, x: Tensor, weight: Tensor | None, *, mean: bool) -> Tensor:
    source, width = flat_bits(x), x.shape[1]
    out = empty((csr.num_rows, width), _result_type(x))
    indptr, indices = csr.indptr.numpy(), csr.indices.numpy()
    numbers = None
    if weight is not None:
        numbers = array(weight.to(torch.float64 if out.dtype == np.float64 else torch.float32))

    def loop(first: int, end: int) -> None:
        _sum_rows(first, end, indptr, indices, numbers, source, out.reshape(-1), width, mean)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(x.dtype)


def _result_type(x: Tensor) -> Any:
    return np.float64 if x.dtype == torch.float64 else np.float32


@numba.njit(cache=True, nogil=True)
def _sum_rows(
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
    for row in range(first, end):
        sum_row(x, indices, weight, out, indptr[row], indptr[row + 1], width, row, mean)


@numba.njit(cache=True, nogil=True)
def _extreme_rows(
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
    for row in range(first, end):
        start, stop = indptr[row], indptr[row + 1]
        if start == stop:
            out[row * width : (row + 1) * width] = 0
            argument[row * width : (row + 1) * width] = -1
        elif largest:
            extreme_row(x, indices, out, argument, start, stop, width, row, ">")
        else:
            extreme_row(x, indices, out, argument, start, stop, width, row, "<")


@numba.njit(cache=True, nogil=True)
def _scatter(first: Any, end: Any, indices: Any, grad: Any, argument: Any, out: Any) -> None:
    for row in range(grad.shape[0]):
        for f in range(first, end):
            k = argument[row, f]
            if k >= 0:
                out[indices[k], f] += grad[row, f]
