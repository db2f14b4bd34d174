"""Graph attention as an operator.

What a backward pass needs depends on what computes (:mod:`dtrain.kernels.gat`); here it always is
two tensors besides the output: ``sloped``, like the output, and ``statistics`` of rows and heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import dispatch
from dtrain.kernels.dispatch import implementation
from dtrain.kernels.gat import check
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.library.registry import Gradients, Operator, Pattern
from dtrain.kernels.rng import unsigned

_NUMBERS = "float slope, float p, SymInt key"

Three = tuple[Tensor, Tensor, Tensor]


def _gat(
    pattern: Pattern,
    x: Tensor,
    src_score: Tensor,
    dst_score: Tensor,
    slope: float,
    p: float,
    key: int,
    with_grad: bool,
) -> Three:
    csr = pattern.csr()
    check(csr, x, src_score, dst_score, p)
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"gat: expected x of float32 or float64, got {x.dtype}")
    attention = Attention(slope, p, unsigned(key))
    backend = implementation("gat", x)
    out, kept = backend.forward(csr, x, src_score, dst_score, attention, with_grad=with_grad)
    if not with_grad:
        return out, *_nothing_kept(x)
    kind = dispatch.kind_of(x.device.type)
    if kind == "triton":
        _, sloped, statistics = kept
        return out, sloped, statistics
    if kind == "cpu":
        return out, kept[1], torch.stack(kept[2:])
    return out, x.new_empty(0, *x.shape[1:]), torch.stack(kept[1:])


def _nothing_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, *x.shape[1:]), x.new_empty(0, 0, x.shape[1])


def _shapes(pattern: Pattern, x: Tensor, *rest: Any) -> Three:
    _, heads, width = x.shape
    with_grad = rest[-1]
    out = x.new_empty(pattern.num_rows, heads, width)
    if not with_grad:
        return out, *_nothing_kept(x)
    plain = dispatch.kind_of(x.device.type) == "reference"
    sloped = x.new_empty(0 if plain else pattern.num_rows, heads, width)
    return out, sloped, x.new_empty(2 if plain else 3, pattern.num_rows, heads)


def _gradients(kept: Any, grad: Tensor, *_: Tensor) -> Gradients:
    if not kept.with_grad:
        raise RuntimeError("gat: expected with_grad=True where a gradient is asked for")
    inputs = (kept.x, kept.src_score, kept.dst_score)
    of_forward = (kept.out, kept.sloped, kept.statistics)
    found = torch.ops.dtrain.gat_backward(
        *kept.pattern, *inputs, *of_forward, grad, kept.slope, kept.p, kept.key
    )
    return dict(zip(("x", "src_score", "dst_score"), found, strict=True))


def _backward(
    pattern: Pattern,
    x: Tensor,
    src_score: Tensor,
    dst_score: Tensor,
    out: Tensor,
    sloped: Tensor,
    statistics: Tensor,
    grad: Tensor,
    slope: float,
    p: float,
    key: int,
) -> Three:
    kept = {
        "triton": (out, sloped, statistics),
        "cpu": (out, sloped, *statistics),
        "reference": (out, *statistics),
    }[dispatch.kind_of(x.device.type)]
    inputs = (x, src_score, dst_score)
    attention = Attention(slope, p, unsigned(key))
    found: Three = implementation("gat", x).backward(pattern.csr(), inputs, kept, grad, attention)
    return found


def _backward_shapes(pattern: Pattern, *given: Any) -> Three:
    x, src_score, dst_score = (t.new_empty(t.shape) for t in given[:3])
    return x, src_score, dst_score


OPERATORS = (
    Operator(
        "gat",
        f"Tensor x, Tensor src_score, Tensor dst_score, {_NUMBERS}, bool with_grad",
        "(Tensor out, Tensor sloped, Tensor statistics)",
        _gat,
        _shapes,
        _gradients,
        saved=("x", "src_score", "dst_score", "out", "sloped", "statistics"),
        constant=("sloped", "statistics"),
    ),
    Operator(
        "gat_backward",
        "Tensor x, Tensor src_score, Tensor dst_score, Tensor out, Tensor sloped, "
        f"Tensor statistics, Tensor grad, {_NUMBERS}",
        "(Tensor, Tensor, Tensor)",
        _backward,
        _backward_shapes,
    ),
)
