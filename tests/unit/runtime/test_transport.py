"""Transfers between stages: all shapes and dtypes, strangers, deaths and goodbyes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.transport import KIND_ACTIVATION, Address, Key, Transport


class Pair:
    """Two workers of one generation in this process."""

    def __init__(self) -> None:
        self.faults = [FaultFlag(), FaultFlag()]
        self.ends = [Transport(w, "127.0.0.1", self.faults[w]) for w in range(2)]
        peers = {w: t.address for w, t in enumerate(self.ends)}
        for end in self.ends:
            end.start(3, peers)


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = threading.active_count()
    made = Pair()
    yield made
    for end in made.ends:
        end.close()
    assert threading.active_count() == before


def key(step: int = 0, microbatch: int = 0) -> Key:
    return Key(KIND_ACTIVATION, step, 1, microbatch)


def test_tensors_arrive_whole(pair: Pair) -> None:
    sent = [
        torch.randn(5, 3),
        torch.randn(2, 2).to(torch.bfloat16),
        torch.arange(4),
        torch.tensor(True),
        torch.empty(0, 7),
        torch.randn(3, 4).t(),
        torch.randn(4_000_000),
    ]
    pair.ends[0].send(1, key(), sent)
    got = pair.ends[1].receive(key(), 20)
    assert len(got) == len(sent)
    for a, b in zip(sent, got, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_keys_may_be_received_in_any_order_both_ways(pair: Pair) -> None:
    for m in range(20):
        pair.ends[0].send(1, key(microbatch=m), [torch.full((1000,), float(m))])
        pair.ends[1].send(0, key(microbatch=m), [torch.full((10,), float(-m))])
    for m in reversed(range(20)):
        assert pair.ends[1].receive(key(microbatch=m), 20)[0][0] == m
        assert pair.ends[0].receive(key(microbatch=m), 20)[0][0] == -m


def test_an_empty_list_and_a_message_to_oneself_arrive(pair: Pair) -> None:
    pair.ends[0].send(1, key(), [])
    assert pair.ends[1].receive(key(), 20) == ()
    pair.ends[0].send(0, key(), [torch.ones(2)])
    assert torch.equal(pair.ends[0].receive(key(), 20)[0], torch.ones(2))


def test_a_peer_that_breaks_off_ends_the_wait_at_once(pair: Pair) -> None:
    pair.ends[0].send(1, key(), [torch.ones(2)])
    pair.ends[1].receive(key(), 20)
    outgoing = pair.ends[0]._outgoing[1].sock
    outgoing.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLostError, match="worker 0 closed its connection"):
        pair.ends[1].receive(key(step=1), 20)


def test_a_goodbye_is_no_fault(pair: Pair) -> None:
    pair.ends[0].send(1, key(), [torch.ones(2)])
    pair.ends[1].receive(key(), 20)
    pair.ends[0].close()
    time.sleep(0.1)
    assert pair.faults[1].reason is None


def test_nothing_that_comes_is_an_error_after_the_time(pair: Pair) -> None:
    with pytest.raises(PeerLostError, match="nothing came within"):
        pair.ends[0].receive(key(), 0.05)


@pytest.mark.parametrize(
    "greeting",
    [
        struct.pack("<IQI32s", 0x6474726E, 3, 0, b"\0" * 32),
        b"GET / HTTP/1.1\r\n" * 4,
    ],
)
def test_a_stranger_is_not_heard(pair: Pair, greeting: bytes) -> None:
    where = pair.ends[1].address
    with socket.create_connection((where.host, where.port)) as stranger:
        stranger.sendall(greeting)
        stranger.settimeout(10)
        # Closed, or reset where more had come than was read.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert pair.faults[1].reason is None
    pair.ends[0].send(1, key(), [torch.ones(2)])
    assert len(pair.ends[1].receive(key(), 20)) == 1


def test_a_worker_of_another_generation_is_not_heard(pair: Pair) -> None:
    late = Transport(0, "127.0.0.1", FaultFlag())
    late.start(2, {1: pair.ends[1].address})
    late.send(1, key(), [torch.ones(2)])
    with pytest.raises(PeerLostError, match="nothing came"):
        pair.ends[1].receive(key(), 0.2)
    assert pair.faults[1].reason is None
    late.close()


def test_an_unreachable_peer_raises(pair: Pair) -> None:
    fault = FaultFlag()
    lonely = Transport(2, "127.0.0.1", fault)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lonely.start(3, {1: Address("127.0.0.1", port, "00" * 32)})
    with pytest.raises(PeerLostError, match="worker 1 cannot be reached"):
        lonely.send(1, key(), [torch.ones(2)])
    lonely.close()


def test_a_fault_wakes_every_wait(pair: Pair) -> None:
    timer = threading.Timer(0.05, pair.faults[0].set, ["told so"])
    timer.start()
    with pytest.raises(PeerLostError, match="told so"):
        pair.ends[0].receive(key(), 20)
    timer.join()
