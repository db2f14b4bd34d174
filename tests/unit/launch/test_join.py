"""Finding a job to join, and taking numbers that nobody else has."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from dtrain.cli import main as cli
from dtrain.environment import place_variables, worker_place
from dtrain.launch.jobfile import JobFile, free_local_ranks, reserve_workers
from dtrain.launch.join import join
from dtrain.runfolder import RunFolder, RunRecord


def test_numbers_are_taken_once(tmp_path: Path) -> None:
    folder, job = RunFolder(tmp_path), JobFile("h", 1, 4, "r")
    assert reserve_workers(folder, job, 2) == [1000, 1001]
    assert reserve_workers(folder, job, 1) == [1002]
    folder.event("trainer_started", worker=1005, reason="elsewhere")
    assert reserve_workers(folder, job, 1) == [1006]
    (tmp_path / "join" / "1007").touch()
    assert reserve_workers(folder, JobFile("h", 1, 2000, "r"), 2) == [2000, 2001]


def test_local_ranks_of_living_workers_are_not_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    dead = 2**22 + 1
    for rank, node, supervisor in (
        (0, "here", os.getpid()),
        (1, "here", dead),
        (2, "here", os.getpid()),
        (3, "there", os.getpid()),
    ):
        folder.event(
            "trainer_started",
            worker=rank,
            reason="",
            node=node,
            supervisor_pid=supervisor,
            local_rank=rank,
        )
    assert free_local_ranks(folder, "here", 3) == [1, 3, 4]


def test_the_address_survives_the_file_and_the_environment(tmp_path: Path) -> None:
    place = worker_place(
        {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "job7",
        }
    )
    JobFile.of(place).write(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["job.json"]
    assert JobFile.read(tmp_path) == JobFile("node0", 29500, 2, "job7")
    assert place.host_store
    again = worker_place(place_variables(place, {}))
    assert not again.host_store
    assert (again.worker, again.store_port, again.run_id) == (0, 29500, "job7")


def test_there_must_be_a_job_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["join", str(tmp_path / "none")])
    assert caught.value.code == 2
    assert "expected the run folder of a job that runs, got no job.json" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    JobFile("127.0.0.1", port, 2, "r").write(tmp_path)
    expected = f"expected the store of a job that runs at 127.0.0.1:{port}, got Connection refused"
    with pytest.raises(ValueError, match=re.escape(expected)):
        join(str(tmp_path), 1)

    RunFolder(tmp_path).write_run(RunRecord("done", steps=3))
    with pytest.raises(ValueError, match="expected a job that runs, got one that is done"):
        join(str(tmp_path), 1)
    assert not (tmp_path / "join").exists()

    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"job\.json: expected a job's address"):
        join(str(tmp_path), 1)
