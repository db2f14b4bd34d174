"""``dtrain checkpoint``, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.checkpoint import CheckpointStore, Retention
from dtrain.cli.main import main
from dtrain.config import ModelConfig
from dtrain.models.build import build_layers


def save(url: Path, step: int, **changes: Any) -> CheckpointStore:
    config = ModelConfig(hidden=4)
    layers = build_layers(config, 5, 3, 1)
    tensors = {
        f"model/layers.{i}.{name}": parameter.detach() + step
        for i, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
    }
    tensors["optim/layers.0.bias/step"] = torch.tensor(float(step))
    record = {
        "identity": {"model": config.model_dump(mode="json"), "seed": changes.get("seed", 1)},
        "progress": {"step": step, "best": changes.get("best")},
        "workers": 2,
        "stages": 1,
    }
    store = CheckpointStore(str(url))
    store.save(step, tensors, record, retention=Retention(100))
    return store


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, best={"step": 1})
    (tmp_path / "step-00000003.incomplete").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    code, out, _ = run(capsys, "ls", tmp_path, "--json")
    said = json.loads(out)
    assert code == 0
    assert said["unfinished"] == ["step-00000003.incomplete"]
    first, second = said["checkpoints"]
    assert "manifest.json: checksum differs" in first["fault"]
    size = sum(f.stat().st_size for f in (tmp_path / "step-00000002").glob("*distcp"))
    assert second["bytes"] > size
    assert (second["step"], second["workers"], second["best_step"]) == (2, 2, 1)
    code, out, _ = run(capsys, "ls", tmp_path)
    assert code == 0
    assert "step-00000003.incomplete: not committed" in out


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = next((tmp_path / "step-00000001").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    assert run(capsys, "verify", tmp_path)[0] == 0
    code, out, _ = run(capsys, "verify", tmp_path, "--all", "--json")
    assert code == 1
    said = json.loads(out)
    assert not said["intact"]
    assert said["faults"]["step-00000002"] == []
    assert file.name in said["faults"]["step-00000001"][0]
    code, out, _ = run(capsys, "verify", tmp_path, "--step", 1)
    assert code == 1
    assert "step-00000001: 1 faults" in out
    code, _, err = run(capsys, "verify", tmp_path, "--step", 9)
    assert (code, err.count("\n")) == (2, 1)
    assert "expected step 9" in err
    assert run(capsys, "verify", tmp_path / "none", "--all")[0] == 2


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", 1)
    save(tmp_path / "a", 2)
    store = save(tmp_path / "b", 1, seed=7)
    store.save(3, {"model/layers.0.bias": torch.zeros(4, 2), "new": torch.ones(1)}, {})
    assert (
        run(capsys, "diff", tmp_path / "a", tmp_path / "a", "--step", 1, "--other-step", 1)[0] == 0
    )
    code, out, _ = run(capsys, "diff", tmp_path / "a", "--json")
    said = json.loads(out)
    assert code == 1
    assert said["identity"] == []
    assert said["progress"] == ["step"]
    assert said["changed"]["optim/layers.0.bias/step"] == {
        "elements": 1, "of": 1, "max_abs": 1.0, "forms": ["float32 []", "float32 []"]
    }  # fmt: skip
    a, b = tmp_path / "a", tmp_path / "b"
    code, out, _ = run(capsys, "diff", a, b, "--step", 1, "--other-step", 1, "--json")
    assert json.loads(out)["identity"] == ["seed"]
    assert json.loads(out)["changed"] == {}
    code, out, _ = run(capsys, "diff", b, "--step", 1, "--other-step", 3)
    assert "only right: new" in out
    assert "model/layers.0.bias: float32 [4] and float32 [4, 2]" in out


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 7):
        store = save(tmp_path, step, best={"step": 2})
    code, out, _ = run(
        capsys, "prune", tmp_path, "--keep", 1, "--keep-every", 5, "--dry-run", "--json"
    )
    said = json.loads(out)
    assert said["removed"] == ["step-00000001", "step-00000003", "step-00000004"]
    assert len(store.list()) == 6
    code, out, _ = run(capsys, "prune", tmp_path, "--keep", 1, "--keep-every", 5)
    assert code == 0
    assert [i.step for i in store.list()] == [2, 5, 6]
    code, _, err = run(capsys, "prune", tmp_path, "--keep", 0)
    assert (code, err) == (2, "error: checkpoint.keep: expected at least 1, got 0\n")


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    save(tmp_path / "ck", 1)
    code, out, _ = run(capsys, "export", tmp_path / "ck", "--out", tmp_path / "out", "--json")
    assert code == 0
    said = json.loads(out)
    assert said["files"] == ["model.json", "model.pt2", "model.safetensors"]
    assert said["pyg"]["class"] == "GCN"
    file = next((tmp_path / "ck" / "step-00000001").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = run(capsys, "export", tmp_path / "ck", "--out", tmp_path / "again")
    assert (code, err.count("\n")) == (2, 1)
    assert "is damaged" in err
    assert not (tmp_path / "again").exists()


def test_a_store_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "ls", tmp_path / "file" / "ck")
    assert (code, err.count("\n")) == (2, 1)
    code, _, err = run(capsys, "ls", "s3://me:secret@bucket/x")
    assert code == 2
    assert "secret" not in err
