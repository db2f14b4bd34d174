"""Fixtures for tests with real trainers."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime_jobs import Trainers

from dtrain.data.importers import import_graph
from dtrain.data.importers.options import ImportOptions
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.environment import set_variables, trainer_variables
from dtrain.launch.supervisor import PRELOAD, PRELOAD_ZERO


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    """Start the process that workers are forked from with a trainer's variables and imports."""
    set_variables(trainer_variables(1))
    multiprocessing.set_forkserver_preload([*PRELOAD, *PRELOAD_ZERO])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Trainers]:
    made = Trainers(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def graphs(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Callable[[str], str]:
    """Stores of the real graphs by name, imported once."""
    folder = tmp_path_factory.mktemp("stores")

    def store(name: str) -> str:
        target = folder / name
        if not target.exists():
            source = {
                "cora": ("planetoid", shared_data / "planetoid", ImportOptions(name="cora")),
                "tolokers": ("npz", shared_data / "heterophilous/tolokers.npz", ImportOptions()),
            }
            kind, path, options = source[name]
            write_store(str(target), import_graph(kind, str(path), options), partitions=8)
        return str(target)

    return store


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A generated graph of 2,000 nodes in 8 partitions."""
    target = tmp_path_factory.mktemp("synthetic") / "store"
    graph = synthesize(SynthSpec(nodes=2000, avg_degree=8, classes=4, features=16, seed=1))
    write_store(str(target), graph, partitions=8)
    return str(target)
