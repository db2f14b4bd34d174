"""What the GPU kernels promise beyond the results that all implementations share.

Run in a process of its own, on a GPU or in Triton's interpreter; see ``test_triton.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout import cpu as dropout_cpu
from dtrain.kernels.dropout import dropout
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.edge_softmax import reference as softmax_reference
from dtrain.kernels.gat import gat
from dtrain.kernels.gat import reference as gat_reference
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.maxk import maxk, spmm_maxk
from dtrain.kernels.maxk import reference as maxk_reference
from dtrain.kernels.sddmm import reference as sddmm_reference
from dtrain.kernels.sddmm import sddmm_add, sddmm_dot
from dtrain.kernels.spmm import cusparse, reference, spmm, spmm_max, spmm_mean, spmm_min

KEY = 2**63 + 12345
Operator = Callable[..., Tensor]


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, dtype=dtype, generator=generator, device="cpu")
    return values.to(torch.get_default_device()).requires_grad_()


def _largest(x: Tensor) -> Tensor:
    columns = maxk_reference.choose(x.detach(), 2).long()
    return torch.zeros_like(x).scatter(1, columns, x.gather(1, columns))


# Each takes x [N, 6], a weight of every entry, scores of both ends [N, 2] and of entries [nnz, 2].
CASES: dict[str, tuple[Operator, Operator, tuple[int, ...]]] = {
    "weighted sum": (spmm, reference.spmm, (0, 1)),
    "mean": (spmm_mean, reference.spmm_mean, (0,)),
    "max": (
        lambda csr, x: spmm_max(csr, x)[0],
        lambda csr, x: reference.spmm_extreme(csr, x, largest=True)[0],
        (0,),
    ),
    "min": (
        lambda csr, x: spmm_min(csr, x)[0],
        lambda csr, x: reference.spmm_extreme(csr, x, largest=False)[0],
        (0,),
    ),
    "sddmm": (sddmm_dot, sddmm_reference.sddmm_dot, (0, 0)),
    "sddmm of sums": (sddmm_add, sddmm_reference.sddmm_add, (0, 0)),
    "edge softmax": (edge_softmax, softmax_reference.forward, (4,)),
    "gat": (
        lambda csr, x, *s: gat(csr, x.view(len(x), 2, 3), *s, p=0.4, key=KEY),
        lambda csr, x, *s: gat_reference.forward(
            csr, x.view(len(x), 2, 3), *s, Attention(0.2, 0.4, KEY)
        )[0],
        (0, 2, 3),
    ),
    "maxk": (
        lambda csr, x, weight: spmm_maxk(csr, maxk(x, 2), weight),
        lambda csr, x, weight: reference.spmm(csr, _largest(x), weight),
        (0, 1),
    ),
}
EACH = pytest.mark.parametrize("name", list(CASES))


def _square() -> Csr:
    """20 rows, some without entries; row 3 and column 4 have 30 and more, some of them equal."""
    generator = torch.Generator().manual_seed(3)
    lists = [torch.randint(20, (k,), generator=generator, device="cpu") for k in [5, 0, 1, 30, 4]]
    lists += [torch.tensor([4, 4, 4, 7], device="cpu")] * 14
    lists += [torch.zeros(0, dtype=torch.int64, device="cpu")]
    counts = torch.tensor([0, *(len(row) for row in lists)], device="cpu")
    return Csr(counts.cumsum(0), torch.cat(lists), 20).to(torch.get_default_device())


def _inputs(name: str, csr: Csr, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(20, 6), (csr.nnz,), (20, 2), (20, 2), (csr.nnz, 2)]
    return [_random(*shapes[i], seed=i, dtype=dtype) for i in CASES[name][2]]


def _with_gradients(operator: Operator, csr: Csr, inputs: list[Tensor]) -> list[Tensor]:
    out = operator(csr, *inputs)
    weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@EACH
def test_long_rows_in_pieces_equal_the_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.kernels.pieces.PIECE", 7)
    csr = _square()
    pieces, of_columns = csr.pieces(), csr.transpose()[0].pieces()
    assert pieces is not None
    assert of_columns is not None
    assert (len(pieces.long_rows), pieces.slots, len(pieces)) == (1, 5, 24)
    operator, expected, _ = CASES[name]
    inputs = _inputs(name, csr, torch.float64)
    found = _with_gradients(operator, csr, inputs)
    for a, b in zip(found, _with_gradients(expected, csr, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@EACH
def test_bits_depend_neither_on_the_tiles_nor_on_the_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtrain.kernels.pieces.PIECE", 7)
    csr = _square()
    inputs = _inputs(name, csr, torch.float32)
    first = _with_gradients(CASES[name][0], csr, inputs)
    again = _with_gradients(CASES[name][0], csr, inputs)
    monkeypatch.setattr("dtrain.kernels.device.TILE", 64)
    monkeypatch.setattr("dtrain.kernels.device.WIDEST", 4)
    otherwise = _with_gradients(CASES[name][0], csr, inputs)
    for a, b, c in zip(first, again, otherwise, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    x = _random(37, 41, seed=0, dtype=dtype).detach()
    for key in (0, 1, 2**40, KEY):
        found = dropout(x, 0.3, key)
        expected = dropout_cpu.dropout(x.cpu(), 0.3, key)
        assert torch.equal(found.cpu() != 0, expected != 0)
        # Triton's interpreter cuts bits off where it should round to bfloat16.
        if dtype != torch.bfloat16:
            assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, torch.float32), (33, torch.float64), (33, torch.bfloat16), (300, torch.float32)],
)
def test_maxk_chooses_what_a_stable_sort_puts_first(width: int, dtype: torch.dtype) -> None:
    x = _random(9, width, seed=0, dtype=dtype).detach()
    x[0] = 0
    x[1, ::2] = -0.0
    x[2, ::2], x[3, ::3], x[4, ::2] = float("inf"), float("nan"), float("-inf")
    x[5] = x[5].round()
    for k in {1, 1 + width // 3, width}:
        found = maxk(x, k).columns
        assert torch.equal(found, maxk_reference.choose(x, k))


def test_maxk_of_rows_too_wide_for_a_program() -> None:
    x = _random(2, 5000, seed=0, dtype=torch.float32).detach()
    assert torch.equal(maxk(x, 3).columns, maxk_reference.choose(x, 3))


@pytest.mark.parametrize("weighted", [False, True])
def test_widths_of_the_table_go_to_the_library(
    weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    csr = _square()
    x, weight = _inputs("weighted sum", csr, torch.float64)
    inputs = [x, weight] if weighted else [x]
    assert not cusparse.is_faster(x)
    monkeypatch.setattr(cusparse, "FASTER", {torch.float64: ((4, 5), (6, 8))})
    assert cusparse.is_faster(x)
    assert not cusparse.is_faster(x.float())
    found = _with_gradients(spmm, csr, inputs)
    structure = csr.narrow()
    for _ in range(2):
        again = _with_gradients(spmm, csr, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert csr.narrow()[1] is structure[1]
    expected = _with_gradients(lambda c, x, w=None: reference.spmm(c, x, w), csr, inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
