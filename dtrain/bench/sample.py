"""Edges sampled in a second: whole blocks of 2 layers, fanouts 10 and 10."""

from __future__ import annotations

import hashlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dtrain.bench.contest import Row, installed
from dtrain.bench.graphs import SYNTHETIC, skewed
from dtrain.bench.torch_sampler import TorchSampler
from dtrain.data.sample.neighbor import Adjacency, Ids, SlotPool, sample_block
from dtrain.kernels.rng import derive_key

FANOUTS = (10, 10)
BATCH = 1024
_BATCHES = 60


@dataclass(frozen=True)
class SampleReport:
    """``sampled_edges_per_s``: with ``threads`` threads, a batch each; median over the repeats.

    ``one_thread_edges_per_s``: with one. ``edges_per_cpu_s``: with ``threads`` threads, for each
    second that a core worked on them, whatever else the machine does meanwhile.
    ``rss_growth_bytes``: how far resident memory rose from the first to the last repeat.
    ``blocks_sha256``: the same for any number of threads.
    """

    sampled_edges_per_s: float
    one_thread_edges_per_s: float
    edges_per_cpu_s: float
    edges_per_batch: float
    threads: int
    rss_growth_bytes: int
    blocks_sha256: str
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def bench_sample(against: str, *, threads: int, nodes: int, repeats: int) -> SampleReport:
    """Sample batches of 1,024 seeds of the generated graph, in turns with the peers.

    torch and PyG have no sampler without a native extension; the peer is one of vectorised torch
    operations, the fastest that can be written with PyPI's packages alone.

    Raises:
        DtrainError: an unknown peer in ``against``; or blocks that differed between thread counts.
    """
    graph = skewed(nodes)
    sampler = _Batches(Adjacency.of(graph.indptr, graph.indices))
    peers = installed(against)
    torch_sampler = TorchSampler(graph.indptr, graph.indices, seed=0) if peers else None
    taken: dict[str, list[float]] = {"one": [], "many": [], "torch": []}
    worked: list[float] = []
    digests: set[str] = set()
    edges, theirs = 0, 0
    resident = 0
    with ThreadPoolExecutor(threads) as pool:
        for repeat in range(repeats + 1):
            for name in taken:
                begin, cpu = time.perf_counter(), time.process_time()
                if name == "one":
                    found = [sampler.edges(i) for i in range(_BATCHES)]
                elif name == "many":
                    found = list(pool.map(sampler.edges, range(_BATCHES)))
                elif torch_sampler is not None:
                    theirs = sum(_edges_of(torch_sampler, sampler.seeds(i)) for i in range(8))
                if repeat:  # the first turn compiles and warms up
                    taken[name].append(time.perf_counter() - begin)
                    if name == "many":
                        worked.append(time.process_time() - cpu)
            edges = sum(found)
            if repeat == 1:
                resident = _resident_bytes()
        grown = max(0, _resident_bytes() - resident)
        digests.update(map(sampler.digest, (1, 1)))
        digests.update(pool.map(sampler.digest, [1] * threads))
    if len(digests) != 1:
        raise RuntimeError(f"expected the same blocks on every thread, got {len(digests)}")
    one, many = (edges / statistics.median(taken[name]) for name in ("one", "many"))
    rows = []
    if torch_sampler is not None:
        ms = statistics.median(taken["many"]) / _BATCHES * 1e3
        peer_ms = statistics.median(taken["torch"]) / theirs * edges / _BATCHES * 1e3
        shape = f"{BATCH} x {FANOUTS[0]} x {FANOUTS[1]}"
        name = "torch: vectorised sampler"
        row = Row("sample", SYNTHETIC, shape, ms, name, peer_ms, round(peer_ms / ms, 2))
        rows.append(row)
    return SampleReport(
        round(many),
        round(one),
        round(edges / statistics.median(worked)),
        edges / _BATCHES,
        threads,
        grown,
        digests.pop(),
        rows,
    )


def _edges_of(sampler: TorchSampler, seeds: Ids) -> int:
    return sum(len(edge_index[0]) for edge_index, _, _ in sampler.sample(seeds, FANOUTS)[0])


class _Batches:
    """Batches of seeds by number; safe to use from several threads."""

    def __init__(self, graph: Adjacency) -> None:
        self._graph = graph
        self._pool = SlotPool(graph.num_nodes)
        self._order = np.random.default_rng(0).permutation(graph.num_nodes)

    def seeds(self, number: int) -> Ids:
        begin = number * BATCH % (len(self._order) - BATCH)
        return np.ascontiguousarray(self._order[begin : begin + BATCH], dtype=np.int64)

    def edges(self, number: int) -> int:
        """Edges in the blocks of batch ``number``."""
        return sum(block.nnz for block in self._blocks(number))

    def digest(self, number: int) -> str:
        """sha256 of the blocks of batch ``number``."""
        digest = hashlib.sha256()
        for block in self._blocks(number):
            digest.update(block.csr.indptr.numpy().tobytes() + block.csr.indices.numpy().tobytes())
        return digest.hexdigest()

    def _blocks(self, number: int) -> list[Any]:
        nodes, blocks = self.seeds(number), []
        for layer, fanout in enumerate(FANOUTS):
            block, nodes = sample_block(
                self._graph,
                self._pool,
                nodes,
                fanout=fanout,
                replace=False,
                key=derive_key(0, number, layer),
            )
            blocks.append(block)
        return blocks


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
