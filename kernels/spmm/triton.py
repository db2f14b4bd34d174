"""Sparse-dense products on a GPU: a program sums a tile of rows, entry by entry.

Long rows are summed in pieces (:mod:`dtrain.kernels.pieces`), whose sums a second kernel adds in
order. bfloat16 is read as such and computed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.device import (
    blocks,
    bounds_of,
    computed_in,
    launch,
    target_of,
    tile_of,
    wide_type,
    work_of,
)
from dtrain.kernels.spmm import cusparse


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm`, for tensors on a GPU."""
    if cusparse.is_faster(x):
        return cusparse.spmm(csr, x, weight)
    return _sum(csr, x, weight, mean=False)


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_mean`, for tensors on a GPU."""
    return _sum(csr, x, None, mean=True)


def spmm_extreme(csr: Csr, x: Tensor, *, largest: bool) -> tuple[Tensor, Tensor]:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme`, for tensors on a GPU."""
    x, width = x.detach().contiguous(), x.shape[1]
    out = x.new_empty(csr.num_rows, width)
    argument = torch.empty(
        out.shape, dtype=torch.int32 if csr.nnz < 2**31 else torch.int64, device=x.device
    )
    work, count, pieces = work_of(csr)
    slots = 0 if pieces is None else pieces.slots
    partial, partial_argument = x.new_empty(slots, width), argument.new_empty(slots, width)
    rows, columns = tile_of(width)
    constants = {"LARGEST": largest, "COMPUTED": computed_in(x), "COLUMNS": columns}
    launch(
        _extreme_of_pieces,
        (blocks(count, rows), blocks(width, columns)),
        out, argument, partial, partial_argument, x, csr.indices, *work, count, csr.num_rows, width,
        SPLIT=pieces is not None, ROWS=rows, **constants,
    )  # fmt: skip
    if pieces is not None:
        launch(
            _extreme_of_partials,
            (len(pieces.long_rows), blocks(width, columns)),
            out, argument, partial, partial_argument, pieces.long_rows, pieces.first_slot, width,
            **constants,
        )  # fmt: skip
    return out, argument


def extreme_values(csr: Csr, x: Tensor, *, largest: bool) -> Tensor:
    """The first result of :func:`spmm_extreme`."""
    return spmm_extreme(csr, x, largest=largest)[0]


def spmm_extreme_backward(csr: Csr, grad: Tensor, argument: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme_backward`, for tensors on a GPU.

    It is a sum over the transposed pattern of the gradients whose entry was chosen.
    """
    transposed, perm = csr.transpose()
    return _sum(transposed, grad, None, mean=False, chosen=(argument, perm))


def _sum(
    csr: Csr,
    x: Tensor,
    weight: Tensor | None,
    *,
    mean: bool,
    chosen: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    x, width = x.detach().contiguous(), x.shape[1]
    out = x.new_empty(csr.num_rows, width)
    work, count, pieces = work_of(csr)
    slots = 0 if pieces is None else pieces.slots
    partial = x.new_empty(slots, width, dtype=wide_type(x))
    # What a case does not have is not looked at: any tensor stands for it.
    numbers = x if weight is None else weight.detach().contiguous()
    argument, perm = chosen if chosen is not None else (x, x)
    rows, columns = tile_of(width)
    launch(
        _sums_of_pieces,
        (blocks(count, rows), blocks(width, columns)),
        out, partial, x, numbers, argument, perm, csr.indices, *work, count, csr.num_rows, width,
        WEIGHTED=weight is not None, CHOSEN=chosen is not None, MEAN=mean,
        SPLIT=pieces is not None, COMPUTED=computed_in(x), ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    if pieces is not None:
        sum_partials(pieces, partial, out, csr.indptr if mean else None)
    return out


def sum_partials(csr_pieces: Any, partial: Tensor, out: Tensor, indptr: Tensor | None) -> None:
    """Add the partial sums of every long row in order, into its row of ``out``.

    ``partial``: [slots, F], float32 or float64; ``out``: [num_rows, F]. With ``indptr`` the sum is
    divided by the row's number of entries.
    """
    width = out.shape[1]
    _, columns = tile_of(width)
    launch(
        _sums_of_partials,
        (len(csr_pieces.long_rows), blocks(width, columns)),
        out, partial, csr_pieces.long_rows, csr_pieces.first_slot,
        csr_pieces.first_slot if indptr is None else indptr, width,
        MEAN=indptr is not None, COMPUTED=computed_in(partial), COLUMNS=columns,
    )  # fmt: skip


@triton.jit
def _sums_of_pieces(
    out, partial, x, weight, argument, perm, indices, start, stop, target, count, num_rows,
    width: tl.constexpr, WEIGHTED: tl.constexpr, CHOSEN: tl.constexpr, MEAN: tl.constexpr,
    SPLIT: tl.constexpr, COMPUTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    total = tl.zeros([ROWS, COLUMNS], COMPUTED)
    for step in tl.range(0, tl.max(end - first, axis=0), loop_unroll_factor=4):
        entry = first + step
        here = entry < end
        source = tl.load(indices + entry, mask=here, other=0)
        place = source[:, None] * width + column[None, :]
        mask = here[:, None] & inside
        value = tl.load(x + place, mask=mask, other=0).to(COMPUTED)
        if CHOSEN:
            mine = tl.load(perm + entry, mask=here, other=0)
            best = tl.load(argument + place, mask=mask, other=-1)
            value = tl.where(best.to(tl.int64) == mine[:, None], value, 0.0)
        if WEIGHTED:
            factor = tl.load(weight + entry, mask=here, other=0).to(COMPUTED)
            total = tl.fma(tl.broadcast_to(factor[:, None], [ROWS, COLUMNS]), value, total)
        else:
            total += value
    goal = target_of(target, piece, count, SPLIT)
    whole = (piece < count) & (goal < num_rows)
    result = total
    if MEAN:
        result = total / tl.maximum(end - first, 1).to(COMPUTED)[:, None]
    place = goal[:, None] * width + column[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=whole[:, None] & inside)
    if SPLIT:
        place = (goal - num_rows)[:, None] * width + column[None, :]
        in_parts = (piece < count) & (goal >= num_rows)
        tl.store(partial + place, total, mask=in_parts[:, None] & inside)


@triton.jit
def _sums_of_partials(
    out, partial, long_rows, first_slot, indptr, width: tl.constexpr, MEAN: tl.constexpr,
    COMPUTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    row = tl.load(long_rows + number)
    total = tl.zeros([COLUMNS], COMPUTED)
    for slot in tl.range(
        tl.load(first_slot + number), tl.load(first_slot + number + 1), loop_unroll_factor=4
    ):
        total += tl.load(partial + slot * width + column, mask=inside, other=0)
    if MEAN:
        total = total / (tl.load(indptr + row + 1) - tl.load(indptr + row)).to(COMPUTED)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _extreme_of_pieces(
    out, out_argument, partial, partial_argument, x, indices, start, stop, target, count, num_rows,
    width: tl.constexpr, SPLIT: tl.constexpr, LARGEST: tl.constexpr, COMPUTED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    best = tl.zeros([ROWS, COLUMNS], COMPUTED)
    where = tl.full([ROWS, COLUMNS], -1, tl.int64)
    for step in tl.range(0, tl.max(end - first, axis=0), loop_unroll_factor=4):
        entry = first + step
        here = entry < end
        source = tl.load(indices + entry, mask=here, other=0)
        place = source[:, None] * width + column[None, :]
        value = tl.load(x + place, mask=here[:, None] & inside, other=0).to(COMPUTED)
        better = value > best if LARGEST else value < best
        better = here[:, None] & (better | (where < 0))
        best = tl.where(better, value, best)
        where = tl.where(better, entry[:, None], where)
    goal = target_of(target, piece, count, SPLIT)
    whole = ((piece < count) & (goal < num_rows))[:, None] & inside
    place = goal[:, None] * width + column[None, :]
    tl.store(out + place, best.to(out.dtype.element_ty), mask=whole)
    tl.store(out_argument + place, where.to(out_argument.dtype.element_ty), mask=whole)
    if SPLIT:
        in_parts = ((piece < count) & (goal >= num_rows))[:, None] & inside
        place = (goal - num_rows)[:, None] * width + column[None, :]
        tl.store(partial + place, best.to(partial.dtype.element_ty), mask=in_parts)
        where = where.to(partial_argument.dtype.element_ty)
        tl.store(partial_argument + place, where, mask=in_parts)


@triton.jit
def _extreme_of_partials(
    out, out_argument, partial, partial_argument, long_rows, first_slot, width: tl.constexpr,
    LARGEST: tl.constexpr, COMPUTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    first = tl.load(first_slot + number)
    best = tl.load(partial + first * width + column, mask=inside, other=0).to(COMPUTED)
    where = tl.load(partial_argument + first * width + column, mask=inside, other=0)
    for slot in range(first + 1, tl.load(first_slot + number + 1)):
        value = tl.load(partial + slot * width + column, mask=inside, other=0).to(COMPUTED)
        entry = tl.load(partial_argument + slot * width + column, mask=inside, other=0)
        better = value > best if LARGEST else value < best
        best = tl.where(better, value, best)
        where = tl.where(better, entry, where)
    place = tl.load(long_rows + number) * width + column
    tl.store(out + place, best.to(out.dtype.element_ty), mask=inside)
    tl.store(out_argument + place, where, mask=inside)
