"""Sampled dense-dense operators in plain torch operations, on any device."""

from __future__ import annotations

from torch import Tensor

from dtrain.kernels.csr import Csr


def sddmm_dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """Entry ``(i, j)`` of the pattern is ``a[i] . b[j]``.

    ``a``: float [num_rows, F]; ``b``: float [num_cols, F]; returns float [nnz].
    """
    return (a[csr.row_of_entry()] * b[csr.indices]).sum(-1)


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """Entry ``(i, j)`` of the pattern is ``a[i] + b[j]``.

    ``a``: float [num_rows, H]; ``b``: float [num_cols, H]; returns float [nnz, H].
    """
    return a[csr.row_of_entry()] + b[csr.indices]
