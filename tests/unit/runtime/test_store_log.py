"""The job's log: one order for all, holes voided, a store that is gone told at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import PrefixStore, TCPStore

from dtrain.errors import StoreLostError
from dtrain.runtime.store_log import StoreLog

HOST = "127.0.0.1"


@pytest.fixture
def server() -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def client(server: TCPStore) -> StoreLog:
    return StoreLog(HOST, server.port, hosts_it=False, timeout_s=5, call_s=5)


def test_all_read_the_same_entries_in_the_same_order(server: TCPStore) -> None:
    logs = [client(server) for _ in range(4)]

    def write(writer: int) -> None:
        for i in range(25):
            logs[writer].append({"writer": writer, "i": i})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    seen = [log.read() for log in logs]
    assert len(seen[0]) == 100
    assert all(s == seen[0] for s in seen)
    for writer in range(4):
        assert [e["i"] for e in seen[0] if e["writer"] == writer] == list(range(25))
    assert logs[0].read() == []
    late = client(server)
    assert late.read() == seen[0]


def test_a_number_whose_writer_died_is_voided_for_all(server: TCPStore) -> None:
    log = client(server)
    log.append({"n": 1})
    dead = PrefixStore("dtrain", server)
    assert dead.add("log", 1) == 2
    log.append({"n": 3})
    assert log.read() == [{"n": 1}]
    end = time.monotonic() + 5
    rest: list[dict[str, int]] = []
    while not rest and time.monotonic() < end:
        rest = log.read()
        time.sleep(0.01)
    assert rest == [{"n": 3}]
    assert client(server).read() == [{"n": 1}, {"n": 3}]
    # A writer that was only slow finds its number void and takes another.
    assert dead.compare_set("log/2", "", "late").decode() == "void"


def test_a_store_that_is_gone_is_told_and_stays_gone() -> None:
    with pytest.raises(StoreLostError, match=r"127\.0\.0\.1:9 is not reachable"):
        StoreLog(HOST, 9, hosts_it=False, timeout_s=0.5, call_s=2)
