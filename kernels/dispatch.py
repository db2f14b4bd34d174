"""Which implementation of an operator computes on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

from torch import Tensor


def implementation(operator: str, x: Tensor) -> ModuleType:
    """The module of ``dtrain.kernels.<operator>`` that computes for tensors where ``x`` lies."""
    return _module(operator, kind_of("cpu" if x.is_cpu else x.device.type))


def kind_of(device_type: str) -> str:
    """``cpu``, ``triton`` or ``reference``, for torch's name of a kind of device."""
    if device_type == "cpu":
        return "cpu"
    if device_type == "cuda" and why_not_triton() is None:
        return "triton"
    return "reference"


@functools.cache
def why_not_triton() -> str | None:
    """What is missing for the GPU kernels and how to get it, None if nothing is.

    Triton compiles a launcher of each kernel with a C compiler and Python's headers. Looked up
    once, without importing anything.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'dtrain[triton]'"
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        return "triton needs a C compiler: install gcc or clang"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return "triton needs Python's headers: install them (Debian: python3-dev)"
    return None


@functools.cache
def _module(operator: str, kind: str) -> ModuleType:
    # Triton is imported when a GPU first needs it: it compiles for a device.
    return importlib.import_module(f"dtrain.kernels.{operator}.{kind}")
