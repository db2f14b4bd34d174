"""Side-by-side timing: contenders take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtrain.errors import DtrainError

OURS = "dtrain"
PEERS = {"torch": "torch", "pyg": "torch_geometric"}
_FEWEST, _MOST = 3, 25
_HOPELESS = 4.0


@dataclass(frozen=True)
class Row:
    """One comparison: medians in milliseconds, and ``ratio`` = ``peer_ms / ms`` (above 1: faster).

    ``peer``: the peer and which of its ways was the fastest.
    """

    op: str
    graph: str
    shape: str
    ms: float
    peer: str
    peer_ms: float
    ratio: float

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def installed(against: str) -> list[str]:
    """The peers of a comma-separated list that are installed, in its order.

    Raises:
        DtrainError: a name that is none of the known peers.
    """
    names = [name.strip() for name in against.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise DtrainError(f"--against: expected some of {', '.join(PEERS)}, got {name!r}")
    return [name for name in names if importlib.util.find_spec(PEERS[name]) is not None]


def elapsed_s(call: Callable[[], object]) -> float:
    """Seconds that a call took on this processor's clock."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def medians_ms(
    contenders: Mapping[str, Callable[[], object]],
    budget_s: float,
    timed: Callable[[Callable[[], object]], float] = elapsed_s,
) -> dict[str, float]:
    """Median time of each, in milliseconds, called in turns until ``budget_s`` is over.

    Every one is called once before the first measurement, and at least three times after it,
    except a peer's way that was then far slower than another way of the same peer. ``timed`` calls
    one and gives the seconds it took. The order is drawn anew for each turn: after the same
    contender every time, one would always find the caches as that one left them.
    """
    shuffle = random.Random(0).shuffle
    first = {name: timed(call) for name, call in contenders.items()}
    taken: dict[str, list[float]] = {}
    for name, seconds in first.items():
        best = min(s for n, s in first.items() if _peer(n) == _peer(name))
        if seconds <= _HOPELESS * best:
            taken[name] = []
    end = time.perf_counter() + budget_s
    turns = 0
    while turns < _FEWEST or (turns < _MOST and time.perf_counter() < end):
        names = list(taken)
        shuffle(names)
        for name in names:
            taken[name].append(timed(contenders[name]))
        turns += 1
    return {name: statistics.median(times) * 1e3 for name, times in taken.items()}


def _peer(name: str) -> str:
    return name.partition(":")[0]


def compare(
    op: str,
    graph: str,
    shape: str,
    contenders: Mapping[str, Callable[[], object]],
    budget_s: float,
) -> list[Row]:
    """One row for each peer among the contenders, whose names are ``peer`` or ``peer: way``."""
    times = medians_ms(contenders, budget_s)
    rows = []
    for peer in dict.fromkeys(_peer(name) for name in times if name != OURS):
        ways = {n: t for n, t in times.items() if _peer(n) == peer}
        best = min(ways, key=lambda n: ways[n])
        ratio = round(ways[best] / times[OURS], 2)
        row = Row(op, graph, shape, round(times[OURS], 3), best, round(ways[best], 3), ratio)
        rows.append(row)
    return rows


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """The geometric mean, rounded to two places; None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return round(math.exp(sum(logs) / len(logs)), 2) if logs else None
