"""The built-in models in plain torch operations, as one program that runs without dtrain.

dtrain's own operators are custom ones that exist only where it is installed; these are the same
formulas by gathering and scattering over the edges. Sums run in another order, so results agree to
rounding, not to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.checkpoint.export.names import PlainModel

_SLOPE = 0.2


class GcnConv(nn.Module):
    """``D^-1/2 (A + I) D^-1/2 X W + b`` with the in-degrees of ``A + I``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """``x``: float [N, F]; ``src``, ``dst``: int64 [E]; returns [N, F_out]."""
        h = F.linear(x, self.get_buffer("weight"))
        ones = torch.ones_like(src, dtype=x.dtype)
        root = (_sum_by(ones, dst, x.shape[0]) + 1).rsqrt()
        messages = h[src] * (root[src] * root[dst])[:, None]
        own = h * (root * root)[:, None]
        return _sum_by(messages, dst, x.shape[0]) + own + self.get_buffer("bias")


class SageConv(nn.Module):
    """``W_own x_v + W_neigh aggregate(x_u) + b``; the aggregate of no neighbours is zero."""

    def __init__(self, neighbor: Tensor, bias: Tensor, own: Tensor, aggregator: str) -> None:
        super().__init__()
        self.register_buffer("neighbor", neighbor)
        self.register_buffer("bias", bias)
        self.register_buffer("own", own)
        self.aggregator = aggregator

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """As :meth:`GcnConv.forward`."""
        if self.aggregator == "max":
            target = dst[:, None].expand(-1, x.shape[1])
            pooled = torch.zeros_like(x).scatter_reduce(
                0, target, x[src], "amax", include_self=False
            )
        else:
            count = _sum_by(torch.ones_like(src, dtype=x.dtype), dst, x.shape[0])
            pooled = _sum_by(x[src], dst, x.shape[0]) / count.clamp(min=1)[:, None]
        neighbor = F.linear(pooled, self.get_buffer("neighbor"), self.get_buffer("bias"))
        return neighbor + F.linear(x, self.get_buffer("own"))


class GatConv(nn.Module):
    """Attention over a node's neighbours and the node itself, once whatever self loops say.

    Heads are joined, or averaged with ``average``.
    """

    def __init__(
        self, weight: Tensor, att_src: Tensor, att_dst: Tensor, bias: Tensor, *, average: bool
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("att_src", att_src)
        self.register_buffer("att_dst", att_dst)
        self.register_buffer("bias", bias)
        self.average = average

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """As :meth:`GcnConv.forward`."""
        attention = self.get_buffer("att_src")
        heads, width, count = attention.shape[1], attention.shape[2], x.shape[0]
        h = F.linear(x, self.get_buffer("weight")).view(-1, heads, width)
        score_src = (h * attention).sum(-1)
        score_dst = (h * self.get_buffer("att_dst")).sum(-1)
        own = F.leaky_relu(score_src + score_dst, _SLOPE)
        logits = F.leaky_relu(score_src[src] + score_dst[dst], _SLOPE)
        # Not left out but weighted with zero: the number of edges stays what it is.
        logits = logits.masked_fill((src == dst)[:, None], float("-inf"))
        largest = own.scatter_reduce(0, dst[:, None].expand(-1, heads), logits, "amax")
        weight, own_weight = torch.exp(logits - largest[dst]), torch.exp(own - largest)
        total = _sum_by(weight, dst, count) + own_weight
        summed = _sum_by(weight[:, :, None] * h[src], dst, count) + own_weight[:, :, None] * h
        out = summed / total[:, :, None]
        joined = out.mean(1) if self.average else out.flatten(1)
        return joined + self.get_buffer("bias")


class PlainNetwork(nn.Module):
    """A built-in model as it computes in evaluation: no dropout."""

    def __init__(self, model: PlainModel) -> None:
        super().__init__()
        self.convs = nn.ModuleList([_conv(model, i) for i in range(model.num_layers)])
        self.tails = nn.ModuleList([_Tail(model, i) for i in range(model.num_layers - 1)])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Logits float32 [N, classes] of all nodes.

        ``x``: float32 [N, F]; ``edge_index``: int64 [2, E], sources above destinations.
        """
        src, dst = edge_index[0], edge_index[1]
        for index, conv in enumerate(self.convs):
            h = conv(x, src, dst)
            x = self.tails[index](h, x) if index < len(self.tails) else h
        return x


class _Tail(nn.Module):
    """``activation(norm(h)) + residual(x)`` after a hidden layer."""

    def __init__(self, model: PlainModel, index: int) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = F.elu if model.activation == "elu" else F.relu
        self.residual = model.residual
        norm = [model.tensors.get(f"norms.{index}.{name}") for name in ("weight", "bias")]
        self.register_buffer("norm_weight", norm[0])
        self.register_buffer("norm_bias", norm[1])
        self.register_buffer("project", model.tensors.get(f"projects.{index}.weight"))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        if self.norm_weight is not None:
            weight, bias = self.get_buffer("norm_weight"), self.get_buffer("norm_bias")
            h = F.layer_norm(h, (h.shape[1],), weight, bias)
        h = self.activation(h)
        if not self.residual:
            return h
        return h + (x if self.project is None else F.linear(x, self.get_buffer("project")))


def _conv(model: PlainModel, index: int) -> nn.Module:
    def of(name: str) -> Tensor:
        return model.tensors[f"convs.{index}.{name}"]

    if model.name == "gcn":
        return GcnConv(of("lin.weight"), of("bias"))
    if model.name == "sage":
        return SageConv(of("lin_l.weight"), of("lin_l.bias"), of("lin_r.weight"), model.aggregator)
    return GatConv(
        of("lin.weight"),
        of("att_src"),
        of("att_dst"),
        of("bias"),
        average=index == model.num_layers - 1,
    )


def _sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums of rows with the same index. ``values``: [E, ...]; returns [count, ...]."""
    return values.new_zeros((count, *values.shape[1:])).index_add(0, index, values)


def trace(model: PlainModel) -> torch.export.ExportedProgram:
    """The program of a model: ``(x [N, F] float32, edge_index [2, E] int64) -> [N, classes]``.

    ``N`` and ``E`` are free, from 2 on: torch treats sizes of 0 and 1 as constants.
    """
    network = PlainNetwork(model).eval()
    example = (torch.zeros(5, model.in_features), torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1] * 7]))
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    with torch.no_grad(), warnings.catch_warnings():
        # Of torch's own making while it traces.
        warnings.simplefilter("ignore")
        return torch.export.export(
            network, example, dynamic_shapes={"x": {0: nodes}, "edge_index": {1: edges}}
        )
