"""Compiled loops on the threads that torch uses in this process.

Rows are cut into ranges of about equal work and each row is computed by one thread alone, so the
number of threads never changes a result. A thread that is done with a range takes the next: one
that has to share its core with a sampler or with other work gets fewer. Loops release the
interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dtrain.kernels.results import empty as empty

SERIAL_WORK = 1 << 16
"""Elements below which handing work to another thread costs more than it saves."""
_RANGES = 4
"""For each thread, where there is work enough."""


def thread_count() -> int:
    """Threads that kernels may use: torch's number, which follows the run's setting."""
    return torch.get_num_threads()


def over_rows(indptr: Any, work_per_entry: int, loop: Callable[[int, int], None]) -> None:
    """Call ``loop(first, end)`` for row ranges that cover a pattern, in parallel.

    ``indptr``: int64 [num_rows + 1], by which the ranges are balanced: a row counts as its entries
    and one more. ``work_per_entry``: elements touched for each.
    """
    num_rows = len(indptr) - 1
    total = int(indptr[-1]) + num_rows
    parts = min(_parts(total * work_per_entry), num_rows)
    if parts <= 1:
        loop(0, num_rows)
        return
    bounds = [0, *(_row_of(indptr, total * i // parts) for i in range(1, parts)), num_rows]
    _run(bounds, loop)


def over_range(size: int, work_per_item: int, loop: Callable[[int, int], None]) -> None:
    """Call ``loop(first, end)`` for ranges that cover ``size`` items of equal work, in parallel."""
    parts = min(_parts(size * work_per_item), size)
    if parts <= 1:
        loop(0, size)
        return
    _run([size * i // parts for i in range(parts + 1)], loop)


def _parts(work: int) -> int:
    """How many ranges so many elements are worth."""
    threads = thread_count()
    if threads == 1 or work < SERIAL_WORK:
        return 1
    return threads * max(1, min(_RANGES, work // (threads * SERIAL_WORK)))


def _row_of(indptr: Any, work: int) -> int:
    """The first row before which there is at least ``work``."""
    low, high = 0, len(indptr) - 1
    while low < high:
        middle = (low + high) // 2
        if int(indptr[middle]) + middle < work:
            low = middle + 1
        else:
            high = middle
    return low


def _run(bounds: list[int], loop: Callable[[int, int], None]) -> None:
    ranges = list(itertools.pairwise(bounds))
    openmp = _openmp()
    if openmp is None:
        with ThreadPoolExecutor(min(thread_count(), len(ranges))) as pool:
            for future in [pool.submit(loop, first, end) for first, end in ranges]:
                future.result()
        return
    errors: list[BaseException] = []
    turns = iter(ranges)  # whose next is one step under the interpreter's lock

    def part(_: object) -> None:
        for first, end in turns:
            try:
                loop(first, end)
            except BaseException as error:
                # Nothing may be raised through OpenMP: handed to the caller instead.
                errors.append(error)

    openmp.GOMP_parallel(_PART(part), None, min(thread_count(), len(ranges)), 0)
    if errors:
        raise errors[0]


_PART = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _openmp() -> Any:
    """Torch's own OpenMP library, or None where torch has none that we know how to call.

    Its team waits actively for torch's next operator: threads of our own would have to share the
    cores with it, and took half as long again.
    """
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("libgomp*.so*")):
        library = ctypes.CDLL(str(path))
        library.GOMP_parallel.restype = None
        library.GOMP_parallel.argtypes = [_PART, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        return library
    return None
