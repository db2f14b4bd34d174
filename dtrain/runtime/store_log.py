"""The job's store as one totally ordered log, read and written off the main thread.

Every entry has a number, taken by an atomic counter and filled by compare-and-set, so that all
workers read the same entries in the same order; a number whose writer died is voided by a reader
in the same way. What has to be serialised (the first proposal of a generation stands) follows from
the order. The log outlives attempts of the job: numbers only grow.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dtrain.errors import StoreLostError

T = TypeVar("T")
Entry = dict[str, Any]

_VOID = "void"
_VOID_AFTER_S = 0.5


class StoreLog:
    """One worker's client of the log.

    All calls run on a thread of their own with a deadline, because a stopped store host blocks a
    call past any time-out of the store itself.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        hosts_it: bool,
        timeout_s: float,
        call_s: float,
    ) -> None:
        """Connect to the job's store; ``hosts_it``: this process serves it.

        ``timeout_s``: longest wait for it to come up; ``call_s``: longest wait for one answer.

        Raises:
            StoreLostError: it cannot be reached.
        """
        self._where = f"{host}:{port}"
        self._call_s = call_s
        self._next = 1
        self._hole_since_s: float | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._broken: str | None = None
        threading.Thread(target=self._serve, name="dtrain-store", daemon=True).start()
        timeout = datetime.timedelta(seconds=timeout_s)

        def connect() -> Any:
            return TCPStore(host, port, is_master=hosts_it, wait_for_workers=False, timeout=timeout)

        self._tcp = self._call(connect, timeout_s + call_s)
        self._store = PrefixStore("dtrain", self._tcp)

    def group_store(self, generation: int) -> Store:
        """A store for the groups of a generation, with a connection of its own."""
        # Groups wait inside their store calls, which would hold up the log's.
        own = self._call(self._tcp.clone, self._call_s)
        return PrefixStore(f"groups/{generation}", PrefixStore("dtrain", own))

    def append(self, entry: Entry) -> int:
        """Append an entry; its number.

        Raises:
            StoreLostError: the store does not answer.
        """
        text = json.dumps(entry)

        def write() -> int:
            while True:
                number = int(self._store.add("log", 1))
                if self._store.compare_set(f"log/{number}", "", text).decode() == text:
                    return number

        return self._call(write, self._call_s)

    def read(self) -> list[Entry]:
        """The entries since the last call, in order.

        Raises:
            StoreLostError: the store does not answer.
        """
        return self._call(self._read, self._call_s)

    def _read(self) -> list[Entry]:
        out: list[Entry] = []
        last = int(self._store.add("log", 0))
        while self._next <= last:
            key = f"log/{self._next}"
            if not self._store.check([key]):
                # Its writer is between two calls, or dead between them.
                now = time.monotonic()
                self._hole_since_s = self._hole_since_s or now
                if now - self._hole_since_s < _VOID_AFTER_S:
                    break
                self._store.compare_set(key, "", _VOID)
            self._hole_since_s = None
            text = self._store.get(key).decode()
            self._next += 1
            if text != _VOID:
                out.append(json.loads(text))
        return out

    def _call(self, function: Callable[[], T], timeout_s: float) -> T:
        if self._broken is not None:
            raise StoreLostError(self._broken)
        future: Future[T] = Future()
        self._jobs.put((function, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            self._broken = f"the job's store at {self._where} did not answer in {timeout_s:g} s"
        except (RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._broken = f"the job's store at {self._where} is not reachable ({first})"
        raise StoreLostError(self._broken)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, future = job
            try:
                future.set_result(function())
            except Exception as error:
                # Raised again in the thread that asked.
                future.set_exception(error)

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
