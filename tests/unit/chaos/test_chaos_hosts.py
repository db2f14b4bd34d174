"""The switch between hosts: what is lost and what is late; and real hosts where that is allowed."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dtrain.chaos.hosts import Hosts, Switch, why_not


class Ports:
    """Three ports of a switch, each with an Ethernet address of one letter."""

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
        self.ends = [end for end, _ in pairs]
        for _, tap in pairs:
            tap.setblocking(False)
        self.switch = Switch([tap.detach() for _, tap in pairs])

    def send(self, source: int, target: int | None, text: bytes = b"hello") -> None:
        to = b"\xff" * 6 if target is None else self._address(target)
        self.ends[source].send(to + self._address(source) + b"\x08\x00" + text)

    def receive(self, port: int, timeout_s: float = 5.0) -> bytes | None:
        if not select.select([self.ends[port]], [], [], timeout_s)[0]:
            return None
        return self.ends[port].recv(100)[14:]

    @staticmethod
    def _address(port: int) -> bytes:
        return bytes([2, 0, 0, 0, 0, port])


@pytest.fixture
def ports() -> Iterator[Ports]:
    made = Ports()
    # So that the switch knows who is where.
    for port in range(3):
        made.send(port, None)
        for other in {0, 1, 2} - {port}:
            assert made.receive(other) == b"hello"
    yield made
    made.switch.close()
    for end in made.ends:
        end.close()


def test_frames_go_to_whom_they_are_for(ports: Ports) -> None:
    ports.send(0, 2, b"x")
    assert ports.receive(2) == b"x"
    assert ports.receive(1, 0.1) is None


def test_a_muted_host_hears_and_a_cut_one_does_not(ports: Ports) -> None:
    ports.switch.lose(1, sends=True, receives=False)
    ports.send(1, 0)
    ports.send(0, 1)
    assert ports.receive(1) == b"hello"
    assert ports.receive(0, 0.1) is None
    ports.switch.lose(1, sends=True, receives=True)
    ports.send(0, 1)
    ports.send(0, 2)
    assert ports.receive(2) == b"hello"
    assert ports.receive(1, 0.1) is None
    ports.switch.lose(1, sends=False, receives=False)
    ports.send(1, 0)
    assert ports.receive(0) == b"hello"


def test_a_delay_keeps_the_order(ports: Ports) -> None:
    ports.switch.delay(1, 0.3)
    began = time.monotonic()
    for text in (b"1", b"2", b"3"):
        ports.send(1, 0, text)
    ports.send(2, 0, b"prompt")
    got = [ports.receive(0) for _ in range(4)]
    assert got == [b"prompt", b"1", b"2", b"3"]
    assert time.monotonic() - began >= 0.3


SERVER = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); c, _ = s.accept();"
    "c.sendall(c.recv(9) + socket.gethostname().encode())"
)
CLIENT = (
    "import socket, sys, time\n"
    "for _ in range(200):\n"
    "    try: s = socket.create_connection((sys.argv[1], 7000), timeout=20); break\n"
    "    except ConnectionRefusedError: time.sleep(0.05)\n"
    "s.sendall(b'hi '); print(s.recv(99).decode(), socket.gethostname())"
)


def test_hosts_have_names_and_addresses_and_leave_nothing_behind() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    before = set(os.listdir("/proc/self/fd"))
    with Hosts(2) as hosts:
        script = [sys.executable, "-c"]
        server = subprocess.Popen(hosts.command(1, [*script, SERVER, hosts.address(1)]))
        said = subprocess.run(
            hosts.command(0, [*script, CLIENT, hosts.address(1)]),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        server.wait(10)
    assert said.stdout.split() == ["hi", hosts.address(1), hosts.address(0)], said.stderr
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"dtrain-{os.getpid()}-" not in listed.stdout
    with suppress(FileNotFoundError):
        assert set(os.listdir("/proc/self/fd")) == before
