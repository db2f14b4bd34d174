"""Bad input ends in exit code 2 and one line, before anything starts or is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain import train
from dtrain.cli import main as cli
from dtrain.launch.request import RunRequest, check

Edit = Callable[[Path], None]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph_store: Path) -> Path:
    """A folder with a good ``c.yaml`` on a small store, made the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    for file in graph_store.iterdir():
        (tmp_path / "store" / file.name).symlink_to(file)
    Path("c.yaml").write_text("data: {store: store}\ntrain: {epochs: 1}\n")
    return tmp_path


def replace_meta(project: Path, text: str) -> None:
    (project / "store" / "meta.json").unlink()
    (project / "store" / "meta.json").write_text(text)


def set_meta(project: Path, **changes: object) -> None:
    meta = json.loads((project / "store" / "meta.json").read_text())
    replace_meta(project, json.dumps(meta | changes))


CASES: dict[str, tuple[list[str], Edit, str]] = {
    "no config": (["nope.yaml"], lambda p: None, "config nope.yaml: cannot be read"),
    "unknown field": (
        ["c.yaml", "--set", "model.layer=3"],
        lambda p: None,
        "model.layer: unknown field; did you mean layers?",
    ),
    "bad override": (["c.yaml", "--set", "seed"], lambda p: None, "--set seed: expected"),
    "more stages than layers": (
        ["c.yaml", "--set", "parallel.stages=3"],
        lambda p: None,
        "parallel.stages: expected at most model.layers = 2, got 3",
    ),
    "no store": (
        ["c.yaml", "--set", "data.store=gone"],
        lambda p: None,
        "data.store: expected a graph store at PROJECT/gone, got no meta.json there",
    ),
    "unknown protocol": (
        ["c.yaml", "--set", "data.store=nope://x"],
        lambda p: None,
        "nope://x: expected a path or a URL that fsspec knows",
    ),
    "torn meta": (
        ["c.yaml"],
        lambda p: replace_meta(p, "{"),
        "store PROJECT/store: meta.json: not valid JSON; import the graph again",
    ),
    "other schema": (
        ["c.yaml"],
        lambda p: set_meta(p, schema_version=99),
        "schema_version: expected 1, got 99",
    ),
    "split": (
        ["c.yaml", "--set", "data.split=1"],
        lambda p: None,
        "data.split: expected less than the 1 splits of PROJECT/store, got 1",
    ),
    "too few workers": (
        ["c.yaml", "--set", "parallel.min_workers=2"],
        lambda p: None,
        "parallel.min_workers: expected at least 2 workers, got 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", ["dtrain run", "dtrain.train"])
def test_bad_input_is_one_line_and_exit_code_2(
    project: Path, capfd: pytest.CaptureFixture[str], case: str, command: str
) -> None:
    arguments, edit, message = CASES[case]
    edit(project)
    if command == "dtrain run":
        with pytest.raises(SystemExit) as caught:
            cli.main(["run", *arguments])
        code = caught.value.code
    else:
        code = train.main(arguments)
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err.replace(str(project), "PROJECT")
    assert err.count("\n") == 1
    assert {entry.name for entry in project.iterdir()} == {"c.yaml", "store"}


def test_debug_shows_the_traceback(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "nope.yaml", "--debug"])
    assert caught.value.code == 2
    assert "Traceback" in capfd.readouterr().err


def test_a_run_folder_of_another_configuration(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = RunRequest("c.yaml", ("seed=3",), "r")
    check(other, 1).open_folder()
    assert train.main(["c.yaml", "--run-dir", "r"]) == 2
    err = capfd.readouterr().err
    assert "seed: expected 3 (the folder's), got 0; choose another --run-dir" in err
    assert not (project / "r" / "events.jsonl").exists()


def test_plain_torchrun_has_a_run_folder_that_all_workers_derive_alike() -> None:
    assert RunRequest("configs/cora-gcn.yaml").stable_run_dir() == "runs/cora-gcn"
    assert RunRequest("c.yaml", run_dir="r").stable_run_dir() == "r"
