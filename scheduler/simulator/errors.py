"""What a simulation says when an invariant does not hold."""

from __future__ import annotations


class InvariantError(AssertionError):
    """Something happened that must never happen, whatever the faults."""


def require(holds: bool, what: str) -> None:
    """Check an invariant.

    Raises:
        InvariantError: it does not hold; the message is ``what`` was found.
    """
    if not holds:
        raise InvariantError(what)
