"""Own rows beside means in plain torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout.reference import dropout
from dtrain.kernels.spmm.reference import spmm_mean


def own_mean(csr: Csr, x: Tensor, p: float, key: int) -> Tensor:
    """``x``: float [num_cols, F]; returns [num_rows, 2 F]; differentiable."""
    y = dropout(x, p, key) if p else x
    return torch.cat([y[: csr.num_rows], spmm_mean(csr, y)], 1)
