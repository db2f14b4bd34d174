"""Long rows of a pattern in pieces of a fixed length, for devices that compute many rows at once.

One thread block walks a row's entries one after the other, so a hub would keep it for as long as
all other rows together take the rest of the device. Rows of more than :data:`PIECE` entries are
therefore summed in pieces, whose sums are added in order. The length is part of what the result
is: it depends neither on the device nor on the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 256
"""Entries that are added one after the other."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """All pieces of a pattern, the longest first, and where their results go.

    ``start``, ``stop``, ``row``: int64 [pieces], entries and row. ``target``: int64 [pieces], the
    row of a piece that is a whole row, else ``num_rows + slot`` with its slot among the partial
    results. ``long_rows``: int64 [L], the rows in several pieces. ``first_slot``: int64 [L + 1]:
    row ``long_rows[i]`` is made of the slots ``first_slot[i]`` to ``first_slot[i + 1] - 1``, in
    order. ``slots``: their number.
    """

    start: Tensor
    stop: Tensor
    row: Tensor
    target: Tensor
    long_rows: Tensor
    first_slot: Tensor
    slots: int

    def __len__(self) -> int:
        return len(self.start)


def cut_rows(indptr: Tensor, longest: int) -> Pieces | None:
    """Cut every row at multiples of :data:`PIECE` entries from its start; None if none is longer.

    ``indptr``: int64 [num_rows + 1] on any device; ``longest``: entries of its longest row.
    """
    if longest <= PIECE:
        return None
    num_rows = len(indptr) - 1
    counts = indptr[1:] - indptr[:-1]
    pieces = ((counts + PIECE - 1) // PIECE).clamp(min=1)
    ends = pieces.cumsum(0)
    total = int(ends[-1])
    numbers = torch.arange(total, device=indptr.device)
    rows = torch.searchsorted(ends, numbers, right=True)
    start = indptr[rows] + (numbers - (ends - pieces)[rows]) * PIECE
    stop = torch.minimum(start + PIECE, indptr[rows + 1])
    partial = pieces[rows] > 1
    target = torch.where(partial, num_rows + partial.cumsum(0) - 1, rows)
    long_rows = torch.nonzero(pieces > 1)[:, 0]
    first_slot = torch.cat([pieces.new_zeros(1), pieces[long_rows].cumsum(0)])
    order = torch.argsort(start - stop, stable=True)
    slots = total - num_rows + len(long_rows)
    bounds = (start[order], stop[order])
    return Pieces(*bounds, rows[order], target[order], long_rows, first_slot, slots)
