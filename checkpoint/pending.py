"""A save that goes on in the background."""

from __future__ import annotations

import threading

from dtrain.checkpoint.manifest import CheckpointInfo


class PendingSave:
    """The outcome of a save, once there is one.

    ``step``: the step that is saved. ``stall_s``: seconds for which the save kept its caller:
    waiting for an unfinished one (``waited_s`` of them) and copying the tensors. ``committed_s``:
    seconds from its call until the save counted; older checkpoints are removed after that.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_s = 0.0
        self.waited_s = 0.0
        self.committed_s = 0.0
        self._finished = threading.Event()
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save has ended, at most ``timeout_s`` seconds; whether it has."""
        return self._finished.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """The committed checkpoint.

        Raises:
            CheckpointError: nothing was committed, on any worker.
            PeerLostError: the group broke; whether the save was committed is not known here.
            TimeoutError: it has not ended within ``timeout_s`` seconds.
        """
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"the save of step {self.step} is still under way")
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def committed(self, info: CheckpointInfo) -> None:
        """End the save well; called by the thread that saves."""
        self._info = info
        self._finished.set()

    def failed(self, error: BaseException) -> None:
        """End the save with an error; called by the thread that saves."""
        self._error = error
        self._finished.set()
