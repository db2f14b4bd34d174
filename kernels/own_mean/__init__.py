"""Every destination's own row beside the mean of its sources' rows: the input of a GraphSAGE layer.

One pass instead of dropout, mean and concatenation, and one back. The CPU has loops of its own; on
other devices it is composed of :func:`~dtrain.kernels.dropout.dropout` and
:func:`~dtrain.kernels.spmm.spmm_mean`, whose autograd it then has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels import dispatch
from dtrain.kernels.autograd import call
from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout import dropout
from dtrain.kernels.rows.stored import StoredRows
from dtrain.kernels.spmm import spmm_mean


def own_mean(
    csr: Csr, x: Tensor | StoredRows, p: float = 0.0, key: int = 0, training: bool = True
) -> Tensor:
    """``[y_v | mean of y_u for u in the row of v]`` with ``y = dropout(x, p, key, training)``.

    ``csr``: [num_rows, num_cols], whose rows are the first columns, as in a block; ``x``: float
    [num_cols, F]; returns [num_rows, 2 F] of its dtype. The mean over an empty row is zero. Stored
    rows are read where they lie, on the CPU; the result is that of the gathered ones.

    Raises:
        ValueError: shapes that do not fit the pattern, or ``p`` outside [0, 1).
    """
    if len(x.shape) != 2 or x.shape[0] != csr.num_cols or csr.num_rows > csr.num_cols:
        raise ValueError(
            f"own_mean: expected x [{csr.num_cols}, F] for at most as many rows, got "
            f"{list(x.shape)} for {csr.num_rows}"
        )
    if not 0.0 <= p < 1.0:
        raise ValueError(f"own_mean: expected a probability in [0, 1), got {p}")
    p = p if training else 0.0
    if isinstance(x, StoredRows):
        prepared: Tensor = _loops(csr).own_mean(csr, x, p, key)
        return prepared
    if dispatch.kind_of(x.device.type) != "cpu":
        y = dropout(x, p, key)
        return torch.cat([y[: csr.num_rows], spmm_mean(csr, y)], 1)
    both: Tensor = call(_OwnMean, x, csr, p, key)
    return both


class _OwnMean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, csr: Csr, p: float, key: int) -> Tensor:
        ctx.csr, ctx.p, ctx.key = csr, p, key
        both: Tensor = _loops(csr).own_mean(csr, x, p, key)
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        to_x = _loops(ctx.csr).own_mean_backward(ctx.csr, grad, ctx.p, ctx.key)
        return to_x, None, None, None


def _loops(csr: Csr) -> Any:
    return dispatch.implementation("own_mean", csr.indptr)
