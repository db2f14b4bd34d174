"""The ledger of an epoch's seeds, kept by partition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.config import SamplerConfig
from dtrain.data.batches import BatchSource
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.runtime.partitions import Partitions

PARTITIONS = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> GraphStore:
    folder = str(tmp_path_factory.mktemp("partitions") / "store")
    graph = synthesize(SynthSpec(nodes=300, avg_degree=4, classes=2, features=4, seed=0))
    write_store(folder, graph, partitions=PARTITIONS, partitioner="range")
    return GraphStore.open(folder, None)


def job_of(store: GraphStore, name: str = "neighbor", batch_size: int | None = 32) -> Any:
    sampler = SamplerConfig(name=name, fanouts=[2] if name == "neighbor" else [])  # type: ignore[arg-type]
    source = BatchSource(
        store, split=0, sampler=sampler, batch_size=batch_size, microbatches=3, num_layers=1, seed=2
    )
    config = SimpleNamespace(
        parallel=SimpleNamespace(microbatches=3), data=SimpleNamespace(split=0)
    )
    return SimpleNamespace(store=store, source=source, config=config)


@pytest.mark.parametrize(("name", "batch"), [("neighbor", 32), ("full", None), ("cluster", None)])
def test_every_epoch_of_every_sampler_is_full(store: GraphStore, name: str, batch: Any) -> None:
    job = job_of(store, name, batch)
    kept = Partitions(job, 0, {})
    for step in range(2 * job.source.steps_per_epoch):
        kept.advance(step)
    assert all(bool((seeds == 1).all()) for seeds in kept.tensors().values())
    assert sum(map(len, kept.tensors().values())) == len(store.split(0).train)


def test_the_next_holder_goes_on_in_mid_epoch_and_notices_a_step_done_twice(
    store: GraphStore,
) -> None:
    job = job_of(store)
    last = job.source.steps_per_epoch
    kept = Partitions(job, 0, {})
    for step in range(3):
        kept.advance(step)
    saved = {name: seeds.clone() for name, seeds in kept.tensors().items()}
    assert [*saved] == [f"partition/{p}/ledger/seeds" for p in range(PARTITIONS)]
    assert sum(int(seeds.sum()) for seeds in saved.values()) == 3 * 32
    for first, wrong in ((3, False), (2, True), (4, True)):
        other = Partitions(job, 3, saved)
        for step in range(first, last - 1):
            other.advance(step)
        if wrong:
            with pytest.raises(AssertionError, match="32 seeds were not trained exactly once"):
                other.advance(last - 1)
        else:
            other.advance(last - 1)
        other.advance(last)


def test_an_epoch_whose_beginning_is_not_known_is_not_judged(store: GraphStore) -> None:
    job = job_of(store)
    last = job.source.steps_per_epoch
    saved = {"partition/0/ledger/seeds": torch.zeros(1, dtype=torch.uint8)}
    kept = Partitions(job, 3, saved)
    assert kept.tensors() == {}, "nor is it saved"
    for step in range(3, last + 1):
        kept.advance(step)
    assert sum(int(seeds.sum()) for seeds in kept.tensors().values()) == 32
