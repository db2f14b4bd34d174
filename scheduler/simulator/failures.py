"""What goes wrong, and when: models of failures, stragglers, splits and spot capacity.

A model and a seed give a list of incidents before anything is simulated, so that different ways of
recovering meet the very same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dtrain.scheduler.chance import Chance
from dtrain.scheduler.costs import UNIFORM, Cluster

Cause = Literal[
    "crash", "hang", "node", "rack", "partition", "straggler", "removed", "added", "preempted"
]


@dataclass(frozen=True)
class Incident:
    """Something that happens to workers.

    ``away_s``: how long their devices are away; 0: only the processes end; infinity: for good.
    ``factor``: how many times longer a straggler takes, for ``away_s`` seconds.
    """

    time_s: float
    cause: Cause
    workers: tuple[int, ...]
    away_s: float = 0.0
    factor: float = 1.0


class Slowness:
    """Which devices are slow, and how much.

    It is the device that is slow, whatever becomes of the process on it; one that is struck again
    is as slow as the worst of what has not passed yet.
    """

    def __init__(self) -> None:
        self._struck: dict[int, list[tuple[float, float]]] = {}

    def strike(self, incident: Incident) -> float:
        """A straggler begins; when it has passed, in seconds."""
        until_s = incident.time_s + incident.away_s
        for w in incident.workers:
            before = (s for s in self._struck.get(w, ()) if s[0] > incident.time_s)
            self._struck[w] = [*before, (until_s, incident.factor)]
        return until_s

    def replaced(self, workers: Iterable[int]) -> None:
        """Workers are other devices from now on."""
        for w in workers:
            self._struck.pop(w, None)

    def factor(self, worker: int, now_s: float) -> float:
        """How many times longer than usual the worker takes now."""
        struck = self._struck.get(worker, ())
        return max((factor for until_s, factor in struck if until_s > now_s), default=1.0)

    def slow(self, now_s: float) -> dict[int, float]:
        """The factors of all workers that are slow now."""
        factors = {w: self.factor(w, now_s) for w in self._struck}
        return {w: factor for w, factor in factors.items() if factor != 1.0}


@dataclass(frozen=True)
class FailureModel:
    """Failures as Poisson processes. Times are seconds; None: this does not happen.

    ``every_s``: mean time between failures of single workers, over the whole cluster.
    ``worker_every_s``: the same of each worker; both add up. ``hang_share``: of these, the share
    that hangs and does not crash. ``broken_share``: the share after which the device is away for
    ``repair_s``; else the process is started anew at once. ``node_every_s``, ``rack_every_s``: mean
    time between losses of a whole node or rack, over the whole cluster; they are away for
    ``repair_s``. ``node_size``, ``rack_size``: in workers. ``flapping``: so many workers, the first
    ones, also crash every ``flap_every_s`` seconds each.
    """

    every_s: float | None = None
    worker_every_s: float | None = None
    hang_share: float = 0.1
    broken_share: float = 0.25
    repair_s: float = 1800.0
    node_every_s: float | None = None
    node_size: int = 8
    rack_every_s: float | None = None
    rack_size: int = 32
    flapping: int = 0
    flap_every_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("every_s", "worker_every_s", "node_every_s", "rack_every_s", "flap_every_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"failures: expected {name} above 0, got {value}")
        for name in ("hang_share", "broken_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"failures: expected {name} in [0, 1], got {getattr(self, name)}")
        if self.repair_s < 0 or self.node_size < 1 or self.rack_size < self.node_size:
            raise ValueError("failures: expected repair_s >= 0 and rack_size >= node_size >= 1")

    def losses_per_s(self, workers: int) -> float:
        """Incidents per second that take at least one worker."""
        rate = sum(
            1 / every
            for every in (self.every_s, self.node_every_s, self.rack_every_s)
            if every is not None
        )
        if self.worker_every_s is not None:
            rate += workers / self.worker_every_s
        return rate + min(self.flapping, workers) / self.flap_every_s

    def domains(self, workers: Iterable[int]) -> Cluster:
        """The failure domains of workers, where nodes or racks fail at all."""
        if self.node_every_s is None and self.rack_every_s is None:
            return UNIFORM
        node, rack = self.node_size, self.rack_size
        return Cluster(domains={w: (f"rack {w // rack}", f"node {w // node}") for w in workers})


@dataclass(frozen=True)
class StragglerModel:
    """Every ``every_s`` seconds on average some worker takes ``factor`` times as long, for a time
    of ``lasts_s`` seconds on average."""

    every_s: float | None = None
    factor: float = 3.0
    lasts_s: float = 600.0

    def __post_init__(self) -> None:
        if (self.every_s is not None and not self.every_s > 0) or self.lasts_s <= 0:
            raise ValueError("stragglers: expected every_s and lasts_s above 0")
        if self.factor < 1:
            raise ValueError(f"stragglers: expected a factor of at least 1, got {self.factor}")


@dataclass(frozen=True)
class SplitModel:
    """Every ``every_s`` seconds on average the network cuts a rack off from all others, for a time
    of ``lasts_s`` seconds on average."""

    every_s: float | None = None
    lasts_s: float = 30.0

    def __post_init__(self) -> None:
        if (self.every_s is not None and not self.every_s > 0) or self.lasts_s <= 0:
            raise ValueError("partitions: expected every_s and lasts_s above 0")


@dataclass(frozen=True)
class CapacityChange:
    """A row of a spot trace: ``count`` workers more or fewer at ``time_s``."""

    time_s: float
    kind: Literal["add", "remove"]
    count: int


def draw_incidents(
    seed: int,
    workers: int,
    duration_s: float,
    failures: FailureModel,
    stragglers: StragglerModel | None = None,
    splits: SplitModel | None = None,
) -> list[Incident]:
    """All incidents before ``duration_s`` in a cluster of workers 0 to ``workers - 1``, in order.

    Each kind has a stream of its own, so that adding one does not change the others.

    Raises:
        ValueError: partitions are wanted and all workers are in one rack.
    """
    if splits is not None and splits.every_s is not None and workers <= failures.rack_size:
        raise ValueError(
            f"partitions: expected rack_size below the {workers} workers, got {failures.rack_size}"
        )
    chance = Chance("incidents", seed)
    found: list[Incident] = []
    everyone = range(workers)

    def times(name: str, every_s: float | None) -> Iterable[tuple[float, Chance]]:
        stream = chance.branch(name)
        at = stream.exponential(every_s) if every_s is not None else math.inf
        while at < duration_s:
            yield at, stream
            assert every_s is not None
            at += stream.exponential(every_s)

    def single(at: float, worker: int, stream: Chance) -> Incident:
        cause: Cause = "hang" if stream.random() < failures.hang_share else "crash"
        broken = stream.random() < failures.broken_share
        return Incident(at, cause, (worker,), failures.repair_s if broken else 0.0)

    for at, stream in times("cluster", failures.every_s):
        found.append(single(at, stream.choice(everyone), stream))
    for w in everyone if failures.worker_every_s is not None else ():
        for at, stream in times(f"worker {w}", failures.worker_every_s):
            found.append(single(at, w, stream))
    for w in range(min(failures.flapping, workers)):
        for at, _ in times(f"flapping {w}", failures.flap_every_s):
            found.append(Incident(at, "crash", (w,)))
    groups: list[tuple[Cause, float | None, int]] = [
        ("node", failures.node_every_s, failures.node_size),
        ("rack", failures.rack_every_s, failures.rack_size),
    ]
    for cause, every_s, size in groups:
        for at, stream in times(cause, every_s):
            lost = _group(stream.choice(everyone), size, workers)
            found.append(Incident(at, cause, lost, failures.repair_s))
    if stragglers is not None:
        for at, stream in times("straggler", stragglers.every_s):
            lasts_s = stream.exponential(stragglers.lasts_s)
            slow = (stream.choice(everyone),)
            found.append(Incident(at, "straggler", slow, lasts_s, stragglers.factor))
    if splits is not None:
        for at, stream in times("partition", splits.every_s):
            away = _group(stream.choice(everyone), failures.rack_size, workers)
            found.append(Incident(at, "partition", away, stream.exponential(splits.lasts_s)))
    return sorted(found, key=lambda i: (i.time_s, i.cause, i.workers))


def _group(worker: int, size: int, workers: int) -> tuple[int, ...]:
    first = worker - worker % size
    return tuple(range(first, min(first + size, workers)))


def trace_incidents(
    seed: int, workers: int, trace: Sequence[CapacityChange], notice_s: float = 0.0
) -> list[Incident]:
    """A spot trace as incidents, on a job that starts with workers 0 to ``workers - 1``.

    Which workers are removed is drawn; new ones take the lowest free numbers. ``notice_s``: warning
    before a removal.

    Raises:
        ValueError: it removes more workers than there are.
    """
    chance = Chance("trace", seed)
    present = set(range(workers))
    found = []
    for change in sorted(trace, key=lambda c: c.time_s):
        if change.kind == "add":
            free = (w for w in range(len(present) + change.count) if w not in present)
            new = tuple(w for w, _ in zip(free, range(change.count), strict=False))
            present.update(new)
            found.append(Incident(change.time_s, "added", new))
        else:
            if change.count > len(present):
                raise ValueError(
                    f"trace: at {change.time_s:g} s expected to remove at most the "
                    f"{len(present)} workers that are there, got {change.count}"
                )
            gone = tuple(sorted(chance.sample(sorted(present), change.count)))
            present.difference_update(gone)
            if notice_s > 0:
                warned = max(0.0, change.time_s - notice_s)
                found.append(Incident(warned, "preempted", gone))
            found.append(Incident(change.time_s, "removed", gone, math.inf))
    return sorted(found, key=lambda i: i.time_s)


def draw_spot_trace(
    seed: int,
    workers: int,
    duration_s: float,
    every_s: float,
    *,
    least: int | None = None,
    most: int | None = None,
) -> list[CapacityChange]:
    """A made-up spot trace: capacity that drifts between ``least`` and ``most`` workers.

    Changes come every ``every_s`` seconds on average, in bursts of 1 to an eighth of ``workers``,
    small ones more often; where there are few, additions are likelier, where there are many,
    removals.
    """
    least = max(1, workers // 2) if least is None else least
    most = workers + workers // 4 if most is None else most
    if not 0 < least <= workers <= most or every_s <= 0:
        raise ValueError(f"spot trace: expected 0 < least <= {workers} <= most, and every_s > 0")
    chance = Chance("spot", seed)
    out: list[CapacityChange] = []
    now, at = workers, chance.exponential(every_s)
    largest = max(1, workers // 8)
    while at < duration_s:
        count = int(largest ** chance.random())
        above = (now - least) / max(1, most - least)
        if chance.random() < above:
            count = min(count, now - least)
            change = CapacityChange(round(at, 3), "remove", count)
            now -= count
        else:
            count = min(count, most - now)
            change = CapacityChange(round(at, 3), "add", count)
            now += count
        if change.count:
            out.append(change)
        at += chance.exponential(every_s)
    return out
