"""A PyTorch Geometric convolution as a layer."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.errors import DtrainError
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext
from dtrain.models.pyg import PygLayer

EVALUATE = LayerContext(0, training=False)


def test_sage_convolution_is_ours(part: tuple[Block, torch.Tensor], features: torch.Tensor) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    block = part[0]
    ours = build_layers(ModelConfig(name="sage", layers=1), features.shape[1], 3, 0)[0].double()
    conv = pyg.SAGEConv(features.shape[1], 3).double()
    with torch.no_grad():
        conv.lin_l.weight.copy_(ours.neighbor.weight.T)
        conv.lin_l.bias.copy_(ours.own.bias)
        conv.lin_r.weight.copy_(ours.own.weight.T)
    layer = PygLayer(conv, activation=torch.relu)
    expected = torch.relu(ours(block, features, EVALUATE))
    torch.testing.assert_close(layer(block, features, EVALUATE), expected)


def test_attention_convolution_is_ours(
    part: tuple[Block, torch.Tensor], features: torch.Tensor
) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    block = part[0]
    config = ModelConfig(name="gat", layers=1, output_heads=2)
    ours = build_layers(config, features.shape[1], 3, 0)[0].double()
    conv = pyg.GATConv(features.shape[1], 3, heads=2, concat=False).double()
    with torch.no_grad():
        conv.lin.weight.copy_(ours.linear.weight.T)
        conv.att_src.copy_(ours.src_attention[None])
        conv.att_dst.copy_(ours.dst_attention[None])
    expected = ours(block, features, EVALUATE)
    torch.testing.assert_close(PygLayer(conv)(block, features, EVALUATE), expected)


def test_dropout_is_by_key(whole: Block, features: torch.Tensor) -> None:
    pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    layer = PygLayer(pyg.SAGEConv(features.shape[1], 3).double(), dropout=0.5)
    first, again, other = (
        layer(whole, features, LayerContext(key, training=True)) for key in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_is_no_convolution_is_refused() -> None:
    pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    with pytest.raises(DtrainError, match="MessagePassing, got Linear"):
        PygLayer(nn.Linear(2, 2))


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_geometric.nn", None)
    with pytest.raises(DtrainError, match=r"pip install 'dtrain\[pyg\]'"):
        PygLayer(nn.Linear(2, 2))
