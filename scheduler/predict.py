"""What a plan will take: the step executed on paper, every worker following its own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, scaled
from dtrain.scheduler.plan import Action, Orders, Plan


class Span(NamedTuple):
    """When an action runs, in ticks from the beginning of the step."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected to go; times in ticks.

    ``spans[w]``: what worker ``w`` does when. ``makespan``: when the last action ends.
    ``step_ticks``: with the exact sum, the update and what else a step costs. ``busy[w]``: time in
    actions. ``critical_path``: the longest chain of one microbatch, transfers included.
    ``memory_bytes[w]``: most that states and kept activations take at a time. ``over``: workers
    whose memory that exceeds.
    """

    spans: Mapping[int, Sequence[Span]] = field(repr=False)
    makespan: int
    step_ticks: int
    busy: dict[int, int]
    critical_path: int
    memory_bytes: dict[int, int]
    over: tuple[int, ...]

    @property
    def lower_bound(self) -> int:
        """No order of these actions on these executors can be shorter."""
        return max(self.critical_path, max(self.busy.values()))

    @property
    def bubble(self) -> float:
        """Share of the workers' time in which they wait, before the exact sum."""
        total = len(self.busy) * self.makespan
        return 1.0 - sum(self.busy.values()) / total if total else 0.0


def predict(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> Prediction:
    """Execute a step of ``plan`` on paper.

    Transfers overlap with computation and have the links to themselves; a worker waits for the
    inputs of the next action in its order.

    Raises:
        ValueError: the costs do not fit the plan's layout, or its orders deadlock.
    """
    costs.check(plan.layout)
    walk = _Walk(plan, costs, cluster)
    walk.run()
    makespan = max(walk.free.values(), default=0)
    memory = peak_memory(plan, costs)
    return Prediction(
        walk.spans,
        makespan,
        makespan + longest_sum(plan.holders, costs) + costs.fixed_ticks,
        walk.busy,
        _critical_path(plan, costs, cluster),
        memory,
        tuple(w for w in plan.workers if memory[w] > cluster.memory_bytes.get(w, memory[w])),
    )


def planned_end(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> tuple[int, int]:
    """When the last backward of the first stage ends by the planned starts, and its microbatch.

    Following the orders takes no longer, if the costs are those that the plan was made with.
    """
    assert isinstance(plan.actions, Orders), "the planner plans starts"
    ticks: Sequence[int] = costs.backward[0]
    if cluster.slowness:
        pairs = zip(ticks, plan.executors[0], strict=True)
        ticks = [scaled(t, cluster.slow(w)) for t, w in pairs]
    ends = list(map(add, plan.actions.backward[0], ticks))
    last = max(ends)
    return last, ends.index(last)


def longest_sum(holders: Sequence[Sequence[int]], costs: StepCosts) -> int:
    """Ticks of the exact sums and updates of the worker that holds most."""
    if not costs.sum_ticks:
        return 0
    total: dict[int, int] = {}
    for ticks, members in zip(costs.sum_ticks, holders, strict=True):
        for w in members:
            total[w] = total.get(w, 0) + ticks
    return max(total.values())


def peak_memory(plan: Plan, costs: StepCosts) -> dict[int, int]:
    """Most bytes that states and kept activations take at a time, for each worker."""
    peak = dict.fromkeys(plan.workers, 0)
    if costs.state_bytes:
        for s, members in enumerate(plan.holders):
            for w in members:
                peak[w] += costs.state_bytes[s]
    if costs.kept_bytes:
        for w in plan.workers:
            kept = most = 0
            for kind, s, m in plan.actions[w]:
                if kind == "F":
                    kept += costs.kept_bytes[s][m]
                    most = max(most, kept)
                else:
                    kept -= costs.kept_bytes[s][m]
            peak[w] += most
    return peak


def excess_bytes(prediction: Prediction, cluster: Cluster) -> int:
    """Bytes by which a plan exceeds the workers' memories, over all of them."""
    limit, used = cluster.memory_bytes, prediction.memory_bytes
    return sum(used[w] - limit[w] for w in prediction.over)


class _Walk:
    """Workers at their places in their orders."""

    def __init__(self, plan: Plan, costs: StepCosts, cluster: Cluster) -> None:
        self.plan, self.costs, self.cluster = plan, costs, cluster
        self.orders = {w: plan.actions[w] for w in plan.workers}
        self.at = dict.fromkeys(plan.workers, 0)
        self.free = dict.fromkeys(plan.workers, 0)
        self.busy = dict.fromkeys(plan.workers, 0)
        self.spans: dict[int, list[Span]] = {w: [] for w in plan.workers}
        # When the inputs of an action are there; -1 where they are not.
        blank, stages = [-1] * plan.layout.microbatches, plan.num_stages
        self.forward = [[0] * len(blank), *(list(blank) for _ in range(stages - 1))]
        self.backward = [list(blank) for _ in range(stages)]

    def run(self) -> None:
        """Let everybody go on until all orders are done."""
        waiting = [w for w in reversed(self.plan.workers) if self.orders[w]]
        while waiting:
            waiting += self._advance(waiting.pop())
        stuck = [w for w, order in self.orders.items() if self.at[w] < len(order)]
        if stuck:
            raise ValueError(f"plan: orders of workers {stuck} wait for each other")

    def _advance(self, worker: int) -> list[int]:
        """Run a worker as far as its inputs go; who may go on because of that."""
        order, at, now = self.orders[worker], self.at[worker], self.free[worker]
        factor, spans, busy = self.cluster.slow(worker), self.spans[worker], 0
        executors, stages = self.plan.executors, self.plan.num_stages
        freed: list[int] = []
        while at < len(order):
            action = order[at]
            kind, s, m = action
            forwards = kind == "F"
            arrival = (self.forward if forwards else self.backward)[s][m]
            if arrival < 0:
                break
            ticks = (self.costs.forward if forwards else self.costs.backward)[s][m]
            if factor != 1.0:
                ticks = scaled(ticks, factor)
            start = max(now, arrival)
            now = start + ticks
            busy += ticks
            spans.append(Span(action, start, now))
            at += 1
            heir = s + forwards - (not forwards)
            if heir < 0:
                continue
            up = forwards and heir < stages
            heir = min(heir, stages - 1)
            target = executors[heir][m]
            arrival = now
            if target != worker:
                arrival += self.cluster.delay(self.costs, worker, target, min(s, heir), m)
                freed.append(target)
            (self.forward if up else self.backward)[heir][m] = arrival
        self.at[worker], self.free[worker] = at, now
        self.busy[worker] += busy
        return freed


def _critical_path(plan: Plan, costs: StepCosts, cluster: Cluster) -> int:
    longest = 0
    for m in range(plan.layout.microbatches):
        total = 0
        for s in range(plan.num_stages):
            worker = plan.executors[s][m]
            factor = cluster.slow(worker)
            total += scaled(costs.forward[s][m], factor) + scaled(costs.backward[s][m], factor)
            if s:
                source = plan.executors[s - 1][m]
                total += cluster.delay(costs, source, worker, s - 1, m)
                total += cluster.delay(costs, worker, source, s - 1, m)
        longest = max(longest, total)
    return longest
