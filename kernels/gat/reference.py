"""Graph attention in plain torch operations, on any device.

``forward`` is differentiable by autograd; ``backward`` is its gradient written out with reductions
of a fixed order, for devices where autograd's own would add with atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout.reference import keep_mask
from dtrain.kernels.spmm.reference import segment_max, segment_sum


class Attention(NamedTuple):
    """What an attention is besides its tensors: leaky slope, dropout probability and its key."""

    slope: float
    p: float
    key: int


def forward(
    csr: Csr,
    x: Tensor,
    src_score: Tensor,
    dst_score: Tensor,
    attention: Attention,
    *,
    with_grad: bool = True,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs [num_rows, H, D] and what ``backward`` needs, if it is to be called.

    That is the outputs again, and every row's largest logit and sum of exponents [num_rows, H].
    Arguments as :func:`dtrain.kernels.gat.gat`.
    """
    logits = _logits(csr, src_score, dst_score, attention.slope)
    rows = csr.row_of_entry()
    # The maximum cancels, so no gradient has to pass through it.
    maxima = segment_max(csr, logits.detach())
    maxima = torch.where(torch.isinf(maxima), 0.0, maxima)
    exponents = torch.exp(logits - maxima[rows])
    sums = segment_sum(csr, exponents)
    coefficients = exponents * _dropped(csr, exponents, attention) / sums[rows]
    out = segment_sum(csr, coefficients[:, :, None] * x[csr.indices])
    return out, (out, maxima, sums) if with_grad else ()


def backward(
    csr: Csr,
    inputs: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, ...],
    grad: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to ``x``, ``src_score`` and ``dst_score``.

    ``inputs`` are those, ``kept`` what ``forward`` gave; ``grad``: float
    [num_rows, H, D]. With ``a`` the softmax, ``c`` the dropout factor and ``g`` the gradient of
    the output ``o``, the gradient of the logit of an entry is ``a (c g.x - g.o)``.
    """
    (x, src_score, dst_score), (out, maxima, sums) = inputs, kept
    rows, (transposed, perm) = csr.row_of_entry(), csr.transpose()
    logits = _logits(csr, src_score, dst_score, attention.slope)
    softmax = torch.exp(logits - maxima[rows]) / sums[rows]
    factor = _dropped(csr, softmax, attention)
    entry_grad = grad[rows]
    own = (grad * out).sum(-1)
    to_logit = softmax * (factor * (entry_grad * x[csr.indices]).sum(-1) - own[rows])
    to_score = torch.where(logits > 0, to_logit, attention.slope * to_logit)
    to_x = (softmax * factor)[:, :, None] * entry_grad
    return (
        segment_sum(transposed, to_x[perm]),
        segment_sum(transposed, to_score[perm]),
        segment_sum(csr, to_score),
    )


def _logits(csr: Csr, src_score: Tensor, dst_score: Tensor, slope: float) -> Tensor:
    """Leaky rectified sums of the two ends' scores, [nnz, H]."""
    scores = src_score[csr.indices] + dst_score[csr.row_of_entry()]
    return torch.where(scores > 0, scores, slope * scores)


def _dropped(csr: Csr, like: Tensor, attention: Attention) -> Tensor:
    """The dropout factor of every entry and head, [nnz, H]: 0 or ``1 / (1 - p)``."""
    if attention.p == 0.0:
        return torch.ones_like(like)
    keep = keep_mask(attention.key, like.numel(), attention.p, like.device).view(like.shape)
    return keep.to(like.dtype) / (1.0 - attention.p)
