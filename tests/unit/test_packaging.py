"""What a wheel and an sdist contain: one import package, with the linked folders inside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("scheduler", "kernels", "checkpoint", "launch")
COPIED = (*FOLDERS, "dtrain", "pyproject.toml", "README.md", "LICENSE")
FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def build(source: Path, out: Path, hook: str) -> Path:
    """Run one hook of the build backend in ``source``, as pip does, without a network."""
    code = f"import setuptools.build_meta as b; print(b.{hook}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of a copy of the project, so that building leaves nothing in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        origin = REPOSITORY / name
        if origin.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(origin, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(origin, source / name)
    return build(source, tmp_path_factory.mktemp("sdist"), "build_sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the unpacked sdist, as a package index would have it built."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Python before 3.11.4 has no filters; the archive is our own.
        archive.extractall(unpacked, **FILTER)
    (source,) = unpacked.iterdir()
    return build(source, tmp_path_factory.mktemp("wheel"), "build_wheel")


def test_the_wheel_has_one_import_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"dtrain"}


def test_the_wheel_has_every_source_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("dtrain", *FOLDERS):
        inside = Path("dtrain") if folder == "dtrain" else Path("dtrain", folder)
        for file in (REPOSITORY / folder).rglob("*.py"):
            assert (inside / file.relative_to(REPOSITORY / folder)).as_posix() in names, file
    assert "dtrain/py.typed" in names


def test_the_wheel_imports_by_itself(wheel: Path) -> None:
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; import dtrain, dtrain.scheduler, "
        "dtrain.launch.supervisor, dtrain.cli.main; print(dtrain.launch.supervisor.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(wheel)],
        cwd=wheel.parent,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(wheel))


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = archive.read(info).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    scripts = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert "dtrain = dtrain.cli.main:main" in scripts
    licence = archive.read(info.replace("METADATA", "licenses/LICENSE")).decode()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
