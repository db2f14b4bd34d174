"""Dropout in plain torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = -(1 << 63)
_GOLDEN = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def keep_threshold(p: float) -> int:
    """The hash in [0, 2**64) from which on an element is kept with probability ``1 - p``."""
    return int(p * 2.0**64)


def keep_mask(key: int, count: int, p: float, device: torch.device) -> Tensor:
    """bool [count]: element ``i`` is kept iff ``mix64(key, i) >= p * 2**64``.

    Torch has no uint64 arithmetic, so the hash is computed in int64, whose sums and products have
    the same bits; shifts are masked to be logical and the comparison is made with the sign flipped.
    """
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    z = z + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(_M1)
    z = (z ^ _shift(z, 27)) * _signed(_M2)
    z = z ^ _shift(z, 31)
    return (z ^ _SIGN) >= (_signed(keep_threshold(p)) ^ _SIGN)


def dropout(x: Tensor, p: float, key: int) -> Tensor:
    """``x`` with element ``i`` (in row-major order) zeroed or scaled by ``1 / (1 - p)``.

    ``x``: float [...]; returns the same shape and dtype.
    """
    keep = keep_mask(key, x.numel(), p, x.device).view(x.shape)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
