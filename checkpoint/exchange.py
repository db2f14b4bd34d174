"""What the workers of a save tell each other, through a channel that the caller provides."""

from __future__ import annotations

import json
from typing import Any, Protocol


class Exchange(Protocol):
    """A group of workers that save together.

    ``rank``: position of this worker in the group, in [0, size). ``worker``: its number in
    messages. The group serves one save at a time and nothing else; calls come from a background
    thread.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def worker(self) -> int: ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """What each worker gave, by rank. Lengths differ.

        Raises:
            PeerLostError: a worker is gone, or the group has ended; within a bounded time.
        """
        ...

    def check(self) -> None:
        """Return at once where the group still stands.

        Raises:
            PeerLostError: it does not, so that nothing may be written in its name any more.
        """
        ...


class Alone:
    """One worker that saves by itself."""

    rank = 0
    size = 1

    def __init__(self, worker: int = 0) -> None:
        self.worker = worker

    def all_gather(self, data: bytes) -> list[bytes]:
        """The worker's own words."""
        return [data]

    def check(self) -> None:
        """Nobody else can be lost."""


def tell_all(exchange: Exchange, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Exchange plain JSON objects; what each worker gave, by rank.

    Raises:
        PeerLostError: as :meth:`Exchange.all_gather`.
    """
    return [json.loads(data) for data in exchange.all_gather(json.dumps(message).encode())]
