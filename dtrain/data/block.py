"""What a layer computes on: the bipartite block of one layer of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr


@dataclass(eq=False)
class Block:
    """Edges from the layer's source nodes to its destination nodes.

    ``csr``: pattern [num_dst, num_src]; row = destination, columns = positions among the sources.
    The destinations are the first ``num_dst`` sources, so ``x[:block.num_dst]`` is their own input.
    ``src_degree``: int64 [num_src], in-degree of each source node in the *whole* graph.
    ``cache``: values derived from the block that layers want to keep (edge weights, say); a
    block of a fixed microbatch is reused in every epoch, so they are computed once.
    """

    csr: Csr
    src_degree: Tensor
    cache: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @property
    def num_dst(self) -> int:
        return self.csr.num_rows

    @property
    def num_src(self) -> int:
        return self.csr.num_cols

    @property
    def nnz(self) -> int:
        return self.csr.nnz

    def dst_degree(self) -> Tensor:
        """int64 [num_dst]: in-degree of each destination in the whole graph."""
        return self.src_degree[: self.num_dst]

    def to(self, device: torch.device | str) -> Block:
        """The same block on ``device``."""
        return self.map(lambda t: t.to(device))

    def map(self, move: Callable[[Tensor], Tensor]) -> Block:
        """The same block of tensors that ``move`` made of ours, without what layers keep of it."""
        return Block(self.csr.map(move), move(self.src_degree))
