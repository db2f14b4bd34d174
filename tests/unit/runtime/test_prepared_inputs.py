"""What layer 0 makes of features ahead of its turn: the same bits, wherever the rows lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.config import Config
from dtrain.data.features import FeatureCache, Features
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.models.layer import LayerContext, Prepared, layer_key
from dtrain.runtime.inputs import InputFetcher
from dtrain.runtime.setup import Job, prepare_job
from dtrain.scheduler import make_plan

STEP = 3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("prepared") / "store"
    spec = SynthSpec(nodes=3000, avg_degree=8, classes=4, features=24, seed=1)
    write_store(str(folder), synthesize(spec), partitions=1, partitioner="range")
    return str(folder)


def job_of(url: str, model: dict[str, Any], sampler: dict[str, Any]) -> Job:
    raw = {
        "data": {"store": url},
        "model": {"name": "sage", "hidden": 16, **model},
        "sampler": sampler,
        "train": {"max_steps": 4, "batch_size": 64 if sampler["name"] == "neighbor" else None},
        "parallel": {"microbatches": 1},
    }
    return prepare_job(Config.model_validate(raw), 0, 1)


SAMPLED = {"name": "neighbor", "fanouts": [4, 4]}


@pytest.mark.parametrize("input_dropout", [0.0, 0.4])
def test_prepared_rows_give_the_bits_of_gathered_ones(url: str, input_dropout: float) -> None:
    job = job_of(url, {"input_dropout": input_dropout}, SAMPLED)
    plan = make_plan(job.layout, [0], 1)
    ctx = LayerContext(layer_key(job.config.seed, STEP, 0, 0), training=True)
    plain = InputFetcher(job.source, job.store, plan, 0, job.device).fetch(STEP, 0)
    assert isinstance(plain.features, Tensor)
    expected = job.layers[0](plain.blocks[0], plain.features, ctx)
    places: list[Features] = [job.store, FeatureCache(job.store, 500)]
    for features in places:
        fetcher = InputFetcher(
            job.source, job.store, plan, 0, job.device, features, prepare=job.prepare
        )
        given = fetcher.fetch(STEP, 0)
        assert isinstance(given.features, Prepared)
        # Never more memory than the budget counts for the rows that they stand for.
        assert given.features.rows.numel() <= plain.features.numel()
        assert torch.equal(job.layers[0](given.blocks[0], given.features, ctx), expected)
        moved = given.map(lambda tensor: tensor.clone())
        assert isinstance(moved.features, Prepared)
        assert torch.equal(moved.features.rows, given.features.rows)


@pytest.mark.parametrize(
    "model",
    [{"aggregator": "max"}, {"residual": True, "dropout": 0.5}, {"hidden": 2}],
    ids=["maximum", "a residual of rows without dropout", "projected first"],
)
def test_what_has_nothing_to_prepare_gets_its_rows(url: str, model: dict[str, Any]) -> None:
    job = job_of(url, model, {"name": "neighbor", "fanouts": [40, 40]})
    plan = make_plan(job.layout, [0], 1)
    fetchers = [
        InputFetcher(job.source, job.store, plan, 0, job.device, prepare=prepare)
        for prepare in (None, job.prepare)
    ]
    rows = [fetcher.fetch(STEP, 0).features for fetcher in fetchers]
    assert job.prepare is not None
    assert isinstance(rows[0], Tensor)
    assert isinstance(rows[1], Tensor)
    assert torch.equal(rows[0], rows[1])


def test_nothing_is_prepared_of_what_is_kept_nor_by_other_layers(url: str) -> None:
    assert job_of(url, {}, {"name": "full"}).prepare is None
    assert job_of(url, {"name": "gcn"}, SAMPLED).prepare is None
