"""The GPU kernels through Triton's compiler, for a device that need not be there.

Triton's interpreter is laxer than its compiler, so that results alone do not show that a kernel
could run.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.kernels import dispatch
from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout import dropout
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.gat import gat
from dtrain.kernels.maxk import maxk, spmm_maxk
from dtrain.kernels.sddmm import sddmm_add, sddmm_dot
from dtrain.kernels.spmm import spmm, spmm_max, spmm_mean

pytestmark = pytest.mark.timeout(600)
OPERATORS = ("spmm", "sddmm", "dropout", "edge_softmax", "gat", "maxk")

# Of x [N, 64] and a weight of every entry; the backward pass is compiled too.
CALLS: dict[str, Callable[[Csr, Tensor, Tensor], Tensor]] = {
    "weighted sum": lambda csr, x, weight: spmm(csr, x, weight),
    "mean": lambda csr, x, weight: spmm_mean(csr, x),
    "max": lambda csr, x, weight: spmm_max(csr, x)[0],
    "one column": lambda csr, x, weight: spmm(csr, x[:, :1], weight),
    "sddmm": lambda csr, x, weight: sddmm_dot(csr, x, x),
    "sddmm of sums": lambda csr, x, weight: sddmm_add(csr, x, x),
    "dropout": lambda csr, x, weight: dropout(x, 0.3, 2**63 + 5),
    "edge softmax": lambda csr, x, weight: edge_softmax(csr, torch.outer(weight, x[0, :8])),
    "gat": lambda csr, x, weight: gat(csr, x.view(-1, 8, 8), x[:, :8], x[:, 8:16], p=0.3, key=9),
    "one head": lambda csr, x, weight: gat(csr, x.view(-1, 1, 64), x[:, :1], x[:, 1:2]),
    "maxk": lambda csr, x, weight: spmm_maxk(csr, maxk(x, 16), weight),
}
ALWAYS = ("gat",)


class _Absent:
    """A GPU of compute capability 9.0, as far as Triton asks about it before a launch."""

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tried: str) -> dict[str, str]:
    """PTX of every kernel that is launched from now on, by its name and constants.

    All but the launch itself is done. The first argument, which a kernel would have written,
    becomes zeros.
    """
    pytest.importorskip("triton", reason="triton is not installed: pip install 'dtrain[triton]'")
    if tried != "cpu":
        pytest.skip("Triton's interpreter is on")
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dispatch, "kind_of", lambda device_type: "triton")
    found: dict[str, str] = {}

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if 0 not in grid:
            built = kernel.run(*args, grid=grid, warmup=True, **constants, enable_fp_fusion=False)
            assert len(built.asm["cubin"]) > 0
            found[f"{kernel.__name__} {constants}"] = built.asm["ptx"]
            args[0].zero_()

    for operator in OPERATORS:
        module = importlib.import_module(f"dtrain.kernels.{operator}.triton")
        monkeypatch.setattr(module, "launch", compile_only)
    monkeypatch.setattr(driver, "_active", _Absent())
    return found


def _star(rays: int) -> Csr:
    indptr = torch.cat([torch.tensor([0]), torch.arange(rays, 2 * rays + 1)])
    columns = torch.cat([torch.arange(1, rays + 1), torch.zeros(rays, dtype=torch.int64)])
    return Csr(indptr, columns, rays + 1)


@pytest.mark.parametrize(
    ("name", "dtype", "rays"),
    [
        pytest.param(
            name,
            dtype,
            rays,
            marks=[] if (name in ALWAYS and (dtype, rays) == (torch.float32, 300)) else chaos,
        )
        for chaos in [pytest.mark.chaos]
        for name in CALLS
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for rays in (20, 300)
    ],
)
def test_kernels_compile_and_have_no_atomics(
    name: str, dtype: torch.dtype, rays: int, compiled: dict[str, str]
) -> None:
    csr = _star(rays)
    x = torch.zeros(csr.num_cols, 64, dtype=dtype, requires_grad=True)
    weight = torch.zeros(csr.nnz, dtype=dtype, requires_grad=True)
    out = CALLS[name](csr, x, weight)
    torch.autograd.grad(out.sum(), [x, weight], allow_unused=True)
    assert compiled
    for kernel, ptx in compiled.items():
        assert not re.search(r"^\s*(@\S+\s+)?(atom|red)\.", ptx, re.MULTILINE), kernel
