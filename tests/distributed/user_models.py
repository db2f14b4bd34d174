"""A user's own model, as ``module:attribute``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.models.layer import LayerContext


class Noisy(nn.Module):
    """Keeps the first layer's rows beside the current ones, and draws from torch's generator."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width_in, width_out)

    def forward(self, block: Block, state: Any, ctx: LayerContext) -> Any:
        now, first = state if isinstance(state, tuple) else (state, None)
        mean = torch.zeros(block.num_dst, now.shape[1])
        for row in range(block.num_dst):
            begin, end = int(block.csr.indptr[row]), int(block.csr.indptr[row + 1])
            if end > begin:
                mean[row] = now[block.csr.indices[begin:end]].mean(0)
        out = self.mix(now[: block.num_dst] + mean)
        if ctx.training:
            out = nn.functional.dropout(out, 0.3)
        if first is None:
            return out, out.relu()
        return out, first[: block.num_dst] + out


class Head(Noisy):
    """The last layer: logits only."""

    def forward(self, block: Block, state: Any, ctx: LayerContext) -> Tensor:
        rows: Tensor = super().forward(block, state, ctx)[1]
        return rows


def noisy_model(config: ModelConfig, in_features: int, num_classes: int) -> list[nn.Module]:
    """A model whose layers hand on two tensors."""
    inner = [Noisy(num_classes, num_classes) for _ in range(config.layers - 2)]
    return [Noisy(in_features, num_classes), *inner, Head(num_classes, num_classes)]
