"""Flags of dtrain and of torchrun on one line, in any order."""

from __future__ import annotations

import pytest

from dtrain.errors import DtrainError
from dtrain.launch.request import RunRequest
from dtrain.launch.torchrun import parse


@pytest.mark.parametrize(
    "line",
    [
        "c.yaml --nproc-per-node 4 --max-restarts=2 --set a.b=c --set d.e=f --run-dir r --json",
        "--nproc-per-node 4 --max-restarts=2 --set a.b=c --set d.e=f --run-dir r --json c.yaml",
        "--set a.b=c --nproc-per-node=4 c.yaml --set d.e=f --json --max-restarts 2 --run-dir=r",
        "--json --run-dir r c.yaml --nproc_per_node=4 --set a.b=c --max_restarts=2 --set d.e=f",
    ],
)
def test_the_order_of_flags_does_not_matter(line: str) -> None:
    request, torchrun = parse(line.split())
    assert request == RunRequest("c.yaml", ("a.b=c", "d.e=f"), "r", json_output=True)
    assert (torchrun.nproc_per_node, torchrun.max_restarts) == ("4", 2)
    words = ["c.yaml", "--set", "a.b=c", "--set", "d.e=f", "--run-dir", "r", "--json"]
    assert request.arguments() == words


def test_strict_is_an_override_by_another_name() -> None:
    request, _ = parse(["--strict", "c.yaml", "--set", "a.b=c"])
    assert request.overrides == ("checkpoint.strict=true", "a.b=c")


@pytest.mark.parametrize(
    ("line", "standalone"),
    [
        ("c.yaml", True),
        ("c.yaml --nnodes=1", True),
        ("c.yaml --master-port=29511", False),
        ("c.yaml --rdzv-backend=c10d --rdzv-endpoint=h:1", False),
        ("c.yaml --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:1", False),
        ("c.yaml --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=h:1 --standalone", True),
    ],
)
def test_standalone_is_the_default_where_no_rendezvous_is_given(
    line: str, standalone: bool
) -> None:
    assert parse(line.split())[1].standalone is standalone


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected the CONFIG to run, got none"),
        ("--nproc-per-node=2", "expected the CONFIG to run, got none"),
        ("c.yaml d.yaml", "expected one CONFIG, got c.yaml and d.yaml"),
        ("c.yaml --bogus", "unrecognized arguments: --bogus"),
        ("--bogus c.yaml", "unrecognized arguments: --bogus"),
        ("c.yaml --max-restarts=x", "max_restarts: invalid int value: 'x'"),
        ("c.yaml --no-python", "--no-python is set by dtrain run itself"),
    ],
)
def test_bad_flags_get_one_line(line: str, message: str) -> None:
    with pytest.raises(DtrainError) as caught:
        parse(line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
