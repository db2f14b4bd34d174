"""Sampled dense-dense operators: what every entry of a pattern has of its two ends' rows."""

from __future__ import annotations

from typing import Any

import torch
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


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """The sum of destination row and source row for every entry of the pattern.

    ``a``: float [num_rows, H]; ``b``: float [num_cols, H], same dtype; returns float [nnz, H]. The
    gradients are sums over a row's and over a column's entries in their order, without atomics.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    shapes = [tuple(t.shape) for t in (a, b)]
    heads = a.shape[1] if a.dim() == 2 else -1
    if shapes != [(csr.num_rows, heads), (csr.num_cols, heads)] or a.dtype != b.dtype:
        raise ValueError(
            f"sddmm_add: expected a [{csr.num_rows}, H] and b [{csr.num_cols}, H] of one dtype, "
            f"got {shapes} of {a.dtype} and {b.dtype}"
        )
    result: Tensor = call(_SddmmAdd, a, b, csr)
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


class _SddmmAdd(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        added: Tensor = implementation("sddmm", a).sddmm_add(csr, a, b)
        return added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # Imported here because spmm's own backward pass needs this module.
        from dtrain.kernels.spmm import weighted_sum

        csr: Csr = ctx.csr
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            entries = torch.arange(csr.nnz, device=grad.device)
            grad_a = weighted_sum(Csr(csr.indptr, entries, csr.nnz), grad, None)
        if ctx.needs_input_grad[1]:
            transposed, perm = csr.transpose()
            grad_b = weighted_sum(Csr(transposed.indptr, perm, csr.nnz), grad, None)
        return grad_a, grad_b, None
