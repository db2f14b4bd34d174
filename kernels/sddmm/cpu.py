"""Sampled dense-dense operators, each as one pass over the entries on the CPU."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import flat_bits, wide
from dtrain.kernels.csr import Csr
from dtrain.kernels.results import empty
from dtrain.kernels.sddmm.tiles import dot_row
from dtrain.kernels.threads import over_rows


def sddmm_dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.sddmm.reference.sddmm_dot`, for tensors on the CPU.

    bfloat16 is read as such and computed in float32.
    """
    out = empty((csr.nnz,), np.float64 if a.dtype == torch.float64 else np.float32)
    indptr, indices, width = csr.indptr.numpy(), csr.indices.numpy(), a.shape[1]
    left, right = flat_bits(a), flat_bits(b.to(a.dtype))

    def loop(first: int, end: int) -> None:
        _dot_rows(first, end, indptr, indices, left, right, out, width)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(a.dtype)


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.sddmm.reference.sddmm_add`, for tensors on the CPU."""
    near, far = wide(a).numpy(), wide(b).numpy()
    out = empty((csr.nnz, near.shape[1]), near.dtype)
    indptr, indices = csr.indptr.numpy(), csr.indices.numpy()

    def loop(first: int, end: int) -> None:
        _add_rows(first, end, indptr, indices, near, far, out)

    over_rows(indptr, near.shape[1], loop)
    return torch.from_numpy(out).to(a.dtype)


@numba.njit(cache=True, nogil=True)
def _dot_rows(
    first: Any, end: Any, indptr: Any, indices: Any, a: Any, b: Any, out: Any, width: Any
) -> None:
    for row in range(first, end):
        dot_row(a, b, indices, out, indptr[row], indptr[row + 1], width, row)


@numba.njit(cache=True, nogil=True)
def _add_rows(first: Any, end: Any, indptr: Any, indices: Any, a: Any, b: Any, out: Any) -> None:
    for row in range(first, end):
        for k in range(indptr[row], indptr[row + 1]):
            for h in range(out.shape[1]):
                out[k, h] = a[row, h] + b[indices[k], h]
