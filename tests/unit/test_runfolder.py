"""The run folder: identity, appends from several processes, whole-file replacement."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.config import Config
from dtrain.errors import DtrainError
from dtrain.runfolder import RunFolder, RunRecord, versions


def config(**changes: object) -> Config:
    raw: dict[str, object] = {"data": {"store": "stores/x"}, "train": {"epochs": 1}}
    return Config.model_validate(raw | changes)


def files(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_claim_writes_the_identity_once_and_the_newest_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    assert folder.claim(config(), "abc")
    identity = (folder.path / "identity.json").read_bytes()
    longer = config(train={"epochs": 9}, parallel={"stages": 2})
    assert not RunFolder(folder.path).claim(longer, "abc")
    assert (folder.path / "identity.json").read_bytes() == identity
    assert folder.config() == longer
    assert files(folder.path) == {"identity.json", "config.yaml"}


@pytest.mark.parametrize(
    ("changes", "fingerprint", "message"),
    [
        ({"seed": 7}, "abc", "seed: expected 0 (the folder's), got 7"),
        ({}, "other", "dataset: expected abc (the folder's), got other"),
        ({"model": {"hidden": 3}}, "abc", "model.hidden: expected 64 (the folder's), got 3"),
        (
            {"deepspeed": {"optimizer": {"type": "Adam"}, "gradient_clipping": 1.0}},
            "abc",
            "deepspeed.optimizer.params: expected {'lr': 0.01} (the folder's), got None",
        ),
    ],
)
def test_a_folder_of_another_run_is_refused_and_left_alone(
    tmp_path: Path, changes: dict[str, object], fingerprint: str, message: str
) -> None:
    folder = RunFolder(tmp_path)
    folder.claim(config(), "abc")
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(DtrainError) as caught:
        RunFolder(tmp_path).claim(config(**changes), fingerprint)
    assert message in str(caught.value)
    assert "choose another --run-dir" in str(caught.value)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_a_folder_in_which_a_run_was_refused_is_free_for_the_mended_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim(config(), "abc")
    folder.event("trainer_started", worker=0, reason="")
    folder.event("user_error", worker=0, reason="model: layer 0: ...")
    folder.event("trainer_started", worker=1, reason="")
    with pytest.raises(DtrainError, match="seed: expected 0"):
        folder.claim(config(seed=7), "abc")
    folder.event("trainer_stopped", worker=1, reason="SIGTERM")
    assert not folder.claim(config(seed=7), "abc")
    folder.event("trainer_started", worker=0, reason="")
    with pytest.raises(DtrainError, match="seed: expected 7"):
        folder.claim(config(), "abc")


def test_a_folder_in_which_a_run_began_stays_its_own_after_bad_input(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.claim(config(), "abc")
    folder.write_run(RunRecord("stopped", steps=3))
    folder.event("user_error", worker=0, reason="the store is gone")
    with pytest.raises(DtrainError, match="seed: expected 0"):
        folder.claim(config(seed=7), "abc")


def test_one_of_many_workers_makes_the_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunFolder(tmp_path).claim(config(), "abc"), range(32)))
    assert made.count(True) == 1
    assert files(tmp_path) == {"identity.json", "config.yaml"}


def test_an_unreadable_identity_is_refused(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_text("{")
    with pytest.raises(DtrainError, match="expected a run's identity"):
        RunFolder(tmp_path).claim(config(), "abc")


def test_a_file_in_the_way_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DtrainError, match="cannot be made"):
        RunFolder(tmp_path / "file")


def test_events_of_several_processes_stay_whole(tmp_path: Path) -> None:
    children = []
    for worker in range(4):
        pid = os.fork()
        if pid == 0:
            folder = RunFolder(tmp_path)
            for number in range(100):
                folder.event("tick", worker=worker, reason="x" * 500, number=number)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(events) == 400
    assert {(event["worker"], event["number"]) for event in events} == {
        (worker, number) for worker in range(4) for number in range(100)
    }
    assert all(abs(event["time"] - time.time()) < 600 for event in events)


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.event("one", worker=0, reason="r")
    with (tmp_path / "events.jsonl").open("a") as handle:
        handle.write('{"kind": "tw')
    assert [event["kind"] for event in folder.events()] == ["one"]


def test_only_the_first_worker_reports_a_problem(tmp_path: Path) -> None:
    start = time.time()
    with ThreadPoolExecutor(8) as pool:
        first = list(
            pool.map(
                lambda worker: RunFolder(tmp_path).first_event(
                    "user_error", since=start, worker=worker, reason="bad"
                ),
                range(8),
            )
        )
    assert first.count(True) == 1
    folder = RunFolder(tmp_path)
    assert folder.first_event("user_error", since=start, worker=0, reason="another")
    assert folder.first_event("user_error", since=time.time() + 1, worker=0, reason="bad")
    assert len(list(folder.events())) == 10


def test_the_record_comes_back_and_replaces_the_old_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_run() is None
    folder.write_run(RunRecord(status="running"))
    record = RunRecord(
        status="done", steps=3, metrics={"test": {"accuracy": 0.5}}, versions=versions()
    )
    folder.write_run(record)
    assert folder.read_run() == record
    assert files(tmp_path) == {"run.json"}


def test_numbers_that_json_lacks_are_written_as_text(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metric(step=1, loss=float("nan"), nested={"grad": float("inf")})
    (line,) = folder.metrics()
    assert (line["loss"], line["nested"]) == ("nan", {"grad": "inf"})
    folder.close()


def test_a_summary_that_is_not_one_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"colour": 1}')
    with pytest.raises(DtrainError, match="expected a run's summary"):
        RunFolder(tmp_path).read_run()


def test_versions_name_what_can_change_a_result() -> None:
    found = versions()
    assert {"python", "dtrain", "torch", "deepspeed", "numpy"} <= found.keys()
    assert "missing" not in found.values()
