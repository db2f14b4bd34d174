"""The sparse-dense product as an operator of ``torch.library``, for ``torch.compile`` and export.

A :class:`~dtrain.kernels.csr.Csr` is no tensor, so the operators take the tensors of a pattern and
of its transpose. They are registered when first asked for, not at import.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import sddmm
from dtrain.kernels.csr import Csr
from dtrain.kernels.spmm import weighted_sum


def spmm(csr: Csr, x: Tensor, weight: Tensor) -> Tensor:
    """:func:`dtrain.kernels.spmm.spmm` through ``torch.ops.dtrain.spmm``.

    ``x``: float [num_cols, F]; ``weight``: float [nnz]; returns [num_rows, F]. Gradients go to
    both. May be traced with dynamic sizes; call :func:`operators` before tracing.
    """
    transposed, perm = csr.transpose()
    result: Tensor = operators().spmm(
        csr.indptr, csr.indices, transposed.indptr, transposed.indices, perm, x, weight
    )
    return result


@functools.cache
def operators() -> Any:
    """Register the operators, once; returns ``torch.ops.dtrain``.

    ``spmm(indptr, indices, t_indptr, t_indices, perm, x, weight)``: all int64 of a pattern
    [num_rows, num_cols], its transpose and the order of its entries there.
    ``sddmm(indptr, indices, a, b)``: see :func:`dtrain.kernels.sddmm.sddmm_dot`.
    """
    torch.library.custom_op("dtrain::spmm", _spmm, mutates_args=(), schema=_SPMM)
    torch.library.register_fake("dtrain::spmm", _spmm_shape)
    torch.library.register_autograd("dtrain::spmm", _spmm_gradients, setup_context=_keep)
    torch.library.custom_op("dtrain::sddmm", _sddmm, mutates_args=(), schema=_SDDMM)
    torch.library.register_fake("dtrain::sddmm", _sddmm_shape)
    return torch.ops.dtrain


_SPMM = (
    "(Tensor indptr, Tensor indices, Tensor t_indptr, Tensor t_indices, Tensor perm, Tensor x, "
    "Tensor weight) -> Tensor"
)
_SDDMM = "(Tensor indptr, Tensor indices, Tensor a, Tensor b) -> Tensor"


def _spmm(indptr: Tensor, indices: Tensor, *rest: Tensor) -> Tensor:
    *_, x, weight = rest
    return weighted_sum(Csr(indptr, indices, x.shape[0]), x, weight)


def _spmm_shape(indptr: Tensor, *rest: Tensor) -> Tensor:
    *_, x, _weight = rest
    return x.new_empty(indptr.shape[0] - 1, x.shape[1])


def _sddmm(indptr: Tensor, indices: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return sddmm.dot(Csr(indptr, indices, b.shape[0]), a.contiguous(), b)


def _sddmm_shape(indptr: Tensor, indices: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(indices.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _spmm_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indptr, indices, t_indptr, t_indices, perm, x, weight = ctx.saved_tensors
    to_x = to_weight = None
    if ctx.needs_input_grad[5]:
        # The inverse of a permutation, without sorting it.
        back = torch.empty_like(perm).scatter_(
            0, perm, torch.arange(perm.shape[0], device=perm.device)
        )
        to_x = torch.ops.dtrain.spmm(t_indptr, t_indices, indptr, indices, back, grad, weight[perm])
    if ctx.needs_input_grad[6]:
        to_weight = torch.ops.dtrain.sddmm(indptr, indices, grad, x)
    return None, None, None, None, None, to_x, to_weight
