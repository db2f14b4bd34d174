"""The end of a plain hidden layer, ``relu(h + bias)``, as one pass over its rows.

The CPU has loops of its own for float32 and float64; on other devices and for other types it is
composed of torch's operations, whose autograd it then has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dtrain.kernels import dispatch
from dtrain.kernels.autograd import call


def bias_relu_(h: Tensor, bias: Tensor) -> Tensor:
    """``relu(h + bias)``, which may be written over ``h``.

    ``h``: float [N, F], a result of which no operator keeps the values for its own backward, as
    none of a matrix product does; ``bias``: float [F]; returns [N, F] of ``h``'s dtype. The
    gradient of ``bias`` is summed over fixed runs of rows, whatever the number of threads.

    Raises:
        ValueError: shapes that do not fit.
    """
    if h.dim() != 2 or bias.shape != h.shape[1:]:
        raise ValueError(
            f"bias_relu_: expected h [N, F] and bias [F], got {list(h.shape)} and "
            f"{list(bias.shape)}"
        )
    own = dispatch.kind_of(h.device.type) == "cpu" and h.dtype in (torch.float32, torch.float64)
    if not (own and h.dtype == bias.dtype and h.is_contiguous()):
        return torch.relu(h + bias)
    activated: Tensor = call(_BiasRelu, h, bias)
    return activated


class _BiasRelu(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor) -> Tensor:
        _loops(h).bias_relu_(h, bias)
        ctx.mark_dirty(h)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (activated,) = ctx.saved_tensors
        gradients: tuple[Tensor, Tensor] = _loops(grad).bias_relu_backward(activated, grad)
        return gradients


def _loops(x: Tensor) -> Any:
    return dispatch.implementation("bias_relu", x)
