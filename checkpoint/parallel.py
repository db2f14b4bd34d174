"""A few threads for one piece of work; none of them outlives it, and none keeps a process alive."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_parallel(tasks: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """Run all tasks in at most ``threads`` threads, the caller's among them; results in order.

    After a task has failed no further one begins, and the error of the first failed task in
    order is raised.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    numbers = iter(range(len(tasks)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(numbers, None)
            if number is None:
                return
            try:
                results[number] = tasks[number]()
            except BaseException as error:  # raised again below, in the caller's thread
                errors[number] = error

    # Not a ThreadPoolExecutor: the interpreter waits for its threads before it exits.
    others = [
        threading.Thread(target=work, name="dtrain-checkpoint-io", daemon=True)
        for _ in range(min(threads, len(tasks)) - 1)
    ]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(tasks))]


def yield_to_training(nice: int) -> None:
    """Let the calling thread, and threads that it starts, take the processor after others.

    On Linux a thread has a priority of its own, which is lowered by ``nice``; elsewhere nothing
    is done.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        current = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, current + nice))
