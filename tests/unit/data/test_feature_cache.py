"""The cache of feature rows: the same values, and about as many hits as can be had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.config import Config, SamplerConfig
from dtrain.data.batches import BatchSource
from dtrain.data.features import FeatureCache, cache_bytes, rows_within
from dtrain.data.graph import CsrFeatures, GraphArrays
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError
from dtrain.runtime.setup import prepare_job

NODES, SHARE = 20_000, 0.1


@pytest.fixture(scope="module")
def graph() -> GraphArrays:
    return synthesize(SynthSpec(nodes=NODES, avg_degree=15, classes=4, features=8, seed=2))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, graph: GraphArrays) -> GraphStore:
    folder: Path = tmp_path_factory.mktemp("cache") / "store"
    write_store(str(folder), graph, partitions=1, partitioner="range")
    return GraphStore.open(str(folder))


def accesses(store: GraphStore, steps: range) -> list[np.ndarray]:
    source = BatchSource(
        store,
        split=0,
        sampler=SamplerConfig(name="neighbor", fanouts=[5, 5]),
        batch_size=200,
        microbatches=1,
        num_layers=2,
        seed=0,
    )
    return [source.sample(step, 0).input_nodes for step in steps]


def test_hits_are_near_the_best_static_choice(store: GraphStore) -> None:
    cache = FeatureCache(store, int(SHARE * NODES))
    asked = accesses(store, range(20))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(cache.gather_features, asked))
    for nodes, rows in zip(asked, found, strict=True):
        assert torch.equal(rows, store.gather_features(nodes))
    counts = np.bincount(np.concatenate(asked), minlength=NODES)
    best = np.sort(counts)[::-1][: int(SHARE * NODES)].sum() / counts.sum()
    assert cache.use.rows == counts.sum()
    assert 0.9 * best <= cache.use.hit_rate <= best


def test_what_lies_outside_is_refused_as_by_the_store(store: GraphStore) -> None:
    for nodes in ([NODES], [-1]):
        with pytest.raises(IndexError, match="expected ids in"):
            FeatureCache(store, 5).gather_features(np.array(nodes))
    assert FeatureCache(store, 5).gather_features(np.empty(0, np.int64)).shape == (0, 8)


def test_a_remote_store_is_asked_for_the_rest_only(
    store: GraphStore, graph: GraphArrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store("memory://cache/store", graph, partitions=1, partitioner="range")
    far = GraphStore.open("memory://cache/store", str(tmp_path))
    cache = FeatureCache(far, int(SHARE * NODES))
    hot = np.argsort(-store.in_degree(), kind="stable")[: int(SHARE * NODES)]
    cache.gather_features(hot[:1])
    fetched: list[np.ndarray] = []
    gather = GraphStore.gather_features
    monkeypatch.setattr(
        GraphStore, "gather_features", lambda s, n: fetched.append(n) or gather(s, n)
    )
    cold = int(np.argmin(store.in_degree()))
    nodes = np.array([hot[3], cold, hot[0]])
    assert torch.equal(cache.gather_features(nodes), gather(store, nodes))
    assert [n.tolist() for n in fetched] == [[cold]]


def job_of(store: GraphStore, **memory: Any) -> Any:
    config = {
        "data": {"store": store.url},
        "model": {"name": "sage", "hidden": 8},
        "sampler": {"name": "neighbor", "fanouts": [3, 3]},
        "train": {"max_steps": 1, "batch_size": 64},
        "parallel": {"microbatches": 2},
        "memory": memory,
    }
    return prepare_job(Config.model_validate(config), 0, 1)


def test_a_run_has_the_cache_that_it_asks_for_and_that_fits(store: GraphStore) -> None:
    plain = job_of(store)
    assert plain.features is plain.store
    cached = job_of(store, feature_cache=SHARE)
    assert cached.features._size == int(SHARE * NODES)
    wide = job_of(store, limit="1GB", feature_cache=SHARE)
    assert wide.features._size == int(SHARE * NODES)
    peak = wide.budget.peak_bytes - wide.budget.cache_bytes
    # Half as much as it takes is left beside the microbatches, whose number does not change.
    room = cache_bytes(store, SHARE) // 2
    tight = job_of(store, limit=peak + room, feature_cache=SHARE)
    assert tight.features._size == rows_within(store, room) < int(SHARE * NODES)
    assert tight.layout.microbatches == wide.layout.microbatches == 2
    # What the cache does not change is no part of the identity.
    assert cached.identity == plain.identity


def test_sparse_features_are_refused(tmp_path: Path) -> None:
    graph = synthesize(SynthSpec(nodes=50, avg_degree=4, classes=2, features=8, seed=2))
    one = CsrFeatures(np.arange(51), np.arange(50), np.ones(50, np.float32), 64)
    sparse = replace(graph, features=one)
    write_store(str(tmp_path / "sparse"), sparse, partitions=1, partitioner="range")
    with pytest.raises(DtrainError, match=r"memory\.feature_cache: expected none"):
        job_of(GraphStore.open(str(tmp_path / "sparse")), feature_cache=0.5)
