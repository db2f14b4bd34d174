"""Checkpoints in one folder of any fsspec store: saved as a transaction, verified when read."""

from __future__ import annotations

import builtins
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dtrain.checkpoint import transaction
from dtrain.checkpoint.catalog import Catalog
from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.files import Files
from dtrain.checkpoint.manifest import MARKER, CheckpointInfo, parse_folder
from dtrain.checkpoint.storage import Reader, Writer, fill_tensors, save_tensors
from dtrain.checkpoint.urls import reason
from dtrain.errors import DtrainError, PeerLostError

Report = Callable[[str], None]

_log = logging.getLogger("dtrain.checkpoint")


class CheckpointStore:
    """The checkpoints under one URL.

    A save writes ``step-N.incomplete/`` (on stores without an atomic rename: ``step-N/``), then
    ``manifest.json`` with size and SHA-256 of every file, then renames the folder, then writes
    the marker ``COMMITTED``, which holds the SHA-256 of the manifest. A folder without its marker
    never counts, and nothing else points at the newest.

    Args:
        url: a path or any fsspec URL that all workers reach; credentials come from the
            environment alone.
        on_point: called with a name at each step of a save or prune (``save.begin``,
            ``data.write``, ``file.open``, ``file.flush``, ``file.closed``, ``data.written``,
            ``metadata.write``, ``manifest.write``, ``rename``, ``marker.write``, ``committed``,
            ``remove.marker``, ``remove.files``), for fault injection.

    Raises:
        DtrainError: the URL's protocol is unknown or its library is not installed. Nothing is
            connected to before a method is called.
    """

    def __init__(self, url: str, on_point: Callable[[str], None] | None = None) -> None:
        self._files = Files(url, on_point)
        self._catalog = Catalog(self._files)
        self.url = self._files.shown

    def prepare(self) -> None:
        """Make sure that the store can be written to, by writing and removing a small file.

        Raises:
            DtrainError: it cannot; one line that says why.
        """
        probe = f"probe-{uuid.uuid4().hex}"
        try:
            self._files.make_folder()
            self._files.write(probe, b"dtrain")
            self._files.remove(probe)
        except Exception as error:
            raise DtrainError(
                f"checkpoint.url: {self.url} cannot be written to ({reason(error)}); "
                "check the path, its permissions and the credentials in the environment"
            ) from None

    def list(self) -> builtins.list[CheckpointInfo]:
        """The committed checkpoints, oldest first; their content is not read.

        Raises:
            CheckpointError: the store cannot be read.
        """
        with self._store_errors("listed"):
            return self._catalog.committed()

    def newest(
        self, identity: Mapping[str, Any] | None = None, on_skip: Report | None = None
    ) -> CheckpointInfo | None:
        """The newest checkpoint that is committed, intact and of this run; None if there is none.

        Sizes and checksums of all files are verified, so this reads the whole checkpoint: one
        worker calls it and tells the others.

        Args:
            identity: what decides the run's result; compared with ``progress["identity"]``.
            on_skip: called with a message that names file and fault for each newer checkpoint
                that is passed over; the log by default.

        Raises:
            CheckpointError: the store cannot be read.
        """
        report = on_skip or _log.warning
        with self._store_errors("read"):
            for info, folder, committed in reversed(self._catalog.scan()):
                if committed:
                    fault = next(self._catalog.faults(info, identity), None)
                else:
                    fault = f"{folder}: not committed ({MARKER} is missing)"
                if fault is None:
                    return info
                report(f"checkpoint skipped: {fault}")
        return None

    def verify(
        self, info: CheckpointInfo, identity: Mapping[str, Any] | None = None
    ) -> builtins.list[str]:
        """Every fault of a checkpoint, each as ``folder/file: fault``; none if it is intact.

        Raises:
            CheckpointError: the store cannot be read.
        """
        with self._store_errors("read"):
            self._files.refresh()
            return [*self._catalog.faults(info, identity)]

    def progress(self, info: CheckpointInfo) -> dict[str, Any]:
        """The progress that was saved with a checkpoint.

        Raises:
            CheckpointError: the manifest is missing or damaged.
        """
        with self._store_errors("read"):
            return self._catalog.manifest(info).progress

    def names(self, info: CheckpointInfo) -> builtins.list[str]:
        """The names of a checkpoint's tensors, sorted.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        with self._store_errors("read"):
            return sorted(self._catalog.metadata(info).state_dict_metadata)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        progress: Mapping[str, Any],
        *,
        rank: int,
        process_group: dist.ProcessGroup | None,
        no_dist: bool = False,
        keep: int,
        on_warning: Report | None = None,
    ) -> CheckpointInfo:
        """Save and commit a step; a collective call of the group's workers.

        Each worker gives the tensors it holds. A name that several hold must have the same value
        there; one of them writes it. The worker of rank 0 in the group commits, prunes, and is
        the one whose ``progress`` is saved. A step that was committed before is saved beside
        the earlier checkpoint, which goes once the new one is committed.

        Args:
            step: the committed step, at least 0.
            tensors: by stage-independent names; of any dtype, shape and device.
            progress: plain JSON values, without secrets; ``identity`` is what :meth:`newest`
                compares.
            rank: this worker, for messages.
            process_group: a gloo group; None for the default one. Its timeout bounds the call.
            no_dist: save from this process alone.
            keep: newest checkpoints that stay, at least 1.
            on_warning: called where the checkpoint is committed but older ones could not be
                pruned; the log by default.

        Raises:
            CheckpointError: on every worker alike: some worker could not write; nothing is
                committed and training may go on.
            PeerLostError: the group broke.
        """
        _check_keep(keep)
        save = transaction.Transaction(self._files, self._catalog, step, progress)
        token = uuid.uuid4().hex[:8]
        writer = Writer(self._files, f"worker {rank}", save.begin, save.commit, token)
        try:
            save_tensors(dict(tensors), writer, process_group, no_dist)
        except CheckpointException as error:
            save.abandon()
            cause = _first_cause(error)
            raise CheckpointError(
                f"checkpoint of step {step} at {self.url} was not saved: {reason(cause)}"
            ) from None
        except RuntimeError as error:
            raise PeerLostError(f"the save of step {step} broke off: {reason(error)}") from error
        if save.info is not None:
            self._prune_after_save(keep, save.info, on_warning or _log.warning)
        parsed = parse_folder(writer.folder)
        assert parsed is not None
        return parsed[0]

    def load_into(self, info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place from a checkpoint, reading only these; no collectives.

        ``tensors`` have the saved shapes and dtypes, on any device and of any strides.

        Raises:
            CheckpointError: a name is not in the checkpoint, a shape or dtype differs (nothing is
                filled then), or the checkpoint cannot be read.
        """
        with self._store_errors("read"):
            metadata = self._catalog.metadata(info)
            for name, tensor in tensors.items():
                saved = _entry(metadata.state_dict_metadata, info, name)
                dtype = saved.properties.dtype
                if saved.size != tensor.size() or dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{info.name}: {name} is {dtype} {[*saved.size]}, "
                        f"expected {tensor.dtype} {[*tensor.size()]}"
                    )
            self._fill(info, Reader(self._files, info.name, metadata), dict(tensors))

    def load_tensors(
        self, info: CheckpointInfo, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Read tensors by name (None: all) into new CPU tensors; no collectives.

        Raises:
            CheckpointError: a name is not in the checkpoint, or it cannot be read.
        """
        with self._store_errors("read"):
            metadata = self._catalog.metadata(info)
            saved = metadata.state_dict_metadata
            tensors = {}
            for name in saved if names is None else names:
                entry = _entry(saved, info, name)
                tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            self._fill(info, Reader(self._files, info.name, metadata), tensors)
            return tensors

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints, and what unfinished saves left behind.

        The newest intact one always stays: it is looked for by reading, newest first; without
        one, nothing is removed. Markers go first, so that what is half removed does not count.

        Raises:
            CheckpointError: the store cannot be read or written.
        """
        _check_keep(keep)
        with self._store_errors("pruned"):
            for info in reversed(self._catalog.committed()):
                if next(self._catalog.faults(info), None) is None:
                    transaction.prune(self._files, self._catalog, keep, info)
                    return

    def _prune_after_save(self, keep: int, saved: CheckpointInfo, report: Report) -> None:
        # The save has counted since its marker; failing to tidy up must not undo that.
        try:
            transaction.prune(self._files, self._catalog, keep, saved)
        except Exception as error:
            report(f"older checkpoints at {self.url} could not be pruned: {reason(error)}")

    def _fill(self, info: CheckpointInfo, reader: Reader, tensors: dict[str, Tensor]) -> None:
        try:
            fill_tensors(tensors, reader)
        except CheckpointException as error:
            cause = _first_cause(error)
            raise CheckpointError(f"{info.name}: cannot be read ({reason(cause)})") from None

    @contextmanager
    def _store_errors(self, verb: str) -> Iterator[None]:
        """Turn errors of the storage library into a CheckpointError of one clean line."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoints at {self.url} cannot be {verb}: {reason(error)}"
            ) from None


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise DtrainError(f"checkpoint.keep: expected at least 1, got {keep}")


def _entry(saved: Mapping[str, Any], info: CheckpointInfo, name: str) -> TensorStorageMetadata:
    entry = saved.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{info.name}: no tensor {name} in it")
    return entry


def _first_cause(error: CheckpointException) -> BaseException:
    """The failure of the lowest rank; one that is no Exception (an interrupt) goes on as it is."""
    for cause, _ in error.failures.values():
        if not isinstance(cause, Exception):
            raise cause
    return error.failures[min(error.failures)][0]
