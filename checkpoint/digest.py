"""The hash that identifies a result."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over parameter names and bytes, sorted by name, as 64 hexadecimal digits.

    Each tensor (any shape and dtype, on any device, of any strides) adds its UTF-8 name, its
    dtype (``float32``), its shape (``3,4``; empty for a scalar), each ended by a zero byte, and
    then its elements in row-major order, little-endian.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{name}\0{dtype}\0{shape}\0".encode())
        digest.update(_little_endian(tensor))
    return digest.hexdigest()


def _little_endian(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    size = flat.element_size()
    array = flat.view(torch.uint8).numpy()
    if sys.byteorder == "big" and size > 1:
        array = array.reshape(-1, size)[:, ::-1].copy().reshape(-1)
    return array.data
