"""The cost model: what it learns, from how little, past how many outliers, and how it travels."""

from __future__ import annotations

import json
import random

import pytest

from dtrain.scheduler.costmodel import (
    DEFAULTS,
    WINDOW,
    BlockSize,
    CostModel,
    LayerShape,
    step_costs,
    terms,
)
from dtrain.scheduler.fit import robust_fit

SAGE = LayerShape("SageLayer", 64, 128, 16512)
TRUE = (2e-9, 5e-11, 3e-9, 4e-4)


def blocks(count: int, seed: int) -> list[BlockSize]:
    """Blocks whose edges, sources and destinations vary severalfold and independently."""
    draw = random.Random(seed)
    return [
        BlockSize(draw.randint(1000, 60000), draw.randint(900, 20000), draw.randint(100, 900))
        for _ in range(count)
    ]


def true_seconds(shape: LayerShape, size: BlockSize) -> float:
    return sum(x * y for x, y in zip(TRUE, terms(shape, size), strict=True))


def trained(count: int = 60, outliers: int = 0, noise: float = 0.0) -> CostModel:
    draw = random.Random(1)
    model = CostModel()
    for i, size in enumerate(blocks(count, 0)):
        seconds = true_seconds(SAGE, size) * draw.uniform(1 - noise, 1 + noise)
        model.observe("cpu", "forward", SAGE, size, seconds * (20 if i < outliers else 1))
    return model


def test_it_finds_the_coefficients() -> None:
    fitted = trained().coefficients("cpu", "forward", SAGE)
    assert fitted == pytest.approx(TRUE, rel=0.02)


@pytest.mark.parametrize(("outliers", "noise"), [(0, 0.1), (12, 0.0), (12, 0.1)])
def test_noise_and_outliers_leave_predictions_where_they_are(outliers: int, noise: float) -> None:
    model = trained(outliers=outliers, noise=noise)
    for size in blocks(20, 9):
        assert model.seconds("cpu", "forward", SAGE, size) == pytest.approx(
            true_seconds(SAGE, size), rel=0.1
        )


def test_other_shapes_of_the_kind_and_other_kinds_fall_back() -> None:
    model = trained()
    size = BlockSize(5000, 3000, 500)
    wider = LayerShape("SageLayer", 128, 128)
    assert model.seconds("cpu", "forward", wider, size) == pytest.approx(
        true_seconds(wider, size), rel=0.05
    )
    # Nothing is known of the other direction, or of another device.
    assert model.coefficients("cpu", "backward", SAGE) == DEFAULTS["cpu", "backward"]
    assert model.coefficients("NVIDIA H200", "forward", SAGE) == DEFAULTS["cuda", "forward"]


def test_coefficients_are_never_negative() -> None:
    # Times that fall with the size cannot be meant.
    fitted = robust_fit([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], [3.0, 2.0, 1.0])
    assert fitted[0] == 0.0
    assert fitted[1] > 0.0


def test_what_was_learnt_goes_through_json_and_predicts_the_same() -> None:
    model = trained(count=WINDOW + 40, outliers=20, noise=0.1)
    told = CostModel.of_learnt(json.loads(json.dumps(model.learnt())))
    fitted = model.coefficients("cpu", "forward", SAGE)
    assert told.coefficients("cpu", "forward", SAGE) == fitted
    assert told.learnt() == model.learnt()
    # Until it has seen as much itself as a fit needs.
    size = BlockSize(7000, 4000, 700)
    for _ in range(11):
        told.observe("cpu", "forward", SAGE, size, 1.0)
    assert told.coefficients("cpu", "forward", SAGE) == fitted
    told.observe("cpu", "forward", SAGE, size, 1.0)
    assert told.seconds("cpu", "forward", SAGE, size) == pytest.approx(1.0, rel=0.01)
    assert told.coefficients("cpu", "backward", SAGE) == DEFAULTS["cpu", "backward"]


def test_sums_and_overheads_are_learnt_too() -> None:
    model = trained()
    for _ in range(12):
        model.observe_sum(340_000, 2, 0.003)
    assert model.sum_seconds(170_000) == pytest.approx(0.0015, rel=0.01)
    assert model.overhead_s == 0.0
    model.observe_step(0.010, 0.012)
    assert model.overhead_s == pytest.approx(0.002)


def test_costs_of_a_step_add_up_over_the_layers_of_a_stage() -> None:
    layers = [SAGE, LayerShape("SageLayer", 128, 10, 2570)]
    sizes = [[BlockSize(4000, 900, 300), BlockSize(900, 300, 40)], [BlockSize(8, 4, 2)] * 2]
    one = step_costs(CostModel(), "cpu", layers, (0, 2), sizes)
    two = step_costs(CostModel(), "cpu", layers, (0, 1, 2), sizes)
    for m in range(2):
        assert one.forward[0][m] == pytest.approx(two.forward[0][m] + two.forward[1][m], abs=2)
        assert one.kept_bytes[0][m] == two.kept_bytes[0][m] + two.kept_bytes[1][m]
    assert two.sent_bytes[0] == (300 * 128 * 4, 2 * 128 * 4)
    assert two.state_bytes == (16512 * 16, 2570 * 16)
    assert one.forward[0][0] > one.forward[0][1] >= 1
