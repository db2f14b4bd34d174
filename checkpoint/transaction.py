"""The coordinator's part of a save: where it goes, when it counts, what goes in exchange."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtrain.checkpoint.catalog import Catalog
from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.files import FileDigest, Files
from dtrain.checkpoint.manifest import (
    INCOMPLETE,
    MANIFEST,
    MARKER,
    CheckpointInfo,
    Manifest,
    marker_of,
)
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.urls import reason

_log = logging.getLogger("dtrain.checkpoint")


class Transaction:
    """One save, from an empty folder to the marker. Used by one worker of the group alone.

    Errors of the store come through as they are.
    """

    def __init__(
        self,
        files: Files,
        catalog: Catalog,
        step: int,
        progress: Mapping[str, Any],
        fence: Callable[[], None],
    ) -> None:
        """``fence`` raises where the group of workers that saves has ended meanwhile: a worker
        that was stopped and wakes up must not commit what others have taken over."""
        self.info: CheckpointInfo | None = None
        self._fence = fence
        self._files = files
        self._catalog = catalog
        self._step = step
        self._progress = dict(progress)

    def begin(self) -> str:
        """Choose an attempt that no committed checkpoint has, and clear what an unfinished save
        left there; returns the name of the empty folder to write to."""
        self._files.at("save.begin")
        scan = self._catalog.scan()
        taken = [i.attempt for i, _, committed in scan if committed and i.step == self._step]
        self.info = CheckpointInfo(self._step, max(taken, default=-1) + 1)
        for info, folder, _ in scan:
            if info == self.info:
                remove_checkpoint(self._files, folder)
        folder = self.info.name + (INCOMPLETE if self._files.local else "")
        self._files.make_folder(folder)
        return folder

    def commit(self, folder: str, digests: dict[str, FileDigest]) -> None:
        """Write the manifest, give the folder its final name, write the marker.

        Raises:
            CheckpointError: a file of some worker is not there, or not whole.
        """
        assert self.info is not None
        name = self.info.name
        manifest = Manifest(self._step, digests, self._progress, torch.__version__).dump()
        self._check_arrived(folder, digests)
        self._fence()
        self._files.at("manifest.write")
        self._files.write(f"{folder}/{MANIFEST}", manifest)
        self._files.sync_folder(folder)
        if folder != name:
            self._files.at("rename")
            self._fence()
            self._files.rename(folder, name)
        self._files.at("marker.write")
        self._fence()
        self._files.write_whole(f"{name}/{MARKER}", marker_of(manifest))
        self._files.at("committed")

    def abandon(self) -> None:
        """Give back the space of a failed save; all workers have stopped writing by then."""
        if self.info is None:
            return
        for folder in (self.info.name + INCOMPLETE, self.info.name):
            try:
                remove_checkpoint(self._files, folder)
            except Exception as error:
                _log.warning("%s/%s stays behind: %s", self._files.shown, folder, reason(error))

    def _check_arrived(self, folder: str, digests: dict[str, FileDigest]) -> None:
        self._files.refresh()
        for name, digest in digests.items():
            size = self._files.size(f"{folder}/{name}")
            if size is None:
                raise CheckpointError(
                    f"{folder}/{name}: written by its worker but not seen here; "
                    "checkpoint.url has to be a store that all workers share"
                )
            if size != digest.size:
                raise CheckpointError(f"{folder}/{name}: {size} of {digest.size} bytes arrived")


def prune(
    files: Files,
    catalog: Catalog,
    retention: Retention,
    valid: CheckpointInfo,
    *,
    dry_run: bool = False,
) -> list[str]:
    """Remove all checkpoints but those of ``retention`` and ``valid``, the newest checkpoint that
    is known to be intact; returns the folders' names, oldest first.

    Of a step saved more than once the last attempt counts. Unfinished saves older than ``valid``
    go too: behind it no save can be under way.
    """
    scan = catalog.scan()
    latest = {info.step: info for info, _, committed in scan if committed}
    kept = {latest[step] for step in retention.kept(latest)} | {valid}
    doomed = [
        folder
        for info, folder, committed in scan
        if (committed and info not in kept) or (not committed and info < valid)
    ]
    if not dry_run:
        for folder in doomed:
            remove_checkpoint(files, folder)
    return doomed


def remove_checkpoint(files: Files, folder: str) -> None:
    """Remove a checkpoint, its marker first, so that what is half removed does not count."""
    files.at("remove.marker")
    files.remove(f"{folder}/{MARKER}")
    files.at("remove.files")
    files.remove_folder(folder)
