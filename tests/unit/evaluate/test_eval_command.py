"""``dtrain eval`` on a run folder made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

from dtrain.checkpoint import CheckpointStore, Retention
from dtrain.cli.eval import eval_command
from dtrain.config import ModelConfig
from dtrain.errors import DtrainError
from dtrain.evaluate import evaluate
from dtrain.models.build import build_layers

MODEL = {"name": "sage", "layers": 2, "hidden": 8}


def named(section: str, layers: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {
        f"{section}/layers.{i}.{name}": parameter.detach()
        for i, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }


class Run:
    """A store, a configuration, and checkpoints of steps 3 and 5 with different weights."""

    def __init__(self, folder: Path, store) -> None:
        self.folder, self.store = folder, store
        folder.mkdir()
        self.write_config()
        self.checkpoints = CheckpointStore(str(folder / "checkpoints"))
        self.layers = {step: self.build(step) for step in (3, 5)}
        for step, layers in self.layers.items():
            self.save(step, layers, store.meta.fingerprint)

    def build(self, seed: int, **changes: int) -> list[torch.nn.Module]:
        config = ModelConfig(**(MODEL | changes))
        return build_layers(config, self.store.meta.num_features, 2, seed=seed)

    def write_config(self, **sections: object) -> None:
        config = {"data": {"store": self.store.url}, "model": MODEL, "train": {"epochs": 1}}
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config | sections))

    def save(
        self,
        step: int,
        layers: list[torch.nn.Module],
        fingerprint: str,
        best: int | None = None,
    ) -> None:
        tensors = named("model", layers) | (named("best", self.layers[best]) if best else {})
        tensors["optim/layers.0.own.weight/step"] = torch.tensor(float(step))
        progress = {
            "identity": {"dataset": fingerprint},
            "progress": {"best": {"step": best} if best else None},
        }
        self.checkpoints.save(step, tensors, progress, retention=Retention(keep=9))

    def expected(self, step: int) -> dict[str, dict[str, float]]:
        return evaluate(self.layers[step], self.store, 0, chunk_nodes=10, workdir=self.folder)


@pytest.fixture
def run(make_store, tmp_path) -> Run:
    return Run(tmp_path / "run", make_store(classes=2))


def call(*arguments: object):
    app = typer.Typer()
    app.command()(eval_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def problem(*arguments: object) -> str:
    error = call(*arguments).exception
    assert isinstance(error, DtrainError)
    assert "\n" not in str(error)
    return str(error)


def test_newest_checkpoint_as_json(run):
    report = json.loads(call(run.folder, "--json").stdout)
    assert (report["step"], report["split"]) == (5, 0)
    assert list(report["metrics"]) == ["train", "val", "test"]
    for name, values in run.expected(5).items():
        assert report["metrics"][name] == pytest.approx(values, rel=1e-5)


def test_one_split_of_an_older_checkpoint(run):
    result = call(run.folder, "--checkpoint", 3, "--split-name", "val", "--json")
    report = json.loads(result.stdout)
    assert report["step"] == 3
    assert report["metrics"] == {"val": pytest.approx(run.expected(3)["val"], rel=1e-5)}


def test_a_run_that_keeps_the_best_weights_is_evaluated_with_them(run):
    run.save(7, run.build(7), run.store.meta.fingerprint, best=3)
    assert json.loads(call(run.folder, "--json").stdout)["step"] == 7
    run.write_config(eval={"select": "best"})
    report = json.loads(call(run.folder, "--json").stdout)
    assert (report["step"], report["weights"]) == (3, "best")
    assert report["metrics"]["test"] == pytest.approx(run.expected(3)["test"], rel=1e-5)
    asked_for = json.loads(call(run.folder, "--json", "--checkpoint", 7).stdout)
    assert (asked_for["step"], asked_for["weights"]) == (7, "last")
    assert asked_for["metrics"] != report["metrics"]


def test_table(run):
    printed = call(run.folder, "--split-name", "test").stdout
    expected = run.expected(5)["test"]
    assert "last weights (step 5)" in printed
    for name in ("accuracy", "macro_f1", "roc_auc"):
        assert name in printed
        assert f"{expected[name]:.4f}" in printed
    assert "train" not in printed


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(run):
    (run.folder / "checkpoints" / "step-00000005" / "COMMITTED").unlink()
    result = call(run.folder, "--json")
    assert json.loads(result.stdout)["step"] == 3
    assert "step-00000005" in result.stderr


def test_weights_that_are_not_numbers_give_valid_json(run):
    layers = run.build(0)
    torch.nn.init.constant_(layers[1].own.weight, torch.nan)
    run.save(7, layers, run.store.meta.fingerprint)
    report = json.loads(call(run.folder, "--json").stdout)
    assert report["metrics"]["test"]["loss"] is None


def test_bad_input_is_one_line(run, make_store, tmp_path):
    assert "no folder" in problem(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert "a folder without one" in problem(run.folder / "checkpoints")
    assert "expected train, val, test, got 'all'" in problem(run.folder, "--split-name", "all")
    assert "(3, 5), got 4" in problem(run.folder, "--checkpoint", 4)
    run.write_config(checkpoint={"url": str(tmp_path / "empty")})
    assert "expected a complete checkpoint" in problem(run.folder)
    run.write_config(data={"store": make_store("other", classes=2, seed=1).url})
    assert "expected the graph that was trained on" in problem(run.folder)
    run.write_config(model=MODEL | {"hidden": 9})
    assert "expected [10, 9] by the run's config, got [10, 8]" in problem(run.folder)
    run.write_config(model=MODEL | {"norm": "layer"})
    assert "no tensor model/layers.0.tail.norm.weight" in problem(run.folder)
