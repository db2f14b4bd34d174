"""Point-to-point transfers between workers over TCP, framed with their own shapes.

Gloo's ``isend``/``irecv`` cannot be polled (their work objects complete only inside ``wait()``,
which a stopped peer blocks for ever), so activations, their gradients and states travel here: one
thread does all socket work, sends never block the caller, and a receive ends at once when the
fault flag is set. Every worker keeps a connection to every other one, whatever the generation:
a connection that ends without a goodbye is a death notice that comes within a millisecond, and
a peer from which nothing comes for the lease (idle connections carry heartbeats) is silent. Who
gives a silent peer up tells it so: if it can still hear, it must not take the end of the
connection for a death.

Each connection carries frames one way, from the worker that opened it. A frame is a fixed header
(generation, key, number of tensors, when it was sent), each tensor's dtype and shape, then the raw
bytes. Frames of an older generation than the receiver's are dropped, those of a newer one wait for
it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.errors import PeerLostError
from dtrain.faults.actions import NetworkFault
from dtrain.runtime.fault import FaultFlag
from dtrain.scheduler.membership import Peer

_MAGIC = 0x64_74_72_6E
_HELLO = struct.Struct("<II32s32s")  # magic, worker, incarnation (hex digits), token
# magic, generation, step, kind, stage, microbatch, tensors, when it was sent
_FRAME = struct.Struct("<IQQiIIId")
_TENSOR = struct.Struct("<BB8Q")  # dtype, dimensions, shape
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_MAX_TENSORS = 1 << 16
_MAX_BYTES = 1 << 40

KIND_ACTIVATION = 0
KIND_GRADIENT = 1
KIND_WEIGHTS = 2
KIND_STATE = 3
KIND_NOTE = 4
KIND_SNAPSHOT = 5
_KIND_BYE = -1
_KIND_HEARTBEAT = -2
_KIND_GIVEN_UP = -3


@dataclass(frozen=True)
class Key:
    """What a transfer is: ``kind`` of tensors, for ``stage`` and ``microbatch`` of ``step``."""

    kind: int
    step: int
    stage: int
    microbatch: int = 0


@dataclass(frozen=True)
class Parcel:
    """Tensors that came, and ``sent_s``, the sender's clock when it sent them (Unix time)."""

    tensors: tuple[Tensor, ...]
    sent_s: float


@dataclass(frozen=True)
class Address:
    """Where a worker receives, and the secret that a sender must show."""

    host: str
    port: int
    token: str


@dataclass(frozen=True)
class Loss:
    """A peer that is gone; ``certain``: its process ended, else it is silent or unreachable."""

    peer: Peer
    reason: str
    certain: bool


@dataclass
class _Incoming:
    sock: socket.socket
    peer: Peer | None = None
    want: int = _HELLO.size
    state: str = "hello"
    buffer: bytearray = field(default_factory=lambda: bytearray(_HELLO.size))
    view: memoryview = field(default_factory=lambda: memoryview(b""))
    filled: int = 0
    key: tuple[int, Key] | None = None
    sent_s: float = 0.0
    tensors: list[Tensor] = field(default_factory=list)
    pending: deque[tuple[memoryview, Tensor]] = field(default_factory=deque)
    count: int = 0


@dataclass
class _Outgoing:
    peer: Peer
    sock: socket.socket
    connected: bool = False
    queue: deque[memoryview] = field(default_factory=deque)
    events: int = 0
    began_s: float = field(default_factory=time.monotonic)
    sent_s: float = 0.0
    end_s: float | None = None  # it ends when all is sent, or at this time


class Transport:
    """One worker's connections, for as long as it lives.

    Args:
        me: this worker's life. host: address to listen on. lease_s: how long a peer may be
        silent. on_loss: called from the socket thread for each peer that is gone. network: the
        injected fault that stands now, if any.
    """

    def __init__(
        self,
        me: Peer,
        host: str,
        lease_s: float,
        on_loss: Callable[[Loss], None],
        network: Callable[[], NetworkFault | None] = lambda: None,
    ) -> None:
        self._network = network
        self._late: deque[tuple[float, Peer, list[memoryview]]] = deque()
        self._me = me
        self._lease_s = lease_s
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._mail: dict[tuple[int, Key], Parcel] = {}
        self._incoming: dict[Peer, _Incoming] = {}
        self._outgoing: dict[Peer, _Outgoing] = {}
        self._wanted: deque[tuple[Peer, Address]] = deque()
        self._heard_s: dict[Peer, float] = {}
        self._lost: set[Peer] = set()
        self._said_bye: set[Peer] = set()
        self._generation = 0
        self._fault = FaultFlag()
        self._closing = False
        self._turn_s = time.monotonic()
        self._token = secrets.token_hex(32)
        self._descriptors: set[int] = set()
        self._listener = self._adopt(socket.create_server((host, 0), backlog=256))
        self._wake_r, self._wake_w = (self._adopt(s) for s in socket.socketpair())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="dtrain-transport", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        """Where this worker receives."""
        host, port = self._listener.getsockname()[:2]
        return Address(host, port, self._token)

    def descriptors(self) -> list[int]:
        """Descriptors of this transport's sockets."""
        return list(self._descriptors)

    def _adopt(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        self._descriptors.add(sock.fileno())
        return sock

    def _close(self, sock: socket.socket) -> None:
        self._descriptors.discard(sock.fileno())
        sock.close()

    def connect(self, peer: Peer, address: Address) -> None:
        """Open the connection to ``peer`` unless there is one; returns at once."""
        with self._lock:
            if peer in self._outgoing or peer in self._lost or peer == self._me:
                return
            if any(p == peer for p, _ in self._wanted):
                return
            self._wanted.append((peer, address))
        self._wake()

    def enter(self, generation: int, fault: FaultFlag) -> None:
        """Serve ``generation`` from now on; ``fault`` ends its waits."""
        with self._lock:
            self._generation = generation
            self._fault = fault
            for old in [k for k in self._mail if k[0] < generation]:
                del self._mail[old]

    def send(self, to: Peer, key: Key, tensors: Sequence[Tensor]) -> None:
        """Queue tensors (any device, up to 8 dimensions) for ``to``; returns at once.

        The tensors must not be changed afterwards.

        Raises:
            PeerLostError: the fault flag is set, or the peer is gone.
        """
        self._fault.check()
        host_side = [t.detach().cpu().contiguous() for t in tensors]
        if to == self._me:
            self._deliver((self._generation, key), Parcel(tuple(host_side), time.time()))
            return
        parts = [memoryview(_header(self._generation, key, host_side))]
        parts += [_bytes_of(t) for t in host_side if t.numel()]
        if to not in self._outgoing or to in self._lost:
            raise PeerLostError(f"worker {to.worker} is gone")
        self._enqueue(to, parts)
        self._wake()

    def sent(self, to: Peer) -> bool:
        """Whether all that was queued for ``to`` has left; True for a peer that is gone."""
        with self._lock:
            outgoing = self._outgoing.get(to)
            return outgoing is None or to in self._lost or not outgoing.queue

    def _enqueue(self, to: Peer, parts: list[memoryview]) -> None:
        """Have a frame sent, unless an injected fault loses it or makes it late."""
        fault = self._network()
        if fault is not None and to.worker in fault.drop_to:
            return
        delay_s = fault.delay_s if fault is not None else 0.0
        with self._lock:
            if delay_s or self._late:
                self._late.append((time.monotonic() + delay_s, to, parts))
            elif to not in self._lost:
                self._outgoing[to].queue.extend(parts)

    def _send_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            while self._late and self._late[0][0] <= now:
                _, to, parts = self._late.popleft()
                if to not in self._lost:
                    self._outgoing[to].queue.extend(parts)

    def _longest_sleep_s(self) -> float:
        sleep_s = self._lease_s / 5
        if self._late:
            sleep_s = min(sleep_s, max(0.0, self._late[0][0] - time.monotonic()))
        return sleep_s

    def _hears(self, peer: Peer) -> bool:
        """Whether what ``peer`` sends counts as having come."""
        fault = self._network()
        return fault is None or peer.worker not in fault.drop_from

    def receive(self, key: Key, timeout_s: float) -> tuple[Tensor, ...]:
        """Wait for the tensors of ``key`` in the current generation.

        Raises:
            PeerLostError: a fault was noticed, or nothing came within ``timeout_s`` seconds.
        """
        return self.receive_parcel(key, timeout_s).tensors

    def receive_parcel(self, key: Key, timeout_s: float) -> Parcel:
        """The same, with the time at which they were sent."""
        full = (self._generation, key)
        self._fault.wait_for(lambda: full in self._mail, timeout_s, f"waiting for {key}")
        with self._lock:
            return self._mail.pop(full)

    def has(self, key: Key) -> bool:
        """Whether the tensors of ``key`` in the current generation have come."""
        return (self._generation, key) in self._mail

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, say goodbye to every peer, and stop; idempotent."""
        if self._closing:
            return
        bye = _header(self._generation, Key(_KIND_BYE, 0, 0), [])
        with self._lock:
            for outgoing in self._outgoing.values():
                if outgoing.events:
                    outgoing.queue.append(memoryview(bye))
        self._closing = True
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        # A full wake pipe means that the thread has not run yet and will look anyway.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_w.send(b"x", socket.MSG_DONTWAIT)

    def _loop(self) -> None:
        deadline = None
        try:
            while True:
                self._open_wanted()
                self._send_late()
                self._update_interest()
                if self._closing:
                    deadline = deadline or time.monotonic() + 2.0
                    if not self._unsent() or time.monotonic() > deadline:
                        return
                for selected, mask in self._selector.select(self._longest_sleep_s()):
                    if selected.fileobj is self._wake_r:
                        self._drain_wakes()
                    elif isinstance(selected.data, _Incoming):
                        self._read(selected.data)
                    elif isinstance(selected.data, _Outgoing):
                        self._serve_outgoing(selected.data, mask)
                    else:
                        selected.data()
                self._keep_alive()
        except Exception as error:
            self._fault.set(f"transport of worker {self._me.worker} failed: {error!r}")
            raise
        finally:
            self._release()

    def _unsent(self) -> bool:
        return any(o.queue and o.events and o.connected for o in self._outgoing.values())

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass

    # Connections that this worker opens

    def _open_wanted(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    return
                # In one go: connect() must find the peer in one place or the other, and what is
                # sent from now on goes behind the hello.
                peer, address = self._wanted.popleft()
                outgoing = self._outgoing[peer] = self._greeting(peer, address)
            sock = outgoing.sock
            code = sock.connect_ex((address.host, address.port))
            if code not in (0, errno.EINPROGRESS):
                self._lose(peer, f"cannot be reached ({errno.errorcode.get(code, code)})", False)
                continue
            outgoing.events = selectors.EVENT_WRITE | selectors.EVENT_READ
            self._selector.register(sock, outgoing.events, outgoing)

    def _greeting(self, peer: Peer, address: Address) -> _Outgoing:
        """A connection that is yet to be made, with the hello to begin it."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = self._adopt(socket.socket(family))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incarnation = self._me.incarnation.encode()[:32]
        token = bytes.fromhex(address.token)
        hello = _HELLO.pack(_MAGIC, self._me.worker, incarnation, token)
        return _Outgoing(peer, sock, queue=deque([memoryview(hello)]))

    def _update_interest(self) -> None:
        with self._lock:
            for outgoing in self._outgoing.values():
                if not outgoing.events:
                    continue
                wanted = selectors.EVENT_READ
                if outgoing.queue or not outgoing.connected:
                    wanted |= selectors.EVENT_WRITE
                if wanted != outgoing.events:
                    outgoing.events = wanted
                    self._selector.modify(outgoing.sock, wanted, outgoing)

    def _serve_outgoing(self, outgoing: _Outgoing, mask: int) -> None:
        peer = outgoing.peer
        if not outgoing.connected:
            code = outgoing.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                certain = code == errno.ECONNREFUSED
                self._lose(peer, f"cannot be reached ({errno.errorcode.get(code, code)})", certain)
                return
            if not mask & selectors.EVENT_WRITE:
                return
            outgoing.connected = True
            outgoing.sent_s = time.monotonic()
            self._heard_s.setdefault(peer, time.monotonic())
        try:
            if mask & selectors.EVENT_READ and outgoing.sock.recv(1) == b"":
                self._outgoing_ended(outgoing)
                return
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing_ended(outgoing)
            return
        if mask & selectors.EVENT_WRITE:
            self._write(outgoing)

    def _outgoing_ended(self, outgoing: _Outgoing) -> None:
        """The peer closed its receiving side; its own connection to us tells whether it is dead."""
        self._forget_outgoing(outgoing)
        if outgoing.peer not in self._incoming and outgoing.peer not in self._said_bye:
            self._lose(outgoing.peer, "closed its connection", True)

    def _write(self, outgoing: _Outgoing) -> None:
        try:
            while outgoing.queue:
                part = outgoing.queue[0]
                sent = outgoing.sock.send(part)
                if sent == len(part):
                    outgoing.queue.popleft()
                else:
                    outgoing.queue[0] = part[sent:]
                outgoing.sent_s = time.monotonic()
        except BlockingIOError:
            return
        except OSError:
            self._outgoing_ended(outgoing)
            return
        if outgoing.end_s is not None:
            self._forget_outgoing(outgoing)

    def _forget_outgoing(self, outgoing: _Outgoing) -> None:
        if outgoing.events:
            self._selector.unregister(outgoing.sock)
            outgoing.events = 0
        outgoing.queue.clear()
        self._close(outgoing.sock)

    def _keep_alive(self) -> None:
        """Beat on idle connections; report peers that have been silent for the lease."""
        now = time.monotonic()
        late_s = now - self._turn_s
        self._turn_s = now
        if late_s > self._lease_s / 2:
            # It was this thread that did not run: what the peers sent meanwhile is still unread.
            for peer in self._heard_s:
                self._heard_s[peer] += late_s
            for outgoing in self._outgoing.values():
                outgoing.began_s += late_s
        for outgoing in list(self._outgoing.values()):
            if not outgoing.events:
                continue
            if outgoing.end_s is not None:
                if now > outgoing.end_s:
                    self._forget_outgoing(outgoing)
            elif not outgoing.connected:
                if now - outgoing.began_s > self._lease_s:
                    self._lose(outgoing.peer, "does not answer", False)
            elif not outgoing.queue and now - outgoing.sent_s > self._lease_s / 5:
                beat = _header(0, Key(_KIND_HEARTBEAT, 0, 0), [])
                outgoing.sent_s = now
                self._enqueue(outgoing.peer, [memoryview(beat)])
        for peer, heard_s in list(self._heard_s.items()):
            if now - heard_s > self._lease_s and peer not in self._said_bye:
                self._lose(peer, f"was silent for {self._lease_s:g} s", False)

    # Connections that others open

    def _accept(self) -> None:
        try:
            sock = self._adopt(self._listener.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            return
        incoming = _Incoming(sock)
        incoming.view = memoryview(incoming.buffer)
        self._selector.register(sock, selectors.EVENT_READ, incoming)

    def _read(self, incoming: _Incoming) -> None:
        try:
            while True:
                got = incoming.sock.recv_into(incoming.view[incoming.filled :])
                if got == 0:
                    self._incoming_ended(incoming, "closed its connection")
                    return
                if incoming.peer is not None and self._hears(incoming.peer):
                    self._heard_s[incoming.peer] = time.monotonic()
                incoming.filled += got
                if incoming.filled == incoming.want and not self._advance(incoming):
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._incoming_ended(incoming, f"broke its connection ({error.strerror})")

    def _incoming_ended(self, incoming: _Incoming, how: str) -> None:
        self._selector.unregister(incoming.sock)
        self._close(incoming.sock)
        peer = incoming.peer
        if peer is not None and self._incoming.get(peer) is incoming:
            del self._incoming[peer]
            if peer not in self._said_bye and not self._closing:
                self._lose(peer, how, True)
            self._heard_s.pop(peer, None)

    def _advance(self, incoming: _Incoming) -> bool:
        """Go on after a complete part; False if the connection was dropped."""
        if incoming.state == "hello":
            magic, worker, incarnation, token = _HELLO.unpack(incoming.buffer)
            genuine = hmac.compare_digest(token, bytes.fromhex(self._token))
            if magic != _MAGIC or not genuine:
                # A stranger: nothing it says counts.
                self._incoming_ended(incoming, "is a stranger")
                return False
            peer = Peer(worker, incarnation.rstrip(b"\0").decode("ascii", "replace"))
            if peer in self._lost:
                self._incoming_ended(incoming, "came back after it was lost")
                return False
            incoming.peer = peer
            self._incoming[peer] = incoming
            self._heard_s[peer] = time.monotonic()
            self._expect(incoming, "frame", _FRAME.size)
            return True
        if incoming.state == "frame":
            return self._begin_frame(incoming)
        if incoming.state == "shapes":
            if not self._begin_payload(incoming):
                return False
        else:
            incoming.pending.popleft()
        self._next_payload(incoming)
        return True

    def _begin_frame(self, incoming: _Incoming) -> bool:
        fields = _FRAME.unpack(incoming.buffer)
        magic, generation, step, kind, stage, microbatch, count, sent_s = fields
        if magic != _MAGIC or count > _MAX_TENSORS:
            self._incoming_ended(incoming, "sent a malformed frame")
            return False
        if kind == _KIND_GIVEN_UP and incoming.peer is not None:
            self._lose(incoming.peer, "does not hear this worker", False)
            return False
        if kind in (_KIND_BYE, _KIND_HEARTBEAT):
            if kind == _KIND_BYE and incoming.peer is not None:
                self._said_bye.add(incoming.peer)
            self._expect(incoming, "frame", _FRAME.size)
            return True
        incoming.key, incoming.sent_s = (generation, Key(kind, step, stage, microbatch)), sent_s
        incoming.count = count
        if count:
            self._expect(incoming, "shapes", count * _TENSOR.size)
        else:
            incoming.tensors = []
            self._next_payload(incoming)
        return True

    def _begin_payload(self, incoming: _Incoming) -> bool:
        incoming.tensors = []
        for i in range(incoming.count):
            code, ndim, *shape = _TENSOR.unpack_from(incoming.buffer, i * _TENSOR.size)
            numel = 1
            for size in shape[:ndim]:
                numel *= size
            if code >= len(_DTYPES) or ndim > 8 or numel > _MAX_BYTES:
                self._incoming_ended(incoming, "sent a malformed frame")
                return False
            tensor = torch.empty(shape[:ndim], dtype=_DTYPES[code])
            incoming.tensors.append(tensor)
            if tensor.numel():
                incoming.pending.append((_bytes_of(tensor), tensor))
        return True

    def _next_payload(self, incoming: _Incoming) -> None:
        if incoming.pending:
            incoming.state = "payload"
            incoming.view, _ = incoming.pending[0]
            incoming.want = len(incoming.view)
            incoming.filled = 0
            return
        assert incoming.key is not None
        assert incoming.peer is not None
        if self._hears(incoming.peer):
            self._deliver(incoming.key, Parcel(tuple(incoming.tensors), incoming.sent_s))
        incoming.tensors = []
        self._expect(incoming, "frame", _FRAME.size)

    @staticmethod
    def _expect(incoming: _Incoming, state: str, size: int) -> None:
        incoming.state, incoming.want, incoming.filled = state, size, 0
        incoming.buffer = bytearray(size)
        incoming.view = memoryview(incoming.buffer)

    def _deliver(self, key: tuple[int, Key], parcel: Parcel) -> None:
        with self._lock:
            if key[0] < self._generation:
                return
            self._mail[key] = parcel
            fault = self._fault
        fault.notify()

    def _lose(self, peer: Peer, reason: str, certain: bool) -> None:
        """A peer is gone: nothing more is taken from this life of it, nothing sent to it."""
        with self._lock:
            if peer in self._lost or self._closing:
                return
            self._lost.add(peer)
            outgoing = self._outgoing.get(peer)
        self._heard_s.pop(peer, None)
        if outgoing is not None and (certain or not self._tell_given_up(outgoing)):
            self._forget_outgoing(outgoing)
        incoming = self._incoming.pop(peer, None)
        if incoming is not None:
            self._selector.unregister(incoming.sock)
            self._close(incoming.sock)
        self._on_loss(Loss(peer, reason, certain))

    def _tell_given_up(self, outgoing: _Outgoing) -> bool:
        """Have a peer told that this worker gave it up, behind what is on the way to it."""
        fault = self._network()
        unheard = fault is not None and outgoing.peer.worker in fault.drop_to
        if unheard or not outgoing.connected or not outgoing.events:
            return False
        outgoing.end_s = time.monotonic() + self._lease_s
        with self._lock:
            outgoing.queue.append(memoryview(_header(0, Key(_KIND_GIVEN_UP, 0, 0), [])))
        return True

    def _release(self) -> None:
        for registered in list(self._selector.get_map().values()):
            fileobj = registered.fileobj
            if isinstance(fileobj, socket.socket):
                self._close(fileobj)
        self._selector.close()
        for outgoing in self._outgoing.values():
            self._close(outgoing.sock)
        self._close(self._wake_w)


def _header(generation: int, key: Key, tensors: Sequence[Tensor]) -> bytes:
    count, now_s = len(tensors), time.time()
    out = _FRAME.pack(
        _MAGIC, generation, key.step, key.kind, key.stage, key.microbatch, count, now_s
    )
    for tensor in tensors:
        shape = list(tensor.shape) + [0] * (8 - tensor.dim())
        out += _TENSOR.pack(_DTYPES.index(tensor.dtype), tensor.dim(), *shape)
    return out


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous, non-empty CPU tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
