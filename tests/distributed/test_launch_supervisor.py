"""The supervisor with real trainers that end, hang and are killed in every order.

After each test no process, socket or temporary file of the supervisor may be left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dtrain.cli import main as cli

HERE = Path(__file__).parent
STUBS = str(HERE / "launch_stubs.py")


def until(true: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"{what} did not come within {timeout_s} s"
        time.sleep(0.01)


class Workshop:
    """A working directory, and whoever was started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path / "t"
        self.temporary.mkdir()
        self.run = path / "run"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own, as torchrun starts its workers."""
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        environment |= {"PYTHONPATH": str(HERE), "TMPDIR": str(self.temporary)} | variables
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def supervise(self, trainer: str, *rest: str, **variables: str) -> subprocess.Popen[str]:
        return self.start(STUBS, trainer, "c.yaml", "run", *rest, **variables)

    def wait_for_trainer(self) -> psutil.Process:
        """The trainer's process, once it runs its own code."""
        ready = self.run / "ready-0"
        until(lambda: ready.exists() and bool(self.events("trainer_started")), "the trainer")
        return psutil.Process(self.events("trainer_started")[-1]["pid"])

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        file = self.run / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if not kinds or event["kind"] in kinds]

    def living(self) -> list[psutil.Process]:
        """Processes that were started here and still run, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.path) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def end(self) -> None:
        try:
            until(lambda: not self.living(), "the end of all processes", 10.0)
            assert list(self.temporary.glob("pymp-*")) == []
        finally:
            for left in self.living():
                left.kill()
            for process in self._started:
                process.communicate()


@pytest.fixture(scope="module")
def graph_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("graph") / "store"
    small = ["--nodes", "60", "--avg-degree", "4", "--classes", "3", "--features", "4"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["data", "synth", *small, "--partitioner", "range", "--out", str(store)])
    assert caught.value.code == 0
    return store


@pytest.fixture
def workshop(graph_store: Path) -> Iterator[Workshop]:
    # Short, because the path of a socket may not be long.
    path = Path(tempfile.mkdtemp(prefix="dt-"))
    (path / "c.yaml").write_text(f"data: {{store: {graph_store}}}\ntrain: {{epochs: 1}}\n")
    place = Workshop(path)
    try:
        yield place
        place.end()
    finally:
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("trainer", "code", "kind", "reason"),
    [
        ("done", 0, "trainer_done", "the job is complete"),
        ("exits_0", 1, "worker_died", "ended with exit code 0 before the job was complete"),
        ("system_exit_0", 1, "worker_died", "ended with exit code 0 before the job was complete"),
        ("raises", 1, "trainer_failed", "RuntimeError: loss is 7"),
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
    elif trainer == "raises":
        assert "Traceback" in err
        assert err.endswith("worker 0: RuntimeError: loss is 7\n")
    elif trainer == "bad_input":
        assert err == "error: data.store: array labels is truncated; import the graph again\n"
    else:
        assert err == f"worker 0: {reason}\n"


@pytest.mark.parametrize(
    ("trainer", "number", "send", "code", "kind", "reason"),
    [
        ("sleeps", "SIGTERM", os.killpg, 143, "trainer_stopped", "SIGTERM: killed by SIGTERM"),
        ("leaves", "SIGTERM", os.killpg, 143, "trainer_stopped", "SIGTERM: saved at step 3"),
        ("leaves", "SIGTERM", os.kill, 143, "trainer_stopped", "SIGTERM: saved at step 3"),
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


def test_a_killed_trainer_is_noticed(workshop: Workshop) -> None:
    supervisor = workshop.supervise("sleeps")
    workshop.wait_for_trainer().kill()
    _, err = supervisor.communicate(timeout=10)
    assert (supervisor.returncode, err) == (1, "worker 0: killed by SIGKILL\n")
    assert workshop.events()[-1]["kind"] == "worker_died"


def test_a_killed_supervisor_takes_all_with_it(workshop: Workshop) -> None:
    supervisor = workshop.supervise("stays")
    workshop.wait_for_trainer()
    assert len(workshop.living()) == 4  # with its fork server and resource tracker
    supervisor.kill()
    until(lambda: not workshop.living(), "the end of all processes", 5.0)


def test_a_killed_fork_server_takes_the_trainer_with_it(workshop: Workshop) -> None:
    supervisor = workshop.supervise("stays")
    trainer = workshop.wait_for_trainer()
    fork_server = trainer.parent()
    assert fork_server is not None
    assert fork_server.ppid() == supervisor.pid
    fork_server.kill()
    supervisor.communicate(timeout=10)
    assert supervisor.returncode == 1
    assert trainer not in workshop.living()
    assert workshop.events()[-1]["reason"] == "the process that it was forked from ended"


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


def test_torchrun_restarts_all_when_one_fails(workshop: Workshop) -> None:
    job = workshop.start(
        *torchrun(2, "--max-restarts=1"), STUBS, "worker_1_fails_once", "c.yaml", "run"
    )
    _, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert len(workshop.events("trainer_started")) == 4
    assert len(workshop.events("trainer_failed")) == 1
    last = workshop.events()[-1]
    assert last["kind"] == "trainer_done"


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
        assert lines[-2].endswith("RuntimeError: loss is 7")
