"""MaxK on the CPU: each row is computed by one thread, in the order of its entries."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import array, wide
from dtrain.kernels.csr import Csr
from dtrain.kernels.maxk.reference import column_type
from dtrain.kernels.results import empty
from dtrain.kernels.simd import prefetch
from dtrain.kernels.threads import over_range, over_rows

_AHEAD = 8


def choose(x: Tensor, k: int) -> Tensor:
    """As :func:`dtrain.kernels.maxk.reference.choose`, for tensors on the CPU."""
    source = wide(x).numpy()
    columns = torch.empty(len(source), k, dtype=column_type(source.shape[1]))
    out = columns.numpy()
    over_range(len(source), source.shape[1], lambda first, end: _choose(first, end, source, k, out))
    return columns


def scatter_sum(
    csr: Csr, values: Tensor, columns: Tensor, weight: Tensor | None, width: int
) -> Tensor:
    """As :func:`dtrain.kernels.maxk.reference.scatter_sum`, for tensors on the CPU."""
    source, numbers = wide(values).numpy(), _weights(values, weight)
    out = empty((csr.num_rows, width), source.dtype)
    structure = (csr.indptr.numpy(), csr.indices.numpy())
    chosen = array(columns)

    def loop(first: int, end: int) -> None:
        _scatter_rows(first, end, *structure, numbers, source, chosen, out)

    over_rows(structure[0], source.shape[1], loop)
    return torch.from_numpy(out).to(values.dtype)


def gather_sum(transposed: Csr, grad: Tensor, columns: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.maxk.reference.gather_sum`, for tensors on the CPU."""
    source, numbers = wide(grad).numpy(), _weights(grad, weight)
    out = empty((transposed.num_rows, columns.shape[1]), source.dtype)
    structure = (transposed.indptr.numpy(), transposed.indices.numpy())
    chosen = array(columns)

    def loop(first: int, end: int) -> None:
        _gather_rows(first, end, *structure, numbers, source, chosen, out)

    over_rows(structure[0], columns.shape[1], loop)
    return torch.from_numpy(out).to(grad.dtype)


def _weights(like: Tensor, weight: Tensor | None) -> Any:
    if weight is None:
        return None
    return array(weight.to(torch.float64 if like.dtype == torch.float64 else torch.float32))


@numba.njit(cache=True, nogil=True)
def _choose(first: Any, end: Any, x: Any, k: Any, out: Any) -> None:
    best = np.empty(k, x.dtype)  # the largest so far, decreasing, and their columns
    where = np.empty(k, np.int64)
    for row in range(first, end):
        count = 0
        for f in range(x.shape[1]):
            value = x[row, f]
            if count == k and value <= best[k - 1]:
                continue
            at = min(count, k - 1)
            while at > 0 and value > best[at - 1]:
                best[at] = best[at - 1]
                where[at] = where[at - 1]
                at -= 1
            best[at] = value
            where[at] = f
            count = min(count + 1, k)
        where.sort()
        for i in range(k):
            out[row, i] = where[i]


@numba.njit(cache=True, nogil=True)
def _scatter_rows(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    weight: Any,
    values: Any,
    columns: Any,
    out: Any,
) -> None:
    last = indices.size - 1
    k = np.uint64(values.shape[1])
    flat_values, flat_columns = values.reshape(-1), columns.reshape(-1)
    for row in range(first, end):
        sums = out[row]
        sums[:] = 0
        for e in range(indptr[row], indptr[row + 1]):
            later = indices[min(e + _AHEAD, last)] * np.int64(k)
            prefetch(flat_values, later)
            prefetch(flat_columns, later)
            # Unsigned: no wrapping around of negative indices to be looked for.
            begin = np.uint64(indices[e]) * k
            factor = values.dtype.type(1) if weight is None else weight[e]
            for i in range(k):
                sums[np.uint64(flat_columns[begin + i])] += factor * flat_values[begin + i]


@numba.njit(cache=True, nogil=True)
def _gather_rows(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    weight: Any,
    grad: Any,
    columns: Any,
    out: Any,
) -> None:
    last = indices.size - 1
    width = np.uint64(grad.shape[1])
    flat = grad.reshape(-1)
    for row in range(first, end):
        sums, chosen = out[row], columns[row]
        sums[:] = 0
        for e in range(indptr[row], indptr[row + 1]):
            later = indices[min(e + _AHEAD, last)] * np.int64(width)
            for i in range(0, grad.shape[1], 16):
                prefetch(flat, later + i)
            begin = np.uint64(indices[e]) * width
            factor = grad.dtype.type(1) if weight is None else weight[e]
            for i in range(chosen.size):
                sums[i] += factor * flat[begin + np.uint64(chosen[i])]
