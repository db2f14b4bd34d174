"""The supervisor with real trainers that end, are told to stop and are killed in every order.

After each test no process, socket or temporary file of the supervisor may be left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from launch_workshop import HERE, STUBS, Workshop, graph_store, until, workshop

__all__ = ["graph_store", "workshop"]


@pytest.mark.parametrize(
    ("trainer", "code", "kind", "reason"),
    [
        ("done", 0, "trainer_done", "the job is complete"),
        ("leaves_the_job", 0, "trainer_left", "left at step 3"),
        ("is_stopped", 143, "trainer_stopped", "all saved at step 3"),
        ("loses_store", 1, "trainer_store_lost", "the store does not answer"),
        ("cannot_go_on", 1, "trainer_cannot_go_on", "stage 1 has no holder"),
        ("bad_input", 2, "user_error", "data.store: array labels is truncated; import the graph"),
    ],
)
def test_how_a_trainer_ends(
    workshop: Workshop, trainer: str, code: int, kind: str, reason: str
) -> None:
    supervisor = workshop.supervise(trainer, OMP_NUM_THREADS="5")
    out, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == code, err
    started, ended = workshop.events()
    assert started["kind"] == "trainer_started"
    assert started["supervisor_pid"] == supervisor.pid != started["pid"]
    assert ended["kind"] == kind
    assert ended["reason"].startswith(reason)
    if trainer == "done":
        assert (out, err) == ("worker 0 of 1, 1 threads\n", "")
    elif trainer == "bad_input":
        assert err == "error: data.store: array labels is truncated; import the graph again\n"
    else:
        assert err == ("" if code == 143 else f"worker 0: {reason}\n")


@pytest.mark.parametrize(
    ("trainer", "number", "send", "code", "kind", "reason"),
    [
        ("sleeps", "SIGTERM", os.killpg, 143, "trainer_stopped", "SIGTERM: killed by SIGTERM"),
        ("leaves", "SIGTERM", os.killpg, 143, "trainer_stopped", "SIGTERM: saved at step 3"),
        ("leaves_alone", "SIGTERM", os.kill, 0, "trainer_left", "left at step 3"),
        ("leaves", "SIGINT", os.killpg, 130, "trainer_stopped", "SIGINT: saved at step 3"),
        ("stays", "SIGTERM", os.killpg, 143, "trainer_stopped", "SIGTERM: killed by SIGKILL"),
        ("finishes", "SIGTERM", os.killpg, 0, "trainer_done", "the job is complete"),
    ],
)
def test_told_to_stop(
    workshop: Workshop,
    trainer: str,
    number: str,
    send: Callable[[int, int], None],
    code: int,
    kind: str,
    reason: str,
) -> None:
    grace_s = "0.3" if trainer == "stays" else "30"
    supervisor = workshop.supervise(trainer, DTRAIN_GRACE_S=grace_s)
    workshop.wait_for_trainer()
    send(supervisor.pid, signal.Signals[number])
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == code
    assert [(e["kind"], e["reason"]) for e in workshop.events()[1:]] == [(kind, reason)]


def test_a_trainer_that_is_done_but_does_not_end_is_killed(workshop: Workshop) -> None:
    supervisor = workshop.supervise("hangs_after_done", DTRAIN_GRACE_S="0.3")
    _, err = supervisor.communicate(timeout=60)
    assert (supervisor.returncode, err) == (0, "")
    assert workshop.events()[-1]["kind"] == "trainer_done"


@pytest.mark.parametrize("trainer", ["stays", "locks_gil"])
def test_a_killed_supervisor_takes_all_with_it(workshop: Workshop, trainer: str) -> None:
    supervisor = workshop.supervise(trainer)
    process = workshop.wait_for_trainer()
    # With its fork server.
    assert len(workshop.living()) == 3
    if trainer == "stays":
        process.suspend()
    supervisor.kill()
    until(lambda: not workshop.living(), "the end of all processes", 5.0)


def test_a_preload_that_crashes_is_reported(workshop: Workshop) -> None:
    (workshop.path / "crash.py").write_text("import os\nos._exit(3)\n")
    supervisor = workshop.supervise("done", "--preload=crash", PYTHONPATH=f"{HERE}:{workshop.path}")
    _, err = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 1
    assert err == "worker 0: the process that preloads the trainer's modules ended\n"


def test_cuda_before_the_fork_means_spawn(workshop: Workshop) -> None:
    supervisor = workshop.supervise("done", "--preload=launch_fake_cuda")
    out, err = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 0, err
    assert out == "worker 0 of 1, 1 threads\n"
    kinds = [event["kind"] for event in workshop.events()]
    assert kinds == ["trainer_started", "start_method", "trainer_started", "trainer_done"]
    first, second = workshop.events("trainer_started")
    assert first["incarnation"] != second["incarnation"]
    assert second["reason"].startswith("spawn")


def torchrun(workers: int, *flags: str) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", *flags]


def test_torchrun_restarts_all_when_one_cannot_go_on_in_place(workshop: Workshop) -> None:
    job = workshop.start(
        *torchrun(2, "--max-restarts=1"), STUBS, "worker_1_cannot_go_on_once", "c.yaml", "run"
    )
    _, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert len(workshop.events("trainer_started")) == 4
    assert len(workshop.events("trainer_cannot_go_on")) == 1
    last = workshop.events()[-1]
    assert last["kind"] == "trainer_done"


def test_torchrun_does_not_notice_a_respawn(workshop: Workshop) -> None:
    job = workshop.start(
        *torchrun(2, "--max-restarts=0"), STUBS, "loses_peer_once", "c.yaml", "run"
    )
    _, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert [e["worker"] for e in workshop.events("trainer_respawn")] == [1]
    assert len(workshop.events("trainer_done")) == 2


def test_torchrun_shows_bad_input_once(workshop: Workshop) -> None:
    (workshop.path / "broken.yaml").write_text("data: {store: gone}\ntrain: {epochs: 1}\n")
    job = workshop.start(*torchrun(3), STUBS, "done", "broken.yaml", "run")
    _, err = job.communicate(timeout=90)
    assert job.returncode == 1
    assert sum(line.startswith("error: ") for line in err.splitlines()) == 1
    assert "exitcode  : 2" in err
    assert not workshop.run.exists()


FRONT = """
import sys
from dtrain.launch import torchrun
torchrun.WORKER_MODULE = sys.argv.pop(1)
sys.exit(torchrun.launch(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("trainer", "code", "last_line"),
    [
        ("raises", 1, "run folder run: the same command with --run-dir run resumes from its"),
        ("bad_input", 2, "error: data.store: array labels is truncated; import the graph again"),
    ],
)
def test_dtrain_run_ends_with_a_clear_line(
    workshop: Workshop, trainer: str, code: int, last_line: str
) -> None:
    module = workshop.path / "worker_module.py"
    module.write_text(
        "import sys, launch_stubs\n"
        "if __name__ == '__main__':\n"
        "    folder = sys.argv[sys.argv.index('--run-dir') + 1]\n"
        f"    sys.exit(launch_stubs.main(['{trainer}', sys.argv[1], folder]))\n"
    )
    job = workshop.start(
        *("-c", FRONT, "worker_module", "--nproc-per-node=2", "c.yaml", "--run-dir=run"),
        PYTHONPATH=f"{HERE}:{workshop.path}",
    )
    out, err = job.communicate(timeout=90)
    assert job.returncode == code, err
    lines = err.splitlines()
    assert lines[-1].startswith(last_line)
    assert out == ""
    assert "ChildFailedError" not in err
    assert sum(line.startswith("error: ") for line in lines) == 1
    if code == 1:
        assert lines[-2].startswith("error: the run failed; first: worker ")
        assert "RuntimeError: loss is 7; it failed 3 times" in lines[-2]
