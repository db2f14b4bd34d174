"""Exchanges of a few workers: everybody gets what everybody gave, and nobody waits for the dead."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.mesh import MOST_BYTES, Directory, Mesh

WORKERS = [2, 5, 7]
HOST = "127.0.0.1"

T = TypeVar("T")


def at_once(action: Callable[[int], T]) -> dict[int, T]:
    """Each worker's action in a thread of its own."""
    with ThreadPoolExecutor(len(WORKERS)) as pool:
        return dict(zip(WORKERS, pool.map(action, WORKERS), strict=True))


@pytest.fixture
def meshes() -> Iterator[dict[int, Mesh]]:
    store = HashStore()
    made = at_once(lambda w: Mesh(w, WORKERS, HOST, store, 10.0))
    yield made
    for mesh in made.values():
        mesh.close()


def give(mesh: Mesh, payload: bytes, members: list[int], timeout_s: float = 10.0) -> list[bytes]:
    came = mesh.exchange(memoryview(payload), members, FaultFlag(), timeout_s)
    return [bytes(part) for part in came]


def test_all_get_what_each_gave_of_any_size_one_exchange_after_the_other(
    meshes: dict[int, Mesh],
) -> None:
    rounds = [
        {w: os.urandom(size) for w, size in zip(WORKERS, sizes, strict=True)}
        for sizes in [(8, 8, 8), (0, 1, 100_000), (MOST_BYTES, MOST_BYTES, MOST_BYTES), (3, 0, 0)]
    ]

    def all_rounds(w: int) -> list[list[bytes]]:
        # A worker that is early is at the next exchange while others are in this one.
        return [give(meshes[w], given[w], WORKERS) for given in rounds]

    for found in at_once(all_rounds).values():
        assert found == [list(given.values()) for given in rounds]


def test_some_exchange_while_others_do_not(meshes: dict[int, Mesh]) -> None:
    def some(w: int) -> list[list[bytes]]:
        found = []
        for members in ([2, 5], [5, 7], WORKERS):
            if w in members:
                found.append(give(meshes[w], b"%d" % w, members))
        return found

    found = at_once(some)
    assert found[2] == [[b"2", b"5"], [b"2", b"5", b"7"]]
    assert found[5] == [[b"2", b"5"], [b"5", b"7"], [b"2", b"5", b"7"]]
    assert found[7] == [[b"5", b"7"], [b"2", b"5", b"7"]]


def test_a_fault_ends_the_wait_for_a_silent_peer_at_once(meshes: dict[int, Mesh]) -> None:
    fault = FaultFlag()
    threading.Timer(0.1, lambda: fault.set("worker 7 is silent")).start()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="worker 7 is silent"):
        meshes[2].exchange(memoryview(b"x"), WORKERS, fault, 60.0)
    assert time.monotonic() - began < 5.0
    with pytest.raises(PeerLostError, match="worker 7 is silent"):
        meshes[2].exchange(memoryview(b"x"), WORKERS, fault, 60.0)


def test_a_peer_that_is_gone_or_late_is_told(meshes: dict[int, Mesh]) -> None:
    with pytest.raises(PeerLostError, match=r"workers \[5, 7\]: nothing came within 0.1 s"):
        give(meshes[2], b"x", WORKERS, 0.1)
    meshes[7].close()
    with pytest.raises(PeerLostError, match="worker 7 is gone"):
        give(meshes[5], b"x", [5, 7])


def test_a_stranger_is_not_let_in_and_does_not_disturb() -> None:
    store = HashStore()

    def join(w: int) -> Mesh:
        if w == WORKERS[0]:
            return Mesh(w, WORKERS, HOST, _Disturbed(store), 10.0)
        return Mesh(w, WORKERS, HOST, store, 10.0)

    made = at_once(join)
    found = at_once(lambda w: give(made[w], b"%d" % w, WORKERS))
    assert all(parts == [b"2", b"5", b"7"] for parts in found.values())
    for mesh in made.values():
        mesh.close()


class _Disturbed:
    """Tells strangers of an address before it tells others, who say nothing or what is wrong."""

    def __init__(self, store: Directory) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        host, port, _ = value.split()
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64)):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(hello)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(key)


def test_a_worker_that_does_not_come_is_not_waited_for_for_ever() -> None:
    with pytest.raises((OSError, RuntimeError)):
        Mesh(2, WORKERS, HOST, HashStore(), 0.2)
