"""How long rows are on their way to this worker, as its steps see it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dtrain.scheduler.links import Delay

_KEPT = 64


class Delays:
    """The newest delays of rows that this worker waited for, from each other worker."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}

    def observe(self, source: int, num_bytes: int, seconds: float) -> None:
        """Rows of so many bytes came from ``source``, ``seconds`` after it had sent them.

        ``seconds``: between readings of two clocks, which may be those of two nodes.
        """
        self._seen.setdefault(source, deque(maxlen=_KEPT)).append((num_bytes, seconds))

    def told(self) -> list[list[float]]:
        """All that was seen since the last call, as JSON: source, bytes, seconds."""
        seen, self._seen = self._seen, {}
        return [[source, *one] for source, ones in sorted(seen.items()) for one in ones]

    @staticmethod
    def of_told(target: int, raw: Sequence[Sequence[float]]) -> list[Delay]:
        """What :meth:`told` of worker ``target`` says."""
        return [Delay(int(source), target, int(size), seconds) for source, size, seconds in raw]
