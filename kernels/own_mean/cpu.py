"""Own rows beside means on the CPU, by loops compiled to vector code.

Each row is computed by one thread in the order of its entries, so results do not depend on the
number of threads. bfloat16 is read as such and computed in float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import flat_bits
from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout import dropout
from dtrain.kernels.dropout.reference import keep_threshold
from dtrain.kernels.own_mean.tiles import forward_row, gradient_row
from dtrain.kernels.results import empty
from dtrain.kernels.rows.stored import StoredRows
from dtrain.kernels.threads import over_rows


def own_mean(csr: Csr, x: Tensor | StoredRows, p: float, key: int) -> Tensor:
    """As :func:`dtrain.kernels.own_mean.reference.own_mean`, for tensors on the CPU."""
    if p and csr.nnz + csr.num_rows > 2 * csr.num_cols:
        # Most rows are read several times: their masks are drawn once, not at each reading.
        gathered = x.gather() if isinstance(x, StoredRows) else x.detach()
        x, p = dropout(gathered, p, key), 0.0
    width = x.shape[1]
    if isinstance(x, StoredRows):
        source, names, dtype = x.matrix.reshape(-1), x.rows, torch.float32
    else:
        source, names, dtype = flat_bits(x), None, x.dtype
    out = empty((csr.num_rows, 2 * width), _computed(dtype))
    indptr, indices = csr.indptr.numpy(), csr.indices.numpy()
    mask = _mask_numbers(p, key, out.dtype)

    def loop(first: int, end: int) -> None:
        _forward(first, end, indptr, indices, source, names, out.reshape(-1), width, *mask)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(dtype)


def own_mean_backward(csr: Csr, grad: Tensor, p: float, key: int) -> Tensor:
    """The gradient of the input, [num_cols, F], of that of the result, [num_rows, 2 F].

    Every row is written once: its own part and its shares of the means, then dropout's mask.
    """
    if not csr.num_rows:
        return grad.new_zeros(csr.num_cols, grad.shape[1] // 2)
    transposed, _ = csr.transpose()
    given, width = flat_bits(grad), grad.shape[1] // 2
    out = empty((csr.num_cols, width), _computed(grad.dtype))
    share = 1.0 / csr.row_counts().clamp(min=1).numpy()
    share = share.astype(out.dtype, copy=False)
    indptr, rows = transposed.indptr.numpy(), transposed.indices.numpy()
    mask = _mask_numbers(p, key, out.dtype)

    def loop(first: int, end: int) -> None:
        _backward(
            first, end, csr.num_rows, indptr, rows, share, given, out.reshape(-1), width, *mask
        )

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(grad.dtype)


def _computed(dtype: torch.dtype) -> Any:
    return np.float64 if dtype == torch.float64 else np.float32


def _mask_numbers(p: float, key: int, dtype: Any) -> tuple[Any, ...]:
    """Whether there is dropout, and what its mask takes: key, threshold and scale."""
    scale = np.dtype(dtype).type(1.0 / (1.0 - p))
    return p > 0.0, np.uint64(key), np.uint64(keep_threshold(p)), scale


@numba.njit(cache=True, nogil=True)
def _forward(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    x: Any,
    names: Any,
    out: Any,
    width: Any,
    dropped: Any,
    key: Any,
    threshold: Any,
    scale: Any,
) -> None:
    for row in range(first, end):
        start, stop = indptr[row], indptr[row + 1]
        if dropped:
            forward_row(
                x, names, indices, out, start, stop, width, row, key, threshold, scale, True
            )
        else:
            forward_row(
                x, names, indices, out, start, stop, width, row, key, threshold, scale, False
            )


@numba.njit(cache=True, nogil=True)
def _backward(
    first: Any,
    end: Any,
    num_rows: Any,
    indptr: Any,
    rows: Any,
    share: Any,
    grad: Any,
    out: Any,
    width: Any,
    dropped: Any,
    key: Any,
    threshold: Any,
    scale: Any,
) -> None:
    for column in range(first, end):
        start, stop = indptr[column], indptr[column + 1]
        own = column < num_rows
        if dropped:
            gradient_row(
                grad, rows, share, out, start, stop, width, column, own, key, threshold, scale, True
            )
        else:
            gradient_row(
                grad, rows, share, out, start, stop, width, column, own, key, threshold, scale,
                False,
            )  # fmt: skip
