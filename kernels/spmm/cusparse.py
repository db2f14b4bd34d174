"""The sum by torch's CSR product, cuSPARSE's on a GPU, with a structure made once and kept.

Torch asks cuSPARSE for ``CUSPARSE_SPMM_CSR_ALG2`` there, which NVIDIA documents to give the same
bits in every run where the matrix is not transposed, and it is not here: the backward pass takes
the transposed pattern's own structure. bfloat16 is left out, for it would be summed in bfloat16.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr

FASTER: dict[torch.dtype, tuple[tuple[int, int], ...]] = {}
"""Widths (from, to) of float32 or float64 rows for which cuSPARSE is to be preferred.

Empty, for it is not measured on a GPU yet; ``dtrain bench kernels --device cuda`` prints what to
write here. A width that is entered gives up that a row has the same bits in whatever block it lies
(cuSPARSE shares work among rows); results of two runs stay equal.
"""


def is_faster(x: Tensor) -> bool:
    """Whether the sum of rows like those of ``x`` is left to cuSPARSE."""
    return any(first <= x.shape[1] <= last for first, last in FASTER.get(x.dtype, ()))


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm`, for float32 or float64."""
    values = csr.ones(x.dtype) if weight is None else weight.detach().to(x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sparse tensors are in beta
        matrix = torch.sparse_csr_tensor(
            *csr.narrow(),
            values,
            (csr.num_rows, csr.num_cols),
            check_invariants=False,
        )
    result: Tensor = torch.sparse.mm(matrix, x.detach().contiguous())
    return result
