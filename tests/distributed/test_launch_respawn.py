"""Trainers that die or hang and are started anew by their supervisor.

After each test no process, socket or temporary file of the supervisor may be left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
from launch_workshop import Workshop, graph_store, until, workshop

from dtrain.runfolder import RunFolder, RunRecord

__all__ = ["graph_store", "workshop"]

LEASE_S = 1.0
LEASE = f"--set=robust.lease_s={LEASE_S}"


def test_however_it_dies_it_is_started_anew(workshop: Workshop) -> None:
    supervisor = workshop.supervise("dies_in_turn")
    _, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, err
    deaths = workshop.events("worker_died", "trainer_evicted", "trainer_failed")
    assert [(e["kind"], e["reason"], e["life"]) for e in deaths] == [
        ("worker_died", "ended with exit code 0 before the job was complete", 1),
        ("worker_died", "killed by SIGSEGV", 2),
        ("trainer_evicted", "generation 4 goes on without it", 3),
        ("trainer_failed", "RuntimeError: loss is 7", 4),
    ]
    respawns = workshop.events("trainer_respawn")
    assert [e["delay_s"] for e in respawns] == [0, 0.25, 0.5, 1]
    assert respawns[0]["reason"].endswith("before the job was complete; respawn 1 of 10")
    started = workshop.events("trainer_started")
    assert [e["life"] for e in started] == [1, 2, 3, 4, 5]
    assert len({e["incarnation"] for e in started}) == 5
    assert [e["incarnation"] for e in deaths] == [e["incarnation"] for e in started[:4]]
    assert {e["supervisor_pid"] for e in started} == {supervisor.pid}
    assert "worker 0: killed by SIGSEGV; starting it anew (respawn 2 of 10 after 0.25 s)\n" in err


def test_a_used_up_budget_is_the_end(workshop: Workshop) -> None:
    supervisor = workshop.supervise("exits_1", "--set=robust.respawns=1")
    _, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert len(workshop.events("trainer_started")) == 2
    last = workshop.events()[-1]
    assert (last["kind"], last["exit_code"]) == ("gave_up", 1)
    assert last["reason"] == (
        "ended with exit code 1 before the job was complete; 1 respawns in 600 s are used up "
        "(robust.respawns)"
    )
    assert err.endswith(f"worker 0: {last['reason']}\n")


def test_an_exception_that_comes_back_in_every_life_is_the_end(workshop: Workshop) -> None:
    supervisor = workshop.supervise("raises")
    _, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 1
    assert len(workshop.events("trainer_started")) == 3
    assert err.count("Traceback") == 3
    assert err.endswith("RuntimeError: loss is 7; it failed 3 times in a row in the same way\n")


def test_told_to_stop_before_a_respawn(workshop: Workshop) -> None:
    supervisor = workshop.supervise("exits_1", "--set=robust.respawn_backoff_s=60")
    until(lambda: bool(workshop.events("trainer_respawn")), "the first death")
    supervisor.terminate()
    supervisor.communicate(timeout=10)
    assert supervisor.returncode == 143
    assert workshop.events()[-1]["reason"] == "SIGTERM came between two trainers"


def test_a_hung_trainer_is_killed_and_started_anew(workshop: Workshop) -> None:
    supervisor = workshop.supervise("hangs_in_turn", LEASE, "--set=robust.progress_s=1.5")
    _, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, err
    hung = workshop.events("trainer_hung")
    assert [(e["phase"], e["step"], e["life"]) for e in hung] == [
        ("action 1", 7, 1),
        ("action 2", 7, 2),
        ("action 3", 7, 3),
    ]
    assert ["no sign of life" in e["reason"] for e in hung] == [True, True, False]
    assert hung[2]["reason"].endswith("s (robust.progress_s), in action 3 of step 7")
    died = workshop.events("worker_died")
    assert [e["reason"] for e in died] == [f"hung: {e['reason']}" for e in hung]


def test_a_slow_first_step_and_a_long_wait_are_no_hang(workshop: Workshop) -> None:
    supervisor = workshop.supervise("slow_but_alive", LEASE, "--set=robust.progress_s=2.0")
    _, err = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, err) == (0, "")


def test_a_stopped_trainer_never_writes_again(workshop: Workshop) -> None:
    supervisor = workshop.supervise("writes", LEASE)
    trainer = workshop.wait_for_trainer()
    first = workshop.events("trainer_started")[0]["incarnation"]
    # A whole node that stands still is nobody's fault.
    os.kill(supervisor.pid, signal.SIGSTOP)
    trainer.suspend()
    time.sleep(2 * LEASE_S)
    os.kill(supervisor.pid, signal.SIGCONT)
    time.sleep(0.2 * LEASE_S)
    trainer.resume()
    time.sleep(1.5 * LEASE_S)
    assert workshop.events("trainer_hung") == []

    trainer.suspend()
    second = workshop.wait_for_trainer()
    with contextlib.suppress(psutil.NoSuchProcess):
        trainer.resume()
    time.sleep(0.1)
    (respawn,) = workshop.events("trainer_respawn")
    written = [line.split() for line in (workshop.run / "written").read_text().splitlines()]
    assert max(float(at) for who, at in written if who == first) < respawn["time"]
    assert written[-1][0] != first
    assert second.pid != trainer.pid
    supervisor.kill()


def test_a_new_fork_server_takes_over_from_one_that_was_killed(workshop: Workshop) -> None:
    supervisor = workshop.supervise("writes")
    trainer = workshop.wait_for_trainer()
    fork_server = trainer.parent()
    assert fork_server is not None
    assert fork_server.ppid() == supervisor.pid
    fork_server.kill()
    until(lambda: fork_server.status() == psutil.STATUS_ZOMBIE, "its end")
    size = (workshop.run / "written").stat().st_size
    until(lambda: (workshop.run / "written").stat().st_size > size, "a line of the trainer")
    trainer.kill()
    second = workshop.wait_for_trainer()
    (died,) = workshop.events("worker_died")
    assert died["reason"] == "ended, and the process that it was forked from did not say how"
    assert second.parent() != fork_server
    second.kill()
    workshop.wait_for_trainer()
    assert workshop.events("worker_died")[1]["reason"] == "killed by SIGKILL"
    supervisor.kill()


def test_a_latecomer_finds_the_job_complete(workshop: Workshop) -> None:
    folder = RunFolder(workshop.run)
    folder.write_run(RunRecord("done", steps=1))
    supervisor = workshop.supervise("agrees", LEASE)
    workshop.wait_for_trainer()
    time.sleep(1.5)
    assert supervisor.poll() is None, "a record from before its start says nothing"
    folder.write_run(RunRecord("done", steps=2))
    _, err = supervisor.communicate(timeout=20)
    assert (supervisor.returncode, err) == (0, "")
    assert workshop.events()[-1]["reason"] == "the others completed the job"


def test_a_death_after_the_jobs_end_is_no_failure(workshop: Workshop) -> None:
    supervisor = workshop.supervise("completes_and_dies")
    _, err = supervisor.communicate(timeout=20)
    assert (supervisor.returncode, err) == (0, "")
    assert len(workshop.events("trainer_started")) == 1


def test_a_disk_that_takes_no_events_does_not_end_the_job(workshop: Workshop) -> None:
    (workshop.run / "events.jsonl").mkdir(parents=True)
    supervisor = workshop.supervise("done")
    out, err = supervisor.communicate(timeout=20)
    assert supervisor.returncode == 0
    assert out == "worker 0 of 1, 1 threads\n"
    assert "trainer_started (forkserver by its supervisor, restart 0) could not be written" in err
