"""Registered operators: sound for torch, equal to the plain ones, compiled and exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional

from dtrain.kernels import dispatch, library
from dtrain.kernels.bias_relu import bias_relu_
from dtrain.kernels.csr import Csr, SparseRows
from dtrain.kernels.dropout import dropout
from dtrain.kernels.edge_softmax import edge_softmax
from dtrain.kernels.gat import gat
from dtrain.kernels.library import Pattern
from dtrain.kernels.maxk import maxk, spmm_maxk
from dtrain.kernels.own_mean import own_mean
from dtrain.kernels.rows import gather_rows, scatter_rows, segment_reduce
from dtrain.kernels.sddmm import sddmm_add, sddmm_dot
from dtrain.kernels.spmm import spmm, spmm_max, spmm_mean, spmm_min

KEY = 2**63 + 12345
Function = Callable[..., Any]


def _x(csr: Csr) -> Tensor:
    return torch.randn(csr.num_cols, 3, dtype=torch.float64)


def _both_ends(csr: Csr) -> list[Tensor]:
    return [torch.randn(n, 3, dtype=torch.float64) for n in (csr.num_rows, csr.num_cols)]


def _weighted(csr: Csr) -> list[Tensor]:
    return [_x(csr), torch.randn(csr.nnz, dtype=torch.float64)]


def _gat_arguments(csr: Csr) -> list[Tensor]:
    shapes = ((csr.num_cols, 2, 3), (csr.num_cols, 2), (csr.num_rows, 2))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


# Each as it is here, as it is without a registration, and what it takes besides the pattern.
CASES: dict[str, tuple[Function, Function, Callable[[Csr], list[Tensor]]]] = {
    "spmm": (library.spmm, spmm, lambda csr: [_x(csr)]),
    "weighted spmm": (library.spmm, spmm, _weighted),
    "spmm_mean": (library.spmm_mean, spmm_mean, lambda csr: [_x(csr)]),
    "spmm_max": (library.spmm_max, spmm_max, lambda csr: [_x(csr)]),
    "spmm_min": (library.spmm_min, spmm_min, lambda csr: [_x(csr)]),
    "sddmm_dot": (library.sddmm_dot, sddmm_dot, _both_ends),
    "sddmm_add": (library.sddmm_add, sddmm_add, _both_ends),
    "edge_softmax": (
        library.edge_softmax,
        edge_softmax,
        lambda csr: [torch.randn(csr.nnz, 3, dtype=torch.float64)],
    ),
    "gat": (library.gat, gat, _gat_arguments),
    "gat with dropout": (
        lambda *a: library.gat(*a, slope=0.1, p=0.4, key=KEY),
        lambda *a: gat(*a, slope=0.1, p=0.4, key=KEY),
        _gat_arguments,
    ),
    "dropout": (
        lambda csr, x: library.dropout(x, 0.3, KEY),
        lambda csr, x: dropout(x, 0.3, KEY),
        lambda csr: [_x(csr)],
    ),
    "dropout of sparse rows": (
        lambda csr, v: library.dropout(SparseRows(csr, v), 0.3, KEY).values,
        lambda csr, v: dropout(SparseRows(csr, v), 0.3, KEY).values,
        lambda csr: _weighted(csr)[1:],
    ),
    "own_mean": (
        lambda csr, x: library.own_mean(csr, x, 0.3, KEY),
        lambda csr, x: own_mean(csr, x, 0.3, KEY),
        lambda csr: [_x(csr)],
    ),
    "bias_relu": (
        lambda csr, h, bias: library.bias_relu(h * 1, bias),
        lambda csr, h, bias: bias_relu_(h * 1, bias),
        lambda csr: [_x(csr), torch.randn(3, dtype=torch.float64)],
    ),
    "maxk": (
        lambda csr, x: library.maxk(x, 2).values,
        lambda csr, x: maxk(x, 2).values,
        lambda csr: [_x(csr)],
    ),
    "spmm_maxk": (
        lambda csr, x: library.spmm_maxk(csr, library.maxk(x, 2)),
        lambda csr, x: spmm_maxk(csr, maxk(x, 2)),
        lambda csr: [_x(csr)],
    ),
    "weighted spmm_maxk": (
        lambda csr, x, weight: library.spmm_maxk(csr, library.maxk(x, 2), weight),
        lambda csr, x, weight: spmm_maxk(csr, maxk(x, 2), weight),
        _weighted,
    ),
    "gather_rows": (
        lambda csr, x: library.gather_rows(x, csr.indices),
        lambda csr, x: gather_rows(x, csr.indices),
        lambda csr: [_x(csr)],
    ),
    "scatter_rows": (
        lambda csr, v: library.scatter_rows(v, csr.indices, csr.num_cols),
        lambda csr, v: scatter_rows(v, csr.indices, csr.num_cols),
        lambda csr: [torch.randn(csr.nnz, 3, dtype=torch.float64)],
    ),
    **{
        f"segment_{how}": (
            lambda csr, v, how=how: library.segment_reduce(v, csr.indptr, how),
            lambda csr, v, how=how: segment_reduce(v, csr.indptr, how),
            lambda csr: [torch.randn(csr.nnz, 3, dtype=torch.float64)],
        )
        for how in ("sum", "mean", "max", "min")
    },
}


def _results(function: Function, csr: Csr, inputs: list[Tensor]) -> list[Tensor]:
    """What it gives, and the gradients of what has one."""
    found = function(csr, *inputs)
    found = list(found) if isinstance(found, tuple) else [found]
    assert [t.requires_grad for t in found] == [t.is_floating_point() for t in found]
    grad = torch.cos(torch.arange(found[0].numel())).to(found[0].dtype).view(found[0].shape)
    return [*found, *torch.autograd.grad(found[0], inputs, grad)]


EACH = pytest.mark.parametrize("name", list(CASES))


@EACH
def test_equal_to_the_plain_function(name: str, graph: Csr) -> None:
    _compare(name, torch.float64, graph)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("graph", ["random"], indirect=True)
def test_equal_to_the_plain_function_in_other_types(
    name: str, dtype: torch.dtype, graph: Csr
) -> None:
    _compare(name, dtype, graph)


@pytest.mark.parametrize("name", ["gat with dropout", "own_mean", "spmm_max", "bias_relu"])
@pytest.mark.parametrize("graph", ["random"], indirect=True)
def test_equal_on_a_device_without_kernels_of_its_own(
    name: str, graph: Csr, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "kind_of", lambda device_type: "reference")
    registered, plain, make = CASES[name]
    inputs = [t.requires_grad_() for t in make(graph)]
    found, expected = (_results(function, graph, inputs) for function in (registered, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _compare(name: str, dtype: torch.dtype, graph: Csr) -> None:
    registered, plain, make = CASES[name]
    inputs = [t.to(dtype).requires_grad_() for t in make(graph)]
    found, expected = (_results(function, graph, inputs) for function in (registered, plain))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _maxk_parts(csr: Csr) -> list[Tensor]:
    rows = maxk(_x(csr), 2)
    return [rows.values, rows.columns]


# The registered operators themselves, with what they take besides the pattern, if that.
DIRECT: dict[str, tuple[str, bool, Callable[[Csr], list[Any]]]] = {
    "spmm": ("spmm", True, lambda csr: [_x(csr), None]),
    "weighted spmm": ("spmm", True, _weighted),
    "spmm_mean": ("spmm_mean", True, lambda csr: [_x(csr)]),
    "spmm_max": ("spmm_max", True, lambda csr: [_x(csr)]),
    "spmm_min": ("spmm_min", True, lambda csr: [_x(csr)]),
    "sddmm_dot": ("sddmm_dot", True, _both_ends),
    "sddmm_add": ("sddmm_add", True, _both_ends),
    "gat": ("gat", True, lambda csr: [*_gat_arguments(csr), 0.1, 0.4, library.signed(KEY), True]),
    "gat without gradients": (
        "gat",
        True,
        lambda csr: [*_gat_arguments(csr), 0.1, 0.0, 0, False],
    ),
    "dropout": ("dropout", False, lambda csr: [_x(csr), 0.3, library.signed(KEY)]),
    "own_mean": ("own_mean", True, lambda csr: [_x(csr), 0.3, library.signed(KEY)]),
    "bias_relu": (
        "bias_relu",
        False,
        lambda csr: [_x(csr), torch.randn(3, dtype=torch.float64)],
    ),
    "maxk": ("maxk", False, lambda csr: [_x(csr), 2]),
    "spmm_maxk": (
        "spmm_maxk",
        True,
        lambda csr: [*_maxk_parts(csr), _weighted(csr)[1], 3],
    ),
    "edge_softmax": (
        "edge_softmax",
        False,
        lambda csr: [csr.indptr, csr.indices, torch.randn(csr.nnz, 3, dtype=torch.float64)],
    ),
    "gather_rows": ("gather_rows", False, lambda csr: [_x(csr), csr.indices]),
    "scatter_rows": (
        "scatter_rows",
        False,
        lambda csr: [torch.randn(csr.nnz, 3, dtype=torch.float64), csr.indices, csr.num_cols],
    ),
    "segment_of_row": ("segment_of_row", False, lambda csr: [csr.indptr, csr.nnz]),
}


@pytest.mark.parametrize("name", list(DIRECT))
@pytest.mark.parametrize("graph", ["square"], indirect=True)
def test_schema_shapes_and_gradients_are_sound(name: str, graph: Csr) -> None:
    operator, pattern, make = DIRECT[name]
    given = make(graph)
    for tensor in given:
        if isinstance(tensor, Tensor) and name != "gat without gradients":
            tensor.requires_grad_(tensor.is_floating_point())
    given = [*Pattern.of(graph), *given] if pattern else given
    torch.library.opcheck(getattr(library.operators(), operator).default, tuple(given))


class _Network(nn.Module):
    """Attention made of its parts, then a layer of GraphSAGE."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(5, 2)
        self.linear = nn.Linear(10, 4, bias=False)
        self.bias = nn.Parameter(torch.ones(4))


class _OfTensors(_Network):
    def forward(self, *given: Any) -> Tensor:
        *structure, x, key = given
        pattern, ops = Pattern(*structure), torch.ops.dtrain
        a, b = self.scores(x).split(1, dim=1)
        scores = ops.sddmm_add(*pattern, a[: pattern.num_rows], b)
        shares = ops.edge_softmax(*pattern[:2], functional.leaky_relu(scores, 0.2))
        h = ops.spmm(*pattern, x, shares[:, 0])
        h = self.linear(ops.own_mean(*pattern, h, 0.3, key))
        activated: Tensor = ops.bias_relu(h, self.bias)
        return activated


def test_exported_with_dynamic_sizes(large: Csr, small: Csr) -> None:
    library.operators()
    network = _OfTensors()
    nodes, entries = (Dim(name, min=3) for name in ("nodes", "entries"))
    sizes = {
        "given": (
            {0: nodes + 1}, {0: entries}, {0: nodes + 1}, {0: entries}, {0: entries}, {0: nodes},
            Dim.DYNAMIC,
        )
    }  # fmt: skip
    first = (*Pattern.of(large), torch.randn(large.num_cols, 5), 7)
    program = torch.export.export(network, first, dynamic_shapes=sizes).module()
    other = (*Pattern.of(small), torch.randn(small.num_cols, 5), library.signed(KEY))
    for inputs in (first, other):
        assert torch.equal(program(*inputs), network(*inputs))


class _OfPatterns(_Network):
    def forward(self, csr: Csr, x: Tensor, key: int) -> Tensor:
        a, b = self.scores(x).split(1, dim=1)
        scores = library.sddmm_add(csr, a[: csr.num_rows], b)
        h = library.spmm(csr, x, library.edge_softmax(csr, scores)[:, 0])
        # Nothing is used more than twice: gradients of three uses are added in any order.
        h = h + library.gat(csr, h[:, None], a, b[: csr.num_rows], p=0.2, key=key)[:, 0]
        h = h + library.spmm_max(csr, h)[0]
        h = h + library.segment_reduce(library.gather_rows(h, csr.indices), csr.indptr, "mean")
        h = h + library.spmm_maxk(csr, library.maxk(h, 2))
        h = h + library.spmm_mean(csr, h)
        h = library.own_mean(csr, library.dropout(h, 0.1, key), 0.3, key)
        return library.bias_relu(self.linear(h), self.bias)


def test_compiled_for_any_size_with_gradients(large: Csr, small: Csr) -> None:
    library.operators()
    torch.compiler.reset()
    network = _OfPatterns()
    compiled = torch.compile(network, backend="aot_eager", dynamic=True, fullgraph=True)

    def compare(csr: Csr, key: int) -> None:
        csr.transpose()
        x = torch.randn(csr.num_cols, 5, requires_grad=True)
        found, expected = (
            [out, *torch.autograd.grad(out.square().sum(), [x, *network.parameters()])]
            for out in (compiled(csr, x, key), network(csr, x, key))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    compare(large, 7)
    with torch.compiler.set_stance("fail_on_recompile"):
        compare(small, 9)
        compare(large, 2**62)
    torch.compiler.reset()


def test_what_does_not_fit_is_refused(large: Csr) -> None:
    x = torch.zeros(large.num_cols, 2)
    scores = torch.zeros(large.num_cols, 2, requires_grad=True)
    with pytest.raises(ValueError, match="expected x"):
        library.spmm(large, x[1:])
    with pytest.raises(ValueError, match="segments of 3 rows"):
        library.segment_reduce(x[:3], torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="probability"):
        library.dropout(x, 1.0, KEY)
    with pytest.raises(ValueError, match="bias_relu: expected h"):
        library.bias_relu(x, torch.zeros(1))
    numbers = (0.2, 0.0, 0, False)
    structure, ops = Pattern.of(large), library.operators()
    with pytest.raises(ValueError, match="float32 or float64"):
        ops.gat(*structure, x[:, :, None].bfloat16(), x, x, *numbers)
    out, _, _ = ops.gat(*structure, x[:, :, None], scores, x, *numbers)
    with pytest.raises(RuntimeError, match="with_grad"):
        out.sum().backward()
