"""Dropout as one pass over the elements on a GPU, with the same mask as on the CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtrain.kernels.device import blocks, computed_in, launch, mix64
from dtrain.kernels.dropout.reference import keep_threshold

_BLOCK = 1024


def dropout(x: Tensor, p: float, key: int) -> Tensor:
    """As :func:`dtrain.kernels.dropout.reference.dropout`, for tensors on a GPU."""
    x = x.detach().contiguous()
    out = torch.empty_like(x)
    launch(
        _dropout,
        (blocks(x.numel(), _BLOCK),),
        out, x, x.numel(), key,
        THRESHOLD=keep_threshold(p), SCALE=1.0 / (1.0 - p), COMPUTED=computed_in(x), BLOCK=_BLOCK,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["key"])
def _dropout(
    out, x, count, key: tl.uint64, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    COMPUTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < count
    value = tl.load(x + place, mask=live, other=0).to(COMPUTED) * SCALE
    kept = mix64(key, place) >= THRESHOLD
    tl.store(out + place, tl.where(kept, value, 0.0).to(out.dtype.element_ty), mask=live)
