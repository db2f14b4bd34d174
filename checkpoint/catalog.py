"""What checkpoints a store holds, and whether they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.files import FileDigest, Files, digest_of
from dtrain.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    METADATA,
    CheckpointInfo,
    Manifest,
    differing,
    marker_of,
    parse_folder,
)
from dtrain.checkpoint.parallel import in_parallel
from dtrain.checkpoint.unpickle import load_metadata

_READERS = min(4, os.cpu_count() or 1)


class Catalog:
    """Reads the folders of a store; errors of the store come through as they are."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def scan(self) -> list[tuple[CheckpointInfo, str, bool]]:
        """Each folder of a save, oldest first: its checkpoint, its name, and if it is committed.

        Folders are listed before their markers are looked for. A save that commits and prunes in
        between can make it seem that nothing is committed; then it is looked again.
        """
        found = self._scan()
        while found and not any(committed for _, _, committed in found):
            again = self._scan()
            if again == found:
                break
            found = again
        return found

    def _scan(self) -> list[tuple[CheckpointInfo, str, bool]]:
        self._files.refresh()
        found = []
        for folder in self._files.folders():
            parsed = parse_folder(folder)
            if parsed is not None:
                info, finished = parsed
                marked = finished and self._files.size(f"{folder}/{MARKER}") is not None
                found.append((info, folder, marked))
        return sorted(found)

    def committed(self) -> list[CheckpointInfo]:
        """The committed checkpoints, oldest first."""
        return [info for info, _, marked in self.scan() if marked]

    def faults(
        self, info: CheckpointInfo, identity: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """The faults of a checkpoint as ``folder/file: fault``, the cheap checks first."""
        try:
            manifest = self.manifest(info)
        except CheckpointError as error:
            yield str(error)
            return
        where = f"{info.name}/{MANIFEST}"
        if manifest.step != info.step:
            yield f"{where}: it is of step {manifest.step}"
        if METADATA not in manifest.files:
            yield f"{where}: does not list {METADATA}"
        if identity is not None:
            fields = differing(manifest.progress.get("identity"), identity)
            if fields:
                yield f"{where}: of another config ({', '.join(fields)} differ)"
        sound = []
        for name, expected in manifest.files.items():
            size = self._files.size(f"{info.name}/{name}")
            if size is None:
                yield f"{info.name}/{name}: missing"
            elif size != expected.size:
                yield f"{info.name}/{name}: expected {expected.size} bytes, found {size}"
            else:
                sound.append(name)
        read = [lambda name=name: self._read_digest(info, name) for name in sound]
        for name, digest in zip(sound, in_parallel(read, _READERS), strict=True):
            if digest is None:
                yield f"{info.name}/{name}: missing"
            elif digest != manifest.files[name]:
                yield f"{info.name}/{name}: checksum differs"

    def _read_digest(self, info: CheckpointInfo, name: str) -> FileDigest | None:
        try:
            return self._files.digest(f"{info.name}/{name}")
        except FileNotFoundError:
            return None

    def is_committed(self, info: CheckpointInfo) -> bool:
        """Whether the marker is there: pruning removes it before anything else."""
        self._files.refresh()
        return self._files.size(f"{info.name}/{MARKER}") is not None

    def manifest(self, info: CheckpointInfo) -> Manifest:
        """The manifest, checked against the marker.

        Raises:
            CheckpointError: ``folder/file: fault``.
        """
        data = {}
        for name in (MARKER, MANIFEST):
            try:
                data[name] = self._files.read(f"{info.name}/{name}")
            except FileNotFoundError:
                raise CheckpointError(f"{info.name}/{name}: missing") from None
        where = f"{info.name}/{MANIFEST}"
        if data[MARKER] != marker_of(data[MANIFEST]):
            raise CheckpointError(f"{where}: checksum differs from that in {MARKER}")
        try:
            return Manifest.parse(data[MANIFEST])
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None

    def metadata(self, info: CheckpointInfo) -> Metadata:
        """DCP's metadata, checked against the manifest; every file it names is in the manifest.

        Raises:
            CheckpointError: ``folder/file: fault``.
        """
        manifest = self.manifest(info)
        where = f"{info.name}/{METADATA}"
        try:
            data = self._files.read(where)
        except FileNotFoundError:
            raise CheckpointError(f"{where}: missing") from None
        if manifest.files.get(METADATA) != digest_of(data):
            raise CheckpointError(f"{where}: checksum differs")
        try:
            metadata = load_metadata(data)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        stored = {entry.relative_path for entry in metadata.storage_data.values()}
        if unknown := stored - set(manifest.files):
            raise CheckpointError(f"{where}: names {min(unknown)}, which {MANIFEST} does not list")
        return metadata
