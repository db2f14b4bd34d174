"""The contract between a model's layers and the stage engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from dtrain.data.block import Block
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.rng import derive_key

State = Tensor | SparseRows | tuple[Tensor, ...]
"""What flows from layer to layer: rows for the block's sources.

``SparseRows`` only enters layer 0.
"""


@dataclass(frozen=True)
class LayerContext:
    """Everything besides its input that a layer's result may depend on.

    ``key`` is derived from (seed, step, microbatch, layer), never from a worker.
    """

    key: int
    training: bool

    def subkey(self, tag: int) -> int:
        """A 64-bit key for the layer's ``tag``-th random decision (dropout masks)."""
        return derive_key(self.key, tag)


class Layer(Protocol):
    """One layer: maps rows of a block's sources to rows of its destinations.

    An ``nn.Module`` whose ``forward(block, state, ctx)`` returns float rows ``[num_dst, F_out]``
    (or a tuple of such tensors, which the next layer receives as its ``state``). The last layer
    returns logits ``[num_dst, num_classes]``.
    """

    def __call__(
        self, block: Block, state: State, ctx: LayerContext
    ) -> Tensor | tuple[Tensor, ...]: ...


ModelFactory = Callable[..., Sequence[nn.Module]]
"""``factory(config: ModelConfig, in_features: int, num_classes: int) -> layers``.

Called under a fixed seed.
"""
