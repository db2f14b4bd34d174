"""Links between workers, as runs measure them.

What counts for a schedule is the time from the end of an action to the moment at which another
worker, which has nothing else to do, has its rows. It is fitted as seconds a transfer and seconds a
byte, within nodes and between them. Clocks of two nodes may differ: activations go one way and
their gradients the other, so the difference cancels out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dtrain.scheduler.costs import Cluster, node_of
from dtrain.scheduler.fit import median, robust_fit

TRANSFER_S = 1e-3
"""Of a transfer before any was measured: sending a megabyte between two workers of one machine
took 0.85 ms. Else a plan that sends all the time passes for as fast as one that sends nothing."""
_ENOUGH = 12
_MOST = 1024


@dataclass(frozen=True)
class Link:
    """``latency_s`` a transfer, and ``bandwidth_bytes_s``; None: bytes take no time."""

    latency_s: float
    bandwidth_bytes_s: float | None = None

    def __str__(self) -> str:
        rate = self.bandwidth_bytes_s
        said = "bytes take no time" if rate is None else f"{rate / 1e9:.3g} GB/s"
        return f"{1e3 * self.latency_s:.3g} ms a transfer and {said}"


@dataclass(frozen=True)
class Delay:
    """``num_bytes`` that ``target`` waited for came ``seconds`` after ``source`` had them.

    ``seconds`` is the clock of the target less that of the source.
    """

    source: int
    target: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class LinkSpeeds:
    """Links ``within`` a node and ``between`` nodes; None where none was measured."""

    within: Link | None = None
    between: Link | None = None

    def __str__(self) -> str:
        said = {"within a node": self.within, "between nodes": self.between}
        known = [f"{name} {link}" for name, link in said.items() if link is not None]
        return "; ".join(known) or "no transfer was waited for"

    @classmethod
    def from_json(cls, raw: Mapping[str, Sequence[float | None] | None]) -> LinkSpeeds:
        """From what :meth:`as_json` made."""
        links = (raw["within"], raw["between"])
        return cls(*(None if link is None else Link(*link) for link in links))  # type: ignore[arg-type]

    def as_json(self) -> dict[str, list[float | None] | None]:
        """Plain JSON values."""
        links = {"within": self.within, "between": self.between}
        return {
            name: None if link is None else [link.latency_s, link.bandwidth_bytes_s]
            for name, link in links.items()
        }

    def of(self, cluster: Cluster) -> Cluster:
        """The cluster with these links, and usual ones where none was measured."""
        between, within = self.between or Link(TRANSFER_S), self.within
        return replace(
            cluster,
            bandwidth_bytes_s=between.bandwidth_bytes_s,
            latency_s=between.latency_s,
            local_bandwidth_bytes_s=within.bandwidth_bytes_s if within else None,
            local_latency_s=within.latency_s if within else None,
        )


def measured_links(
    delays: Iterable[Delay], domains: Mapping[int, Sequence[str]], known: LinkSpeeds
) -> LinkSpeeds:
    """Links fitted to what the workers have seen; ``known`` where they have seen too little.

    ``domains``: of the workers, as in :class:`Cluster`.
    """
    pairs: dict[tuple[int, int], list[Delay]] = {}
    for delay in delays:
        pairs.setdefault((delay.source, delay.target), []).append(delay)
    within: list[tuple[int, float]] = []
    between: list[tuple[int, float]] = []
    for (source, target), seen in sorted(pairs.items()):
        if node_of(domains.get(source)) == node_of(domains.get(target)):
            within += [(d.num_bytes, d.seconds) for d in seen]
            continue
        back = pairs.get((target, source))
        if back is not None:
            ahead_s, back_s = (median([d.seconds for d in way]) for way in (seen, back))
            clock_s = (ahead_s - back_s) / 2
            between += [(d.num_bytes, d.seconds - clock_s) for d in seen]
    return LinkSpeeds(_fitted(within) or known.within, _fitted(between) or known.between)


def _fitted(seen: Sequence[tuple[int, float]]) -> Link | None:
    if len(seen) < _ENOUGH:
        return None
    some = seen[:: -(-len(seen) // _MOST)]
    rows = [(float(num_bytes), 1.0) for num_bytes, _ in some]
    a_byte, latency_s = robust_fit(rows, [max(0.0, seconds) for _, seconds in some])
    return Link(latency_s, 1.0 / a_byte if a_byte > 0 else None)
