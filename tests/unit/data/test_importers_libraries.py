"""Data sets of other libraries, through stand-ins with their interfaces."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from dtrain.data.importers import ImportOptions, import_graph
from dtrain.errors import DtrainError

EDGES = torch.tensor([[0, 1, 2], [1, 2, 3]])
X = torch.arange(8, dtype=torch.float32).reshape(4, 2) + 1
Y = torch.tensor([0, 1, 1, 0])
MASKS = [
    torch.tensor(mask, dtype=torch.bool) for mask in ([1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1])
]


@pytest.fixture
def module(monkeypatch):
    def install(name, **content):
        made = ModuleType(name)
        for key, value in content.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name.split(".")[0], ModuleType(name.split(".")[0]))
        monkeypatch.setitem(sys.modules, name, made)

    return install


@pytest.mark.parametrize(
    ("kind", "module_name"),
    [("pyg", "torch_geometric.datasets"), ("ogb", "ogb.nodeproppred"), ("dgl", "dgl.data")],
)
def test_a_missing_library_names_its_extra(monkeypatch, kind, module_name):
    monkeypatch.setitem(sys.modules, module_name.split(".")[0], None)
    monkeypatch.setitem(sys.modules, module_name, None)
    with pytest.raises(DtrainError, match=rf"pip install 'dtrain\[{kind}\]'"):
        import_graph(kind, "anything", ImportOptions())


def check(graph):
    assert edges_of(graph) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    np.testing.assert_array_equal(graph.features.values, X.numpy())
    assert graph.labels.tolist() == [0, 1, 1, 0]
    assert [part.tolist() for part in graph.splits[0]] == [[0, 1], [2], [3]]


def edges_of(graph):
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return set(zip(graph.indices.tolist(), rows.tolist(), strict=True))


def test_pyg(module, tmp_path):
    data = SimpleNamespace(x=X, edge_index=EDGES, y=Y, train_mask=MASKS[0], val_mask=MASKS[1],
                           test_mask=MASKS[2])  # fmt: skip

    class Planetoid(list):
        def __init__(self, root, name):
            assert root.startswith(str(tmp_path))
            assert name == "Cora"
            super().__init__([data])

    module("torch_geometric.datasets", Planetoid=Planetoid)
    options = ImportOptions(download_dir=str(tmp_path))
    check(import_graph("pyg", "Cora", options))
    check(import_graph("pyg", "Planetoid/Cora", options))
    with pytest.raises(DtrainError, match="pyg:Karate: expected a data set of torch_geometric"):
        import_graph("pyg", "Karate", options)


def test_ogb(module, tmp_path):
    class NodePropPredDataset:
        def __init__(self, name, root):
            if name != "ogbn-arxiv":
                raise ValueError("Invalid\ndataset name")

        def __getitem__(self, index):
            graph = {"edge_index": EDGES.numpy(), "node_feat": X.numpy()}
            return graph, Y.numpy().reshape(-1, 1)

        def get_idx_split(self):
            parts = zip(("train", "valid", "test"), MASKS, strict=True)
            return {name: np.flatnonzero(mask.numpy())[::-1] for name, mask in parts}

    module("ogb.nodeproppred", NodePropPredDataset=NodePropPredDataset)
    options = ImportOptions(download_dir=str(tmp_path))
    check(import_graph("ogb", "ogbn-arxiv", options))
    with pytest.raises(DtrainError, match=r"ogb:x: cannot be loaded \(Invalid dataset name\)"):
        import_graph("ogb", "x", options)


def test_dgl(module, tmp_path):
    masks = {f"{name}_mask": m for name, m in zip(("train", "val", "test"), MASKS, strict=True)}

    class CoraGraphDataset(list):
        def __init__(self, raw_dir):
            graph = SimpleNamespace(
                ndata={"feat": X, "label": Y, **masks}, edges=lambda: (EDGES[0], EDGES[1])
            )
            super().__init__([graph])

    module("dgl.data", CoraGraphDataset=CoraGraphDataset)
    check(import_graph("dgl", "CoraGraphDataset", ImportOptions(download_dir=str(tmp_path))))


def test_unknown_formats_are_named():
    with pytest.raises(DtrainError, match="FORMAT: expected one of planetoid, npz, edges"):
        import_graph("excel", "x.xls", ImportOptions())
