"""What a trainer tells its supervisor before it ends."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Literal

Kind = Literal[
    "done",
    "user_error",
    "stopped",
    "left",
    "failed",
    "lost_peer",
    "evicted",
    "store_lost",
    "cannot_go_on",
    "faulty",
    "needs_spawn",
]


@dataclass(frozen=True)
class Report:
    """How a trainer ended, and why, in one line.

    ``done``: the job is complete. ``user_error``: the input is bad. ``stopped``: the whole job left
    on request. ``left``: this worker left on request, the job goes on. ``failed``: an exception.
    ``lost_peer``: another worker is gone. ``evicted``: the others went on without it.
    ``store_lost``: the job's store is gone. ``cannot_go_on``: too few workers, or no state left.
    ``faulty``: what it computed was wrong, and its device is not to be used again.
    ``needs_spawn``: it cannot work in a forked process.
    A trainer that ends without a report has died, whatever its exit code.
    """

    kind: Kind
    reason: str

    def send(self, connection: Connection) -> None:
        """Send the report; a supervisor that is gone is no error, the trainer ends anyway."""
        try:
            connection.send_bytes(json.dumps(asdict(self)).encode())
        except BrokenPipeError:
            return

    @staticmethod
    def receive(connection: Connection) -> Report | None:
        """The report that lies in ``connection``, or None when the trainer closed it."""
        try:
            return Report(**json.loads(connection.recv_bytes()))
        except (EOFError, ConnectionResetError):
            return None
