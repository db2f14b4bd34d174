"""From a checkpoint's names to those of plain PyTorch, as PyTorch Geometric's models have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dtrain.errors import DtrainError

BUILT_IN = ("gcn", "sage", "gat")

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class PlainModel:
    """A built-in model in plain terms.

    ``tensors``: ``convs.{i}.*`` and ``norms.{i}.*`` as in ``torch_geometric.nn.GCN``,
    ``GraphSAGE`` and ``GAT``; ``projects.{i}.weight`` for residuals between unequal widths.
    ``heads``: attention heads of each layer; empty for other models. ``pyg``: class name and
    arguments of the equivalent model, or None with the reason in ``pyg_missing``.
    """

    name: str
    in_features: int
    out_features: int
    num_layers: int
    activation: str
    residual: bool
    aggregator: str
    heads: tuple[int, ...]
    tensors: dict[str, Tensor]
    pyg: dict[str, Any] | None
    pyg_missing: str


def plain_model(model: Mapping[str, Any], weights: Mapping[str, Tensor]) -> PlainModel:
    """Describe a built-in model and rename its weights.

    Args:
        model: the run's ``model`` section.
        weights: by the checkpoint's parameter names, ``layers.{i}.{name}``.

    Raises:
        DtrainError: the weights are not those of the configured model.
    """
    layers = _by_layer(weights)
    try:
        tensors = {
            f"{section}.{i}.{name}": tensor.contiguous()
            for i, layer in enumerate(layers)
            for (section, name), tensor in _rename(str(model["name"]), layer).items()
        }
        heads = _equal_heads(model, tensors, len(layers)) if model["name"] == "gat" else ()
        plain = _describe(model, tensors, len(layers), heads)
    except KeyError as error:
        raise DtrainError(
            f"model.name: expected the weights of a {model.get('name')}, found none for {error}; "
            "export a checkpoint of the configured model"
        ) from None
    return plain


def _by_layer(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    layers: dict[int, dict[str, Tensor]] = {}
    for full, tensor in weights.items():
        match = _LAYER.fullmatch(full)
        if match is None:
            raise DtrainError(f"expected weights called layers.N.NAME, got {full}")
        layers.setdefault(int(match[1]), {})[match[2]] = tensor
    return [layers[i] for i in range(len(layers))]


def _rename(kind: str, layer: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """(section, name) to tensor. dtrain's linear maps are [in, out], torch's [out, in]."""
    if kind == "gcn":
        conv = {"lin.weight": layer["linear.weight"].t(), "bias": layer["bias"]}
    elif kind == "sage":
        conv = {
            "lin_l.weight": layer["neighbor.weight"].t(),
            "lin_l.bias": layer["own.bias"],
            "lin_r.weight": layer["own.weight"].t(),
        }
    else:
        conv = {
            "lin.weight": layer["linear.weight"].t(),
            "att_src": layer["src_attention"].unsqueeze(0),
            "att_dst": layer["dst_attention"].unsqueeze(0),
            "bias": layer["bias"],
        }
    renamed = {("convs", name): tensor for name, tensor in conv.items()}
    for name in ("weight", "bias"):
        if f"tail.norm.{name}" in layer:
            renamed["norms", name] = layer[f"tail.norm.{name}"]
    if "tail.project.weight" in layer:
        renamed["projects", "weight"] = layer["tail.project.weight"].t()
    return renamed


def _equal_heads(
    model: Mapping[str, Any], tensors: dict[str, Tensor], count: int
) -> tuple[int, ...]:
    """Repeat the last layer's heads until it has as many as the others, where that comes out.

    Its heads are averaged, and the average of repeated heads is the same; PyG's model has one
    number of heads for all layers.
    """
    hidden, last = int(model["heads"]), int(model["output_heads"])
    if count > 1 and last < hidden and hidden % last == 0:
        conv, times = f"convs.{count - 1}", hidden // last
        for name in ("att_src", "att_dst"):
            tensors[f"{conv}.{name}"] = tensors[f"{conv}.{name}"].repeat(1, times, 1)
        tensors[f"{conv}.lin.weight"] = tensors[f"{conv}.lin.weight"].repeat(times, 1)
        last = hidden
    return (*[hidden] * (count - 1), last)


def _describe(
    model: Mapping[str, Any], tensors: dict[str, Tensor], count: int, heads: tuple[int, ...]
) -> PlainModel:
    kind = str(model["name"])
    linear = "lin_l" if kind == "sage" else "lin"
    in_features = tensors[f"convs.0.{linear}.weight"].shape[1]
    last = f"convs.{count - 1}"
    out_features = tensors[f"{last}.lin_l.bias" if kind == "sage" else f"{last}.bias"].shape[0]
    missing = ""
    if model["residual"]:
        missing = "PyG's models have no residual connections of this kind"
    elif len(set(heads)) > 1:
        missing = f"PyG's GAT has one number of heads for all layers, this one has {[*heads]}"
    arguments: dict[str, Any] = {
        "in_channels": in_features,
        "hidden_channels": int(model["hidden"]) * (heads[0] if heads and count > 1 else 1),
        "num_layers": count,
        "out_channels": out_features,
        "act": model["activation"],
    }
    if model["norm"] == "layer":
        arguments |= {"norm": "LayerNorm", "norm_kwargs": {"mode": "node"}}
    if kind == "sage":
        arguments["aggr"] = model["aggregator"]
    if heads:
        arguments["heads"] = heads[0]
    classes = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT"}
    return PlainModel(
        name=kind,
        in_features=in_features,
        out_features=out_features,
        num_layers=count,
        activation=str(model["activation"]),
        residual=bool(model["residual"]),
        aggregator=str(model["aggregator"]),
        heads=heads,
        tensors=tensors,
        pyg=None if missing else {"class": classes[kind], "kwargs": arguments},
        pyg_missing=missing,
    )
