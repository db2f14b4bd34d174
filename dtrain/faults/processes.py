"""The processes around a trainer, found through ``/proc``: supervisor, torchrun agent, store host.

A trainer's supervisor is a child of the torchrun agent of its node; the trainer is a child of the
fork server that the agent's supervisors share.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from dtrain.errors import DtrainError

_PROC = Path("/proc")
_LISTEN = "0A"
_FORK_SERVER = "dtrain.launch.fork_server"


class NoSuchProcessError(DtrainError):
    """The process that a fault is meant for is not here."""


def parent_of(pid: int) -> int:
    """The parent's process id; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended (a zombie has)."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def started_at(pid: int) -> float:
    """When the process started, in Unix seconds; infinity when there is none."""
    fields = _stat(pid)
    if not fields:
        return float("inf")
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def descendants_of(pid: int) -> list[int]:
    """Children of a process and theirs, each after its parent."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            children.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def below_agent(agent: int) -> list[int]:
    """All processes of a torchrun agent but itself: supervisors, fork servers, trainers.

    A fork server is known by its command line: it outlives the supervisor that started it.
    """
    orphans = [
        int(entry.name)
        for entry in _PROC.iterdir()
        if entry.name.isdigit() and f" -m {_FORK_SERVER} {agent} " in _command_line(entry)
    ]
    below = descendants_of(agent)
    for pid in orphans:
        below += [new for new in (pid, *descendants_of(pid)) if new not in below]
    return below


def marked(variable: str) -> list[int]:
    """Living processes started with an environment in which ``variable`` (NAME=VALUE) begins."""
    found = []
    needle = variable.encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            raw = (entry / "environ").read_bytes()
            if raw.startswith(needle) or b"\0" + needle in raw:
                found.append(int(entry.name))
    return sorted(pid for pid in found if is_alive(pid))


def command_of(pid: int) -> str:
    """The command line, shortened; empty when there is no such process."""
    return _command_line(_PROC / str(pid)).strip()[:120]


def counts_of(pid: int) -> tuple[int, int] | None:
    """Numbers of open descriptors and of threads; None when there is no such process."""
    try:
        base = _PROC / str(pid)
        return len(os.listdir(base / "fd")), len(os.listdir(base / "task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def has_open(path: str) -> bool:
    """Whether some process has the file open or mapped."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if path in (entry / "maps").read_text(errors="replace"):
                return True
            if any(os.readlink(fd) == path for fd in (entry / "fd").iterdir()):
                return True
    return False


def agent_of(supervisor_pid: int) -> int:
    """The torchrun agent that started a supervisor.

    Raises:
        NoSuchProcessError: the supervisor was not started by torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in _environment(supervisor_pid):
        raise NoSuchProcessError(
            f"worker's supervisor {supervisor_pid}: expected a torchrun agent as its parent, got "
            "none; start the job with torchrun or dtrain run"
        )
    return parent_of(supervisor_pid)


def store_host_of(supervisor_pid: int, trainer_pid: int) -> int:
    """The process on this node that hosts the job's store: agent, supervisor or trainer.

    Raises:
        NoSuchProcessError: none of them does; the store lives on another node.
    """
    port = _environment(supervisor_pid).get("MASTER_PORT", "")
    sockets = _listening(int(port)) if port.isdigit() else set()
    candidates = [parent_of(supervisor_pid), supervisor_pid, trainer_pid]
    for pid in candidates:
        if sockets & _sockets_of(pid):
            return pid
    raise NoSuchProcessError(
        f"the job's store: expected its host among processes {candidates} of this node, got none; "
        "choose a worker of the node that hosts it (as a rule worker 0)"
    )


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Signal processes in order, this one last; those that have ended are passed over."""
    own = os.getpid()
    for pid in [p for p in pids if p != own] + [p for p in pids if p == own]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _command_line(process: Path) -> str:
    try:
        raw = (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none where they cannot be read."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, eq, value in pairs if eq}


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on a TCP port in this network namespace."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "self" / "net" / table).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for descriptor in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found
