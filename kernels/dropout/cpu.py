"""Dropout as one pass over the elements on the CPU."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.dropout.reference import keep_threshold
from dtrain.kernels.rng import mix64_jit


@numba.njit(cache=True, nogil=True)
def _dropout(x: Any, out: Any, key: Any, threshold: Any, scale: Any) -> None:
    for i in range(x.size):
        kept = mix64_jit(key, np.uint64(i)) >= threshold
        out[i] = x[i] * scale if kept else x.dtype.type(0)


def dropout(x: Tensor, p: float, key: int) -> Tensor:
    """As :func:`dtrain.kernels.dropout.reference.dropout`, for tensors on the CPU."""
    wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    source = x.detach().to(wide).contiguous()
    out = torch.empty_like(source)
    flat = source.view(-1).numpy()
    scale = flat.dtype.type(1.0 / (1.0 - p))
    _dropout(flat, out.view(-1).numpy(), np.uint64(key), np.uint64(keep_threshold(p)), scale)
    return out.to(x.dtype)
