"""MaxK on a GPU, in whole numbers where it chooses and in the order of the entries where it sums.

For the product each stored row also gets a bit for every column and the number of elements before
every word of 32 bits: an output's column then finds its value in a row of k by counting bits.
"""

from __future__ import annotations

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
    owner_of,
    owners,
    power_of_two,
    target_of,
    tile_of,
    tile_rows,
    wide_type,
    work_of,
)
from dtrain.kernels.maxk import reference
from dtrain.kernels.maxk.reference import column_type
from dtrain.kernels.spmm.triton import sum_partials

_WIDEST_CHOICE = 4096  # columns that a program holds; of wider rows torch sorts all


def choose(x: Tensor, k: int) -> Tensor:
    """As :func:`dtrain.kernels.maxk.reference.choose`, for tensors on a GPU."""
    x, width = x.detach().contiguous(), x.shape[1]
    if width > _WIDEST_CHOICE:
        return reference.choose(x, k)
    out = torch.empty(len(x), k, dtype=column_type(width), device=x.device)
    columns = power_of_two(width)
    rows = tile_rows(columns)
    number = tl.int64 if x.dtype == torch.float64 else tl.int32
    launch(
        _choose,
        (blocks(len(x), rows),),
        out, x, len(x), width, k,
        COMPUTED=computed_in(x), NUMBER=number, BITS=number.primitive_bitwidth, ROWS=rows,
        COLUMNS=columns,
    )  # fmt: skip
    return out


def scatter_sum(
    csr: Csr, values: Tensor, columns: Tensor, weight: Tensor | None, width: int
) -> Tensor:
    """As :func:`dtrain.kernels.maxk.reference.scatter_sum`, for tensors on a GPU."""
    values, k = values.detach().contiguous(), values.shape[1]
    words = blocks(width, 32)
    bits, before = (columns.new_empty(len(columns), words, dtype=torch.int32) for _ in range(2))
    packed = tile_rows(power_of_two(k))
    launch(
        _pack,
        (blocks(len(columns), packed),),
        bits, before, columns.contiguous(), len(columns), k, words,
        ROWS=packed, COLUMNS=power_of_two(k),
    )  # fmt: skip
    out = values.new_empty(csr.num_rows, width)
    work, count, pieces = work_of(csr)
    partial = values.new_empty(0 if pieces is None else pieces.slots, width, dtype=wide_type(out))
    numbers = values if weight is None else weight.detach().contiguous()
    rows, tile = tile_of(width)
    launch(
        _scattered_sums,
        (blocks(count, rows), blocks(width, tile)),
        out, partial, values, bits, before, numbers, csr.indices, *work, count, csr.num_rows, width,
        k, words,
        WEIGHTED=weight is not None, SPLIT=pieces is not None, COMPUTED=computed_in(values),
        ROWS=rows, COLUMNS=tile,
    )  # fmt: skip
    if pieces is not None:
        sum_partials(pieces, partial, out, None)
    return out


def gather_sum(transposed: Csr, grad: Tensor, columns: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.maxk.reference.gather_sum`, for tensors on a GPU."""
    grad, k = grad.contiguous(), columns.shape[1]
    out = grad.new_empty(transposed.num_rows, k)
    work, count, pieces = work_of(transposed)
    partial = grad.new_empty(0 if pieces is None else pieces.slots, k, dtype=wide_type(grad))
    numbers = grad if weight is None else weight.detach().contiguous()
    rows, tile = tile_of(k)
    launch(
        _gathered_sums,
        (blocks(count, rows), blocks(k, tile)),
        out, partial, grad, columns.contiguous(), numbers, transposed.indices, *work,
        owners(transposed), count, transposed.num_rows, grad.shape[1], k,
        WEIGHTED=weight is not None, SPLIT=pieces is not None, COMPUTED=computed_in(grad),
        ROWS=rows, COLUMNS=tile,
    )  # fmt: skip
    if pieces is not None:
        sum_partials(pieces, partial, out, None)
    return out


@triton.jit
def _choose(
    out, x, count, width: tl.constexpr, k: tl.constexpr, COMPUTED: tl.constexpr,
    NUMBER: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    live = (row < count)[:, None] & (column < width)
    value = tl.load(x + row[:, None] * width + column, mask=live, other=0).to(COMPUTED)
    # Whole numbers in the order of the values; what is not a number is the largest, as in a sort.
    bits = value.to(NUMBER, bitcast=True)
    lowest = tl.full([1, 1], 1, NUMBER) << (BITS - 1)
    order = tl.where(bits < 0, bits ^ ~lowest, bits)
    order = tl.where(value == 0, 0, tl.where(value != value, ~lowest, order))
    # The largest number that at least k elements reach, from its sign to its lowest bit.
    enough = tl.sum((live & (order >= 0)).to(tl.int32), axis=1)[:, None] >= k
    bound = tl.where(enough, 0, lowest).to(NUMBER)
    for step in tl.range(0, BITS - 1):
        higher = bound | (tl.full([1, 1], 1, NUMBER) << (BITS - 2 - step))
        enough = tl.sum((live & (order >= higher)).to(tl.int32), axis=1)[:, None] >= k
        bound = tl.where(enough, higher, bound)
    above = live & (order > bound)
    equal = live & (order == bound)
    missing = k - tl.sum(above.to(tl.int32), axis=1)[:, None]
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= missing))
    place = row[:, None] * k + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    numbers = tl.broadcast_to(column, [ROWS, COLUMNS]).to(out.dtype.element_ty)
    tl.store(out + place, numbers, mask=chosen)


@triton.jit
def _pack(
    bits, before, columns, count, k: tl.constexpr, words: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, COLUMNS)[None, :]
    live = (row < count)[:, None] & (element < k)
    column = tl.load(columns + row[:, None] * k + element, mask=live, other=0).to(tl.int32)
    bit = tl.full([1, 1], 1, tl.int32) << (column % 32)
    number = tl.zeros([ROWS], tl.int32)
    for word in tl.range(0, words):
        mine = live & (column // 32 == word)
        place = row * words + word
        # The columns of a row are all different, so their sum has each one's bit.
        tl.store(bits + place, tl.sum(tl.where(mine, bit, 0), axis=1), mask=row < count)
        tl.store(before + place, number, mask=row < count)
        number += tl.sum(mine.to(tl.int32), axis=1)


@triton.jit
def _ones(word):
    """How many bits of each uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _scattered_sums(
    out, partial, values, bits, before, weight, indices, start, stop, target, count, num_rows,
    width: tl.constexpr, k: tl.constexpr, words: tl.constexpr, WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr, COMPUTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    bit = (column % 32).to(tl.uint32)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    total = tl.zeros([ROWS, COLUMNS], COMPUTED)
    for step in tl.range(0, tl.max(end - first, axis=0), loop_unroll_factor=4):
        entry = first + step
        here = entry < end
        source = tl.load(indices + entry, mask=here, other=0)[:, None]
        mask = here[:, None] & inside
        place = source * words + (column // 32)[None, :]
        word = tl.load(bits + place, mask=mask, other=0).to(tl.uint32, bitcast=True)
        below = word & ((tl.full([1, 1], 1, tl.uint32) << bit) - 1)
        rank = tl.load(before + place, mask=mask, other=0) + _ones(below)
        stored = mask & (((word >> bit) & 1) != 0)
        value = tl.load(values + source * k + rank, mask=stored, other=0).to(COMPUTED)
        if WEIGHTED:
            factor = tl.load(weight + entry, mask=here, other=0).to(COMPUTED)
            added = tl.fma(value, factor[:, None], total)
        else:
            added = total + value
        # What is not stored adds nothing, even where a weight is infinite.
        total = tl.where(stored, added, total)
    goal = target_of(target, piece, count, SPLIT)
    whole = ((piece < count) & (goal < num_rows))[:, None] & inside
    place = goal[:, None] * width + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=whole)
    if SPLIT:
        in_parts = ((piece < count) & (goal >= num_rows))[:, None] & inside
        place = (goal - num_rows)[:, None] * width + column[None, :]
        tl.store(partial + place, total, mask=in_parts)


@triton.jit
def _gathered_sums(
    out, partial, grad, columns, weight, indices, start, stop, target, owner, count, num_rows,
    width: tl.constexpr, k: tl.constexpr, WEIGHTED: tl.constexpr, SPLIT: tl.constexpr,
    COMPUTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (piece < count)[:, None] & (element < k)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    row = owner_of(owner, piece, count, SPLIT)
    chosen = tl.load(columns + row[:, None] * k + element[None, :], mask=inside, other=0)
    chosen = chosen.to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], COMPUTED)
    for step in tl.range(0, tl.max(end - first, axis=0), loop_unroll_factor=4):
        entry = first + step
        here = entry < end
        source = tl.load(indices + entry, mask=here, other=0)[:, None]
        mask = here[:, None] & inside
        value = tl.load(grad + source * width + chosen, mask=mask, other=0).to(COMPUTED)
        if WEIGHTED:
            factor = tl.load(weight + entry, mask=here, other=0).to(COMPUTED)[:, None]
            total = tl.fma(value, factor, total)
        else:
            total += value
    goal = target_of(target, piece, count, SPLIT)
    whole = (goal < num_rows)[:, None] & inside
    place = goal[:, None] * k + element[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=whole)
    if SPLIT:
        in_parts = (goal >= num_rows)[:, None] & inside
        place = (goal - num_rows)[:, None] * k + element[None, :]
        tl.store(partial + place, total, mask=in_parts)
