"""torch.distributed.checkpoint on durable files: its writer, reader and planners as dtrain uses
them."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import (
    FileSystem,
    FsspecReader,
    FsspecWriter,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.files import FileDigest, Files, digest_of
from dtrain.checkpoint.manifest import METADATA
from dtrain.checkpoint.urls import reason


@dataclass
class _Target(_StoragePrefix):
    """Where a worker writes: chosen by the coordinator, sent to all with DCP's plan."""

    folder: str = ""


@dataclass(frozen=True)
class _WrittenFile:
    """A file that a worker wrote; travels to the coordinator among DCP's write results."""

    name: str
    digest: FileDigest


class DurableFileSystem(FileSystem):
    """DCP's view of :class:`Files`; remembers the digest of each file written through it.

    The stock one syncs without flushing first, and calls the global ``sync`` for stores that
    have no descriptor.
    """

    def __init__(self, files: Files) -> None:
        super().__init__()
        self.fs = files.fs
        self.written: dict[str, FileDigest] = {}
        self._files = files

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file: hashed, flushed and synced when it is written."""
        full = os.fspath(path)
        if "w" not in mode:
            with self._files.fs.open(full, mode) as raw:
                yield raw
            return
        with self._files.create(full) as stream:
            yield cast(io.IOBase, stream)
        self.written[full.rsplit("/", 1)[-1]] = stream.digest()


class Writer(FsspecWriter):
    """Writes one data file for each worker that has something to write.

    The coordinator picks the folder once all workers are there (``choose``), and commits once
    all have written (``commit``); both run inside DCP's own two rounds, so a save costs no
    further message. Errors become :class:`CheckpointError` with the worker's name: the original
    ones of storage libraries do not all survive the pickling between workers, and then hang the
    others.

    Args:
        files: the store.
        worker: how messages name this worker.
        choose: called on the coordinator; returns the folder to write to, empty.
        commit: called on the coordinator with the folder and the digests of all its files.
        token: makes the names of the files of this save its own, so that a writer left over
            from an older save of the step cannot write into them.
    """

    def __init__(
        self,
        files: Files,
        worker: str,
        choose: Callable[[], str],
        commit: Callable[[str, dict[str, FileDigest]], None],
        token: str,
    ) -> None:
        super().__init__(files.root, sync_files=False)
        self._durable = DurableFileSystem(files)
        self.fs = self._durable  # type: ignore[assignment]
        self.folder = ""
        self._files = files
        self._worker = worker
        self._choose = choose
        self._commit = commit
        self._token = token

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is touched before the coordinator has chosen the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: choose the folder and tell each worker its file's name."""
        with self._plain_errors():
            folder = self._choose()
        return [
            replace(plan, storage_data=_Target(f"__{i}_{self._token}_", folder))
            for i, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this worker's tensors; a worker with none writes no file."""
        self.folder = plan.storage_data.folder
        self.path = self._files.path(self.folder)
        with self._plain_errors():
            results: list[WriteResult] = []
            if plan.items:
                self._files.at("data.write")
                self._files.make_folder(self.folder)
                results = super().write_data(plan, planner).wait()
                self._files.at("data.written")
        for name, digest in self._durable.written.items():
            results.append(
                WriteResult(MetadataIndex(name), digest.size, _WrittenFile(name, digest))
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write ``.metadata``, check that all files are there, commit."""
        digests: dict[str, FileDigest] = {}
        stored = {}
        for result in (r for results_of_worker in results for r in results_of_worker):
            if isinstance(result.storage_data, _WrittenFile):
                digests[result.storage_data.name] = result.storage_data.digest
            else:
                stored[result.index] = result.storage_data
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        data = pickle.dumps(metadata)
        with self._plain_errors():
            self._files.at("metadata.write")
            self._files.make_folder(self.folder)
            self._files.write(f"{self.folder}/{METADATA}", data)
            digests[METADATA] = digest_of(data)
            self._commit(self.folder, digests)

    def storage_meta(self) -> StorageMeta:
        """Without the URL, which may hold credentials."""
        return StorageMeta(checkpoint_id=self.folder, save_id=self.save_id)

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{self._worker}: {error}") from None
        except Exception as error:
            raise CheckpointError(f"{self._worker}: {reason(error)}") from None


class SaveTensors(DefaultSavePlanner):
    """Plans a flat dict of tensors; a name that several workers hold is written by one of them,
    each taking an even share of the bytes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As DCP's, after a check that holders agree on what a tensor is.

        Raises:
            CheckpointError: two workers hold one name with different shapes or dtypes.
        """
        seen: dict[str, tuple[Any, Any]] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            if data is None:
                raise CheckpointError(f"{item.index.fqn}: expected a tensor")
            form = (data.properties.dtype, tuple(data.size))
            if seen.setdefault(item.index.fqn, form) != form:
                raise CheckpointError(
                    f"{item.index.fqn}: workers disagree on it: {seen[item.index.fqn]} and {form}"
                )
        return super().create_global_plan(all_plans)


class Reader(FsspecReader):
    """Reads from a checkpoint whose metadata was read and checked before."""

    def __init__(self, files: Files, folder: str, metadata: Metadata) -> None:
        super().__init__(files.root)
        self.fs = DurableFileSystem(files)  # type: ignore[assignment]
        self.path = files.path(folder)
        self._metadata = metadata

    # The keyword arguments are not called kwargs: by that name DCP decides to try a second file.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The metadata given; the stock reader would unpickle the file without limits."""
        return self._metadata


class LoadTensors(DefaultLoadPlanner):
    """Fills a flat dict of tensors; anything but tensors is refused."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: DCP would unpickle it without limits.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{read_item.dest_index.fqn}: expected a tensor, got an object")


def save_tensors(
    tensors: dict[str, Tensor],
    writer: Writer,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> None:
    """DCP's save of a flat dict of tensors.

    Raises:
        CheckpointException: of DCP (a BaseException), on every worker, with each worker's failure.
        RuntimeError: the process group broke.
    """
    if not no_dist:
        save(tensors, storage_writer=writer, planner=SaveTensors(), process_group=process_group)
        return
    with _no_dist_is_meant():
        save(tensors, storage_writer=writer, planner=SaveTensors(), no_dist=True)


def fill_tensors(tensors: dict[str, Tensor], reader: Reader) -> None:
    """DCP's load into the given tensors, without collectives.

    Raises:
        CheckpointException: of DCP (a BaseException).
    """
    with _no_dist_is_meant():
        load(tensors, storage_reader=reader, planner=LoadTensors(), no_dist=True)


@contextmanager
def _no_dist_is_meant() -> Iterator[None]:
    """DCP warns each time that it works without a process group; here that is the purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
