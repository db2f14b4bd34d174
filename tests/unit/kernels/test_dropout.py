"""Dropout by key and position."""

from __future__ import annotations

import pytest
import torch

from dtrain.kernels.csr import Csr, SparseRows
from dtrain.kernels.dropout import dropout, reference
from dtrain.kernels.rng import derive_key, mix64

KEY = derive_key(7, 3, 2**40)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_reference_and_its_definition(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(37, 11, dtype=dtype)
    found = dropout(x, p, KEY)
    assert found.dtype == dtype
    torch.testing.assert_close(found, reference.dropout(x, p, KEY))
    kept = [mix64(KEY, i) >= int(p * 2.0**64) for i in range(x.numel())]
    assert (found != 0).flatten().tolist() == kept


def test_backward_has_the_same_mask() -> None:
    x = torch.randn(50, 20, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.3, KEY)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad, (out != 0) / torch.tensor(0.7, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.3, KEY), x[:4, :4])


def test_same_bits_for_any_number_of_threads() -> None:
    # Enough to be shared out, and no multiple of a vector.
    x = torch.randn(1501, 101)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(dropout(x, 0.3, KEY))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(runs[0], run) for run in runs[1:])
    torch.testing.assert_close(runs[0], reference.dropout(x, 0.3, KEY))


@pytest.mark.parametrize("p", [0.25, 0.6])
def test_share_mean_and_independence_of_keys(p: float) -> None:
    x = torch.ones(400_000)
    first, second = dropout(x, p, derive_key(1)), dropout(x, p, derive_key(2))
    # Five standard deviations of the share of n independent draws.
    bound = 5 * (p * (1 - p) / x.numel()) ** 0.5
    assert abs((first == 0).double().mean() - p) < bound
    assert abs(first.mean() - 1) < bound / (1 - p)
    both = ((first == 0) & (second == 0)).double().mean()
    assert abs(both - p * p) < 5 * (p * p * (1 - p * p) / x.numel()) ** 0.5
    neighbors = ((first[1:] == 0) & (first[:-1] == 0)).double().mean()
    assert abs(neighbors - p * p) < 5 * (p * p / x.numel()) ** 0.5


def test_sparse_rows_keep_their_pattern() -> None:
    csr = Csr(torch.tensor([0, 2, 3]), torch.tensor([0, 4, 1]), 5)
    rows = SparseRows(csr, torch.tensor([1.0, 2.0, 3.0]))
    out = dropout(rows, 0.5, KEY)
    assert out.csr is csr
    assert torch.equal(out.values, dropout(rows.values, 0.5, KEY))


def test_nothing_happens_outside_training_or_without_probability() -> None:
    x = torch.randn(5)
    assert dropout(x, 0.5, KEY, training=False) is x
    assert dropout(x, 0.0, KEY) is x


def test_empty_and_non_contiguous_input() -> None:
    assert dropout(torch.zeros(0, 4), 0.5, KEY).shape == (0, 4)
    x = torch.randn(6, 8)
    assert torch.equal(dropout(x.T.contiguous().T, 0.5, KEY), dropout(x, 0.5, KEY))


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_probability_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        dropout(torch.ones(3), p, KEY)
