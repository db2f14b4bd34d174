"""Errors that a user can mend."""

from __future__ import annotations


class DtrainError(ValueError):
    """Bad input: one line that names the field, what was expected, what came, what to do."""


class PeerLostError(RuntimeError):
    """A worker of this generation is gone, so the step under way cannot be committed."""


class ShutdownError(RuntimeError):
    """The run was told to leave (SIGTERM) and did so at a step boundary."""


class LeftError(RuntimeError):
    """This worker left on request at a step boundary; the job goes on without it."""


class EvictedError(RuntimeError):
    """The others went on without this worker; it may come back as a new incarnation."""


class StoreLostError(RuntimeError):
    """The job's store cannot be reached, so the workers cannot agree on another generation."""


class FaultyHardwareError(RuntimeError):
    """This worker computed what no other one can confirm; the others go on without it."""


class CannotGoOnError(RuntimeError):
    """The workers that are left cannot go on with the run; a restart from a checkpoint may."""
