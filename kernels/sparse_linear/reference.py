"""The sparse linear map in plain torch operations, on any device."""

from __future__ import annotations

from torch import Tensor

from dtrain.kernels.csr import SparseRows


def sparse_linear(rows: SparseRows, weight: Tensor) -> Tensor:
    """``rows @ weight`` through the dense matrix.

    ``weight``: float [num_cols, F]; returns [num_rows, F].
    """
    return rows.to_dense().to(weight.dtype) @ weight
