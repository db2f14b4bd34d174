"""A small graph, its whole block, and contexts."""

from __future__ import annotations

import pytest
import torch

from dtrain.data.block import Block
from dtrain.kernels.csr import Csr, SparseRows

NODES, FEATURES = 24, 10


def csr_from_dense(dense: torch.Tensor) -> Csr:
    counts = (dense != 0).sum(1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Csr(indptr, dense.nonzero()[:, 1].contiguous(), dense.shape[1])


@pytest.fixture
def adjacency() -> torch.Tensor:
    """float64 [N, N], row = destination; directed, one self loop, an isolated node, a hub."""
    generator = torch.Generator().manual_seed(0)
    dense = (torch.rand(NODES, NODES, generator=generator) < 0.15).double()
    dense.fill_diagonal_(0)
    dense[3, 3] = 1
    dense[5] = 0
    dense[:, 5] = 0
    dense[7] = 1
    return dense


@pytest.fixture
def whole(adjacency: torch.Tensor) -> Block:
    """The block of all nodes with all their edges."""
    return Block(csr_from_dense(adjacency), adjacency.sum(1).long())


@pytest.fixture
def part(adjacency: torch.Tensor) -> tuple[Block, torch.Tensor]:
    """The block of some destinations with all their edges, and the node of every source."""
    destinations = [9, 3, 5, 7, 0]
    rest = [node for node in range(NODES) if node not in destinations]
    nodes = torch.tensor(destinations + rest)
    csr = csr_from_dense(adjacency[nodes][:, nodes][: len(destinations)])
    return Block(csr, adjacency.sum(1).long()[nodes]), nodes


@pytest.fixture
def features() -> torch.Tensor:
    """float64 [N, FEATURES], most of them zero."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, FEATURES, dtype=torch.float64, generator=generator)
    return x * (torch.rand(x.shape, generator=generator) < 0.3)


@pytest.fixture
def sparse_features(features: torch.Tensor) -> SparseRows:
    """The same features as sparse rows."""
    return SparseRows(csr_from_dense(features), features[features != 0])
