"""Inputs on their way to a device: through pinned memory, on a stream of their own.

Copies from pinned memory run beside compute. Whoever computes with the inputs puts a wait into its
own stream first, which costs the processor nothing and the device only what is still missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class SideStream(Protocol):
    """What copying beside compute takes of a device."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Queue a copy to the device, and give the tensor that it fills."""
        ...

    def mark(self) -> object:
        """A point after all copies that were queued so far."""
        ...

    def wait(self, mark: object) -> None:
        """Let what the calling thread computes from now on begin after ``mark``."""
        ...

    def in_use(self, tensor: Tensor) -> None:
        """Keep the tensor's memory until what the calling thread has queued by its end is done."""
        ...


class CudaSideStream:
    """:class:`SideStream` of a CUDA device, which a thread other than compute's may queue on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream  # which torch leaves untyped
        self._stream: torch.cuda.Stream = stream(device)

    def copy(self, tensor: Tensor) -> Tensor:
        # Torch keeps the pinned buffer until the copy is done and gives it out again then.
        with torch.cuda.stream(self._stream):
            return tensor.pin_memory().to(self._device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, mark: object) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def in_use(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))


def side_stream(device: torch.device) -> SideStream | None:
    """A new stream for copies to ``device``; None where there is no such thing."""
    return CudaSideStream(device) if device.type == "cuda" else None


@dataclass
class Arrival:
    """Tensors that are being copied to a device, all of them there at ``mark``."""

    side: SideStream
    mark: object
    tensors: list[Tensor]

    def wait(self) -> None:
        """To be called by the thread that computes with them, before it does."""
        self.side.wait(self.mark)
        for tensor in self.tensors:
            self.side.in_use(tensor)
