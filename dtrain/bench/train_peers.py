"""What ``dtrain bench train`` measures dtrain against, each in a process of its own.

``python -m dtrain.bench.train_peers pyg|ddp STORE ...`` prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.bench.torch_sampler import Layer, TorchSampler
from dtrain.config import ModelConfig, SamplerConfig
from dtrain.data.batches import BatchSource
from dtrain.data.store import GraphStore
from dtrain.models.build import build_layers
from dtrain.models.layer import LayerContext

_TRIAL_STEPS, _TRIALS = 8, 2


def main() -> None:
    """Train as a peer and print ``{"seeds_per_s": ..., "way": ...}``."""
    parser = argparse.ArgumentParser(prog="python -m dtrain.bench.train_peers")
    parser.add_argument("peer", choices=["pyg", "ddp"])
    parser.add_argument("store")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--fanouts", type=int, nargs="+", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    store = GraphStore.open(options.store)
    found = _pyg(store, options) if options.peer == "pyg" else _ddp(store, options)
    if found is not None:
        print(json.dumps(found))


class _PygSage(nn.Module):
    """The model of the benchmark as a user of PyTorch Geometric writes it."""

    def __init__(self, features: int, hidden: int, classes: int, layers: int) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        widths = [features, *[hidden] * (layers - 1), classes]
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, layers: list[Layer], csr: bool) -> Tensor:
        for i, (conv, layer) in enumerate(zip(self.convs, layers, strict=True)):
            edges, num_src, num_dst = layer
            adjacency = _csr(edges, num_src, num_dst) if csr else edges
            x = conv((x, x[:num_dst]), adjacency)
            if i < len(layers) - 1:
                x = F.dropout(F.relu(x), 0.2, self.training)
        return x


def _csr(edges: Tensor, num_src: int, num_dst: int) -> Tensor:
    counts = torch.bincount(edges[1], minlength=num_dst)
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.sparse_csr_tensor(indptr, edges[0], torch.ones(edges.shape[1]), (num_dst, num_src))


def _pyg(store: GraphStore, options: Any) -> dict[str, Any]:
    """The fastest of eight ways: CSR or scatter, sampling ahead in a thread or not, one thread for
    torch or all."""
    sampler = TorchSampler(np.asarray(store.indptr), np.asarray(store.indices), seed=0)
    features = store.gather_features(np.arange(store.num_nodes, dtype=np.int64))
    assert isinstance(features, Tensor)
    labels = torch.from_numpy(np.asarray(store.labels))
    model = _PygSage(
        features.shape[1], options.hidden, store.meta.num_classes, len(options.fanouts)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    seeds = store.split(0).train
    order = np.random.default_rng(0).permutation(seeds)

    def batches(steps: int) -> Iterator[Any]:
        for step in range(steps):
            begin = step * options.batch % (len(order) - options.batch)
            yield np.ascontiguousarray(order[begin : begin + options.batch])

    def make(ids: Any) -> tuple[list[Layer], Tensor, Tensor]:
        layers, nodes = sampler.sample(ids, options.fanouts)
        return layers, features[nodes], labels[torch.from_numpy(ids)]

    def train(steps: int, csr: bool, ahead: bool, threads: int) -> float:
        torch.set_num_threads(threads)
        begin = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            for layers, x, y in (
                _ahead(pool, make, batches(steps)) if ahead else map(make, batches(steps))
            ):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(model(x, layers, csr), y))
                optimizer.step()
        return time.perf_counter() - begin

    ways = list(product((True, False), (True, False), sorted({1, options.threads})))
    for chosen in ways:
        train(2, *chosen)
    csr, ahead, threads = min(
        ways, key=lambda way: min(train(_TRIAL_STEPS, *way) for _ in range(_TRIALS))
    )
    seconds = train(options.steps, csr, ahead, threads)
    where = "sampled in a thread beside" if ahead else "sampled between steps"
    way = f"{'csr' if csr else 'scatter'}, {where}, {threads} of {options.threads} threads"
    return {"seeds_per_s": options.steps * options.batch / seconds, "way": way}


def _ahead(
    pool: ThreadPoolExecutor, make: Callable[[Any], Any], items: Iterator[Any]
) -> Iterator[Any]:
    """The results of ``make``, of which the next one is already being made."""
    waiting = [pool.submit(make, item) for item in (next(items), next(items))]
    for item in items:
        yield waiting.pop(0).result()
        waiting.append(pool.submit(make, item))
    for future in waiting:
        yield future.result()


def _ddp(store: GraphStore, options: Any) -> dict[str, Any] | None:
    """The same layers, sampler and kernels under torch's data-parallel training, by torchrun.

    Every process takes its part of each batch, as one microbatch.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    source = BatchSource(
        store,
        split=0,
        sampler=SamplerConfig(name="neighbor", fanouts=options.fanouts),
        batch_size=options.batch,
        microbatches=world,
        num_layers=len(options.fanouts),
        seed=0,
    )
    config = ModelConfig(
        name="sage",
        layers=len(options.fanouts),
        hidden=options.hidden,
        dropout=0.2,
        input_dropout=0.0,
    )
    meta = store.meta
    model = DistributedDataParallel(
        _Stack(build_layers(config, meta.num_features, meta.num_classes, 0))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def make(step: int) -> tuple[Any, Any, Tensor]:
        sample = source.sample(step, rank)
        labels = torch.from_numpy(np.asarray(store.labels)[sample.seeds])
        return sample.blocks, store.gather_features(sample.input_nodes), labels

    begin = 0.0
    with ThreadPoolExecutor(1) as pool:
        steps = iter(range(_TRIAL_STEPS + options.steps))
        for step, (blocks, x, y) in enumerate(_ahead(pool, make, steps)):
            if step == _TRIAL_STEPS:
                dist.barrier()
                begin = time.perf_counter()
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(blocks, x, step), y))
            optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - begin
    dist.destroy_process_group()
    if rank:
        return None
    return {"seeds_per_s": options.steps * options.batch / seconds, "way": "ddp"}


class _Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, blocks: list[Any], x: Any, step: int) -> Tensor:
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(block, x, LayerContext(step * len(blocks) + index, True))
        result: Tensor = x
        return result


if __name__ == "__main__":
    main()
