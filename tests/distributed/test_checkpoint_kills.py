"""A process that is killed at any moment of a save leaves a committed, intact checkpoint."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_kills
import pytest
from checkpoint_workers import LAYERS, stage_tensors
from test_checkpoint_workers import JOIN_S, Workers

from dtrain.checkpoint import CheckpointStore, weights_sha256

# All moments on all stores take minutes; a few are tried each time.
HOW_MANY = [pytest.param(False, id="few"), pytest.param(True, id="all", marks=pytest.mark.chaos)]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path)
    yield workers
    workers.close()


@pytest.fixture(params=["local", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "ck")
    server = request.getfixturevalue("s3")
    return f"s3://{server.bucket}/{tmp_path.name}"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def kill(workers: Workers, urls: list[str], moments: list[Any]) -> list[int]:
    for url in urls:
        checkpoint_kills.save_steps(url, checkpoint_kills.STEPS[:-1], CheckpointStore(url))
    answer = workers.folder / "ends.json"
    process = workers.start(checkpoint_kills.kill_each, str(answer), environment(), urls, moments)
    process.join(JOIN_S + len(urls))
    assert process.exitcode == 0
    return [int(end) for end in json.loads(answer.read_text())]


def check(url: str, allowed: set[int]) -> int:
    """The newest checkpoint is whole, has exactly its step's values, and saving goes on."""
    store = CheckpointStore(url)
    newest = store.newest(on_skip=lambda _: None)
    assert newest is not None
    assert newest.step in allowed
    expected = weights_sha256(stage_tensors(range(LAYERS), newest.step))
    assert weights_sha256(store.load_tensors(newest)) == expected
    for info in store.list():
        assert store.verify(info) == [], "what is committed is whole"
    checkpoint_kills.save_steps(url, checkpoint_kills.STEPS[-1:], store)
    assert [info.step for info in store.list()] == [2, 3]
    assert store.unfinished() == []
    return newest.step


@pytest.mark.timeout(900)
@pytest.mark.parametrize("full", HOW_MANY)
def test_killed_at_every_point(workers: Workers, base: str, full: bool) -> None:
    points: list[str] = []
    dry = f"{base}/dry"
    for step in checkpoint_kills.STEPS:
        points.clear()
        checkpoint_kills.save_steps(dry, (step,), CheckpointStore(dry, points.append))
    assert len(set(points)) >= (15 if base.startswith("s3") else 16)
    numbers = [*range(len(points))]
    if not full:
        numbers = [points.index(point) for point in dict.fromkeys(points)]
        # On S3 a save takes seconds of the server's time.
        numbers = numbers[::4] if base.startswith("s3") else numbers
    urls = [f"{base}/{number}" for number in numbers]
    assert kill(workers, urls, numbers) == [-9] * len(numbers)
    # On S3 the marker is there when its file is closed; locally once it has its final name.
    done = points.index("committed") - int(base.startswith("s3"))
    for number, url in zip(numbers, urls, strict=True):
        committed = number >= done
        assert check(url, {3} if committed else {2}), points[number]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("full", HOW_MANY)
def test_killed_at_random_moments(workers: Workers, base: str, full: bool) -> None:
    rng = random.Random(6)
    dry = f"{base}/dry"
    store = CheckpointStore(dry)
    checkpoint_kills.save_steps(dry, checkpoint_kills.STEPS[:1], store)
    began = time.monotonic()
    checkpoint_kills.save_steps(dry, checkpoint_kills.STEPS[1:2], store)
    took_s = time.monotonic() - began
    count = 200 if full else 2 if base.startswith("s3") else 8
    # The first comes early in any case: a machine may be quicker the second time.
    moments = [took_s / 4, *(rng.uniform(0, took_s) for _ in range(count - 1))]
    urls = [f"{base}/{number}" for number in range(len(moments))]
    ends = kill(workers, urls, moments)
    assert set(ends) <= {-9, 0}
    assert -9 in ends
    for url in urls:
        check(url, {2, 3})
