"""DCP's file format on durable files: writing a worker's share of a save, and reading by ranges."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan

from dtrain.checkpoint.archives import Archives
from dtrain.checkpoint.errors import CheckpointError
from dtrain.checkpoint.files import FileDigest, Files
from dtrain.checkpoint.parallel import in_parallel

# A second file, and with it a second thread, pays for a share of at least this size.
_BYTES_PER_FILE = 16 << 20
_FILES = 2
_READERS_LOCAL = min(4, os.cpu_count() or 1)
_READERS_REMOTE = 8
# Neighbouring tensors are fetched together up to these sizes: to save requests of a store, or,
# locally, calls for each of many small tensors.
_RANGE_BYTES_LOCAL = 1 << 20
_RANGE_BYTES_REMOTE = 16 << 20


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: ``length`` bytes from ``offset`` of a file of the checkpoint."""

    name: str
    file: str
    offset: int
    length: int


def write_share(
    files: Files,
    folder: str,
    prefix: str,
    tensors: Mapping[str, Tensor],
    plan: SavePlan,
    archives: Archives,
) -> tuple[list[Entry], dict[str, FileDigest]]:
    """Write what ``plan`` gives this worker; a worker with nothing to write makes no file.

    A large share goes to two files, written and hashed in two threads. Files that a transient
    error of the store broke are written anew.

    Args:
        files: the store.
        folder: where to, relative to the store.
        prefix: how the files' names begin; no other writer uses it.
        tensors: CPU tensors by name, which nobody changes meanwhile.
        plan: of DCP.
        archives: of this store.
    """
    mine = {item.index.fqn: tensors[item.index.fqn] for item in plan.items}
    if not mine:
        return [], {}
    files.make_folder(folder)
    archives.prepare(mine.values())
    shares = _split(mine)

    def write(number: int) -> tuple[list[Entry], dict[str, FileDigest]]:
        path = f"{folder}/{prefix}{number}.distcp"
        return files.retry.run(lambda: _write_file(files, path, shares[number], archives))

    parts = in_parallel([lambda n=n: write(n) for n in range(len(shares))], _FILES)  # type: ignore[misc]
    entries = [entry for part, _ in parts for entry in part]
    digests = {name: digest for _, part in parts for name, digest in part.items()}
    return entries, digests


def _split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors, or two halves of about the same size where they are large."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    count = max(1, min(_FILES, total // _BYTES_PER_FILE, len(tensors)))
    shares: list[dict[str, Tensor]] = [{} for _ in range(count)]
    filled = [0] * count
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        smallest = filled.index(min(filled))
        shares[smallest][name] = tensors[name]
        filled[smallest] += tensors[name].nbytes
    return shares


def _write_file(
    files: Files, path: str, tensors: Mapping[str, Tensor], archives: Archives
) -> tuple[list[Entry], dict[str, FileDigest]]:
    file = path.rsplit("/", 1)[-1]
    entries = []
    with files.create(files.path(path)) as stream:
        for name, tensor in tensors.items():
            offset = stream.tell()
            for piece in archives.pieces(tensor):
                stream.write(piece)
            entries.append(Entry(name, file, offset, stream.tell() - offset))
    return entries, {file: stream.digest()}


def dump_metadata(metadata: Metadata, entries: Sequence[Entry], folder: str) -> bytes:
    """DCP's ``.metadata`` of a save, without the store's URL, which may hold credentials.

    Raises:
        CheckpointError: a tensor of the plan was not written, or one was that is in no plan.
    """
    tensors = metadata.state_dict_metadata
    missing = sorted({*tensors} ^ {entry.name for entry in entries})
    if missing or len(entries) != len(tensors):
        raise CheckpointError(f"workers planned differently: {missing[:1]}")
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta(checkpoint_id=folder)
    metadata.storage_data = {
        MetadataIndex(entry.name, _origin(tensors[entry.name]), 0): _StorageInfo(
            entry.file, entry.offset, entry.length
        )
        for entry in entries
    }
    return pickle.dumps(metadata)


def _origin(form: Any) -> torch.Size:
    return torch.Size([0] * len(form.size))


class Reader:
    """Reads from a checkpoint whose metadata was read and checked before, in several threads.

    DCP's own readers read metadata by unpickling without limits.
    """

    def __init__(self, files: Files, folder: str, metadata: Metadata) -> None:
        self._where = metadata.storage_data
        self._files = files
        self._folder = folder

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Fetch the ranges that the plan needs, and no others."""
        ranges = self._ranges(plan.items)
        threads = _READERS_LOCAL if self._files.local else _READERS_REMOTE
        in_parallel([lambda r=r: self._read(r, planner) for r in ranges], threads)  # type: ignore[misc]

    def _ranges(self, items: Sequence[ReadItem]) -> list[list[ReadItem]]:
        """The items by file and offset; in one list those that one request fetches."""
        limit = _RANGE_BYTES_LOCAL if self._files.local else _RANGE_BYTES_REMOTE
        ranges: list[list[ReadItem]] = []
        begin, end, file = 0, 0, ""
        for item in sorted(items, key=self._place):
            name, offset, length = self._place(item)
            if name == file and offset == end and offset + length - begin <= limit:
                ranges[-1].append(item)
            else:
                ranges.append([item])
                begin, file = offset, name
            end = offset + length
        return ranges

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        where = self._where[item.storage_index]
        return where.relative_path, where.offset, where.length

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        file, begin, _ = self._place(items[0])
        end = sum(self._place(items[-1])[1:])
        name = f"{self._folder}/{file}"
        if len(items) == 1:
            with self._files.open_range(name, begin, end) as stream:
                _fill(items[0], stream, planner)
            return
        data = memoryview(self._files.read_range(name, begin, end))
        for item in items:
            _, offset, length = self._place(item)
            piece = data[offset - begin : offset - begin + length]
            _fill(item, io.BytesIO(piece), planner)


def _fill(item: ReadItem, stream: Any, planner: LoadPlanner) -> None:
    saved = cast(Tensor, torch.load(stream, map_location="cpu", weights_only=True))
    wanted = zip(item.storage_offsets, item.lengths, strict=True)
    piece = saved[tuple(slice(offset, offset + length) for offset, length in wanted)]
    target = planner.resolve_tensor(item).detach()
    if target.size() != piece.size():
        raise CheckpointError(
            f"{item.dest_index.fqn}: expected {[*target.size()]}, found {[*piece.size()]}"
        )
    target.copy_(piece)
    planner.commit_tensor(item, target)


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


def fill_tensors(tensors: dict[str, Tensor], files: Files, folder: str, metadata: Metadata) -> None:
    """Read into the given tensors as DCP's load does, without collectives.

    DCP's own ``load`` warns, through filters that all threads share, where it is alone.
    """
    planner = LoadTensors()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    Reader(files, folder, metadata).read(plan, planner)
