"""Graph attention network: Velickovic et al., "Graph Attention Networks", ICLR 2018."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.kernels.dropout import dropout
from dtrain.kernels.gat import gat
from dtrain.models.layer import LayerContext, State
from dtrain.models.parts import Linear, Tail, rows_of


class GatLayer(nn.Module):
    """``h_v = sum_u softmax_u(leaky_relu(a_src . W x_u + a_dst . W x_v)) W x_u + b`` for each head,
    over the row of ``v`` and ``v`` itself (once, also where the graph has a self loop), then the
    tail of a hidden layer.

    Heads are joined (``[num_dst, heads * width]``) or, with ``average``, averaged. Dropout applies
    to the input with probability ``p`` and to the attention with ``attention_p``.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        heads: int,
        *,
        p: float,
        attention_p: float,
        average: bool = False,
        tail: Tail | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = width if average else heads * width
        self.width = width
        self.heads = heads
        self.p = p
        self.attention_p = attention_p
        self.average = average
        self.linear = Linear(in_features, heads * width, bias=False)
        self.src_attention = nn.Parameter(torch.empty(heads, width))
        self.dst_attention = nn.Parameter(torch.empty(heads, width))
        nn.init.xavier_uniform_(self.src_attention)
        nn.init.xavier_uniform_(self.dst_attention)
        self.bias = nn.Parameter(torch.zeros(self.out_features))
        self.tail = tail

    def forward(self, block: Block, state: State, ctx: LayerContext) -> Tensor:
        """``state``: float or sparse [num_src, in_features]; returns [num_dst, out_features]."""
        rows = rows_of(state)
        x = dropout(rows, self.p, ctx.subkey(0), ctx.training)
        projected = self.linear(x)
        out = gat(
            block.csr.with_self_entries(),
            projected.view(-1, self.heads, self.width),
            projected @ _per_head(self.src_attention),
            projected[: block.num_dst] @ _per_head(self.dst_attention),
            p=self.attention_p,
            key=ctx.subkey(1),
            training=ctx.training,
        )
        h = (out.mean(1) if self.average else out.flatten(1)) + self.bias
        return h if self.tail is None else self.tail(h, rows)


def _per_head(attention: Tensor) -> Tensor:
    """The matrix [H * D, H] that takes joined heads to each one's product with ``attention``.

    ``attention``: [H, D]. The product needs no array of the size of its input, as the elementwise
    one does.
    """
    heads, width = attention.shape
    eye = torch.eye(heads, dtype=attention.dtype, device=attention.device)
    return (attention[:, :, None] * eye[:, None, :]).reshape(heads * width, heads)


def build(config: ModelConfig, in_features: int, num_classes: int) -> list[nn.Module]:
    """The layers of a GAT: ``heads`` x ``hidden`` columns between layers, ``output_heads`` averaged
    at the end; ``dropout``, ``input_dropout`` and ``attention_dropout`` (else ``dropout``),
    ``residual``, ``norm`` and ``activation`` (the paper's is ``elu``) apply."""
    attention_p = config.dropout if config.attention_dropout is None else config.attention_dropout
    layers: list[nn.Module] = []
    fan_in, joined = in_features, config.heads * config.hidden
    for _ in range(config.layers - 1):
        tail = Tail(config, fan_in, joined)
        layers.append(
            GatLayer(
                fan_in,
                config.hidden,
                config.heads,
                p=config.dropout_of(len(layers)),
                attention_p=attention_p,
                tail=tail,
            )
        )
        fan_in = joined
    layers.append(
        GatLayer(
            fan_in,
            num_classes,
            config.output_heads,
            p=config.dropout_of(len(layers)),
            attention_p=attention_p,
            average=True,
        )
    )
    return layers
