"""Peak memory of a call, from the kernel's own account of this process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

from dtrain.kernels.results import release

_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5), clear_refs


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """How far resident memory rises above its level before ``call``, while that runs.

    The call is made twice and the second is measured, so what is made once is not counted. What
    kernels keep for later results is given back before, so that it is.
    """
    call()
    gc.collect()
    release()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _field("VmRSS")
    call()
    return max(0, _field("VmHWM") - before)


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS}: expected a line {name}, found none")
