"""Hosts as network namespaces, joined by a switch in this process that can lose and delay frames.

Each host has its own address, host name and loopback; its interface is a tap device whose other
end is held here. Frames from host to host pass through one thread, so that a cut, a one-way loss
and a delay need nothing of the kernel but namespaces and tap devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import heapq
import os
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.errors import DtrainError

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
# Large frames: each costs a wake-up of the switch.
_MTU = 16000
_BACKLOG_BYTES = 64 << 20


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can. Tries it."""
    try:
        with Hosts(1):
            return None
    except (DtrainError, OSError) as error:
        return str(error)


class Hosts:
    """A number of hosts on one network, made when entered and gone when left.

    Raises:
        DtrainError: namespaces or tap devices are not permitted here.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._prefix = f"dtrain-{os.getpid()}-"
        self._made: list[int] = []
        self._switch: Switch | None = None

    def __enter__(self) -> Hosts:
        try:
            for host in range(self.count):
                _ip("netns", "add", self._name(host))
                self._made.append(host)
            taps = [_in_namespace(self._name(host), _open_tap) for host in self._made]
            self._switch = Switch(taps)
            for host in self._made:
                _ip("-n", self._name(host), "link", "set", "lo", "up")
                address = f"{self.address(host)}/24"
                _ip("-n", self._name(host), "addr", "add", address, "dev", "eth0")
                _ip("-n", self._name(host), "link", "set", "eth0", "mtu", str(_MTU), "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the network and the namespaces away."""
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        while self._made:
            with contextlib.suppress(DtrainError):
                _ip("netns", "delete", self._name(self._made.pop()))

    def address(self, host: int) -> str:
        """The host's address, which is its name too."""
        return f"10.211.77.{host + 1}"

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """``words`` as a command that runs on the host; the process keeps its id."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.address(host)]
        return ["ip", "netns", "exec", self._name(host), *named, *words]

    def cut(self, host: int) -> None:
        """Nothing reaches the host and nothing it sends arrives."""
        self._rule().lose(host, sends=True, receives=True)

    def mute(self, host: int) -> None:
        """Nothing that the host sends arrives."""
        self._rule().lose(host, sends=True, receives=False)

    def delay(self, host: int, delay_s: float) -> None:
        """What the host sends and is sent arrives so much later."""
        self._rule().delay(host, delay_s)

    def heal(self, host: int) -> None:
        """The host's network is whole again."""
        self._rule().lose(host, sends=False, receives=False)
        self._rule().delay(host, 0.0)

    def _rule(self) -> Switch:
        assert self._switch is not None
        return self._switch

    def _name(self, host: int) -> str:
        return f"{self._prefix}{host}"


class Switch:
    """Passes Ethernet frames between tap devices, port by port of the list."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = list(taps)
        self._sends = [True] * len(taps)
        self._receives = [True] * len(taps)
        self._delay_s = [0.0] * len(taps)
        self._port_of: dict[bytes, int] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._waiting_bytes = 0
        self._order = 0
        self._wake_r, self._wake_w = os.pipe()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="chaos-switch", daemon=True)
        self._thread.start()

    def lose(self, port: int, *, sends: bool, receives: bool) -> None:
        """Drop what the port sends, or what it is sent."""
        self._sends[port], self._receives[port] = not sends, not receives

    def delay(self, port: int, delay_s: float) -> None:
        """Hold back what the port sends and is sent."""
        self._delay_s[port] = delay_s

    def close(self) -> None:
        """Stop, and close the taps."""
        self._closing = True
        os.write(self._wake_w, b"x")
        self._thread.join()
        for descriptor in (*self._taps, self._wake_r, self._wake_w):
            os.close(descriptor)

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_r, selectors.EVENT_READ, None)
            for port, tap in enumerate(self._taps):
                selector.register(tap, selectors.EVENT_READ, port)
            while not self._closing:
                timeout = None
                if self._waiting:
                    timeout = max(0.0, self._waiting[0][0] - time.monotonic())
                for key, _ in selector.select(timeout):
                    if key.data is not None:
                        self._read(key.data)
                now = time.monotonic()
                while self._waiting and self._waiting[0][0] <= now:
                    _, _, port, frame = heapq.heappop(self._waiting)
                    self._waiting_bytes -= len(frame)
                    self._write(port, frame)

    def _read(self, port: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(self._taps[port], _MTU + 64)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EIO:
                    # The device is not up yet.
                    return
                raise
            self._port_of[frame[6:12]] = port
            if self._sends[port]:
                self._forward(port, frame)

    def _forward(self, source: int, frame: bytes) -> None:
        known = self._port_of.get(frame[:6])
        ports = range(len(self._taps)) if known is None else (known,)
        for port in ports:
            if port == source or not self._receives[port]:
                continue
            delay_s = self._delay_s[source] + self._delay_s[port]
            if not delay_s:
                self._write(port, frame)
            elif self._waiting_bytes < _BACKLOG_BYTES:
                self._order += 1
                due = (time.monotonic() + delay_s, self._order, port, frame)
                heapq.heappush(self._waiting, due)
                self._waiting_bytes += len(frame)

    def _write(self, port: int, frame: bytes) -> None:
        # A full queue or a device that is down loses the frame, as a network does.
        with contextlib.suppress(OSError):
            os.write(self._taps[port], frame)


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise DtrainError("hosts: expected the command ip, found none; install iproute2") from None
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise DtrainError(f"hosts: ip {' '.join(words)} failed ({reason}); run as root")


def _in_namespace(name: str, action: object) -> int:
    """Call ``action()`` on a thread of its own inside a network namespace."""
    outcome: list[int | BaseException] = []

    def enter() -> None:
        try:
            descriptor = os.open(Path("/var/run/netns") / name, os.O_RDONLY)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(descriptor, _CLONE_NEWNET):
                    code = ctypes.get_errno()
                    raise OSError(code, os.strerror(code))
            finally:
                os.close(descriptor)
            assert callable(action)
            outcome.append(action())
        except OSError as error:
            outcome.append(error)

    # The namespace is the thread's own and ends with it.
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise DtrainError(
            f"hosts: a tap device in namespace {name} failed ({outcome[0]}); run as root"
        )
    return outcome[0]


def _open_tap() -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
