"""Operators on a road network and on a hub of 50,000 neighbours, and on parts of a pattern."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.kernels import threads
from dtrain.kernels.csr import Csr
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.edge_softmax import reference as softmax_reference
from dtrain.kernels.gat import gat
from dtrain.kernels.gat import reference as gat_reference
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.spmm import cpu, reference, spmm, spmm_max, spmm_mean, spmm_min

HUB = 50_000
Operator = Callable[..., Tensor]
SPLIT: dict[str, Operator] = {
    "sum": lambda csr, x, w, *_: spmm(csr, x, w),
    "mean": lambda csr, x, *_: spmm_mean(csr, x),
    "max": lambda csr, x, *_: spmm_max(csr, x)[0],
    "gat": lambda csr, x, w, src, dst: gat(csr, x.view(len(x), 2, -1), src, dst).flatten(1),
}


def _star() -> Csr:
    indptr = torch.cat([torch.tensor([0]), torch.arange(HUB, 2 * HUB + 1)])
    return Csr(indptr, torch.cat([torch.arange(1, HUB + 1), torch.zeros(HUB).long()]), HUB + 1)


@pytest.fixture(params=["star", "road"])
def pattern(request: pytest.FixtureRequest) -> Csr:
    if request.param == "star":
        return _star()
    folder: Path = request.getfixturevalue("shared_data")
    graph = import_graph("mtx", str(folder / "mtx/luxembourg_osm.mtx"), ImportOptions())
    indptr = torch.from_numpy(graph.indptr)
    return Csr(indptr, torch.from_numpy(graph.indices).long(), len(indptr) - 1)


def _random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_equal_to_the_reference_with_gradients(pattern: Csr) -> None:
    x = _random(pattern.num_cols, 3, seed=0).requires_grad_()
    weight = _random(pattern.nnz, seed=1).requires_grad_()
    heads = _random(pattern.num_cols, 2, 3, seed=2).requires_grad_()
    src = _random(pattern.num_cols, 2, seed=3).requires_grad_()
    dst = _random(pattern.num_rows, 2, seed=4).requires_grad_()
    scores = _random(pattern.nnz, 2, seed=5).requires_grad_()
    attention = Attention(0.2, 0.0, 0)
    cases: list[tuple[Tensor, Tensor, list[Tensor]]] = [
        (spmm(pattern, x, weight), reference.spmm(pattern, x, weight), [x, weight]),
        (spmm_mean(pattern, x), reference.spmm_mean(pattern, x), [x]),
        (spmm_max(pattern, x)[0], reference.spmm_extreme(pattern, x, largest=True)[0], [x]),
        (
            edge_softmax(pattern, scores),
            softmax_reference.forward(pattern, scores),
            [scores],
        ),
        (
            gat(pattern, heads, src, dst),
            gat_reference.forward(pattern, heads, src, dst, attention)[0],
            [heads, src, dst],
        ),
    ]
    for found, expected, inputs in cases:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weights = torch.cos(torch.arange(found.numel(), dtype=torch.float64)).view(found.shape)
        gradients = [
            torch.autograd.grad((out * weights).sum(), inputs) for out in (found, expected)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("name", list(SPLIT))
def test_a_block_in_parts_has_the_same_bits(name: str, large: Csr) -> None:
    x, weight = _random(large.num_cols, 20, seed=0).float(), _random(large.nnz, seed=1).float()
    src, dst = (_random(large.num_cols, 2, seed=s).float() for s in (2, 3))
    whole = SPLIT[name](large, x, weight, src, dst)
    parts = []
    for first, end in ((0, 1), (1, 1200), (1200, large.num_rows)):
        begin, stop = int(large.indptr[first]), int(large.indptr[end])
        part = Csr(large.indptr[first : end + 1] - begin, large.indices[begin:stop], large.num_cols)
        parts.append(SPLIT[name](part, x, weight[begin:stop], src, dst[first:end]))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_long_rows_side_by_side_have_the_bits_that_they_have_alone(
    dtype: torch.dtype, long_rows: Csr
) -> None:
    pattern = long_rows
    assert pattern.nnz > 60 * 60
    x, weight = _random(500, 40, seed=0).to(dtype), _random(pattern.nnz, seed=1).to(dtype)
    operators: list[Callable[[Csr, Tensor, Tensor], Tensor]] = [
        spmm,
        lambda csr, x, _: spmm_mean(csr, x),
        lambda csr, x, _: spmm_max(csr, x)[0],
        lambda csr, x, _: spmm_max(csr, x)[1],
        lambda csr, x, _: spmm_min(csr, x)[0],
    ]
    for operator in operators:
        wide = operator(pattern, x, weight)
        for first, end in ((0, 8), (8, 15), (39, 40)):  # whole vectors and parts of one
            narrow = operator(pattern, x[:, first:end].contiguous(), weight)
            assert torch.equal(narrow, wide[:, first:end])
        begin, stop = int(pattern.indptr[41]), int(pattern.indptr[42])
        alone = Csr(torch.tensor([0, stop - begin]), pattern.indices[begin:stop], 500)
        row = operator(alone, x[:, :8].contiguous(), weight[begin:stop])
        expected = wide[41, :8]
        assert torch.equal(row[0], expected if wide.is_floating_point() else expected - begin)


@pytest.mark.parametrize("backward", [False, True], ids=["long", "long transposed"])
def test_narrow_products_of_long_rows_are_the_reference_s(long_rows: Csr, backward: bool) -> None:
    pattern = long_rows.transpose()[0] if backward else long_rows
    x = _random(pattern.num_cols, 7, seed=0).requires_grad_()
    grad = _random(pattern.num_rows, 7, seed=1)
    for found, expected in (
        (spmm_max(pattern, x)[0], reference.spmm_extreme(pattern, x, largest=True)[0]),
        (spmm_mean(pattern, x), reference.spmm_mean(pattern, x)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        a, b = (torch.autograd.grad(out, x, grad)[0] for out in (found, expected))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Ways that sums take for large sizes or on other systems, taken here for small ones.
WAYS = {
    "tiles of a copy": (cpu, "_READS", 1),
    "past the caches": (cpu, "_BEYOND_CACHES", 0),
    "no team of torch's": (threads, "team_address", lambda: 0),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_way_that_a_sum_takes_changes_a_bit(
    dtype: torch.dtype, way: str, large: Csr, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _random(large.nnz, seed=1).to(dtype)
    given = [_random(large.num_cols, width, seed=0).to(dtype) for width in (16, 64, 150, 256)]
    usual = [(spmm(large, x, weight), spmm_mean(large, x)) for x in given]
    monkeypatch.setattr(*WAYS[way])
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for x, (total, mean) in zip(given, usual, strict=True):
                assert torch.equal(spmm(large, x, weight), total)
                assert torch.equal(spmm_mean(large, x), mean)
    finally:
        torch.set_num_threads(before)
