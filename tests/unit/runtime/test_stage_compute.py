"""A stage that computes its activations again gives the same bits and keeps nothing meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.runtime.compute import StageCompute
from dtrain.runtime.inputs import MicrobatchInputs
from dtrain.scheduler.costmodel import CostModel, LayerShape

ROWS, WIDTH = 40, 6


class Layer(nn.Module):
    """Sees whether its graph is kept: its output's gradient function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept: list[bool] = []

    def forward(self, block: Any, state: Tensor, context: Any) -> Tensor:
        out = torch.dropout(torch.tanh(self.linear(state)), 0.5, True)
        self.kept.append(out.grad_fn is not None)
        return out


def compute(recompute: bool) -> tuple[StageCompute, list[Layer]]:
    torch.manual_seed(1)
    layers = [Layer(), Layer()]
    engine: Any = SimpleNamespace(
        parameters=[p for layer in layers for p in layer.parameters()],
        layer=lambda index: layers[index - 1],
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
    )
    shapes = [LayerShape("Layer", WIDTH, WIDTH)] * 3
    made = StageCompute(
        engine, range(1, 3), shapes, CostModel(), 5, is_last=True, recompute=recompute
    )
    return made, layers


def test_the_same_bits_and_nothing_kept() -> None:
    block: Any = SimpleNamespace(num_dst=ROWS, num_src=ROWS, nnz=ROWS)
    labels, rows = torch.arange(ROWS) % WIDTH, torch.arange(ROWS)
    inputs = MicrobatchInputs({1: block, 2: block}, None, labels, rows)
    results = []
    for recompute in (False, True):
        stage, layers = compute(recompute)
        received = [torch.randn(ROWS, WIDTH, generator=torch.manual_seed(m)) for m in range(2)]
        outs = [stage.forward(3, m, inputs, (received[m],), 2 * ROWS) for m in range(2)]
        assert all(kept is not recompute for layer in layers for kept in layer.kept)
        backs = [stage.backward(m, None) for m in range(2)]
        results.append((outs, backs, stage.grads, stage.losses))
    (outs, backs, grads, losses), other = results[0], results[1]
    for mine, theirs in zip((*outs, *backs), (*other[0], *other[1]), strict=True):
        assert torch.equal(mine[0], theirs[0])
    for m in range(2):
        for mine, theirs in zip(grads[m], other[2][m], strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)
    assert losses == other[3]
