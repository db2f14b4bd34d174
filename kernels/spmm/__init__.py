"""Sparse-dense products: every destination combines the rows of its sources."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels import sddmm
from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation


def spmm(csr: Csr, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Weighted sum of the source rows of every destination, in the order of its entries.

    ``x``: float [num_cols, F]; ``weight``: float [nnz], one for each entry, or None for ones;
    returns [num_rows, F] of ``x``'s dtype, zeros in rows without entries. Gradients go to ``x``
    (the same product over the cached transpose) and to ``weight``.

    Raises:
        ValueError: shapes that do not fit the pattern.
    """
    _check(csr, x)
    if weight is not None and weight.shape != (csr.nnz,):
        raise ValueError(f"spmm: expected weight [{csr.nnz}], got {list(weight.shape)}")
    if not _differentiated(x, weight):
        return weighted_sum(csr, x, weight)
    summed: Tensor = call(_Spmm, x, csr) if weight is None else call(_WeightedSpmm, x, weight, csr)
    return summed


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """Mean of the source rows of every destination; shapes and errors as :func:`spmm`."""
    _check(csr, x)
    mean: Tensor = call(_SpmmMean, x, csr) if _differentiated(x) else _backend(x).spmm_mean(csr, x)
    return mean


def spmm_max(csr: Csr, x: Tensor) -> tuple[Tensor, Tensor]:
    """Elementwise maximum of the source rows of every destination, and where it came from.

    ``x``: float [num_cols, F]; returns values [num_rows, F] (0 in rows without entries) and
    [num_rows, F], the entry of the pattern (the first of equals; -1 without entries), int32 where
    the pattern's entries can be numbered so and else int64.
    The gradient goes to that entry's source alone.

    Raises:
        ValueError: shapes that do not fit the pattern.
    """
    _check(csr, x)
    values, argument = call(_SpmmExtreme, x, csr, True)
    return values, argument


def spmm_min(csr: Csr, x: Tensor) -> tuple[Tensor, Tensor]:
    """Elementwise minimum; all else as :func:`spmm_max`."""
    _check(csr, x)
    values, argument = call(_SpmmExtreme, x, csr, False)
    return values, argument


def spmm_max_values(csr: Csr, x: Tensor) -> Tensor:
    """The values of :func:`spmm_max` alone: where no gradient is asked for, less than half the
    memory is written. ``x``: float [num_cols, F]; returns [num_rows, F].

    Raises:
        ValueError: shapes that do not fit the pattern.
    """
    if _differentiated(x):
        return spmm_max(csr, x)[0]
    _check(csr, x)
    values: Tensor = _backend(x).extreme_values(csr, x, largest=True)
    return values


def weighted_sum(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """:func:`spmm` without autograd, for the backward passes of operators."""
    summed: Tensor = _backend(x).spmm(csr, x, weight)
    return summed


class _Spmm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        return weighted_sum(csr, x, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return weighted_sum(ctx.csr.transpose()[0], grad, None), None


class _WeightedSpmm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return weighted_sum(csr, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            transposed, _ = ctx.csr.transpose()
            grad_x = weighted_sum(transposed, grad, ctx.csr.by_column(weight))
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = sddmm.dot(ctx.csr, grad, x).to(weight.dtype)
        return grad_x, grad_weight, None


class _SpmmMean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, csr: Csr) -> Tensor:
        ctx.csr = csr
        mean: Tensor = _backend(x).spmm_mean(csr, x)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shares = ctx.csr.shares(torch.promote_types(grad.dtype, torch.float32))
        return weighted_sum(ctx.csr.transpose()[0], grad, shares), None


class _SpmmExtreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, csr: Csr, largest: bool) -> tuple[Tensor, Tensor]:
        ctx.csr = csr
        values, argument = _backend(x).spmm_extreme(csr, x, largest=largest)
        ctx.save_for_backward(argument)
        ctx.mark_non_differentiable(argument)
        return values, argument

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (argument,) = ctx.saved_tensors
        return _backend(grad).spmm_extreme_backward(ctx.csr, grad, argument), None, None


def _differentiated(*inputs: Tensor | None) -> bool:
    """Whether autograd has to know of a result: asking it anyway costs as much as a small sum."""
    for x in inputs:
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled()
    return False


def _backend(x: Tensor) -> Any:
    return implementation("spmm", x)


def _check(csr: Csr, x: Tensor) -> None:
    shape = x.shape
    if len(shape) != 2 or shape[0] != csr.num_cols:
        raise ValueError(f"spmm: expected x [{csr.num_cols}, F], got {list(shape)}")
