"""The process that trainers are forked from: one on a node, for all supervisors of one agent.

Importing torch and DeepSpeed costs seconds of CPU, so it is done once for all workers of a node and
for all lives of theirs. This process imports the modules it is told and then does nothing but fork:
a request is one byte with the descriptors of a handover (``dtrain/launch/handover.py``), which the
forked child reads and the server never looks into. It has no thread and touches no device, neither
of which survives a fork.

It listens on an abstract Unix socket, which is no file, belongs to a network namespace as a host
does, and is gone with its last user. The supervisor that binds the name starts the server and
leaves the listening socket to it (``dtrain/launch/fork_client.py``). So there are never two, and
requests can be made, and wait, while modules are still being imported.

A connection stands for a supervisor. The answer to a request is the trainer's process descriptor,
opened before anybody can reap it; when the trainer ends, its exit code follows. The server ends
with its last supervisor, however that ended; a trainer has a pipe of its own to its supervisor and
ends with it. Killed, the server takes nobody along: its supervisors see their trainers by the
process descriptors, and the next one that needs a server starts one.

``python -m dtrain.launch.fork_server AGENT_PID RUN_DIR SOCKET MODULE...``
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dtrain.launch.handover import DESCRIPTORS, STANDARD, become_trainer

REQUEST = b"f"
MESSAGE_BYTES = 4096


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this user."""
    size = struct.calcsize("3i")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", raw)[1] == os.geteuid())


def hung_up(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection has closed it, or has ended."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


class ForkServer:
    """Forks trainers for the supervisors that connect, until the last of them has gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._supervisors: set[socket.socket] = set()
        self._trainers: dict[int, tuple[int, socket.socket]] = {}
        self._selector = selectors.DefaultSelector()
        self._watch(listener, self._accept)

    def deserted(self) -> bool:
        """Whether no supervisor is left of those that have connected so far."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while poll.poll(0):
            self._accept()
        return all(hung_up(supervisor) for supervisor in self._supervisors)

    def serve(self) -> None:
        """Serve until no supervisor is connected and no trainer is left to be reaped."""
        while True:
            for key, _ in self._selector.select():
                key.data()
            if not self._supervisors and not self._trainers:
                return

    def _watch(self, source: socket.socket | int, act: Callable[..., None], *args: Any) -> None:
        self._selector.register(source, selectors.EVENT_READ, lambda: act(*args))

    def _accept(self) -> None:
        supervisor, _ = self._listener.accept()
        if not same_user(supervisor):
            # Whoever may ask for a fork says what the child runs.
            supervisor.close()
            return
        self._supervisors.add(supervisor)
        self._watch(supervisor, self._receive, supervisor)

    def _receive(self, supervisor: socket.socket) -> None:
        if hung_up(supervisor):
            # Nobody waits any more for what it may have asked for.
            self._selector.unregister(supervisor)
            self._supervisors.remove(supervisor)
            supervisor.close()
            return
        descriptors: list[int] = []
        try:
            _, descriptors, _, _ = socket.recv_fds(
                supervisor, len(REQUEST), DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            self._start(supervisor, descriptors)
        except OSError as error:
            _tell(supervisor, {"error": str(error)})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, supervisor: socket.socket, descriptors: Sequence[int]) -> None:
        if len(descriptors) < DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
        if pid == 0:
            try:
                self._close()
            finally:
                become_trainer(descriptors)
        handle = os.pidfd_open(pid)
        self._trainers[handle] = pid, supervisor
        self._watch(handle, self._reap, handle)
        _tell(supervisor, {"pid": pid}, handle)

    def _reap(self, handle: int) -> None:
        self._selector.unregister(handle)
        pid, supervisor = self._trainers.pop(handle)
        os.close(handle)
        _, status = os.waitpid(pid, 0)
        _tell(supervisor, {"ended": pid, "exit_code": os.waitstatus_to_exitcode(status)})

    def _close(self) -> None:
        """In the child: let go of all that is the server's."""
        self._selector.close()
        self._listener.close()
        for supervisor in self._supervisors:
            supervisor.close()
        for handle in self._trainers:
            os.close(handle)


def _tell(supervisor: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Send a message. One that has gone, or never reads, must not keep the others waiting."""
    with contextlib.suppress(OSError):
        words = json.dumps(message).encode()
        socket.send_fds(supervisor, [words], descriptors, socket.MSG_DONTWAIT)


def main(arguments: Sequence[str]) -> NoReturn:
    """Be the fork server; ``arguments`` as in the module's docstring."""
    _, _, descriptor, *modules = arguments
    # Where the agent ignores it, the kernel would reap trainers before their exit code is read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("fork-server")
    with socket.socket(fileno=int(descriptor)) as listener:
        listener.set_inheritable(False)
        server = ForkServer(listener)
        for module in modules:
            # What cannot be imported is left to the trainer: its own import says why, and names of
            # modules inside libraries differ from version to version.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
            if server.deserted():
                os._exit(0)
        _let_go_of_streams()
        server.serve()
    # There is nothing to finalise, which takes a moment with torch in memory.
    os._exit(0)


def _let_go_of_streams() -> None:
    """Leave the standard streams, which are those of one supervisor and may be waited for."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for number in STANDARD:
        os.dup2(null, number)
    os.close(null)


if __name__ == "__main__":
    main(sys.argv[1:])
