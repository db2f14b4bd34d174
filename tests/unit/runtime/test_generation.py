"""Agreement on a generation, with announcements that an earlier attempt of the job left behind."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch.distributed as dist

from dtrain.errors import PeerLostError
from dtrain.runtime.comm import Generation, Member, connect_store, join_generation
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.transport import Address

HOST = "127.0.0.1"


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def member(worker: int, incarnation: str) -> Member:
    return Member(worker, incarnation, Address(HOST, 1000 + worker, "00" * 32))


def join(server: dist.TCPStore, me: Member, size: int, timeout_s: float = 20.0) -> Generation:
    store = connect_store(HOST, server.port, False, timeout_s)
    return join_generation(store, me, size, FaultFlag(), timeout_s)


def together(server: dist.TCPStore, attempt: str, size: int) -> list[Generation]:
    with ThreadPoolExecutor(size) as pool:
        waits = [pool.submit(join, server, member(w, f"{attempt}{w}"), size) for w in range(size)]
        return [w.result() for w in waits]


def test_all_agree_on_number_and_members(server: dist.TCPStore) -> None:
    found = together(server, "a", 4)
    assert len({g.number for g in found}) == 1
    assert all(g.members == {w: member(w, f"a{w}") for w in range(4)} for g in found)


def test_the_number_only_grows_and_stale_members_never_enter(server: dist.TCPStore) -> None:
    numbers = []
    for attempt in "abcde":
        found = together(server, attempt, 3)
        assert len({g.number for g in found}) == 1
        assert found[0].members == {w: member(w, f"{attempt}{w}") for w in range(3)}
        numbers.append(found[0].number)
    assert numbers == sorted(set(numbers))


def test_a_missing_worker_is_named(server: dist.TCPStore) -> None:
    store = connect_store(HOST, server.port, False, 5)
    stranger = json.dumps(asdict(member(2, "old")))
    store.set("join/2", stranger)
    with pytest.raises(PeerLostError, match=r"no generation of 3 workers .* announced: \[0, 2\]"):
        join(server, member(0, "new"), 3, timeout_s=0.3)


def test_an_unreachable_store_is_named() -> None:
    with pytest.raises(PeerLostError, match=r"store at 127.0.0.1:9 is not reachable"):
        connect_store(HOST, 9, False, 0.5)
