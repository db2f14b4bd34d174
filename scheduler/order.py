"""Order of actions: list scheduling over predicted times.

What is computed are planned starts, which increase along every microbatch's chain of actions;
:class:`dtrain.scheduler.plan.Orders` sorts each worker's actions by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, scaled
from dtrain.scheduler.plan import Layout, Orders


@dataclass(frozen=True)
class Policy:
    """Which ready action a free worker starts.

    ``backwards_first``: 1F1B (Narayanan et al., PipeDream, SOSP 2019), else GPipe (Huang et al.,
    NeurIPS 2019), where a worker runs all its forwards before its first backward. ``ahead``: with
    1F1B a worker has at most ``num_stages - stage + ahead`` microbatches of a stage in flight.
    ``rank[m]``: precedence among the microbatches that are ready, lowest first; empty: arrival.
    ``rank_first``: precedence counts before everything else, else among the actions of a stage.
    """

    backwards_first: bool = True
    ahead: int = 0
    rank: tuple[int, ...] = ()
    rank_first: bool = False

    def limit(self, num_stages: int, stage: int, microbatches: int) -> int:
        """Most microbatches of ``stage`` in flight on a worker."""
        if not self.backwards_first:
            return microbatches
        return max(1, min(microbatches, num_stages - stage + self.ahead))


def policy_of(layout: Layout) -> Policy:
    """The policy that the layout names."""
    return Policy(backwards_first=layout.schedule != "gpipe")


def order_actions(
    layout: Layout,
    workers: Sequence[int],
    executors: Sequence[Sequence[int]],
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
    policy: Policy | None = None,
) -> Orders:
    """Each worker's actions in order.

    The step is executed on paper with the predicted costs (a forward 1 and a backward 2 where none
    are given); what a free worker starts first is next in its order. The limit in flight counts for
    each stage by itself, and a stage's backward needs only what later stages do: so the deepest
    stage that has something in flight can always go on, and everything gets its turn.
    """
    costs = costs or StepCosts.even(layout)
    return _Paper(layout, workers, executors, costs, cluster, policy or policy_of(layout)).run()


class _Desk:
    """A worker in the execution on paper that fixes the order."""

    __slots__ = ("backwards", "busy", "factor", "forwards", "in_flight", "left")

    def __init__(self, stages: int, factor: float) -> None:
        self.busy = False
        self.left = 0
        self.factor = factor
        # Ready forwards by stage, as (rank, microbatch); ready backwards, deepest stage first.
        self.forwards: list[list[tuple[int, int]] | None] = [None] * stages
        self.backwards: list[tuple[int, int, int]] = []
        self.in_flight = [0] * stages


class _Paper:
    """One execution on paper."""

    def __init__(
        self,
        layout: Layout,
        workers: Sequence[int],
        executors: Sequence[Sequence[int]],
        costs: StepCosts,
        cluster: Cluster,
        policy: Policy,
    ) -> None:
        stages = layout.num_stages
        self.layout, self.costs, self.cluster, self.policy = layout, costs, cluster, policy
        self.workers, self.executors = tuple(workers), executors
        self.desks = {w: _Desk(stages, cluster.slow(w)) for w in workers}
        for runs in executors:
            for w in runs:
                self.desks[w].left += 1
        self.limits = [policy.limit(stages, s, layout.microbatches) for s in range(stages)]
        self.rank = policy.rank or tuple(range(layout.microbatches))
        # Forwards of the last stages first, unless all forwards come first anyway.
        self.stage_order = list(range(stages))
        if policy.backwards_first:
            self.stage_order.reverse()
        self.forward = [[0] * layout.microbatches for _ in range(stages)]
        self.backward = [[0] * layout.microbatches for _ in range(stages)]
        # Time, number, whether inputs arrived (else an action ended), and which action.
        self.clock: list[tuple[int, int, bool, bool, int, int]] = []
        self.count = 0
        self.started = 0

    def run(self) -> Orders:
        """Execute the step and return the starts."""
        desks, clock, executors = self.desks, self.clock, self.executors
        for m, w in enumerate(executors[0]):
            self._ready(False, 0, m, desks[w])
        for w in self.workers:
            self._start(0, desks[w])
        while clock:
            now, _, arrived, is_backward, s, m = heapq.heappop(clock)
            worker = executors[s][m]
            desk = desks[worker]
            if arrived:
                self._ready(is_backward, s, m, desk)
                self._start(now, desk)
                continue
            desk.busy = False
            heir = self._heir(is_backward, s, m)
            other = worker
            if heir is not None:
                target = executors[heir[1]][m]
                delay = self._delay(worker, target, min(s, heir[1]), m)
                if delay:
                    self.count += 1
                    heapq.heappush(clock, (now + delay, self.count, True, *heir))
                else:
                    self._ready(*heir, desks[target])
                    other = target
            for w in (worker,) if other == worker else sorted((worker, other)):
                self._start(now, desks[w])
        total = 2 * self.layout.num_stages * self.layout.microbatches
        if self.started != total:
            raise AssertionError(f"order of actions stopped after {self.started} of {total}")
        return Orders(
            self.workers,
            self.executors,
            tuple(tuple(row) for row in self.forward),
            tuple(tuple(row) for row in self.backward),
        )

    def _heir(self, is_backward: bool, s: int, m: int) -> tuple[bool, int, int] | None:
        """The action that the end of another makes possible."""
        if is_backward:
            return None if s == 0 else (True, s - 1, m)
        return (True, s, m) if s == self.layout.num_stages - 1 else (False, s + 1, m)

    def _delay(self, source: int, target: int, lower: int, microbatch: int) -> int:
        return self.cluster.delay(self.costs, source, target, lower, microbatch)

    def _ready(self, is_backward: bool, stage: int, microbatch: int, desk: _Desk) -> None:
        entry = (self.rank[microbatch], microbatch)
        if is_backward:
            heapq.heappush(desk.backwards, (-stage, *entry))
            return
        heap = desk.forwards[stage]
        if heap is None:
            heap = desk.forwards[stage] = []
        heapq.heappush(heap, entry)

    def _start(self, now: int, desk: _Desk) -> None:
        """Let a worker that is free start a ready action."""
        if desk.busy:
            return
        if self.policy.rank_first:
            self._start_lowest(now, desk)
            return
        if desk.backwards and (self.policy.backwards_first or not desk.left):
            negated, _, m = heapq.heappop(desk.backwards)
            s = -negated
            self._begin_backward(now, s, m, desk)
            return
        for s in self.stage_order:
            heap = desk.forwards[s]
            if heap and desk.in_flight[s] < self.limits[s]:
                self._begin_forward(now, s, heapq.heappop(heap)[1], desk)
                return

    def _start_lowest(self, now: int, desk: _Desk) -> None:
        """Start the ready action of the lowest rank, of equal ones the one nearest to its end."""
        best: tuple[int, int, int] | None = None
        if desk.backwards:
            at = min(range(len(desk.backwards)), key=lambda i: desk.backwards[i][1:])
            best = (desk.backwards[at][1], -1, at)
        for s in self.stage_order:
            heap = desk.forwards[s]
            if heap and desk.in_flight[s] < self.limits[s]:
                found = (heap[0][0], 0, s)
                best = found if best is None or found < best else best
        if best is None:
            return
        if best[1] == 0:
            heap = desk.forwards[best[2]]
            assert heap is not None
            self._begin_forward(now, best[2], heapq.heappop(heap)[1], desk)
            return
        negated, _, m = desk.backwards.pop(best[2])
        heapq.heapify(desk.backwards)
        self._begin_backward(now, -negated, m, desk)

    def _begin_forward(self, now: int, s: int, m: int, desk: _Desk) -> None:
        desk.in_flight[s] += 1
        desk.left -= 1
        self.forward[s][m] = now
        self._end(now, False, s, m, self.costs.forward[s][m], desk)

    def _begin_backward(self, now: int, s: int, m: int, desk: _Desk) -> None:
        desk.in_flight[s] -= 1
        self.backward[s][m] = now
        self._end(now, True, s, m, self.costs.backward[s][m], desk)

    def _end(self, now: int, is_backward: bool, s: int, m: int, ticks: int, desk: _Desk) -> None:
        desk.busy = True
        self.count += 1
        self.started += 1
        if desk.factor != 1.0:
            ticks = scaled(ticks, desk.factor)
        heapq.heappush(self.clock, (now + ticks, self.count, False, is_backward, s, m))
