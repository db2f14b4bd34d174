"""A small graph store for tests of the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.cli import main as cli


@pytest.fixture(scope="session")
def graph_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 60 nodes, made by the command that users make them with."""
    store = tmp_path_factory.mktemp("graph") / "store"
    small = ["--nodes", "60", "--avg-degree", "4", "--classes", "3", "--features", "4"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["data", "synth", *small, "--partitioner", "range", "--out", str(store)])
    assert caught.value.code == 0
    return store
