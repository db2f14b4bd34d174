"""What a plan will take: the step executed on paper, every worker following its own order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from typing import NamedTuple

from dtrain.scheduler.bounds import longest_chain
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
    spans: dict[int, list[Span]] = {w: [] for w in plan.workers}
    busy = dict.fromkeys(plan.workers, 0)
    for n in walk.sequence:
        w, end = walk.executors[n], walk.ends[n]
        busy[w] += walk.ticks[n]
        spans[w].append(Span(walk.action(n), end - walk.ticks[n], end))
    makespan = max(walk.ends)
    memory = peak_memory(plan, costs)
    return Prediction(
        spans,
        makespan,
        makespan + longest_sum(plan.holders, costs) + costs.fixed_ticks,
        busy,
        _critical_path(plan, costs, cluster),
        memory,
        tuple(w for w in plan.workers if memory[w] > cluster.memory_bytes.get(w, memory[w])),
    )


def makespan_ticks(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> int:
    """When the last action of a step ends: :func:`predict`'s makespan alone.

    Raises:
        ValueError: the plan's orders deadlock.
    """
    return max(_Walk(plan, costs, cluster).ends)


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


def fits_memory(plan: Plan, costs: StepCosts, cluster: Cluster) -> bool:
    """Whether every worker's states and kept activations are known to fit in its memory."""
    limit = cluster.memory_bytes
    if not limit:
        return True
    return bool(costs.kept_bytes) and all(
        used <= limit.get(w, used) for w, used in peak_memory(plan, costs).items()
    )


def excess_bytes(prediction: Prediction, cluster: Cluster) -> int:
    """Bytes by which a plan exceeds the workers' memories, over all of them."""
    limit, used = cluster.memory_bytes, prediction.memory_bytes
    return sum(used[w] - limit[w] for w in prediction.over)


class _Walk:
    """A step in which every worker follows its order.

    An action is a number here: its row times the microbatches, and its microbatch. Rows are the
    forwards up the stages and then the backwards down, so that the input of an action is what ends
    one row before it. ``sequence``: all actions, each after those that it waits for; by number,
    ``executors``, ``ticks`` and ``ends``.
    """

    def __init__(self, plan: Plan, costs: StepCosts, cluster: Cluster) -> None:
        self.stages, self.count = plan.num_stages, plan.layout.microbatches
        rows = plan.executors
        self.executors = list(chain(*rows, *reversed(rows)))
        self.ticks = list(chain(*costs.forward, *reversed(costs.backward)))
        if cluster.slowness:
            pairs = zip(self.ticks, self.executors, strict=True)
            self.ticks = [scaled(ticks, cluster.slow(w)) for ticks, w in pairs]
        if isinstance(plan.actions, Orders):
            starts = list(chain(*plan.actions.forward, *reversed(plan.actions.backward)))
            # They increase along every worker's order and every microbatch's chain.
            self.sequence = sorted(range(len(starts)), key=starts.__getitem__)
        else:
            self.sequence = self._in_turn(plan)
        self.ends = self._run(costs, cluster)

    def _run(self, costs: StepCosts, cluster: Cluster) -> list[int]:
        executors, ticks, count = self.executors, self.ticks, self.count
        delayed = cluster.transfers_cost
        free = dict.fromkeys(executors, 0)
        ends = [0] * len(ticks)
        for n in self.sequence:
            w = executors[n]
            start = free[w]
            if n >= count:
                there = ends[n - count]
                if delayed:
                    row, m = divmod(n - count, count)
                    lower = min(row, 2 * self.stages - 2 - row)
                    there += cluster.delay(costs, executors[n - count], w, lower, m)
                if there > start:
                    start = there
            free[w] = ends[n] = start + ticks[n]
        return ends

    def action(self, number: int) -> Action:
        """The action of that number."""
        row, m = divmod(number, self.count)
        if row < self.stages:
            return Action("F", row, m)
        return Action("B", 2 * self.stages - 1 - row, m)

    def _number(self, action: Action) -> int:
        kind, s, m = action
        return (s if kind == "F" else 2 * self.stages - 1 - s) * self.count + m

    def _in_turn(self, plan: Plan) -> list[int]:
        """All actions as they can be executed, by orders that are known without planned starts."""
        orders = {w: [self._number(action) for action in plan.actions[w]] for w in plan.workers}
        at = dict.fromkeys(plan.workers, 0)
        done = [False] * len(self.ticks)
        waiting: dict[int, int] = {}
        ready = list(reversed(plan.workers))
        sequence: list[int] = []
        while ready:
            w = ready.pop()
            for n in orders[w][at[w] :]:
                if n >= self.count and not done[n - self.count]:
                    waiting[n - self.count] = w
                    break
                done[n] = True
                sequence.append(n)
                at[w] += 1
                if n in waiting:
                    ready.append(waiting.pop(n))
        stuck = [w for w, order in orders.items() if at[w] < len(order)]
        if stuck:
            raise ValueError(f"plan: orders of workers {stuck} wait for each other")
        return sequence


def _critical_path(plan: Plan, costs: StepCosts, cluster: Cluster) -> int:
    if not (cluster.slowness or cluster.transfers_cost):
        return longest_chain(costs)
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
