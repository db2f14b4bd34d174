"""Trying again where a store fails for a moment, and only there."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
    }
)

# Libraries of object stores let some errors of the network through that are no OSError. They are
# told by name, so that no such library has to be installed.
_TRANSIENT_NAMES = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionClosedError",
        "ConnectTimeoutError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteReadError",
        "ReadTimeoutError",
        "ResponseParserError",
        "ResponseStreamingError",
        "ServerDisconnectedError",
    }
)


def transient(error: BaseException) -> bool:
    """Whether the same call may succeed a moment later: a lost connection, an overloaded server.

    A missing file or bucket, refused access, unknown credentials and a full disk are permanent.
    """
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT
    return any(kind.__name__ in _TRANSIENT_NAMES for kind in type(error).__mro__)


@dataclass(frozen=True)
class Retry:
    """Waits ``delays_s`` (seconds, one before each further attempt) after transient errors."""

    delays_s: tuple[float, ...] = (0.2, 0.8, 2.0, 4.0)
    sleep: Callable[[float], None] = time.sleep

    def run(self, function: Callable[[], T]) -> T:
        """Call a function that may be called again after it has failed; its last error is raised
        as it is."""
        for delay in self.delays_s:
            try:
                return function()
            except Exception as error:
                if not transient(error):
                    raise
                self.sleep(delay)
        return function()
