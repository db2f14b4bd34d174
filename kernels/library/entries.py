"""Operators that give something for every entry of a pattern."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.dispatch import implementation
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.library.registry import Gradients, Operator, Pattern
from dtrain.kernels.sddmm import sddmm_add, sddmm_dot


def _dot(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    return sddmm_dot(pattern.csr(), a, b)


def _dot_shape(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(pattern.nnz)


def _dot_gradients(kept: Any, grad: Tensor) -> Gradients:
    pattern: Pattern = kept.pattern
    total = torch.ops.dtrain.weighted_sum
    found = {}
    if "a" in kept.asked:
        found["a"] = total(pattern.indptr, pattern.indices, kept.b, grad)
    if "b" in kept.asked:
        found["b"] = total(pattern.t_indptr, pattern.t_indices, kept.a, grad[pattern.perm])
    return found


def _add(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    return sddmm_add(pattern.csr(), a, b)


def _add_shape(pattern: Pattern, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(pattern.nnz, a.shape[1])


def _add_gradients(kept: Any, grad: Tensor) -> Gradients:
    pattern: Pattern = kept.pattern
    total = torch.ops.dtrain.weighted_sum
    found = {}
    if "a" in kept.asked:
        entries = torch.arange(pattern.nnz, device=grad.device)
        found["a"] = total(pattern.indptr, entries, grad, None)
    if "b" in kept.asked:
        found["b"] = total(pattern.t_indptr, pattern.perm, grad, None)
    return found


def _softmax(indptr: Tensor, indices: Tensor, scores: Tensor) -> Tensor:
    return edge_softmax(_rows_alone(indptr, indices), scores)


def _softmax_gradients(kept: Any, grad: Tensor) -> Gradients:
    backward = torch.ops.dtrain.edge_softmax_backward
    return {"scores": backward(kept.indptr, kept.indices, kept.softmax, grad)}


def _softmax_backward(indptr: Tensor, indices: Tensor, softmax: Tensor, grad: Tensor) -> Tensor:
    backend = implementation("edge_softmax", grad)
    result: Tensor = backend.backward(_rows_alone(indptr, indices), softmax, grad)
    return result


def _rows_alone(indptr: Tensor, indices: Tensor) -> Csr:
    """A pattern that nobody asks about its columns."""
    return Csr(indptr, indices, 0)


def _like_last(*given: Tensor) -> Tensor:
    return given[-1].new_empty(given[-1].shape)


OPERATORS = (
    *(
        Operator(
            name,
            "Tensor a, Tensor b",
            "Tensor",
            compute,
            shape,
            gradients,
            saved=saved,
        )
        for name, compute, shape, gradients, saved in (
            ("sddmm_dot", _dot, _dot_shape, _dot_gradients, ("a", "b")),
            ("sddmm_add", _add, _add_shape, _add_gradients, ()),
        )
    ),
    Operator(
        "edge_softmax",
        "Tensor indptr, Tensor indices, Tensor scores",
        "(Tensor softmax)",
        _softmax,
        _like_last,
        _softmax_gradients,
        saved=("indptr", "indices", "softmax"),
        pattern=False,
    ),
    Operator(
        "edge_softmax_backward",
        "Tensor indptr, Tensor indices, Tensor softmax, Tensor grad",
        "Tensor",
        _softmax_backward,
        _like_last,
        pattern=False,
    ),
)
