"""GraphSAGE: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
NeurIPS 2017."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.kernels.dropout import dropout
from dtrain.kernels.own_mean import own_mean
from dtrain.kernels.rows.stored import StoredRows
from dtrain.kernels.spmm import spmm_max_values, spmm_mean
from dtrain.models.layer import LayerContext, Prepared, State
from dtrain.models.parts import Linear, Rows, Tail, dense, head, linear, rows_of, widths

_PRODUCTS = 16
"""Multiplications of a dense product in the time in which a number is read or written."""


class SageLayer(nn.Module):
    """``h_v = W_own x_v + W_neigh aggregate(x_u for u in the row of v) + b`` of ``dropout(x)``,
    then the tail of a hidden layer.

    ``aggregate`` is the mean or the elementwise maximum; over an empty row it is zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        p: float,
        aggregator: str = "mean",
        tail: Tail | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.p = p
        self.aggregator = aggregator
        self.own = Linear(in_features, out_features)
        self.neighbor = Linear(in_features, out_features, bias=False)
        self.tail = tail

    def forward(self, block: Block, state: State, ctx: LayerContext) -> Tensor:
        """``state``: float or sparse [num_src, in_features], or what :meth:`prepare` made of it;
        returns [num_dst, out_features].

        With the maximum, sparse rows are made dense: zeros take part in it.
        """
        bias = self.own.bias
        assert bias is not None
        rows: Rows
        if isinstance(state, Prepared):
            h, rows = self._projected(state.rows), state.rows[:, : self.in_features]
        else:
            rows = rows_of(state)
            h = self._combined(block, rows, ctx)
        return h + bias if self.tail is None else self.tail(h, rows, bias)

    def prepare(self, block: Block, x: Tensor | StoredRows, ctx: LayerContext) -> Prepared | None:
        """Own rows and means side by side, where the mean runs first and they are fewer than the
        sources' rows; not where the residual wants rows without dropout.

        As :meth:`dtrain.models.layer.PreparingLayer.prepare`.
        """
        wants_rows = self.p > 0 and self.tail is not None and self.tail.residual
        fewer = 2 * block.num_dst <= block.num_src
        if self.aggregator != "mean" or wants_rows or not (fewer and self.mean_first(block)):
            return None
        return Prepared(own_mean(block.csr, x, self.p, ctx.subkey(0), ctx.training))

    def _projected(self, both: Tensor) -> Tensor:
        # Own rows and means side by side are one product with the weights one below the other.
        weight = torch.cat([self.own.weight, self.neighbor.weight])
        return both.to(weight.dtype) @ weight

    def _combined(self, block: Block, rows: Rows, ctx: LayerContext) -> Tensor:
        """[num_dst, out_features], without the bias."""
        own, neighbor = self.own.weight, self.neighbor.weight
        key = ctx.subkey(0)
        if isinstance(rows, Tensor) and self.aggregator == "mean" and self.mean_first(block):
            return self._projected(
                own_mean(block.csr, rows.to(own.dtype), self.p, key, ctx.training)
            )
        x = dropout(rows, self.p, key, ctx.training)
        if self.aggregator == "max":
            values = spmm_max_values(block.csr, dense(x).to(neighbor.dtype))
            pooled = values @ neighbor
        else:
            pooled = spmm_mean(block.csr, linear(x, neighbor))
        return linear(head(x, block.num_dst), own) + pooled

    def mean_first(self, block: Block) -> bool:
        """Whether the mean runs before the linear map, with which it commutes, or after it.

        By the numbers that each way reads, writes and multiplies: a sampled block has hardly more
        edges than sources, so means of wide rows cost less than projecting all sources, while the
        edges of a whole graph had better carry the narrower rows.
        """
        fan_in, fan_out = self.in_features, self.out_features
        product = fan_in * fan_out / _PRODUCTS
        first = block.nnz * fan_in + block.num_dst * product
        after = block.nnz * fan_out + block.num_src * (fan_in + fan_out + product)
        return first <= after


def build(config: ModelConfig, in_features: int, num_classes: int) -> list[nn.Module]:
    """The layers of a GraphSAGE; ``aggregator``, ``dropout``, ``input_dropout``, ``residual``,
    ``norm`` and ``activation`` apply."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in widths(config, in_features, num_classes):
        tail = Tail(config, fan_in, fan_out) if len(layers) < config.layers - 1 else None
        p = config.dropout_of(len(layers))
        layers.append(SageLayer(fan_in, fan_out, p, config.aggregator, tail))
    return layers
