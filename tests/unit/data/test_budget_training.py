"""Features three times as large as ``memory.limit``: what training takes stays below the limit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.config import Config
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.models.layer import LayerContext
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.inputs import InputFetcher, MicrobatchInputs, Prefetcher
from dtrain.runtime.setup import Job, prepare_job
from dtrain.scheduler import Plan, make_plan

LIMIT = 40_000_000
NODES, WIDTH = 60_000, 500


def _anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class _Counted(InputFetcher):
    """Counts the bytes of the inputs that exist, made by the prefetcher's thread."""

    def fetch(self, step: int, microbatch: int) -> MicrobatchInputs:
        inputs = super().fetch(step, microbatch)
        size = _bytes_of(inputs)
        self.alive += size
        self.largest = max(self.largest, size)
        self.most = max(self.most, self.alive)
        weakref.finalize(inputs, self._gone, size)
        return inputs

    def _gone(self, size: int) -> None:
        self.alive -= size

    alive = most = largest = 0


def _bytes_of(inputs: MicrobatchInputs) -> int:
    assert isinstance(inputs.features, Tensor)
    assert inputs.labels is not None
    assert inputs.seed_rows is not None
    found = [inputs.features, inputs.labels, inputs.seed_rows]
    for block in inputs.blocks.values():
        found += [block.csr.indptr, block.csr.indices, block.src_degree]
    return sum(t.numel() * t.element_size() for t in found)


def _run(job: Job, plan: Plan, fetcher: InputFetcher, ahead: int) -> int:
    """Two steps with inputs sampled ahead; as :func:`_train`."""
    prefetcher = Prefetcher(fetcher, job.source, range(2), ahead, FaultFlag(), 60.0)
    try:
        return _train(job, plan, prefetcher, 2)
    finally:
        prefetcher.close()


def _train(job: Job, plan: Plan, prefetcher: Prefetcher, steps: int) -> int:
    """Follow the plan of one worker; the largest anonymous memory seen, sampled where it peaks."""
    layers, most = job.fresh_layers(), 0
    parameters = [p for layer in layers for p in layer.parameters()]
    for step in range(steps):
        gradients = []
        losses: dict[int, Tensor] = {}
        inputs: dict[int, MicrobatchInputs] = {}
        for kind, _, m in plan.actions[0]:
            if kind == "F":
                inputs[m] = prefetcher.take(step, m)
                state: Any = inputs[m].features
                for index, layer in enumerate(layers):
                    state = layer(inputs[m].blocks[index], state, LayerContext(index, True))
                losses[m] = F.cross_entropy(state, inputs[m].labels)
                del state
            else:
                gradients.append(torch.autograd.grad(losses.pop(m), parameters))
                del inputs[m]
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
            "train": {"max_steps": 2, "batch_size": 512},
            "parallel": {"microbatches": 1},
            "memory": {"limit": LIMIT},
        }
    )
    assert NODES * WIDTH * 4 >= 3 * LIMIT
    job = prepare_job(config, 0, 1)
    assert job.layout.microbatches > 1
    assert job.identity["microbatches"] == job.layout.microbatches
    plan = make_plan(job.layout, [0], 1)
    ahead = job.budget.ahead(plan, 0)
    # As many as fit: fewer than a step has, where nothing limits them.
    assert 1 <= ahead < job.layout.microbatches
    # Compiled code is not a part of it, nor are the sampler's numbers for each node.
    few = config.train.model_copy(update={"batch_size": 4})
    small = prepare_job(config.model_copy(update={"train": few}), 0, 1)
    one = make_plan(small.layout, [0], 1)
    _run(small, one, InputFetcher(small.source, small.store, one, 0, small.device), 1)
    job.source.sample(0, 0)
    gc.collect()
    before = _anonymous_bytes()
    fetcher = _Counted(job.source, job.store, plan, 0, job.device)
    most = _run(job, plan, fetcher, ahead)
    assert most - before <= LIMIT
    each = job.budget.each
    assert each is not None
    assert fetcher.largest <= each.inputs()
    # One in use, and those ahead of it.
    assert fetcher.largest * ahead < fetcher.most <= (1 + ahead) * each.inputs()
