"""Own rows beside means, and the end of a plain hidden layer, against their references."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dtrain.kernels import own_mean
from dtrain.kernels.bias_relu import bias_relu_
from dtrain.kernels.bias_relu.cpu import bias_relu_backward
from dtrain.kernels.bias_relu.reference import bias_relu as plain_bias_relu
from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout import dropout
from dtrain.kernels.own_mean.reference import own_mean as plain_own_mean
from dtrain.kernels.rng import derive_key
from dtrain.kernels.rows.stored import StoredRows

KEY = derive_key(3, 2**50)


def both_and_gradient(result: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return result.detach(), torch.autograd.grad(result, x, grad)[0]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("width", [1, 37, 80, 200])
def test_own_rows_and_means_are_the_reference_s(graph: Csr, p: float, width: int) -> None:
    if graph.num_rows > graph.num_cols:
        pytest.skip("the rows are the first columns")
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = torch.randn(graph.num_cols, width, dtype=dtype, requires_grad=True)
        found = both_and_gradient(own_mean.own_mean(graph, x, p, KEY), x)
        expected = both_and_gradient(plain_own_mean(graph, x, p, KEY), x)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_own_rows_and_means_of_narrow_numbers(large: Csr) -> None:
    x = torch.randn(large.num_cols, 20, dtype=torch.bfloat16, requires_grad=True)
    found = both_and_gradient(own_mean.own_mean(large, x, 0.3, KEY), x)
    wide = x.detach().float().requires_grad_()
    expected = both_and_gradient(plain_own_mean(large, wide, 0.3, KEY), wide)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2)


def test_gradient_of_own_rows_and_means(graph: Csr) -> None:
    if graph.num_rows > graph.num_cols:
        pytest.skip("the rows are the first columns")
    x = torch.randn(graph.num_cols, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: own_mean.own_mean(graph, x, 0.3, KEY), x)


def test_dropout_in_passing_is_dropout_before(large: Csr) -> None:
    # Few entries for each column, so that masks are drawn at every reading.
    sparse = large.head(100)
    x = torch.randn(large.num_cols, 37)
    dropped = own_mean.own_mean(sparse, dropout(x, 0.4, KEY))
    assert sparse.nnz + sparse.num_rows <= 2 * sparse.num_cols < large.nnz
    assert torch.equal(own_mean.own_mean(sparse, x, 0.4, KEY), dropped)
    assert torch.equal(own_mean.own_mean(sparse, x, 0.4, KEY, training=False)[:, :37], x[:100])


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("rows", [100, 3000])
def test_stored_rows_are_gathered_ones(rows: int, p: float, large: Csr) -> None:
    csr = large.head(rows)
    matrix = np.random.default_rng(0).standard_normal((5000, 70)).astype(np.float32)
    matrix.setflags(write=False)
    numbers = np.random.default_rng(1).permutation(5000)[: csr.num_cols]
    stored = StoredRows(matrix, numbers)
    gathered = stored.gather()
    assert torch.equal(gathered, torch.tensor(matrix[numbers]))
    assert torch.equal(
        own_mean.own_mean(csr, stored, p, KEY), own_mean.own_mean(csr, gathered, p, KEY)
    )


@pytest.mark.parametrize("what", ["own mean", "bias and rectifier"])
def test_same_bits_for_any_threads(what: str, large: Csr) -> None:
    x = torch.randn(large.num_cols, 101, requires_grad=True)
    bias = torch.randn(101, requires_grad=True)
    operators: dict[str, Callable[[], list[Tensor]]] = {
        "own mean": lambda: list(both_and_gradient(own_mean.own_mean(large, x, 0.4, KEY), x)),
        "bias and rectifier": lambda: list(
            torch.autograd.grad(bias_relu_(x * 1, bias).square().sum(), [x, bias])
        ),
    }
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(operators[what]())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("shape", [(0, 3), (5, 1), (1301, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bias_and_rectifier_are_the_reference_s(shape: tuple[int, int], dtype: torch.dtype) -> None:
    h = torch.randn(shape, dtype=dtype, requires_grad=True)
    bias = torch.randn(shape[1], dtype=dtype, requires_grad=True)
    grad = torch.randn(shape, dtype=dtype)
    found, expected = bias_relu_(h * 1, bias), plain_bias_relu(h * 1, bias)
    assert torch.equal(found, expected)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.1)
    for a, b in zip(
        torch.autograd.grad(found, [h, bias], grad),
        torch.autograd.grad(expected, [h, bias], grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_not_a_number_passes_the_rectifier() -> None:
    h = torch.tensor([[float("nan"), -1.0, 1.0]])
    out = bias_relu_(h.clone(), torch.zeros(3))
    assert out.isnan().tolist() == [[True, False, False]]
    to_h, to_bias = bias_relu_backward(out, torch.ones(1, 3))
    assert to_h.tolist() == [[1.0, 0.0, 1.0]]
    assert to_bias.tolist() == [1.0, 0.0, 1.0]


def test_shapes_that_do_not_fit_are_told() -> None:
    csr = Csr(torch.tensor([0, 1]), torch.tensor([1]), 2)
    with pytest.raises(ValueError, match=r"expected x \[2, F\]"):
        own_mean.own_mean(csr, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="probability"):
        own_mean.own_mean(csr, torch.zeros(2, 4), 1.0)
