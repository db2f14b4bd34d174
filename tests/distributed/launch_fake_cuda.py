"""Preloaded, it makes a forked trainer believe that CUDA was initialised before the fork."""

from __future__ import annotations

import sys
import types

sys.modules["torch"] = types.SimpleNamespace(  # type: ignore[assignment]
    cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: True)
)
