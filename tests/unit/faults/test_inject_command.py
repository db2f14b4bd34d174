"""``dtrain inject``: on live trainers, by signal and by hand-over; mistakes are one line."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.cli import main as cli
from dtrain.config import check_config
from dtrain.faults.injector import Injector
from dtrain.runfolder import RunFolder, RunRecord


def _train(folder: str, worker: int, life: str) -> None:
    """What a trainer does as far as faults are concerned."""
    config = check_config({"data": {"store": "x"}, "train": {"max_steps": 9}}, "c.yaml")
    one = Injector.from_config(
        config, worker, life, folder, world_size=2, supervisor_pid=os.getppid()
    )
    RunFolder(folder).event(
        "worker_started",
        worker=worker,
        reason="test",
        node=socket.gethostname(),
        pid=os.getpid(),
        supervisor_pid=os.getppid(),
        incarnation=life,
    )
    while True:
        one.reach("forward", 3)
        time.sleep(0.005)


Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start(worker: int, life: str = "a") -> Any:
        process = multiprocessing.get_context("fork").Process(
            target=_train, args=(str(tmp_path), worker, life)
        )
        process.start()
        started.append(process)
        end = time.monotonic() + 30
        while not any(e["pid"] == process.pid for e in RunFolder(tmp_path).events()):
            assert time.monotonic() < end
            time.sleep(0.005)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["inject", *map(str, words)])
    return int(caught.value.code or 0)


def test_a_kill_is_told_and_done_at_once(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, other = start(1), start(0)
    assert run(tmp_path, "crash", "--worker", 1, "--json") == 0
    victim.join(30)
    assert victim.exitcode == -signal.SIGKILL
    assert other.is_alive()
    done = json.loads(capsys.readouterr().out)["injected"]
    assert [(d["worker"], d["delivery"], d["targets"]) for d in done] == [
        (1, "signal", [victim.pid])
    ]
    told = [e for e in RunFolder(tmp_path).events() if e["kind"] == "fault_injected"]
    assert [(e["worker"], e["how"], e["pid"]) for e in told] == [(1, "sigkill", victim.pid)]


def test_what_must_happen_inside_is_handed_over(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = start(1)
    assert run(tmp_path, "crash", "--how", "exit1", "--worker", 1, "--step", 3) == 0
    victim.join(30)
    assert victim.exitcode == 1
    assert f"handed to its trainer (process {victim.pid})" in capsys.readouterr().out
    again = start(1, "b")
    again.join(0.3)
    assert again.is_alive()
    assert run(tmp_path, "crash", "--how", "exit0", "--worker", "random") == 0
    again.join(30)
    assert again.exitcode == 0


def test_a_hang_ends_after_its_time(tmp_path: Path, start: Start) -> None:
    victim = start(0)
    stat = Path(f"/proc/{victim.pid}/stat")

    def state() -> str:
        return stat.read_text().rpartition(")")[2].split()[0]

    def wait_until(stopped: bool) -> None:
        end = time.monotonic() + 20
        while (state() == "T") != stopped:
            assert time.monotonic() < end
            time.sleep(0.005)

    assert run(tmp_path, "hang", "--worker", 0, "--seconds", 1.0) == 0
    wait_until(True)
    wait_until(False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["crash", "--worker", 7], "--worker: expected one of 0, 1, got 7"),
        (["crsh", "--worker", 0], "got 'crsh'; did you mean crash?"),
        (["crash", "--worker", 0, "--phase", "foward"], "did you mean forward?"),
        (["crash", "--worker", 0, "--how", "sigkil"], "did you mean sigkill?"),
        (["crash", "--worker", "some"], "worker: expected a number, random or all"),
        (["crash", "--worker", 0, "--factor", 3], "factor: only for the kinds slow"),
        (["crash", "--worker", 1], "--worker 1: its trainer (process"),
        (["agent", "--worker", 0], "expected a torchrun agent as its parent"),
        (["store", "--worker", 0], "the job's store: expected its host among processes"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path,
    start: Start,
    capsys: pytest.CaptureFixture[str],
    words: list[object],
    message: str,
) -> None:
    living, dead = start(0), start(1)
    dead.kill()
    dead.join()
    assert run(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert living.is_alive()
    assert not any(e["kind"] == "fault_injected" for e in RunFolder(tmp_path).events())


def test_a_run_must_be_there_and_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none", "crash", "--worker", 0) == 2
    assert "got no folder" in capsys.readouterr().err
    assert run(tmp_path, "crash", "--worker", 0) == 2
    assert "got a folder without one" in capsys.readouterr().err
    folder = RunFolder(tmp_path)
    folder.write_run(RunRecord(status="done"))
    # The number of a process that is none of the run's: this one.
    folder.event("worker_started", worker=0, reason="", pid=os.getpid(), supervisor_pid=os.getpid())
    for worker in (0, "random", "all"):
        assert run(tmp_path, "crash", "--worker", worker) == 2
        assert "without a trainer alive (status done)" in capsys.readouterr().err


def test_a_number_that_was_given_to_another_process_is_no_trainer(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = start(0)
    events = tmp_path / "events.jsonl"
    told = json.loads(events.read_text())
    events.write_text(json.dumps(told | {"time": told["time"] - 60}) + "\n")
    assert run(tmp_path, "crash", "--worker", 0) == 2
    assert victim.is_alive()
    events.write_text(json.dumps(told | {"node": "elsewhere"}) + "\n")
    assert run(tmp_path, "crash", "--worker", 0) == 2
    assert "runs on node elsewhere" in capsys.readouterr().err
    assert victim.is_alive()
