"""Features three times as large as ``memory.limit``: what training takes stays below the limit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dtrain.config import Config
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.models.layer import LayerContext
from dtrain.runtime.setup import Job, prepare_job

LIMIT = 24_000_000
NODES, WIDTH = 72_000, 256


def _anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _train(job: Job, steps: int) -> int:
    """Train and return the largest anonymous memory seen, sampled where it peaks."""
    layers, most = job.fresh_layers(), 0
    parameters = [p for layer in layers for p in layer.parameters()]
    for step in range(steps):
        for m in range(job.layout.microbatches):
            sample = job.source.sample(step, m)
            state: Any = job.store.gather_features(sample.input_nodes)
            for index, layer in enumerate(layers):
                state = layer(sample.blocks[index], state, LayerContext(index, True))
            labels = torch.from_numpy(job.store.labels[sample.seeds])
            most = max(most, _anonymous_bytes())
            torch.autograd.grad(F.cross_entropy(state, labels), parameters)
            most = max(most, _anonymous_bytes())
    return most


@pytest.mark.parametrize("where", ["local", pytest.param("s3", marks=pytest.mark.chaos)])
def test_features_of_three_budgets(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / "store")
    if where == "s3":
        url = f"s3://{request.getfixturevalue('s3').bucket}/store"
    spec = SynthSpec(nodes=NODES, avg_degree=10, classes=5, features=WIDTH, seed=0)
    write_store(url, synthesize(spec), partitions=2, partitioner="range")
    config = Config.model_validate(
        {
            "data": {"store": url, "cache_dir": str(tmp_path / "cache")},
            "model": {"name": "sage", "hidden": 32},
            "sampler": {"name": "neighbor", "fanouts": [5, 5]},
            "train": {"max_steps": 2, "batch_size": 1024},
            "parallel": {"microbatches": 1},
            "memory": {"limit": LIMIT},
        }
    )
    assert NODES * WIDTH * 4 >= 3 * LIMIT
    job = prepare_job(config, 0, 1)
    assert job.layout.microbatches > 1
    assert job.identity["microbatches"] == job.layout.microbatches
    gc.collect()
    # The sampler keeps a number for each node, whatever the microbatches: not a part of them.
    job.source.sample(0, 0)
    before = _anonymous_bytes()
    assert _train(job, 2) - before <= LIMIT
