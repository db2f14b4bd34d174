"""Dropout as one pass over the elements on the CPU."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from dtrain.kernels.arrays import wide
from dtrain.kernels.dropout.reference import keep_threshold
from dtrain.kernels.results import empty
from dtrain.kernels.simd import VectorCode, data_of, intrinsic
from dtrain.kernels.threads import over_range

_BLOCK = 16  # elements that one call of the vector code treats


@intrinsic
def _drop_block(
    typing: Any, x: Any, out: Any, at: Any, count: Any, key: Any, threshold: Any, scale: Any
) -> Any:
    """Elements ``at`` to ``at + count - 1``, at most 16, of flat ``x``, dropped into ``out``."""
    signature = types.void(x, out, types.int64, types.int64, key, threshold, scale)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, out = (data_of(context, builder, signature.args[i], arguments[i]) for i in (0, 1))
        at, count, key, threshold, scale = arguments[2:]
        code = VectorCode(builder, signature.args[0].dtype, _BLOCK)
        mask = code.first_lanes(count)
        draws = code.mix64(key, at)
        kept = builder.icmp_unsigned(">=", draws, code.splat(threshold))
        scaled = builder.fmul(code.load(x, at, mask), code.splat(scale))
        code.store(builder.select(kept, scaled, code.constant(0.0)), out, at, mask)
        return context.get_dummy_value()

    return signature, generate


@numba.njit(cache=True, nogil=True)
def _dropout(first: Any, end: Any, x: Any, out: Any, key: Any, threshold: Any, scale: Any) -> None:
    for at in range(first, end, _BLOCK):
        _drop_block(x, out, at, min(_BLOCK, end - at), key, threshold, scale)


def dropout(x: Tensor, p: float, key: int) -> Tensor:
    """As :func:`dtrain.kernels.dropout.reference.dropout`, for tensors on the CPU."""
    source = wide(x).numpy()
    out = empty(source.shape, source.dtype)
    flat = source.reshape(-1)
    scale = source.dtype.type(1.0 / (1.0 - p))
    numbers = (np.uint64(key), np.uint64(keep_threshold(p)), scale)

    def loop(first: int, end: int) -> None:
        _dropout(first, end, flat, out.reshape(-1), *numbers)

    over_range(flat.size, 1, loop)
    return torch.from_numpy(out).to(x.dtype)
