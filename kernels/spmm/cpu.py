"""Sparse-dense products on the CPU, by loops compiled to vector code.

Each row is computed by one thread in the order of its entries, so results depend neither on the
number of threads nor on the rows around it. bfloat16 is read as such and computed in float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import COMPILED, array, flat_bits, flat_values, wide
from dtrain.kernels.csr import Csr
from dtrain.kernels.results import empty, result
from dtrain.kernels.simd import copy_elements
from dtrain.kernels.spmm.tiles import chosen_rows, extreme_rows, sum_rows
from dtrain.kernels.team import next_turn, on_team
from dtrain.kernels.threads import even_bounds, over_rows, over_turns, turns

_NARROW = 16
"""Columns of a row that is one tile: there is no other to go over."""
_TOGETHER = 64
"""Entries of the rows that a tile goes over before the next: their rows of ``x`` stay at hand."""
_LINE = 64  # bytes
_TILE = 64
"""Columns of a tile of a copy of ``x``."""
_TILE_BYTES = 4 << 20
"""Most bytes of such a tile, twice what a core's cache may hold."""
_READS = 32
"""Entries for each row of ``x`` from which such a copy pays."""
_BEYOND_CACHES = 16 << 20
"""Bytes of results from which they are written past the caches, as to write into a line that is
not there, a processor reads it first. That pays even where the next operator reads them: a road
network, F=64, and a sum over the results: 3.7 and 2.9 ms."""


def spmm(csr: Csr, x: Tensor, weight: Tensor | None) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm`, for tensors on the CPU."""
    return _summed(csr, x, weight, mean=False)


def spmm_mean(csr: Csr, x: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_mean`, for tensors on the CPU."""
    return _summed(csr, x, None, mean=True)


def spmm_extreme(csr: Csr, x: Tensor, *, largest: bool) -> tuple[Tensor, Tensor]:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme`, for tensors on the CPU."""
    argument = empty((csr.num_rows, x.shape[1]), np.int32 if csr.nnz < 2**31 else np.int64)
    return _best(csr, x, argument, largest=largest), torch.from_numpy(argument)


def extreme_values(csr: Csr, x: Tensor, *, largest: bool) -> Tensor:
    """The first result of :func:`spmm_extreme`, for the time of that alone."""
    return _best(csr, x, None, largest=largest)


def spmm_extreme_backward(csr: Csr, grad: Tensor, argument: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.spmm.reference.spmm_extreme_backward`, for tensors on the CPU."""
    transposed, perm = csr.transpose()
    source, width = wide(grad).numpy(), grad.shape[1]
    out = empty((csr.num_cols, width), source.dtype)
    indptr, indices = transposed.for_loops()
    fixed = (indptr, indices, perm.numpy(), array(argument).reshape(-1), source.reshape(-1))

    def loop(first: int, end: int) -> None:
        _chosen(first, end, *fixed, out.reshape(-1), width)

    over_rows(indptr, 2 * width, loop)
    return torch.from_numpy(out).to(grad.dtype)


def _summed(csr: Csr, x: Tensor, weight: Tensor | None, *, mean: bool) -> Tensor:
    # The steps are few: of a product of a millisecond, cold ones took a tenth.
    source, width, dtype = flat_bits(x), x.shape[1], x.dtype
    indptr, indices = csr.for_loops()
    computed = dtype if dtype in COMPILED else torch.float32
    out, found = result(x, csr.num_rows, width, computed)
    numbers = None if weight is None else flat_values(weight, computed)
    source, tile = _in_tiles(source, csr, width)
    past_caches = found.nbytes >= _BEYOND_CACHES and width * found.itemsize % _LINE == 0
    arguments = (indptr, indices, numbers, source, found, width, mean, tile, past_caches)
    bounds = csr.bounds(turns((csr.nnz + csr.num_rows) * width))
    over_turns(bounds, _sum_on_team, _sum_turns, arguments)
    return out if computed is dtype else out.to(dtype)


def _in_tiles(source: Any, csr: Csr, width: int) -> tuple[Any, int]:
    """``x`` or a copy of it that has one tile of columns after the other, and a tile's columns.

    Where rows are read so often that to copy them costs little, and a tile of all of them nearly
    fits into a core's cache, all entries are gone over once for each tile.
    """
    if width <= _TILE:
        return source, width
    reads = csr.nnz / max(csr.num_cols, 1)
    if reads < _READS or _TILE * source.itemsize * csr.num_cols > _TILE_BYTES:
        return source, width
    copy = empty((source.size,), source.dtype)
    bounds = even_bounds(csr.num_cols, width)
    over_turns(bounds, _copy_on_team, _copy_turns, (source, copy, width, _TILE))
    return copy, _TILE


def _best(csr: Csr, x: Tensor, argument: Any, *, largest: bool) -> Tensor:
    """Extreme values; their entries are written to ``argument`` unless that is None."""
    source, width = flat_bits(x), x.shape[1]
    out = empty((csr.num_rows, width), _result_type(x))
    indptr, indices = csr.for_loops()
    if csr.nnz == 0:
        out[:] = 0
        if argument is not None:
            argument[:] = -1
        return torch.from_numpy(out).to(x.dtype)
    results = (out.reshape(-1), None if argument is None else argument.reshape(-1))

    def loop(first: int, end: int) -> None:
        _extreme(first, end, indptr, indices, source, *results, width, largest)

    over_rows(indptr, width, loop)
    return torch.from_numpy(out).to(x.dtype)


def _result_type(x: Tensor) -> Any:
    return np.float64 if x.dtype == torch.float64 else np.float32


@numba.njit(cache=True, nogil=True)
def _together(indptr: Any, row: Any, end: Any, width: Any) -> Any:
    """Where to stop for rows from ``row`` on with few entries together, one of them at least."""
    if width <= _NARROW:
        return end
    most = indptr[row] + _TOGETHER
    stop = row + 1
    while stop < end and indptr[stop + 1] <= most:
        stop += 1
    return stop


@numba.njit(cache=True, nogil=True)
def _copy_on_team(
    team: Any, threads: Any, bounds: Any, x: Any, copy: Any, width: Any, tile: Any
) -> None:
    turn = np.zeros(1, np.int64)
    if threads > 1:
        on_team(team, threads, _copy_turns, (turn, bounds, x, copy, width, tile))
    else:
        _copy_turns(turn, bounds, x, copy, width, tile)


@numba.njit(cache=True, nogil=True)
def _copy_turns(turn: Any, bounds: Any, x: Any, copy: Any, width: Any, tile: Any) -> None:
    """Ranges of rows; in the copy all rows of a tile of columns precede those of the next."""
    num_rows = x.size // width
    while True:
        i = next_turn(turn)
        if i >= bounds.size - 1:
            break
        first, end = bounds[i], bounds[i + 1]
        for row in range(first, end):
            for column in range(0, width, tile):
                size = min(tile, width - column)
                to = column * num_rows + row * size
                copy_elements(copy, to, x, row * width + column, size)


@numba.njit(cache=True, nogil=True)
def _sum_on_team(
    team: Any,
    threads: Any,
    bounds: Any,
    indptr: Any,
    indices: Any,
    weight: Any,
    x: Any,
    out: Any,
    width: Any,
    mean: Any,
    tile: Any,
    past_caches: Any,
) -> None:
    turn = np.zeros(1, np.int64)
    arguments = (
        turn, bounds, indptr, indices, weight, x, out, width, mean, tile, past_caches
    )  # fmt: skip
    if threads > 1:
        on_team(team, threads, _sum_turns, arguments)
    else:
        _sum_turns(*arguments)


@numba.njit(cache=True, nogil=True)
def _sum_turns(
    turn: Any,
    bounds: Any,
    indptr: Any,
    indices: Any,
    weight: Any,
    x: Any,
    out: Any,
    width: Any,
    mean: Any,
    tile: Any,
    past_caches: Any,
) -> None:
    """Ranges of rows for one tile of columns, then for the next, as long as one is left."""
    ranges = bounds.size - 1
    num_cols = x.size // max(width, 1)
    while True:
        taken = next_turn(turn)
        column = taken // ranges * tile
        if column >= width:
            break
        size = min(tile, width - column)
        part = x[column * num_cols : (column + size) * num_cols]
        i = taken % ranges
        _sum(
            bounds[i], bounds[i + 1], indptr, indices, weight, part, out, size, mean, column,
            width, past_caches
        )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def _sum(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    weight: Any,
    x: Any,
    out: Any,
    size: Any,
    mean: Any,
    begin: Any,
    stride: Any,
    past_caches: Any,
) -> None:
    row = first
    whole = size * out.itemsize % _LINE == 0
    while row < end:
        stop = _together(indptr, row, end, size)
        if whole:
            sum_rows(
                x, indices, indptr, weight, out, row, stop, size, mean, begin, stride, past_caches,
                "whole"
            )  # fmt: skip
        else:
            sum_rows(
                x, indices, indptr, weight, out, row, stop, size, mean, begin, stride, past_caches,
                "some"
            )  # fmt: skip
        row = stop


@numba.njit(cache=True, nogil=True)
def _extreme(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    x: Any,
    out: Any,
    argument: Any,
    width: Any,
    largest: Any,
) -> None:
    row = first
    while row < end:
        stop = _together(indptr, row, end, width)
        if largest:
            extreme_rows(x, indices, indptr, out, argument, row, stop, width, ">")
        else:
            extreme_rows(x, indices, indptr, out, argument, row, stop, width, "<")
        row = stop


@numba.njit(cache=True, nogil=True)
def _chosen(
    first: Any,
    end: Any,
    indptr: Any,
    indices: Any,
    perm: Any,
    argument: Any,
    grad: Any,
    out: Any,
    width: Any,
) -> None:
    row = first
    while row < end:
        stop = _together(indptr, row, end, width)
        chosen_rows(grad, indices, indptr, perm, argument, out, row, stop, width)
        row = stop
