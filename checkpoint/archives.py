"""Tensors as ``torch.save`` writes them, each in an archive of its own, as DCP's files hold them.

What stands around a tensor's elements depends on its dtype and shape alone, since the CRC-32, which
torch never checks, is left out. So ``torch.save`` makes it once for each of these, and a save that
follows joins bytes: to write a few hundred tensors through ``torch.save`` takes the interpreter's
lock for a tenth of a second, and leaves a garbage collection behind, and training needs both.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_Form = tuple[torch.dtype, torch.Size]


class Archives:
    """The archives of a store's saves; what was made for one save is kept for the next."""

    def __init__(self) -> None:
        self._around: dict[_Form, tuple[bytes, bytes]] = {}

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Make what stands around these tensors, and forget what stands around others.

        Not while another thread uses :meth:`pieces`.
        """
        forms = {(tensor.dtype, tensor.shape) for tensor in tensors}
        self._around = {form: self._around.get(form) or _around(*form) for form in forms}

    def pieces(self, tensor: Tensor) -> tuple[bytes, memoryview, bytes]:
        """The archive of a CPU tensor that was prepared for, in pieces; the middle one is its
        memory, where it is contiguous."""
        before, after = self._around[tensor.dtype, tensor.shape]
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return before, flat.view(torch.uint8).numpy().data, after


def _around(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the elements of such a tensor."""
    # Nobody reads its elements, so that no memory is touched for them.
    model = torch.empty(shape, dtype=dtype)
    seen = _Divided(model)
    without_crc32(lambda: torch.save(model, cast(IO[bytes], seen)))
    if model.numel() and seen.parts != 2:
        raise RuntimeError(
            f"torch {torch.__version__} writes tensors otherwise than this version of dtrain "
            f"expects (elements found {seen.parts - 1} times); use a torch that it was tested with"
        )
    return bytes(seen.before), bytes(seen.after)


class _Divided:
    """A stream that leaves a tensor's own memory out of what it is given."""

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._size = tensor.data_ptr(), tensor.nbytes
        self.before, self.after = bytearray(), bytearray()
        self.parts = 1

    def write(self, data: Any) -> int:
        view = np.frombuffer(data, np.uint8)
        if self._size and view.ctypes.data == self._address and view.nbytes == self._size:
            self.parts += 1
        else:
            (self.before if self.parts == 1 else self.after).extend(view.data)
        return int(view.nbytes)

    def flush(self) -> None:
        """Nothing is held back."""


def without_crc32(function: Callable[[], T]) -> T:
    """Call ``function`` while torch leaves the CRC-32 out of archives; the SHA-256 of the file
    stands in.

    Newer versions of torch keep the setting by context; where it is one of the whole process, it
    is left as it was.
    """
    before = torch.serialization.get_crc32_options()
    context = contextvars.copy_context()
    context.run(torch.serialization.set_crc32_options, False)
    if torch.serialization.get_crc32_options() != before:
        torch.serialization.set_crc32_options(before)
    return context.run(function)
