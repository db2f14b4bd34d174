"""Sampled dense-dense product: a number for every entry of a pattern from its two ends' rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation


def sddmm_dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """The dot product of destination row and source row for every entry of the pattern.

    ``a``: float [num_rows, F]; ``b``: float [num_cols, F], same dtype; returns float [nnz].

    Raises:
        ValueError: shapes that do not fit the pattern.
    """
    if a.dim() != 2 or b.dim() != 2 or (a.shape[0], b.shape[0]) != (csr.num_rows, csr.num_cols):
        raise ValueError(
            f"sddmm_dot: expected a [{csr.num_rows}, F] and b [{csr.num_cols}, F], "
            f"got {list(a.shape)} and {list(b.shape)}"
        )
    result: Tensor = call(_SddmmDot, a, b, csr)
    return result


def dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """:func:`sddmm_dot` without autograd, for the backward passes of other operators."""
    result: Tensor = implementation("sddmm", a).sddmm_dot(csr, a, b)
    return result


class _SddmmDot(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(a, b)
        return dot(csr, a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Imported here because spmm's own backward pass needs this module.
        from dtrain.kernels.spmm import weighted_sum

        a, b = ctx.saved_tensors
        grad_a = weighted_sum(ctx.csr, b, grad) if ctx.needs_input_grad[0] else None
        grad_b = None
        if ctx.needs_input_grad[1]:
            transposed, perm = ctx.csr.transpose()
            grad_b = weighted_sum(transposed, a, grad[perm])
        return grad_a, grad_b, None
