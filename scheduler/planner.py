"""Making a plan: a pure function of the layout and the workers."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from dtrain.scheduler.order import order_actions
from dtrain.scheduler.plan import Layout, Plan


def even_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Cut layers into stages of nearly equal length; later stages get the longer parts.

    With sampled blocks the first layer has the most nodes and edges, so its stage stays short.

    Raises:
        ValueError: there are more stages than layers.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"stages: expected 1 to {num_layers} (the layers), got {num_stages}")
    base, extra = divmod(num_layers, num_stages)
    cuts = [0]
    for stage in range(num_stages):
        cuts.append(cuts[-1] + base + (1 if stage >= num_stages - extra else 0))
    return tuple(cuts)


def make_plan(layout: Layout, workers: Sequence[int], generation: int) -> Plan:
    """Lay out the work of one step on ``workers``.

    With at least as many workers as stages every worker executes one stage, and the stages'
    executors share its microbatches in turn. With fewer, each worker executes a contiguous run of
    stages. A stage with fewer than ``redundancy`` executors gets standby holders (of other
    stages, nearest first) as far as there are workers.

    Raises:
        ValueError: there is no worker, or one is named twice.
    """
    members = tuple(sorted(workers))
    if not members or len(set(members)) != len(members):
        raise ValueError(f"workers: expected distinct workers, at least one, got {list(workers)}")
    primaries = _primaries(layout.num_stages, members)
    holders = tuple(_with_standbys(primary, members, layout.redundancy) for primary in primaries)
    executors = tuple(
        tuple(primary[m % len(primary)] for m in range(layout.microbatches))
        for primary in primaries
    )
    actions = order_actions(layout, members, executors)
    shape = " + ".join(str(len(p)) for p in primaries)
    if len(members) >= layout.num_stages:
        reason = f"{len(members)} workers over {layout.num_stages} stages: {shape} executors"
    else:
        reason = f"{len(members)} workers for {layout.num_stages} stages: some run several"
    idle = [w for w in members if not actions[w]]
    if idle:
        reason += (
            f"; {layout.microbatches} microbatches leave workers {idle} without work (standby)"
        )
    return Plan(generation, layout, members, holders, executors, actions, reason)


def _primaries(num_stages: int, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """For every stage, the workers that execute it."""
    n = len(members)
    if n < num_stages:
        owner = [members[stage * n // num_stages] for stage in range(num_stages)]
        return [(w,) for w in owner]
    base, extra = divmod(n, num_stages)
    out, start = [], 0
    for stage in range(num_stages):
        # Spare workers go to the first stages, whose blocks are the largest.
        size = base + (1 if stage < extra else 0)
        out.append(members[start : start + size])
        start += size
    return out


def _with_standbys(
    primary: tuple[int, ...], members: tuple[int, ...], redundancy: int
) -> tuple[int, ...]:
    wanted = min(redundancy, len(members)) - len(primary)
    if wanted <= 0:
        return primary
    after = members.index(primary[-1]) + 1
    ring = members[after:] + members[:after]
    return tuple(sorted(primary + tuple(w for w in ring if w not in primary)[:wanted]))


def replan(old: Plan, workers: Sequence[int], generation: int, reason: str = "") -> Plan:
    """The plan for a changed membership that moves as little as it can.

    Workers that stay keep the stages they hold and the microbatches they execute. A lost worker's
    microbatches go to the stage's other holders, each to the one with the least work; a stage
    without holders goes to the worker with the least work. Then the workers with the least work
    take over single microbatches until loads differ by one at most: of stages they hold where
    that helps, else as further holders. Stages with too few holders get standbys that hold the
    fewest stages, a worker that holds none becomes a standby, surplus standbys are let go.

    Raises:
        ValueError: there is no worker, or one is named twice.
    """
    members = tuple(sorted(workers))
    if not members or len(set(members)) != len(members):
        raise ValueError(f"workers: expected distinct workers, at least one, got {list(workers)}")
    layout = old.layout
    gone = sorted(set(old.workers) - set(members))
    new = sorted(set(members) - set(old.workers))
    work = _Assignment(old, members)
    work.fill_gaps()
    moved = work.level() if gone or new else 0
    work.fill_standbys(layout.redundancy)
    work.drop_surplus(layout.redundancy)
    holders = tuple(tuple(sorted(held)) for held in work.holders)
    executors = tuple(tuple(runs) for runs in work.executors)
    actions = order_actions(layout, members, executors)
    said = [reason] if reason else []
    said += [f"without {gone}"] if gone else []
    said += [f"with new {new}"] if new else []
    said += [f"{moved} microbatches moved to level the load"] if moved else []
    why = "; ".join(said) or "nothing changed"
    return Plan(generation, layout, members, holders, executors, actions, why)


class _Assignment:
    """Holders and executors in the making. No step costs more than n log n in the workers."""

    def __init__(self, old: Plan, members: tuple[int, ...]) -> None:
        self.members = members
        stay = set(members)
        self.holders = [{w for w in held if w in stay} for held in old.holders]
        self.executors = [list(runs) for runs in old.executors]
        self.load = dict.fromkeys(members, 0)
        self.mean = old.num_stages * old.layout.microbatches // len(members)
        # The microbatches of each stage's executors, ascending: what stays and what was taken over.
        self.own: list[dict[int, list[int]]] = [{} for _ in self.holders]
        self.taken: list[dict[int, list[int]]] = [{} for _ in self.holders]
        self.orphans: list[tuple[int, int]] = []
        for s, runs in enumerate(self.executors):
            for m, w in enumerate(runs):
                if w in stay:
                    self.own[s].setdefault(w, []).append(m)
                    self.load[w] += 1
                else:
                    self.orphans.append((s, m))
        self.counts = dict.fromkeys(members, 0)
        for held in self.holders:
            for w in held:
                self.counts[w] += 1

    def _hold(self, stage: int, worker: int) -> None:
        if worker not in self.holders[stage]:
            self.holders[stage].add(worker)
            self.counts[worker] += 1

    def _give(self, stage: int, microbatch: int, worker: int) -> None:
        self._hold(stage, worker)
        self.executors[stage][microbatch] = worker
        insort(self.taken[stage].setdefault(worker, []), microbatch)
        self.load[worker] += 1

    def _take(self, stage: int, worker: int) -> int:
        """A microbatch of ``worker`` on ``stage``, rather one that it took over itself."""
        self.load[worker] -= 1
        return (self.taken[stage].get(worker) or self.own[stage][worker]).pop()

    def _executes(self, stage: int, worker: int) -> bool:
        return bool(self.taken[stage].get(worker) or self.own[stage].get(worker))

    def fill_gaps(self) -> None:
        """Find executors for the microbatches of lost workers, and a holder for every stage."""
        for s, held in enumerate(self.holders):
            if not held:
                self._hold(s, min(self.members, key=lambda w: (self.load[w], w)))
        ranked: dict[int, list[tuple[int, int]]] = {}
        for s, m in self.orphans:
            if s not in ranked:
                ranked[s] = [(self.load[w], w) for w in self.holders[s]]
                heapify(ranked[s])
            heap = ranked[s]
            while heap[0][0] != self.load[heap[0][1]]:
                heapreplace(heap, (self.load[heap[0][1]], heap[0][1]))
            self._give(s, m, heap[0][1])

    def level(self) -> int:
        """Move microbatches until loads differ by one at most; how many were moved.

        Nobody gives below the mean, so the number moved is at most the work above it.
        """
        light = [(load, w) for w, load in self.load.items()]
        heapify(light)
        heavy = [
            [(-self.load[w], w) for w in {**self.own[s], **self.taken[s]}]
            for s in range(len(self.holders))
        ]
        for heap in heavy:
            heapify(heap)
        moved = 0
        while True:
            load, taker = light[0]
            if load != self.load[taker]:
                heapreplace(light, (self.load[taker], taker))
                continue
            found = self._giver(taker, heavy)
            if found is None:
                return moved
            stage, giver = found
            self._give(stage, self._take(stage, giver), taker)
            # Among the last moves a giver may itself become one with the least work.
            heappush(light, (self.load[giver], giver))
            moved += 1

    def _giver(self, taker: int, heavy: list[list[tuple[int, int]]]) -> tuple[int, int] | None:
        """The stage and executor from which ``taker`` should take a microbatch, if any."""
        best: tuple[bool, bool, int, int, int, int] | None = None
        least = max(self.load[taker] + 2, self.mean + 1)
        for s, heap in enumerate(heavy):
            while heap:
                load, w = heap[0]
                if not self._executes(s, w):
                    heappop(heap)
                elif load != -self.load[w]:
                    heapreplace(heap, (-self.load[w], w))
                else:
                    break
            if heap and -heap[0][0] >= least:
                load, w = heap[0]
                held, taken = self.holders[s], bool(self.taken[s].get(w))
                # Rather no further holder, and rather what has just been taken over than what
                # its executor has long had.
                found = (taker not in held, not taken, load, len(held), s, w)
                best = found if best is None else min(best, found)
        return (best[4], best[5]) if best is not None else None

    def fill_standbys(self, redundancy: int) -> None:
        """Bring every stage to its holders, and every worker to a stage."""
        wanted = min(redundancy, len(self.members))
        if any(len(held) < wanted for held in self.holders):
            fewest = [(self.counts[w], self.load[w], w) for w in self.members]
            heapify(fewest)
            for s in sorted(range(len(self.holders)), key=lambda s: (len(self.holders[s]), s)):
                self._add_standbys(s, wanted, fewest)
        for w in self.members:
            if not self.counts[w]:
                self._hold(
                    min(range(len(self.holders)), key=lambda s: (len(self.holders[s]), s)), w
                )

    def _add_standbys(self, stage: int, wanted: int, fewest: list[tuple[int, int, int]]) -> None:
        passed = []
        while len(self.holders[stage]) < wanted:
            _, load, w = heappop(fewest)
            self._hold(stage, w)
            passed.append((self.counts[w], load, w))
        for entry in passed:
            heappush(fewest, entry)

    def drop_surplus(self, redundancy: int) -> None:
        """Let standbys go that redundancy does not need, from the workers that hold most stages."""
        wanted = min(redundancy, len(self.members))
        for held, runs in zip(self.holders, self.executors, strict=True):
            if len(held) <= wanted:
                continue
            # The only stage of a worker stays with it, as a hot standby.
            idle = [w for w in held - set(runs) if self.counts[w] > 1]
            idle.sort(key=lambda w: (self.counts[w], w))
            while idle and len(held) > wanted:
                dropped = idle.pop()
                held.remove(dropped)
                self.counts[dropped] -= 1
