"""What the Triton kernels share: launching, tiles, and code that runs on the device.

Kernels walk a row's entries one after the other, so the order of additions is that of the pattern.
Tiles, warps and grids decide which program computes a row and never in which order it is summed.
Widths and numbers of heads are compiled in: their divisors decide how much a load may take.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.pieces import Pieces

TILE = 512
"""Elements that a program holds: four warps of 32 threads with 16 bytes of float32 each."""

WIDEST = 256
"""Columns of a tile; wider rows are computed by several programs."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_M1 = tl.constexpr(0xBF58476D1CE4E5B9)
_M2 = tl.constexpr(0x94D049BB133111EB)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run ``kernel`` on the device of its first argument, unless there is nothing to do."""
    if 0 in grid:
        return
    device = args[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        # Products and sums are fused where the kernels say so and nowhere else.
        kernel[grid](*args, **constants, enable_fp_fusion=False)


def tile_of(width: int) -> tuple[int, int]:
    """Rows and columns of a program's tile, powers of two, for rows of ``width`` elements."""
    columns = tile_columns(width)
    return tile_rows(columns), columns


def tile_columns(width: int) -> int:
    """Columns of a tile over rows of ``width`` elements, a power of two."""
    return min(power_of_two(width), WIDEST)


def tile_rows(columns: int) -> int:
    """Rows of a tile of ``columns`` columns, both powers of two."""
    return max(1, TILE // columns)


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``, at least 1."""
    return 1 << max(0, count - 1).bit_length()


def blocks(count: int, size: int) -> int:
    """Blocks of ``size`` that cover ``count``."""
    return -(-count // size)


def work_of(csr: Csr) -> tuple[tuple[Tensor, Tensor, Tensor], int, Pieces | None]:
    """What a kernel walks over: starts, ends and targets of pieces, their number, the pieces.

    Without long rows a piece is a row, and the target is not looked at.
    """
    pieces = csr.pieces()
    if pieces is None:
        return (csr.indptr, csr.indptr[1:], csr.indptr), csr.num_rows, None
    return (pieces.start, pieces.stop, pieces.target), len(pieces), pieces


def owners(csr: Csr) -> Tensor:
    """The row of every piece; without long rows any tensor, for it is not looked at."""
    pieces = csr.pieces()
    return csr.indptr if pieces is None else pieces.row


def computed_in(x: Tensor) -> Any:
    """Triton's type that sums over ``x`` are made in: float64 for float64, else float32."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def wide_type(x: Tensor) -> torch.dtype:
    """Torch's name of :func:`computed_in`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@triton.jit
def mix64(key, counter):
    """One uint64 draw for each counter; see :func:`dtrain.kernels.rng.mix64`."""
    z = key.to(tl.uint64) + (counter.to(tl.uint64) + 1) * _GOLDEN
    z = (z ^ (z >> 30)) * _M1
    z = (z ^ (z >> 27)) * _M2
    return z ^ (z >> 31)


@triton.jit
def bounds_of(start, stop, piece, count):
    """First entry and end of each piece; those from ``count`` on have no entries."""
    live = piece < count
    return tl.load(start + piece, mask=live, other=0), tl.load(stop + piece, mask=live, other=0)


@triton.jit
def target_of(target, piece, count, SPLIT: tl.constexpr):
    """Where the result of each piece goes: its row, or beyond the rows a slot."""
    if SPLIT:
        return tl.load(target + piece, mask=piece < count, other=0)
    else:
        return piece


@triton.jit
def owner_of(owner, piece, count, SPLIT: tl.constexpr):
    """The row of each piece; row 0 for those that are none."""
    if SPLIT:
        return tl.load(owner + piece, mask=piece < count, other=0)
    else:
        return tl.where(piece < count, piece, 0)
