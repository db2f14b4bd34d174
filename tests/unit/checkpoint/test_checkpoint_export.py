"""Exported models compute what dtrain computes: in PyTorch Geometric, and without dtrain."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointInfo, CheckpointStore, weights_sha256
from dtrain.checkpoint.export import export_model
from dtrain.checkpoint.export.names import plain_model
from dtrain.checkpoint.export.program import PlainNetwork
from dtrain.config import ModelConfig
from dtrain.data.block import Block
from dtrain.errors import DtrainError
from dtrain.kernels.csr import Csr
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext

pytest.importorskip("safetensors")

IN, OUT = 6, 3
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"name": "gcn", "layers": 3},
    "gcn one layer": {"name": "gcn", "layers": 1},
    "gcn norm elu": {"name": "gcn", "norm": "layer", "activation": "elu"},
    "gcn residual": {"name": "gcn", "layers": 3, "residual": True},
    "sage": {"name": "sage", "layers": 3},
    "sage max": {"name": "sage", "aggregator": "max", "norm": "layer"},
    "gat": {"name": "gat", "heads": 4, "activation": "elu"},
    "gat equal heads": {"name": "gat", "heads": 2, "output_heads": 2, "layers": 3},
    "gat odd heads": {"name": "gat", "heads": 3, "output_heads": 2},
    "gat one layer": {"name": "gat", "layers": 1, "heads": 3, "output_heads": 2},
}


def some_graph(nodes: int, edges: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features [N, F] and edges [2, E] with duplicates, isolated nodes and no self loops."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(0, nodes, (edges,), generator=g)
    # The last node is nobody's neighbour and has none.
    src = src % (nodes - 1)
    dst = (src + torch.randint(1, nodes - 1, (edges,), generator=g)) % (nodes - 1)
    return torch.randn(nodes, IN, generator=g), torch.stack([src, dst])


def block_of(nodes: int, edge_index: Tensor) -> Block:
    src, dst = edge_index
    order = torch.argsort(dst, stable=True)
    degree = torch.bincount(dst, minlength=nodes)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    return Block(Csr(indptr, src[order], nodes), degree)


def logits_of(layers: list[torch.nn.Module], x: Tensor, edge_index: Tensor) -> Tensor:
    block = block_of(x.shape[0], edge_index)
    with torch.no_grad():
        for layer in layers:
            x = layer(block, x, LayerContext(0, training=False))
    return x


def trained(model: dict[str, Any], seed: int = 3) -> tuple[ModelConfig, list[torch.nn.Module]]:
    config = ModelConfig(hidden=8, dropout=0.5, **model)
    layers = list(build_layers(config, IN, OUT, seed))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                # Zeros for biases and ones for norms would hide a swapped name.
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=g))
    return config, layers


def weights_of(layers: list[torch.nn.Module]) -> dict[str, Tensor]:
    return {
        f"layers.{i}.{name}": parameter.detach()
        for i, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def save(
    url: Path, config: ModelConfig, layers: list[torch.nn.Module], **progress: Any
) -> tuple[CheckpointStore, CheckpointInfo]:
    weights = weights_of(layers)
    store = CheckpointStore(str(url))
    identity = {"model": config.model_dump(mode="json"), "dataset": "abc"}
    tensors = {f"model/{name}": p for name, p in weights.items()}
    if progress:
        tensors |= {f"best/{name}": p + 1 for name, p in weights.items()}
    record = {"identity": identity, "progress": progress}
    return store, store.save(5, tensors, record)


@pytest.mark.parametrize("kind", MODELS)
def test_every_built_in_model_in_plain_torch_and_in_pyg(kind: str) -> None:
    config, layers = trained(MODELS[kind])
    plain = plain_model(config.model_dump(mode="json"), weights_of(layers))
    graphs = [some_graph(40, 150, 1), some_graph(7, 3, 2)]
    network = PlainNetwork(plain).eval()
    for x, edge_index in graphs:
        close(network(x, edge_index), logits_of(layers, x, edge_index))
        # A graph's self loops count as they do in training.
        loops = torch.arange(0, x.shape[0], 3)
        looped = torch.cat([edge_index, torch.stack([loops, loops])], 1)
        close(network(x, looped), logits_of(layers, x, looped))

    geometric = pytest.importorskip("torch_geometric")
    if plain.pyg is None:
        assert kind in ("gcn residual", "gat odd heads")
        assert plain.pyg_missing
        return
    model = getattr(geometric.nn, plain.pyg["class"])(**plain.pyg["kwargs"])
    model.load_state_dict(plain.tensors)
    with torch.no_grad():
        for x, edge_index in graphs:
            close(model.eval()(x, edge_index), logits_of(layers, x, edge_index))


@pytest.mark.parametrize("kind", ["gcn residual", "sage max"])
def test_programs_take_graphs_of_any_size(tmp_path: Path, kind: str) -> None:
    config, layers = trained(MODELS[kind])
    exported = export_model(*save(tmp_path / "ck", config, layers), tmp_path / "out")
    assert exported.files == ("model.json", "model.pt2", "model.safetensors")
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for x, edge_index in (some_graph(40, 150, 1), some_graph(7, 3, 2), some_graph(90, 2, 3)):
        close(program(x, edge_index), logits_of(layers, x, edge_index))


def test_three_lines_load_an_export_into_pyg(tmp_path: Path) -> None:
    torch_geometric = pytest.importorskip("torch_geometric")
    safetensors_torch = pytest.importorskip("safetensors.torch")

    config, layers = trained(MODELS["gat"])
    export_model(*save(tmp_path / "ck", config, layers), tmp_path / "model")
    page = Path(__file__).parents[3] / "docs" / "export.md"
    lines = re.findall(r"```python\n(spec.*?)```", page.read_text(), re.S)[0]
    assert len(lines.splitlines()) == 3
    names = {
        "Path": lambda path: tmp_path / path,
        "json": json,
        "torch_geometric": torch_geometric,
        "safetensors": SimpleNamespace(
            torch=SimpleNamespace(
                load_file=lambda path: safetensors_torch.load_file(tmp_path / path)
            )
        ),
    }
    exec(lines, names)
    model: Any = names["model"]
    x, edge_index = some_graph(40, 150, 1)
    with torch.no_grad():
        close(model.eval()(x, edge_index), logits_of(layers, x, edge_index))


def test_the_program_runs_where_dtrain_is_not(tmp_path: Path) -> None:
    config, layers = trained(MODELS["gat"])
    export_model(*save(tmp_path / "ck", config, layers), tmp_path / "out")
    x, edge_index = some_graph(30, 90, 5)
    torch.save({"x": x, "edge_index": edge_index}, tmp_path / "graph")
    script = (
        "import sys; sys.modules['dtrain'] = None\n"
        "import torch\n"
        "graph = torch.load(sys.argv[2], weights_only=True)\n"
        "program = torch.export.load(sys.argv[1]).module()\n"
        "torch.save(program(graph['x'], graph['edge_index']), sys.argv[3])\n"
    )
    paths = [str(tmp_path / name) for name in ("out/model.pt2", "graph", "answer")]
    subprocess.run([sys.executable, "-c", script, *paths], check=True, cwd=tmp_path)
    answer = torch.load(tmp_path / "answer", weights_only=True)
    close(answer, logits_of(layers, x, edge_index))


def test_the_description_names_the_weights_and_the_data(tmp_path: Path) -> None:
    config, layers = trained(MODELS["sage"])
    store, info = save(tmp_path / "ck", config, layers, best={"step": 2})
    exported = export_model(store, info, tmp_path / "out")
    weights = weights_of(layers)
    assert exported.weights_sha256 == weights_sha256(weights)
    said = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (said["step"], said["weights"], said["dataset_fingerprint"]) == (5, "last", "abc")
    assert said["tensors"]["convs.0.lin_l.weight"] == {"dtype": "float32", "shape": [8, 6]}
    best = export_model(store, info, tmp_path / "best", best=True)
    assert (best.step, best.weights) == (2, "best")
    assert best.weights_sha256 == weights_sha256({n: p + 1 for n, p in weights.items()})


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    config, layers = trained(MODELS["gcn"])
    store, info = save(tmp_path / "ck", config, layers)
    (tmp_path / "taken").mkdir()
    with pytest.raises(DtrainError, match="expected a folder that does not exist yet"):
        export_model(store, info, tmp_path / "taken")
    with pytest.raises(DtrainError, match="--best: step-00000005 has no best weights"):
        export_model(store, info, tmp_path / "out", best=True)
    bare = store.save(6, {"model/x": torch.ones(1)}, {})
    with pytest.raises(DtrainError, match="expected a run's checkpoint with its model's"):
        export_model(store, bare, tmp_path / "out")
    gcn = {"identity": {"model": {"name": "gcn"}}}
    other = store.save(7, {"model/layers.0.x": torch.ones(1)}, gcn)
    with pytest.raises(DtrainError, match="expected the weights of a gcn, found none for"):
        export_model(store, other, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ck", "taken"]


def test_a_model_of_the_users_own_keeps_its_names(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = CheckpointStore(str(tmp_path / "ck"))
    tensors = {"model/layers.0.conv.lin.weight": torch.ones(2, 3).bfloat16()}
    masters = {"master/layers.0.conv.lin.weight": torch.full((2, 3), 1.001)}
    info = store.save(1, {**tensors, **masters}, {"identity": {"model": {"name": "mine:model"}}})
    exported = export_model(store, info, tmp_path / "out")
    assert exported.files == ("model.json", "model.safetensors")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["layers.0.conv.lin.weight"], torch.full((2, 3), 1.001))
