"""Durable files on an fsspec store: what is written is flushed, synced and hashed."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.utils import _create_file_view

from dtrain.checkpoint.retry import Retry
from dtrain.checkpoint.urls import open_filesystem, redact

# Small enough that what was just copied is still in the processor's cache when it is hashed: with
# pieces of a few MiB the two together take half as long again. Large enough that hashing and
# copying, which free the interpreter, are nearly all of the work.
_PIECE_BYTES = 256 << 10
# Of a store that is asked for each.
_BLOCK_BYTES = 4 << 20
# A file is handed to the disk in such portions while it is written, not all at once at its end.
_BEHIND_BYTES = 16 << 20
# Writes below this size are gathered up to a piece.
_GATHERED_BYTES = 64 << 10

# On these, folders are only prefixes of names, and makedirs would try to create the bucket.
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"})


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: int
    sha256: str


def digest_of(data: bytes) -> FileDigest:
    """The digest of a file with this content."""
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


class HashingStream:
    """A write-only stream that hashes and counts what passes.

    Small tensors, and what stands around large ones, are gathered, so that hashing and writing,
    which let other threads run, are few calls. Flushing is left to the end.
    """

    def __init__(self, raw: Any, behind: Callable[[], None] | None = None) -> None:
        """``behind``: called now and then, to begin to write to the disk what was taken so far."""
        self._raw = raw
        self._behind = behind
        self._waiting_bytes = 0
        self._sha = hashlib.sha256()
        self._size = 0
        self._gathered = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take all of ``data``; a store that takes less raises OSError, now or at a later call."""
        size = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if size < _GATHERED_BYTES:
            self._gathered += data
            if len(self._gathered) >= _PIECE_BYTES:
                self.push()
        else:
            self.push()
            view = memoryview(data).cast("B")
            for begin in range(0, size, _PIECE_BYTES):
                self._put(view[begin : begin + _PIECE_BYTES])
        self._size += size
        return size

    def push(self) -> None:
        """Hand on what was gathered."""
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            self._put(memoryview(gathered))

    def _put(self, data: memoryview) -> None:
        written = self._raw.write(data)
        if written is not None and written != data.nbytes:
            raise OSError(f"short write: {written} of {data.nbytes} bytes")
        if self._behind is not None:
            self._waiting_bytes += data.nbytes
            if self._waiting_bytes >= _BEHIND_BYTES:
                self._waiting_bytes = 0
                self._behind()
        self._sha.update(data)

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._size

    def digest(self) -> FileDigest:
        """The digest of what was written, after the last :meth:`push`."""
        return FileDigest(self._size, self._sha.hexdigest())


class Files:
    """The files under one URL. Paths are relative to it, with ``/`` between folders.

    Calls that a transient error of the store broke are made again, as ``retry`` says; the last
    error comes through as it is. ``on_point`` is called before each effect with a name such as
    ``file.flush``; tests and fault injection stop the process there.
    """

    def __init__(
        self,
        url: str,
        on_point: Callable[[str], None] | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.fs, self.root = open_filesystem(url)
        self.retry = retry or Retry()
        self.shown = redact(url)
        self.local = isinstance(self.fs, LocalFileSystem)
        protocols = self.fs.protocol
        names = {protocols} if isinstance(protocols, str) else set(protocols)
        self._has_folders = not names & _OBJECT_STORES
        self._on_point = on_point

    def at(self, point: str) -> None:
        """Pass a named point."""
        if self._on_point is not None:
            self._on_point(point)

    def path(self, name: str = "") -> str:
        """The full path in the file system."""
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def refresh(self) -> None:
        """Forget cached listings: other workers write to the same store."""
        self.fs.invalidate_cache()

    def make_folder(self, name: str = "") -> None:
        """Create a folder and its parents, where the store has folders."""
        if self._has_folders:
            self.retry.run(lambda: self.fs.makedirs(self.path(name), exist_ok=True))
        if self.local:
            self.sync_folder("" if name else "..")

    def folders(self) -> list[str]:
        """Names of the folders under the root; none where the root does not exist."""
        return [
            str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            for entry in self._entries("")
            if entry["type"] == "directory"
        ]

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder; none where it does not exist."""
        entries = self._entries(folder)
        return [str(e["name"]).rsplit("/", 1)[-1] for e in entries if e["type"] == "file"]

    def _entries(self, folder: str) -> list[dict[str, Any]]:
        try:
            return list(self.retry.run(lambda: self.fs.ls(self.path(folder), detail=True)))
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        """Size in bytes, or None where there is no such file.

        Any other failure is raised: ``fsspec``'s ``exists`` says False on a network error too,
        and pruning by that would delete a good checkpoint.
        """
        try:
            return int(self.retry.run(lambda: self.fs.info(self.path(name)))["size"])
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        """The whole content."""
        return bytes(self.retry.run(lambda: self.fs.cat_file(self.path(name))))

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """The bytes [begin, end) of a file; fewer where it ends before."""
        return bytes(
            self.retry.run(lambda: self.fs.cat_file(self.path(name), start=begin, end=end))
        )

    @contextmanager
    def open_range(self, name: str, begin: int, end: int) -> Iterator[Any]:
        """A seekable stream of the bytes [begin, end) of a file; locally it is not read ahead."""
        if self.local:
            with open(self.path(name), "rb") as stream:
                yield _create_file_view(stream, begin, end - begin)
        else:
            yield io.BytesIO(self.read_range(name, begin, end))

    def digest(self, name: str) -> FileDigest:
        """Read a file in blocks and hash it."""
        sha, size = hashlib.sha256(), 0
        for block in self._blocks(name):
            sha.update(block)
            size += len(block)
        return FileDigest(size, sha.hexdigest())

    def _blocks(self, name: str) -> Iterator[memoryview]:
        if not self.local:
            size = int(self.retry.run(lambda: self.fs.info(self.path(name)))["size"])
            for begin in range(0, size, _BLOCK_BYTES):
                end = min(begin + _BLOCK_BYTES, size)
                yield memoryview(self.read_range(name, begin, end))
            return
        buffer = memoryview(bytearray(_PIECE_BYTES))
        with open(self.path(name), "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                yield buffer[:count]

    @contextmanager
    def create(self, path: str) -> Iterator[HashingStream]:
        """Write a file, given by its full path, durably; it is removed when the writing fails."""
        self.at("file.open")
        raw = self.fs.open(path, "wb")
        behind = partial(_write_behind, raw.fileno()) if self.local else None
        stream = HashingStream(raw, behind)
        try:
            yield stream
            stream.push()
            self.at("file.flush")
            raw.flush()
            if self.local:
                os.fsync(raw.fileno())
            raw.close()
        except BaseException:
            self._discard(raw, path)
            raise
        self.at("file.closed")

    def write(self, name: str, data: bytes) -> FileDigest:
        """Write a small file durably."""

        def attempt() -> FileDigest:
            with self.create(self.path(name)) as stream:
                stream.write(data)
            return stream.digest()

        return self.retry.run(attempt)

    def write_whole(self, name: str, data: bytes) -> None:
        """Write a small file durably, so that it is there with all its content or not at all.

        Object stores show a file only once it is complete; locally that takes a rename.
        """
        if not self.local:
            self.write(name, data)
            return
        self.write(f"{name}.part", data)
        self.rename(f"{name}.part", name)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or folder of the local store, atomically and durably."""
        os.rename(self.path(old), self.path(new))
        self.sync_folder(os.path.dirname(new))

    def sync_folder(self, name: str = "") -> None:
        """Make the entries of a local folder durable; other stores have nothing to sync."""
        if not self.local:
            return
        descriptor = os.open(self.path(name), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is fine."""
        try:
            self.retry.run(lambda: self.fs.rm_file(self.path(name)))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all it holds; one that is not there is fine."""
        self.refresh()
        try:
            self.retry.run(lambda: self.fs.rm(self.path(name), recursive=True))
        except FileNotFoundError:
            return

    def _discard(self, raw: Any, path: str) -> None:
        # The first error is on its way to the caller; a second one while tidying up would hide
        # it, and a file that stays behind is in no manifest and so counts for nothing.
        with suppress(Exception):
            raw.close()
        with suppress(Exception):
            self.fs.rm_file(path)


def _write_behind(descriptor: int) -> None:
    """Let the kernel begin to write what it has of a file, so that the sync at the end is short.

    Only a hint: on other systems than Linux, and where the call fails, the sync does it all.
    """
    if sys.platform == "linux":
        begin_only = 2  # SYNC_FILE_RANGE_WRITE of sync_file_range(2); 0 bytes: to the end.
        offset = ctypes.c_int64(0)
        ctypes.CDLL(None).sync_file_range(descriptor, offset, offset, begin_only)
