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

import numba
import numpy as np
import torch

SERIAL_WORK = 1 << 16
"""Elements below which handing work to another thread costs more than it saves."""
_RANGES = 4
"""For each thread, where there is work enough."""
_TURNS = 16
"""The same where the next range is one addition away."""


def thread_count() -> int:
    """Threads that kernels may use: torch's number, which follows the run's setting."""
    return torch.get_num_threads()


def over_rows(indptr: Any, work_per_entry: int, loop: Callable[[int, int], None]) -> None:
    """Call ``loop(first, end)`` for row ranges that cover a pattern, in parallel.

    ``indptr``: int32 or int64 [num_rows + 1], by which the ranges are balanced: a row counts as its
    entries and one more. ``work_per_entry``: elements touched for each.
    """
    num_rows = len(indptr) - 1
    total = int(indptr[-1]) + num_rows
    parts = min(_parts(total * work_per_entry), num_rows)
    if parts <= 1:
        loop(0, num_rows)
        return
    _run(balanced(indptr, total, parts).tolist(), loop)


def over_turns(bounds: Any, start: Any, loop: Any, arguments: Any) -> None:
    """Call ``loop(counter, bounds, *arguments)`` on threads that run compiled code alone.

    ``bounds``: int64 [ranges + 1], of ranges of rows. ``loop``: compiled, takes the ranges that the
    counter (int64 [1]) gives it, one after the other. ``start(team, threads, bounds, *arguments)``:
    compiled, calls ``loop`` with a new counter on so many threads of the team at that address.
    """
    threads = min(thread_count(), len(bounds) - 1)
    if threads > 1 and not team_address():
        counter = np.zeros(1, np.int64)
        with ThreadPoolExecutor(threads) as pool:
            runs = [pool.submit(loop, counter, bounds, *arguments) for _ in range(threads)]
            for run in runs:
                run.result()
        return
    start(team_address(), threads, bounds, *arguments)


def turns(work: int) -> int:
    """Into how many ranges to cut so many elements for :func:`over_turns`."""
    return _parts(work, _TURNS, SERIAL_WORK // 4)


def even_bounds(size: int, work_per_item: int) -> Any:
    """int64 [ranges + 1]: ``size`` items of equal work cut for :func:`over_turns`."""
    parts = turns(size * work_per_item)
    return np.arange(parts + 1) * size // parts


def over_range(size: int, work_per_item: int, loop: Callable[[int, int], None]) -> None:
    """Call ``loop(first, end)`` for ranges that cover ``size`` items of equal work, in parallel."""
    parts = min(_parts(size * work_per_item), size)
    if parts <= 1:
        loop(0, size)
        return
    _run([size * i // parts for i in range(parts + 1)], loop)


def _parts(work: int, most: int = _RANGES, least_work: int = SERIAL_WORK) -> int:
    """How many ranges so many elements are worth: ``most`` for each thread, of ``least_work``."""
    threads = thread_count()
    if threads == 1 or work < SERIAL_WORK:
        return 1
    return threads * max(1, min(most, work // (threads * least_work)))


@numba.njit(cache=True)
def balanced(indptr: Any, work: Any, parts: Any) -> Any:
    """Rows at which ranges of a pattern begin that have about ``work / parts`` each, and the end.

    A search in Python took as long as a small product: 8 ranges of 10,000 rows 30 microseconds.
    """
    num_rows = indptr.size - 1
    bounds = np.empty(parts + 1, np.int64)
    bounds[0], bounds[parts] = 0, num_rows
    for i in range(1, parts):
        low, high = 0, num_rows
        while low < high:
            middle = (low + high) // 2
            if indptr[middle] + middle < work * i // parts:
                low = middle + 1
            else:
                high = middle
        bounds[i] = low
    return bounds


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


@functools.cache
def team_address() -> int:
    """Where ``GOMP_parallel`` of torch's OpenMP library lies, 0 where there is none."""
    openmp = _openmp()
    return ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p).value or 0 if openmp else 0


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
