"""Typed entry to ``torch.autograd.Function``."""

from __future__ import annotations

from typing import Any

from torch.autograd import Function


def call(function: type[Function], *args: Any) -> Any:
    """``function.apply(*args)``, which torch leaves untyped."""
    apply: Any = function.apply
    return apply(*args)
