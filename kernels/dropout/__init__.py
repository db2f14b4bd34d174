"""Dropout whose mask is a pure function of a key, so nothing is stored for the backward pass."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels.autograd import call
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.dispatch import implementation


@overload
def dropout(x: Tensor, p: float, key: int, training: bool = True) -> Tensor: ...
@overload
def dropout(x: SparseRows, p: float, key: int, training: bool = True) -> SparseRows: ...
@overload
def dropout(
    x: Tensor | SparseRows, p: float, key: int, training: bool = True
) -> Tensor | SparseRows: ...
def dropout(
    x: Tensor | SparseRows, p: float, key: int, training: bool = True
) -> Tensor | SparseRows:
    """Zero each element with probability ``p`` and scale the others by ``1 / (1 - p)``.

    ``x``: float tensor of any shape, or :class:`SparseRows` whose ``values`` [nnz] are treated so
    (zeros stay zeros, hence the same distribution). Element ``i`` in row-major order is kept iff
    ``mix64(key, i) >= p * 2**64``: the mask depends on ``key`` (in [0, 2**64)) and the position
    alone. Returns ``x`` itself when not ``training`` or ``p`` is 0.
    (Srivastava et al., "Dropout", JMLR 2014.)

    Raises:
        ValueError: ``p`` outside [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: expected a probability in [0, 1), got {p}")
    if not training or p == 0.0:
        return x
    if isinstance(x, SparseRows):
        return SparseRows(x.csr, call(_Dropout, x.values, p, key))
    dropped: Tensor = call(_Dropout, x, p, key)
    return dropped


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int) -> Tensor:
        ctx.p, ctx.key = p, key
        return _apply(x, p, key)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(grad, ctx.p, ctx.key), None, None


def _apply(x: Tensor, p: float, key: int) -> Tensor:
    dropped: Tensor = implementation("dropout", x).dropout(x, p, key)
    return dropped
