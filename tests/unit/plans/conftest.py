"""A small store, a configuration on it, and a run folder with steps of known times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dtrain.config import check_config
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.planning import batch_source, block_sizes, layout_of, model_shapes
from dtrain.runfolder import RunFolder
from dtrain.scheduler import make_plan
from dtrain.scheduler.costmodel import BlockSize, LayerShape, step_costs
from dtrain.scheduler.costmodel import CostModel as Model
from dtrain.scheduler.costs import UNIFORM, Cluster
from dtrain.scheduler.predict import predict


class Known(Model):
    """A model whose times are a formula: forwards 20 ns an edge, backwards 50 ns."""

    def coefficients(
        self, device: str, direction: str, shape: LayerShape
    ) -> tuple[float, float, float, float]:
        factor = 20e-9 if direction == "forward" else 50e-9
        return (factor / min(shape.fan_in, shape.fan_out), 0.0, 0.0, 1e-4)


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of two stages and six microbatches, and its store."""
    folder = tmp_path_factory.mktemp("plans")
    store = folder / "store"
    spec = SynthSpec(nodes=3000, avg_degree=8, classes=4, features=16, seed=1)
    write_store(str(store), synthesize(spec), partitions=4, partitioner="range")
    raw = {
        "data": {"store": str(store)},
        "model": {"name": "sage", "layers": 3, "hidden": 32},
        "sampler": {"name": "neighbor", "fanouts": [5, 5, 5]},
        "train": {"max_steps": 40, "batch_size": 120},
        "parallel": {"stages": 2, "microbatches": 6, "record_actions": True},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


@pytest.fixture
def recorded_run(config_file: Path, tmp_path: Path) -> Callable[..., str]:
    """Writes a run folder of two workers whose actions took just what :class:`Known` says.

    ``links``: how long their transfers took.
    """

    def write(steps: int = 14, overhead_s: float = 0.002, links: Cluster = UNIFORM) -> str:
        config = check_config(yaml.safe_load(config_file.read_text()), "of the test")
        folder = RunFolder(tmp_path / "run")
        store = GraphStore.open(config.data.store)
        folder.claim(config, store.fingerprint)
        layout = layout_of(config, (0, 1, 3))
        shapes = model_shapes(config, store)
        plan = make_plan(layout, range(2), 1)
        folder.event(
            "generation_started",
            worker=0,
            reason="first",
            generation=1,
            cuts=list(layout.cuts),
            workers=plan.workers,
            holders=plan.holders,
            executors=plan.executors,
        )
        source, clock = batch_source(config, store), 100.0
        for step in range(steps):
            sizes = block_sizes(source, step, layout.microbatches)
            found = predict(plan, step_costs(Known(), "cpu", shapes, layout.cuts, sizes), links)
            acted = clock + found.makespan / 1e9
            end = acted + 0.003 + overhead_s
            for w, spans in found.spans.items():
                actions = [
                    {
                        "kind": s.action.kind,
                        "stage": s.action.stage,
                        "microbatch": s.action.microbatch,
                        "start_s": clock + s.start / 1e9,
                        "end_s": clock + s.end / 1e9,
                        "cpu_s": (s.end - s.start) / 1e9,
                        "layers": layer_times(
                            layout.layers_of(s.action.stage),
                            sizes[s.action.microbatch],
                            shapes,
                            s.action.kind,
                        ),
                    }
                    for s in spans
                ]
                phases = {"sum": (acted, acted + 0.002), "vote": (acted + 0.002, acted + 0.002)}
                record = {
                    "step": step,
                    "generation": 1,
                    "start_s": clock,
                    "end_s": end,
                    "actions": actions,
                    "phases": {**phases, "apply": (acted + 0.002, acted + 0.003)},
                }
                folder.actions(w, json.loads(json.dumps(record)))
            clock = end + 0.01
        return str(folder.path)

    return write


def layer_times(
    layers: range, sizes: list[BlockSize], shapes: list[LayerShape], kind: str
) -> list[dict[str, float]]:
    direction = "forward" if kind == "F" else "backward"
    return [
        {
            "layer": i,
            "nnz": sizes[i].nnz,
            "num_src": sizes[i].num_src,
            "num_dst": sizes[i].num_dst,
            # Layers are timed inside the action; what is around them is a tenth more.
            "seconds": 0.9 * Known().seconds("cpu", direction, shapes[i], sizes[i]),  # type: ignore[arg-type]
        }
        for i in layers
    ]
