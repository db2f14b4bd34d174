"""Softmax of the scores of every destination's entries."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation


def edge_softmax(csr: Csr, scores: Tensor) -> Tensor:
    """``exp(scores[k]) / sum(exp(scores))`` over the entries of each entry's row, for every head.

    ``scores``: float [nnz, H]; returns the same shape and dtype.

    Raises:
        ValueError: scores that are not one row for each entry.
    """
    if scores.dim() != 2 or len(scores) != csr.nnz:
        raise ValueError(f"edge_softmax: expected scores [{csr.nnz}, H], got {list(scores.shape)}")
    softmax: Tensor = call(_EdgeSoftmax, scores, csr)
    return softmax


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        softmax: Tensor = _backend(scores).forward(csr, scores)
        ctx.save_for_backward(softmax)
        return softmax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (softmax,) = ctx.saved_tensors
        return _backend(grad).backward(ctx.csr, softmax, grad), None


def _backend(x: Tensor) -> Any:
    return implementation("edge_softmax", x)
