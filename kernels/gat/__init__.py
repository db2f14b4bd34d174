"""Graph attention: each destination weighs its sources by a softmax over learnt scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation
from dtrain.kernels.gat.reference import Attention


def gat(
    csr: Csr,
    x: Tensor,
    src_score: Tensor,
    dst_score: Tensor,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    key: int = 0,
    training: bool = True,
) -> Tensor:
    """Sum of the source rows of every destination, weighted by attention, for every head.

    ``out[v, h] = sum_u dropout(softmax_u(leaky_relu(src_score[u, h] + dst_score[v, h]))) x[u, h]``
    over the entries of row ``v`` (Velickovic et al., "Graph Attention Networks", ICLR 2018).

    ``x``: float [num_cols, H, D]; ``src_score``: float [num_cols, H]; ``dst_score``: float
    [num_rows, H], all of one dtype; returns [num_rows, H, D] of it, zeros in rows without entries.
    ``p`` and ``key`` are those of :func:`dtrain.kernels.dropout.dropout` for the coefficients
    [nnz, H]. Types narrower than float32 are computed in float32. Per entry and head nothing is
    stored between forward and backward.

    Raises:
        ValueError: shapes that do not fit, or ``p`` outside [0, 1).
    """
    check(csr, x, src_score, dst_score, p)
    attention = Attention(slope, p if training else 0.0, key)
    wide = torch.promote_types(x.dtype, torch.float32)
    out: Tensor = call(_Gat, x.to(wide), src_score.to(wide), dst_score.to(wide), csr, attention)
    return out.to(x.dtype)


def check(csr: Csr, x: Tensor, src_score: Tensor, dst_score: Tensor, p: float) -> None:
    """Refuse what :func:`gat` does not take.

    Raises:
        ValueError: see there.
    """
    heads = x.shape[1] if x.dim() == 3 else -1
    shapes = [tuple(t.shape) for t in (src_score, dst_score)]
    if x.shape[0] != csr.num_cols or shapes != [(csr.num_cols, heads), (csr.num_rows, heads)]:
        raise ValueError(
            f"gat: expected x [{csr.num_cols}, H, D], scores [{csr.num_cols}, H] and "
            f"[{csr.num_rows}, H], got {[tuple(x.shape), *shapes]}"
        )
    if not 0.0 <= p < 1.0:
        raise ValueError(f"gat: expected a dropout probability in [0, 1), got {p}")


class _Gat(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, src_score: Tensor, dst_score: Tensor, csr: Csr, attention: Attention
    ) -> Tensor:
        ctx.csr, ctx.attention = csr, attention
        out, kept = _backend(x).forward(
            csr, x, src_score, dst_score, attention, with_grad=any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(x, src_score, dst_score, *kept)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        inputs, kept = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
        to_x, to_src, to_dst = _backend(grad).backward(ctx.csr, inputs, kept, grad, ctx.attention)
        return to_x, to_src, to_dst, None, None


def _backend(x: Tensor) -> Any:
    return implementation("gat", x)
