"""Small collectives of a few workers by direct exchange, in the thread that waits for them.

A step has two of them, of some kilobytes. A library's collective runs in threads of its own, which
on busy cores wait for their turn at every message of its algorithm; here everybody sends what it
has to everybody, in one go, and is woken by the last answer.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag

MOST_MEMBERS = 8
"""Each sends to each: beyond, a collective that passes parts on sends less."""
MOST_BYTES = 1 << 20
"""Likewise, of what each member gives."""

_HELLO_S = 1.0
"""How long a connection may take to say whose it is."""
_MAGIC = 0x6D657368
_HELLO = struct.Struct("<II32s")  # magic, worker, token
_HEAD = struct.Struct("<IIQ")  # magic, number of the exchange with this peer, bytes


class Directory(Protocol):
    """Where workers say how they are reached: a store of torch's, of which no more is asked."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """A key's value, as soon as it is there."""


@dataclass
class _Link:
    sock: socket.socket
    exchanges: int = 0


class _Half:
    """What is still to be sent to a peer, and what has come from it."""

    def __init__(self, link: _Link, payload: memoryview) -> None:
        link.exchanges += 1
        self.sock, self.number = link.sock, link.exchanges
        self.left = [memoryview(_HEAD.pack(_MAGIC, self.number, len(payload))), payload]
        self.came = bytearray(_HEAD.size)
        self._room = memoryview(self.came)
        self._in_head = True

    @property
    def sent(self) -> bool:
        return not self.left

    @property
    def complete(self) -> bool:
        return not self._in_head and not self._room

    def send(self) -> None:
        """Send what goes without waiting."""
        try:
            count = self.sock.sendmsg(self.left)
        except BlockingIOError:
            return
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if self.left:
            self.left[0] = self.left[0][count:]

    def receive(self) -> None:
        """Take in what has come, and nothing of a later exchange."""
        while not self.complete:
            try:
                count = self.sock.recv_into(self._room)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("it closed the connection")
            self._room = self._room[count:]
            if self._in_head and not self._room:
                magic, number, size = _HEAD.unpack(self.came)
                if magic != _MAGIC or number != self.number or size > MOST_BYTES:
                    raise AssertionError(
                        f"exchange {self.number}: a peer is at {number} with {size} bytes"
                    )
                self._in_head = False
                self.came = bytearray(size)
                self._room = memoryview(self.came)


class Mesh:
    """A connection to each other member of a generation.

    One thread at a time exchanges, and all members of an exchange begin it at the same point.
    """

    def __init__(
        self, worker: int, workers: Sequence[int], host: str, store: Directory, timeout_s: float
    ) -> None:
        """Connect; every worker of ``workers`` does so at the same time.

        ``host``: the address to listen on while others connect. ``store``: where they find it.

        Raises:
            OSError, RuntimeError: a worker did not come within ``timeout_s`` seconds.
        """
        self._worker = worker
        self._links: dict[int, _Link] = {}
        deadline = time.monotonic() + timeout_s
        token = secrets.token_hex(16)
        try:
            with socket.create_server((host, 0), backlog=len(workers)) as listener:
                port = listener.getsockname()[1]
                store.set(f"mesh/{worker}", f"{host} {port} {token}")
                for peer in workers:
                    if peer < worker:
                        self._connect(peer, store, deadline)
                while len(self._links) < len(workers) - 1:
                    self._accept(listener, workers, token, deadline)
        except BaseException:
            self.close()
            raise
        for link in self._links.values():
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sock.setblocking(False)

    def _connect(self, peer: int, store: Directory, deadline: float) -> None:
        host, port, token = store.get(f"mesh/{peer}").decode().split()
        sock = socket.create_connection((host, int(port)), _left(deadline))
        self._links[peer] = _Link(sock)
        sock.sendall(_HELLO.pack(_MAGIC, self._worker, token.encode()))

    def _accept(
        self, listener: socket.socket, workers: Sequence[int], token: str, deadline: float
    ) -> None:
        listener.settimeout(_left(deadline))
        sock, _ = listener.accept()
        sock.settimeout(min(_HELLO_S, _left(deadline)))
        try:
            hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            hello = b""
        if len(hello) == _HELLO.size:
            magic, peer, shown = _HELLO.unpack(hello)
            known = peer in workers and peer not in self._links
            if magic == _MAGIC and known and hmac.compare_digest(shown, token.encode()):
                self._links[peer] = _Link(sock)
                return
        # A stranger, or a worker that gave up meanwhile.
        sock.close()

    def exchange(
        self, payload: memoryview, members: Sequence[int], fault: FaultFlag, timeout_s: float
    ) -> list[memoryview | bytearray]:
        """Give ``payload`` (bytes, at most :data:`MOST_BYTES`) to all; what each member gave.

        In the order of ``members``, of which this worker is one.

        Raises:
            PeerLostError: a member is gone, a fault was noticed, or the time ran out.
        """
        halves = {w: _Half(self._links[w], payload) for w in members if w != self._worker}
        poller = select.poll()
        poller.register(fault.descriptor(), select.POLLIN)
        waiting: dict[int, int] = {}
        deadline = time.monotonic() + timeout_s
        ready = list(halves)
        while True:
            fault.check()
            for w in ready:
                half, fd = halves[w], halves[w].sock.fileno()
                try:
                    if not half.sent:
                        half.send()
                    half.receive()
                except OSError as error:
                    raise PeerLostError(f"worker {w} is gone: {error}") from error
                events = select.POLLIN * (not half.complete) | select.POLLOUT * (not half.sent)
                if events:
                    poller.register(fd, events)
                    waiting[fd] = w
                elif waiting.pop(fd, None) is not None:
                    poller.unregister(fd)
            if not waiting:
                return [halves[w].came if w in halves else payload for w in members]
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerLostError(
                    f"workers {sorted(waiting.values())}: nothing came within {timeout_s:g} s"
                )
            ready = [waiting[fd] for fd, _ in poller.poll(1e3 * left) if fd in waiting]

    def close(self) -> None:
        """End the connections; idempotent."""
        for link in self._links.values():
            link.sock.close()
        self._links = {}


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("a worker did not connect in time")
    return left
