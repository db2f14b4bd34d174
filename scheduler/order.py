"""Order of actions: list scheduling over predicted times.

What is computed are planned starts, which increase along every microbatch's chain of actions;
:class:`dtrain.scheduler.plan.Orders` sorts each worker's actions by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeVar

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, scaled
from dtrain.scheduler.plan import Layout, Orders, Table

_T = TypeVar("_T")


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


def policy_of(layout: Layout, costs: StepCosts | None = None) -> Policy:
    """The policy that the layout names, with the longest microbatches first where costs are known.

    What is long then has company to overlap with, which at the end of the step it would not.
    """
    return Policy(layout.schedule != "gpipe", rank=longest_first(costs) if costs else ())


def longest_first(costs: StepCosts) -> tuple[int, ...]:
    """Precedence of microbatches by falling cost over all stages; empty where all cost the same."""
    total = [sum(column) for column in zip(*costs.work(), strict=True)]
    if min(total) == max(total):
        return ()
    return ranked(sorted(range(len(total)), key=lambda m: (-total[m], m)))


def ranked(order: Sequence[int]) -> tuple[int, ...]:
    """The place of each microbatch in ``order``."""
    rank = [0] * len(order)
    for place, m in enumerate(order):
        rank[m] = place
    return tuple(rank)


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
    are given); what a free worker starts first is next in its order. ``policy``: None: that of
    :func:`policy_of`. The limit in flight counts for
    each stage by itself, and a stage's backward needs only what later stages do: so the deepest
    stage that has something in flight can always go on, and everything gets its turn.
    """
    costs = costs or StepCosts.even(layout)
    policy = policy or policy_of(layout, costs)
    return _Paper(layout, workers, executors, costs, cluster, policy).run()


class _Pile:
    """A worker's ready forwards of one stage, and how many more it may have in flight."""

    __slots__ = ("ready", "room")

    def __init__(self, room: int) -> None:
        self.ready: list[int] = []
        self.room = room


class _Desk:
    """A worker in the execution on paper that fixes the order."""

    __slots__ = ("backwards", "busy", "left", "piles", "worker")

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.busy = False
        # Forwards not yet begun, of all its stages.
        self.left = 0
        # One for each stage, in the order of precedence; ready backwards, deepest stage first.
        self.piles: list[_Pile] = []
        self.backwards: list[int] = []


class _Paper:
    """One execution on paper.

    An action is a number here: its row times the microbatches, and its microbatch's place by rank.
    Rows are the forwards up the stages and then the backwards down, so that what an action makes
    possible stands one row further on.
    """

    def __init__(
        self,
        layout: Layout,
        workers: Sequence[int],
        executors: Sequence[Sequence[int]],
        costs: StepCosts,
        cluster: Cluster,
        policy: Policy,
    ) -> None:
        self.stages, self.count = layout.num_stages, layout.microbatches
        # The first backward.
        self.turn = self.stages * self.count
        self.costs, self.cluster, self.policy = costs, cluster, policy
        self.workers, self.executors = tuple(workers), executors
        self.order = list(range(self.count))
        if policy.rank:
            self.order.sort(key=policy.rank.__getitem__)
        self.team = {w: _Desk(w) for w in workers}
        # For each action its worker, the worker's pile of its stage, and its time.
        self.desks = self._both_ways([[self.team[w] for w in runs] for runs in executors])
        self.piles = self._both_ways(self._deal())
        rows = (*costs.forward, *reversed(costs.backward))
        self.ticks = [row[m] for row in rows for m in self.order]
        if cluster.slowness:
            pairs = zip(self.ticks, self.desks, strict=True)
            self.ticks = [scaled(ticks, cluster.slow(desk.worker)) for ticks, desk in pairs]
        self.starts = [-1] * len(self.ticks)
        # Actions that end at a time, and ``~action`` for those whose inputs arrive then.
        self.agenda: dict[int, list[int]] = {}
        self.times: list[int] = []

    def _both_ways(self, rows: Sequence[Sequence[_T]]) -> list[_T]:
        up = [[row[m] for m in self.order] for row in rows]
        return [entry for row in (*up, *reversed(up)) for entry in row]

    def _deal(self) -> list[list[_Pile]]:
        """Each worker's piles; ``[stage][microbatch]`` of them."""
        rows: list[list[_Pile]] = [[] for _ in self.executors]
        stages = range(self.stages)
        # Forwards of the last stages first, unless all forwards come first anyway.
        for s in reversed(stages) if self.policy.backwards_first else stages:
            limit = self.policy.limit(self.stages, s, self.count)
            mine: dict[int, _Pile] = {}
            for w in self.executors[s]:
                desk = self.team[w]
                desk.left += 1
                if w not in mine:
                    mine[w] = _Pile(limit)
                    desk.piles.append(mine[w])
                rows[s].append(mine[w])
        return rows

    def run(self) -> Orders:
        """Execute the step and return the starts."""
        desks, agenda, times, count = self.desks, self.agenda, self.times, self.count
        delayed = self.cluster.transfers_cost
        queues = [pile.ready for pile in self.piles[: self.turn]]
        queues += [desk.backwards for desk in desks[self.turn :]]
        for action in range(count):
            queues[action].append(action)
        for desk in self.team.values():
            self._start(0, desk)
        while times:
            now = heappop(times)
            for event in agenda.pop(now):
                desk = other = desks[event if event >= 0 else ~event]
                heir = ~event
                if event >= 0:
                    desk.busy = False
                    heir = event + count
                    other = desks[heir] if heir < len(desks) else desk
                    delay = self._delay(event) if delayed and other is not desk else 0
                    if delay:
                        self._note(now + delay, ~heir)
                        heir, other = len(desks), desk
                if heir < len(desks):
                    heappush(queues[heir], heir)
                if other.worker < desk.worker:
                    desk, other = other, desk
                if not desk.busy:
                    self._start(now, desk)
                if not other.busy:
                    self._start(now, other)
        if -1 in self.starts:
            raise AssertionError(f"order of actions stopped: {self.starts.count(-1)} not started")
        return Orders(self.workers, self.executors, *self._tables())

    def _tables(self) -> tuple[Table, Table]:
        """The starts of forwards and of backwards, ``[stage][microbatch]``."""
        place = [0] * self.count
        for i, m in enumerate(self.order):
            place[m] = i
        rows = [
            tuple(self.starts[at + i] for i in place)
            for at in range(0, len(self.starts), self.count)
        ]
        return tuple(rows[: self.stages]), tuple(reversed(rows[self.stages :]))

    def _delay(self, action: int) -> int:
        """What the result of an action takes to the worker that goes on with it."""
        row, place = divmod(action, self.count)
        source, target = self.desks[action].worker, self.desks[action + self.count].worker
        lower = min(row, 2 * self.stages - 2 - row)
        return self.cluster.delay(self.costs, source, target, lower, self.order[place])

    def _note(self, time: int, event: int) -> None:
        found = self.agenda.get(time)
        if found is None:
            self.agenda[time] = [event]
            heappush(self.times, time)
        else:
            found.append(event)

    def _start(self, now: int, desk: _Desk) -> None:
        """Let a worker that is free start a ready action."""
        action = -1
        if self.policy.rank_first:
            action = self._lowest(desk)
        elif desk.backwards and (self.policy.backwards_first or not desk.left):
            action = heappop(desk.backwards)
        else:
            for pile in desk.piles:
                if pile.ready and pile.room:
                    action = heappop(pile.ready)
                    break
        if action < 0:
            return
        if action < self.turn:
            self.piles[action].room -= 1
            desk.left -= 1
        else:
            self.piles[action].room += 1
        desk.busy = True
        self.starts[action] = now
        self._note(now + self.ticks[action], action)

    def _lowest(self, desk: _Desk) -> int:
        """Take the ready action of the lowest rank, -1 if there is none.

        Of one microbatch only one action is ready at a time.
        """
        able = desk.backwards + [p.ready[0] for p in desk.piles if p.ready and p.room]
        if not able:
            return -1
        action = min(able, key=lambda action: action % self.count)
        if action < self.turn:
            return heappop(self.piles[action].ready)
        desk.backwards.remove(action)
        heapify(desk.backwards)
        return action
