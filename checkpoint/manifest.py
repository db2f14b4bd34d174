"""The manifest of a checkpoint: every file with its size and checksum, and the run's progress."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.files import FileDigest, digest_of

FORMAT = 1
MANIFEST = "manifest.json"
MARKER = "COMMITTED"
METADATA = ".metadata"
INCOMPLETE = ".incomplete"

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?(\.incomplete)?")
_FILE = re.compile(r"[A-Za-z0-9_.\-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class CheckpointInfo:
    """One checkpoint of a store; small and picklable, so that one worker can tell the others.

    ``attempt`` is 0, or a higher number where the step was saved again after a save of it had
    been committed. Checkpoints compare by step, then attempt.
    """

    step: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """The folder's name."""
        again = f".{self.attempt}" if self.attempt else ""
        return f"step-{self.step:08d}{again}"


def parse_folder(name: str) -> tuple[CheckpointInfo, bool] | None:
    """The checkpoint a folder is of, and whether it is named as finished; None for others."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, attempt, incomplete = match.groups()
    return CheckpointInfo(int(step), int(attempt or 0)), incomplete is None


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says. ``files`` maps each file's name to its size and checksum."""

    step: int
    files: dict[str, FileDigest]
    progress: dict[str, Any]
    torch_version: str

    def dump(self) -> bytes:
        """As JSON.

        Raises:
            CheckpointError: ``progress`` holds something that JSON cannot.
        """
        raw = {
            "format": FORMAT,
            "step": self.step,
            "torch": self.torch_version,
            "progress": self.progress,
            "files": {
                name: {"size": digest.size, "sha256": digest.sha256}
                for name, digest in sorted(self.files.items())
            },
        }
        try:
            return json.dumps(raw, indent=1).encode()
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"progress: expected plain JSON values ({error})") from error

    @staticmethod
    def parse(data: bytes) -> Manifest:
        """Read and check a manifest.

        Raises:
            CheckpointError: it is no manifest, or one of a newer format.
        """
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise CheckpointError("not valid JSON") from error
        if not isinstance(raw, dict) or not isinstance(raw.get("format"), int):
            raise CheckpointError("not a manifest")
        if raw["format"] > FORMAT:
            raise CheckpointError(
                f"format {raw['format']} is newer than this version reads ({FORMAT}); update dtrain"
            )
        step, files, progress = raw.get("step"), raw.get("files"), raw.get("progress")
        if not (isinstance(step, int) and isinstance(files, dict) and isinstance(progress, dict)):
            raise CheckpointError("not a manifest")
        return Manifest(
            step,
            {name: _parse_digest(name, entry) for name, entry in files.items()},
            progress,
            str(raw.get("torch", "")),
        )


def marker_of(manifest: bytes) -> bytes:
    """The content of the marker: the SHA-256 of the manifest, so that it vouches for all files."""
    return f"{digest_of(manifest).sha256}\n".encode()


def differing(saved: object, wanted: Mapping[str, Any]) -> list[str]:
    """Fields in which a saved identity differs from the one wanted, compared as JSON."""
    plain = json.loads(json.dumps(wanted))
    known = saved if isinstance(saved, dict) else {}
    missing = object()
    fields = sorted({*known, *plain})
    return [f for f in fields if known.get(f, missing) != plain.get(f, missing)]


def _parse_digest(name: str, entry: Any) -> FileDigest:
    # A name with a slash would let a forged manifest point out of the checkpoint.
    named = _FILE.fullmatch(name) and name not in (".", "..")
    if not named or not isinstance(entry, dict):
        raise CheckpointError(f"not a manifest (file {name!r})")
    size, sha256 = entry.get("size"), entry.get("sha256")
    if not isinstance(size, int) or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise CheckpointError(f"not a manifest (file {name!r})")
    return FileDigest(size, sha256)
