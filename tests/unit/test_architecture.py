"""The arrows between the folders: who may import whom, read off the source."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("scheduler", "kernels", "checkpoint", "launch")
FACE = ("dtrain/cli/", "dtrain/train.py", "dtrain/__main__.py")
FACE_MODULES = ("dtrain.cli", "dtrain.train", "dtrain.__main__")

PURE = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "typing",
}
"""All of the standard library that a decision may rest on: no clock, chance, socket or file."""

DISTRIBUTED = {
    "dtrain/runtime/comm.py": ("torch.distributed",),
    # DeepSpeed's collectives, each issued async and handed to comm.py to wait for.
    "dtrain/runtime/deepspeed_backend.py": ("torch.distributed",),
    # The job's key-value store, on which the log of membership lies.
    "dtrain/runtime/store_log.py": (
        "torch.distributed.TCPStore",
        "torch.distributed.PrefixStore",
        "torch.distributed.Store",
    ),
    "checkpoint/": ("torch.distributed.checkpoint",),
    "launch/torchrun.py": ("torch.distributed.run", "torch.distributed.elastic"),
    "dtrain/cli/env.py": ("torch.distributed",),
    "dtrain/bench/checkpoint.py": ("torch.distributed.checkpoint",),
    # What a user would write instead of dtrain, to be measured beside it.
    "dtrain/bench/train_peers.py": ("torch.distributed",),
}
"""Who may name which part of torch.distributed."""


def sources() -> list[Path]:
    """Every source file of the project, each once, relative to the repository."""
    files: list[Path] = []
    for folder in ("dtrain", *FOLDERS):
        # os.walk does not follow the links in dtrain/.
        for where, _, names in os.walk(REPOSITORY / folder):
            files += [Path(where, name) for name in names if name.endswith(".py")]
    return sorted(file.relative_to(REPOSITORY) for file in files)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, anywhere in it; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module uses, like ``os.environ`` or ``torch.distributed.send``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(parts)])


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def problems(file: Path, source: str) -> list[str]:
    """What is wrong with one file, each as ``file: what``."""
    where, tree = file.as_posix(), ast.parse(source)
    names = set(imported(tree))
    own = where.split("/")[0]
    bad: set[str] = set()
    if own == "scheduler":
        bad |= {
            name
            for name in names
            if name.split(".")[0] not in PURE
            and not within(name, "dtrain.scheduler", "dtrain.errors")
        }
        calls = {node.func.id for node in ast.walk(tree) if is_named_call(node)}
        bad |= calls & {"open", "print", "input", "__import__"}
    if own in ("kernels", "checkpoint"):
        allowed = (f"dtrain.{own}", "dtrain.errors")
        bad |= {name for name in names if within(name, "dtrain") and not within(name, *allowed)}
    if own == "launch":
        bad |= {name for name in names if within(name, *FACE_MODULES)}
    if own == "dtrain" and not where.startswith(FACE):
        bad |= {name for name in names if within(name, "dtrain.launch", *FACE_MODULES)}
    mine = [
        part for place, parts in DISTRIBUTED.items() if where.startswith(place) for part in parts
    ]
    spoken = {name for name in names | set(dotted(tree)) if within(name, "torch.distributed")}
    bad |= {name for name in spoken if not within(name, *mine) and name != "torch.distributed"}
    if not mine:
        bad |= spoken
    if where != "dtrain/environment.py":
        bad |= {name for name in dotted(tree) if within(name, "os.environ", "os.getenv")}
        bad |= names & {"os.environ", "os.getenv"}
    return [f"{where}: {name}" for name in sorted(bad)]


def is_named_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_no_file_imports_against_the_arrows() -> None:
    files = sources()
    assert len(files) > 20
    found = [line for file in files for line in problems(file, (REPOSITORY / file).read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("scheduler/plan.py", "import torch"),
        ("scheduler/plan.py", "def f():\n    from time import monotonic"),
        ("scheduler/plan.py", "open('x')"),
        ("kernels/spmm/cpu.py", "import torch\ntorch.distributed.send(1)"),
        ("kernels/spmm/cpu.py", "from dtrain.config import Config"),
        ("checkpoint/store.py", "from dtrain.launch import supervisor"),
        ("checkpoint/store.py", "from torch.distributed import send"),
        ("launch/torchrun.py", "from dtrain.cli.main import app"),
        ("launch/torchrun.py", "import torch.distributed.checkpoint"),
        ("dtrain/runtime/worker.py", "from dtrain import launch"),
        ("dtrain/runtime/worker.py", "import torch.distributed as dist"),
        ("dtrain/runtime/worker.py", "from torch import distributed"),
        ("dtrain/runtime/worker.py", "import os\nos.environ.get('X')"),
    ],
)
def test_the_check_sees(file: str, source: str) -> None:
    assert problems(Path(file), source)


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_point_at_the_folders(folder: str) -> None:
    link = REPOSITORY / "dtrain" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..", folder)


def test_top_level_is_the_layout_that_was_asked_for() -> None:
    wanted = {"dtrain", "checkpoint", "scheduler", "kernels", "tests", "launch", "pyproject.toml"}
    assert wanted <= {entry.name for entry in REPOSITORY.iterdir()}
