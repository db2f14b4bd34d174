"""Links between workers, fitted to what was waited for."""

from __future__ import annotations

import json
import random

import pytest

from dtrain.scheduler import Cluster
from dtrain.scheduler.links import TRANSFER_S, Delay, Link, LinkSpeeds, measured_links

NODES = {0: ("rack", "a"), 1: ("rack", "a"), 2: ("rack", "b"), 3: ("rack", "b")}
LOCAL, REMOTE = Link(2e-4, 4e9), Link(3e-3, 1e9)


def seen(
    source: int, target: int, link: Link, count: int = 40, clock_s: float = 0.0
) -> list[Delay]:
    draw = random.Random(10 * source + target)
    found = []
    for n in range(count):
        size = draw.randrange(1_000, 4_000_000)
        took = (link.latency_s + size / (link.bandwidth_bytes_s or 1)) * draw.uniform(0.97, 1.03)
        # Now and then something else has the cores.
        found.append(Delay(source, target, size, clock_s + took + (0.2 if n % 9 == 8 else 0.0)))
    return found


def close(link: Link | None, wanted: Link) -> bool:
    assert link is not None
    assert link.bandwidth_bytes_s is not None
    assert wanted.bandwidth_bytes_s is not None
    return (
        abs(link.latency_s / wanted.latency_s - 1) < 0.1
        and abs(link.bandwidth_bytes_s / wanted.bandwidth_bytes_s - 1) < 0.1
    )


def test_links_within_and_between_nodes_are_told_apart_whatever_their_clocks_say() -> None:
    delays = [*seen(0, 1, LOCAL), *seen(3, 2, LOCAL)]
    # Node b's clock is an hour ahead.
    delays += seen(1, 2, REMOTE, clock_s=3600.0) + seen(2, 1, REMOTE, clock_s=-3600.0)
    found = measured_links(delays, NODES, LinkSpeeds())
    assert close(found.within, LOCAL)
    assert close(found.between, REMOTE)
    cluster = found.of(Cluster({1: 2.0}, domains=NODES))
    assert cluster.slowness == {1: 2.0}
    near, far = (cluster.transfer_ticks(0, w, 2_000_000) for w in (1, 2))
    assert near == pytest.approx(0.7e6, rel=0.1)
    assert far == pytest.approx(5e6, rel=0.1)


def test_the_order_in_which_workers_tell_decides_nothing() -> None:
    delays = [*seen(0, 1, LOCAL), *seen(1, 0, LOCAL)]
    turned = delays[40:] + delays[:40]
    assert measured_links(delays, NODES, LinkSpeeds()) == measured_links(
        turned, NODES, LinkSpeeds()
    )


def test_what_too_few_have_seen_stays_as_it_was_known() -> None:
    known = LinkSpeeds(within=Link(1.0, 1.0))
    # A clock that cannot be compared tells nothing.
    delays = seen(0, 1, LOCAL, count=5) + seen(1, 2, REMOTE, clock_s=3600.0)
    found = measured_links(delays, NODES, known)
    assert found == known
    cluster = found.of(Cluster(domains=NODES))
    assert cluster.transfer_ticks(0, 2, 10**9) == round(1e9 * TRANSFER_S)
    assert cluster.transfer_ticks(0, 1, 1) == 2_000_000_000
    assert LinkSpeeds().of(Cluster()).transfer_ticks(0, 1, 10**9) == round(1e9 * TRANSFER_S)


def test_they_travel_as_json() -> None:
    for links in (LinkSpeeds(), LinkSpeeds(LOCAL), LinkSpeeds(Link(1e-4), REMOTE)):
        assert LinkSpeeds.from_json(json.loads(json.dumps(links.as_json()))) == links
    assert str(LinkSpeeds(LOCAL)) == "within a node 0.2 ms a transfer and 4 GB/s"
    assert "no transfer" in str(LinkSpeeds())
