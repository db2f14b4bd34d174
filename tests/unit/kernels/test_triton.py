"""The GPU kernels under the operators' own tests, in a process that has them; and their compiler.

Where there is a GPU the tests run on it, else in Triton's interpreter on tensors of the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parent
FILES = ("test_operators.py", "test_dropout.py", "test_gpu_kernels.py")
HOST = (
    "not finite_differences and not number_of_threads and not other_devices and not share_mean "
    "and not rows_around_them and not strided and not views_with_gaps"
)
"""All but what is too much for an interpreter, or what a GPU's implementation has no part in."""
SOME = (
    f"{HOST} and not many_vectors and not star "
    "and not random and not (equals_reference and 1-) and not (bfloat16 and not duplicates)"
)
"""What takes the interpreter few seconds."""

pytestmark = pytest.mark.timeout(1800)


def _run(which: str, files: tuple[str, ...] = FILES) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'dtrain[triton]'")
    on_gpu = torch.cuda.is_available()
    environment = os.environ | {"DTRAIN_TEST_KERNELS": "cuda" if on_gpu else "interpreter"}
    if not on_gpu:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x"]
    command += ["--timeout=300", "-m", "", "-k", which, *(str(FOLDER / file) for file in files)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=1700
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_some_cases_of_every_operator() -> None:
    _run(SOME)


@pytest.mark.chaos
def test_all_cases_of_every_operator() -> None:
    _run("" if torch.cuda.is_available() else HOST)


@pytest.mark.chaos
def test_registered_operators_are_the_plain_ones() -> None:
    _run("equal_to_the_plain and (square or duplicates)", ("test_library.py",))
