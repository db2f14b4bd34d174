"""A PyTorch Geometric convolution as a layer (extra ``pyg``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtrain.data.block import Block
from dtrain.errors import DtrainError
from dtrain.kernels.dropout import dropout as apply_dropout
from dtrain.models.layer import LayerContext, State
from dtrain.models.parts import dense, rows_of


class PygLayer(nn.Module):
    """Runs ``activation(conv(dropout(x)))`` on a block.

    ``conv``: a ``torch_geometric.nn.MessagePassing`` that takes a pair of source and destination
    rows (SAGEConv, GraphConv, GATConv, GATv2Conv, TransformerConv, ... but not GCNConv, which
    normalises by the degrees of the edges it sees). ``activation``: a callable or None;
    ``dropout``: probability for the input. A model of such layers is a function in a module of the
    user's, named in the configuration as ``model.name: my_models:sage``::

        from torch_geometric.nn import SAGEConv
        from dtrain.models.pyg import PygLayer

        def sage(config, in_features, num_classes):
            return [
                PygLayer(SAGEConv(in_features, config.hidden), torch.relu, config.dropout),
                PygLayer(SAGEConv(config.hidden, num_classes), dropout=config.dropout),
            ]

    Raises:
        DtrainError: torch_geometric is not installed, or ``conv`` is not one of its convolutions.
    """

    def __init__(
        self,
        conv: nn.Module,
        activation: Callable[[Tensor], Tensor] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        try:
            from torch_geometric.nn import MessagePassing
        except ImportError as error:
            raise DtrainError(
                "model.name: PygLayer needs torch_geometric, which is not installed; "
                "run pip install 'dtrain[pyg]'"
            ) from error
        if not isinstance(conv, MessagePassing):
            raise DtrainError(
                f"PygLayer: expected a torch_geometric.nn.MessagePassing, got {type(conv).__name__}"
            )
        self.conv = conv
        self.activation = activation
        self.dropout = dropout
        self._takes_size = "size" in inspect.signature(conv.forward).parameters

    def forward(self, block: Block, state: State, ctx: LayerContext) -> Tensor:
        """``state``: float or sparse [num_src, F] (made dense); returns [num_dst, F_out]."""
        x = dense(apply_dropout(rows_of(state), self.dropout, ctx.subkey(0), ctx.training))
        size = {"size": (block.num_src, block.num_dst)} if self._takes_size else {}
        h: Tensor = self.conv((x, x[: block.num_dst]), edge_index(block), **size)
        return h if self.activation is None else self.activation(h)


def edge_index(block: Block) -> Tensor:
    """The block's edges as int64 [2, nnz], sources above destinations; kept in its cache."""
    edges = block.cache.get("pyg edge_index")
    if edges is None:
        edges = torch.stack([block.csr.indices, block.csr.row_of_entry()])
        block.cache["pyg edge_index"] = edges
    return edges
