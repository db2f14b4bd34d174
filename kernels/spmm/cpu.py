"""Sparse-dense products on the CPU.

Sums go through ``embedding_bag``, whose generated code (FBGEMM) was the fastest weighted product
of those measured. Each row is summed by one thread in the order of its entries, so results do
not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.kernels.csr import Csr


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm`, for tensors on the CPU."""
    return _bag(csr, x, weight, "sum")


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_mean`, for tensors on the CPU."""
    return _bag(csr, x, None, "mean")


def _bag(csr: Csr, x: Tensor, weight: Tensor | None, mode: str) -> Tensor:
    if csr.nnz == 0 or x.shape[1] == 0:
        return x.new_zeros((csr.num_rows, x.shape[1]))
    if weight is not None:
        weight = weight.detach().to(x.dtype).contiguous()
    return F.embedding_bag(
        csr.indices,
        x.detach().contiguous(),
        csr.indptr,
        mode=mode,
        per_sample_weights=weight,
        include_last_offset=True,
    )


@numba.njit(cache=True, nogil=True)
def _max(indptr: Any, indices: Any, x: Any, out: Any, argument: Any) -> None:
    width = x.shape[1]
    for row in range(indptr.size - 1):
        start, stop = indptr[row], indptr[row + 1]
        if start == stop:
            for f in range(width):
                out[row, f] = 0
                argument[row, f] = -1
            continue
        column = indices[start]
        for f in range(width):
            out[row, f] = x[column, f]
            argument[row, f] = start
        for k in range(start + 1, stop):
            column = indices[k]
            for f in range(width):
                if x[column, f] > out[row, f]:
                    out[row, f] = x[column, f]
                    argument[row, f] = k


@numba.njit(cache=True, nogil=True)
def _max_backward(indices: Any, grad: Any, argument: Any, out: Any) -> None:
    for row in range(grad.shape[0]):
        for f in range(grad.shape[1]):
            k = argument[row, f]
            if k >= 0:
                out[indices[k], f] += grad[row, f]


def spmm_max(csr: Csr, x: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`dtrain.kernels.spmm.reference.spmm_max`, for tensors on the CPU."""
    source = _wide(x).numpy()
    out = np.empty((csr.num_rows, x.shape[1]), source.dtype)
    argument = np.empty(out.shape, np.int64)
    _max(csr.indptr.numpy(), csr.indices.numpy(), source, out, argument)
    return torch.from_numpy(out).to(x.dtype), torch.from_numpy(argument)


def spmm_max_backward(csr: Csr, grad: Tensor, argument: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_max_backward`, for tensors on the CPU."""
    source = _wide(grad).numpy()
    out = np.zeros((csr.num_cols, grad.shape[1]), source.dtype)
    _max_backward(csr.indices.numpy(), source, argument.numpy(), out)
    return torch.from_numpy(out).to(grad.dtype)


def _wide(x: Tensor) -> Tensor:
    """``x`` without autograd, contiguous, in a type that compiled loops know."""
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    return x.detach().to(wide).contiguous()
