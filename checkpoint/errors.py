"""What a caller of the checkpoint store has to expect."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read; what was committed before still counts.

    The message is one line without credentials. Training may go on after a failed save.
    """


class CheckpointGoneError(CheckpointError):
    """The checkpoint was pruned while it was read; a newer one is there to be read instead."""
