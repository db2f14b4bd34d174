"""A few scenarios of ``dtrain chaos``, each a real job under torchrun; ``make chaos`` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.chaos.catalog import scenario_named
from dtrain.chaos.runner import Runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the graph is made and the undisturbed runs are kept for all scenarios."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "model", "zero"),
    [
        ("phases", "sage", 0),
        ("all-holders", "sage", 1),
        ("hang-sigstop", "sage", 0),
        ("preempt-all", "sage", 1),
        ("hosts2-cut", "sage", 0),
    ],
)
def test_the_result_is_that_of_the_undisturbed_run(
    folder: Path, name: str, model: str, zero: int
) -> None:
    verdict = Runner(folder, model=model, zero=zero, keep=True).run(scenario_named(name))
    if verdict.passed is None:
        pytest.skip("; ".join(verdict.reasons))
    assert verdict.reasons == []
    assert verdict.starts == (2 if name == "preempt-all" else 1)
