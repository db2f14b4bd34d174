"""What a user does wrong ends in one line, exit code 2 and nothing half-written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from dtrain.cli import main as cli

CONFIG = {
    "data": {"store": "store"},
    "model": {"name": "sage", "layers": 2, "hidden": 8},
    "sampler": {"name": "neighbor", "fanouts": [3, 3]},
    "train": {"max_steps": 3, "batch_size": 256},
    "parallel": {"stages": 2, "microbatches": 2},
}
TABLES = {
    "edges.csv": "src,dst\n0,1\n1,2\n2,3\n3,0\n",
    "negative.csv": "0,1\n1,-2\n2,3\n",
    "fraction.csv": "0,1\n1,2.5\n2,3\n",
    "labels.csv": "id,label\n0,0\n1,1\n2,0\n3,1\n",
    "seven.csv": "id,label\n0,0\n1,7\n2,0\n3,1\n",
    "nan.csv": "id,a,b\n0,1,2\n1,1,nan\n2,0,0\n3,1,1\n",
    "splits.csv": "id,split\n0,train\n1,train\n2,test\n3,test\n",
    "far.mtx": "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n1 2\n3 4\n",
    "cut.mtx": "%%MatrixMarket matrix coordinate pattern symmetric\n3 3 2\n1 2\n",
}


class Call:
    """Pickles as a call of a function of the system's."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch called",)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic: str) -> Path:
    """A working directory with a good configuration, a good store and source files."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(synthetic, "store")
    Path("c.yaml").write_text(yaml.safe_dump(CONFIG))
    for name, text in TABLES.items():
        Path(name).write_text(text)
    good = {
        "node_features": np.ones((4, 2), dtype=np.float32),
        "node_labels": np.array([0, 1, 0, 1]),
        "edges": np.array([[0, 1], [1, 2], [2, 3]]),
        "train_masks": np.array([[True, True, False, False]]),
        "val_masks": np.array([[False, False, True, False]]),
        "test_masks": np.array([[False, False, False, True]]),
    }
    broken: dict[str, dict[str, object]] = {
        "far": {"edges": np.array([[0, 1], [1, 9]])},
        "negative": {"edges": np.array([[0, 1], [-1, 2]])},
        "infinite": {"node_features": np.array([[1, 2], [3, np.inf], [5, 6], [7, 8]])},
        "masked": {"train_masks": np.zeros((1, 4), dtype=bool)},
        "objects": {"node_labels": np.array([Call(), 1, 0, 1], dtype=object)},
    }
    for name, changes in broken.items():
        np.savez(f"{name}.npz", **(good | changes))
    Path("planetoid").mkdir()
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        Path(f"planetoid/ind.evil.{part}").write_bytes(pickle.dumps(Call()))
    Path("planetoid/ind.evil.test.index").write_text("0\n")
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes() if file.is_file() else b""
        for file in folder.rglob("*")
    }


def cut_short(project: Path) -> None:
    file = project / "store" / "indices.npy"
    os.truncate(file, file.stat().st_size - 100)


def without_features(project: Path) -> None:
    (project / "store" / "features.npy").unlink()


def nothing(project: Path) -> None:
    del project


IMPORT = "data import"
CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "missing store": (
        "run c.yaml --set data.store=gone",
        nothing,
        "data.store: expected a graph store at HERE/gone, got no meta.json there; make one with "
        "dtrain data import or dtrain data synth",
    ),
    "a file for a store": (
        "data info c.yaml",
        nothing,
        "store c.yaml: expected meta.json there, found none; check the path, or make the store "
        "with `dtrain data import` or `dtrain data synth`",
    ),
    "a truncated array": (
        "run c.yaml",
        cut_short,
        "store HERE/store: indices.npy: expected BYTES bytes, got FEWER; the file is damaged, "
        "import the graph again",
    ),
    "a missing array": (
        "run c.yaml",
        without_features,
        "store HERE/store: features.npy: expected a file, found none; check the path",
    ),
    "edge id out of range": (
        f"{IMPORT} edges fraction.csv --num-nodes 3 --out new",
        lambda p: (p / "fraction.csv").write_text("0,1\n1,7\n"),
        "edges fraction.csv, line 2: expected ids in [0, 2], got '1,7'",
    ),
    "edge id out of range in an array": (
        f"{IMPORT} npz far.npz --out new",
        nothing,
        "edges: row 1: target id: expected a node in [0, 3], got 9; mend the edge or the number of "
        "nodes",
    ),
    "edge id out of range in MatrixMarket": (
        f"{IMPORT} mtx far.mtx --out new",
        nothing,
        "mtx far.mtx, line 4: expected two integer ids in [1, 3], got '3 4'",
    ),
    "a truncated file": (
        f"{IMPORT} mtx cut.mtx --out new",
        nothing,
        "mtx cut.mtx: expected 2 entries as its line of sizes says, got 1; the file is cut off or "
        "damaged",
    ),
    "negative id": (
        f"{IMPORT} edges negative.csv --out new",
        nothing,
        "edges negative.csv, line 2: expected ids of at least 0, got '1,-2'",
    ),
    "negative id in an array": (
        f"{IMPORT} npz negative.npz --out new",
        nothing,
        "edges: row 1: source id: expected a node in [0, 3], got -1; mend the edge or the number "
        "of nodes",
    ),
    "non-integer id": (
        f"{IMPORT} edges fraction.csv --out new",
        nothing,
        "edges fraction.csv, line 2: expected integer ids (or --ids string), got '1,2.5'",
    ),
    "NaN features": (
        f"{IMPORT} edges edges.csv --features nan.csv --out new",
        nothing,
        "features nan.csv, line 3, column 3: expected a finite number, got 'nan'; mend or fill the "
        "value",
    ),
    "infinite features": (
        f"{IMPORT} npz infinite.npz --out new",
        nothing,
        "features: row 1, column 1: expected a finite number, got inf; mend or fill the value",
    ),
    "labels outside the classes": (
        f"{IMPORT} edges edges.csv --labels seven.csv --num-classes 2 --out new",
        nothing,
        "labels seven.csv, line 3: expected a class in [0, 1] or -1, got '7'",
    ),
    "empty split": (
        f"{IMPORT} edges edges.csv --labels labels.csv --splits splits.csv --out new",
        nothing,
        "split 0: val: expected at least one node, got none; choose other fractions or mend the "
        "split",
    ),
    "empty split in an array": (
        f"{IMPORT} npz masked.npz --out new",
        nothing,
        "split 0: train: expected at least one node, got none; choose other fractions or mend the "
        "split",
    ),
    "empty split by fractions": (
        f"{IMPORT} edges edges.csv --labels labels.csv --split-fractions 0.9,0.05,0.05 --out new",
        nothing,
        "--split-fractions: expected at least one node in each part, got [4, 0, 0] of 4 labelled "
        "nodes; choose other fractions",
    ),
    "unsafe pickle": (
        f"{IMPORT} planetoid planetoid --out new",
        nothing,
        "planetoid planetoid: ind.evil.allx: unsafe pickle: expected arrays and containers only, "
        "got a call of posix.system; do not use this file",
    ),
    "unsafe pickle in an archive": (
        f"{IMPORT} npz objects.npz --out new",
        nothing,
        "npz objects.npz: node_labels: expected a plain array, got pickled objects",
    ),
    "no folder for planetoid": (
        f"{IMPORT} planetoid planetoid/ind.evil --out new",
        nothing,
        "planetoid planetoid/ind.evil: expected a folder with files such as ind.cora.allx, found "
        "none; give the folder, and --name where it holds several data sets",
    ),
    "a store in the way": (
        f"{IMPORT} edges edges.csv --out store",
        nothing,
        "--out store: expected no store there, found one; pass --overwrite or choose another place",
    ),
    "unknown config field": (
        "run c.yaml --set model.hiden=3",
        nothing,
        "config c.yaml: model.hiden: unknown field; did you mean hidden?",
    ),
    "unknown section": (
        "run c.yaml --set parralel.stages=1",
        nothing,
        "config c.yaml: parralel: unknown field; did you mean parallel?",
    ),
    "more stages than layers": (
        "run c.yaml --set parallel.stages=3",
        nothing,
        "config c.yaml: parallel.stages: expected at most model.layers = 2, got 3; use fewer "
        "stages or more layers",
    ),
    "fanouts that do not match": (
        "run c.yaml --set sampler.fanouts=[3]",
        nothing,
        "config c.yaml: sampler.fanouts: expected one number for each of model.layers = 2, got 1: "
        "[3]",
    ),
    "too few workers": (
        "run c.yaml --nproc-per-node=2 --set parallel.min_workers=4",
        nothing,
        "parallel.min_workers: expected at least 4 workers, got 2; start more (--nproc-per-node) "
        "or lower it",
    ),
    "ZeRO 3": (
        "run c.yaml --set deepspeed.optimizer.type=Adam --set deepspeed.zero_optimization.stage=3",
        nothing,
        "config c.yaml: deepspeed.zero_optimization.stage: expected 0, 1 or 2, got 3; parameters "
        "of a stage stay whole on each holder",
    ),
    "fp16": (
        "run c.yaml --set deepspeed.optimizer.type=Adam --set deepspeed.fp16.enabled=true",
        nothing,
        "config c.yaml: deepspeed.fp16.enabled: expected false, got true; dynamic loss scaling "
        "drops steps, use bf16",
    ),
    "unknown optimizer": (
        "run c.yaml --set deepspeed.optimizer.type=Lamb",
        nothing,
        "config c.yaml: deepspeed.optimizer.type: expected Adam, AdamW or SGD, got Lamb",
    ),
    "unknown model": (
        "run c.yaml --set model.name=sagee",
        nothing,
        "config c.yaml: model.name: expected gcn, sage, gat or module:attribute, got 'sagee'; did "
        "you mean sage?",
    ),
    "no run folder": (
        "eval gone",
        nothing,
        "RUN_DIR gone: expected a run's folder with a config.yaml, got no folder; give the "
        "--run-dir of a run",
    ),
    "unknown command": ("trian", nothing, "dtrain: no such command 'trian'; see dtrain --help"),
    "missing option": (
        "data synth --nodes 9",
        nothing,
        "dtrain data synth: missing option '--out'; see dtrain data synth --help",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_left(
    project: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    line, spoil, wanted = CASES[case]
    size = (project / "store" / "indices.npy").stat().st_size
    spoil(project)
    before = everything(project)
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    out, err = capfd.readouterr()
    wanted = wanted.replace("HERE", str(project))
    wanted = wanted.replace("BYTES", str(size)).replace("FEWER", str(size - 100))
    assert err == f"error: {wanted}\n"
    assert out == ""
    assert caught.value.code == 2
    assert everything(project) == before


def dtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtrain", *arguments], capture_output=True, text=True, timeout=200
    )


@pytest.mark.timeout(400)
def test_what_only_a_trainer_can_tell_is_one_line_and_can_be_mended_in_the_same_folder(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "mine.py").write_text(
        "from dtrain.models.sage import build\n"
        "def short(config, num_features, num_classes):\n"
        "    return build(config, num_features, num_classes)[:1]\n"
        "def right(config, num_features, num_classes):\n"
        "    return build(config, num_features, num_classes)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(project), prepend=os.pathsep)
    run = ("run", "c.yaml", "--nproc-per-node=2", "--run-dir=r", "--json")
    bad = dtrain(*run, "--set=model.name=mine:short")
    assert bad.returncode == 2
    assert bad.stderr == (
        "error: model.name: 'mine:short': expected model.layers = 2 layers, got 1\n"
    )
    assert bad.stdout == ""
    good = dtrain(*run, "--set=model.name=mine:right")
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout.splitlines()[-1])["status"] == "done"
    other = dtrain(*run, "--set=model.name=mine:right", "--set=seed=3")
    assert other.returncode == 2
    assert other.stderr == (
        f"error: --run-dir {project}/r: belongs to a run of another configuration; seed: expected "
        "0 (the folder's), got 3; choose another --run-dir\n"
    )
