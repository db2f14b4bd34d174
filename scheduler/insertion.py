"""Putting a few microbatches elsewhere in a schedule that otherwise stays as it is."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, scaled
from dtrain.scheduler.order import policy_of
from dtrain.scheduler.plan import Layout, Orders


def reorder(
    layout: Layout,
    workers: Sequence[int],
    executors: Sequence[Sequence[int]],
    former: Orders,
    moved: Iterable[int],
    costs: StepCosts,
    cluster: Cluster = UNIFORM,
) -> Orders:
    """The former orders where only ``moved`` microbatches are put anew, into gaps first.

    A moved microbatch's chain is taken out of the schedule whole, and each of its actions goes into
    the first gap that is long enough after the one before it, on whoever executes it now: into
    bubbles, or to the end. All other actions keep their planned starts, so that only workers that
    execute something of a moved microbatch get another order, and the cost does not grow with the
    whole plan. The limit on microbatches in flight is kept.
    """
    return _Insertion(layout, tuple(workers), executors, former, costs, cluster).run(sorted(moved))


@dataclass(frozen=True)
class _Slot:
    """A chain's planned times: its actions' starts, forwards up and backwards down."""

    forward: list[int]
    backward: list[int]


class _Insertion:
    """Timelines of the workers that are touched, as sorted busy intervals (start, end)."""

    def __init__(
        self,
        layout: Layout,
        workers: tuple[int, ...],
        executors: Sequence[Sequence[int]],
        former: Orders,
        costs: StepCosts,
        cluster: Cluster,
    ) -> None:
        self.executors = executors
        self.costs, self.cluster = costs, cluster
        self.forward = [list(row) for row in former.forward]
        self.backward = [list(row) for row in former.backward]
        policy = policy_of(layout)
        self.stages = layout.num_stages
        self.limits = [
            policy.limit(self.stages, s, layout.microbatches) for s in range(self.stages)
        ]
        self.busy: dict[int, list[tuple[int, int]]] = {}
        # By worker and stage: what is in flight there, as (start of F, end of B).
        self.flights: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.orders = Orders(workers, executors, former.forward, former.backward)

    def run(self, moved: list[int]) -> Orders:
        """Put every moved microbatch in its new place."""
        out = set(moved)
        for w in sorted({self.executors[s][m] for s in range(self.stages) for m in moved}):
            self._lay_out(w, out)
        # In the order in which they were begun before.
        for m in sorted(moved, key=lambda m: (self.forward[0][m], m)):
            slot = self._place(m)
            for s in range(self.stages):
                self.forward[s][m], self.backward[s][m] = slot.forward[s], slot.backward[s]
                self._occupy(s, m)
        self.orders.forward = tuple(tuple(row) for row in self.forward)
        self.orders.backward = tuple(tuple(row) for row in self.backward)
        return self.orders

    def _ticks(self, table: Sequence[Sequence[int]], s: int, m: int) -> int:
        factor = self.cluster.slow(self.executors[s][m])
        return table[s][m] if factor == 1.0 else scaled(table[s][m], factor)

    def _lay_out(self, worker: int, out: set[int]) -> None:
        self.busy[worker] = []
        for s, m in self.orders.work_of(worker):
            if m not in out:
                self._occupy(s, m)

    def _occupy(self, s: int, m: int) -> None:
        worker = self.executors[s][m]
        begin, back = self.forward[s][m], self.backward[s][m]
        end = back + self._ticks(self.costs.backward, s, m)
        insort(self.busy[worker], (begin, begin + self._ticks(self.costs.forward, s, m)))
        insort(self.busy[worker], (back, end))
        insort(self.flights.setdefault((worker, s), []), (begin, end))

    def _place(self, m: int) -> _Slot:
        release = 0
        while True:
            slot = self._try(m, release)
            full = [
                end for s in range(self.stages) if (end := self._too_many(s, m, slot)) is not None
            ]
            if not full:
                return slot
            # Begin after the first of the ends of what stands in the way.
            release = min(full)

    def _try(self, m: int, release: int) -> _Slot:
        """The earliest chain from ``release`` on, whatever is in flight."""
        slot = _Slot([0] * self.stages, [0] * self.stages)
        at, before = release, -1
        up = range(self.stages)
        for is_backward, s in [*((False, s) for s in up), *((True, s) for s in reversed(up))]:
            worker = self.executors[s][m]
            if before >= 0:
                source = self.executors[before][m]
                at += self.cluster.delay(self.costs, source, worker, min(before, s), m)
            ticks = self._ticks(self.costs.backward if is_backward else self.costs.forward, s, m)
            at = _first_gap(self.busy[worker], at, ticks)
            (slot.backward if is_backward else slot.forward)[s] = at
            at, before = at + ticks, s
        return slot

    def _too_many(self, s: int, m: int, slot: _Slot) -> int | None:
        """If the stage has its limit in flight during the chain, when the first of them ends."""
        begin = slot.forward[s]
        end = slot.backward[s] + self._ticks(self.costs.backward, s, m)
        over = [f for f in self.flights.get((self.executors[s][m], s), []) if f[1] > begin]
        marks = [(max(b, begin), 1) for b, _ in over if b < end] + [(e, -1) for _, e in over]
        alive = 0
        for _, step in sorted(marks):
            alive += step
            if alive >= self.limits[s]:
                return min(e for _, e in over)
        return None


def _first_gap(busy: Sequence[tuple[int, int]], at: int, ticks: int) -> int:
    """The first time from ``at`` on at which ``ticks`` are free."""
    i = bisect_right(busy, (at, 1 << 62))
    if i and busy[i - 1][1] > at:
        at = busy[i - 1][1]
    while i < len(busy) and busy[i][0] < at + ticks:
        at = max(at, busy[i][1])
        i += 1
    return at
