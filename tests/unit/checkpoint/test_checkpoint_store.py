"""Saving, loading, verifying and pruning from one process."""

from __future__ import annotations

import json
import os
import pickle
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener
from torch import Tensor

from dtrain.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    CheckpointStore,
    Retention,
    Retry,
    weights_sha256,
)
from dtrain.checkpoint.files import digest_of
from dtrain.checkpoint.manifest import MANIFEST, MARKER, METADATA
from dtrain.config import check_config
from dtrain.errors import DtrainError

IDENTITY = {"seed": 1, "model": {"name": "gcn", "fanouts": (1, 2)}}


def some_tensors(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "model/layers.0.weight": torch.randn(7, 5, generator=g),
        "model/layers.1.weight": torch.randn(5, 7, generator=g).t(),
        "model/layers.1.bias": torch.randn(5, generator=g).bfloat16(),
        "optim/layers.0.weight/exp_avg": torch.randn(70, generator=g)[::2].reshape(7, 5),
        "optim/layers.0.weight/step": torch.tensor(float(seed)),
        "optim/layers.1.bias/step": torch.tensor(seed, dtype=torch.int64),
        "partition/0/cursor": torch.arange(seed, seed + 4),
        "partition/1/empty": torch.zeros(0, 3),
    }


def save(store: CheckpointStore, step: int, keep: int = 10) -> CheckpointInfo:
    progress = {"step": step, "identity": IDENTITY, "lr": {"last_epoch": step}}
    tensors = some_tensors(step)
    return store.save(step, tensors, progress, retention=Retention(keep))


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run" / "checkpoints")
        return
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}/checkpoints"
    fsspec.filesystem("memory").rm(name, recursive=True)


def test_round_trip_of_all_dtypes_and_shapes(url: str) -> None:
    store = CheckpointStore(url)
    store.prepare()
    assert store.list() == []
    assert store.newest() is None
    saved = save(store, 3)
    assert (saved.step, saved.name) == (3, "step-00000003")
    reader = CheckpointStore(url)
    assert reader.newest(IDENTITY) == saved
    assert reader.verify(saved, IDENTITY) == []
    assert reader.progress(saved)["lr"] == {"last_epoch": 3}

    expected = some_tensors(3)
    assert weights_sha256(reader.load_tensors(saved)) == weights_sha256(expected)
    assert reader.names(saved) == sorted(expected)
    one = reader.load_tensors(saved, ["optim/layers.0.weight/step"])
    assert [*one] == ["optim/layers.0.weight/step"]
    assert one["optim/layers.0.weight/step"] == 3

    targets = {name: torch.full_like(t, 99) for name, t in expected.items()}
    targets["model/layers.0.weight"] = torch.nn.Parameter(torch.zeros(5, 7).t())
    kept = dict(targets)
    reader.load_into(saved, targets)
    assert weights_sha256(kept) == weights_sha256(expected)


def test_a_target_that_does_not_fit_is_named_and_nothing_is_filled(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    info = save(store, 1)
    other = torch.zeros(7, 5)
    for name, target, message in (
        ("model/layers.9.weight", torch.zeros(1), "no tensor model/layers.9.weight"),
        ("model/layers.1.bias", torch.zeros(5), "bfloat16.*expected torch.float32"),
        ("model/layers.1.weight", torch.zeros(5, 7), r"\[7, 5\], expected"),
    ):
        with pytest.raises(CheckpointError, match=message):
            store.load_into(info, {"model/layers.0.weight": other, name: target})
    assert not other.any()
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        store.load_tensors(info, ["nothing"])


def test_another_identity_is_skipped_and_its_fields_named(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    save(store, 1)
    said: list[str] = []
    assert store.newest({**IDENTITY, "seed": 2, "split": 0}, said.append) is None
    assert said == [
        "checkpoint skipped: step-00000001/manifest.json: of another config (seed, split differ)"
    ]


@pytest.mark.parametrize("victim", ["data", METADATA, MANIFEST, MARKER])
@pytest.mark.parametrize("fault", ["flip first", "flip last", "truncate", "extend", "remove"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(
    tmp_path: Path, victim: str, fault: str
) -> None:
    store = CheckpointStore(str(tmp_path))
    older, newer = save(store, 1), save(store, 2)
    folder = tmp_path / newer.name
    name = next(p.name for p in folder.glob("*.distcp")) if victim == "data" else victim
    file = folder / name
    data = bytearray(file.read_bytes())
    if fault == "remove":
        file.unlink()
    else:
        if fault == "truncate":
            del data[-1]
        elif fault == "extend":
            data.append(0)
        else:
            data[0 if fault == "flip first" else -1] ^= 1
        file.write_bytes(data)

    said: list[str] = []
    assert store.newest(IDENTITY, said.append) == older
    assert len(said) == 1
    # A manifest that its marker does not vouch for is the manifest's fault.
    gone = victim == MARKER and fault == "remove"
    blamed = f"{newer.name}: not committed" if gone else f"{newer.name}/"
    assert blamed in said[0]
    assert gone or (MANIFEST if victim == MARKER else name) in said[0]
    if not gone:
        assert store.verify(newer)
        assert store.list() == [older, newer]
    else:
        assert store.list() == [older]


def test_every_fault_is_listed(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    info = save(store, 1)
    (tmp_path / info.name / METADATA).unlink()
    data = next((tmp_path / info.name).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    faults = store.verify(info, {})
    assert sorted(f.split(": ")[1].split(" (")[0] for f in faults) == [
        "checksum differs",
        "missing",
        "of another config",
    ]


class Bomb:
    """Writes a file when it is unpickled without limits."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def commit_forged(folder: Path, name: str, data: bytes) -> None:
    """Replace a file and make manifest and marker agree with it, as an attacker would."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"size": len(data), "sha256": digest_of(data).sha256}
    raw = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(raw)
    (folder / MARKER).write_text(digest_of(raw).sha256 + "\n")


@pytest.mark.parametrize("kind", ["bomb", "not metadata", "outside", "unlisted", "object"])
def test_an_evil_metadata_pickle_is_refused(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(str(tmp_path / "ck"))
    info = save(store, 1)
    folder, target = tmp_path / "ck" / info.name, tmp_path / "bombed"
    metadata = pickle.loads((folder / METADATA).read_bytes())
    if kind == "bomb":
        metadata.planner_data = Bomb(str(target))
    elif kind == "not metadata":
        metadata = torch.Size([1])
    elif kind == "outside":
        next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    elif kind == "unlisted":
        next(iter(metadata.storage_data.values())).relative_path = "elsewhere"
    else:
        metadata.state_dict_metadata["model/layers.0.weight"] = {}
    commit_forged(folder, METADATA, pickle.dumps(metadata))
    assert store.newest() == info
    fault = "names elsewhere, which" if kind == "unlisted" else "unsafe or damaged pickle"
    with pytest.raises(CheckpointError, match=rf"step-00000001/\.metadata: {fault}"):
        store.load_tensors(info)
    assert not target.exists()


def test_loading_never_unpickles_without_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path))
    info = save(store, 1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unrestricted unpickling")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    assert len(store.load_tensors(info)) == len(some_tensors(1))


def test_no_file_of_a_checkpoint_names_where_it_was_stored(tmp_path: Path) -> None:
    info = save(CheckpointStore(str(tmp_path)), 1)
    files = [*(tmp_path / info.name).iterdir()]
    assert len(files) == 4
    for file in files:
        assert str(tmp_path).encode() not in file.read_bytes(), file.name


def test_a_checkpoint_stops_counting_before_its_files_go(url: str) -> None:
    save(CheckpointStore(url), 1)
    fs, root = fsspec.core.url_to_fs(url)
    seen: list[tuple[bool, bool]] = []

    def look(point: str) -> None:
        if point == "remove.files":
            names = fs.ls(f"{root}/step-00000001", detail=False)
            left = {name.rsplit("/", 1)[-1] for name in names}
            seen.append((MARKER in left, MANIFEST in left))

    save(CheckpointStore(url, look), 2, keep=1)
    assert seen == [(False, True)]


def test_an_evil_tensor_payload_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "ck"))
    info = save(store, 1)
    folder, target = tmp_path / "ck" / info.name, tmp_path / "bombed"
    data = next(folder.glob("*.distcp"))
    torch.save(Bomb(str(target)), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for entry in metadata.storage_data.values():
        entry.offset, entry.length = 0, len(evil)
    commit_forged(folder, METADATA, pickle.dumps(metadata))
    commit_forged(folder, data.name, evil)
    assert store.verify(info) == []
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.load_tensors(info)
    assert not target.exists()


def test_a_manifest_that_points_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    info = save(store, 1)
    (tmp_path / "elsewhere").write_bytes(b"x")
    commit_forged(tmp_path / info.name, "../elsewhere", b"x")
    assert store.verify(info) == [
        "step-00000001/manifest.json: not a manifest (file '../elsewhere')"
    ]


def test_prune_keeps_the_newest_and_clears_older_leftovers(url: str) -> None:
    store = CheckpointStore(url)
    fs, root = fsspec.core.url_to_fs(url)
    for name in ("step-00000001.incomplete", "step-00000002", "step-00000099.incomplete", "mine"):
        fs.makedirs(f"{root}/{name}", exist_ok=True)
        fs.pipe_file(f"{root}/{name}/file", b"x")
    for step in (3, 4, 5):
        save(store, step, keep=2)
    assert [c.step for c in store.list()] == [4, 5]
    left = {name.rsplit("/", 1)[-1] for name in fs.ls(root, detail=False)}
    # An unfinished save that is newer may still be under way; other folders are not ours.
    assert left == {"step-00000004", "step-00000005", "step-00000099.incomplete", "mine"}
    said: list[str] = []
    newest = store.newest(on_skip=said.append)
    assert newest is not None
    assert newest.step == 5
    assert "step-00000099.incomplete: not committed" in said[0]


def test_prune_never_removes_the_newest_valid_one(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    for step in (1, 2, 3):
        save(store, step)
    for step in (2, 3):
        (tmp_path / f"step-0000000{step}" / METADATA).write_bytes(b"damaged")
    store.prune(Retention(1))
    assert [c.step for c in store.list()] == [1, 3]
    (tmp_path / "step-00000001" / METADATA).unlink()
    store.prune(Retention(1))
    assert [c.step for c in store.list()] == [1, 3], "with none intact, nothing is removed"
    with pytest.raises(DtrainError, match=r"checkpoint\.keep: expected at least 1, got 0"):
        store.prune(Retention(0))


def test_a_step_saved_again_replaces_leftovers_and_never_a_committed_one(url: str) -> None:
    store = CheckpointStore(url)
    fs, root = fsspec.core.url_to_fs(url)
    for name in ("step-00000007.incomplete", "step-00000007"):
        fs.makedirs(f"{root}/{name}", exist_ok=True)
        fs.pipe_file(f"{root}/{name}/__0_old_0.distcp", b"x")
    first = save(store, 7)
    assert first.name == "step-00000007"
    assert not fs.glob(f"{root}/*/*old*")

    seen: list[bool] = []

    def committed_throughout(point: str) -> None:
        seen.append(CheckpointStore(url).newest() in (first, CheckpointInfo(7, 1)))

    second = save(CheckpointStore(url, committed_throughout), 7)
    assert second == CheckpointInfo(7, 1)
    assert len(seen) > 10
    assert all(seen)
    assert store.newest() == second
    assert store.list() == [second], "the earlier attempt goes once the later one is committed"


def test_a_failed_save_commits_nothing_and_the_next_one_succeeds(url: str) -> None:
    first = save(CheckpointStore(url), 1)
    points: list[str] = []
    save(CheckpointStore(url, points.append), 2)
    before = points[: points.index("committed")]
    assert {"data.write", "file.flush", "manifest.write", "marker.write"} <= set(before)
    for number, point in enumerate(before):
        countdown = [number]

        def fail(at: str, left: list[int] = countdown) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(28, "No space left on device")

        with pytest.raises(CheckpointError, match=r"step 3 .* worker 0: No space left on device"):
            save(CheckpointStore(url, fail), 3)
        assert [c.step for c in CheckpointStore(url).list()] == [1, 2], point
        fs, root = fsspec.core.url_to_fs(url)
        assert len(fs.ls(root)) == 2, f"leftovers after a failure at {point}"
    assert save(CheckpointStore(url), 3).name == "step-00000003"
    assert first in CheckpointStore(url).list()


@pytest.mark.parametrize(("short", "cause"), [(False, "No space left"), (True, "short write: ")])
def test_a_disk_that_takes_no_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool, cause: str
) -> None:
    room = [2000]

    def write(opened: LocalFileOpener, data: memoryview) -> int:
        size = memoryview(data).nbytes
        room[0] -= size
        if room[0] > 0:
            return int(opened.f.write(data))
        if short:
            return int(opened.f.write(memoryview(data).cast("B")[: size // 2]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalFileOpener, "write", write)
    with pytest.raises(CheckpointError, match=f"step 1 at .* was not saved: worker 0: {cause}"):
        save(CheckpointStore(str(tmp_path)), 1)
    assert [*tmp_path.iterdir()] == []
    room[0] = 1 << 30
    store = CheckpointStore(str(tmp_path))
    assert store.newest() is None
    assert save(store, 1) == store.newest()


def test_what_json_cannot_hold_fails_the_save_cleanly(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    with pytest.raises(CheckpointError, match="progress: expected plain JSON"):
        store.save(1, {}, {"x": torch.zeros(1)})
    assert [*tmp_path.iterdir()] == []


def test_a_prune_that_fails_after_the_commit_is_a_warning(tmp_path: Path) -> None:
    def fail(point: str) -> None:
        if point == "remove.files":
            raise PermissionError(13, "Permission denied")

    save(CheckpointStore(str(tmp_path)), 1)
    said: list[str] = []
    store = CheckpointStore(str(tmp_path), fail)
    info = store.save(2, {}, {}, retention=Retention(1), on_warning=said.append)
    assert store.newest() == info
    assert len(said) == 1
    assert "could not be pruned: Permission denied" in said[0]


def test_a_store_that_fails_to_answer_is_not_an_empty_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    store = CheckpointStore(str(tmp_path), retry=Retry((0.1, 0.2), waits.append))
    save(store, 1)
    save(store, 2)

    def unreachable(path: str, **_: object) -> None:
        raise ConnectionError("ftp://me:secret@host/x?token=abc is unreachable")

    monkeypatch.setattr(store._files, "fs", type("Fs", (), {
        "info": staticmethod(unreachable),
        "ls": store._files.fs.ls,
        "invalidate_cache": store._files.fs.invalidate_cache,
    })())  # fmt: skip
    for call in (store.list, store.newest, lambda: store.prune(Retention(1))):
        with pytest.raises(CheckpointError, match="ftp://host/x is unreachable") as caught:
            call()
        assert "secret" not in str(caught.value)
        assert "abc" not in str(caught.value)
    assert waits == [0.1, 0.2] * 3, "an unreachable store is tried again"
    assert len(CheckpointStore(str(tmp_path)).list()) == 2


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DtrainError) as caught:
        CheckpointStore(str(tmp_path / "file" / "checkpoints")).prepare()
    message = str(caught.value)
    assert message.startswith(f"checkpoint.url: {tmp_path}/file/checkpoints cannot be written to")
    assert "\n" not in message


def test_s3_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # fsspec keeps the classes that it has found before.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(DtrainError, match=r"s3://bucket/x needs .* pip install 'dtrain\[s3\]'"):
        CheckpointStore("s3://bucket/x?token=1")


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(DtrainError, match="expected no password in s3://bucket/x") as caught:
        CheckpointStore("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)
    raw = {
        "data": {"store": "x"},
        "train": {"epochs": 1},
        "checkpoint": {"url": "s3://k:secret@b"},
    }
    with pytest.raises(DtrainError, match=r"checkpoint\.url: expected no password") as caught:
        check_config(raw, "run.yaml")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "  ", "nosuch://x"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(DtrainError, match=r"checkpoint\.url: expected a path or an fsspec URL"):
        CheckpointStore(url)
