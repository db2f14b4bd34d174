"""Graph convolutional network: Kipf and Welling, "Semi-Supervised Classification with Graph
Convolutional Networks", ICLR 2017."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.dropout import dropout
from dtrain.kernels.spmm import spmm
from dtrain.models.layer import LayerContext, State
from dtrain.models.parts import Linear, Tail, rows_of, widths


class GcnLayer(nn.Module):
    """``H' = D^-1/2 (A + I) D^-1/2 dropout(H) W + b``, then the tail of a hidden layer.

    ``D`` are the degrees of ``A + I`` in the whole graph. Where a row holds a sample of a node's
    neighbours, its weights are scaled up by degree / sampled, so the sum stays unbiased.
    """

    def __init__(
        self, in_features: int, out_features: int, p: float, tail: Tail | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.p = p
        self.linear = Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.tail = tail

    def forward(self, block: Block, state: State, ctx: LayerContext) -> Tensor:
        """``state``: float or sparse [num_src, in_features]; returns [num_dst, out_features]."""
        rows = rows_of(state)
        x = dropout(rows, self.p, ctx.subkey(0), ctx.training)
        # The product runs on the narrower side; sparse rows would become dense by propagation.
        if isinstance(x, SparseRows) or self.out_features <= self.in_features:
            h = propagate(block, self.linear(x))
        else:
            h = self.linear(propagate(block, x.to(self.bias.dtype)))
        return h + self.bias if self.tail is None else self.tail(h, rows, self.bias)


def propagate(block: Block, x: Tensor) -> Tensor:
    """One product with the normalised adjacency. ``x``: [num_src, F]; returns [num_dst, F]."""
    edge, own = norm_weights(block, x.dtype)
    return torch.addcmul(spmm(block.csr, x, edge), own[:, None], x[: block.num_dst])


def norm_weights(block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights of the block's edges [nnz] and of its destinations' self edges [num_dst].

    ``w_uv = (d_v / row_v) / sqrt((d_u + 1) (d_v + 1))`` and ``1 / (d_v + 1)``, with ``d`` the
    in-degree in the whole graph and ``row_v`` the number of entries in v's row. Computed in
    float64, kept in the block's cache.
    """
    edge = block.cache.get(("gcn edge", dtype))
    own = block.cache.get(("gcn own", dtype))
    if edge is None or own is None:
        csr = block.csr
        root = (block.src_degree.double() + 1).rsqrt()
        row_root = root[: block.num_dst]
        counts = csr.row_counts()
        per_row = row_root * block.dst_degree() / counts.clamp(min=1)
        edge = (torch.repeat_interleave(per_row, counts) * root[csr.indices]).to(dtype)
        own = (row_root * row_root).to(dtype)
        block.cache["gcn edge", dtype] = edge
        block.cache["gcn own", dtype] = own
    return edge, own


def build(config: ModelConfig, in_features: int, num_classes: int) -> list[nn.Module]:
    """The layers of a GCN; ``dropout``, ``input_dropout``, ``residual``, ``norm`` and
    ``activation`` apply."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in widths(config, in_features, num_classes):
        tail = Tail(config, fan_in, fan_out) if len(layers) < config.layers - 1 else None
        layers.append(GcnLayer(fan_in, fan_out, config.dropout_of(len(layers)), tail))
    return layers
