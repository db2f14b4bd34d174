"""Jobs of real trainers for tests: forked from one preloaded process, in groups over loopback."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtrain.config import Config, check_config
from dtrain.launch.trainer import run_trainer
from dtrain.runtime.spec import TrainerSpec

JOIN_S = 120.0
ENTRY = "dtrain.runtime.worker:trainer_main"


def _train(entry: str, spec: TrainerSpec, reports: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    run_trainer(entry, spec, reports, True, parent.sentinel)


class Job:
    """One attempt of a run: its trainers, and the store they meet in.

    With ``hosted`` worker 0 hosts the store, as where no torchrun agent does; else the test.
    """

    def __init__(
        self,
        config: Config,
        workers: int,
        run_dir: Path,
        entry: str = ENTRY,
        *,
        hosted: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self._entry = entry
        self._began_s = time.time()
        self._config = config
        self._workers = workers
        self._hosted = hosted
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._port = self._store.port
        if hosted:
            # The port that the test's own has found free.
            del self._store
        self._context = multiprocessing.get_context("forkserver")
        self.processes: list[Any] = [None] * workers
        self._reports: list[Any] = [None] * workers
        for worker in range(workers):
            self.start(worker)

    def start(self, worker: int) -> None:
        """Start a trainer, anew where its last life ended."""
        reader, writer = self._context.Pipe(duplex=False)
        spec = TrainerSpec(
            config=self._config.model_dump(mode="json"),
            run_dir=str(self.run_dir),
            worker=worker,
            world_size=self._workers,
            local_rank=worker,
            node="test",
            domains=("test",),
            store_host="127.0.0.1",
            store_port=self._port,
            host_store=self._hosted and worker == 0,
            incarnation=uuid.uuid4().hex,
            supervisor_pid=os.getpid(),
            json_output=False,
            progress=False,
        )
        process = self._context.Process(target=_train, args=(self._entry, spec, writer))
        process.start()
        writer.close()
        if worker == len(self.processes):
            self.processes.append(None)
            self._reports.append(None)
        self.processes[worker] = process
        self._reports[worker] = reader

    def kill(self, worker: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill a trainer and wait for its end."""
        os.kill(self.processes[worker].pid, number)
        self.processes[worker].join(JOIN_S)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        found = read_lines(self.run_dir / "events.jsonl")
        return [e for e in found if not kinds or e["kind"] in kinds]

    def join(self) -> list[int]:
        """Wait for all trainers; their exit codes.

        A trainer that was started too late to be let in is ended, as its supervisor would, once
        the run is done; it counts as 0.
        """
        end = time.monotonic() + JOIN_S
        late: set[int] = set()
        while any(p.is_alive() for p in self.processes):
            assert time.monotonic() < end, f"trainers hang: {self.events()[-8:]}"
            if self._done():
                for worker in self._latecomers():
                    late.add(worker)
                    self.processes[worker].kill()
            time.sleep(0.02)
        for process in self.processes:
            process.join()
        return [0 if w in late else p.exitcode for w, p in enumerate(self.processes)]

    def _done(self) -> bool:
        """Whether this attempt has completed the run; an earlier one may have, with fewer steps."""
        return any(e["time"] > self._began_s for e in self.events("run_done"))

    def _latecomers(self) -> list[int]:
        """Living trainers whose life began after the last generation did."""
        last = self.events("generation_started")[-1]["time"]
        started = {e["worker"]: e["time"] for e in self.events("worker_started")}
        return [
            w
            for w, p in enumerate(self.processes)
            if p.is_alive() and (w not in started or started[w] > last)
        ]

    def reports(self) -> list[dict[str, str] | None]:
        """What each trainer reported before it ended; None from one that did not."""
        return [_report(reader) for reader in self._reports]

    def signal(self, number: signal.Signals, *workers: int) -> None:
        """Send a signal to the trainers of ``workers`` (all of them by default)."""
        for worker in workers or range(len(self.processes)):
            os.kill(self.processes[worker].pid, number)

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.run_dir / "metrics.jsonl")

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` steps are committed."""
        end = time.monotonic() + JOIN_S
        while not any(m.get("step", 0) >= step and "loss" in m for m in self.metrics()):
            assert time.monotonic() < end, f"step {step} was not committed in {JOIN_S} s"
            assert any(p.is_alive() for p in self.processes), "all trainers ended early"
            time.sleep(0.002)

    def wait_for_event(self, kind: str) -> None:
        """Wait until the run has told of an event of ``kind``."""
        end = time.monotonic() + JOIN_S
        while not self.events(kind):
            assert time.monotonic() < end, f"no {kind} in {JOIN_S} s"
            assert any(p.is_alive() for p in self.processes), "all trainers ended early"
            time.sleep(0.002)

    def wait_for_workers(self, count: int, *, generations: int) -> None:
        """Wait until generations of ``count`` workers were formed ``generations`` times more."""
        end = time.monotonic() + JOIN_S
        while (
            sum(len(e["workers"]) == count for e in self.events("generation_started"))
            <= generations
        ):
            assert time.monotonic() < end, f"{count} workers were not together again"
            assert any(p.is_alive() for p in self.processes), "all trainers ended early"
            time.sleep(0.002)

    def resources(self, worker: int, for_s: float = 0.2) -> dict[str, int]:
        """The ``threads`` and open ``descriptors`` of a trainer's process: their least.

        Looked at for ``for_s`` seconds: groups of a generation end beside the next generation.
        """
        folder = Path(f"/proc/{self.processes[worker].pid}")
        used = {"threads": sys.maxsize, "descriptors": sys.maxsize}
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            for kind, entries in (("threads", "task"), ("descriptors", "fd")):
                used[kind] = min(used[kind], len(os.listdir(folder / entries)))
            time.sleep(0.01)
        return used

    def record(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "run.json").read_text())
        return loaded


def _report(reader: Any) -> dict[str, str] | None:
    try:
        return json.loads(reader.recv_bytes()) if reader.poll() else None  # type: ignore[no-any-return]
    except EOFError:
        return None


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; the last one may be on its way."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Trainers:
    """Starts jobs and leaves nobody behind."""

    def __init__(self, folder: Path, entry: str = ENTRY) -> None:
        self.folder = folder
        self.entry = entry
        self._jobs: list[Job] = []

    def start(self, raw: dict[str, Any], workers: int, run: str, *, hosted: bool = False) -> Job:
        """Start a job; ``hosted``: as of :class:`Job`."""
        config = check_config(raw, "test")
        job = Job(config, workers, self.folder / run, self.entry, hosted=hosted)
        self._jobs.append(job)
        return job

    def train(self, raw: dict[str, Any], workers: int, run: str) -> dict[str, Any]:
        """Train to the end; the run's record."""
        job = self.start(raw, workers, run)
        assert job.join() == [0] * workers, job.reports()
        return job.record()

    def close(self) -> None:
        for job in self._jobs:
            for process in job.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def merged(raw: dict[str, Any], changes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A copy of a configuration with ``section.field`` values changed."""
    out: dict[str, Any] = json.loads(json.dumps(raw))
    for path, value in changes:
        *sections, last = path.split(".")
        node = out
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return out
