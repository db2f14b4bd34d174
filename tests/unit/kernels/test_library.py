"""The product as a registered operator: eager, compiled and exported, with dynamic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from dtrain.kernels import library
from dtrain.kernels.csr import Csr
from dtrain.kernels.spmm import spmm


def _arguments(csr: Csr, width: int) -> list[Tensor]:
    transposed, perm = csr.transpose()
    x = torch.randn(csr.num_cols, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(csr.nnz, dtype=torch.float64, requires_grad=True)
    return [csr.indptr, csr.indices, transposed.indptr, transposed.indices, perm, x, weight]


@pytest.mark.parametrize("graph", ["square"], indirect=True)
def test_schema_shapes_and_gradients_are_sound(graph: Csr) -> None:
    library.operators()
    torch.library.opcheck(torch.ops.dtrain.spmm.default, tuple(_arguments(graph, 3)))


def test_equal_to_the_plain_function(graph: Csr) -> None:
    x, weight = _arguments(graph, 3)[5:]
    found, expected = library.spmm(graph, x, weight), spmm(graph, x, weight)
    assert torch.equal(found, expected)
    if found.requires_grad and found.numel():
        grad = torch.randn_like(found)
        for a, b in zip(
            torch.autograd.grad(found, (x, weight), grad),
            torch.autograd.grad(expected, (x, weight), grad),
            strict=True,
        ):
            assert torch.equal(a, b)


class _Model(nn.Module):
    def forward(self, *arguments: Tensor) -> Tensor:
        out: Tensor = torch.ops.dtrain.spmm(*arguments)
        return torch.relu(out) + 1


def test_exported_with_dynamic_sizes(large: Csr) -> None:
    library.operators()
    arguments = tuple(a.detach() for a in _arguments(large, 5))
    rows, columns, entries, width = (Dim(n, min=3) for n in ("rows", "columns", "entries", "width"))
    dynamic = (
        {0: rows}, {0: entries}, {0: columns + 1}, {0: entries}, {0: entries},
        {0: columns, 1: width}, {0: entries},
    )  # fmt: skip
    program = torch.export.export(_Model(), arguments, dynamic_shapes=(dynamic,)).module()
    other = tuple(a.detach() for a in _arguments(large.head(500), 9))
    for inputs in (arguments, other):
        assert torch.equal(program(*inputs), _Model()(*inputs))
