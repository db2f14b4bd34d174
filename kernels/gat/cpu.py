"""Graph attention on the CPU: scores, softmax, dropout and sum in one pass over the rows.

Nothing is kept for an entry between the passes. With ``l'`` the derivative of the leaky rectifier,
``a`` the softmax, ``c`` the dropout factor and ``g`` the gradient of the output ``o``, the gradient
of an entry's score is ``l' a (c g.x - g.o)``. Its sum over a row is ``g.Q - (g.o) P`` with
``Q = sum l' a c x`` and ``P = sum l' a``, which the forward pass makes beside ``o``; its sum over a
column is ``x.Y - sum l' a (g.o)`` with ``Y = sum l' a c g``. No entry needs a dot product.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import array
from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout.reference import keep_threshold
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.gat.tiles import (
    CHUNK,
    HEADS,
    add_weighted,
    column_coefficients,
    row_coefficients,
    row_maximum,
)
from dtrain.kernels.results import empty
from dtrain.kernels.threads import over_rows


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

    Arguments as :func:`dtrain.kernels.gat.reference.forward`, float32 or float64 on the CPU.
    """
    heads, width = x.shape[1], x.shape[2]
    dtype = array(x).dtype
    out = empty((csr.num_rows, heads, width), dtype)
    maxima, inverse, slopes = (empty((csr.num_rows, heads), dtype) for _ in range(3))
    sloped = empty(out.shape, dtype) if with_grad else None
    arguments: list[Any] = [csr.indptr.numpy(), csr.indices.numpy()]
    arguments += [array(t).reshape(-1) for t in (x, src_score, dst_score)]
    arguments += [heads, width, *_numbers(attention, dtype), out.reshape(-1)]
    arguments.append(None if sloped is None else sloped.reshape(-1))
    arguments += [t.reshape(-1) for t in (maxima, inverse, slopes)]

    def loop(first: int, end: int) -> None:
        _rows(first, end, *arguments)

    over_rows(arguments[0], heads * width, loop)
    result = torch.from_numpy(out)
    if sloped is None:
        return result, ()
    rest = (torch.from_numpy(t) for t in (sloped, maxima, inverse, slopes))
    return result, (result, *rest)


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
    x, src_score, dst_score = inputs
    heads, width = x.shape[1], x.shape[2]
    dtype = array(x).dtype
    to_dst = empty((csr.num_rows, heads), dtype)
    # What a column's entries look up of their rows, side by side: scores, maxima, inverse, g.o.
    far = empty((csr.num_rows, 4, heads), dtype)
    grads = array(grad).reshape(-1)
    of_rows: list[Any] = [grads, *(array(t).reshape(-1) for t in (dst_score, *kept))]
    of_rows += [heads, width, to_dst.reshape(-1), far.reshape(-1)]

    def rows(first: int, end: int) -> None:
        _row_dots(first, end, *of_rows)

    over_rows(csr.indptr.numpy(), heads, rows)
    transposed, perm = csr.transpose()
    to_x, to_src = empty(tuple(x.shape), dtype), empty(tuple(src_score.shape), dtype)
    of_columns: list[Any] = [t.numpy() for t in (transposed.indptr, transposed.indices, perm)]
    of_columns += [grads, *(array(t).reshape(-1) for t in (x, src_score)), far.reshape(-1)]
    of_columns += [heads, width, *_numbers(attention, dtype)]
    of_columns += [to_x.reshape(-1), to_src.reshape(-1)]

    def columns(first: int, end: int) -> None:
        _columns(first, end, *of_columns)

    over_rows(of_columns[0], heads * width, columns)
    return torch.from_numpy(to_x), torch.from_numpy(to_src), torch.from_numpy(to_dst)


@numba.njit(cache=True, nogil=True)
def _rows(
    first: Any, end: Any, indptr: Any, indices: Any, x: Any, src_score: Any, dst_score: Any,
    heads: Any, width: Any, slope: Any, key: Any, threshold: Any, scale: Any,
    out: Any, out_sloped: Any, maxima: Any, inverse: Any, slopes: Any,
) -> None:  # fmt: skip
    plain = np.empty(CHUNK * heads, x.dtype)
    sloped = np.empty(CHUNK * heads, x.dtype)
    totals = np.empty(2 * heads, x.dtype)
    size = heads * width
    for row in range(first, end):
        start, stop = indptr[row], indptr[row + 1]
        if start == stop:
            _clear(out, row * size, size)
            if out_sloped is not None:
                _clear(out_sloped, row * size, size)
            for array_ in (maxima, inverse, slopes):
                _clear(array_, row * heads, heads)
            continue
        for head in range(0, heads, HEADS):
            row_maximum(src_score, indices, dst_score, maxima, start, stop, row, heads, head, slope)
        totals[:] = 0
        for begin in range(start, stop, CHUNK):
            until = min(begin + CHUNK, stop)
            for head in range(0, heads, HEADS):
                row_coefficients(
                    x, src_score, indices, dst_score, maxima, plain, sloped, totals,
                    begin, until, row, heads, head, size, slope, key, threshold,
                )  # fmt: skip
            _add_weighted(
                x, indices, plain, sloped, out, out_sloped, begin, until, row * size, row * size,
                heads, width, begin == start,
            )  # fmt: skip
        for head in range(heads):
            at = row * heads + head
            inverse[at] = 1 / totals[head]
            slopes[at] = totals[heads + head] * inverse[at]
            _scale(out, at * width, width, scale * inverse[at])
            if out_sloped is not None:
                _scale(out_sloped, at * width, width, scale * inverse[at])


@numba.njit(cache=True, nogil=True)
def _row_dots(
    first: Any, end: Any, grad: Any, dst_score: Any, out: Any, out_sloped: Any, maxima: Any,
    inverse: Any, slopes: Any, heads: Any, width: Any, to_dst: Any, far: Any,
) -> None:  # fmt: skip
    for row in range(first, end):
        for head in range(heads):
            at = row * heads + head
            own, sloped = grad.dtype.type(0), grad.dtype.type(0)
            for k in range(at * width, (at + 1) * width):
                own += grad[k] * out[k]
                sloped += grad[k] * out_sloped[k]
            to_dst[at] = sloped - own * slopes[at]
            to = 4 * row * heads + head
            far[to] = dst_score[at]
            far[to + heads] = maxima[at]
            far[to + 2 * heads] = inverse[at]
            far[to + 3 * heads] = own


@numba.njit(cache=True, nogil=True)
def _columns(
    first: Any, end: Any, indptr: Any, indices: Any, entries: Any, grad: Any, x: Any,
    src_score: Any, far: Any, heads: Any, width: Any, slope: Any, key: Any, threshold: Any,
    scale: Any, to_x: Any, to_src: Any,
) -> None:  # fmt: skip
    plain = np.empty(CHUNK * heads, x.dtype)
    sloped = np.empty(CHUNK * heads, x.dtype)
    totals = np.empty(heads, x.dtype)
    size = heads * width
    weighed = np.empty(size, x.dtype)
    for column in range(first, end):
        start, stop = indptr[column], indptr[column + 1]
        totals[:] = 0
        if start == stop:
            _clear(to_x, column * size, size)
            _clear(to_src, column * heads, heads)
            continue
        for begin in range(start, stop, CHUNK):
            until = min(begin + CHUNK, stop)
            for head in range(0, heads, HEADS):
                column_coefficients(
                    grad, far, indices, entries, src_score, plain, sloped, totals,
                    begin, until, column, heads, head, size, slope, key, threshold, scale,
                )  # fmt: skip
            _add_weighted(
                grad, indices, plain, sloped, to_x, weighed, begin, until, column * size, 0,
                heads, width, begin == start,
            )  # fmt: skip
        for head in range(heads):
            dot = x.dtype.type(0)
            for d in range(width):
                dot += x[column * size + head * width + d] * weighed[head * width + d]
            to_src[column * heads + head] = dot - totals[head]


@numba.njit(cache=True, nogil=True)
def _add_weighted(
    x: Any, indices: Any, plain: Any, sloped: Any, out: Any, out_sloped: Any, start: Any,
    stop: Any, at: Any, at_sloped: Any, heads: Any, width: Any, fresh: Any,
) -> None:  # fmt: skip
    # Narrow heads would leave the upper half of a long vector empty.
    if width <= 8:
        add_weighted(
            x, indices, plain, sloped, out, out_sloped, start, stop, at, at_sloped,
            heads, width, fresh, 8,
        )  # fmt: skip
    else:
        add_weighted(
            x, indices, plain, sloped, out, out_sloped, start, stop, at, at_sloped,
            heads, width, fresh, 16,
        )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _clear(values: Any, begin: Any, count: Any) -> None:
    for i in range(begin, begin + count):
        values[i] = 0


@numba.njit(cache=True, nogil=True)
def _scale(values: Any, begin: Any, count: Any, factor: Any) -> None:
    for i in range(begin, begin + count):
        values[i] *= factor


def _numbers(attention: Attention, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Slope, key, threshold and scale in the types that keep the loops in one precision."""
    key = np.uint64(attention.key) if attention.p else None
    return (
        dtype.type(attention.slope),
        key,
        np.uint64(keep_threshold(attention.p)),
        dtype.type(1.0 / (1.0 - attention.p)),
    )
