"""Which implementation of an operator computes on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import Tensor

WITHOUT_TRITON = "triton is not installed: plain torch operations are used, many times slower"


def implementation(operator: str, x: Tensor) -> ModuleType:
    """The module of ``dtrain.kernels.<operator>`` that computes for tensors where ``x`` lies."""
    return _module(operator, kind_of(x.device.type))


def kind_of(device_type: str) -> str:
    """``cpu``, ``triton`` or ``reference``, for torch's name of a kind of device."""
    if device_type == "cpu":
        return "cpu"
    if device_type == "cuda" and triton_installed():
        return "triton"
    return "reference"


@functools.cache
def triton_installed() -> bool:
    """Whether the GPU kernels can be compiled; looked up once, without importing anything."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _module(operator: str, kind: str) -> ModuleType:
    # Triton is imported when a GPU first needs it: it compiles for a device.
    return importlib.import_module(f"dtrain.kernels.{operator}.{kind}")
