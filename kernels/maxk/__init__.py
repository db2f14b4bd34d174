"""MaxK: keep the k largest elements of every row, and multiply with them alone.

Peng et al., "MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural Networks
Training", ASPLOS 2024. The rows lie in that paper's compressed balanced format: k values and their
columns a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation
from dtrain.kernels.sddmm import dot


@dataclass(frozen=True, eq=False)
class MaxkRows:
    """A matrix [N, width] with exactly k elements stored in every row.

    ``values``: float [N, k]; ``columns``: [N, k], increasing in each row, uint8 where ``width`` is
    at most 256 and else int32.
    """

    values: Tensor
    columns: Tensor
    width: int

    def to_dense(self) -> Tensor:
        """float [N, width]: the same matrix, zero elsewhere; differentiable."""
        zeros = self.values.new_zeros(len(self.values), self.width)
        return zeros.scatter(1, self.columns.long(), self.values)


def maxk(x: Tensor, k: int) -> MaxkRows:
    """The ``k`` largest elements of every row of ``x`` (float [N, F]), the first of equals.

    The gradient goes to the chosen elements alone.

    Raises:
        ValueError: ``k`` outside [1, F].
    """
    if x.dim() != 2 or not 1 <= k <= x.shape[1]:
        raise ValueError(f"maxk: expected x [N, F] and k in [1, F], got {list(x.shape)} and {k}")
    columns = _backend(x).choose(x.detach(), k)
    return MaxkRows(x.gather(1, columns.long()), columns, x.shape[1])


def spmm_maxk(csr: Csr, rows: MaxkRows, weight: Tensor | None = None) -> Tensor:
    """:func:`dtrain.kernels.spmm.spmm` of the rows, reading k elements an entry instead of F.

    ``rows``: [num_cols, F]; ``weight``: float [nnz] or None for ones; returns [num_rows, F] of the
    values' dtype. Gradients go to ``rows.values`` and to ``weight``.

    Raises:
        ValueError: shapes that do not fit the pattern.
    """
    if len(rows.values) != csr.num_cols:
        raise ValueError(f"spmm_maxk: expected {csr.num_cols} rows, got {len(rows.values)}")
    if weight is not None and weight.shape != (csr.nnz,):
        raise ValueError(f"spmm_maxk: expected weight [{csr.nnz}], got {list(weight.shape)}")
    out: Tensor = call(_SpmmMaxk, rows.values, weight, rows.columns, rows.width, csr)
    return out


class _SpmmMaxk(Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, columns: Tensor, width: int, csr: Csr
    ) -> Tensor:
        ctx.csr, ctx.width = csr, width
        ctx.save_for_backward(values, weight, columns)
        out: Tensor = _backend(values).scatter_sum(csr, values, columns, weight, width)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, weight, columns = ctx.saved_tensors
        csr: Csr = ctx.csr
        to_values = to_weight = None
        if ctx.needs_input_grad[0]:
            transposed, _ = csr.transpose()
            ordered = None if weight is None else csr.by_column(weight)
            to_values = _backend(grad).gather_sum(transposed, grad, columns, ordered)
        if weight is not None and ctx.needs_input_grad[1]:
            dense = MaxkRows(values, columns, ctx.width).to_dense()
            to_weight = dot(csr, grad, dense).to(weight.dtype)
        return to_values, to_weight, None, None, None


def _backend(x: Tensor) -> Any:
    return implementation("maxk", x)
