"""How others find a job that runs: its store's address, and numbers for workers that join it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.environment import WorkerPlace
from dtrain.errors import DtrainError
from dtrain.runfolder import RunFolder

_FILE = "job.json"

FIRST_JOINER = 1000
"""Above torchrun's ranks, of which a later restart with more nodes may have more than now."""


@dataclass(frozen=True)
class JobFile:
    """Where the job's workers meet, as it stands in ``RUN_DIR/job.json``.

    ``world_size``: workers that the job was launched with. ``run_id``: torchrun's name for it.
    """

    store_host: str
    store_port: int
    world_size: int
    run_id: str

    @classmethod
    def of(cls, place: WorkerPlace) -> JobFile:
        """The job of a worker that stands at ``place``."""
        return cls(place.store_host, place.store_port, place.world_size, place.run_id)

    def write(self, run_dir: Path) -> None:
        """Replace the file in one go. It follows the newest start: a restart may move the store."""
        fd, name = tempfile.mkstemp(dir=run_dir, prefix=f".{_FILE}.")
        temporary = Path(name)
        try:
            with os.fdopen(fd, "w") as handle:
                handle.write(json.dumps(asdict(self), indent=2) + "\n")
                os.fchmod(handle.fileno(), 0o644)
            temporary.replace(run_dir / _FILE)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, run_dir: Path) -> JobFile:
        """The job whose run folder this is.

        Raises:
            DtrainError: there is none, or it is not readable.
        """
        file = run_dir / _FILE
        try:
            return cls(**json.loads(file.read_text()))
        except FileNotFoundError:
            raise DtrainError(
                f"{run_dir}: expected the run folder of a job that runs, got no {_FILE} there; "
                "give the folder that dtrain run or torchrun was started with"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise DtrainError(f"{file}: expected a job's address, got {error}") from error


def reserve_workers(folder: RunFolder, job: JobFile, count: int) -> list[int]:
    """Take ``count`` worker numbers that no other worker of the run has or will have.

    A number is taken by making a file of its name in ``RUN_DIR/join``, which one process can only.
    """
    place = folder.path / "join"
    place.mkdir(exist_ok=True)
    numbers: list[int] = []
    number = max(FIRST_JOINER, job.world_size, *(known + 1 for known in _known(folder)))
    while len(numbers) < count:
        try:
            os.close(os.open(place / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            pass
        else:
            numbers.append(number)
        number += 1
    return numbers


def free_local_ranks(folder: RunFolder, node: str, count: int) -> list[int]:
    """The lowest local ranks, and so devices, that no living worker of ``node`` has."""
    taken = {
        event["local_rank"]
        for event in folder.events()
        if event.get("kind") == "trainer_started"
        and event.get("node") == node
        and Path("/proc", str(event.get("supervisor_pid"))).exists()
    }
    free: list[int] = []
    rank = 0
    while len(free) < count:
        if rank not in taken:
            free.append(rank)
        rank += 1
    return free


def _known(folder: RunFolder) -> Iterator[int]:
    yield from (int(file.name) for file in (folder.path / "join").glob("[0-9]*"))
    yield from (event["worker"] for event in folder.events() if "worker" in event)
