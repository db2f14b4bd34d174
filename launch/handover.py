"""What a supervisor hands to the process that is to be its trainer, and that process's way in.

It is the same for a trainer that is forked from a preloaded process and for one that is spawned as
a new interpreter: JSON in a nameless file, and descriptors. With them the trainer is in every
respect that of its own supervisor, whoever its parent is: it has that one's environment, standard
streams, working directory, file mode mask and CPUs.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing.util
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from dtrain.environment import replace_variables, with_variables
from dtrain.launch.trainer import run_trainer
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.spec import TrainerSpec

DESCRIPTORS = 7
"""Those of a handover: its JSON, lifeline, reports, heartbeat, then the standard streams."""

STANDARD = (0, 1, 2)


@dataclass(frozen=True)
class Handover:
    """A trainer's first words, and all of its supervisor that a process inherits by being forked.

    ``arguments``, ``path``: ``sys.argv`` and ``sys.path``. ``group``: the process group.
    """

    entry: str
    spec: TrainerSpec
    debug: bool
    arguments: list[str]
    path: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    cpus: list[int]
    group: int

    @classmethod
    def of_this_process(cls, entry: str, spec: TrainerSpec, debug: bool) -> Handover:
        """For a trainer ``entry`` (``module:function``) of this supervisor, as it is now."""
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            entry=entry,
            spec=spec,
            debug=debug,
            arguments=sys.argv,
            path=sys.path,
            environment=with_variables({}),
            folder=os.getcwd(),
            umask=umask,
            cpus=sorted(os.sched_getaffinity(0)),
            group=os.getpgrp(),
        )

    def write(self) -> int:
        """A descriptor of a nameless file with it: of any size, and read without waiting."""
        descriptor = os.memfd_create("dtrain-handover")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(asdict(self)).encode())
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> Handover:
        """From the descriptor that ``write`` returned; closes it."""
        with open(descriptor, "rb") as file:
            file.seek(0)
            fields = json.load(file)
        spec = fields["spec"]
        spec["domains"] = tuple(spec["domains"])
        return cls(**fields | {"spec": TrainerSpec(**spec)})

    def enter(self) -> None:
        """Make this process as its supervisor is."""
        replace_variables(self.environment)
        sys.argv[:], sys.path[:] = self.arguments, self.path
        os.chdir(self.folder)
        os.umask(self.umask)
        os.sched_setaffinity(0, self.cpus)
        try:
            os.setpgid(0, self.group)
        except PermissionError:
            # The supervisor has a session of its own, which none but its children can be in.
            os.setsid()
        with contextlib.suppress(OSError):
            # What top and ps show. It is worth nothing else.
            Path("/proc/self/comm").write_text(f"trainer-{self.spec.worker}")


def become_trainer(descriptors: Sequence[int]) -> NoReturn:
    """Be the trainer of a handover's ``descriptors``, which are this process's own, and end.

    Nothing is finalised at the end, as in multiprocessing's children: destructors of parked
    process groups block for as long as a peer is stopped.
    """
    code = 1
    try:
        code = _run(descriptors)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            code = ending.code or 0
        else:
            print(ending.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            sys.stdout.flush()
        finally:
            os._exit(code)


def _run(descriptors: Sequence[int]) -> int:
    words, lifeline, reports, heartbeat, *streams = descriptors
    for stream, number in zip(streams, STANDARD, strict=True):
        if stream != number:
            os.dup2(stream, number)
            os.close(stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    handover = Handover.read(words)
    handover.enter()
    try:
        run_trainer(
            handover.entry,
            handover.spec,
            Connection(reports, readable=False),
            handover.debug,
            lifeline,
            Heartbeat(heartbeat),
        )
    finally:
        # Ends processes that were started through multiprocessing and nobody waited for.
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    return 0


if __name__ == "__main__":
    become_trainer([int(word) for word in sys.argv[1].split(",")])
