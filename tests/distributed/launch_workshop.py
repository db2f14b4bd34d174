"""A working directory for supervisors with trainers that do one thing (``launch_stubs.py``)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain.cli import main as cli

HERE = Path(__file__).parent
STUBS = str(HERE / "launch_stubs.py")


def until(true: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"{what} did not come within {timeout_s} s"
        time.sleep(0.01)


class Workshop:
    """A working directory, and whoever was started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path / "t"
        self.temporary.mkdir()
        self.run = path / "run"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, as torchrun starts its workers."""
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        # Where the tests themselves find the package, if they were told.
        paths = [variables.pop("PYTHONPATH", str(HERE)), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = ":".join(path for path in paths if path)
        environment |= {"TMPDIR": str(self.temporary)} | variables
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def supervise(self, trainer: str, *rest: str, **variables: str) -> subprocess.Popen[str]:
        """Start a supervisor; ``rest``: ``--set=SECTION.FIELD=VALUE`` and ``--preload=MODULE``."""
        return self.start(STUBS, trainer, "c.yaml", "run", *rest, **variables)

    def wait_for_trainer(self) -> psutil.Process:
        """The trainer's process, once it runs its own code."""
        ready = self.run / "ready-0"
        until(lambda: ready.exists() and bool(self.events("trainer_started")), "the trainer")
        ready.unlink()
        return psutil.Process(self.events("trainer_started")[-1]["pid"])

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        file = self.run / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if not kinds or event["kind"] in kinds]

    def living(self) -> list[psutil.Process]:
        """Processes that were started here and still run, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.path) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self) -> None:
        try:
            until(lambda: not self.living(), "the end of all processes", 10.0)
            assert list(self.temporary.glob("pymp-*")) == []
        finally:
            for left in self.living():
                left.kill()
            for process in self._started:
                process.communicate()


@pytest.fixture(scope="module")
def graph_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("graph") / "store"
    small = ["--nodes", "60", "--avg-degree", "4", "--classes", "3", "--features", "4"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["data", "synth", *small, "--partitioner", "range", "--out", str(store)])
    assert caught.value.code == 0
    return store


@pytest.fixture
def workshop(graph_store: Path) -> Iterator[Workshop]:
    # Short, because the path of a socket may not be long.
    path = Path(tempfile.mkdtemp(prefix="dt-"))
    (path / "c.yaml").write_text(f"data: {{store: {graph_store}}}\ntrain: {{epochs: 1}}\n")
    place = Workshop(path)
    try:
        yield place
        place.end()
    finally:
        shutil.rmtree(path)
