"""Order of actions: list scheduling over predicted times.

What is computed are planned starts, which increase along every microbatch's chain of actions;
:class:`dtrain.scheduler.plan.Orders` sorts each worker's actions by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain

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


_Column = tuple[int, ...]
"""The executors of one microbatch, stage by stage."""


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
    :func:`policy_of`. The limit in flight counts for each stage by itself, and a stage's backward
    needs only what later stages do: so the deepest stage that has something in flight can always go
    on, and everything gets its turn. The workers' numbers decide nothing.

    Microbatches that share no worker know nothing of each other. So each group of them is executed
    by itself, and where all microbatches cost the same, groups of one shape are executed once.
    """
    costs = costs or StepCosts.even(layout)
    policy = policy or policy_of(layout, costs)
    every = range(layout.microbatches)
    order = sorted(every, key=policy.rank.__getitem__) if policy.rank else list(every)
    columns = list(zip(*executors, strict=True))
    groups = _groups(columns, order)
    starts: list[Sequence[int]] = [()] * len(columns)
    if len(groups) > 1 and not cluster.transfers_cost and _alike(costs):
        seen: dict[object, list[_Column]] = {}
        for group in groups:
            shape, names = _shape(columns, group)
            key = (shape, tuple(map(cluster.slow, names)) if cluster.slowness else ())
            found = seen.get(key)
            if found is None:
                found = seen[key] = _Paper(columns, group, costs, cluster, policy).run([len(group)])
            for m, column in zip(group, found, strict=True):
                starts[m] = column
    else:
        if not cluster.transfers_cost:
            for m in [group[0] for group in groups if len(group) == 1]:
                starts[m] = _alone(columns[m], m, costs, cluster)
            groups = [group for group in groups if len(group) > 1]
        flat = [m for group in groups for m in group]
        found = _Paper(columns, flat, costs, cluster, policy).run([len(g) for g in groups])
        for m, column in zip(flat, found, strict=True):
            starts[m] = column
    rows = list(zip(*starts, strict=True))
    stages = layout.num_stages
    return Orders(tuple(workers), executors, tuple(rows[:stages]), tuple(reversed(rows[stages:])))


def _alike(costs: StepCosts) -> bool:
    """Whether all microbatches cost the same on each stage."""
    return all(row.count(row[0]) == len(row) for row in (*costs.forward, *costs.backward))


def _groups(columns: Sequence[_Column], order: Sequence[int]) -> list[list[int]]:
    """Microbatches that have workers in common, directly or by others; each group in order."""
    routes: dict[_Column, list[int]] = {}
    for m in order:
        routes.setdefault(columns[m], []).append(m)
    # A forest of routes: where each one leads, in the end to the first of its group.
    leads = list(range(len(routes)))

    def first(route: int) -> int:
        while leads[route] != route:
            leads[route] = route = leads[leads[route]]
        return route

    on: dict[int, int] = {}
    for route, column in enumerate(routes):
        for w in column:
            other = on.setdefault(w, route)
            if other != route:
                a, b = sorted((first(other), first(route)))
                leads[b] = a
    groups: dict[int, list[int]] = {}
    mixed = set()
    for route, mine in enumerate(routes.values()):
        at = first(route)
        if at in groups:
            groups[at] += mine
            mixed.add(at)
        else:
            groups[at] = mine
    if mixed:
        rank = dict(zip(order, range(len(order)), strict=True))
        for at in mixed:
            groups[at].sort(key=rank.__getitem__)
    return list(groups.values())


def _shape(columns: Sequence[_Column], group: Sequence[int]) -> tuple[object, Sequence[int]]:
    """Who of a group's workers executes what, whatever their numbers; and the workers."""
    flat = [w for m in group for w in columns[m]]
    numbers: dict[int, int] = {}
    shape = tuple([numbers.setdefault(w, len(numbers)) for w in flat])
    return shape, list(numbers)


def _alone(column: _Column, microbatch: int, costs: StepCosts, cluster: Cluster) -> _Column:
    """The starts of a microbatch whose workers execute nothing else: one follows on the other."""
    ticks = [row[microbatch] for row in (*costs.forward, *reversed(costs.backward))]
    if cluster.slowness:
        pairs = zip(ticks, (*column, *reversed(column)), strict=True)
        ticks = [scaled(t, cluster.slow(w)) for t, w in pairs]
    return tuple(accumulate(ticks[:-1], initial=0))


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
        # Forwards not yet begun, of all its stages, where these come before its backwards.
        self.left = 0
        # One for each stage, in the order of precedence; ready backwards, deepest stage first.
        self.piles: list[_Pile] = []
        self.backwards: list[int] = []


class _Paper:
    """One execution on paper of some microbatches, in their order of precedence.

    An action is a number here: its row times the microbatches, and its microbatch's place. Rows are
    the forwards up the stages and then the backwards down, so that what an action makes possible
    stands one row further on.
    """

    def __init__(
        self,
        columns: Sequence[_Column],
        order: Sequence[int],
        costs: StepCosts,
        cluster: Cluster,
        policy: Policy,
    ) -> None:
        self.stages, self.count = costs.num_stages, len(order)
        self.size = 2 * self.stages * self.count
        # The first backward.
        self.turn = self.stages * self.count
        self.order, self.costs, self.cluster, self.policy = order, costs, cluster, policy
        # For each action its worker, the queue that it waits in, its worker's pile of its stage,
        # and its time.
        self.desks: list[_Desk] = []
        self.piles: list[_Pile] = []
        self.queues: list[list[int]] = []
        self._deal([columns[m] for m in order])
        rows = (*costs.forward, *reversed(costs.backward))
        self.ticks = [row[m] for row in rows for m in order]
        if cluster.slowness:
            pairs = zip(self.ticks, self.desks, strict=True)
            self.ticks = [scaled(ticks, cluster.slow(desk.worker)) for ticks, desk in pairs]
        self.starts = [-1] * self.size

    def _deal(self, columns: Sequence[_Column]) -> None:
        """Give each worker its piles."""
        team: dict[int, _Desk] = {}
        desks: list[list[_Desk]] = []
        piles: list[list[_Pile]] = []
        for row in zip(*columns, strict=True):
            limit = self.policy.limit(self.stages, len(piles), self.costs.microbatches)
            mine: dict[int, _Pile] = {}
            for w in dict.fromkeys(row):
                if w not in team:
                    team[w] = _Desk(w)
                mine[w] = pile = _Pile(limit)
                team[w].piles.append(pile)
            desks.append([team[w] for w in row])
            piles.append([mine[w] for w in row])
        if self.policy.backwards_first:
            # Forwards of the last stages first.
            for desk in team.values():
                desk.piles.reverse()
        else:
            for desk in chain(*desks):
                desk.left += 1
        self.desks = list(chain(*desks, *reversed(desks)))
        self.piles = list(chain(*piles, *reversed(piles)))
        self.queues = [pile.ready for pile in chain(*piles)]
        self.queues += [desk.backwards for desk in chain(*reversed(desks))]

    def run(self, groups: Sequence[int]) -> list[_Column]:
        """Execute the step; the starts of each microbatch's forwards and backwards, in order.

        ``groups``: how many microbatches of ``order`` belong together, from the first on.
        """
        began = 0
        for size in groups:
            self._execute(range(began, began + size))
            began += size
        if -1 in self.starts:
            raise AssertionError(f"order of actions stopped: {self.starts.count(-1)} not started")
        count = self.count
        return [tuple(self.starts[place::count]) for place in range(count)]

    def _execute(self, first: Sequence[int]) -> None:
        """Go through the actions that follow from some forwards of the first stage."""
        desks, queues, ticks, starts = self.desks, self.queues, self.ticks, self.starts
        count, size = self.count, self.size
        choose = self._lowest if self.policy.rank_first else self._next
        delayed = self.cluster.transfers_cost
        # Ends of actions, and arrivals of their inputs: the time, and below it the action, with
        # ``size`` added where it is an arrival.
        events: list[int] = []
        span = 2 * size
        for action in first:
            queues[action].append(action)
        touched = [desks[action] for action in first]
        now = 0
        while True:
            # Who starts what at a time is decided when all of that time has happened.
            for desk in touched:
                if not desk.busy:
                    action = choose(desk)
                    if action >= 0:
                        desk.busy = True
                        starts[action] = now
                        heappush(events, (now + ticks[action]) * span + action)
            if not events:
                return
            touched = []
            now, event = divmod(heappop(events), span)
            later = (now + 1) * span
            while True:
                heir = event + count
                if event >= size:
                    heir = event - size
                else:
                    desk = desks[event]
                    desk.busy = False
                    touched.append(desk)
                    if delayed and heir < size and (delay := self._delay(event)):
                        heappush(events, (now + delay) * span + size + heir)
                        heir = size
                if heir < size:
                    heappush(queues[heir], heir)
                    touched.append(desks[heir])
                if not events or events[0] >= later:
                    break
                event = heappop(events) % span

    def _delay(self, action: int) -> int:
        """What the result of an action takes to the worker that goes on with it."""
        row, place = divmod(action, self.count)
        source, target = self.desks[action].worker, self.desks[action + self.count].worker
        lower = min(row, 2 * self.stages - 2 - row)
        return self.cluster.delay(self.costs, source, target, lower, self.order[place])

    def _next(self, desk: _Desk) -> int:
        """Take the ready action that a free worker starts, -1 if there is none."""
        if desk.backwards and (self.policy.backwards_first or not desk.left):
            action = heappop(desk.backwards)
            self.piles[action].room += 1
            return action
        for pile in desk.piles:
            if pile.ready and pile.room:
                pile.room -= 1
                desk.left -= 1
                return heappop(pile.ready)
        return -1

    def _lowest(self, desk: _Desk) -> int:
        """Take the ready action of the lowest rank, -1 if there is none.

        Of one microbatch only one action is ready at a time.
        """
        able = desk.backwards + [p.ready[0] for p in desk.piles if p.ready and p.room]
        if not able:
            return -1
        action = min(able, key=lambda action: action % self.count)
        pile = self.piles[action]
        if action < self.turn:
            pile.room -= 1
            desk.left -= 1
            return heappop(pile.ready)
        pile.room += 1
        desk.backwards.remove(action)
        heapify(desk.backwards)
        return action
