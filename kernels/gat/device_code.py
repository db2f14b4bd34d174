"""Graph attention's code for a GPU; see :mod:`dtrain.kernels.gat.triton`.

Of every row and head are kept the largest logit (``maxima``), the inverse sum of exponents
(``inverses``; of a piece the sum) and the sum weighted by the rectifier's derivative (``slopes``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dtrain.kernels.device import bounds_of, mix64, owner_of, target_of


@triton.jit
def _place_in_tile(heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Heads and columns of this program, and which heads' numbers it is the one to write."""
    parts = tl.cdiv(width, WIDTH)
    part = tl.program_id(1) % parts
    head = tl.program_id(1) // parts * HEADS + tl.arange(0, HEADS)
    return head, part * WIDTH + tl.arange(0, WIDTH), head + part * heads < heads


@triton.jit
def _finite(largest):
    """The largest logit, 0 instead of infinities, whose difference would not be a number."""
    return tl.where(tl.abs(largest) == float("inf"), 0.0, largest)


@triton.jit(do_not_specialize=["key"])
def rows(
    out, sloped, maxima, inverses, slopes, partial, partial_sloped, partial_maxima, partial_sums,
    partial_slopes, x, src_score, dst_score, indices, start, stop, target, owner, count, num_rows,
    heads: tl.constexpr, width: tl.constexpr, key: tl.uint64, SLOPE: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    WITH_GRAD: tl.constexpr, SCALE: tl.constexpr, COMPUTED: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Outputs of whole rows, and the sums of the pieces of others."""
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, column, mine = _place_in_tile(heads, width, HEADS, WIDTH)
    inside = (head < heads)[None, :]
    first, end = bounds_of(start, stop, piece, count)
    row = owner_of(owner, piece, count, SPLIT)
    own = tl.load(dst_score + row[:, None] * heads + head[None, :], mask=inside, other=0)
    longest = tl.max(end - first, axis=0)
    largest = tl.full([ROWS, HEADS], float("-inf"), COMPUTED)
    for step in tl.range(0, longest, loop_unroll_factor=4):
        entry = first + step
        source = tl.load(indices + entry, mask=entry < end, other=0)[:, None]
        mask = (entry < end)[:, None] & inside
        score = own + tl.load(src_score + source * heads + head[None, :], mask=mask, other=0)
        logit = tl.where(score > 0, score, SLOPE * score)
        largest = tl.maximum(largest, tl.where(mask, logit, float("-inf")))
    shift = _finite(largest)
    total, steep_total = tl.zeros([ROWS, HEADS], COMPUTED), tl.zeros([ROWS, HEADS], COMPUTED)
    plain_sum = tl.zeros([ROWS, HEADS, WIDTH], COMPUTED)
    sloped_sum = tl.zeros([ROWS, HEADS, WIDTH], COMPUTED)
    in_tile = (head < heads)[None, :, None] & (column < width)[None, None, :]
    for step in tl.range(0, longest, loop_unroll_factor=2):
        entry = first + step
        source = tl.load(indices + entry, mask=entry < end, other=0)[:, None]
        mask = (entry < end)[:, None] & inside
        score = own + tl.load(src_score + source * heads + head[None, :], mask=mask, other=0)
        logit = tl.where(score > 0, score, SLOPE * score)
        plain = tl.where(mask, tl.exp(logit - shift), 0.0)
        steep = tl.where(score > 0, plain, SLOPE * plain)
        total += plain
        steep_total += steep
        if DROP:
            kept = mix64(key, entry[:, None] * heads + head[None, :]) >= THRESHOLD
            plain, steep = tl.where(kept, plain, 0.0), tl.where(kept, steep, 0.0)
        place = (source * heads + head[None, :])[:, :, None] * width + column[None, None, :]
        value = tl.load(x + place, mask=(entry < end)[:, None, None] & in_tile, other=0)
        plain_sum = tl.fma(plain[:, :, None], value, plain_sum)
        if WITH_GRAD:
            sloped_sum = tl.fma(steep[:, :, None], value, sloped_sum)
    goal = target_of(target, piece, count, SPLIT)
    whole = ((piece < count) & (goal < num_rows))[:, None] & inside
    filled = (end > first)[:, None] & inside
    inverse = tl.where(filled, 1.0 / tl.where(filled, total, 1.0), 0.0)
    at = goal[:, None] * heads + head[None, :]
    place = at[:, :, None] * width + column[None, None, :]
    factor = (SCALE * inverse)[:, :, None]
    tl.store(out + place, plain_sum * factor, mask=whole[:, :, None] & in_tile)
    if WITH_GRAD:
        tl.store(sloped + place, sloped_sum * factor, mask=whole[:, :, None] & in_tile)
        tl.store(maxima + at, shift, mask=whole & mine[None, :])
        tl.store(inverses + at, inverse, mask=whole & mine[None, :])
        tl.store(slopes + at, steep_total * inverse, mask=whole & mine[None, :])
    if SPLIT:
        in_parts = ((piece < count) & (goal >= num_rows))[:, None] & inside
        at = (goal - num_rows)[:, None] * heads + head[None, :]
        place = at[:, :, None] * width + column[None, None, :]
        tl.store(partial + place, plain_sum, mask=in_parts[:, :, None] & in_tile)
        if WITH_GRAD:
            tl.store(partial_sloped + place, sloped_sum, mask=in_parts[:, :, None] & in_tile)
        tl.store(partial_maxima + at, largest, mask=in_parts & mine[None, :])
        tl.store(partial_sums + at, total, mask=in_parts & mine[None, :])
        tl.store(partial_slopes + at, steep_total, mask=in_parts & mine[None, :])


@triton.jit
def join_rows(
    out, sloped, maxima, inverses, slopes, partial, partial_sloped, partial_maxima, partial_sums,
    partial_slopes, long_rows, first_slot, heads: tl.constexpr, width: tl.constexpr,
    WITH_GRAD: tl.constexpr, SCALE: tl.constexpr, COMPUTED: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The output of one long row from its pieces, each brought to the row's largest logit."""
    number = tl.program_id(0)
    head, column, mine = _place_in_tile(heads, width, HEADS, WIDTH)
    inside = head < heads
    in_tile = inside[:, None] & (column < width)[None, :]
    first, end = tl.load(first_slot + number), tl.load(first_slot + number + 1)
    largest = tl.full([HEADS], float("-inf"), COMPUTED)
    for slot in range(first, end):
        at = slot * heads + head
        largest = tl.maximum(largest, tl.load(partial_maxima + at, mask=inside, other=0))
    shift = _finite(largest)
    total, steep_total = tl.zeros([HEADS], COMPUTED), tl.zeros([HEADS], COMPUTED)
    plain_sum, sloped_sum = tl.zeros([HEADS, WIDTH], COMPUTED), tl.zeros([HEADS, WIDTH], COMPUTED)
    for slot in range(first, end):
        at = slot * heads + head
        share = tl.exp(tl.load(partial_maxima + at, mask=inside, other=0) - shift)
        total += share * tl.load(partial_sums + at, mask=inside, other=0)
        steep_total += share * tl.load(partial_slopes + at, mask=inside, other=0)
        place = at[:, None] * width + column[None, :]
        plain_sum += share[:, None] * tl.load(partial + place, mask=in_tile, other=0)
        if WITH_GRAD:
            sloped_sum += share[:, None] * tl.load(partial_sloped + place, mask=in_tile, other=0)
    inverse = 1.0 / tl.where(inside, total, 1.0)
    at = tl.load(long_rows + number) * heads + head
    place = at[:, None] * width + column[None, :]
    factor = (SCALE * inverse)[:, None]
    tl.store(out + place, plain_sum * factor, mask=in_tile)
    if WITH_GRAD:
        tl.store(sloped + place, sloped_sum * factor, mask=in_tile)
        tl.store(maxima + at, shift, mask=mine)
        tl.store(inverses + at, inverse, mask=mine)
        tl.store(slopes + at, steep_total * inverse, mask=mine)


@triton.jit
def row_dots(
    to_dst, far, grad, out, sloped, maxima, inverses, slopes, dst_score, count, heads: tl.constexpr,
    width: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, COMPUTED: tl.constexpr,
):  # fmt: skip
    """Gradients to the rows' scores, and what the columns look up of each row and head."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    live = pair < count
    own, steep = tl.zeros([PAIRS, LANES], COMPUTED), tl.zeros([PAIRS, LANES], COMPUTED)
    for begin in tl.range(0, width, LANES):
        column = (begin + tl.arange(0, LANES))[None, :]
        mask = live[:, None] & (column < width)
        place = pair[:, None] * width + column
        factor = tl.load(grad + place, mask=mask, other=0)
        own = tl.fma(factor, tl.load(out + place, mask=mask, other=0), own)
        steep = tl.fma(factor, tl.load(sloped + place, mask=mask, other=0), steep)
    dot = tl.sum(own, axis=1)
    rest = dot * tl.load(slopes + pair, mask=live, other=0)
    tl.store(to_dst + pair, tl.sum(steep, axis=1) - rest, mask=live)
    at = far + pair // heads * 4 * heads + pair % heads
    tl.store(at, tl.load(dst_score + pair, mask=live, other=0), mask=live)
    tl.store(at + heads, tl.load(maxima + pair, mask=live, other=0), mask=live)
    tl.store(at + 2 * heads, tl.load(inverses + pair, mask=live, other=0), mask=live)
    tl.store(at + 3 * heads, dot, mask=live)


@triton.jit(do_not_specialize=["key"])
def columns(
    to_x, weighed, totals, partial, partial_weighed, partial_totals, grad, far, src_score, indices,
    perm, start, stop, target, owner, count, num_cols, heads: tl.constexpr, width: tl.constexpr,
    key: tl.uint64, SLOPE: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr, SPLIT: tl.constexpr, COMPUTED: tl.constexpr, ROWS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of every column the gradient to ``x``, and the parts of that to its score."""
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, column, mine = _place_in_tile(heads, width, HEADS, WIDTH)
    inside = (head < heads)[None, :]
    in_tile = (head < heads)[None, :, None] & (column < width)[None, None, :]
    first, end = bounds_of(start, stop, piece, count)
    of_column = owner_of(owner, piece, count, SPLIT)[:, None] * heads + head[None, :]
    own = tl.load(src_score + of_column, mask=inside & (piece < count)[:, None], other=0)
    total = tl.zeros([ROWS, HEADS], COMPUTED)
    plain_sum = tl.zeros([ROWS, HEADS, WIDTH], COMPUTED)
    steep_sum = tl.zeros([ROWS, HEADS, WIDTH], COMPUTED)
    for step in tl.range(0, tl.max(end - first, axis=0), loop_unroll_factor=2):
        entry = first + step
        row = tl.load(indices + entry, mask=entry < end, other=0)[:, None]
        mask = (entry < end)[:, None] & inside
        at = far + row * 4 * heads + head[None, :]
        score = own + tl.load(at, mask=mask, other=0)
        logit = tl.where(score > 0, score, SLOPE * score)
        shifted = logit - tl.load(at + heads, mask=mask, other=0)
        plain = tl.exp(shifted) * tl.load(at + 2 * heads, mask=mask, other=0)
        plain = tl.where(mask, plain, 0.0)
        steep = tl.where(score > 0, plain, SLOPE * plain)
        total = tl.fma(steep, tl.load(at + 3 * heads, mask=mask, other=0), total)
        if DROP:
            number = tl.load(perm + entry, mask=entry < end, other=0)[:, None]
            kept = mix64(key, number * heads + head[None, :]) >= THRESHOLD
            plain = tl.where(kept, plain * SCALE, 0.0)
            steep = tl.where(kept, steep * SCALE, 0.0)
        place = (row * heads + head[None, :])[:, :, None] * width + column[None, None, :]
        value = tl.load(grad + place, mask=(entry < end)[:, None, None] & in_tile, other=0)
        plain_sum = tl.fma(plain[:, :, None], value, plain_sum)
        steep_sum = tl.fma(steep[:, :, None], value, steep_sum)
    goal = target_of(target, piece, count, SPLIT)
    whole = ((piece < count) & (goal < num_cols))[:, None] & inside
    at = goal[:, None] * heads + head[None, :]
    place = at[:, :, None] * width + column[None, None, :]
    tl.store(to_x + place, plain_sum, mask=whole[:, :, None] & in_tile)
    tl.store(weighed + place, steep_sum, mask=whole[:, :, None] & in_tile)
    tl.store(totals + at, total, mask=whole & mine[None, :])
    if SPLIT:
        in_parts = ((piece < count) & (goal >= num_cols))[:, None] & inside
        at = (goal - num_cols)[:, None] * heads + head[None, :]
        place = at[:, :, None] * width + column[None, None, :]
        tl.store(partial + place, plain_sum, mask=in_parts[:, :, None] & in_tile)
        tl.store(partial_weighed + place, steep_sum, mask=in_parts[:, :, None] & in_tile)
        tl.store(partial_totals + at, total, mask=in_parts & mine[None, :])


@triton.jit
def column_dots(
    to_src, x, weighed, totals, count, width: tl.constexpr, PAIRS: tl.constexpr,
    LANES: tl.constexpr, COMPUTED: tl.constexpr,
):  # fmt: skip
    """Gradients to the columns' scores, ``x . weighed - totals`` for every column and head."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    live = pair < count
    dot = tl.zeros([PAIRS, LANES], COMPUTED)
    for begin in tl.range(0, width, LANES):
        column = (begin + tl.arange(0, LANES))[None, :]
        mask = live[:, None] & (column < width)
        place = pair[:, None] * width + column
        left = tl.load(x + place, mask=mask, other=0)
        dot = tl.fma(left, tl.load(weighed + place, mask=mask, other=0), dot)
    result = tl.sum(dot, axis=1) - tl.load(totals + pair, mask=live, other=0)
    tl.store(to_src + pair, result, mask=live)
