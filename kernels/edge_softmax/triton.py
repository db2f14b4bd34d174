"""Edge softmax on a GPU: statistics of every row, then one pass over the entries.

Long rows give statistics of their pieces (:mod:`dtrain.kernels.pieces`), joined in order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.device import (
    blocks,
    bounds_of,
    computed_in,
    launch,
    power_of_two,
    target_of,
    tile_of,
    wide_type,
    work_of,
)
from dtrain.kernels.spmm.triton import sum_partials

_ENTRIES = 1024


def forward(csr: Csr, scores: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.edge_softmax.reference.forward`, for tensors on a GPU."""
    scores, heads = scores.detach().contiguous(), scores.shape[1]
    maxima = scores.new_empty(csr.num_rows, heads, dtype=wide_type(scores))
    sums = maxima.new_empty(maxima.shape)
    work, count, pieces = work_of(csr)
    slots = 0 if pieces is None else pieces.slots
    partial = maxima.new_empty(2, slots, heads)
    rows, columns = tile_of(heads)
    constants = {"COMPUTED": computed_in(scores), "COLUMNS": columns}
    launch(
        _statistics,
        (blocks(count, rows), blocks(heads, columns)),
        maxima, sums, partial[0], partial[1], scores, *work, count, csr.num_rows, heads,
        SPLIT=pieces is not None, ROWS=rows, **constants,
    )  # fmt: skip
    if pieces is not None:
        launch(
            _joined_statistics,
            (len(pieces.long_rows), blocks(heads, columns)),
            maxima, sums, partial[0], partial[1], pieces.long_rows, pieces.first_slot, heads,
            **constants,
        )  # fmt: skip
    out = scores.new_empty(scores.shape)
    _over_entries(_normalized, csr, out, scores, maxima, sums)
    return out


def backward(csr: Csr, softmax: Tensor, grad: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.edge_softmax.reference.backward`, for tensors on a GPU."""
    softmax, grad, heads = softmax.detach().contiguous(), grad.contiguous(), grad.shape[1]
    dots = grad.new_empty(csr.num_rows, heads, dtype=wide_type(grad))
    work, count, pieces = work_of(csr)
    partial = dots.new_empty(0 if pieces is None else pieces.slots, heads)
    rows, columns = tile_of(heads)
    launch(
        _row_dots,
        (blocks(count, rows), blocks(heads, columns)),
        dots, partial, softmax, grad, *work, count, csr.num_rows, heads,
        SPLIT=pieces is not None, COMPUTED=computed_in(grad), ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    if pieces is not None:
        sum_partials(pieces, partial, dots, None)
    out = grad.new_empty(grad.shape)
    _over_entries(_gradients, csr, out, softmax, grad, dots)
    return out


def _over_entries(kernel: Any, csr: Csr, out: Tensor, *operands: Tensor) -> None:
    """Run ``kernel`` over all elements of ``out`` [nnz, H]."""
    heads = out.shape[1]
    launch(
        kernel,
        (blocks(out.numel(), _ENTRIES),),
        out, *operands, csr.entry_rows(), out.numel(), heads,
        COMPUTED=computed_in(out), BLOCK=min(_ENTRIES, power_of_two(out.numel())),
    )  # fmt: skip


@triton.jit
def _statistics(
    maxima, sums, partial_maxima, partial_sums, scores, start, stop, target, count, num_rows,
    heads: tl.constexpr, SPLIT: tl.constexpr, COMPUTED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (head < heads)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    longest = tl.max(end - first, axis=0)
    least = float("-inf")
    best = tl.full([ROWS, COLUMNS], least, COMPUTED)
    for step in tl.range(0, longest, loop_unroll_factor=4):
        entry = first + step
        mask = (entry < end)[:, None] & inside
        place = entry[:, None] * heads + head[None, :]
        value = tl.load(scores + place, mask=mask, other=least).to(COMPUTED)
        best = tl.maximum(best, value)
    # A piece of nothing but -inf must not spoil the other pieces of its row.
    shift = tl.where(best == least, 0.0, best)
    total = tl.zeros([ROWS, COLUMNS], COMPUTED)
    for step in tl.range(0, longest, loop_unroll_factor=4):
        entry = first + step
        mask = (entry < end)[:, None] & inside
        place = entry[:, None] * heads + head[None, :]
        value = tl.load(scores + place, mask=mask, other=least).to(COMPUTED)
        total += tl.where(mask, tl.exp(value - shift), 0.0)
    goal = target_of(target, piece, count, SPLIT)
    whole = ((piece < count) & (goal < num_rows))[:, None] & inside
    place = goal[:, None] * heads + head[None, :]
    tl.store(maxima + place, best, mask=whole)
    tl.store(sums + place, total, mask=whole)
    if SPLIT:
        in_parts = ((piece < count) & (goal >= num_rows))[:, None] & inside
        place = (goal - num_rows)[:, None] * heads + head[None, :]
        tl.store(partial_maxima + place, best, mask=in_parts)
        tl.store(partial_sums + place, total, mask=in_parts)


@triton.jit
def _joined_statistics(
    maxima, sums, partial_maxima, partial_sums, long_rows, first_slot, heads: tl.constexpr,
    COMPUTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = head < heads
    first, end = tl.load(first_slot + number), tl.load(first_slot + number + 1)
    best = tl.full([COLUMNS], float("-inf"), COMPUTED)
    for slot in range(first, end):
        best = tl.maximum(best, tl.load(partial_maxima + slot * heads + head, mask=inside, other=0))
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.zeros([COLUMNS], COMPUTED)
    for slot in range(first, end):
        place = slot * heads + head
        share = tl.exp(tl.load(partial_maxima + place, mask=inside, other=0) - shift)
        total += share * tl.load(partial_sums + place, mask=inside, other=0)
    place = tl.load(long_rows + number) * heads + head
    tl.store(maxima + place, best, mask=inside)
    tl.store(sums + place, total, mask=inside)


@triton.jit
def _normalized(
    out, scores, maxima, sums, rows, count, heads: tl.constexpr, COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < count
    row = tl.load(rows + place // heads, mask=live, other=0).to(tl.int64)
    of_row = row * heads + place % heads
    value = tl.load(scores + place, mask=live, other=0).to(COMPUTED)
    shifted = value - tl.load(maxima + of_row, mask=live, other=0)
    result = tl.exp(shifted) / tl.load(sums + of_row, mask=live, other=1)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=live)


@triton.jit
def _row_dots(
    dots, partial, softmax, grad, start, stop, target, count, num_rows, heads: tl.constexpr,
    SPLIT: tl.constexpr, COMPUTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (head < heads)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    total = tl.zeros([ROWS, COLUMNS], COMPUTED)
    for step in tl.range(0, tl.max(end - first, axis=0), loop_unroll_factor=4):
        entry = first + step
        mask = (entry < end)[:, None] & inside
        place = entry[:, None] * heads + head[None, :]
        weight = tl.load(softmax + place, mask=mask, other=0).to(COMPUTED)
        total = tl.fma(weight, tl.load(grad + place, mask=mask, other=0).to(COMPUTED), total)
    goal = target_of(target, piece, count, SPLIT)
    whole = ((piece < count) & (goal < num_rows))[:, None] & inside
    tl.store(dots + goal[:, None] * heads + head[None, :], total, mask=whole)
    if SPLIT:
        in_parts = ((piece < count) & (goal >= num_rows))[:, None] & inside
        place = (goal - num_rows)[:, None] * heads + head[None, :]
        tl.store(partial + place, total, mask=in_parts)


@triton.jit
def _gradients(
    out, softmax, grad, dots, rows, count, heads: tl.constexpr, COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < count
    row = tl.load(rows + place // heads, mask=live, other=0).to(tl.int64)
    rest = tl.load(dots + row * heads + place % heads, mask=live, other=0)
    weight = tl.load(softmax + place, mask=live, other=0).to(COMPUTED)
    result = weight * (tl.load(grad + place, mask=live, other=0).to(COMPUTED) - rest)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=live)
