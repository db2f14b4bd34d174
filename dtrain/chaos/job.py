"""One start of a job under plain torchrun, on this host or on hosts of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.chaos.hosts import Hosts
from dtrain.faults import processes

_MARK = "DTRAIN_CHAOS_JOB"
_RENDEZVOUS_PORT = 29400
# torchrun's logs, which it never removes, and a cache that torch makes on being imported.
_TORCHS_OWN = ("torchelastic_", "torchinductor_")


class TorchrunJob:
    """The torchrun agents of a job and everything that descends from them.

    ``workers``: of all ``num_hosts`` hosts together, equally many on each. ``max_hosts``: agents of
    so many hosts may take part in the end (0: as many as there are). What the job writes to stdout
    and stderr goes to ``output-HOST.log`` in ``folder``. Every process of the job carries a mark in
    its environment, by which it is found whoever its parent is.
    """

    def __init__(
        self,
        config_file: Path,
        run_dir: Path,
        folder: Path,
        *,
        workers: int,
        num_hosts: int = 1,
        max_hosts: int = 0,
        hosts: Hosts | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.config_file = config_file
        self.run_dir = run_dir
        self.folder = folder
        self.workers = workers
        self.num_hosts = num_hosts
        self.max_hosts = max_hosts
        self.flags = tuple(flags)
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.joiners: list[subprocess.Popen[bytes]] = []
        self._hosts = hosts
        self._mark = secrets.token_hex(8)
        # Short, because the paths of sockets in it must be.
        self.scratch = Path(tempfile.mkdtemp(prefix="dtc-"))
        self.killed: set[int] = set()

    def start(self) -> None:
        """Start the agents of all hosts."""
        for host in range(self.num_hosts):
            self.start_host(host)

    def start_host(self, host: int) -> None:
        """Start the agent of one host."""
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nproc-per-node", str(self.workers // self.num_hosts)]
        command += [*self._rendezvous(host), *self.flags]
        command += ["-m", "dtrain.train", str(self.config_file), "--run-dir", str(self.run_dir)]
        self.agents[host] = self._launch(host, command)
        self.killed.discard(host)

    def join(self, host: int, workers: int) -> None:
        """Add workers on a host by ``dtrain join``."""
        command = [sys.executable, "-m", "dtrain", "join", str(self.run_dir)]
        self.joiners.append(self._launch(host, [*command, "--workers", str(workers)]))

    def _launch(self, host: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
        variables = {
            _MARK: f"{self._mark}-{host}",
            "TMPDIR": str(self.scratch),
            "DTRAIN_GRACE_S": "20",
        }
        if self.max_hosts:
            # With it, an agent that joins torch 2.13 later looks for an address that is nowhere.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
        if self._hosts is not None:
            command = self._hosts.command(host, command)
        with (self.folder / f"output-{host}.log").open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _rendezvous(self, host: int) -> list[str]:
        if self._hosts is None:
            return ["--standalone"]
        first, own = self._hosts.address(0), self._hosts.address(host)
        if self.max_hosts:
            return [
                f"--nnodes={self.num_hosts}:{self.max_hosts}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={first}:{_RENDEZVOUS_PORT}",
                f"--rdzv-conf=is_host={host == 0},last_call_timeout=3",
                f"--rdzv-id={self._mark}",
                f"--local-addr={own}",
            ]
        return [
            f"--nnodes={self.num_hosts}",
            f"--node-rank={host}",
            f"--master-addr={first}",
            f"--master-port={_RENDEZVOUS_PORT}",
        ]

    def processes(self, host: int | None = None) -> list[int]:
        """The living processes of the job, or of one host."""
        mark = f"{_MARK}={self._mark}" + ("" if host is None else f"-{host}")
        return processes.marked(mark)

    def signal_host(self, host: int, number: signal.Signals) -> None:
        """Signal every process of a host, its agent first."""
        first = [self.agents[host].pid] if host in self.agents else []
        if number == signal.SIGKILL:
            self.killed.add(host)
        processes.signal_all([*first, *set(self.processes(host)).difference(first)], number)

    def ended(self) -> bool:
        """Whether no agent and no worker is left."""
        started = [*self.agents.values(), *self.joiners]
        return all(process.poll() is not None for process in started) and not self.processes()

    def exit_codes(self) -> dict[int, int | None]:
        """The exit code of each host's agent; None while it runs."""
        return {host: agent.poll() for host, agent in self.agents.items()}

    def output(self) -> str:
        """What the job wrote so far, host by host."""
        logs = sorted(self.folder.glob("output-*.log"))
        return "\n".join(log.read_text(errors="replace") for log in logs)

    def stop(self) -> list[int]:
        """Kill what is left of the job; returns the processes that were."""
        left = self.processes()
        processes.signal_all(left, signal.SIGKILL)
        for process in [*self.agents.values(), *self.joiners]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        return left

    def leftovers(
        self, known_shared_memory: set[str], *, scratch: bool = False, patience_s: float = 10.0
    ) -> list[str]:
        """What the ended job left behind: processes, temporary files, shared memory.

        ``scratch``: temporary folders may stay.
        """
        end = time.monotonic() + patience_s
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        found = [f"process {pid} ({processes.command_of(pid)})" for pid in alive]
        found += [
            f"temporary {entry}"
            for entry in sorted(self.scratch.iterdir())
            if not (scratch or entry.name.startswith(_TORCHS_OWN))
        ]
        for name in sorted(shared_memory() - known_shared_memory):
            if not processes.has_open(f"/dev/shm/{name}"):
                found.append(f"shared memory /dev/shm/{name}")
        patterns = (".run.json.*", ".config.yaml.*", ".identity.json.*", "checkpoints/*.incomplete")
        found += [str(f) for pattern in patterns for f in sorted(self.run_dir.glob(pattern))]
        return found

    def close(self) -> None:
        """Kill what is left and remove the scratch folder."""
        self.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)


def shared_memory() -> set[str]:
    """Names in ``/dev/shm``."""
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir("/dev/shm"))
    return set()
