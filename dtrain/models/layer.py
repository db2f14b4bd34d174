"""The contract between a model's layers and the stage engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from dtrain.data.block import Block
from dtrain.kernels.csr import SparseRows
from dtrain.kernels.rng import derive_key
from dtrain.kernels.rows.stored import StoredRows

_LAYER_TAG = 0x4C41594552


@dataclass(frozen=True, eq=False)
class Prepared:
    """What :meth:`PreparingLayer.prepare` made, ``rows``: float [num_dst, ...]."""

    rows: Tensor

    def map(self, move: Callable[[Tensor], Tensor]) -> Prepared:
        """The same of a tensor that ``move`` made of ours."""
        return Prepared(move(self.rows))


State = Tensor | SparseRows | Prepared | tuple[Tensor, ...]
"""What flows from layer to layer: rows for the block's sources.

``SparseRows`` only enters layer 0, and ``Prepared`` only the layer that made it.
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


def layer_key(seed: int, step: int, microbatch: int, layer: int) -> int:
    """:attr:`LayerContext.key` of a layer's training on a microbatch."""
    return derive_key(seed, _LAYER_TAG, step, microbatch, layer)


class Layer(Protocol):
    """One layer: maps rows of a block's sources to rows of its destinations.

    An ``nn.Module`` whose ``forward(block, state, ctx)`` returns float rows ``[num_dst, F_out]``
    (or a tuple of such tensors, which the next layer receives as its ``state``). The last layer
    returns logits ``[num_dst, num_classes]``.
    """

    def __call__(
        self, block: Block, state: State, ctx: LayerContext
    ) -> Tensor | tuple[Tensor, ...]: ...


@runtime_checkable
class PreparingLayer(Protocol):
    """A :class:`Layer` that may begin its work on features where they are sampled and gathered.

    That is a thread beside the one that computes, ahead of it, and rows that only go into a sum
    need not be gathered.
    """

    def prepare(self, block: Block, x: Tensor | StoredRows, ctx: LayerContext) -> Prepared | None:
        """What ``forward`` makes of ``x`` before any parameter has a part in it; it gets it as its
        ``state`` then, and has the same result.

        ``x``: float32 [num_src, in_features] on the CPU. No more numbers than ``x`` has may come of
        it. None if there is nothing to gain, by the layer and the size of ``block`` alone.
        """
        ...


ModelFactory = Callable[..., Sequence[nn.Module]]
"""``factory(config: ModelConfig, in_features: int, num_classes: int) -> layers``.

Called under a fixed seed.
"""
