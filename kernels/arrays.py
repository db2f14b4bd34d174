"""Tensors on the CPU as the arrays that compiled loops take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COMPILED = (torch.float32, torch.float64)


def array(x: Tensor) -> Any:
    """The tensor's own memory, without autograd; copied only where it is not contiguous."""
    return x.detach().contiguous().numpy()


def wide(x: Tensor) -> Tensor:
    """``x`` without autograd, contiguous, in float64 if it is that and else in float32."""
    dtype = x.dtype if x.dtype in COMPILED else torch.float32
    return x.detach().to(dtype).contiguous()


def flat_bits(x: Tensor) -> Any:
    """``x`` as a flat array of float32 or float64, or of uint16 for the bits of bfloat16."""
    dtype = x.dtype
    if dtype is torch.bfloat16:
        return x.detach().contiguous().view(torch.uint16).numpy().reshape(-1)
    return flat_values(x, dtype if dtype is torch.float64 else torch.float32)


def flat_values(x: Tensor, dtype: torch.dtype) -> Any:
    """``x`` without autograd as a flat array of ``dtype``, float32 or float64.

    Each of torch's operations costs some microseconds where its code is not in the caches: none
    is called for what is such an array already.
    """
    if x.dtype is not dtype or x.requires_grad or not x.is_contiguous():
        x = x.detach().to(dtype).contiguous()
    return x.numpy().reshape(-1)
