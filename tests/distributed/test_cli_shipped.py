"""Every shipped configuration trains, and the README's commands do what it says."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_jobs import Trainers

from dtrain.cli import main as cli
from dtrain.config import load_config
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
NAMES_THAT_STAY = {"quickstart", "cora-gcn", "cora-gat", "citeseer-gcn", "tolokers-sage"}
SMALLER = {"--nodes": "600", "--avg-degree": "6"}


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small graph on which every metric is defined."""
    store = str(tmp_path_factory.mktemp("shipped") / "store")
    graph = synthesize(SynthSpec(nodes=400, avg_degree=6, classes=2, features=8, seed=1))
    write_store(store, graph, partitions=2)
    return store


def test_the_names_that_stay_are_there() -> None:
    assert {file.stem for file in CONFIGS} >= NAMES_THAT_STAY


@pytest.mark.timeout(200)
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_configuration_trains(trainers: Trainers, two_classes: str, file: Path) -> None:
    overrides = [f"data.store={two_classes}", "train.max_steps=2", "train.epochs=2"]
    config = load_config(file, overrides)
    record = trainers.train(config.model_dump(mode="json"), 2, "run")
    assert (record["status"], record["steps"]) == ("done", 2)
    assert config.eval.metric in record["metrics"]["test"]
    assert math.isfinite(record["loss"])


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in the ``sh`` blocks of a page."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def small(words: list[str], data: Path) -> list[str]:
    """The same command on a smaller graph, for two steps, with the published files' place."""
    words = [str(data / "planetoid") if word == "DIR" else word for word in words]
    for flag, value in SMALLER.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    trains = words[:2] == ["dtrain", "run"] or words[0] == "torchrun"
    return [*words, "--set", "train.max_steps=2"] if trains else words


def run_here(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output of a dtrain command that starts no processes."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words[1:])
    shown = capsys.readouterr()
    assert caught.value.code == 0, f"{shlex.join(words)}\n{shown.out}\n{shown.err}"
    return shown.out


def run(words: list[str]) -> str:
    """Standard output of a command, run by the interpreter of the tests."""
    module = {"dtrain": "dtrain", "torchrun": "torch.distributed.run"}[words[0]]
    done = subprocess.run(
        [sys.executable, "-m", module, *words[1:]],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_work(
    tmp_path: Path,
    shared_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    text = (REPOSITORY / "README.md").read_text()
    said = [w for w in commands(text) if w[0] in ("dtrain", "torchrun")]
    kinds = {" ".join(w[:2]) if w[0] == "dtrain" else w[0] for w in said}
    assert kinds == {"dtrain data", "dtrain run", "dtrain eval", "torchrun"}
    out = {}
    for words in said:
        wanted = small(words, shared_data)
        starts = wanted[0] == "torchrun" or wanted[1] == "run"
        out[shlex.join(words)] = run(wanted) if starts else run_here(wanted, capsys)
    trained = next(text for line, text in out.items() if line.startswith("torchrun"))
    record = json.loads((tmp_path / "runs" / "quickstart" / "run.json").read_text())
    assert record["workers"] == 4
    # The account's last lines are accuracy, hash and folder, as the README says.
    accuracy, sha256, folder = trained.splitlines()[-3:]
    assert accuracy.startswith("done: 2 steps, test accuracy 0.")
    assert sha256 == f"weights_sha256 {record['weights_sha256']}"
    assert folder == f"run folder {tmp_path}/runs/quickstart"
