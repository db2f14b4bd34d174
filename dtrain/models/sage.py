"""GraphSAGE: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
NeurIPS 2017."""

from __future__ import annotations

from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.dropout import dropout
from dtrain.kernels.spmm import spmm_max, spmm_mean
from dtrain.models.layer import LayerContext, State
from dtrain.models.parts import Linear, Rows, Tail, dense, head, rows_of, widths


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
        """``state``: float or sparse [num_src, in_features]; returns [num_dst, out_features].

        With the maximum, sparse rows are made dense: zeros take part in it.
        """
        rows = rows_of(state)
        x = dropout(rows, self.p, ctx.subkey(0), ctx.training)
        h: Tensor = self.own(head(x, block.num_dst)) + self._neighborhood(block, x)
        return h if self.tail is None else self.tail(h, rows)

    def _neighborhood(self, block: Block, x: Rows) -> Tensor:
        if self.aggregator == "max":
            values, _ = spmm_max(block.csr, dense(x).to(self.neighbor.weight.dtype))
            pooled: Tensor = self.neighbor(values)
            return pooled
        # A mean commutes with the linear map, so it runs on the narrower side.
        if isinstance(x, SparseRows) or self.out_features < self.in_features:
            return spmm_mean(block.csr, self.neighbor(x))
        mean = spmm_mean(block.csr, x.to(self.neighbor.weight.dtype))
        projected: Tensor = self.neighbor(mean)
        return projected


def build(config: ModelConfig, in_features: int, num_classes: int) -> list[nn.Module]:
    """The layers of a GraphSAGE; ``aggregator``, ``dropout``, ``input_dropout``, ``residual``,
    ``norm`` and ``activation`` apply."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in widths(config, in_features, num_classes):
        tail = Tail(config, fan_in, fan_out) if len(layers) < config.layers - 1 else None
        p = config.dropout_of(len(layers))
        layers.append(SageLayer(fan_in, fan_out, p, config.aggregator, tail))
    return layers
