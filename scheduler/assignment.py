"""Holders and executors in the making: who takes over what, and how the load is levelled."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from dtrain.scheduler.costs import Cluster, StepCosts, scaled
from dtrain.scheduler.domains import domain_labels, in_one_domain
from dtrain.scheduler.plan import Plan, executed_by

_FEW = 8
"""From so many workers on, it is quicker to look at all of a stage's at once."""

_Pile = list[tuple[int, int]]
"""Microbatches of one executor on one stage, as ascending (ticks, microbatch)."""


class Assignment:
    """A plan's holders and executors while they are changed for new members, costs or speeds.

    Load is measured in ticks by each worker's weight (slowness and risk), so that equal loads end
    at the same time. No step costs more than n log n in the workers and microbatches.
    """

    def __init__(
        self, old: Plan, members: tuple[int, ...], costs: StepCosts, cluster: Cluster
    ) -> None:
        self.members = members
        self.cluster = cluster
        self.work = costs.work()
        self.state_bytes = costs.state_bytes
        self.weight = {w: cluster.weight(w) for w in members} if _known(cluster) else None
        self.labels = domain_labels(cluster, members)
        stay = set(members)
        self.holders = [set(held) & stay for held in old.holders]
        self.executors = [list(runs) for runs in old.executors]
        self.newcomers = sorted(stay.difference(old.workers))
        self.orphans: list[tuple[int, int]] = []
        if not stay.issuperset(old.workers):
            self.orphans = [
                (s, m)
                for s, runs in enumerate(self.executors)
                for m, w in enumerate(runs)
                if w not in stay
            ]
        self.load = self._loads()
        self.least = [min(row) for row in self.work]
        # What each executor has long had, made when it is first asked for, and what it took over.
        self._own: list[dict[int, _Pile]] = [{} for _ in self.holders]
        self._complete = [False] * len(self.holders)
        self.taken: list[dict[int, _Pile]] = [{} for _ in self.holders]
        total = sum(sum(row) for row in self.work)
        power = len(members) if self.weight is None else sum(1 / f for f in self.weight.values())
        self.mean = total / power
        self.counts = dict.fromkeys(members, 0)
        self.held_bytes = dict.fromkeys(members, 0) if self.state_bytes else {}
        for s, held in enumerate(self.holders):
            for w in held:
                self.counts[w] += 1
                if self.state_bytes:
                    self.held_bytes[w] += self.state_bytes[s]

    def _loads(self) -> dict[int, int]:
        load = dict.fromkeys(self.members, 0)
        for runs, row in zip(self.executors, self.work, strict=True):
            if self.weight is None and min(row) == max(row):
                for w, count in Counter(runs).items():
                    if w in load:
                        load[w] += count * row[0]
                continue
            for m, w in enumerate(runs):
                if w in load:
                    ticks = row[m]
                    load[w] += ticks if self.weight is None else scaled(ticks, self.weight[w])
        return load

    def own(self, stage: int, worker: int) -> _Pile:
        """What a worker has executed of a stage all along and still does."""
        piles = self._own[stage]
        if worker not in piles and not self._complete[stage]:
            taken = {m for pile in self.taken[stage].values() for _, m in pile}
            row, runs = self.work[stage], self.executors[stage]
            if len(piles) < _FEW:
                # Few workers give anything away.
                found = {worker: executed_by(worker, runs)}
            else:
                self._complete[stage], found = True, {}
                for m, w in enumerate(runs):
                    if w in self.load and w not in piles:
                        found.setdefault(w, []).append(m)
            for w, mine in found.items():
                piles[w] = sorted((row[m], m) for m in mine if m not in taken)
        return piles.setdefault(worker, [])

    def _ticks(self, stage: int, microbatch: int, worker: int) -> int:
        ticks = self.work[stage][microbatch]
        return ticks if self.weight is None else scaled(ticks, self.weight[worker])

    def _factor(self, worker: int) -> float:
        return 1.0 if self.weight is None else self.weight[worker]

    def _hold(self, stage: int, worker: int) -> None:
        if worker not in self.holders[stage]:
            self.holders[stage].add(worker)
            self.counts[worker] += 1
            if self.state_bytes:
                self.held_bytes[worker] += self.state_bytes[stage]

    def fits(self, stage: int, worker: int) -> bool:
        """Whether a worker has the memory to hold the state of one more stage."""
        if worker in self.holders[stage] or not self.state_bytes:
            return True
        limit = self.cluster.memory_bytes.get(worker)
        return limit is None or self.held_bytes[worker] + self.state_bytes[stage] <= limit

    def _give(self, stage: int, microbatch: int, worker: int) -> None:
        self._hold(stage, worker)
        self.executors[stage][microbatch] = worker
        pile = self.taken[stage].setdefault(worker, [])
        insort(pile, (self.work[stage][microbatch], microbatch))
        self.load[worker] += self._ticks(stage, microbatch, worker)

    def _executes(self, stage: int, worker: int) -> bool:
        return bool(self.taken[stage].get(worker) or self.own(stage, worker))

    def fill_gaps(self) -> None:
        """Find executors for what lost workers executed, and a holder for every stage.

        Newcomers take the places of lost workers, one each. Else a microbatch that lost an executor
        goes as a whole to the least busy worker of those that are left of its route through the
        stages, or to another microbatch's route where that is less busy. A gap that another
        pipeline's worker had to fill would make both pipelines wait for each other; so routes stay
        apart, and few workers have to hold further stages.
        """
        self._replace()
        for s, held in enumerate(self.holders):
            if not held:
                able = [w for w in self.members if self.fits(s, w)] or self.members
                self._hold(s, min(able, key=lambda w: (self.load[w], w)))
        torn = {m for _, m in self.orphans}
        if not torn:
            return
        columns = list(zip(*self.executors, strict=True))
        for m in torn:
            for s, w in enumerate(columns[m]):
                if w in self.load:
                    self.load[w] -= self._ticks(s, m, w)
        routes = _Least(self.load, {column for m, column in enumerate(columns) if m not in torn})
        holders: list[_Least] = []
        # Longest first (Graham, 1969), so that the short ones even out what the long ones left.
        length = {m: sum(row[m] for row in self.work) for m in torn}
        for m in sorted(torn, key=lambda m: (-length[m], m)):
            for s, w in enumerate(self._route(m, columns[m], routes, holders)):
                if w == columns[m][s]:
                    self.load[w] += self._ticks(s, m, w)
                else:
                    self._give(s, m, w)

    def _replace(self) -> None:
        """Let newcomers take over what lost workers executed."""
        lost = sorted({self.executors[s][m] for s, m in self.orphans})
        places = dict(zip(lost, self.newcomers, strict=False))
        left = []
        for s, m in self.orphans:
            heir = places.get(self.executors[s][m])
            if heir is not None and self.fits(s, heir):
                # As if it had always been there: it may still move with its route.
                self._hold(s, heir)
                self.executors[s][m] = heir
                self.load[heir] += self._ticks(s, m, heir)
            else:
                left.append((s, m))
        self.orphans = left

    def _route(
        self, m: int, column: tuple[int, ...], routes: _Least, holders: list[_Least]
    ) -> tuple[int, ...]:
        """The new route of a microbatch that lost an executor of ``column``."""
        found = []
        able = [w for w in set(column) & self.load.keys() if self._fits_all(w)]
        if able:
            found.append((min(able, key=lambda w: (self.load[w], w)),) * len(column))
        other = routes.least()
        if other is not None:
            found.append(other)
        if found:
            return min(found, key=lambda route: self._end(m, route))
        # There is neither: each gap is filled by itself.
        if not holders:
            holders += [_Least(self.load, ((w,) for w in held)) for held in self.holders]
        filled = []
        for s, w in enumerate(column):
            least = holders[s].least()
            assert least is not None, "every stage has a holder"
            filled.append(w if w in self.load else least[0])
        return tuple(filled)

    def _fits_all(self, worker: int) -> bool:
        """Whether a worker has the memory to hold the states of all stages."""
        if not self.state_bytes:
            return True
        limit = self.cluster.memory_bytes.get(worker)
        return limit is None or sum(self.state_bytes) <= limit

    def _end(self, m: int, route: tuple[int, ...]) -> int:
        """The load of the busiest worker of a route that takes a microbatch in."""
        load = {w: self.load[w] for w in route}
        for s, w in enumerate(route):
            load[w] += self._ticks(s, m, w)
        return max(load.values())

    def level(self, may_hold: bool = True) -> int:
        """Move microbatches as long as the busier of two workers gains; how many were moved.

        Nobody who is not above the mean gives, so little is moved. ``may_hold``: a worker may
        become a further holder of a stage to take work of it.
        """
        load = self.load
        light = [(ticks, w) for w, ticks in load.items()]
        heapify(light)
        # Who has no more than the least busy one would have with the shortest microbatch more.
        level = [self.mean] * len(self.executors)
        if self.weight is None:
            level = [max(self.mean, light[0][0] + shortest) for shortest in self.least]
        heavy = [
            [(-load[w], w) for w in set(runs) if load[w] > enough]
            for enough, runs in zip(level, self.executors, strict=True)
        ]
        for heap in heavy:
            heapify(heap)
        every = not may_hold or self.weight is not None or bool(self.state_bytes)
        moved = 0
        while light:
            ticks, taker = light[0]
            if ticks != load[taker]:
                heapreplace(light, (load[taker], taker))
                continue
            found = self._best_gift(taker, heavy, may_hold)
            if found is None:
                if not every:
                    # Who has more could take no more from anybody.
                    return moved
                heappop(light)
                continue
            stage, giver, microbatch = found
            self._take_from(stage, giver, microbatch)
            self._give(stage, microbatch, taker)
            # Among the last moves a giver may itself become one with the least work.
            heappush(light, (load[giver], giver))
            moved += 1
        return moved

    def _take_from(self, stage: int, giver: int, microbatch: int) -> None:
        entry = (self.work[stage][microbatch], microbatch)
        for pile in (self.taken[stage].get(giver, []), self.own(stage, giver)):
            at = bisect_left(pile, entry)
            if at < len(pile) and pile[at] == entry:
                del pile[at]
                break
        self.load[giver] -= self._ticks(stage, microbatch, giver)

    def _best_gift(
        self, taker: int, heavy: list[list[tuple[int, int]]], may_hold: bool
    ) -> tuple[int, int, int] | None:
        """The stage, executor and microbatch that ``taker`` should take, if any."""
        best: tuple[bool, bool, int, int, int, int, int] | None = None
        for s, heap in enumerate(heavy):
            held = self.holders[s]
            if taker not in held and not (may_hold and self.fits(s, taker)):
                continue
            least = self.least[s] if self.weight is None else self._factor(taker) * self.least[s]
            enough = max(self.mean, self.load[taker] + least)
            while heap:
                load, w = heap[0]
                if load != -self.load[w]:
                    heapreplace(heap, (-self.load[w], w))
                elif -load > enough and not self._executes(s, w):
                    heappop(heap)
                else:
                    break
            if not heap or -heap[0][0] <= enough:
                continue
            load, w = heap[0]
            found = self._gift(s, w, taker)
            if found is not None:
                # Rather no further holder, and rather what has just been taken over than what
                # its executor has long had.
                fresh, m = found
                entry = (taker not in held, not fresh, load, len(held), s, w, m)
                best = entry if best is None else min(best, entry)
        return (best[4], best[5], best[6]) if best is not None else None

    def _gift(self, stage: int, giver: int, taker: int) -> tuple[bool, int] | None:
        """Whether it was taken over before, and the microbatch whose move levels the two best."""
        gap = self.load[giver] - self.load[taker]
        give, take = self._factor(giver), self._factor(taker)
        ideal = gap / (give + take)
        piles = (self.taken[stage].get(giver, []), self.own(stage, giver))
        for fresh, pile in zip((True, False), piles, strict=True):
            # Of equal ones the last, from the end of the step.
            at = bisect_left(pile, (int(ideal) + 1, -1))
            for i in (at - 1, at):
                if not 0 <= i < len(pile):
                    continue
                ticks, m = pile[i]
                if (ticks if take == 1.0 else scaled(ticks, take)) < gap:
                    return fresh, m
        return None

    def fill_standbys(self, redundancy: int) -> None:
        """Bring every stage to its holders, in two domains if it can be, and all workers to one."""
        wanted = min(redundancy, len(self.members))
        lacking = [
            s
            for s in sorted(range(len(self.holders)), key=lambda s: (len(self.holders[s]), s))
            if len(self.holders[s]) < wanted
            or (wanted > 1 and in_one_domain(self.holders[s], self.labels))
        ]
        if lacking:
            risk = self.cluster.risk
            fewest = [(risk.get(w, 0.0), self.counts[w], self.load[w], w) for w in self.members]
            heapify(fewest)
            for s in lacking:
                self._add_standbys(s, wanted, fewest)
        for w in self.members:
            if not self.counts[w]:
                stages = range(len(self.holders))
                self._hold(min(stages, key=lambda s: (len(self.holders[s]), s)), w)

    def _add_standbys(
        self, stage: int, wanted: int, fewest: list[tuple[float, int, int, int]]
    ) -> None:
        held = self.holders[stage]

        def lacks_domain() -> bool:
            return wanted > 1 and bool(held) and in_one_domain(held, self.labels)

        # First one in another domain, where all copies are in one; then whoever holds least.
        if lacks_domain():
            here = {self.labels[w] for w in held}
            self._add_first(stage, fewest, lambda w: self.labels[w] not in here)
        while len(held) < wanted:
            if not self._add_first(stage, fewest, lambda w: True):
                # Redundancy comes before a limit that is only predicted.
                rest = set(self.members) - held
                self._hold(stage, min(rest, key=lambda w: (self.held_bytes.get(w, 0), w)))
        if lacks_domain():
            here = {self.labels[w] for w in held}
            self._add_first(stage, fewest, lambda w: self.labels[w] not in here)

    def _add_first(
        self,
        stage: int,
        fewest: list[tuple[float, int, int, int]],
        suits: Callable[[int], bool],
    ) -> bool:
        """Make the worker that holds least, of those that suit and have room, a further holder."""
        passed, found = [], False
        while fewest and not found:
            risk, count, load, w = heappop(fewest)
            if w not in self.holders[stage] and suits(w) and self.fits(stage, w):
                self._hold(stage, w)
                found, count = True, self.counts[w]
            passed.append((risk, count, load, w))
        for entry in passed:
            heappush(fewest, entry)
        return found

    def drop_surplus(self, redundancy: int) -> None:
        """Let standbys go that redundancy does not need, from the workers that hold most stages."""
        wanted = min(redundancy, len(self.members))
        for s, (held, runs) in enumerate(zip(self.holders, self.executors, strict=True)):
            if len(held) <= wanted:
                continue
            # The only stage of a worker stays with it, as a hot standby.
            idle = [w for w in held - set(runs) if self.counts[w] > 1]
            idle.sort(key=lambda w: (self.counts[w], w))
            while idle and len(held) > wanted:
                dropped = idle.pop()
                if wanted > 1 and self.labels and in_one_domain(held - {dropped}, self.labels):
                    continue
                held.remove(dropped)
                self.counts[dropped] -= 1
                if self.state_bytes:
                    self.held_bytes[dropped] -= self.state_bytes[s]


class _Least:
    """Groups of workers by the load of the busiest, which only grows while this is in use."""

    def __init__(self, load: Mapping[int, int], groups: Iterable[tuple[int, ...]]) -> None:
        self._load = load
        self._heap = [(self._busiest(group), group) for group in groups]
        heapify(self._heap)

    def _busiest(self, group: tuple[int, ...]) -> int:
        return max([self._load[w] for w in group])

    def least(self) -> tuple[int, ...] | None:
        """The least busy group, None if there is none."""
        heap = self._heap
        if not heap:
            return None
        while (now := self._busiest(heap[0][1])) != heap[0][0]:
            heapreplace(heap, (now, heap[0][1]))
        return heap[0][1]


def _known(cluster: Cluster) -> bool:
    return bool(cluster.slowness or cluster.risk)
