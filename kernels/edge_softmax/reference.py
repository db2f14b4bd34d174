"""Edge softmax in plain torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.spmm.reference import segment_max, segment_sum


def forward(csr: Csr, scores: Tensor) -> Tensor:
    """Softmax over the entries of each row; ``scores``: float [nnz, H]."""
    rows = csr.row_of_entry()
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    maxima = segment_max(csr, wide.detach())
    exponents = torch.exp(wide - maxima[rows])
    return (exponents / segment_sum(csr, exponents)[rows]).to(scores.dtype)


def backward(csr: Csr, softmax: Tensor, grad: Tensor) -> Tensor:
    """``softmax * (grad - sum of softmax * grad over the row)``."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    product = softmax.to(wide) * grad.to(wide)
    rest = segment_sum(csr, product)[csr.row_of_entry()]
    return (product - softmax.to(wide) * rest).to(grad.dtype)
