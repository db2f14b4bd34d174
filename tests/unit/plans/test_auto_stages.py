"""``parallel.stages: auto``: one layout for all workers of a job, with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.config import load_config
from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError
from dtrain.models.build import build_layers
from dtrain.planning import batch_source, fixed_cuts, job_layout, layer_shape
from dtrain.scheduler import Layout


def layout(config_file: Path, *overrides: str, workers: int = 4) -> tuple[Layout, str]:
    config = load_config(config_file, list(overrides))
    store = GraphStore.open(config.data.store)
    meta = store.meta
    layers = build_layers(config.model, meta.num_features, meta.num_classes, config.seed)
    return job_layout(config, batch_source(config, store), layers, workers)


def test_what_leaves_no_choice_is_taken_as_it_is(config_file: Path) -> None:
    assert layout(config_file, "parallel.stages=1") == (Layout((0, 3), 6), "")
    assert layout(config_file, "parallel.stages=3") == (Layout((0, 1, 2, 3), 6), "")
    assert layout(config_file, "parallel.cuts=[2]") == (Layout((0, 2, 3), 6), "")


def test_a_number_of_stages_is_cut_where_the_slowest_is_fastest(config_file: Path) -> None:
    found, reason = layout(config_file)
    assert found == Layout((0, 1, 3), 6)
    assert reason.startswith("2 stages cut before layers (1,): ")
    assert layout(config_file, workers=64) == (found, reason)
    assert layout(config_file, workers=1)[0] == found
    # Sampled blocks shrink from layer to layer; without sampling only the last ones are small.
    six = ["model.layers=6", "parallel.stages=3"]
    assert layout(config_file, *six, "sampler.fanouts=[3,3,3,3,3,3]")[0].cuts == (0, 1, 3, 6)
    assert layout(config_file, *six, "sampler={name: full}")[0].cuts == (0, 2, 3, 6)


def test_auto_chooses_by_memory_and_says_so(config_file: Path) -> None:
    found, reason = layout(config_file, "parallel.stages=auto")
    assert found.cuts == (0, 3)
    assert reason.startswith("1 stage (pure data parallelism) predicted fastest of a run's plans")
    assert "by number of stages, in 1f1b order; 1: " in reason
    assert layout(config_file, "parallel.stages=auto") == (found, reason)
    # Two layers of 32 MiB each, with gradients and optimizer state.
    wide = ["parallel.stages=auto", "model.hidden=1024", "parallel.redundancy=1"]
    wide += ["model.layers=4", "sampler.fanouts=[2,2,2,2]"]
    assert "fit in memory" not in layout(config_file, *wide)[1]
    tight, why = layout(config_file, *wide, "parallel.memory_mib=40")
    assert tight.num_stages > 1
    assert "1: " in why
    assert "(does not fit in memory)" in why


def test_auto_has_no_cuts_of_its_own(config_file: Path) -> None:
    assert fixed_cuts(load_config(config_file, ["parallel.stages=auto"])) is None
    with pytest.raises(DtrainError, match=r"cuts: expected none with parallel\.stages=auto"):
        load_config(config_file, ["parallel.stages=auto", "parallel.cuts=[1]"])


@pytest.mark.parametrize("value", ["0", "many", "1.5", "true"])
def test_bad_numbers_of_stages(config_file: Path, value: str) -> None:
    with pytest.raises(DtrainError, match=r"parallel\.stages: expected a whole number of at least"):
        load_config(config_file, [f"parallel.stages={value}"])


def test_shapes_of_built_in_layers(config_file: Path) -> None:
    config = load_config(config_file, ["model.name=gat", "model.heads=2", "model.hidden=8"])
    first, _, last = build_layers(config.model, 16, 4, 0)
    assert (layer_shape(first).fan_in, layer_shape(first).fan_out) == (16, 16)
    assert (layer_shape(last).fan_in, layer_shape(last).fan_out) == (16, 4)
    assert layer_shape(last).parameters == sum(p.numel() for p in last.parameters())
