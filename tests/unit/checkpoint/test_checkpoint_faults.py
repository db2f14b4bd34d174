"""Faulty disks: training goes on, the fault is told, the next save succeeds, nothing half-written
counts; and every flipped byte is found."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from ctypes import c_uint32
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from dtrain.checkpoint import CheckpointError, CheckpointStore, Retention, Retry, weights_sha256

QUICK = Retry((0.001,))


class Training:
    """Updates its weights at each step, and saves every second one in the background."""

    def __init__(self, url: str, retention: Retention | None = None) -> None:
        self.store = CheckpointStore(url, retry=QUICK)
        self.retention = retention or Retention(2)
        self.weights = {"model/w": torch.zeros(500, 30), "model/b": torch.zeros(30)}
        self.step = 0
        self.events: list[str] = []
        self.saved: list[int] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            for tensor in self.weights.values():
                tensor.add_(1)
            if self.step % 2 == 0:
                pending = self.store.save_async(
                    self.step, self.weights, {}, retention=self.retention
                )
                try:
                    self.saved.append(pending.result(30).step)
                except CheckpointError as error:
                    self.events.append(str(error))

    def check(self) -> None:
        """What is committed is whole, and has exactly the values of its step."""
        newest = self.store.newest(on_skip=lambda _: None)
        assert newest is not None
        assert newest.step == self.saved[-1]
        for info in self.store.list():
            assert self.store.verify(info) == []
            for tensor in self.store.load_tensors(info).values():
                assert bool((tensor == info.step).all())


def failing(call: Callable[..., Any], error: OSError) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def short(call: Callable[..., int]) -> Callable[..., int]:
    def write(opened: LocalFileOpener, data: Any) -> int:
        return int(opened.f.write(memoryview(data).cast("B")[:-1]))

    return write


Patch = Callable[[pytest.MonkeyPatch], None]


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(LocalFileOpener, "write", failing(LocalFileOpener.write, error))


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(LocalFileSystem, "makedirs", failing(LocalFileSystem.makedirs, error))


def short_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalFileOpener, "write", short(LocalFileOpener.write))


def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(os.fsync, OSError(errno.EIO, "Input/output error")))


def no_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EBUSY, "Device or resource busy")
    monkeypatch.setattr(os, "rename", failing(os.rename, error))


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EHOSTUNREACH, "No route to host")
    monkeypatch.setattr(LocalFileSystem, "ls", failing(LocalFileSystem.ls, error))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (full, "No space left on device"),
        (refused, "Permission denied"),
        (short_write, "short write: "),
        (unsynced, "Input/output error"),
        (no_rename, "Device or resource busy"),
        (unreachable, "No route to host"),
    ],
)
def test_training_goes_on_through_a_fault_of_the_store(
    tmp_path: Path, fault: Patch, cause: str
) -> None:
    training = Training(str(tmp_path / "ck"))
    training.run(4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault(monkeypatch)
        training.run(4)
    assert training.step == 8
    assert training.saved == [2, 4]
    assert len(training.events) == 2
    assert all(cause in event and "\n" not in event for event in training.events)
    training.check()
    training.run(2)
    assert training.saved[-1] == 10
    training.check()
    assert training.store.unfinished() == []


class _Capabilities(ctypes.Structure):
    """Two words of each set, as the kernel's third version has them (capset(2))."""

    _fields_ = (("effective", c_uint32), ("permitted", c_uint32), ("inheritable", c_uint32))


@contextlib.contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Without the right of root to write everywhere, for this thread and those it starts."""
    overrides = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    libc = ctypes.CDLL(None, use_errno=True)
    header = (c_uint32 * 2)(0x20080522, 0)
    sets = (_Capabilities * 2)()
    assert libc.capget(header, sets) == 0
    had = sets[0].effective
    sets[0].effective = had & ~overrides
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0].effective = had
        assert libc.capset(header, sets) == 0


def test_a_folder_that_lost_its_permission(tmp_path: Path) -> None:
    with bound_by_permissions():
        training = Training(str(tmp_path / "ck"))
        training.run(2)
        (tmp_path / "ck").chmod(0o500)
        training.run(2)
        (tmp_path / "ck").chmod(0o700)
        training.run(2)
    assert training.saved == [2, 6]
    assert len(training.events) == 1
    assert "Permission denied" in training.events[0]
    training.check()


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of its own, of 256 KiB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {disk} 2>/dev/null"):
        pytest.skip("mounting a file system is not allowed here")
    try:
        training = Training(f"{disk}/ck", Retention(1))
        training.run(4)
        assert training.saved == [2, 4]
        (disk / "other").write_bytes(bytes(160 << 10))
        training.run(4)
        assert len(training.events) == 2
        assert all("No space left on device" in event for event in training.events)
        training.check()
        (disk / "other").unlink()
        training.run(2)
        assert training.saved == [2, 4, 10]
        training.check()
    finally:
        os.system(f"umount {disk}")


def test_every_flipped_byte_is_found_and_skipped(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    older = store.save(1, {"model/w": torch.ones(3)}, {})
    tensors = {f"model/{i}": torch.randn(40, i) for i in range(1, 6)}
    info = store.save(2, tensors, {"identity": {"seed": 1}})
    files = sorted((tmp_path / info.name).iterdir())
    assert len(files) == 4
    rng = random.Random(6)
    # Over all files alike: most bytes are in one of them.
    for number in range(500):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        place = rng.randrange(len(content))
        good = content[place]
        content[place] ^= rng.randrange(1, 256)
        file.write_bytes(content)
        where = f"{file.name} byte {place}: {good} -> {content[place]}"
        assert store.verify(info), where
        assert store.newest(on_skip=lambda _: None) == older, where
        content[place] = good
        file.write_bytes(content)
    assert store.newest() == info
    assert store.verify(info) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("saves", [30, pytest.param(1000, marks=pytest.mark.chaos)])
def test_many_saves_with_pruning_beside_a_reader_leak_nothing(tmp_path: Path, saves: int) -> None:
    url = str(tmp_path / "ck")
    store, reader = CheckpointStore(url), CheckpointStore(url)
    tensors = {"model/a": torch.randn(100, 100), "model/b": torch.randn(7)}
    over = threading.Event()
    reads: list[str] = []

    def read() -> None:
        while not over.is_set():
            found = reader.read_newest(reader.load_tensors, on_skip=lambda _: None)
            if found is not None:
                reads.append(weights_sha256(found[1]))

    def save(first: int, count: int) -> None:
        for step in range(first, first + count):
            store.save_async(step, tensors, {}, retention=Retention(2)).result(30)

    def used() -> tuple[int, int, int]:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), resident

    save(0, 20)
    before = used()
    thread = threading.Thread(target=read)
    thread.start()
    save(20, saves)
    over.set()
    thread.join(30)
    after = used()
    assert after[0] <= before[0], "file descriptors"
    assert after[1] <= before[1], "threads"
    assert after[2] - before[2] < 64 << 20, "memory"
    assert len(reads) > 1
    assert set(reads) == {weights_sha256(tensors)}
    last = 19 + saves
    assert sorted(os.listdir(url)) == [f"step-{s:08d}" for s in (last - 1, last)]
    assert all(len(os.listdir(f"{url}/{name}")) == 4 for name in os.listdir(url))
