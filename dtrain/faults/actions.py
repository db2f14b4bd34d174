"""What faults do inside a trainer, and to the processes around it."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.errors import DtrainError
from dtrain.faults import processes

if TYPE_CHECKING:
    from torch import Tensor

_FOREVER_S = 10**9


class InjectedError(RuntimeError):
    """The exception of an injected fault."""


@dataclass(frozen=True)
class NetworkFault:
    """What a transport does to this worker's sends while it stands.

    ``drop_to``: workers whose frames vanish without an error. ``drop_from``: workers whose frames
    are thrown away when they come. ``delay_s``: how late every frame leaves.
    """

    drop_to: frozenset[int] = frozenset()
    drop_from: frozenset[int] = frozenset()
    delay_s: float = 0.0


def crash(how: str, memory_mib: int) -> None:
    """End this process: sigkill, segfault, exit0, exit1, oom; exception raises.

    oom: memory grows by ``memory_mib`` MiB, then it ends as the kernel's out-of-memory killer
    ends a process, by SIGKILL.

    Raises:
        InjectedError: for exception.
    """
    if how == "exception":
        raise InjectedError("injected exception")
    # Without a core file: nothing is to be left behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if how == "segfault":
        ctypes.string_at(0)
    elif how in ("exit0", "exit1"):
        os._exit(int(how[-1]))
    elif how == "oom":
        held = [bytes(os.urandom(64)) * (1 << 14) for _ in range(memory_mib)]
        os.kill(os.getpid(), signal.SIGKILL)
        del held
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def hang(how: str, seconds: float | None) -> None:
    """Stop going on: sigstop the process, keep the interpreter's lock (gil), or loop.

    ``seconds``: how long; None: until it is killed.
    """
    if how == "sigstop":
        stop_for([os.getpid()], seconds)
        return
    end = time.monotonic() + (seconds or _FOREVER_S)
    if how == "loop":
        while time.monotonic() < end:
            pass
        return
    # PyDLL keeps the lock during the call: no thread of this process runs Python meanwhile. Two
    # calls are a millionth of a second apart, so that the lock is as good as never free.
    sleep = ctypes.PyDLL(None).usleep
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        while (left := end - time.monotonic()) > 0:
            sleep(ctypes.c_uint(int(min(left, 900.0) * 1e6)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def stop_for(pids: Sequence[int], seconds: float | None) -> None:
    """SIGSTOP processes, in order; after ``seconds`` a helper process lets them go on."""
    if seconds is not None:
        names = " ".join(str(pid) for pid in pids)
        # A shell and not Python, because it has to stand before this process stops.
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {seconds:f}; kill -CONT {names} 2>/dev/null"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    processes.signal_all(list(pids), signal.SIGSTOP)


def targets(kind: str, how: str, supervisor_pid: int, trainer_pid: int) -> list[int]:
    """The processes that a fault of kind store, agent, node or preempt signals, in order.

    Raises:
        NoSuchProcessError: they are not on this node.
    """
    if kind == "store":
        return [processes.store_host_of(supervisor_pid, trainer_pid)]
    if kind == "preempt" and how == "worker":
        return [supervisor_pid]
    agent = processes.agent_of(supervisor_pid)
    if kind == "node":
        # The agent first: it must not report the ends of the others.
        return [agent, *processes.below_agent(agent)]
    return [agent]


def strike_processes(kind: str, how: str, pids: Sequence[int], seconds: float | None) -> None:
    """Kill, stop (for ``seconds``) or, for preempt, SIGTERM the processes that ``targets`` gave."""
    if kind == "preempt":
        processes.signal_all(list(pids), signal.SIGTERM)
    elif how == "stop":
        stop_for(pids, seconds)
    else:
        processes.signal_all(list(pids), signal.SIGKILL)


def spoil(how: str, tensors: Sequence[Tensor], rng: random.Random) -> str:
    """Change one element of one tensor in place; returns what was changed.

    ``how``: nan sets it to NaN, bitflip inverts one of its bits. Tensors of any floating dtype
    and shape, contiguous; empty ones and integers are passed over.

    Raises:
        DtrainError: there is no element to change.
    """
    import torch

    able = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not able:
        raise DtrainError("numeric fault: expected floating-point tensors, got none")
    tensor = able[rng.randrange(len(able))]
    index = rng.randrange(tensor.numel())
    with torch.no_grad():
        flat = tensor.detach().view(-1)
        if how == "nan":
            flat[index] = float("nan")
            return f"element {index} of {list(tensor.shape)} set to NaN"
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        bits = flat.view(whole)
        bit = rng.randrange(tensor.element_size() * 8)
        mask = 1 << bit
        if bit == tensor.element_size() * 8 - 1:
            mask -= 1 << (bit + 1)
        bits[index] ^= mask
    return f"bit {bit} of element {index} of {list(tensor.shape)} inverted"


def fail_disk(how: str, folder: Path) -> None:
    """What a bad disk does at the fault's point of a save.

    full and rename raise OSError; partial cuts the largest file of the newest checkpoint in
    ``folder`` to half after it was written and checked, as a disk does that loses its cache.

    Raises:
        OSError: for full and rename.
    """
    if how == "full":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")
    if how == "rename":
        raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} in a rename (injected)")
    newest = max((f for f in folder.glob("step-*") if f.is_dir()), key=lambda f: f.stat().st_mtime)
    victim = max((f for f in newest.iterdir() if f.is_file()), key=lambda f: f.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
