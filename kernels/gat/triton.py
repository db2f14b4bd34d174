"""Graph attention on a GPU: scores, softmax, dropout and sum in one pass over the rows.

The formulas are those of :mod:`dtrain.kernels.gat.cpu`: nothing is kept for an entry between the
passes, and no entry needs a dot product. A program computes a tile of rows, heads and columns. Long
rows are cut into pieces (:mod:`dtrain.kernels.pieces`), each with its own largest logit, which are
joined in order.
"""

from __future__ import annotations

from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.device import (
    blocks,
    computed_in,
    launch,
    owners,
    power_of_two,
    tile_columns,
    tile_rows,
    work_of,
)
from dtrain.kernels.dropout.reference import keep_threshold
from dtrain.kernels.gat import device_code
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.spmm.triton import sum_partials

_HEADS = 8  # of a tile, at most
_LANES = 64  # partial sums of a dot product


def forward(
    csr: Csr,
    x: Tensor,
    src_score: Tensor,
    dst_score: Tensor,
    attention: Attention,
    *,
    with_grad: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [num_rows, H, D] and, ``with_grad``, what :func:`backward` needs besides.

    Arguments as :func:`dtrain.kernels.gat.reference.forward`, float32 or float64 on a GPU.
    """
    x, src_score, dst_score = (t.detach().contiguous() for t in (x, src_score, dst_score))
    _, heads, width = x.shape
    work, count, pieces = work_of(csr)
    slots = 0 if pieces is None else pieces.slots
    out = x.new_empty(csr.num_rows, heads, width)
    sloped = x.new_empty(csr.num_rows if with_grad else 0, heads, width)
    # Of every row and head the largest logit, the inverse sum of exponents (of a piece the sum),
    # and the sum weighted by the rectifier's derivative.
    of_rows = x.new_empty(3, csr.num_rows, heads)
    partial, partial_sloped = (x.new_empty(slots, heads, width) for _ in range(2))
    of_pieces = x.new_empty(3, slots, heads)
    rows, tile_heads, tile_width = _tile(heads, width)
    grid_width = blocks(heads, tile_heads) * blocks(width, tile_width)
    constants = {
        "WITH_GRAD": with_grad,
        "SCALE": 1.0 / (1.0 - attention.p),
        "COMPUTED": computed_in(x),
        "HEADS": tile_heads,
        "WIDTH": tile_width,
    }
    launch(
        device_code.rows,
        (blocks(count, rows), grid_width),
        out, sloped, *of_rows, partial, partial_sloped, *of_pieces, x, src_score, dst_score,
        csr.indices, *work, owners(csr), count, csr.num_rows, heads, width, attention.key,
        SLOPE=attention.slope, DROP=attention.p > 0, THRESHOLD=keep_threshold(attention.p),
        SPLIT=pieces is not None, ROWS=rows, **constants,
    )  # fmt: skip
    if pieces is not None:
        launch(
            device_code.join_rows,
            (len(pieces.long_rows), grid_width),
            out, sloped, *of_rows, partial, partial_sloped, *of_pieces, pieces.long_rows,
            pieces.first_slot, heads, width, **constants,
        )  # fmt: skip
    return out, (out, sloped, of_rows) if with_grad else ()


def backward(
    csr: Csr,
    inputs: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, ...],
    grad: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to ``x``, ``src_score`` and ``dst_score``.

    ``inputs`` are those, ``kept`` what :func:`forward` gave; ``grad``: [num_rows, H, D].
    """
    x, src_score, dst_score = (t.detach().contiguous() for t in inputs)
    out, sloped, of_rows = kept
    grad = grad.contiguous()
    _, heads, width = x.shape
    lanes = min(power_of_two(width), _LANES)
    pairs = {"PAIRS": tile_rows(lanes), "LANES": lanes, "COMPUTED": computed_in(x)}
    to_dst = dst_score.new_empty(dst_score.shape)
    # What a column's entries look up of their rows, side by side: scores, maxima, inverse, g.o.
    far = x.new_empty(csr.num_rows, 4, heads)
    launch(
        device_code.row_dots,
        (blocks(csr.num_rows * heads, pairs["PAIRS"]),),
        to_dst, far, grad, out, sloped, *of_rows, dst_score, csr.num_rows * heads, heads, width,
        **pairs,
    )  # fmt: skip
    transposed, perm = csr.transpose()
    work, count, pieces = work_of(transposed)
    slots = 0 if pieces is None else pieces.slots
    to_x, weighed = x.new_empty(x.shape), x.new_empty(x.shape)
    totals = src_score.new_empty(src_score.shape)
    partial, partial_weighed = (x.new_empty(slots, heads, width) for _ in range(2))
    partial_totals = x.new_empty(slots, heads)
    rows, tile_heads, tile_width = _tile(heads, width)
    launch(
        device_code.columns,
        (blocks(count, rows), blocks(heads, tile_heads) * blocks(width, tile_width)),
        to_x, weighed, totals, partial, partial_weighed, partial_totals, grad, far, src_score,
        transposed.indices, perm, *work, owners(transposed), count, csr.num_cols, heads, width,
        attention.key,
        SLOPE=attention.slope, DROP=attention.p > 0, THRESHOLD=keep_threshold(attention.p),
        SCALE=1.0 / (1.0 - attention.p), SPLIT=pieces is not None, COMPUTED=computed_in(x),
        ROWS=rows, HEADS=tile_heads, WIDTH=tile_width,
    )  # fmt: skip
    if pieces is not None:
        sum_partials(pieces, partial.flatten(1), to_x.view(-1, heads * width), None)
        sum_partials(pieces, partial_weighed.flatten(1), weighed.view(-1, heads * width), None)
        sum_partials(pieces, partial_totals, totals, None)
    to_src = src_score.new_empty(src_score.shape)
    launch(
        device_code.column_dots,
        (blocks(csr.num_cols * heads, pairs["PAIRS"]),),
        to_src, x, weighed, totals, csr.num_cols * heads, width, **pairs,
    )  # fmt: skip
    return to_x, to_src, to_dst


def _tile(heads: int, width: int) -> tuple[int, int, int]:
    """Rows, heads and columns of a program's tile, powers of two."""
    columns = tile_columns(width)
    of_heads = min(power_of_two(heads), _HEADS, tile_rows(columns))
    return tile_rows(columns * of_heads), of_heads, columns
