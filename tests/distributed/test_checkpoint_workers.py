"""Checkpoints saved by several real workers, some of which fail or die."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import CheckpointStore, weights_sha256

JOIN_S = 60.0


class Workers:
    """Starts worker processes by fork from a preloaded server, and waits for them."""

    def __init__(self, folder: Path) -> None:
        import checkpoint_workers

        self.functions = checkpoint_workers
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["dtrain.checkpoint", "checkpoint_workers"])
        self.processes: list[Any] = []

    def start(self, function: Any, *args: object) -> Any:
        process = self.context.Process(target=function, args=args)
        self.processes.append(process)
        process.start()
        return process

    def run(self, function: Any, world: int, *args: object) -> dict[int, dict[str, Any]]:
        """Run a function on ``world`` workers; what each answered, by rank."""
        started = [
            self.start(function, rank, world, str(self.folder), *args) for rank in range(world)
        ]
        for process in started:
            process.join(JOIN_S)
            assert process.exitcode is not None, "a worker hangs"
        return {
            rank: json.loads(file.read_text())
            for rank in range(world)
            if (file := self.folder / f"answer-{rank}.json").exists()
        }

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    workers = Workers(tmp_path)
    yield workers
    workers.close()


def test_two_stages_with_two_holders_save_and_any_other_shape_loads(
    workers: Workers, tmp_path: Path
) -> None:
    url, work = str(tmp_path / "ck"), workers.functions
    answers = workers.run(work.two_stages, 4, url)
    assert [answers[r]["first"] for r in range(4)] == ["step-00000001"] * 4
    for rank in range(4):
        other = range(2, 4) if rank < 2 else range(0, 2)
        assert answers[rank]["other"] == weights_sha256(work.stage_tensors(other, 1))

    store = CheckpointStore(url)
    assert [c.step for c in store.list()] == [1, 2]
    for info, coordinator in zip(store.list(), (0, 1), strict=True):
        assert store.verify(info) == []
        # Of the group without worker 0, the first member coordinates.
        assert store.progress(info) == {"saved_by": coordinator}
        everything = work.stage_tensors(range(4), info.step)
        assert weights_sha256(store.load_tensors(info)) == weights_sha256(everything)
        one_layer = work.layer_tensors(2, info.step)
        assert weights_sha256(store.load_tensors(info, [*one_layer])) == weights_sha256(one_layer)
    assert {a.get("second") for a in answers.values()} == {None, "step-00000002"}

    # Two holders of a stage share the writing: each file has about half of a stage.
    sizes = [f.stat().st_size for f in (tmp_path / "ck" / "step-00000001").glob("*.distcp")]
    assert len(sizes) == 4
    payload = sum(t.nbytes for t in work.stage_tensors(range(4), 1).values())
    assert payload <= sum(sizes) < 1.5 * payload
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.parametrize(
    ("failing", "point"),
    [(0, "data.write"), (2, "file.flush"), (0, "manifest.write"), (0, "marker.write")],
)
def test_a_worker_that_cannot_write_fails_the_save_on_all(
    workers: Workers, tmp_path: Path, failing: int, point: str
) -> None:
    url = str(tmp_path / "ck")
    answers = workers.run(workers.functions.one_fails, 3, url, failing, point)
    expected = (
        f"checkpoint of step 1 at {url} was not saved: worker {failing}: No space left on device"
    )
    assert {a["said"] for a in answers.values()} == {expected}
    assert len(answers) == 3
    assert answers[0]["left"] == []
    assert {a["next"] for a in answers.values()} == {"step-00000001"}
    store = CheckpointStore(url)
    newest = store.newest()
    assert newest is not None
    everything = workers.functions.stage_tensors(range(3), 1)
    assert weights_sha256(store.load_tensors(newest)) == weights_sha256(everything)


def test_holders_that_disagree_on_a_tensor_are_told(workers: Workers, tmp_path: Path) -> None:
    answers = workers.run(workers.functions.disagree, 2, str(tmp_path / "ck"))
    assert len(answers) == 2
    for rank in range(2):
        assert "x: workers disagree on it" in answers[rank]["said"]


def test_a_store_that_workers_do_not_share_is_named(workers: Workers, tmp_path: Path) -> None:
    answers = workers.run(workers.functions.unshared, 2, "")
    assert len(answers) == 2
    for rank in range(2):
        assert "has to be a store that all workers share" in answers[rank]["said"]


@pytest.mark.parametrize(
    ("dying", "point"),
    [(0, "save.begin"), (1, "data.write"), (1, "file.flush"), (0, "manifest.write"), (0, "rename")],
)
def test_a_worker_killed_while_saving_leaves_the_older_checkpoint(
    workers: Workers, tmp_path: Path, dying: int, point: str
) -> None:
    url, work = str(tmp_path / "ck"), workers.functions
    store = CheckpointStore(url)
    older = store.save(1, work.layer_tensors(0, 1), {})
    answers = workers.run(work.one_dies, 2, url, dying, point)
    assert [*answers] == [1 - dying]
    assert answers[1 - dying]["said"].startswith("lost: ")
    said: list[str] = []
    assert store.newest(on_skip=said.append) == older
    again = store.save(2, work.layer_tensors(0, 2), {})
    assert store.newest() == again
    assert sorted(os.listdir(url)) == ["step-00000001", "step-00000002"]
