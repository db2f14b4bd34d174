"""What the built-in layers are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.kernels.bias_relu import bias_relu_
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.sparse_linear import sparse_linear
from dtrain.models.layer import Prepared, State

Rows = Tensor | SparseRows


class Linear(nn.Module):
    """``x @ weight + bias`` for dense or sparse rows.

    ``weight``: [in_features, out_features], Glorot uniform (Glorot and Bengio, AISTATS 2010);
    ``bias``: [out_features], zeros. Floating input of another type is cast to the weight's.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.xavier_uniform_(self.weight)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Rows) -> Tensor:
        """``x``: float [N, in_features]; returns [N, out_features]."""
        if self.bias is None:
            return linear(x, self.weight)
        if isinstance(x, SparseRows):
            return sparse_linear(x, self.weight) + self.bias
        return torch.addmm(self.bias, x.to(self.weight.dtype), self.weight)


class Tail(nn.Module):
    """The end of a hidden layer: normalisation, activation, and what the residual adds.

    ``activation(norm(h)) + residual(x)``, with ``x`` the layer's own input for the destinations,
    itself where the widths agree and else through a linear map. ``None`` parts are left out.
    """

    def __init__(self, config: ModelConfig, in_features: int, out_features: int) -> None:
        super().__init__()
        self.activation = F.elu if config.activation == "elu" else F.relu
        self.norm = nn.LayerNorm(out_features) if config.norm == "layer" else None
        self.residual = config.residual
        self.project = None
        if config.residual and in_features != out_features:
            self.project = Linear(in_features, out_features, bias=False)

    def forward(self, h: Tensor, x: Rows, bias: Tensor | None = None) -> Tensor:
        """``h``: float [num_dst, out_features]; ``x``: [at least num_dst, in_features].

        ``bias``: [out_features], to be added to ``h`` first, which may then be written over, as
        :func:`~dtrain.kernels.bias_relu.bias_relu_` says.
        """
        if bias is not None and self.norm is None and self.activation is F.relu:
            h = bias_relu_(h, bias)
        else:
            h = h if bias is None else h + bias
            h = self.activation(h if self.norm is None else self.norm(h))
        if not self.residual:
            return h
        own = head(x, h.shape[0])
        if self.project is not None:
            own = self.project(own)
        return h + dense(own).to(h.dtype)


def linear(x: Rows, weight: Tensor) -> Tensor:
    """``x @ weight``, dense input cast to the weight's type; returns [N, out_features]."""
    return sparse_linear(x, weight) if isinstance(x, SparseRows) else x.to(weight.dtype) @ weight


def rows_of(state: State) -> Rows:
    """The layer's input as one matrix.

    Raises:
        TypeError: the layer before returned a tuple, which only the user's own layers may pass on,
            or it is what another layer prepared.
    """
    if isinstance(state, Prepared):
        raise TypeError("expected one matrix of rows, got what another layer prepared")
    if isinstance(state, tuple):
        raise TypeError(f"expected one matrix of rows, got a tuple of {len(state)} tensors")
    return state


def head(x: Rows, count: int) -> Rows:
    """The first ``count`` rows, those of a block's destinations."""
    return x.head(count) if isinstance(x, SparseRows) else x[:count]


def dense(x: Rows) -> Tensor:
    """The rows as a dense matrix."""
    return x.to_dense() if isinstance(x, SparseRows) else x


def widths(config: ModelConfig, in_features: int, num_classes: int) -> list[tuple[int, int]]:
    """Input and output width of every layer with ``hidden`` columns in between."""
    inner = [config.hidden] * (config.layers - 1)
    return list(zip([in_features, *inner], [*inner, num_classes], strict=True))
