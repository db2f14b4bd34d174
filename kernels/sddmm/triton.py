"""Sampled dense-dense operators on a GPU: a program computes a tile of entries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.device import blocks, computed_in, launch, power_of_two, tile_rows

_LANES = 64
"""Partial sums of a dot product: each adds up every 64th column, then they are added."""

_ELEMENTS = 1024
"""Sums that a program computes."""


def sddmm_dot(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.sddmm.reference.sddmm_dot`, for tensors on a GPU.

    bfloat16 is read as such and computed in float32. The order of additions depends on the width
    of the rows alone.
    """
    a, b, width = a.detach().contiguous(), b.detach().contiguous(), a.shape[1]
    out = a.new_empty(csr.nnz)
    lanes = min(power_of_two(width), _LANES)
    entries = tile_rows(lanes)
    launch(
        _dots,
        (blocks(csr.nnz, entries),),
        out, a, b, csr.entry_rows(), csr.indices, csr.nnz, width,
        COMPUTED=computed_in(a), ENTRIES=entries, LANES=lanes,
    )  # fmt: skip
    return out


def sddmm_add(csr: Csr, a: Tensor, b: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.sddmm.reference.sddmm_add`, for tensors on a GPU."""
    a, b, heads = a.detach().contiguous(), b.detach().contiguous(), a.shape[1]
    out = a.new_empty(csr.nnz, heads)
    launch(
        _sums,
        (blocks(out.numel(), _ELEMENTS),),
        out, a, b, csr.entry_rows(), csr.indices, out.numel(), heads,
        COMPUTED=computed_in(a), BLOCK=min(_ELEMENTS, power_of_two(out.numel())),
    )  # fmt: skip
    return out


@triton.jit
def _dots(
    out, a, b, rows, indices, nnz, width: tl.constexpr, COMPUTED: tl.constexpr,
    ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    live = entry < nnz
    near = tl.load(rows + entry, mask=live, other=0).to(tl.int64)[:, None] * width
    far = tl.load(indices + entry, mask=live, other=0)[:, None] * width
    total = tl.zeros([ENTRIES, LANES], COMPUTED)
    for begin in tl.range(0, width, LANES):
        column = (begin + tl.arange(0, LANES))[None, :]
        mask = live[:, None] & (column < width)
        left = tl.load(a + near + column, mask=mask, other=0).to(COMPUTED)
        right = tl.load(b + far + column, mask=mask, other=0).to(COMPUTED)
        total = tl.fma(left, right, total)
    tl.store(out + entry, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=live)


@triton.jit
def _sums(
    out, a, b, rows, indices, count, heads: tl.constexpr, COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < count
    entry, head = place // heads, place % heads
    near = tl.load(rows + entry, mask=live, other=0).to(tl.int64) * heads + head
    far = tl.load(indices + entry, mask=live, other=0) * heads + head
    left = tl.load(a + near, mask=live, other=0).to(COMPUTED)
    right = tl.load(b + far, mask=live, other=0).to(COMPUTED)
    tl.store(out + place, (left + right).to(out.dtype.element_ty), mask=live)
