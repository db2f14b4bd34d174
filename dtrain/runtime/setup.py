"""What every worker derives from the configuration before anybody talks to anybody."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config import Config
from dtrain.data.batches import BatchSource
from dtrain.data.block import Block
from dtrain.data.budget import Budget
from dtrain.data.features import FeatureCache, Features, cache_bytes, rows_within
from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError
from dtrain.kernels import results
from dtrain.kernels.rows.stored import StoredRows
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext, Prepared, PreparingLayer, layer_key
from dtrain.planning import (
    batch_source,
    block_sizes,
    job_layout,
    layer_shape,
    total_steps,
    within_memory,
)
from dtrain.runtime.inputs import Prepare
from dtrain.scheduler import Layout
from dtrain.scheduler.costmodel import BlockSize, LayerShape


@dataclass
class Job:
    """The run as a pure function of its configuration: graph, microbatches, model, layout.

    ``layers`` tell names and shapes; ``total_steps`` is where the run ends; ``identity`` is
    what decides its result; ``layout_reason``: why the layout is as it is, where it was chosen.
    ``config.parallel.microbatches`` is already what ``memory.limit`` asks for, as ``budget`` tells.
    ``features``: the store, or a cache in front of it.
    """

    config: Config
    store: GraphStore
    source: BatchSource
    layers: list[nn.Module]
    layout: Layout
    layout_reason: str
    total_steps: int
    identity: dict[str, Any]
    device: torch.device
    budget: Budget
    features: Features

    @property
    def predicted_peak_bytes(self) -> int | None:
        """What one worker may need; None without ``memory.limit``."""
        return self.budget.peak_bytes

    def fresh_layers(self) -> list[nn.Module]:
        """The model's layers anew, with their initial weights."""
        meta, config = self.store.meta, self.config
        return build_layers(config.model, meta.num_features, meta.num_classes, config.seed)

    @property
    def prepare(self) -> Prepare | None:
        """What layer 0 makes of a microbatch's features ahead of its turn, if it does.

        Not where they are kept from step to step: they must not hold one step's random decisions.
        """
        layer, seed = self.layers[0], self.config.seed
        if self.source.static or not isinstance(layer, PreparingLayer):
            return None

        def prepare(
            step: int, microbatch: int, block: Block, x: Tensor | StoredRows
        ) -> Prepared | None:
            return layer.prepare(
                block, x, LayerContext(layer_key(seed, step, microbatch, 0), training=True)
            )

        return prepare

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The shape of each of the model's layers."""
        return [layer_shape(layer) for layer in self.layers]

    @cached_property
    def sizes(self) -> list[list[BlockSize]]:
        """The sizes of the first step's blocks, ``[microbatch][layer]``."""
        return block_sizes(self.source, 0, self.layout.microbatches)

    @property
    def sharded_bytes(self) -> int:
        """Most bytes that ZeRO shards of the model: two moments and a master copy in float32."""
        return 12 * sum(
            p.numel() for layer in self.layers for p in layer.parameters() if p.requires_grad
        )

    def parameter_names(self, layer_range: range | None = None) -> list[str]:
        """Trainable parameters as ``layers.{i}.{name}``, in the model's order."""
        return [
            f"layers.{i}.{name}"
            for i in layer_range or range(len(self.layers))
            for name, p in self.layers[i].named_parameters()
            if p.requires_grad
        ]

    def parameter_stage(self) -> dict[str, int]:
        """Each trainable parameter's stage, in the model's order."""
        return {
            name: stage
            for stage in range(self.layout.num_stages)
            for name in self.parameter_names(self.layout.layers_of(stage))
        }


def prepare_job(config: Config, local_rank: int, workers: int) -> Job:
    """Open the graph and build the model and its layout.

    ``workers``: how many the job was launched with to work at once.

    Raises:
        DtrainError: something in the configuration does not fit the graph, the model or the
            machine.
    """
    device = _device(config, local_rank)
    store = GraphStore.open(config.data.store, config.data.cache_dir)
    config, budget = within_memory(config, store)
    if config.memory.limit is not None:
        results.keep_nothing()
    features: Features = store
    if config.memory.feature_cache > 0:
        budget = budget.with_cache(cache_bytes(store, config.memory.feature_cache))
        features = FeatureCache(store, rows_within(store, budget.cache_bytes))
    source = batch_source(config, store, keep=budget.keeps_fixed())
    meta = store.meta
    layers = build_layers(config.model, meta.num_features, meta.num_classes, config.seed)
    _check_layers(layers)
    layout, reason = job_layout(config, source, layers, workers)
    steps, identity = total_steps(config, source), config.identity(store.fingerprint)
    return Job(
        config, store, source, layers, layout, reason, steps, identity, device, budget, features
    )


def _device(config: Config, local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    wants_bf16 = bool((config.deepspeed.get("bf16") or {}).get("enabled"))
    if wants_bf16 and not torch.cuda.is_bf16_supported():
        name = torch.cuda.get_device_name(device)
        raise DtrainError(f"deepspeed.bf16.enabled: {name} has no bfloat16; set it to false")
    return device


def _check_layers(layers: list[nn.Module]) -> None:
    owner: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            other = owner.setdefault(id(parameter), index)
            if other != index:
                raise DtrainError(
                    f"model: layers {other} and {index} share the parameter {name}; expected each "
                    "layer to have its own, since layers may lie on different stages"
                )
