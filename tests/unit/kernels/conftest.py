"""Graphs that every operator is tried on, and the implementation that is tried.

``DTRAIN_TEST_KERNELS`` is ``cpu`` (default), ``interpreter`` (the GPU kernels in Triton's
interpreter on tensors of the CPU; ``TRITON_INTERPRET=1`` must be set) or ``cuda``. The latter two
are processes of their own, which ``test_triton.py`` starts: Triton decides at its import.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from dtrain.kernels import dispatch
from dtrain.kernels.csr import Csr

TRIED = os.environ.get("DTRAIN_TEST_KERNELS", "cpu")
collect_ignore = ["test_gpu_kernels.py"] if TRIED == "cpu" else ["test_triton.py"]


@pytest.fixture(scope="session")
def tried() -> str:
    """Which implementation is tried."""
    return TRIED


@pytest.fixture(autouse=True)
def _implementation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if TRIED == "interpreter":
        monkeypatch.setattr(dispatch, "kind_of", lambda device_type: "triton")
    with torch.device("cuda") if TRIED == "cuda" else contextlib.nullcontext():
        yield


def csr_of(rows: list[list[int]], num_cols: int) -> Csr:
    """A pattern from the columns of every row."""
    counts = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
    flat = [column for row in rows for column in row]
    return Csr(counts.cumsum(0), torch.tensor(flat, dtype=torch.int64), num_cols)


def random_csr(num_rows: int, num_cols: int, mean: int, seed: int) -> Csr:
    """Skewed row lengths, with empty rows, duplicate entries and columns that nobody has."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(num_rows, generator=generator, device="cpu")
    counts = (mean * draws.reciprocal().clamp(max=8) / 2).long()
    counts[:: max(num_rows // 5, 1)] = 0
    columns = torch.randint(num_cols, (int(counts.sum()),), generator=generator, device="cpu")
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Csr(indptr, columns // 2, num_cols)


GRAPHS = {
    "random": random_csr(23, 31, 4, 0),
    "square": random_csr(20, 20, 3, 1),
    "empty rows": csr_of([[], [0, 2], [], []], 4),
    "one node": csr_of([[]], 1),
    "self loops": csr_of([[0, 1], [1], [2, 2, 0]], 3),
    "duplicates": csr_of([[1, 1, 1], [0, 1, 0]], 2),
    "no edges": csr_of([[], [], []], 5),
    "no rows": csr_of([], 3),
    "star": csr_of([list(range(1, 40)), *([0] for _ in range(39))], 40),
}


@pytest.fixture(params=list(GRAPHS))
def graph(request: pytest.FixtureRequest) -> Csr:
    """One pattern after another; a fresh object, so no cached transpose is shared."""
    csr = GRAPHS[request.param]
    return Csr(csr.indptr, csr.indices, csr.num_cols).to(torch.get_default_device())


@pytest.fixture
def large() -> Csr:
    """Enough entries that torch would share the work among threads."""
    return random_csr(3000, 3000, 12, 2).to(torch.get_default_device())


@pytest.fixture
def small() -> Csr:
    """As square as :func:`large`."""
    return random_csr(40, 40, 5, 4).to(torch.get_default_device())


@pytest.fixture
def long_rows() -> Csr:
    """Rows of some 100 entries on average, some of them empty."""
    return random_csr(60, 500, 80, 3)
