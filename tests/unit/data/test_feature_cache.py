"""The cache of feature rows: the same values, and about as many hits as can be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dtrain.config import SamplerConfig
from dtrain.data.batches import BatchSource
from dtrain.data.features import FeatureCache
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError

SHARE = 0.1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> GraphStore:
    folder: Path = tmp_path_factory.mktemp("cache") / "store"
    spec = SynthSpec(nodes=20_000, avg_degree=15, classes=4, features=8, seed=2)
    write_store(str(folder), synthesize(spec), partitions=1, partitioner="range")
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
    cache = FeatureCache(store, SHARE)
    for by_frequency in (False, True):
        if by_frequency:
            cache.readmit()
        asked = accesses(store, range(20 * by_frequency, 20 * by_frequency + 20))
        for nodes in asked:
            assert torch.equal(cache.gather(nodes), store.gather_features(nodes))
        counts = np.bincount(np.concatenate(asked), minlength=store.num_nodes)
        best = np.sort(counts)[::-1][: int(SHARE * store.num_nodes)].sum() / counts.sum()
        assert 0 < cache.use.hit_rate <= best
        assert cache.use.hit_rate >= 0.9 * best


def test_what_cannot_be_cached_is_refused(store: GraphStore) -> None:
    for share in (0.0, 1.5):
        with pytest.raises(DtrainError, match="share"):
            FeatureCache(store, share)
