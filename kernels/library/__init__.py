"""The operators through ``torch.library``, for ``torch.compile`` and ``torch.export``.

Each function here is that of the same name in :mod:`dtrain.kernels`, with the same results and
gradients, called as ``torch.ops.dtrain.<name>``. Sizes may be dynamic. Torch knows the operators
once :func:`operators` was called, not by an import.
"""

from __future__ import annotations

import functools
from typing import Any, overload

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr, SparseRows
from dtrain.kernels.library import attention, chosen, entries, layers, products
from dtrain.kernels.library.registry import Pattern as Pattern
from dtrain.kernels.maxk import MaxkRows
from dtrain.kernels.rng import signed as signed
from dtrain.kernels.rows import Reduction


@functools.cache
def operators() -> Any:
    """Register the operators, once; returns ``torch.ops.dtrain``.

    Those over a graph begin with the tensors of its :class:`Pattern`: ``spmm(*Pattern.of(csr), x,
    weight)``. Keys are int64 of the bits that :func:`~dtrain.kernels.rng.signed` gives.
    """
    for group in (products, entries, attention, layers, chosen):
        for operator in group.OPERATORS:
            operator.register()
    return torch.ops.dtrain


def _operators() -> Any:
    """:func:`operators` but while Dynamo traces, which cannot see through a registration."""
    return torch.ops.dtrain if torch.compiler.is_dynamo_compiling() else operators()


def spmm(csr: Csr, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """:func:`dtrain.kernels.spmm.spmm`."""
    summed: Tensor = _operators().spmm(*Pattern.of(csr), x, weight)
    return summed


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """:func:`dtrain.kernels.spmm.spmm_mean`."""
    mean: Tensor = _operators().spmm_mean(*Pattern.of(csr), x)
    return mean


def spmm_max(csr: Csr, x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`dtrain.kernels.spmm.spmm_max`, the entries always in int32.

    Raises:
        ValueError: shapes that do not fit, or more entries than int32 can number.
    """
    values, argument = _operators().spmm_max(*Pattern.of(csr), x)
    return values, argument


def spmm_min(csr: Csr, x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`dtrain.kernels.spmm.spmm_min`; all else as :func:`spmm_max`."""
    values, argument = _operators().spmm_min(*Pattern.of(csr), x)
    return values, argument


def sddmm_dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """:func:`dtrain.kernels.sddmm.sddmm_dot`."""
    dots: Tensor = _operators().sddmm_dot(*Pattern.of(csr), a, b)
    return dots


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """:func:`dtrain.kernels.sddmm.sddmm_add`."""
    added: Tensor = _operators().sddmm_add(*Pattern.of(csr), a, b)
    return added


def edge_softmax(csr: Csr, scores: Tensor) -> Tensor:
    """:func:`dtrain.kernels.edge_softmax.edge_softmax`."""
    softmax: Tensor = _operators().edge_softmax(csr.indptr, csr.indices, scores)
    return softmax


def gat(
    csr: Csr,
    x: Tensor,
    src_score: Tensor,
    dst_score: Tensor,
    *,
    slope: float = 0.2,
    p: float = 0.0,
    key: int = 0,
    training: bool = True,
) -> Tensor:
    """:func:`dtrain.kernels.gat.gat`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs = [t.to(wide) for t in (x, src_score, dst_score)]
    with_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    numbers = (slope, p if training else 0.0, signed(key))
    out: Tensor = _operators().gat(*Pattern.of(csr), *inputs, *numbers, with_grad)[0]
    return out.to(x.dtype)


@overload
def dropout(x: Tensor, p: float, key: int, training: bool = True) -> Tensor: ...
@overload
def dropout(x: SparseRows, p: float, key: int, training: bool = True) -> SparseRows: ...
def dropout(
    x: Tensor | SparseRows, p: float, key: int, training: bool = True
) -> Tensor | SparseRows:
    """:func:`dtrain.kernels.dropout.dropout`."""
    if not training or p == 0.0:
        return x
    if isinstance(x, SparseRows):
        return SparseRows(x.csr, dropout(x.values, p, key))
    dropped: Tensor = _operators().dropout(x, p, signed(key))
    return dropped


def own_mean(csr: Csr, x: Tensor, p: float = 0.0, key: int = 0, training: bool = True) -> Tensor:
    """:func:`dtrain.kernels.own_mean.own_mean`."""
    both: Tensor = _operators().own_mean(*Pattern.of(csr), x, p if training else 0.0, signed(key))
    return both


def bias_relu(h: Tensor, bias: Tensor) -> Tensor:
    """:func:`dtrain.kernels.bias_relu.bias_relu_`, which leaves ``h`` as it is."""
    activated: Tensor = _operators().bias_relu(h, bias)
    return activated


def maxk(x: Tensor, k: int) -> MaxkRows:
    """:func:`dtrain.kernels.maxk.maxk`."""
    values, columns = _operators().maxk(x, k)
    return MaxkRows(values, columns, x.shape[1])


def spmm_maxk(csr: Csr, rows: MaxkRows, weight: Tensor | None = None) -> Tensor:
    """:func:`dtrain.kernels.maxk.spmm_maxk`."""
    out: Tensor = _operators().spmm_maxk(
        *Pattern.of(csr), rows.values, rows.columns, weight, rows.width
    )
    return out


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """:func:`dtrain.kernels.rows.gather_rows`."""
    taken: Tensor = _operators().gather_rows(x, rows)
    return taken


def scatter_rows(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """:func:`dtrain.kernels.rows.scatter_rows`."""
    summed: Tensor = _operators().scatter_rows(values, rows, num_rows)
    return summed


def segment_reduce(values: Tensor, indptr: Tensor, reduce: Reduction = "sum") -> Tensor:
    """:func:`dtrain.kernels.rows.segment_reduce`, composed of an operator over a pattern.

    In that pattern row ``i`` has the columns of its segment, so that both it and its transpose
    keep the order of ``values``.
    """
    count = values.shape[0]
    segments = _operators().segment_of_row(indptr, count)
    ends = torch.arange(count + 1, device=values.device)
    pattern = Pattern(indptr, ends[:-1], ends, segments, ends[:-1])
    if reduce == "sum":
        reduced: Tensor = _operators().spmm(*pattern, values, None)
    elif reduce == "mean":
        reduced = _operators().spmm_mean(*pattern, values)
    elif reduce in ("max", "min"):
        extreme = _operators().spmm_max if reduce == "max" else _operators().spmm_min
        reduced = extreme(*pattern, values)[0]
    else:
        raise ValueError(f"segment_reduce: expected sum, mean, max or min, got {reduce!r}")
    return reduced
