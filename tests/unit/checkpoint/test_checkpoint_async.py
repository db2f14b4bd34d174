"""Saves in the background: what they contain, what they cost, how they fail."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointError, CheckpointStore, PendingSave, weights_sha256
from dtrain.errors import PeerLostError

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("dtrain-checkpoint"):
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name


class Gate:
    """Holds a save at a point until it is opened; notes which threads passed which points."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.reached = threading.Event()
        self.open = threading.Event()
        self.passed: list[tuple[str, str]] = []

    def __call__(self, point: str) -> None:
        self.passed.append((point, threading.current_thread().name))
        if point == self.point:
            self.reached.set()
            assert self.open.wait(WAIT_S)


def tensors_of(step: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(step)
    return {
        "model/a": torch.randn(300, 70, generator=g),
        "model/b": torch.randn(40, 30, generator=g).t(),
        "optim/a/step": torch.tensor(float(step)),
    }


@pytest.mark.parametrize("point", ["save.begin", "data.write", "file.open", "manifest.write"])
def test_a_save_has_the_values_of_its_step_while_training_goes_on(
    tmp_path: Path, point: str
) -> None:
    gate = Gate(point)
    store = CheckpointStore(str(tmp_path), gate)
    live = tensors_of(1)
    expected = weights_sha256(live)
    pending = store.save_async(1, live, {})
    assert gate.reached.wait(WAIT_S)
    assert not pending.done()
    assert not pending.wait(0.01)
    with pytest.raises(TimeoutError, match="step 1 is still under way"):
        pending.result(0.01)
    for tensor in live.values():
        tensor.fill_(-1)
    gate.open.set()
    info = pending.result(WAIT_S)
    assert pending.done()
    assert CheckpointStore(str(tmp_path)).newest() == info
    assert weights_sha256(store.load_tensors(info)) == expected


def test_only_the_copy_runs_in_the_training_thread(tmp_path: Path) -> None:
    gate = Gate("none")
    store = CheckpointStore(str(tmp_path), gate)
    pending = store.save_async(1, tensors_of(1), {})
    pending.result(WAIT_S)
    here = threading.current_thread().name
    own = {point for point, thread in gate.passed if thread == here}
    assert own == {"stage.begin", "stage.tensor", "stage.end"}
    assert {point for point, _ in gate.passed} > own
    assert 0 <= pending.waited_s <= pending.stall_s


def test_a_second_save_waits_for_the_first_and_both_are_whole(tmp_path: Path) -> None:
    gate = Gate("manifest.write")
    store = CheckpointStore(str(tmp_path), gate)
    first = store.save_async(1, tensors_of(1), {})
    assert gate.reached.wait(WAIT_S)
    begun: list[PendingSave] = []
    second = threading.Thread(target=lambda: begun.append(store.save_async(2, tensors_of(2), {})))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the buffers of the first save are still in use"
    gate.open.set()
    second.join(WAIT_S)
    infos = [first.result(WAIT_S), begun[0].result(WAIT_S)]
    assert begun[0].waited_s > 0.1
    assert store.list() == infos
    for info in infos:
        assert weights_sha256(store.load_tensors(info)) == weights_sha256(tensors_of(info.step))
    # A save that does not return early waits too, so that steps are committed in order.
    third = store.save_async(3, tensors_of(3), {})
    fourth = store.save(4, tensors_of(4), {})
    assert third.done()
    assert store.list() == [*infos, third.result(), fourth][-3:]


def test_buffers_are_kept_and_those_not_needed_are_freed(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    live = tensors_of(1)

    def addresses() -> dict[str, int]:
        return {name: b.data_ptr() for name, b in store._staging._buffers.items()}

    store.save_async(1, live, {}).result(WAIT_S)
    before = addresses()
    store.save_async(2, live, {}).result(WAIT_S)
    assert addresses() == before
    assert all(before[name] != tensor.data_ptr() for name, tensor in live.items())
    grown = {"model/a": torch.ones(400, 70), "optim/a/step": live["optim/a/step"]}
    info = store.save_async(3, grown, {}).result(WAIT_S)
    assert {*addresses()} == {*grown}
    assert addresses()["optim/a/step"] == before["optim/a/step"]
    assert weights_sha256(store.load_tensors(info)) == weights_sha256(grown)


def test_a_failed_save_is_told_by_its_result_and_the_next_one_succeeds(tmp_path: Path) -> None:
    broken = [True]

    def fail(point: str) -> None:
        if broken[0] and point == "file.flush":
            raise OSError(28, "No space left on device")

    store = CheckpointStore(str(tmp_path), fail)
    pending = store.save_async(1, tensors_of(1), {})
    with pytest.raises(CheckpointError, match=r"step 1 .* worker 0: No space left on device"):
        pending.result(WAIT_S)
    assert [*tmp_path.iterdir()] == []
    broken[0] = False
    assert store.save_async(2, tensors_of(2), {}).result(WAIT_S) == store.newest()


def test_what_cannot_be_copied_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    sparse = {"x": torch.eye(3).to_sparse()}
    with pytest.raises(CheckpointError, match=r"step 1 .* worker 0: "):
        store.save_async(1, sparse, {}).result(WAIT_S)
    assert [*tmp_path.iterdir()] == []


class Ended:
    """A group that ends at some point of the save."""

    rank, size, worker = 0, 1, 3

    def __init__(self) -> None:
        self.over = False

    def all_gather(self, data: bytes) -> list[bytes]:
        self.check()
        return [data]

    def check(self) -> None:
        if self.over:
            raise PeerLostError("worker 1 is gone")


@pytest.mark.parametrize("point", ["data.write", "manifest.write", "rename", "marker.write"])
def test_a_worker_whose_generation_has_ended_commits_nothing(tmp_path: Path, point: str) -> None:
    group = Ended()

    def end(at: str) -> None:
        group.over = group.over or at == point

    store = CheckpointStore(str(tmp_path), end)
    with pytest.raises(PeerLostError, match="worker 1 is gone"):
        store.save_async(1, tensors_of(1), {}, exchange=group).result(WAIT_S)
    assert store.list() == []
    # The next generation's save of the step clears what is left.
    info = CheckpointStore(str(tmp_path)).save(1, tensors_of(1), {})
    assert [p.name for p in tmp_path.iterdir()] == [info.name]


def test_waiting_for_an_unfinished_save_ends_with_the_generation(tmp_path: Path) -> None:
    gate, group = Gate("data.write"), Ended()
    store = CheckpointStore(str(tmp_path), gate)
    stuck = store.save_async(1, tensors_of(1), {}, exchange=group)
    assert gate.reached.wait(WAIT_S)
    group.over = True
    with pytest.raises(PeerLostError):
        store.save_async(2, tensors_of(2), {}, exchange=group)
    gate.open.set()
    with pytest.raises(PeerLostError):
        stuck.result(WAIT_S)
    assert store.save(2, tensors_of(2), {}) == store.newest()


def test_a_broken_save_does_not_keep_its_group(tmp_path: Path) -> None:
    """A generation's sockets would stay open until the next save."""
    store, group = CheckpointStore(str(tmp_path)), Ended()
    group.over = True
    with pytest.raises(PeerLostError):
        store.save_async(1, tensors_of(1), {}, exchange=group).result(WAIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("dtrain-checkpoint"):
            thread.join(WAIT_S)
    alive = weakref.ref(group)
    del group
    gc.collect()
    assert alive() is None
