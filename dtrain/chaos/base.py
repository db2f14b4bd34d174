"""The job that scenarios disturb: a generated graph and a small model on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.chaos.scenario import Shape
from dtrain.config import Config, check_config
from dtrain.errors import DtrainError
from dtrain.scheduler import even_cuts, make_plan

MODELS = ("sage", "gcn")
ZERO_STAGES = (0, 1)

_MODELS: dict[str, dict[str, Any]] = {
    "sage": {
        "model": {"name": "sage", "layers": 3, "hidden": 64, "dropout": 0.2, "norm": "layer"},
        "sampler": {"name": "neighbor", "fanouts": [8, 8, 8]},
        "train": {"max_steps": 40, "batch_size": 512},
    },
    "gcn": {
        "model": {"name": "gcn", "layers": 3, "hidden": 64, "dropout": 0.2},
        "sampler": {"name": "full"},
        "train": {"max_steps": 40},
    },
}
_COMMON: dict[str, Any] = {
    "seed": 7,
    "parallel": {"stages": 3, "microbatches": 8, "redundancy": 2, "timeout_s": 60},
    "checkpoint": {"every_steps": 10},
    "robust": {"lease_s": 3.0},
}


def make_store(folder: Path) -> str:
    """The graph store that all scenarios train on, generated at the first call; its path."""
    from dtrain.data.synth import SynthSpec, synthesize
    from dtrain.data.writer import write_store

    target = folder / "store"
    if not (target / "meta.json").is_file():
        spec = SynthSpec(nodes=4000, avg_degree=10, classes=6, features=32, seed=3)
        write_store(str(target), synthesize(spec), partitions=8)
    return str(target)


def base_config(store: str, model: str, zero: int) -> dict[str, Any]:
    """The undisturbed job's configuration.

    Raises:
        DtrainError: an unknown model or ZeRO stage.
    """
    if model not in MODELS:
        raise DtrainError(f"--model: expected one of {', '.join(MODELS)}, got {model!r}")
    if zero not in ZERO_STAGES:
        raise DtrainError(f"--zero: expected 0 or 1, got {zero}")
    engine = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": zero},
    }
    raw = {**_COMMON, **_MODELS[model], "data": {"store": store}, "deepspeed": engine}
    return dict(json.loads(json.dumps(raw)))


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with ``section.field`` values changed."""
    out: dict[str, Any] = json.loads(json.dumps(raw))
    for path, value in overrides.items():
        *sections, last = path.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return out


def checked(raw: Mapping[str, Any], name: str) -> Config:
    """The configuration as the job will see it."""
    return check_config(dict(raw), f"of scenario {name}")


def shape_of(config: Config, workers: int) -> Shape:
    """The first plan of a job of so many workers."""
    from dtrain.planning import layout_of

    assert isinstance(config.parallel.stages, int)
    # Who holds and executes a stage in a first plan does not depend on where it is cut.
    cuts = even_cuts(config.model.layers, config.parallel.stages)
    plan = make_plan(layout_of(config, cuts), range(workers), 1)
    executors = tuple(tuple(sorted(set(stage))) for stage in plan.executors)
    return Shape(workers, plan.holders, executors)
