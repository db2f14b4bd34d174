"""MaxK in plain torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.spmm.reference import segment_sum, spmm


def column_type(width: int) -> torch.dtype:
    """The narrowest type that numbers the columns."""
    return torch.uint8 if width <= 256 else torch.int32


def choose(x: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` largest elements of every row, increasing, the first of equals."""
    order = torch.sort(x, dim=1, descending=True, stable=True).indices[:, :k]
    return order.sort(dim=1).values.to(column_type(x.shape[1]))


def scatter_sum(
    csr: Csr, values: Tensor, columns: Tensor, weight: Tensor | None, width: int
) -> Tensor:
    """Weighted sum of the rows [num_cols, width] that ``values`` and ``columns`` stand for."""
    dense = values.new_zeros(len(values), width).scatter(1, columns.long(), values)
    return spmm(csr, dense, weight)


def gather_sum(transposed: Csr, grad: Tensor, columns: Tensor, weight: Tensor | None) -> Tensor:
    """Of every column the weighted sum of ``grad``'s rows at that column's own ``columns``.

    ``transposed``: pattern [num_cols, num_rows]; ``weight``: in its entries' order; returns
    [num_cols, k].
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    chosen = columns.long()[transposed.row_of_entry()]
    entries = grad.to(wide)[transposed.indices].gather(1, chosen)
    if weight is not None:
        entries = entries * weight.to(wide)[:, None]
    return segment_sum(transposed, entries).to(grad.dtype)
