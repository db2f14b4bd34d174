"""The run folder: everything that a run leaves behind, in files that anyone can read.

``config.yaml`` the resolved configuration, ``identity.json`` what decides the result,
``events.jsonl`` and ``metrics.jsonl`` one JSON object a line, ``run.json`` the run's summary,
``actions-N.jsonl`` what worker N did when in each step (``parallel.record_actions``),
``tensorboard/`` scalars where TensorBoard is installed, ``checkpoints/`` by default.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from dtrain.config import Config, check_config, identity_digest
from dtrain.errors import DtrainError

_PACKAGES = ("torch", "deepspeed", "numpy", "numba", "pymetis", "fsspec")


@dataclass
class RunRecord:
    """The summary of a run, as it stands in ``run.json``.

    ``status``: ``running``, ``stopped`` (it left on request and can be resumed), ``failed`` or
    ``done``. ``loss``: of the last committed step. ``metrics``: split -> metric -> value.
    ``weights_sha256``: over parameter names and bytes, sorted by name. ``generations``: how many
    memberships the run has had. ``steps_replayed``: steps begun, discarded and run again.
    ``steps_skipped``: steps whose gradient was not finite, left out.
    ``steps_lost``: steps that were committed and had to be trained again after a restart.
    ``seeds_trained``: seed nodes of all committed steps. Step times in seconds.
    ``device``: the devices' model, within which the weights are bit-identical. ``recoveries``: of
    the newest ones, how many milliseconds each part took. ``feature_cache_hit_rate``: share of the
    feature rows that the workers found in their caches, since each was started.
    """

    status: str
    steps: int = 0
    epochs: int = 0
    loss: float | None = None
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    weights_sha256: str | None = None
    workers: int = 0
    generations: int = 0
    steps_replayed: int = 0
    steps_skipped: int = 0
    steps_lost: int = 0
    seeds_trained: int = 0
    step_time_p50_s: float | None = None
    step_time_p90_s: float | None = None
    wall_s: float = 0.0
    dataset_fingerprint: str = ""
    identity: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    run_dir: str = ""
    recoveries: list[dict[str, float]] = field(default_factory=list)
    feature_cache_hit_rate: float | None = None


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class RunFolder:
    """One run's folder on a local or shared file system.

    Opening makes the folder. Appends are single ``O_APPEND`` writes of whole lines, so that
    several processes may write to one file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the folder ``path``, making it if need be.

        Raises:
            DtrainError: the folder cannot be made or written.
        """
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DtrainError(
                f"--run-dir {self.path}: cannot be made ({error.strerror}); choose another folder"
            ) from error
        if not os.access(self.path, os.W_OK):
            raise DtrainError(
                f"--run-dir {self.path}: expected a folder that can be written; choose another"
            )
        self._scalars: _ScalarWriter | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go when ``checkpoint.url`` is not set."""
        return self.path / "checkpoints"

    def claim(self, config: Config, dataset_fingerprint: str) -> bool:
        """Make the folder this run's, or check that it already is; safe for all workers at once.

        The identity is written once. ``config.yaml`` follows the newest start, because what is not
        part of the identity (more steps, other checkpoints) may change when a run is resumed.
        A folder in which a run was refused before its first step is free for the mended one.
        Returns True when the folder was new.

        Raises:
            DtrainError: the folder belongs to a run of another identity, or is not readable.
        """
        identity = config.identity(dataset_fingerprint)
        text = _json({"digest": identity_digest(identity), "identity": identity}, indent=2) + "\n"
        target = self.path / "identity.json"
        created = _create_once(target, text)
        if not created and self._was_refused():
            _replace(target, text)
        elif not created:
            self._check_identity(target, identity)
        resolved = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        current = self.path / "config.yaml"
        if not current.is_file() or current.read_text() != resolved:
            _replace(current, resolved)
        return created

    def _was_refused(self) -> bool:
        """Whether all that happened here is that a run's input was found to be bad."""
        if (self.path / "run.json").exists():
            return False
        newest = {event["worker"]: event["kind"] for event in self.events()}
        return "user_error" in newest.values() and "trainer_started" not in newest.values()

    def _check_identity(self, file: Path, wanted: dict[str, Any]) -> None:
        try:
            found = json.loads(file.read_text())["identity"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DtrainError(
                f"{file}: expected a run's identity, got something unreadable; choose another "
                "--run-dir"
            ) from error
        difference = _first_difference(found, _plain(wanted))
        if difference is not None:
            name, old, new = difference
            raise DtrainError(
                f"--run-dir {self.path}: belongs to a run of another configuration; {name}: "
                f"expected {old} (the folder's), got {new}; choose another --run-dir"
            )

    def config(self) -> Config:
        """The resolved configuration of the run.

        Raises:
            DtrainError: the folder holds no readable ``config.yaml``.
        """
        file = self.path / "config.yaml"
        try:
            raw = yaml.safe_load(file.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise DtrainError(
                f"{self.path}: expected a run folder with a config.yaml, got none that can be read"
            ) from error
        if not isinstance(raw, dict):
            raise DtrainError(f"{file}: expected a mapping of sections, got {type(raw).__name__}")
        return check_config(raw, str(file))

    def event(self, kind: str, *, worker: int, reason: str, **fields: Any) -> None:
        """Append ``{time, worker, kind, reason, ...}`` to ``events.jsonl``; time in Unix s."""
        self._append("events.jsonl", self._event(kind, worker, reason, fields))

    def first_event(
        self, kind: str, *, since: float, worker: int, reason: str, **fields: Any
    ) -> bool:
        """Append an event and return True if none of this kind and reason is newer than ``since``.

        Lets one of several workers that meet the same problem report it. ``since``: Unix seconds.
        """
        with self._locked("events.jsonl"):
            known = any(
                event.get("kind") == kind
                and event.get("reason") == reason
                and event.get("time", 0.0) >= since
                for event in self.events()
            )
            self._append("events.jsonl", self._event(kind, worker, reason, fields))
        return not known

    def events(self) -> Iterator[dict[str, Any]]:
        """The events so far, oldest first; a last line that is still being written is left out."""
        return self._lines("events.jsonl")

    def metric(self, **fields: Any) -> None:
        """Append the fields and the time to ``metrics.jsonl``.

        Where TensorBoard is installed, the numbers also become its scalars at ``step``. Only
        worker 0 calls this.
        """
        self._append("metrics.jsonl", {"time": time.time(), **fields})
        writer = self._scalar_writer()
        if writer is not None and "step" in fields:
            for name, value in _scalars(fields):
                writer.add_scalar(name, value, int(fields["step"]))

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics so far, oldest first."""
        return self._lines("metrics.jsonl")

    def actions(self, worker: int, record: dict[str, Any]) -> None:
        """Append what ``worker`` did in a step to ``actions-WORKER.jsonl``."""
        self._append(f"actions-{worker}.jsonl", record)

    def action_records(self) -> dict[int, list[dict[str, Any]]]:
        """Each worker's steps as they were recorded, oldest first."""
        return {
            int(file.stem.partition("-")[2]): list(self._lines(file.name))
            for file in sorted(self.path.glob("actions-*.jsonl"))
        }

    def write_run(self, record: RunRecord) -> None:
        """Replace ``run.json`` in one go: a reader sees the old or the new one, whole."""
        _replace(self.path / "run.json", _json(asdict(record), indent=2) + "\n")

    def read_run(self) -> RunRecord | None:
        """The run's summary, or None before the first was written.

        Raises:
            DtrainError: ``run.json`` is not a run's summary.
        """
        file = self.path / "run.json"
        try:
            return RunRecord(**json.loads(file.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise DtrainError(f"{file}: expected a run's summary, got {error}") from error

    def close(self) -> None:
        """Flush what TensorBoard holds."""
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None

    def _scalar_writer(self) -> _ScalarWriter | None:
        if self._scalars is None and importlib.util.find_spec("tensorboard") is not None:
            # Imported here: torch is heavy, and TensorBoard an extra.
            from torch.utils.tensorboard import SummaryWriter

            self._scalars = SummaryWriter(log_dir=str(self.path / "tensorboard"))
        return self._scalars

    @staticmethod
    def _event(kind: str, worker: int, reason: str, fields: dict[str, Any]) -> dict[str, Any]:
        head = {"time": time.time(), "worker": worker, "kind": kind, "reason": reason}
        return head | fields

    def _append(self, name: str, record: dict[str, Any]) -> None:
        data = (_json(record) + "\n").encode()
        fd = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(fd, data)
        finally:
            os.close(fd)
        if written != len(data):
            raise OSError(f"{self.path / name}: only {written} of {len(data)} bytes were written")

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        try:
            handle = (self.path / name).open()
        except FileNotFoundError:
            return
        with handle:
            for line in handle:
                if line.endswith("\n"):
                    # A line cut short by a full disk is followed by the next one's text.
                    with contextlib.suppress(json.JSONDecodeError):
                        yield json.loads(line)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        fd = os.open(self.path / name, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def versions() -> dict[str, str]:
    """Versions of Python, dtrain and the packages that can change a result."""
    found = {"python": platform.python_version()}
    for name in ("dtrain", *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: NaN and infinities, which JSON lacks, as strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not (-float("inf") < value < float("inf")):
        return str(value)
    return value


def _scalars(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield prefix + name, float(value)


def _first_difference(old: Any, new: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first field, depth first, in which two identities differ: (dotted name, old, new)."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{name}.{key}" if name else key
            found = _first_difference(old.get(key), new.get(key), inner)
            if found is not None:
                return found
        return None
    return None if old == new else (name, old, new)


@contextlib.contextmanager
def _temporary(target: Path, text: str) -> Iterator[Path]:
    """A file beside ``target`` that holds ``text``, on disk, and is gone afterwards."""
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "w") as handle:
            handle.write(text)
            handle.flush()
            os.fchmod(handle.fileno(), 0o644)
            os.fsync(handle.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _replace(target: Path, text: str) -> None:
    with _temporary(target, text) as temporary:
        temporary.replace(target)
        _sync_folder(target.parent)


def _create_once(target: Path, text: str) -> bool:
    """Write ``target`` whole unless it exists; True when this call wrote it."""
    with _temporary(target, text) as temporary:
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        _sync_folder(target.parent)
        return True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
