"""A training step of a GCN on bag-of-words features: sparse in dtrain, dense elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.data.graph import CsrFeatures, GraphArrays
from dtrain.data.importers import ImportOptions, import_graph
from dtrain.kernels.csr import Csr, SparseRows
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext

OP = "gcn step"
_HIDDEN, _P = 16, 0.5


def cora_step(folder: Path | None, peers: list[str]) -> dict[str, Callable[[], object]]:
    """Contenders for one step of the model of Kipf and Welling on Cora, Adam's update included.

    ``folder`` holds ``planetoid/ind.cora.*``; nothing is measured where it does not.
    """
    if folder is None or not (folder / "planetoid" / "ind.cora.x").is_file():
        return {}
    graph = import_graph("planetoid", str(folder / "planetoid"), ImportOptions(name="cora"))
    contenders = {"dtrain": _ours(graph)}
    if "pyg" in peers:
        contenders["pyg: GCNConv, dense features"] = _pyg(graph)
    return contenders


def _ours(graph: GraphArrays) -> Callable[[], object]:
    features = graph.features
    assert isinstance(features, CsrFeatures)
    indptr = torch.from_numpy(graph.indptr)
    csr = Csr(indptr, torch.from_numpy(graph.indices).long(), len(indptr) - 1)
    pattern = Csr(
        torch.from_numpy(features.indptr),
        torch.from_numpy(np.asarray(features.indices, dtype=np.int64)),
        features.num_features,
    )
    x = SparseRows(pattern, torch.from_numpy(np.asarray(features.values, dtype=np.float32)))
    block = Block(csr, csr.row_counts())
    config = ModelConfig(name="gcn", layers=2, hidden=_HIDDEN, dropout=_P)
    layers = build_layers(config, features.num_features, graph.num_classes, 0)
    step = _Step([p for layer in layers for p in layer.parameters()], graph)

    def forward(number: int) -> Tensor:
        hidden = layers[0](block, x, LayerContext(2 * number, True))
        out: Tensor = layers[1](block, hidden, LayerContext(2 * number + 1, True))
        return out

    return lambda: step(forward)


def _pyg(graph: GraphArrays) -> Callable[[], object]:
    from torch_geometric.nn import GCNConv

    features = graph.features
    assert isinstance(features, CsrFeatures)
    nodes = len(graph.indptr) - 1
    x = torch.zeros(nodes, features.num_features)
    rows = torch.repeat_interleave(torch.arange(nodes), torch.from_numpy(np.diff(features.indptr)))
    columns = torch.from_numpy(np.asarray(features.indices, dtype=np.int64))
    x[rows, columns] = torch.from_numpy(np.asarray(features.values, dtype=np.float32))
    targets = torch.repeat_interleave(torch.arange(nodes), torch.from_numpy(np.diff(graph.indptr)))
    edges = torch.stack([torch.from_numpy(graph.indices).long(), targets])
    convs = nn.ModuleList(
        [
            GCNConv(features.num_features, _HIDDEN, cached=True),
            GCNConv(_HIDDEN, graph.num_classes, cached=True),
        ]
    )
    step = _Step(list(convs.parameters()), graph)

    def forward(_: int) -> Tensor:
        hidden = F.relu(convs[0](F.dropout(x, _P), edges))
        out: Tensor = convs[1](F.dropout(hidden, _P), edges)
        return out

    return lambda: step(forward)


class _Step:
    """Forward, loss on the training nodes, backward, update: the same for both."""

    def __init__(self, parameters: list[nn.Parameter], graph: GraphArrays) -> None:
        self._optimizer = torch.optim.Adam(parameters, lr=0.01)
        self._train = torch.from_numpy(graph.splits[0].train)
        self._labels = torch.from_numpy(graph.labels)[self._train]
        self._number = 0

    def __call__(self, forward: Callable[[int], Tensor]) -> None:
        self._number += 1
        self._optimizer.zero_grad()
        loss = F.cross_entropy(forward(self._number)[self._train], self._labels)
        torch.autograd.backward(loss)
        self._optimizer.step()
