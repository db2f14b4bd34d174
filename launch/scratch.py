"""Multiprocessing's folder of sockets, which must not outlive its supervisor."""

from __future__ import annotations

import multiprocessing.util
import subprocess
from types import TracebackType

_REMOVE = 'read -r _; rm -rf -- "$1"'


class ScratchFolder:
    """While entered, a shell waits to remove the folder should this process be killed.

    It waits for the end of a pipe, in a session of its own so that no signal to the supervisor's
    group ends it first. Multiprocessing itself removes the folder only at an orderly exit, and no
    trainer can: the kernel ends all of them together with their supervisor.
    """

    def __enter__(self) -> ScratchFolder:
        folder = multiprocessing.util.get_temp_dir()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, "sh", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shell.kill()
        self._shell.communicate()
