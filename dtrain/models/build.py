"""From the model's configuration to its layers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtrain.config import ModelConfig
from dtrain.errors import DtrainError
from dtrain.models import gat, gcn, sage
from dtrain.models.layer import ModelFactory

BUILT_IN: dict[str, ModelFactory] = {
    "gcn": gcn.build,
    "sage": sage.build,
    "gat": gat.build,
}
_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def build_layers(
    config: ModelConfig, in_features: int, num_classes: int, seed: int
) -> list[nn.Module]:
    """The model's layers with their initial weights, a pure function of the arguments.

    ``config.name`` is a built-in model or ``module:attribute``, a callable
    ``factory(config, in_features, num_classes)`` that returns ``config.layers`` modules; each is
    called as ``layer(block, state, ctx)`` (see :class:`dtrain.models.layer.Layer`). Torch's
    random generator is set to ``seed`` for the factory and restored afterwards.

    Raises:
        DtrainError: what the name says cannot be imported or called, does not return that many
            modules, or keeps running statistics.
    """
    factory = _factory(config)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also reach for every GPU.
        torch.default_generator.manual_seed(seed)
        layers = factory(config, in_features, num_classes)
    return _checked(layers, config)


def _factory(config: ModelConfig) -> ModelFactory:
    if config.name in BUILT_IN:
        return BUILT_IN[config.name]
    module_name, _, attribute = config.name.partition(":")
    return _imported(config.name, module_name, attribute)


def _imported(name: str, module_name: str, attribute: str) -> ModelFactory:
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        # Whatever the user's module does while it is imported may fail in any way.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        advice = "run pip install 'dtrain[pyg]'"
        if missing != "torch_geometric":
            advice = "mend it" if missing is None else "is it on PYTHONPATH?"
        raise DtrainError(
            f"model.name: {name!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {_one_line(error)}); {advice}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DtrainError(f"model.name: {name!r}: {module_name!r} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise DtrainError(
            f"model.name: {name!r}: expected a callable that returns the layers, "
            f"got {type(found).__name__}"
        )
    return _UserFactory(name, found)


class _UserFactory:
    """Calls the user's factory and says what is wrong with what it does."""

    def __init__(self, name: str, factory: Any) -> None:
        self.name = name
        self.factory = factory

    def __call__(self, config: ModelConfig, in_features: int, num_classes: int) -> list[nn.Module]:
        try:
            layers = self.factory(config, in_features, num_classes)
        except DtrainError:
            raise
        except Exception as error:
            raise DtrainError(
                f"model.name: {self.name!r} failed on (config, {in_features}, {num_classes}): "
                f"{type(error).__name__}: {_one_line(error)}"
            ) from error
        if not isinstance(layers, (Sequence, nn.ModuleList, nn.Sequential)) or not all(
            isinstance(layer, nn.Module) for layer in layers
        ):
            raise DtrainError(
                f"model.name: {self.name!r}: expected a sequence of torch.nn.Module, "
                f"got {_kind(layers)}"
            )
        return list(layers)


def _checked(layers: Sequence[nn.Module], config: ModelConfig) -> list[nn.Module]:
    if len(layers) != config.layers:
        raise DtrainError(
            f"model.name: {config.name!r}: expected model.layers = {config.layers} layers, "
            f"got {len(layers)}"
        )
    for number, layer in enumerate(layers):
        for buffer, _ in layer.named_buffers():
            owner, _, leaf = buffer.rpartition(".")
            if leaf in _RUNNING_STATISTICS:
                kind = type(layer.get_submodule(owner)).__name__
                raise DtrainError(
                    f"model.name: {config.name!r}: layer {number} has a {kind} with running "
                    "statistics, which depend on the order of microbatches; use layer "
                    "normalisation (norm: layer) or track_running_stats=False"
                )
    return list(layers)


def _kind(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        kinds = sorted({type(item).__name__ for item in value})
        return f"{type(value).__name__} of {', '.join(kinds)}"
    return type(value).__name__


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
