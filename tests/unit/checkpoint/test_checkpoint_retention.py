"""What stays, what goes, and readers beside a run that prunes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.checkpoint import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInfo,
    CheckpointStore,
    Retention,
)
from dtrain.errors import DtrainError


def save(store: CheckpointStore, step: int, retention: Retention | None = None) -> CheckpointInfo:
    tensors = {"model/w": torch.full((50, 20), float(step)), "step": torch.tensor(step)}
    return store.save(step, tensors, {"identity": {}}, retention=retention or Retention(100))


@given(
    st.sets(st.integers(0, 200)),
    st.integers(1, 8),
    st.none() | st.integers(1, 20),
    st.frozensets(st.integers(0, 200), max_size=4),
)
def test_what_is_kept(
    steps: set[int], keep: int, every: int | None, pinned: frozenset[int]
) -> None:
    kept = Retention(keep, every, pinned).kept(steps)
    assert kept <= steps
    for step in steps:
        newer = sum(other > step for other in steps)
        wanted = newer < keep or step in pinned or (every is not None and step % every == 0)
        assert (step in kept) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), r"checkpoint\.keep: .* got 0"), ((1, 0), r"checkpoint\.keep_every: .* got 0")],
)
def test_numbers_below_one_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DtrainError, match=message):
        Retention(*arguments)


def test_saves_prune_by_age_period_and_pin(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    for step in range(1, 12):
        save(store, step, Retention(2, every=4, pinned=frozenset([3])))
    assert [c.step for c in store.list()] == [3, 4, 8, 10, 11]
    would = store.prune(Retention(1), dry_run=True)
    assert would == ["step-00000003", "step-00000004", "step-00000008", "step-00000010"]
    assert [c.step for c in store.list()] == [3, 4, 8, 10, 11]
    assert store.prune(Retention(1)) == would
    assert [c.step for c in store.list()] == [11]


def test_strict_restoring_stops_at_damage_and_not_at_unfinished_saves(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    older, newer = save(store, 1), save(store, 2)
    (tmp_path / "step-00000003.incomplete").mkdir()
    assert store.newest(strict=True, on_skip=lambda _: None) == newer
    data = next((tmp_path / newer.name).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=rf"{newer.name}/{data.name}: checksum differs"):
        store.newest(strict=True, on_skip=lambda _: None)
    with pytest.raises(CheckpointError, match="of another config"):
        store.newest({"seed": 1}, strict=True, on_skip=lambda _: None)
    assert store.newest(on_skip=lambda _: None) == older


def test_a_reader_whose_checkpoint_is_pruned_takes_the_next(tmp_path: Path) -> None:
    writer, reader = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))
    first = save(writer, 1)
    tries: list[CheckpointInfo] = []

    def read(info: CheckpointInfo) -> float:
        tries.append(info)
        if info == first:
            save(writer, 2, Retention(1))
        return float(reader.load_tensors(info, ["step"])["step"])

    assert reader.read_newest(read) == (CheckpointInfo(2), 2.0)
    assert tries == [first, CheckpointInfo(2)]
    for call in (reader.progress, reader.names, reader.load_tensors, reader.verify):
        with pytest.raises(CheckpointGoneError, match=r"step-00000001: .* pruned meanwhile"):
            call(first)
    assert CheckpointStore(str(tmp_path / "none")).read_newest(read) is None


def store_has_two(store: CheckpointStore) -> bool:
    return CheckpointInfo(2) in store.list()


def test_a_checkpoint_pruned_while_it_is_verified_is_not_called_damaged(tmp_path: Path) -> None:
    writer, reader = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))
    save(writer, 1)
    digest, said, lock = reader._files.digest, [], threading.Lock()

    def prune_first(name: str) -> object:
        with lock:
            if not store_has_two(writer):
                save(writer, 2, Retention(1))
        return digest(name)

    reader._files.digest = prune_first  # type: ignore[method-assign,assignment]
    assert reader.newest(on_skip=said.append, strict=True) == CheckpointInfo(2)
    assert said == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_commit_and_a_prune_between_listing_and_looking_hide_nothing(
    tmp_path: Path, damaged: bool
) -> None:
    writer, reader = CheckpointStore(str(tmp_path)), CheckpointStore(str(tmp_path))
    if damaged:
        older = save(writer, 0)
        (tmp_path / older.name / "manifest.json").unlink()
    save(writer, 1)
    folders = reader._files.folders

    def list_early() -> list[str]:
        found = folders()
        if CheckpointInfo(2) not in writer.list():
            save(writer, 2)
            writer.prune(Retention(1, pinned=frozenset([0])))
        return found

    reader._files.folders = list_early  # type: ignore[method-assign]
    if damaged:
        assert reader.newest(on_skip=lambda _: None) == CheckpointInfo(2)
    else:
        assert reader.list() == [CheckpointInfo(2)]


def test_readers_beside_a_run_that_saves_and_prunes(tmp_path: Path) -> None:
    save(CheckpointStore(str(tmp_path)), 0)
    over, problems = threading.Event(), []
    seen: set[int] = set()

    def look() -> None:
        reader = CheckpointStore(str(tmp_path))
        while not over.is_set():
            try:
                found = reader.read_newest(reader.load_tensors, on_skip=problems.append)
                assert found is not None
                info, tensors = found
                assert bool((tensors["model/w"] == info.step).all())
                seen.add(info.step)
            except Exception as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    store = CheckpointStore(str(tmp_path))
    for step in range(1, 41):
        save(store, step, Retention(1))
    over.set()
    for thread in threads:
        thread.join(30)
    # An unfinished save is a message, not damage.
    bad = [p for p in problems if "not committed" not in p]
    assert bad == [], bad
    assert len(seen) > 1
