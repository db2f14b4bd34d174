"""A supervisor's side of the fork server (``dtrain/launch/fork_server.py``)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dtrain.environment import shared_variables, with_variables
from dtrain.launch.fork_server import MESSAGE_BYTES, REQUEST, same_user
from dtrain.launch.signals import STOP_SIGNALS, StopRequested, StopSignals

MODULE = "dtrain.launch.fork_server"

_TELL_S = 5.0
"""Longer than the fork server needs to pass on an exit code."""

_BETWEEN_S = 0.001
"""Between two looks at a name that another supervisor has bound and does not listen on yet."""

_BACKLOG = 4096
"""Supervisors that wait while modules are imported; the kernel's own limit may be lower."""


class PreloadError(RuntimeError):
    """The process that trainers are forked from ended, or could not fork one."""


class ForkClient:
    """Asks for forks; finds the fork server that its siblings share, or starts it.

    Siblings are supervisors of one run with the same parent: torchrun's agent, or ``dtrain join``.
    Those whose environment, path or CPUs differ have servers of their own, because libraries look
    at these when they are imported.
    """

    def __init__(self, run_dir: Path, modules: Sequence[str]) -> None:
        self._run_dir = str(run_dir)
        self._modules = tuple(modules)
        self._agent = os.getppid()
        self._name = self._socket_name()
        self._connection: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._exit_codes: dict[int, int] = {}

    def start(self, descriptors: Sequence[int], signals: StopSignals) -> tuple[int, int]:
        """Fork a process that becomes the trainer of a handover's ``descriptors``.

        Returns its pid and its process descriptor.

        Raises:
            PreloadError: a server that this supervisor started ended before it could fork (its own
                message is on stderr), or the system allows no further process.
            StopRequested: a stop signal came first; there will be no trainer.
        """
        while True:
            own = self._connect(signals)
            try:
                return self._request(descriptors, signals)
            except (EOFError, ConnectionError) as error:
                self.close()
                if own:
                    raise PreloadError(
                        "the process that preloads the trainer's modules ended"
                    ) from error
                # The end of another's server, or of one that served before, says nothing about
                # the next one.

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a trainer that has ended, negative for a signal; None where the server
        is gone."""
        end_s = time.monotonic() + _TELL_S
        while pid not in self._exit_codes:
            connection = self._connection
            if connection is None or not wait([connection], max(0.0, end_s - time.monotonic())):
                return None
            try:
                self._receive(connection)
            except (EOFError, ConnectionError):
                self.close()
        return self._exit_codes.pop(pid)

    def close(self) -> None:
        """Leave the server, which ends with its last client."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _socket_name(self) -> str:
        """Equal for those, and only those, whose trainers may be forked from one process."""
        parts = (
            os.geteuid(),
            os.stat("/proc/self/ns/pid").st_ino,
            self._agent,
            self._run_dir,
            self._modules,
            self._command(0),
            os.getcwd(),
            sys.path,
            sorted(os.sched_getaffinity(0)),
            sorted(shared_variables().items()),
        )
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return f"\0dtrain-fork-server-{digest[:32]}"

    def _command(self, listener: int) -> list[str]:
        words = [str(self._agent), self._run_dir, str(listener), *self._modules]
        return [*interpreter(), "-m", MODULE, *words]

    def _connect(self, signals: StopSignals) -> bool:
        """Be connected to a server; returns whether it was started for that."""
        while self._connection is None:
            connection = _new_socket()
            try:
                connection.connect(self._name)
            except ConnectionRefusedError:
                if self._open_server(connection):
                    return True
                connection.close()
                if signals.wait(_BETWEEN_S):
                    self._leave_if_told(signals)
            else:
                self._take(connection)
        return False

    def _open_server(self, connection: socket.socket) -> bool:
        """Start a server and connect to it; False when another supervisor is about to."""
        with _new_socket() as listener:
            try:
                listener.bind(self._name)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return False
                raise
            listener.listen(_BACKLOG)
            # Before it runs, since a server without a supervisor ends.
            connection.connect(self._name)
            self._take(connection)
            try:
                self._launch(listener.fileno())
            except OSError as error:
                self.close()
                raise PreloadError(
                    f"the process that trainers are forked from could not be started: {error}"
                ) from error
        return True

    def _launch(self, listener: int) -> None:
        """Start the server in a process group of its own, with the stop signals blocked.

        It serves others too, so what is sent to this supervisor's group must not reach it; and what
        is sent to all processes of a node must not end it before it has told how trainers end. A
        trainer unblocks the signals for itself.
        """
        if self._server is not None:
            # Reaps the one before.
            self._server.poll()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._server = subprocess.Popen(
                self._command(listener),
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=(listener,),
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _take(self, connection: socket.socket) -> None:
        if not same_user(connection):
            connection.close()
            raise PreloadError(f"the socket {self._name[1:]} was taken by another user's process")
        self._connection = connection

    def _request(self, descriptors: Sequence[int], signals: StopSignals) -> tuple[int, int]:
        connection = self._connection
        assert connection is not None
        socket.send_fds(connection, [REQUEST], descriptors)
        while True:
            if connection not in wait([connection, signals.fileno()]):
                self._leave_if_told(signals)
                continue
            message, handles = self._receive(connection)
            if "pid" in message:
                # What is left from others that had this number, and nobody asked for.
                self._exit_codes.clear()
                return message["pid"], handles[0]
            if "error" in message:
                raise PreloadError(f"no trainer could be forked: {message['error']}")

    def _receive(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        words, handles, _, _ = socket.recv_fds(
            connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not words:
            raise EOFError("the fork server closed the connection")
        message = json.loads(words)
        if "ended" in message:
            self._exit_codes[message["ended"]] = message["exit_code"]
        return message, handles

    def _leave_if_told(self, signals: StopSignals) -> None:
        number = signals.take()
        if number is not None:
            self.close()
            raise StopRequested(number)


def module_environment() -> dict[str, str]:
    """For a new interpreter that is to find the modules that this one finds."""
    return with_variables({"PYTHONPATH": os.pathsep.join(place for place in sys.path if place)})


def interpreter() -> list[str]:
    """The command of a new interpreter with this one's options."""
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *options]


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
