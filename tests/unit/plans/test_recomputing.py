"""Activations are computed again on a stage where memory demands it, and only there."""

from __future__ import annotations

from pathlib import Path

from dtrain.config import load_config
from dtrain.planning import costs_of_sizes, recomputing
from dtrain.scheduler import Layout, make_plan
from dtrain.scheduler.costmodel import BlockSize, CostModel, LayerShape
from dtrain.scheduler.predict import peak_memory
from dtrain.scheduler.recompute import recomputed

SHAPES = [LayerShape("SageLayer", 64, 64, 10), LayerShape("SageLayer", 64, 8, 10)]
# The first layer keeps far more than the second.
SIZES = [[BlockSize(200_000, 50_000, 10_000), BlockSize(20_000, 10_000, 1_000)]] * 4


def test_the_stage_that_keeps_most_goes_first_and_no_more_than_is_needed(
    config_file: Path,
) -> None:
    def found(*overrides: str) -> tuple[bool, ...]:
        return recomputing(load_config(config_file, list(overrides)), plan, SHAPES, lambda: SIZES)

    plan = make_plan(Layout((0, 1, 2), 4, redundancy=1), [0, 1], 1)
    costs = costs_of_sizes(load_config(config_file), CostModel(), "cpu", SHAPES, (0, 1, 2), SIZES)
    assert found() == (False, False)
    assert found("parallel.recompute=all") == (True, True)
    peaks = peak_memory(plan, costs)
    assert found(f"parallel.memory_mib={max(peaks.values()) // 2**20 + 1}") == (False, False)
    roomy_for_the_second = peaks[1] // 2**20 + 1
    assert peaks[0] > 2 * peaks[1]
    assert found(f"parallel.memory_mib={roomy_for_the_second}") == (True, False)
    less = peak_memory(plan, recomputed(costs, (True, False)))
    assert less[0] <= roomy_for_the_second << 20
    assert found("parallel.memory_mib=1") == (True, True)
    assert found("parallel.memory_mib=1", "parallel.recompute=none") == (False, False)
