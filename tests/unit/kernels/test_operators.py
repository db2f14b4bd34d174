"""Every operator against its reference: values, gradients, and the same bits every time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from dtrain.kernels.bias_relu import bias_relu_
from dtrain.kernels.csr import Csr, SparseRows
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.edge_softmax import reference as softmax_reference
from dtrain.kernels.gat import gat
from dtrain.kernels.gat import reference as gat_reference
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.maxk import maxk, spmm_maxk
from dtrain.kernels.maxk import reference as maxk_reference
from dtrain.kernels.rows import gather_rows, scatter_rows, segment_reduce
from dtrain.kernels.sddmm import reference as sddmm_reference
from dtrain.kernels.sddmm import sddmm_add, sddmm_dot
from dtrain.kernels.sparse_linear import reference as linear_reference
from dtrain.kernels.sparse_linear import sparse_linear
from dtrain.kernels.spmm import reference as spmm_reference
from dtrain.kernels.spmm import spmm, spmm_max, spmm_mean, spmm_min

Operator = Callable[..., Tensor]

ATTENTION = {"slope": 0.2, "p": 0.4, "key": 2**63 + 12345}


def _spmm_arguments(csr: Csr, width: int, dtype: torch.dtype) -> list[Tensor]:
    return [_random(csr.num_cols, width, dtype=dtype), _random(csr.nnz, dtype=dtype)]


def _both_ends(csr: Csr, width: int, dtype: torch.dtype) -> list[Tensor]:
    return [_random(n, width, dtype=dtype) for n in (csr.num_rows, csr.num_cols)]


def _gat_arguments(csr: Csr, width: int, dtype: torch.dtype) -> list[Tensor]:
    heads = 3
    return [
        _random(csr.num_cols, heads, width, dtype=dtype),
        _random(csr.num_cols, heads, dtype=dtype),
        _random(csr.num_rows, heads, dtype=dtype),
    ]


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    values = torch.randn(*shape, dtype=dtype, generator=generator, device="cpu")
    return values.to(torch.get_default_device()).requires_grad_()


def _largest(x: Tensor) -> Tensor:
    """Zeros but for the elements that :func:`maxk` keeps, differentiable by autograd."""
    columns = maxk_reference.choose(x.detach(), 1 + x.shape[1] // 3).long()
    return torch.zeros_like(x).scatter(1, columns, x.gather(1, columns))


OPERATORS: dict[str, tuple[Operator, Operator, Callable[..., list[Tensor]]]] = {
    "weighted sum": (spmm, spmm_reference.spmm, _spmm_arguments),
    "sum": (
        lambda csr, x: spmm(csr, x),
        lambda csr, x: spmm_reference.spmm(csr, x, None),
        lambda *a: _spmm_arguments(*a)[:1],
    ),
    "mean": (spmm_mean, spmm_reference.spmm_mean, lambda *a: _spmm_arguments(*a)[:1]),
    "max": (
        lambda csr, x: spmm_max(csr, x)[0],
        lambda csr, x: spmm_reference.spmm_extreme(csr, x, largest=True)[0],
        lambda *a: _spmm_arguments(*a)[:1],
    ),
    "min": (
        lambda csr, x: spmm_min(csr, x)[0],
        lambda csr, x: spmm_reference.spmm_extreme(csr, x, largest=False)[0],
        lambda *a: _spmm_arguments(*a)[:1],
    ),
    "sddmm": (sddmm_dot, sddmm_reference.sddmm_dot, _both_ends),
    "sddmm of sums": (sddmm_add, sddmm_reference.sddmm_add, _both_ends),
    "gat": (
        lambda csr, *a: gat(csr, *a),
        lambda csr, *a: gat_reference.forward(csr, *a, Attention(0.2, 0.0, 0))[0],
        _gat_arguments,
    ),
    "gat with dropout": (
        lambda csr, *a: gat(csr, *a, **ATTENTION),
        lambda csr, *a: gat_reference.forward(csr, *a, Attention(**ATTENTION))[0],
        _gat_arguments,
    ),
    "edge softmax": (
        edge_softmax,
        softmax_reference.forward,
        lambda csr, width, dtype: [_random(csr.nnz, width, dtype=dtype)],
    ),
    "maxk": (
        lambda csr, x, weight: spmm_maxk(csr, maxk(x, 1 + x.shape[1] // 3), weight),
        lambda csr, x, weight: spmm_reference.spmm(csr, _largest(x), weight),
        _spmm_arguments,
    ),
    "scattered and gathered rows": (
        lambda csr, x: scatter_rows(gather_rows(x, csr.indices), csr.row_of_entry(), csr.num_rows),
        lambda csr, x: spmm_reference.spmm(csr, x, None),
        lambda *a: _spmm_arguments(*a)[:1],
    ),
    "sparse linear": (
        lambda csr, w, values: sparse_linear(SparseRows(csr, values), w),
        lambda csr, w, values: linear_reference.sparse_linear(SparseRows(csr, values), w),
        _spmm_arguments,
    ),
}
SMALL = ["square", "empty rows", "one node", "self loops", "duplicates", "no edges", "no rows"]
EACH = pytest.mark.parametrize("name", list(OPERATORS))


def _with_gradients(operator: Operator, csr: Csr, arguments: list[Tensor]) -> list[Tensor]:
    out = operator(csr, *arguments)
    if not out.requires_grad:
        return [out]
    weights = torch.cos(torch.arange(out.numel())).bfloat16().to(out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), arguments)]


@EACH
@pytest.mark.parametrize("width", [1, 7])
def test_equals_reference_in_float64(name: str, width: int, graph: Csr) -> None:
    _compare(name, width, graph)


@EACH
@pytest.mark.parametrize("graph", ["random", "star"], indirect=True)
def test_rows_of_many_vectors_and_a_part_equal_the_reference(name: str, graph: Csr) -> None:
    # 245 columns of float64 are tiles of 16, 8, 4 and 2 vectors and 5 lanes of one more.
    _compare(name, 245, graph)


def _compare(name: str, width: int, graph: Csr) -> None:
    operator, reference, make = OPERATORS[name]
    arguments = make(graph, width, torch.float64)
    found = _with_gradients(operator, graph, arguments)
    expected = _with_gradients(reference, graph, arguments)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@EACH
@pytest.mark.parametrize("graph", SMALL, indirect=True)
def test_gradients_are_those_of_finite_differences(name: str, graph: Csr) -> None:
    operator, _, make = OPERATORS[name]
    assert gradcheck(lambda *a: operator(graph, *a), make(graph, 3, torch.float64))


@EACH
def test_same_bits_every_run_and_for_any_number_of_threads(name: str, large: Csr) -> None:
    operator, reference, make = OPERATORS[name]
    arguments = make(large, 20, torch.float32)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 1, 2):
            torch.set_num_threads(count)
            runs.append(_with_gradients(operator, large, arguments))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))
    expected = _with_gradients(reference, large, arguments)
    for a, b in zip(runs[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@EACH
def test_bfloat16_is_computed_in_float32(name: str, graph: Csr) -> None:
    operator, _, make = OPERATORS[name]
    narrow = [a.detach().bfloat16().requires_grad_() for a in make(graph, 8, torch.float32)]
    wide = [a.detach().float().requires_grad_() for a in narrow]
    found = _with_gradients(operator, graph, narrow)
    expected = _with_gradients(operator, graph, wide)
    assert all(a.dtype == torch.bfloat16 for a in found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.03, atol=0.05)


@pytest.mark.parametrize("graph", ["random", "star"], indirect=True)
def test_more_heads_than_a_vector_of_them(graph: Csr) -> None:
    # 11 heads: one full group of 8 and 3 of the next.
    arguments = [
        _random(graph.num_cols, 11, 5, dtype=torch.float64),
        _random(graph.num_cols, 11, dtype=torch.float64),
        _random(graph.num_rows, 11, dtype=torch.float64),
    ]
    for p in (0.0, 0.4):
        options = ATTENTION | {"p": p}
        found = _with_gradients(lambda *a: gat(*a, **options), graph, arguments)  # noqa: B023
        reference = Attention(**options)
        expected = _with_gradients(
            lambda *a: gat_reference.forward(*a, reference)[0],  # noqa: B023
            graph,
            arguments,
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_rows_do_not_depend_on_the_rows_around_them(large: Csr) -> None:
    x, weight = _spmm_arguments(large, 16, torch.float32)
    full = spmm(large, x, weight)
    head = large.head(700)
    assert torch.equal(spmm(head, x, weight[: head.nnz]), full[:700])


def test_maximum_says_where_it_came_from_and_takes_the_first_of_equals() -> None:
    csr = Csr(torch.tensor([0, 3, 3]), torch.tensor([2, 0, 1]), 3)
    x = torch.tensor([[5.0, -1.0], [5.0, -3.0], [4.0, -2.0]])
    for values, argument in (spmm_max(csr, x), spmm_reference.spmm_extreme(csr, x, largest=True)):
        assert values.tolist() == [[5.0, -1.0], [0.0, 0.0]]
        assert argument.tolist() == [[1, 1], [-1, -1]]


def test_written_out_backward_passes_for_other_devices(graph: Csr) -> None:
    x = _spmm_arguments(graph, 5, torch.float64)[0]
    values, argument = spmm_max(graph, x)
    grad = torch.randn(values.shape, dtype=torch.float64)
    (expected,) = torch.autograd.grad(values, x, grad)
    found = spmm_reference.spmm_extreme_backward(graph, grad, argument)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    arguments, attention = _gat_arguments(graph, 5, torch.float64), Attention(**ATTENTION)
    out, kept = gat_reference.forward(graph, *arguments, attention)
    grad = torch.randn(out.shape, dtype=torch.float64)
    all_expected = torch.autograd.grad(out, arguments, grad)
    with torch.no_grad():
        all_found = gat_reference.backward(graph, tuple(arguments), kept, grad, attention)
    for a, b in zip(all_found, all_expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_large_scores_do_not_overflow() -> None:
    csr = Csr(torch.tensor([0, 2]), torch.tensor([0, 1]), 2)
    x = torch.tensor([[[1.0]], [[3.0]]])
    out = gat(csr, x, torch.tensor([[500.0], [500.0]]), torch.tensor([[500.0]]))
    assert out.item() == 2.0


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_comes_out_as_in_the_reference(value: str, dtype: torch.dtype) -> None:
    csr = Csr(torch.tensor([0, 3, 4]), torch.tensor([0, 1, 2, 0]), 3)
    scores = torch.tensor([[0.0, 1.0], [float(value), 2.0], [1.0, 3.0]], dtype=dtype)
    edges, x = scores[csr.indices], torch.ones(3, 2, 5, dtype=dtype)
    home = torch.zeros(2, 2, dtype=dtype)
    attention = Attention(0.2, 0.0, 0)
    for found, expected in (
        (edge_softmax(csr, edges), softmax_reference.forward(csr, edges)),
        (
            gat(csr, x, scores, home),
            gat_reference.forward(csr, x, scores, home, attention)[0],
        ),
    ):
        torch.testing.assert_close(found, expected, equal_nan=True)
        assert found.isnan().any() == (value != "-inf")


@EACH
def test_strided_structure_is_taken(name: str, large: Csr) -> None:
    operator, _, make = OPERATORS[name]
    arguments = make(large, 5, torch.float32)
    pairs = torch.stack([large.indices, torch.zeros_like(large.indices)], 1)
    pointers = torch.stack([large.indptr, torch.zeros_like(large.indptr)], 1)
    strided = Csr(pointers[:, 0], pairs[:, 0], large.num_cols)
    found, expected = (_with_gradients(operator, c, arguments) for c in (strided, large))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_views_with_gaps_are_taken(large: Csr) -> None:
    heads = [a.detach() for a in _gat_arguments(large, 4, torch.float64)]
    gaps = [a.transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for a in heads]
    plain = [a.requires_grad_() for a in heads]
    for a, b in zip(
        _with_gradients(gat, large, gaps), _with_gradients(gat, large, plain), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("operator", [spmm, spmm_mean, spmm_max])
def test_wrong_shapes_are_refused(operator: Operator, large: Csr) -> None:
    with pytest.raises(ValueError, match=r"expected x \[3000, F\]"):
        operator(large, torch.zeros(5, 3))


def test_wrong_weights_and_scores_are_refused(large: Csr) -> None:
    x = torch.zeros(large.num_cols, 2)
    with pytest.raises(ValueError, match="expected weight"):
        spmm(large, x, torch.zeros(3))
    with pytest.raises(ValueError, match="gat: expected x"):
        gat(large, x[:, None], torch.zeros(large.num_cols, 2), torch.zeros(large.num_rows, 1))
    with pytest.raises(ValueError, match="sddmm_dot: expected a"):
        sddmm_dot(large, x[:5], x)
    for h, bias in ((x, x[0, :1]), (x, x[:1]), (x[0], x[0])):
        with pytest.raises(ValueError, match="bias_relu_: expected h"):
            bias_relu_(h, bias)
    for a, b in ((x[:5], x), (x, x[:, :1]), (x, x.double()), (x[:, 0], x)):
        with pytest.raises(ValueError, match="sddmm_add: expected a"):
            sddmm_add(large, a, b)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_segments_are_reduced(reduce: str) -> None:
    values = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]])
    found = segment_reduce(values, torch.tensor([0, 2, 2, 3]), reduce)
    expected = getattr(
        values[:2], "amax" if reduce == "max" else reduce if reduce != "min" else "amin"
    )(0)
    assert torch.equal(found, torch.stack([expected, torch.zeros(2), values[2]]))


def test_maxk_takes_the_first_of_equals_and_wide_rows() -> None:
    rows = maxk(torch.tensor([[1.0, 3.0, 3.0, 3.0], [-1.0, -2.0, -3.0, -4.0]]), 2)
    assert rows.columns.tolist() == [[1, 2], [0, 1]]
    wide = torch.randn(5, 300)
    rows = maxk(wide, 7)
    assert rows.columns.dtype == torch.int32
    assert torch.equal(rows.columns, maxk_reference.choose(wide, 7))
    assert torch.equal(rows.to_dense() != 0, wide >= wide.topk(7).values[:, -1:])
