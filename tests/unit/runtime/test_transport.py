"""Transfers between stages: all shapes and dtypes, strangers, deaths and goodbyes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dtrain.errors import PeerLostError
from dtrain.faults.actions import NetworkFault
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.transport import KIND_ACTIVATION, Address, Key, Loss, Transport
from dtrain.scheduler.membership import Peer


class Pair:
    """Two workers of one generation in this process."""

    def __init__(self, lease_s: float = 5.0) -> None:
        self.faults = [FaultFlag(), FaultFlag()]
        self.peers = [Peer(w, f"{w}" * 32) for w in range(2)]
        self.losses: list[Loss] = []
        self.ends = [self._end(w, lease_s) for w in range(2)]
        for w in range(2):
            self.ends[w].enter(3, self.faults[w])
            self.ends[w].connect(self.peers[1 - w], self.ends[1 - w].address)

    def _end(self, worker: int, lease_s: float) -> Transport:
        def lost(loss: Loss) -> None:
            self.losses.append(loss)
            self.faults[worker].set(f"worker {loss.peer.worker} {loss.reason}")

        return Transport(self.peers[worker], "127.0.0.1", lease_s, lost)

    def send(self, sender: int, key: Key, tensors: list[Tensor]) -> None:
        until(lambda: self.peers[1 - sender] in self.ends[sender]._outgoing)
        self.ends[sender].send(self.peers[1 - sender], key, tensors)


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


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
    pair.send(0, key(), sent)
    got = pair.ends[1].receive(key(), 20)
    assert len(got) == len(sent)
    for a, b in zip(sent, got, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_keys_may_be_received_in_any_order_both_ways(pair: Pair) -> None:
    for m in range(20):
        pair.send(0, key(microbatch=m), [torch.full((1000,), float(m))])
        pair.send(1, key(microbatch=m), [torch.full((10,), float(-m))])
    for m in reversed(range(20)):
        assert pair.ends[1].receive(key(microbatch=m), 20)[0][0] == m
        assert pair.ends[0].receive(key(microbatch=m), 20)[0][0] == -m


def test_an_empty_list_and_a_message_to_oneself_arrive(pair: Pair) -> None:
    pair.send(0, key(), [])
    assert pair.ends[1].receive(key(), 20) == ()
    pair.ends[0].send(pair.peers[0], key(), [torch.ones(2)])
    assert torch.equal(pair.ends[0].receive(key(), 20)[0], torch.ones(2))


def test_what_comes_tells_when_it_was_sent(pair: Pair) -> None:
    until(lambda: pair.peers[1] in pair.ends[0]._outgoing)
    for sender, receiver in ((0, 1), (0, 0)):
        before = time.time()
        pair.ends[sender].send(pair.peers[receiver], key(step=receiver), [torch.ones(2)])
        after = time.time()
        until(lambda receiver=receiver: pair.ends[receiver].has(key(step=receiver)))
        time.sleep(0.05)
        parcel = pair.ends[receiver].receive_parcel(key(step=receiver), 20)
        assert before <= parcel.sent_s <= after
        assert torch.equal(parcel.tensors[0], torch.ones(2))


def test_a_peer_that_ends_is_noticed_at_once_by_all_its_waits(pair: Pair) -> None:
    pair.send(0, key(), [torch.ones(2)])
    pair.ends[1].receive(key(), 20)
    pair.ends[0]._outgoing[pair.peers[1]].sock.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLostError, match="worker 0 closed its connection"):
        pair.ends[1].receive(key(step=1), 20)
    assert Loss(pair.peers[0], "closed its connection", True) in pair.losses
    with pytest.raises(PeerLostError):
        pair.ends[1].send(pair.peers[0], key(), [torch.ones(2)])


def test_a_goodbye_is_no_fault(pair: Pair) -> None:
    pair.send(0, key(), [torch.ones(2)])
    pair.ends[1].receive(key(), 20)
    pair.ends[0].close()
    time.sleep(0.1)
    assert pair.faults[1].reason is None
    assert pair.losses == []


def test_nothing_that_comes_is_an_error_after_the_time(pair: Pair) -> None:
    with pytest.raises(PeerLostError, match="nothing came within"):
        pair.ends[0].receive(key(), 0.05)


@pytest.mark.parametrize(
    "greeting",
    [
        struct.pack("<II32s32s", 0x6474726E, 0, b"0" * 32, b"\0" * 32),
        b"GET / HTTP/1.1\r\n" * 5,
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
    pair.send(0, key(), [torch.ones(2)])
    assert len(pair.ends[1].receive(key(), 20)) == 1


def test_frames_of_an_older_generation_are_dropped_and_newer_ones_wait(pair: Pair) -> None:
    pair.send(0, key(), [torch.zeros(2)])
    until(lambda: pair.ends[1].has(key()))
    pair.ends[0].enter(4, pair.faults[0])
    pair.send(0, key(), [torch.ones(2)])
    time.sleep(0.05)
    pair.ends[1].enter(4, pair.faults[1])
    assert torch.equal(pair.ends[1].receive(key(), 20)[0], torch.ones(2))
    pair.ends[0].enter(3, pair.faults[0])
    pair.send(0, key(step=9), [torch.zeros(2)])
    pair.ends[0].enter(4, pair.faults[0])
    pair.send(0, key(step=10), [torch.ones(2)])
    pair.ends[1].receive(key(step=10), 20)
    assert not pair.ends[1].has(key(step=9))


def test_a_peer_that_refuses_is_certainly_gone_and_one_that_is_silent_is_not() -> None:
    pair = Pair(lease_s=2.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gone = Peer(7, "7" * 32)
    pair.ends[0].connect(gone, Address("127.0.0.1", port, "00" * 32))
    until(lambda: any(loss.peer == gone and loss.certain for loss in pair.losses))
    time.sleep(3.0)
    assert len(pair.losses) == 1, "heartbeats keep idle connections"
    # A stopped process answers nothing, and its sockets stay open.
    pair.ends[1]._keep_alive = lambda: None  # type: ignore[method-assign]
    until(lambda: any(loss.peer == pair.peers[1] for loss in pair.losses))
    silent = next(loss for loss in pair.losses if loss.peer == pair.peers[1])
    assert not silent.certain
    assert "silent" in silent.reason
    for end in pair.ends:
        end.close()


def test_a_fault_wakes_every_wait(pair: Pair) -> None:
    timer = threading.Timer(0.05, pair.faults[0].set, ["told so"])
    timer.start()
    with pytest.raises(PeerLostError, match="told so"):
        pair.ends[0].receive(key(), 20)
    timer.join()


def test_an_injected_network_fault_loses_frames_one_way_or_makes_them_late() -> None:
    pair = Pair(lease_s=1.0)
    pair.send(0, key(1), [torch.ones(1)])
    pair.ends[1].receive(key(1), 10)
    fault: list[NetworkFault] = [NetworkFault(delay_s=0.3)]
    pair.ends[0]._network = lambda: fault[0]
    began = time.monotonic()
    pair.send(0, key(2), [torch.ones(1)])
    pair.send(0, key(3), [torch.ones(1)])
    pair.ends[1].receive(key(3), 10)
    assert time.monotonic() - began >= 0.3
    assert pair.ends[1].has(key(2)), "in order"
    fault[0] = NetworkFault(drop_to=frozenset([1]))
    pair.send(0, key(4), [torch.ones(1)])
    until(lambda: any(loss.peer == pair.peers[0] for loss in pair.losses))
    silent = next(loss for loss in pair.losses if loss.peer == pair.peers[0])
    assert not silent.certain
    assert "silent" in silent.reason
    assert not pair.ends[1].has(key(4))
    # The mute one still hears: it must not take its closed connections for the other's death.
    until(lambda: any(loss.peer == pair.peers[1] for loss in pair.losses))
    told = next(loss for loss in pair.losses if loss.peer == pair.peers[1])
    assert not told.certain
    assert "does not hear" in told.reason
    until(lambda: not any(o.events for end in pair.ends for o in end._outgoing.values()))
    for end in pair.ends:
        end.close()


def test_a_peer_is_connected_once_however_often_and_whenever_it_is_asked_for(pair: Pair) -> None:
    """A second connection would stay registered with nobody to serve it: an endless loop."""
    me, peer = pair.ends[0], Peer(7, "7" * 32)
    address = pair.ends[1].address
    adopt = me._adopt

    def slowly(sock: socket.socket) -> socket.socket:
        time.sleep(0.02)
        return adopt(sock)

    me._adopt = slowly  # type: ignore[method-assign]
    for _ in range(50):
        me.connect(peer, address)
        time.sleep(0.002)
    until(lambda: peer in me._outgoing and me._outgoing[peer].connected)
    registered = [
        key.data
        for key in list(me._selector._fd_to_key.values())  # type: ignore[attr-defined]
    ]
    to_peer = [d for d in registered if getattr(d, "peer", None) == peer and hasattr(d, "queue")]
    assert to_peer == [me._outgoing[peer]]
