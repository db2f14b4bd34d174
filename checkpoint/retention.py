"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.errors import DtrainError


@dataclass(frozen=True)
class Retention:
    """Checkpoints that pruning leaves: the newest, every m-th step's, and chosen ones.

    ``keep``: newest steps that stay, at least 1. ``every``: steps that are multiples of it stay
    for good. ``pinned``: steps that stay whatever their age, such as the best by a metric.

    Raises:
        DtrainError: ``keep`` or ``every`` is below 1.
    """

    keep: int = 3
    every: int | None = None
    pinned: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise DtrainError(f"checkpoint.keep: expected at least 1, got {self.keep}")
        if self.every is not None and self.every < 1:
            raise DtrainError(f"checkpoint.keep_every: expected at least 1, got {self.every}")

    def kept(self, steps: Iterable[int]) -> set[int]:
        """Those of ``steps`` that stay."""
        known = set(steps)
        newest = set(sorted(known)[-self.keep :])
        periodic = {step for step in known if self.every and step % self.every == 0}
        return newest | periodic | (known & self.pinned)
