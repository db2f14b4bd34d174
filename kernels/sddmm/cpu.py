"""Sampled dense-dense product as one pass over the entries on the CPU."""

from __future__ import annotations

from typing import Any

import numba
import torch
from torch import Tensor

from dtrain.kernels.csr import Csr


@numba.njit(cache=True, nogil=True)
def _dot(indptr: Any, indices: Any, a: Any, b: Any, out: Any) -> None:
    width = a.shape[1]
    even = width - width % 4
    zero = a.dtype.type(0)
    for row in range(indptr.size - 1):
        for k in range(indptr[row], indptr[row + 1]):
            column = indices[k]
            # Four sums hide the latency of an addition; their order is fixed.
            s0, s1, s2, s3 = zero, zero, zero, zero
            for f in range(0, even, 4):
                s0 += a[row, f] * b[column, f]
                s1 += a[row, f + 1] * b[column, f + 1]
                s2 += a[row, f + 2] * b[column, f + 2]
                s3 += a[row, f + 3] * b[column, f + 3]
            for f in range(even, width):
                s0 += a[row, f] * b[column, f]
            out[k] = (s0 + s1) + (s2 + s3)


def sddmm_dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.sddmm.reference.sddmm_dot`, for tensors on the CPU."""
    wide = a.dtype if a.dtype in (torch.float32, torch.float64) else torch.float32
    out = torch.empty(csr.nnz, dtype=wide)
    left, right = (t.detach().to(wide).contiguous().numpy() for t in (a, b))
    _dot(csr.indptr.numpy(), csr.indices.numpy(), left, right, out.numpy())
    return out.to(a.dtype)
