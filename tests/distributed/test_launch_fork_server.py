"""Supervisors with one parent, whose trainers are forked from one preloaded process.

After each test no process, socket or temporary file may be left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
from launch_workshop import HERE, Workshop, graph_store, until, workshop

from dtrain.faults.processes import below_agent

__all__ = ["graph_store", "workshop"]

UMASKS = (0o022, 0o027)
COUNTS_IMPORTS = 'open("imported", "a").write("x")\n'
SLOW = """
import os, time
open("began", "w")
while not os.path.exists("go_on"):
    time.sleep(0.01)
"""


def supervise(workshop: Workshop, worker: int, trainer: str, *rest: str) -> subprocess.Popen[str]:
    """The supervisor of one of two workers, whose parent is this process."""
    return workshop.supervise(
        trainer,
        "--preload=counts_imports",
        *rest,
        PYTHONPATH=f"{HERE}:{workshop.path}",
        RANK=str(worker),
        LOCAL_RANK=str(worker),
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="9",
        TORCHELASTIC_USE_AGENT_STORE="True",
        CUDA_VISIBLE_DEVICES=f"{worker}",
    )


def start_two(workshop: Workshop, trainer: str) -> list[subprocess.Popen[str]]:
    (workshop.path / "counts_imports.py").write_text(COUNTS_IMPORTS)
    started = []
    for worker in (0, 1):
        # Not the same for both, so that a trainer shows whose it has.
        umask = os.umask(UMASKS[worker])
        started.append(supervise(workshop, worker, trainer))
        os.umask(umask)
    return started


def wait_for_trainers(workshop: Workshop, *workers: int) -> list[psutil.Process]:
    """The newest trainers of workers, once they run their own code."""
    for worker in workers:
        ready = workshop.run / f"ready-{worker}"
        until(ready.exists, f"trainer {worker}")
        ready.unlink()
    return [newest(workshop, worker) for worker in workers]


def newest(workshop: Workshop, worker: int) -> psutil.Process:
    def started() -> list[int]:
        events = workshop.events("trainer_started", "worker_died")
        own = [e for e in events if e["worker"] == worker]
        return [own[-1]["pid"]] if own and own[-1]["kind"] == "trainer_started" else []

    until(lambda: bool(started()), f"the start of trainer {worker}")
    return psutil.Process(started()[0])


def imports(workshop: Workshop) -> int:
    return len((workshop.path / "imported").read_text())


def test_trainers_from_one_process_are_each_their_own_supervisors(workshop: Workshop) -> None:
    supervisors = start_two(workshop, "tells_place")
    trainers = wait_for_trainers(workshop, 0, 1)
    server = trainers[0].parent()
    assert server is not None
    assert server == trainers[1].parent()
    assert imports(workshop) == 1
    assert len(workshop.living()) == 5

    # The one that started the fork server goes first. It takes its own trainer along, nothing else.
    goes = [supervisor.pid for supervisor in supervisors].index(server.ppid())
    stays = 1 - goes
    supervisors[goes].kill()
    until(lambda: not psutil.pid_exists(trainers[goes].pid), "the end of its trainer")
    # Its output is closed, although others live on that came from the same process.
    out, err = supervisors[goes].communicate(timeout=5)
    told = json.loads(out)
    assert err == f"stderr of {goes}\n"

    trainers[stays].kill()
    (again,) = wait_for_trainers(workshop, stays)
    assert again.parent() == server
    assert imports(workshop) == 1
    # A fault of the whole node finds those whose parent has ended, too.
    assert {server.pid, again.pid, supervisors[stays].pid} <= set(below_agent(os.getpid()))
    assert [e["reason"] for e in workshop.events("worker_died")] == ["killed by SIGKILL"]
    supervisors[stays].terminate()
    out, err = supervisors[stays].communicate(timeout=20)
    assert supervisors[stays].returncode == 0
    assert err.count(f"stderr of {stays}\n") == 2
    lives = [told, *map(json.loads, out.splitlines())]
    assert [life["rank"] for life in lives] == [str(goes), str(stays), str(stays)]
    for life in lives:
        assert life["devices"] == life["rank"]
        assert life["umask"] == UMASKS[int(life["rank"])]
        assert life["folder"] == str(workshop.path)
        assert life["arguments"][0].endswith("launch_stubs.py")
        assert life["stdin"] == os.readlink("/proc/self/fd/0")
        # Its heartbeat, which its memory holds open once more, its lifeline and its reports.
        assert life["held"] == ["/memfd", "/memfd", "pipe", "pipe"]


def test_two_that_lose_their_fork_server_agree_on_the_next(workshop: Workshop) -> None:
    supervisors = start_two(workshop, "sleeps")
    trainers = wait_for_trainers(workshop, 0, 1)
    server = trainers[0].parent()
    assert server is not None
    server.kill()
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "its end")
    assert all(trainer.is_running() for trainer in trainers)
    for trainer in trainers:
        trainer.kill()
    again = wait_for_trainers(workshop, 0, 1)
    assert again[0].parent() == again[1].parent() != server
    assert imports(workshop) == 2
    for supervisor in supervisors:
        supervisor.terminate()
    for supervisor in supervisors:
        _, err = supervisor.communicate(timeout=20)
        # A second trainer that had not joined yet is missed by nobody.
        assert supervisor.returncode == 0, err


def test_told_to_stop_while_modules_are_imported(workshop: Workshop) -> None:
    (workshop.path / "slow.py").write_text(SLOW)
    (workshop.path / "counts_imports.py").write_text(COUNTS_IMPORTS)
    supervisor = workshop.supervise(
        "done", "--preload=slow", "--preload=counts_imports", PYTHONPATH=f"{HERE}:{workshop.path}"
    )
    until(lambda: Path(workshop.path, "began").exists(), "the first import")
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(20)
    assert [p.name() for p in workshop.living()] == ["fork-server"]
    assert supervisor.returncode == 143
    assert [e["reason"] for e in workshop.events()] == ["SIGTERM came before a trainer was forked"]
    # With nobody to fork for, it imports nothing further.
    (workshop.path / "go_on").touch()
    until(lambda: not workshop.living(), "the end of the fork server")
    assert not (workshop.path / "imported").exists()
