"""Copies of live tensors, in buffers that are kept from save to save."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Staging:
    """One CPU buffer for each name, made at its first save (pinned where it comes from a GPU).

    Buffers of names that are no longer saved are freed.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor], at: Callable[[str], None]) -> dict[str, Tensor]:
        """Copy tensors of any device and strides; the copies are contiguous, and complete when
        this returns. They stay as they are until the next call.

        ``at``: called with ``stage.tensor`` before each copy.
        """
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        devices = set()
        with torch.no_grad():
            for name, tensor in tensors.items():
                at("stage.tensor")
                self._buffers[name].copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        old = self._buffers.get(name)
        fits = old is not None and old.shape == tensor.shape and old.dtype == tensor.dtype
        if old is not None and fits and old.is_pinned() == tensor.is_cuda:
            return old
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors themselves where they are on the CPU, else copies."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
