"""Checkpoints in one folder of any fsspec store: saved as a transaction, verified when read."""

from __future__ import annotations

import builtins
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dtrain.checkpoint import transaction
from dtrain.checkpoint.archives import Archives
from dtrain.checkpoint.catalog import Catalog
from dtrain.checkpoint.errors import CheckpointError, CheckpointGoneError
from dtrain.checkpoint.exchange import Alone, Exchange
from dtrain.checkpoint.files import Files
from dtrain.checkpoint.manifest import MARKER, CheckpointInfo, Manifest
from dtrain.checkpoint.parallel import yield_to_training
from dtrain.checkpoint.pending import PendingSave
from dtrain.checkpoint.retention import Retention
from dtrain.checkpoint.retry import Retry
from dtrain.checkpoint.saving import SaveJob
from dtrain.checkpoint.staging import Staging, on_cpu
from dtrain.checkpoint.storage import fill_tensors
from dtrain.checkpoint.urls import reason
from dtrain.errors import DtrainError

Report = Callable[[str], None]
T = TypeVar("T")

# The background thread computes checksums: it takes what training leaves of the processors. Much
# lower still, and a thread that is set aside while it holds the interpreter's lock keeps training
# waiting for longer than it ever saves it.
_NICE = 10
_POLL_S = 0.02
# A store that is pruned faster than it can be read is not read for ever.
_LOOKS = 20

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
        on_point: called with a name at each step of a save or prune (``stage.begin``,
            ``stage.tensor``, ``stage.end``, ``save.begin``, ``data.write``, ``file.open``,
            ``file.flush``, ``file.closed``, ``data.written``, ``metadata.write``,
            ``manifest.write``, ``rename``, ``marker.write``, ``committed``, ``remove.marker``,
            ``remove.files``), for fault injection.
        retry: how transient errors of the store are met.

    Raises:
        DtrainError: the URL's protocol is unknown or its library is not installed. Nothing is
            connected to before a method is called.
    """

    def __init__(
        self,
        url: str,
        on_point: Callable[[str], None] | None = None,
        retry: Retry | None = None,
    ) -> None:
        self._files = Files(url, on_point, retry)
        self._catalog = Catalog(self._files)
        self._staging = Staging()
        self._archives = Archives()
        self._last: PendingSave | None = None
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

    def unfinished(self) -> builtins.list[str]:
        """Folders of saves that are under way or were broken off, oldest first.

        Raises:
            CheckpointError: the store cannot be read.
        """
        with self._store_errors("listed"):
            return [folder for _, folder, committed in self._catalog.scan() if not committed]

    def newest(
        self,
        identity: Mapping[str, Any] | None = None,
        on_skip: Report | None = None,
        *,
        strict: bool = False,
    ) -> CheckpointInfo | None:
        """The newest checkpoint that is committed, intact and of this run; None if there is none.

        Sizes and checksums of all files are verified, so this reads the whole checkpoint: one
        worker calls it and tells the others. One that is pruned meanwhile is no fault: the
        search begins anew.

        Args:
            identity: what decides the run's result; compared with ``progress["identity"]``.
            on_skip: called with a message that names file and fault for each newer checkpoint
                that is passed over; the log by default.
            strict: raise instead of passing over a committed checkpoint with a fault. Unfinished
                saves are passed over all the same: kills leave them behind.

        Raises:
            CheckpointError: the store cannot be read; or ``strict`` and the newest committed
                checkpoint has a fault, which the message names.
        """
        report = on_skip or _log.warning
        with self._store_errors("read"):
            for _ in range(_LOOKS):
                try:
                    return self._look_for_newest(identity, report, strict)
                except CheckpointGoneError:
                    continue
        raise CheckpointError(f"checkpoints at {self.url} are pruned faster than they can be read")

    def _look_for_newest(
        self, identity: Mapping[str, Any] | None, report: Report, strict: bool
    ) -> CheckpointInfo | None:
        scan = self._catalog.scan()
        for info, folder, committed in reversed(scan):
            if not committed:
                report(f"checkpoint skipped: {folder}: not committed ({MARKER} is missing)")
                continue
            fault = next(self._catalog.faults(info, identity), None)
            if fault is None:
                return info
            if not self._catalog.is_committed(info):
                raise CheckpointGoneError(f"{info.name}: pruned meanwhile")
            if strict:
                raise CheckpointError(
                    f"checkpoints at {self.url}: {fault}; strict restoring takes no older one"
                )
            report(f"checkpoint skipped: {fault}")
        if {*self._catalog.committed()} - {info for info, _, committed in scan if committed}:
            raise CheckpointGoneError("a checkpoint was committed meanwhile")
        return None

    def read_newest(
        self,
        read: Callable[[CheckpointInfo], T],
        identity: Mapping[str, Any] | None = None,
        on_skip: Report | None = None,
        *,
        strict: bool = False,
    ) -> tuple[CheckpointInfo, T] | None:
        """The newest checkpoint and what ``read`` makes of it; None if there is none.

        For readers beside a run that goes on saving: where the checkpoint is pruned while it is
        read, the newest of then is taken, and ``read`` is called once more.

        Raises:
            CheckpointError: as :meth:`newest`, and what ``read`` raises.
        """
        for _ in range(_LOOKS):
            info = self.newest(identity, on_skip, strict=strict)
            if info is None:
                return None
            try:
                return info, read(info)
            except CheckpointGoneError:
                continue
        raise CheckpointError(f"checkpoints at {self.url} are pruned faster than they can be read")

    def verify(
        self, info: CheckpointInfo, identity: Mapping[str, Any] | None = None
    ) -> builtins.list[str]:
        """Every fault of a checkpoint, each as ``folder/file: fault``; none if it is intact.

        Raises:
            CheckpointGoneError: it was pruned meanwhile.
            CheckpointError: the store cannot be read.
        """
        with self._store_errors("read"):
            self._files.refresh()
            faults = [*self._catalog.faults(info, identity)]
            if faults and not self._catalog.is_committed(info):
                raise CheckpointGoneError(f"{info.name}: not committed, or pruned meanwhile")
            return faults

    def progress(self, info: CheckpointInfo) -> dict[str, Any]:
        """The progress that was saved with a checkpoint.

        Raises:
            CheckpointGoneError: it was pruned meanwhile.
            CheckpointError: the manifest is missing or damaged.
        """
        return self.manifest(info).progress

    def manifest(self, info: CheckpointInfo) -> Manifest:
        """What a checkpoint's manifest says; raises as :meth:`progress`."""
        with self._reading(info):
            return self._catalog.manifest(info)

    def names(self, info: CheckpointInfo) -> builtins.list[str]:
        """The names of a checkpoint's tensors, sorted; raises as :meth:`load_tensors`."""
        return [*self.forms(info)]

    def forms(self, info: CheckpointInfo) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor, by sorted name; raises as :meth:`load_tensors`."""
        with self._reading(info):
            saved = self._catalog.metadata(info).state_dict_metadata
            entries = {name: _entry(saved, info, name) for name in sorted(saved)}
            return {name: (e.properties.dtype, tuple(e.size)) for name, e in entries.items()}

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        progress: Mapping[str, Any],
        *,
        exchange: Exchange | None = None,
        retention: Retention | None = None,
        on_warning: Report | None = None,
    ) -> CheckpointInfo:
        """Save and commit a step before returning; a collective call of the exchange's workers.

        Each worker gives the tensors it holds. A name that several hold must have the same value
        there; one of them writes it. The worker of rank 0 commits, prunes, and is the one whose
        ``progress`` is saved. A step that was committed before is saved beside the earlier
        checkpoint, which goes once the new one is committed. An unfinished :meth:`save_async` is
        waited for first.

        Args:
            step: the committed step, at least 0.
            tensors: by stage-independent names; of any dtype, shape and device.
            progress: plain JSON values, without secrets; ``identity`` is what :meth:`newest`
                compares.
            exchange: the group of workers; None to save from this process alone.
            retention: which older checkpoints stay; the newest 3 by default.
            on_warning: called where the checkpoint is committed but older ones could not be
                pruned; the log by default.

        Raises:
            CheckpointError: on every worker alike: some worker could not write; nothing is
                committed and training may go on.
            PeerLostError: the group broke.
        """
        group = exchange or Alone()
        self._wait_for_last(group)
        job = SaveJob(self._files, self._catalog, group, step, progress, self._archives)
        held = _or_error(lambda: on_cpu(tensors))
        info = job.run(held)
        self._tidy(info, group, retention or Retention(), on_warning or _log.warning)
        return info

    def save_async(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        progress: Mapping[str, Any],
        *,
        exchange: Exchange | None = None,
        retention: Retention | None = None,
        on_warning: Report | None = None,
    ) -> PendingSave:
        """Begin to save a step, as :meth:`save` does, and return once the tensors are copied.

        The caller pays for the copy into CPU buffers, which are kept for the next save; the rest
        runs in one background thread, ``on_warning`` included. The tensors may change as soon as
        this returns, and the checkpoint has their values of now. A save that is still under way
        is waited for first, so that saves are committed in order and one set of buffers is
        enough. ``progress`` is read in the background: do not change it.

        Raises:
            PeerLostError: the group broke while an unfinished save was waited for. All other
                errors, those of copying too, are the result's, on every worker alike.
        """
        group = exchange or Alone()
        pending = PendingSave(step)
        began = time.perf_counter()
        self._wait_for_last(group)
        pending.waited_s = time.perf_counter() - began
        job = SaveJob(self._files, self._catalog, group, step, progress, self._archives)
        rule, report = retention or Retention(), on_warning or _log.warning
        self._files.at("stage.begin")
        held = _or_error(lambda: self._staging.copy(tensors, self._files.at))
        self._files.at("stage.end")

        def work() -> None:
            try:
                yield_to_training(_NICE)
                info = job.run(held)
                pending.committed_s = time.perf_counter() - began
                self._tidy(info, group, rule, report)
                pending.committed(info)
            except BaseException as error:  # whoever asks for the result gets it
                pending.failed(error)
            finally:
                # Its error's frames hold the group, which must not outlive its generation.
                if self._last is pending:
                    self._last = None

        self._last = pending
        # A thread that the interpreter does not wait for: a store that hangs must not keep a
        # worker from leaving.
        threading.Thread(target=work, name="dtrain-checkpoint", daemon=True).start()
        pending.stall_s = time.perf_counter() - began
        return pending

    def _tidy(
        self, info: CheckpointInfo, group: Exchange, retention: Retention, report: Report
    ) -> None:
        """Remove older checkpoints; the save has counted since its marker, come what may."""
        if group.rank == 0:
            try:
                transaction.prune(self._files, self._catalog, retention, info)
            except Exception as error:
                report(f"older checkpoints at {self.url} could not be pruned: {reason(error)}")

    def _wait_for_last(self, group: Exchange) -> None:
        """Wait for an unfinished save, whose outcome is for the one who began it."""
        last = self._last
        while last is not None and not last.wait(_POLL_S):
            group.check()

    def load_into(self, info: CheckpointInfo, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place from a checkpoint, reading only these; no collectives.

        ``tensors`` have the saved shapes and dtypes, on any device and of any strides.

        Raises:
            CheckpointError: a name is not in the checkpoint, a shape or dtype differs (nothing is
                filled then), or the checkpoint cannot be read.
        """
        with self._reading(info):
            metadata = self._catalog.metadata(info)
            for name, tensor in tensors.items():
                saved = _entry(metadata.state_dict_metadata, info, name)
                dtype = saved.properties.dtype
                if saved.size != tensor.size() or dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{info.name}: {name} is {dtype} {[*saved.size]}, "
                        f"expected {tensor.dtype} {[*tensor.size()]}"
                    )
            self._fill(info, metadata, dict(tensors))

    def load_tensors(
        self, info: CheckpointInfo, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Read tensors by name (None: all) into new CPU tensors; no collectives.

        Raises:
            CheckpointError: a name is not in the checkpoint, or it cannot be read.
        """
        with self._reading(info):
            metadata = self._catalog.metadata(info)
            saved = metadata.state_dict_metadata
            tensors = {}
            for name in saved if names is None else names:
                entry = _entry(saved, info, name)
                tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            self._fill(info, metadata, tensors)
            return tensors

    def prune(self, retention: Retention, *, dry_run: bool = False) -> builtins.list[str]:
        """Remove all but the checkpoints of ``retention``, and what unfinished saves left behind.

        The newest intact one always stays: it is looked for by reading, newest first; without
        one, nothing is removed. Markers go first, so that what is half removed does not count.
        A save under way is newer than all that is removed.

        Returns:
            The names of the folders that went, or that would go with ``dry_run``; oldest first.

        Raises:
            CheckpointError: the store cannot be read or written.
        """
        with self._store_errors("pruned"):
            for info in reversed(self._catalog.committed()):
                if next(self._catalog.faults(info), None) is None:
                    return transaction.prune(
                        self._files, self._catalog, retention, info, dry_run=dry_run
                    )
        return []

    def _fill(self, info: CheckpointInfo, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
        try:
            fill_tensors(tensors, self._files, info.name, metadata)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{info.name}: cannot be read ({reason(error)})") from None

    @contextmanager
    def _reading(self, info: CheckpointInfo) -> Iterator[None]:
        """Tell a checkpoint that was pruned while it was read from one that is damaged."""
        try:
            with self._store_errors("read"):
                yield
        except CheckpointError as error:
            if isinstance(error, CheckpointGoneError) or self._still_there(info):
                raise
            raise CheckpointGoneError(f"{info.name}: not committed, or pruned meanwhile") from error

    def _still_there(self, info: CheckpointInfo) -> bool:
        with self._store_errors("read"):
            return self._catalog.is_committed(info)

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


def _or_error(work: Callable[[], T]) -> T | Exception:
    """What ``work`` returns or raises: the other workers of a save have to hear of either."""
    try:
        return work()
    except Exception as error:
        return error


def _entry(saved: Mapping[str, Any], info: CheckpointInfo, name: str) -> TensorStorageMetadata:
    entry = saved.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointError(f"{info.name}: no tensor {name} in it")
    return entry
