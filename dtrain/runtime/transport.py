"""Point-to-point transfers between stages over TCP, framed with their own shapes.

Gloo's ``isend``/``irecv`` cannot be polled (their work objects complete only inside ``wait()``,
which a stopped peer blocks for ever), so activations and their gradients travel here: one thread
does all socket work, sends never block the caller, and a receive ends at once when the fault flag
is set or the peer's connection breaks. Each connection carries frames one way, from the worker
that opened it. A frame is a fixed header (generation, key, number of tensors), each tensor's dtype
and shape, then the raw bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain.runtime.fault import FaultFlag

_MAGIC = 0x64_74_72_6E
_HELLO = struct.Struct("<IQI32s")  # magic, generation, sender, token
_FRAME = struct.Struct("<IQQiIII")  # magic, generation, step, kind, stage, microbatch, tensors
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
_MAX_TENSORS = 1024
_MAX_BYTES = 1 << 40

KIND_ACTIVATION = 0
KIND_GRADIENT = 1
KIND_WEIGHTS = 2
_KIND_BYE = -1


@dataclass(frozen=True)
class Key:
    """What a transfer is: ``kind`` of tensors, for ``stage`` and ``microbatch`` of ``step``."""

    kind: int
    step: int
    stage: int
    microbatch: int = 0


@dataclass(frozen=True)
class Address:
    """Where a worker receives, and the secret that a sender must show."""

    host: str
    port: int
    token: str


@dataclass
class _Incoming:
    sock: socket.socket
    sender: int = -1
    want: int = _HELLO.size
    state: str = "hello"
    buffer: bytearray = field(default_factory=lambda: bytearray(_HELLO.size))
    view: memoryview = field(default_factory=lambda: memoryview(b""))
    filled: int = 0
    key: Key | None = None
    tensors: list[Tensor] = field(default_factory=list)
    pending: deque[tuple[memoryview, Tensor]] = field(default_factory=deque)
    count: int = 0


@dataclass
class _Outgoing:
    sock: socket.socket
    queue: deque[memoryview] = field(default_factory=deque)
    registered: bool = False


class Transport:
    """The transfers of one worker in one generation."""

    def __init__(self, worker: int, host: str, fault: FaultFlag) -> None:
        self._worker = worker
        self._fault = fault
        self._lock = threading.Lock()
        self._mail: dict[Key, tuple[Tensor, ...]] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing: dict[int, _Outgoing] = {}
        self._peers: dict[int, Address] = {}
        self._said_bye: set[int] = set()
        self._generation = -1
        self._closing = False
        self._token = secrets.token_hex(32)
        self._listener = socket.create_server((host, 0), backlog=256)
        self._listener.setblocking(False)
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="dtrain-transport", daemon=True)
        self._started = False

    @property
    def address(self) -> Address:
        """Where this worker receives."""
        host, port = self._listener.getsockname()[:2]
        return Address(host, port, self._token)

    def start(self, generation: int, peers: dict[int, Address]) -> None:
        """Begin to serve ``generation``; ``peers`` maps every member to its address."""
        self._generation = generation
        self._peers = dict(peers)
        self._started = True
        self._thread.start()

    def send(self, to: int, key: Key, tensors: Sequence[Tensor]) -> None:
        """Queue tensors (any device, up to 8 dimensions) for worker ``to``; returns at once.

        The tensors must not be changed afterwards.

        Raises:
            PeerLostError: the fault flag is set, or the peer cannot be reached.
        """
        self._fault.check()
        host_side = [t.detach().cpu().contiguous() for t in tensors]
        if to == self._worker:
            self._deliver(key, host_side)
            return
        parts = [memoryview(_header(self._generation, key, host_side))]
        parts += [_bytes_of(t) for t in host_side if t.numel()]
        outgoing = self._outgoing.get(to) or self._connect(to)
        with self._lock:
            outgoing.queue.extend(parts)
        self._wake()

    def receive(self, key: Key, timeout_s: float) -> tuple[Tensor, ...]:
        """Wait for the tensors of ``key``.

        Raises:
            PeerLostError: a fault was noticed, or nothing came within ``timeout_s`` seconds.
        """
        self._fault.wait_for(lambda: key in self._mail, timeout_s, f"waiting for {key}")
        with self._lock:
            return self._mail.pop(key)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, say goodbye to every peer, and stop; idempotent."""
        if self._closing:
            return
        if self._started and self._fault.reason is None:
            bye = _header(self._generation, Key(_KIND_BYE, 0, 0), [])
            with self._lock:
                for outgoing in self._outgoing.values():
                    outgoing.queue.append(memoryview(bye))
        self._closing = True
        if self._started:
            self._wake()
            self._thread.join(timeout_s)
        else:
            self._release()

    def _connect(self, to: int) -> _Outgoing:
        peer = self._peers[to]
        try:
            sock = socket.create_connection((peer.host, peer.port), timeout=10.0)
        except OSError as error:
            self._fault.set(f"worker {to} cannot be reached at {peer.host}:{peer.port} ({error})")
            self._fault.check()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        outgoing = _Outgoing(sock)
        token = bytes.fromhex(peer.token)
        outgoing.queue.append(
            memoryview(_HELLO.pack(_MAGIC, self._generation, self._worker, token))
        )
        with self._lock:
            self._outgoing[to] = outgoing
        return outgoing

    def _wake(self) -> None:
        # A full wake pipe means that the thread has not run yet and will look anyway.
        with contextlib.suppress(BlockingIOError):
            self._wake_w.send(b"x", socket.MSG_DONTWAIT)

    def _loop(self) -> None:
        try:
            while True:
                self._register_writers()
                if self._closing and not any(o.queue for o in self._outgoing.values()):
                    return
                if self._closing and self._fault.reason is not None:
                    return
                for selected, _ in self._selector.select():
                    if selected.fileobj is self._wake_r:
                        self._drain_wakes()
                    elif callable(selected.data):
                        selected.data()
                    elif isinstance(selected.data, _Incoming):
                        self._read(selected.data)
                    else:
                        self._write(*selected.data)
        except Exception as error:
            self._fault.set(f"transport of worker {self._worker} failed: {error!r}")
            raise
        finally:
            self._release()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass

    def _register_writers(self) -> None:
        with self._lock:
            waiting = [(to, o) for to, o in self._outgoing.items() if o.queue and not o.registered]
        for to, outgoing in waiting:
            self._selector.register(outgoing.sock, selectors.EVENT_WRITE, (to, outgoing))
            outgoing.registered = True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        sock.setblocking(False)
        incoming = _Incoming(sock)
        incoming.view = memoryview(incoming.buffer)
        self._selector.register(sock, selectors.EVENT_READ, incoming)

    def _write(self, to: int, outgoing: _Outgoing) -> None:
        try:
            while outgoing.queue:
                part = outgoing.queue[0]
                sent = outgoing.sock.send(part)
                if sent == len(part):
                    outgoing.queue.popleft()
                else:
                    outgoing.queue[0] = part[sent:]
        except BlockingIOError:
            return
        except OSError as error:
            self._selector.unregister(outgoing.sock)
            outgoing.queue.clear()
            self._fault.set(f"connection to worker {to} broke ({error})")
            return
        self._selector.unregister(outgoing.sock)
        outgoing.registered = False

    def _read(self, incoming: _Incoming) -> None:
        try:
            while True:
                got = incoming.sock.recv_into(incoming.view[incoming.filled :])
                if got == 0:
                    self._lost(incoming, "closed its connection")
                    return
                incoming.filled += got
                if incoming.filled == incoming.want and not self._advance(incoming):
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(incoming, f"broke its connection ({error})")

    def _advance(self, incoming: _Incoming) -> bool:
        """Go on after a complete part; False if the connection was dropped."""
        if incoming.state == "hello":
            magic, generation, sender, token = _HELLO.unpack(incoming.buffer)
            genuine = hmac.compare_digest(token, bytes.fromhex(self._token))
            if magic != _MAGIC or generation != self._generation or not genuine:
                # A stranger, or a worker of another generation: nothing it says counts.
                self._drop(incoming)
                return False
            incoming.sender = sender
            self._incoming[sender] = incoming
            self._expect(incoming, "frame", _FRAME.size)
            return True
        if incoming.state == "frame":
            return self._begin_frame(incoming)
        if incoming.state == "shapes":
            self._begin_payload(incoming)
        else:
            incoming.pending.popleft()
        self._next_payload(incoming)
        return True

    def _begin_frame(self, incoming: _Incoming) -> bool:
        magic, generation, step, kind, stage, microbatch, count = _FRAME.unpack(incoming.buffer)
        if magic != _MAGIC or generation != self._generation or count > _MAX_TENSORS:
            self._lost(incoming, "sent a malformed frame")
            return False
        if kind == _KIND_BYE:
            self._said_bye.add(incoming.sender)
            self._expect(incoming, "frame", _FRAME.size)
            return True
        incoming.key = Key(kind, step, stage, microbatch)
        incoming.count = count
        if count:
            self._expect(incoming, "shapes", count * _TENSOR.size)
        else:
            incoming.tensors = []
            self._next_payload(incoming)
        return True

    def _begin_payload(self, incoming: _Incoming) -> None:
        incoming.tensors = []
        for i in range(incoming.count):
            code, ndim, *shape = _TENSOR.unpack_from(incoming.buffer, i * _TENSOR.size)
            tensor = torch.empty(shape[:ndim], dtype=_DTYPES[code])
            if tensor.nbytes > _MAX_BYTES:
                raise ValueError(f"frame of {tensor.nbytes} bytes")
            incoming.tensors.append(tensor)
            if tensor.numel():
                incoming.pending.append((_bytes_of(tensor), tensor))

    def _next_payload(self, incoming: _Incoming) -> None:
        if incoming.pending:
            incoming.state = "payload"
            incoming.view, _ = incoming.pending[0]
            incoming.want = len(incoming.view)
            incoming.filled = 0
            return
        assert incoming.key is not None
        self._deliver(incoming.key, incoming.tensors)
        incoming.tensors = []
        self._expect(incoming, "frame", _FRAME.size)

    @staticmethod
    def _expect(incoming: _Incoming, state: str, size: int) -> None:
        incoming.state, incoming.want, incoming.filled = state, size, 0
        incoming.buffer = bytearray(size)
        incoming.view = memoryview(incoming.buffer)

    def _deliver(self, key: Key, tensors: Sequence[Tensor]) -> None:
        with self._lock:
            self._mail[key] = tuple(tensors)
        self._fault.notify()

    def _lost(self, incoming: _Incoming, what: str) -> None:
        self._drop(incoming)
        expected = incoming.sender in self._said_bye or incoming.sender < 0
        if not expected and not self._closing:
            self._fault.set(f"worker {incoming.sender} {what}")

    def _drop(self, incoming: _Incoming) -> None:
        self._selector.unregister(incoming.sock)
        incoming.sock.close()

    def _release(self) -> None:
        for registered in list(self._selector.get_map().values()):
            fileobj = registered.fileobj
            if isinstance(fileobj, socket.socket):
                fileobj.close()
        self._selector.close()
        for outgoing in self._outgoing.values():
            outgoing.sock.close()
        self._wake_w.close()


def _header(generation: int, key: Key, tensors: Sequence[Tensor]) -> bytes:
    out = _FRAME.pack(
        _MAGIC, generation, key.step, key.kind, key.stage, key.microbatch, len(tensors)
    )
    for tensor in tensors:
        shape = list(tensor.shape) + [0] * (8 - tensor.dim())
        out += _TENSOR.pack(_DTYPES.index(tensor.dtype), tensor.dim(), *shape)
    return out


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous, non-empty CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
