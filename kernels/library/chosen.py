"""MaxK and rows by number as operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtrain.kernels.dispatch import implementation
from dtrain.kernels.library.registry import Gradients, Operator, Pattern
from dtrain.kernels.maxk import MaxkRows, maxk, spmm_maxk
from dtrain.kernels.maxk.reference import column_type
from dtrain.kernels.rows import gather_rows, scatter_rows


def _maxk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows = maxk(x, k)
    return rows.values, rows.columns


def _maxk_shapes(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = x.new_empty(x.shape[0], k)
    return values, values.new_empty(values.shape, dtype=column_type(x.shape[1]))


def _maxk_gradients(kept: Any, grad: Tensor, _: Tensor) -> Gradients:
    return {"x": grad.new_zeros(kept.shapes["x"]).scatter(1, kept.columns.long(), grad)}


def _spmm_maxk(
    pattern: Pattern, values: Tensor, columns: Tensor, weight: Tensor | None, width: int
) -> Tensor:
    return spmm_maxk(pattern.csr(), MaxkRows(values, columns, width), weight)


def _spmm_maxk_shape(
    pattern: Pattern, values: Tensor, columns: Tensor, weight: Tensor | None, width: int
) -> Tensor:
    return values.new_empty(pattern.num_rows, width)


def _spmm_maxk_gradients(kept: Any, grad: Tensor) -> Gradients:
    pattern: Pattern = kept.pattern
    found = {}
    if "values" in kept.asked:
        ordered = None if kept.weight is None else kept.weight[pattern.perm]
        found["values"] = torch.ops.dtrain.maxk_gather(*pattern, grad, kept.columns, ordered)
    if "weight" in kept.asked:
        dense = MaxkRows(kept.values, kept.columns, kept.width).to_dense()
        dots = torch.ops.dtrain.sddmm_dot(*pattern, grad, dense)
        found["weight"] = dots.to(kept.weight.dtype)
    return found


def _gather(pattern: Pattern, grad: Tensor, columns: Tensor, ordered: Tensor | None) -> Tensor:
    transposed = pattern.csr().transpose()[0]
    backend = implementation("maxk", grad)
    result: Tensor = backend.gather_sum(transposed, grad, columns, ordered)
    return result


def _gather_shape(
    pattern: Pattern, grad: Tensor, columns: Tensor, ordered: Tensor | None
) -> Tensor:
    return grad.new_empty(columns.shape)


def _gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    return gather_rows(x, rows)


def _gather_rows_shape(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0], x.shape[1])


def _gather_rows_gradients(kept: Any, grad: Tensor) -> Gradients:
    return {"x": torch.ops.dtrain.scatter_rows(grad, kept.rows, kept.shapes["x"][0])}


def _scatter_rows_shape(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return values.new_empty(num_rows, values.shape[1])


def _scatter_rows_gradients(kept: Any, grad: Tensor) -> Gradients:
    return {"values": torch.ops.dtrain.gather_rows(grad, kept.rows)}


def _segment_of_row(indptr: Tensor, count: int) -> Tensor:
    if len(indptr) == 0 or int(indptr[0]) != 0 or int(indptr[-1]) != count:
        raise ValueError(f"segment_reduce: expected segments of {count} rows in all")
    lengths = indptr[1:] - indptr[:-1]
    numbers = torch.arange(len(lengths), device=indptr.device)
    return torch.repeat_interleave(numbers, lengths, output_size=count)


def _segment_of_row_shape(indptr: Tensor, count: int) -> Tensor:
    return indptr.new_empty(count)


OPERATORS = (
    Operator(
        "maxk",
        "Tensor x, SymInt k",
        "(Tensor values, Tensor columns)",
        _maxk,
        _maxk_shapes,
        _maxk_gradients,
        saved=("columns",),
        constant=("columns",),
        pattern=False,
    ),
    Operator(
        "spmm_maxk",
        "Tensor values, Tensor columns, Tensor? weight, SymInt width",
        "Tensor",
        _spmm_maxk,
        _spmm_maxk_shape,
        _spmm_maxk_gradients,
        saved=("values", "columns", "weight"),
    ),
    Operator(
        "maxk_gather",
        "Tensor grad, Tensor columns, Tensor? ordered",
        "Tensor",
        _gather,
        _gather_shape,
    ),
    Operator(
        "gather_rows",
        "Tensor x, Tensor rows",
        "Tensor",
        _gather_rows,
        _gather_rows_shape,
        _gather_rows_gradients,
        saved=("rows",),
        pattern=False,
    ),
    Operator(
        "scatter_rows",
        "Tensor values, Tensor rows, SymInt num_rows",
        "Tensor",
        scatter_rows,
        _scatter_rows_shape,
        _scatter_rows_gradients,
        saved=("rows",),
        pattern=False,
    ),
    Operator(
        "segment_of_row",
        "Tensor indptr, SymInt count",
        "Tensor",
        _segment_of_row,
        _segment_of_row_shape,
        pattern=False,
    ),
)
