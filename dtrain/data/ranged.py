"""Remote files read by ranges into a sparse local copy, shared by the processes of a machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.data.location import unreadable
from dtrain.errors import DtrainError

BLOCK_BYTES = 1 << 20
_BLOCKS_AT_ONCE = 8
FETCH_BYTES = 2 * _BLOCKS_AT_ONCE * BLOCK_BYTES
"""Memory that one fetch may take: what was received, and the network library's copy of it."""

Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class RangedArray:
    """An array of which only the rows that were required must be present.

    ``data``: memory-mapped array [rows, ...]. Call ``require`` before reading rows of it.
    """

    data: NDArray[Any]
    fetch: Callable[[Int64Array, Int64Array], None] | None = None
    header_bytes: int = 0

    def require(self, starts: Int64Array, stops: Int64Array) -> None:
        """Make rows ``starts[i] .. stops[i] - 1`` readable; both int64 [n]."""
        if self.fetch is None or len(starts) == 0:
            return
        row_bytes = self.data.dtype.itemsize * int(np.prod(self.data.shape[1:], dtype=np.int64))
        self.fetch(starts * row_bytes + self.header_bytes, stops * row_bytes + self.header_bytes)


class CachedFile:
    """A local copy of a remote file that is filled block by block on demand.

    The copy is a sparse file of the full size, so that it can be memory-mapped once; a second file
    has one byte a block that says whether the block is there. A block's byte is set only after its
    data is on the disk, and two processes that fetch the same block write the same bytes, so
    no lock is needed and a killed process leaves at worst a block to fetch again.
    """

    def __init__(self, fs: Any, remote_path: str, size_bytes: int, local_path: Path) -> None:
        self.fs, self.remote_path, self.size_bytes = fs, remote_path, size_bytes
        self.path = local_path
        num_blocks = max(1, -(-size_bytes // BLOCK_BYTES))
        present = local_path.with_suffix(local_path.suffix + ".blocks")
        try:
            local_path.parent.mkdir(parents=True, exist_ok=True)
            for path, size in ((local_path, size_bytes), (present, num_blocks)):
                with open(path, "ab") as file:
                    if file.tell() < size:
                        file.truncate(size)
            self._present = np.memmap(present, dtype=np.uint8, mode="r+", shape=(num_blocks,))
        except OSError as error:
            raise DtrainError(
                f"data.cache_dir: {local_path.parent} cannot be written ({error.strerror}); "
                "choose another folder"
            ) from error

    def require_all(self) -> None:
        """Fetch the whole file."""
        self.require(np.array([0]), np.array([self.size_bytes]))

    def require(self, starts: Int64Array, stops: Int64Array) -> None:
        """Fetch the blocks that cover bytes ``starts[i] .. stops[i] - 1``; empty ranges are free.

        Raises:
            DtrainError: the remote file or the local disk failed.
        """
        some = stops > starts
        first, last = starts[some] // BLOCK_BYTES, (stops[some] - 1) // BLOCK_BYTES
        if len(first) == 0:
            return
        needed = [np.minimum(first + k, last) for k in range(int((last - first).max()) + 1)]
        blocks = np.unique(np.concatenate(needed))
        missing = blocks[self._present[blocks] == 0]
        for lo in range(0, len(missing), _BLOCKS_AT_ONCE):
            self._fetch(missing[lo : lo + _BLOCKS_AT_ONCE])

    def _fetch(self, blocks: Int64Array) -> None:
        starts = [int(b) * BLOCK_BYTES for b in blocks]
        stops = [min(start + BLOCK_BYTES, self.size_bytes) for start in starts]
        try:
            parts = self.fs.cat_ranges([self.remote_path] * len(starts), starts, stops)
        except Exception as error:
            unreadable(self.remote_path, error)
        for start, stop, part in zip(starts, stops, parts, strict=True):
            if len(part) != stop - start:
                raise DtrainError(
                    f"{self.remote_path}: bytes {start}..{stop - 1}: expected {stop - start} "
                    f"bytes, got {len(part)}; the store changed while it was read"
                )
        try:
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                for start, part in zip(starts, parts, strict=True):
                    _write_at(descriptor, part, start)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DtrainError(
                f"data.cache_dir: {self.path} cannot be written ({error.strerror})"
            ) from error
        self._present[blocks] = 1


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
