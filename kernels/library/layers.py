"""What layers do besides products: dropout, own rows beside means, bias and rectifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import dispatch
from dtrain.kernels.bias_relu import cpu as bias_relu_cpu
from dtrain.kernels.dispatch import implementation
from dtrain.kernels.library.registry import Gradients, Operator, Pattern
from dtrain.kernels.own_mean import cpu as own_mean_cpu
from dtrain.kernels.own_mean import own_mean
from dtrain.kernels.rng import unsigned
from dtrain.kernels.spmm import weighted_sum


def _dropout(x: Tensor, p: float, key: int) -> Tensor:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: expected a probability in [0, 1), got {p}")
    dropped: Tensor = implementation("dropout", x).dropout(x, p, unsigned(key))
    return dropped


def _dropout_shape(x: Tensor, p: float, key: int) -> Tensor:
    return x.new_empty(x.shape)


def _dropout_gradients(kept: Any, grad: Tensor) -> Gradients:
    return {"x": torch.ops.dtrain.dropout(grad, kept.p, kept.key)}


def _own_mean(pattern: Pattern, x: Tensor, p: float, key: int) -> Tensor:
    return own_mean(pattern.csr(), x, p, unsigned(key))


def _own_mean_shape(pattern: Pattern, x: Tensor, p: float, key: int) -> Tensor:
    return x.new_empty(pattern.num_rows, 2 * x.shape[1])


def _own_mean_gradients(kept: Any, grad: Tensor) -> Gradients:
    return {"x": torch.ops.dtrain.own_mean_backward(*kept.pattern, grad, kept.p, kept.key)}


def _own_mean_backward(pattern: Pattern, grad: Tensor, p: float, key: int) -> Tensor:
    csr = pattern.csr()
    if dispatch.kind_of(grad.device.type) == "cpu":
        return own_mean_cpu.own_mean_backward(csr, grad, p, unsigned(key))
    width = grad.shape[1] // 2
    shares = csr.shares(torch.promote_types(grad.dtype, torch.float32))
    found = weighted_sum(csr.transpose()[0], grad[:, width:].contiguous(), shares)
    found[: csr.num_rows] += grad[:, :width]
    return _dropout(found, p, key) if p else found


def _own_mean_backward_shape(pattern: Pattern, grad: Tensor, p: float, key: int) -> Tensor:
    return grad.new_empty(pattern.num_cols, grad.shape[1] // 2)


def _bias_relu(h: Tensor, bias: Tensor) -> Tensor:
    if h.dim() != 2 or bias.shape != h.shape[1:]:
        raise ValueError(
            f"bias_relu: expected h [N, F] and bias [F], got {list(h.shape)} and {list(bias.shape)}"
        )
    if not _has_loops(h, bias):
        return torch.relu(h + bias)
    out = h.detach().clone(memory_format=torch.contiguous_format)
    bias_relu_cpu.bias_relu_(out, bias)
    return out


def _bias_relu_shape(h: Tensor, bias: Tensor) -> Tensor:
    return h.new_empty(h.shape, dtype=torch.result_type(h, bias))


def _bias_relu_gradients(kept: Any, grad: Tensor) -> Gradients:
    to_h, to_bias = torch.ops.dtrain.bias_relu_backward(kept.activated, grad)
    return {"h": to_h, "bias": to_bias}


def _bias_relu_backward(activated: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    if _has_loops(activated, grad):
        return bias_relu_cpu.bias_relu_backward(activated, grad)
    to_h = torch.where(activated <= 0, 0.0, grad)
    return to_h, to_h.sum(0)


def _bias_relu_backward_shapes(activated: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[1])


def _has_loops(h: Tensor, other: Tensor) -> bool:
    """Whether the CPU's loops take these; see :func:`dtrain.kernels.bias_relu.bias_relu_`."""
    loops = dispatch.kind_of(h.device.type) == "cpu" and h.dtype in (torch.float32, torch.float64)
    return loops and h.dtype == other.dtype


_DROPOUT = "float p, SymInt key"

OPERATORS = (
    Operator(
        "dropout",
        f"Tensor x, {_DROPOUT}",
        "Tensor",
        _dropout,
        _dropout_shape,
        _dropout_gradients,
        pattern=False,
    ),
    Operator(
        "own_mean",
        f"Tensor x, {_DROPOUT}",
        "Tensor",
        _own_mean,
        _own_mean_shape,
        _own_mean_gradients,
    ),
    Operator(
        "own_mean_backward",
        f"Tensor grad, {_DROPOUT}",
        "Tensor",
        _own_mean_backward,
        _own_mean_backward_shape,
    ),
    Operator(
        "bias_relu",
        "Tensor h, Tensor bias",
        "(Tensor activated)",
        _bias_relu,
        _bias_relu_shape,
        _bias_relu_gradients,
        saved=("activated",),
        pattern=False,
    ),
    Operator(
        "bias_relu_backward",
        "Tensor activated, Tensor grad",
        "(Tensor, Tensor)",
        _bias_relu_backward,
        _bias_relu_backward_shapes,
        pattern=False,
    ),
)
