"""Sparse-dense products as operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation
from dtrain.kernels.library.registry import Gradients, Operator, Pattern
from dtrain.kernels.spmm import spmm, spmm_max, spmm_mean, spmm_min, weighted_sum


def _sum(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    return weighted_sum(Csr(indptr, indices, x.shape[0]), x, weight)


def _sum_shape(indptr: Tensor, indices: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    return x.new_empty(indptr.shape[0] - 1, x.shape[1])


def _spmm(pattern: Pattern, x: Tensor, weight: Tensor | None) -> Tensor:
    return spmm(pattern.csr(), x, weight)


def _rows_shape(pattern: Pattern, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(pattern.num_rows, x.shape[1])


def _spmm_gradients(kept: Any, grad: Tensor) -> Gradients:
    pattern: Pattern = kept.pattern
    found = {}
    if "x" in kept.asked:
        ordered = None if kept.weight is None else kept.weight[pattern.perm]
        found["x"] = torch.ops.dtrain.weighted_sum(
            pattern.t_indptr, pattern.t_indices, grad, ordered
        )
    if "weight" in kept.asked:
        found["weight"] = torch.ops.dtrain.sddmm_dot(*pattern, grad, kept.x).to(kept.weight.dtype)
    return found


def _mean(pattern: Pattern, x: Tensor) -> Tensor:
    return spmm_mean(pattern.csr(), x)


def _mean_gradients(kept: Any, grad: Tensor) -> Gradients:
    return {"x": torch.ops.dtrain.spmm_mean_backward(*kept.pattern, grad)}


def _mean_backward(pattern: Pattern, grad: Tensor) -> Tensor:
    csr = pattern.csr()
    shares = csr.shares(torch.promote_types(grad.dtype, torch.float32))
    return weighted_sum(csr.transpose()[0], grad, shares)


def _extreme(
    find: Callable[[Csr, Tensor], tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    def compute(pattern: Pattern, x: Tensor) -> tuple[Tensor, Tensor]:
        if pattern.nnz >= 2**31:
            raise ValueError(f"expected entries that int32 can number, got {pattern.nnz}")
        values, argument = find(pattern.csr(), x)
        return values, argument.to(torch.int32)

    return compute


def _extreme_shapes(pattern: Pattern, x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.new_empty(pattern.num_rows, x.shape[1])
    return values, values.new_empty(values.shape, dtype=torch.int32)


def _extreme_gradients(kept: Any, grad: Tensor, _: Tensor) -> Gradients:
    return {"x": torch.ops.dtrain.spmm_extreme_backward(*kept.pattern, grad, kept.argument)}


def _extreme_backward(pattern: Pattern, grad: Tensor, argument: Tensor) -> Tensor:
    backend = implementation("spmm", grad)
    result: Tensor = backend.spmm_extreme_backward(pattern.csr(), grad, argument)
    return result


def _columns_shape(pattern: Pattern, grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(pattern.num_cols, grad.shape[1])


OPERATORS = (
    Operator(
        "weighted_sum",
        "Tensor indptr, Tensor indices, Tensor x, Tensor? weight",
        "Tensor",
        _sum,
        _sum_shape,
        pattern=False,
    ),
    Operator(
        "spmm",
        "Tensor x, Tensor? weight",
        "Tensor",
        _spmm,
        _rows_shape,
        _spmm_gradients,
        saved=("x", "weight"),
    ),
    Operator("spmm_mean", "Tensor x", "Tensor", _mean, _rows_shape, _mean_gradients),
    Operator("spmm_mean_backward", "Tensor grad", "Tensor", _mean_backward, _columns_shape),
    *(
        Operator(
            name,
            "Tensor x",
            "(Tensor values, Tensor argument)",
            _extreme(find),
            _extreme_shapes,
            _extreme_gradients,
            saved=("argument",),
            constant=("argument",),
        )
        for name, find in (("spmm_max", spmm_max), ("spmm_min", spmm_min))
    ),
    Operator(
        "spmm_extreme_backward",
        "Tensor grad, Tensor argument",
        "Tensor",
        _extreme_backward,
        _columns_shape,
    ),
)
