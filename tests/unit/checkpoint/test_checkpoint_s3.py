"""Checkpoints on a real S3 protocol server."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

import pytest
import torch

from dtrain.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    CheckpointStore,
    Retention,
    Retry,
    weights_sha256,
)
from dtrain.errors import DtrainError

TENSORS = {"model/a": torch.arange(3000.0).reshape(30, 100), "step": torch.tensor(1)}


def open_store(s3: Any, name: str = "run", retry: Retry | None = None) -> CheckpointStore:
    return CheckpointStore(f"s3://{s3.bucket}/{name}/checkpoints", retry=retry)


def test_round_trip_retention_and_damage(s3: Any) -> None:
    store = open_store(s3)
    store.prepare()
    assert store.newest() is None
    for step in range(1, 6):
        store.save_async(step, TENSORS, {"n": step}, retention=Retention(2, every=3)).result()
    assert [i.step for i in store.list()] == [3, 4, 5]
    assert store.newest() == CheckpointInfo(5)
    assert weights_sha256(store.load_tensors(CheckpointInfo(4))) == weights_sha256(TENSORS)
    # Listings kept by the client must not hide what another one does.
    other = open_store(s3)
    other.save(6, TENSORS, {}, retention=Retention(1))
    assert store.newest() == CheckpointInfo(6)

    fs, root = store._files.fs, f"{s3.bucket}/run/checkpoints/step-00000006"
    other.save(7, TENSORS, {})
    data = next(p for p in fs.ls(root.replace("6", "7"), detail=False) if p.endswith("distcp"))
    content = bytearray(fs.cat_file(data))
    content[len(content) // 2] ^= 1
    fs.pipe_file(data, bytes(content))
    said: list[str] = []
    assert store.newest(on_skip=said.append) == CheckpointInfo(6)
    assert "checksum differs" in said[0]


def test_only_the_marker_commits_where_nothing_can_be_renamed(s3: Any) -> None:
    seen: list[tuple[str, list[int]]] = []

    def look(point: str) -> None:
        seen.append((point, [i.step for i in open_store(s3).list()]))

    CheckpointStore(f"s3://{s3.bucket}/run/checkpoints", look).save(1, TENSORS, {})
    points = [point for point, _ in seen]
    assert "rename" not in points
    before = points.index("marker.write") + 1
    assert {(*steps,) for _, steps in seen[:before]} == {()}
    assert seen[points.index("committed")] == ("committed", [1])


def test_a_reader_fetches_the_ranges_it_needs(s3: Any) -> None:
    store = open_store(s3)
    big = {f"model/{i}": torch.randn(1000, 100) for i in range(12)}
    info = store.save(1, big, {})
    ranges: list[tuple[str, int]] = []
    read_range = store._files.read_range

    def note(name: str, begin: int, end: int) -> bytes:
        ranges.append((name, end - begin))
        return read_range(name, begin, end)

    store._files.read_range = note  # type: ignore[method-assign]
    loaded = store.load_tensors(info, ["model/3"])
    assert torch.equal(loaded["model/3"], big["model/3"])
    assert len(ranges) == 1
    assert 400_000 <= ranges[0][1] < 410_000
    ranges.clear()
    assert weights_sha256(store.load_tensors(info)) == weights_sha256(big)
    assert len(ranges) == 1, "neighbours are fetched in one request"


def test_transient_errors_are_ridden_out(s3: Any) -> None:
    # Each of the client's own attempts fails too, so that ours are needed.
    refused: list[str] = []

    def first_puts(method: str, path: str) -> bool:
        if method == "PUT" and len(refused) < 6:
            refused.append(path)
            s3.fail_next.append(first_puts)
            return True
        return False

    s3.fail_next.append(first_puts)
    waits: list[float] = []
    store = open_store(s3, retry=Retry((0.01, 0.02), waits.append))
    info = store.save(1, TENSORS, {})
    assert len(refused) == 6
    assert waits == [0.01]
    assert store.newest() == info
    assert store.verify(info) == []


def test_an_unreachable_store_fails_the_save_and_not_the_training(s3: Any) -> None:
    store = open_store(s3, retry=Retry((0.01,)))
    first = store.save_async(1, TENSORS, {}).result()
    s3.down.set()
    pending = store.save_async(2, TENSORS, {})
    steps = 0
    while not pending.wait(0.02):
        steps += 1
    assert steps > 10, "the training thread went on"
    with pytest.raises(
        CheckpointError, match=r"step 2 at s3://bucket/.*worker 0: Reduce your rate"
    ):
        pending.result()
    s3.down.clear()
    assert store.newest() == first
    assert store.save_async(3, TENSORS, {}).result() == store.newest()
    assert store.unfinished() == []


def test_an_outage_shorter_than_the_retries_is_not_noticed(s3: Any) -> None:
    store = open_store(s3, retry=Retry((0.1, 0.2, 0.4)))
    s3.down.set()
    pending = store.save_async(1, TENSORS, {})
    timer = threading.Timer(2.5, s3.down.clear)
    timer.start()
    assert pending.result(60) == store.newest()
    timer.join()


def test_permanent_errors_are_clear_and_at_once(
    s3: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import s3fs

    caplog.set_level(logging.DEBUG, logger="dtrain")
    waits: list[float] = []
    nowhere = CheckpointStore("s3://no-such-bucket/run", retry=Retry((0.01,), waits.append))
    with pytest.raises(DtrainError) as missing:
        nowhere.prepare()
    assert "bucket" in str(missing.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", os.devnull)
    s3fs.S3FileSystem.clear_instance_cache()
    began = time.monotonic()
    with pytest.raises(DtrainError, match="Unable to locate credentials") as no_key:
        open_store(s3, retry=Retry((0.01,), waits.append)).prepare()
    assert time.monotonic() - began < 30
    assert waits == []
    for text in (str(missing.value), str(no_key.value), caplog.text):
        assert s3.secret not in text
        assert "\n" not in text.strip()


def test_credentials_are_in_no_object(s3: Any) -> None:
    store = open_store(s3)
    store.save(1, TENSORS, {"identity": {"seed": 1}})
    fs = store._files.fs
    objects = fs.find(f"{s3.bucket}/run")
    assert len(objects) == 4
    for path in objects:
        content = fs.cat_file(path)
        assert s3.secret.encode() not in content
        assert b"AKIATESTKEY" not in content
