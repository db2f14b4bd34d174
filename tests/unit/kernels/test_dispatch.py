"""Which implementation computes where, and what is said where the GPU's cannot."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli.env import environment_report
from dtrain.kernels import dispatch


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    look_up = dispatch.why_not_triton
    look_up.cache_clear()
    yield
    look_up.cache_clear()


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Everything is there but what is named: ``triton``, ``compiler`` or ``headers``."""

    def provide(missing: str) -> None:
        if missing != "headers":
            (tmp_path / "Python.h").touch()
        found: Any = None if missing == "triton" else object()
        tool = None if missing == "compiler" else "/usr/bin/gcc"
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(shutil, "which", lambda name: tool)
        monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})

    return provide


def test_devices_and_their_implementations(complete: Callable[[str], None]) -> None:
    complete("nothing")
    assert dispatch.why_not_triton() is None
    assert [dispatch.kind_of(d) for d in ("cpu", "cuda", "xpu")] == ["cpu", "triton", "reference"]


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("triton", "not installed: pip install 'dtrain[triton]'"),
        ("compiler", "install gcc or clang"),
        ("headers", "python3-dev"),
    ],
)
def test_what_is_missing_is_said_and_the_reference_computes(
    missing: str, said: str, complete: Callable[[str], None]
) -> None:
    complete(missing)
    reason = dispatch.why_not_triton()
    assert reason is not None
    assert said in reason
    assert dispatch.kind_of("cuda") == "reference"
    assert dispatch.kind_of("cpu") == "cpu"


def test_env_says_what_computes_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "why_not_triton", lambda: "no compiler: get one")
    told = environment_report()["kernels"]["gpu"]
    assert told == "plain torch operations, far slower; no compiler: get one"
    monkeypatch.setattr(dispatch, "why_not_triton", lambda: None)
    assert environment_report()["kernels"]["gpu"] == "triton"


def test_triton_is_imported_when_a_gpu_needs_it_and_not_before() -> None:
    code = (
        "import sys, json, dtrain.kernels.gat, dtrain.kernels.maxk, dtrain.kernels.rows; "
        "print(json.dumps('triton' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
