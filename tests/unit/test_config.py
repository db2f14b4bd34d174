"""The configuration refuses what cannot work, in one line that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.config import BUILT_IN_MODELS, Config, load_config
from dtrain.errors import DtrainError
from dtrain.models.build import BUILT_IN

TEXT = """
data: {store: s}
train: {epochs: 1}
deepspeed: {optimizer: {type: Adam, params: {lr: 0.01}}}
"""

BAD: dict[str, str] = {
    "modell.layers=3": "modell: unknown field; did you mean model?",
    "model.hiden=3": "model.hiden: unknown field; did you mean hidden?",
    "model.name=gnc": "model.name: expected gcn, sage, gat or module:attribute, got 'gnc'; did you "
    "mean gcn?",
    "model.name=transformer": "model.name: expected gcn, sage, gat or module:attribute, got "
    "'transformer'",
    "model.name=:layers": "model.name: expected gcn, sage, gat or module:attribute, got ':layers'",
    "model.options={depth: 2}": "model.options: gcn takes none, got ['depth']; they are for a "
    "model given as module:attribute",
    "checkpoint.every_steps=often": "checkpoint.every_steps: expected a whole number of at least "
    "0, or auto, got 'often'",
    "memory.limit=much": "memory.limit: expected bytes, or a number with KiB, MiB, GiB, kB, "
    "MB, GB, got 'much'",
    "robust.snapshot_every=0": "robust.snapshot_every: expected a whole number of at least 1, or "
    "auto, got 0",
    "parallel.stages=3": "parallel.stages: expected at most model.layers = 2, got 3; use fewer "
    "stages or more layers",
    "deepspeed.optimizer=null": "deepspeed.optimizer: expected {type: Adam|AdamW|SGD, params: "
    "{...}}, got none",
    "deepspeed.optimizer=Adam": "deepspeed.optimizer: expected a mapping, got 'Adam'",
    "deepspeed.optimizer.type=Lamb": "deepspeed.optimizer.type: expected Adam, AdamW or SGD, got "
    "Lamb",
    "deepspeed.optimizer.params=3": "deepspeed.optimizer.params: expected a mapping, got 3",
    "deepspeed.optimizer.params.learning_rate=0.1": "deepspeed.optimizer.params.learning_rate: "
    "unknown field; expected lr, betas, eps, weight_decay, amsgrad, capturable, maximize, foreach, "
    "differentiable, fused, torch_adam, adam_w_mode",
    "deepspeed.optimizer.params.weight_deca=0": "deepspeed.optimizer.params.weight_deca: unknown "
    "field; did you mean weight_decay?",
    "deepspeed.optimizer.params.lr=1e-3": "deepspeed.optimizer.params.lr: expected a number, got "
    "the text '1e-3'; such as 1.0e-3",
    "deepspeed.optimizer.params.lr=-1": "deepspeed.optimizer.params.lr: expected a number of at "
    "least 0, got -1",
    "deepspeed.optimizer.params.betas=0.9": "deepspeed.optimizer.params.betas: expected two "
    "numbers in [0, 1), got 0.9",
    "deepspeed.zero_optimization=1": "deepspeed.zero_optimization: expected a mapping, got 1",
    "deepspeed.zero_optimization.stage=3": "deepspeed.zero_optimization.stage: expected 0, 1 or 2, "
    "got 3; parameters of a stage stay whole on each holder",
    "deepspeed.fp16.enabled=true": "deepspeed.fp16.enabled: expected false, got true; dynamic loss "
    "scaling drops steps, use bf16",
    "deepspeed.scheduler.type=Cosine": "deepspeed.scheduler.type: expected one of LRRangeTest, "
    "OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, got Cosine",
    "deepspeed.gradient_cliping=1.0": "deepspeed.gradient_cliping: unknown field; did you mean "
    "gradient_clipping?",
    "deepspeed.gradient_clipping=x": "deepspeed.gradient_clipping: expected a number, got the text "
    "'x'; such as 1.0e-3",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("override", BAD)
def test_one_line_says_what_is_wrong(file: Path, override: str) -> None:
    with pytest.raises(DtrainError) as caught:
        load_config(file, [override])
    assert str(caught.value) == f"config {file}: {BAD[override]}"


def test_the_names_of_built_in_models_are_those_that_can_be_built() -> None:
    assert set(BUILT_IN_MODELS) == set(BUILT_IN)


def test_fields_that_are_deepspeeds_own_pass(file: Path) -> None:
    config = load_config(file, ["deepspeed.wall_clock_breakdown=true", "deepspeed.tensorboard={}"])
    assert config.deepspeed["tensorboard"] == {}


def engine_file(folder: Path, lr: float) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "engine.json"
    path.write_text(json.dumps({"optimizer": {"type": "SGD", "params": {"lr": lr}}}))
    return path


def rate(config: Config) -> Any:
    return config.deepspeed["optimizer"]["params"]["lr"]


def test_a_deepspeed_file_lies_beside_the_config_and_can_be_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_file(tmp_path / "configs", 0.5)
    config = tmp_path / "configs" / "c.yaml"
    config.write_text("data: {store: s}\ntrain: {epochs: 1}\ndeepspeed: engine.json\n")
    assert rate(load_config(config)) == 0.5
    assert rate(load_config(config, ["deepspeed.optimizer.params.lr=0.25"])) == 0.25
    engine_file(tmp_path / "here", 0.125)
    monkeypatch.chdir(tmp_path / "here")
    assert rate(load_config(config, ["deepspeed=engine.json"])) == 0.125


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DtrainError, match="expected text in UTF-8"):
        load_config(tmp_path / "c.yaml")
