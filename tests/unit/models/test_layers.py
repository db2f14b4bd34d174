"""The built-in layers against their formulas written with dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.kernels.csr import Csr, SparseRows
from dtrain.kernels.dropout import dropout
from dtrain.models.build import build_layers
from dtrain.models.gcn import norm_weights
from dtrain.models.layer import LayerContext, State
from dtrain.models.sage import SageLayer

CLASSES = 4
EVALUATE = LayerContext(key=0, training=False)
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"name": "gcn"},
    "gcn with all options": {
        "name": "gcn",
        "residual": True,
        "norm": "layer",
        "activation": "elu",
    },
    "sage mean": {"name": "sage", "residual": True, "norm": "layer"},
    "sage max": {"name": "sage", "aggregator": "max"},
    "gat": {"name": "gat", "heads": 3, "output_heads": 2, "activation": "elu"},
    "gat with residual": {"name": "gat", "heads": 2, "residual": True},
}
EACH = pytest.mark.parametrize("model", list(MODELS))


def layers_of(model: str, in_features: int, **more: Any) -> list[nn.Module]:
    config = ModelConfig(**{"hidden": 6, "layers": 3, **MODELS[model], **more})
    layers = [layer.double() for layer in build_layers(config, in_features, CLASSES, seed=5)]
    generator = torch.Generator().manual_seed(2)
    for layer in layers:
        for parameter in layer.parameters():
            # Biases start at zero, which would hide them.
            parameter.data += 0.1 * torch.randn(
                parameter.shape, dtype=torch.float64, generator=generator
            )
    return layers


def run(layers: list[nn.Module], block: Block, state: State, ctx: LayerContext) -> Tensor:
    for layer in layers:
        state = layer(block, state, ctx)
    assert isinstance(state, Tensor)
    return state


@pytest.mark.parametrize("hidden", [6, 16])
def test_gcn_is_its_formula(hidden: int, adjacency: Tensor, whole: Block, features: Tensor) -> None:
    layers = layers_of("gcn", features.shape[1], layers=2, hidden=hidden)
    root = (adjacency.sum(1) + 1).rsqrt()
    hat = root[:, None] * (adjacency + torch.eye(len(adjacency))) * root
    first, second = layers
    hidden_rows = F.relu(hat @ features @ first.linear.weight + first.bias)
    expected = hat @ hidden_rows @ second.linear.weight + second.bias
    torch.testing.assert_close(run(layers, whole, features, EVALUATE), expected)


def test_gcn_weights_of_a_sample_are_scaled_up() -> None:
    degree = torch.tensor([6, 3, 2, 4])
    block = Block(Csr(torch.tensor([0, 3, 3]), torch.tensor([1, 2, 3]), 4), degree)
    edge, own = norm_weights(block, torch.float64)
    # Node 0 has 6 neighbours, 3 of them in its row: each stands for two.
    expected = 2 / torch.sqrt(torch.tensor([4.0, 3.0, 5.0], dtype=torch.float64) * 7)
    torch.testing.assert_close(edge, expected)
    torch.testing.assert_close(own, torch.tensor([1 / 7, 1 / 4], dtype=torch.float64))


@pytest.mark.parametrize("model", ["sage mean", "sage max"])
def test_sage_is_its_formula(model: str, adjacency: Tensor, whole: Block, features: Tensor) -> None:
    layers = layers_of(model, features.shape[1], layers=2, residual=True, norm="layer")

    def conv(layer: Any, x: Tensor) -> Tensor:
        if model == "sage mean":
            pooled = adjacency @ x / adjacency.sum(1).clamp(min=1)[:, None]
        else:
            pooled = torch.where(adjacency[:, :, None] > 0, x, float("-inf")).amax(1)
            pooled = torch.where(torch.isinf(pooled), 0.0, pooled)
        return x @ layer.own.weight + layer.own.bias + pooled @ layer.neighbor.weight

    first, second = layers
    tail = first.tail
    normed = F.layer_norm(conv(first, features), (6,), tail.norm.weight, tail.norm.bias)
    hidden = F.relu(normed) + features @ tail.project.weight
    torch.testing.assert_close(run(layers, whole, features, EVALUATE), conv(second, hidden))


def test_gat_is_its_formula(adjacency: Tensor, whole: Block, features: Tensor) -> None:
    layers = layers_of("gat", features.shape[1], layers=2)
    attends = adjacency.bool() | torch.eye(len(adjacency), dtype=torch.bool)

    def conv(layer: Any, x: Tensor) -> Tensor:
        rows = (x @ layer.linear.weight).view(len(x), layer.heads, layer.width)
        src = (rows * layer.src_attention).sum(-1)
        dst = (rows * layer.dst_attention).sum(-1)
        scores = F.leaky_relu(src[None] + dst[:, None], 0.2)
        softmax = scores.masked_fill(~attends[:, :, None], float("-inf")).softmax(1)
        return torch.einsum("vuh,uhd->vhd", softmax, rows)

    first, second = layers
    hidden = F.elu(conv(first, features).flatten(1) + first.bias)
    expected = conv(second, hidden).mean(1) + second.bias
    torch.testing.assert_close(run(layers, whole, features, EVALUATE), expected)


@EACH
def test_sparse_input_is_dense_input(
    model: str, part: tuple[Block, Tensor], features: Tensor, sparse_features: SparseRows
) -> None:
    block = part[0]
    layers = layers_of(model, features.shape[1], layers=2, dropout=0.0)
    ctx = LayerContext(key=1, training=True)
    results = []
    for state in (features, sparse_features):
        out = layers[0](block, state, ctx)
        results.append([out, *torch.autograd.grad(out.square().sum(), layers[0].parameters())])
    assert results[0][0].shape[0] == block.num_dst < block.num_src
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@EACH
def test_block_of_some_destinations_has_their_rows_of_the_whole(
    model: str, whole: Block, part: tuple[Block, Tensor], features: Tensor
) -> None:
    block, nodes = part
    layer = layers_of(model, features.shape[1])[0]
    full = layer(whole, features, EVALUATE)
    rows = layer(block, features[nodes], EVALUATE)
    torch.testing.assert_close(rows, full[nodes[: block.num_dst]], rtol=1e-12, atol=1e-12)


@EACH
def test_randomness_comes_from_the_key_alone(
    model: str, whole: Block, features: Tensor, sparse_features: SparseRows
) -> None:
    layers = layers_of(model, features.shape[1], dropout=0.5)
    for state in (features, sparse_features):
        torch.manual_seed(0)
        first = run(layers, whole, state, LayerContext(11, training=True))
        torch.manual_seed(1)
        again = run(layers, whole, state, LayerContext(11, training=True))
        other = run(layers, whole, state, LayerContext(12, training=True))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


@pytest.mark.parametrize("model", ["gcn", "sage mean", "sage max", "gat"])
def test_dropout_is_on_all_of_the_input(
    model: str, part: tuple[Block, Tensor], features: Tensor
) -> None:
    layers = layers_of(model, features.shape[1], layers=1, dropout=0.5, attention_dropout=0.0)
    ctx = LayerContext(11, training=True)
    dropped = dropout(features, 0.5, ctx.subkey(0))
    expected = layers[0](part[0], dropped, EVALUATE)
    assert torch.equal(layers[0](part[0], features, ctx), expected)


@pytest.mark.parametrize("model", ["gcn", "sage mean", "sage max", "gat"])
def test_input_dropout_is_that_of_the_first_layer(
    model: str, part: tuple[Block, Tensor], features: Tensor
) -> None:
    given = {"dropout": 0.5, "input_dropout": 0.0, "attention_dropout": 0.0}
    layers = layers_of(model, features.shape[1], layers=2, **given)
    assert [layer.p for layer in layers] == [0.0, 0.5]
    ctx = LayerContext(11, training=True)
    expected = layers[0](part[0], features, EVALUATE)
    assert torch.equal(layers[0](part[0], features, ctx), expected)


@EACH
def test_layers_as_segments_give_the_gradients_of_the_whole(
    model: str, whole: Block, features: Tensor
) -> None:
    layers = layers_of(model, features.shape[1], dropout=0.3)
    ctx = LayerContext(4, training=True)
    parameters = [p for layer in layers for p in layer.parameters()]
    out = run(layers, whole, features, ctx)
    expected = torch.autograd.grad(out.square().sum(), parameters)

    inputs, outputs = [features], []
    for layer in layers:
        outputs.append(layer(whole, inputs[-1], ctx))
        inputs.append(outputs[-1].detach().requires_grad_())
    (grad,) = torch.autograd.grad(inputs[-1].square().sum(), inputs[-1])
    found: list[Tensor] = []
    for number in reversed(range(len(layers))):
        own = list(layers[number].parameters())
        wanted = own + ([inputs[number]] if number else [])
        grads = torch.autograd.grad(outputs[number], wanted, grad, allow_unused=True)
        found = [*grads[: len(own)], *found]
        grad = grads[-1]
    assert all(g is not None for g in found)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_sage_takes_the_mean_first_or_last_with_one_result(
    part: tuple[Block, Tensor], features: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, nodes = part
    x = features[nodes].requires_grad_()
    results = []
    for first in (True, False):
        monkeypatch.setattr(SageLayer, "mean_first", lambda *_, first=first: first)
        layer = layers_of("sage mean", x.shape[1], dropout=0.4, norm="none", residual=False)[0]
        out = layer(block, x, LayerContext(7, training=True))
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_sage_takes_the_mean_first_where_sources_are_hardly_shared() -> None:
    layer = SageLayer(128, 10, 0.0)
    degree = torch.zeros(9000, dtype=torch.int64)
    sampled = torch.arange(1000, 9000)
    assert layer.mean_first(Block(Csr(torch.arange(0, 8001, 8), sampled, 9000), degree))
    whole = torch.arange(9000 * 15) % 9000
    assert not layer.mean_first(Block(Csr(torch.arange(0, 9000 * 15 + 1, 15), whole, 9000), degree))


@EACH
def test_bfloat16_weights(model: str, whole: Block, features: Tensor) -> None:
    layers = layers_of(model, features.shape[1])
    wide = run(layers, whole, features, EVALUATE)
    narrow = run([layer.bfloat16() for layer in layers], whole, features.float(), EVALUATE)
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.double(), wide, rtol=0.1, atol=0.15)


@EACH
def test_block_without_edges_or_neighbors(model: str) -> None:
    block = Block(Csr(torch.zeros(3, dtype=torch.int64), torch.zeros(0).long(), 3), torch.zeros(3))
    layer = layers_of(model, 5)[0]
    out = layer(block, torch.randn(3, 5, dtype=torch.float64), EVALUATE)
    assert out.shape[0] == 2
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), layer.parameters()))
