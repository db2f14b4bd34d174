"""The fairest peer for sampling and training: a neighbour sampler of vectorised torch operations.

PyTorch Geometric's own loader needs a native extension that PyPI does not have. This is what its
user can write with PyPI's packages alone: draws with replacement (the cheapest to vectorise), one
``unique`` a layer to renumber, no loop over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Layer = tuple[Tensor, int, int]


class TorchSampler:
    """Samples from a CSR of in-neighbours, ``indptr`` int64 [N + 1] and ``indices`` int [E]."""

    def __init__(self, indptr: NDArray[Any], indices: NDArray[Any], seed: int) -> None:
        self._indptr = torch.from_numpy(indptr)
        self._indices = torch.from_numpy(indices).long()
        self._degree = self._indptr[1:] - self._indptr[:-1]
        self._generator = torch.Generator().manual_seed(seed)
        self._position = torch.empty(len(indptr) - 1, dtype=torch.int64)

    def sample(self, seeds: NDArray[Any], fanouts: Sequence[int]) -> tuple[list[Layer], Tensor]:
        """Layers from the features up, and the global ids of the first one's sources.

        A layer is its edges (int64 [2, E], sources above destinations), its numbers of sources and
        destinations; destinations are the first sources.
        """
        nodes = torch.from_numpy(seeds)
        layers = []
        for fanout in reversed(fanouts):
            degree = self._degree[nodes]
            has = degree > 0
            draws = torch.rand(len(nodes), fanout, generator=self._generator)
            offsets = (
                (draws * degree[:, None]).long().clamp_(max=(degree - 1).clamp(min=0)[:, None])
            )
            neighbors = self._indices[(self._indptr[nodes][:, None] + offsets)[has]].view(-1)
            rows = torch.arange(len(nodes))[has].repeat_interleave(fanout)
            found = torch.unique(neighbors)
            self._position[found] = -1
            self._position[nodes] = torch.arange(len(nodes))
            new = found[self._position[found] < 0]
            self._position[new] = torch.arange(len(nodes), len(nodes) + len(new))
            edges = torch.stack([self._position[neighbors], rows])
            sources = torch.cat([nodes, new])
            layers.append((edges, len(sources), len(nodes)))
            nodes = sources
        return layers[::-1], nodes
