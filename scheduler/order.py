"""Order of actions: list scheduling on unit costs, which never yields a deadlocked order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtrain.scheduler.plan import Action, Layout

_COST = {"F": 1, "B": 2}


@dataclass
class _Worker:
    """A worker in the unit-cost execution that fixes the order."""

    busy: bool = False
    # Microbatches whose forward is ready, by stage; stage (negated) and microbatch of backwards.
    forwards: dict[int, list[int]] = field(default_factory=dict)
    backwards: list[tuple[int, int]] = field(default_factory=list)
    forwards_left: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    order: list[Action] = field(default_factory=list)

    def ready(self, action: Action) -> None:
        """The action has what it needs."""
        if action.kind == "F":
            heapq.heappush(self.forwards.setdefault(action.stage, []), action.microbatch)
        else:
            heapq.heappush(self.backwards, (-action.stage, action.microbatch))


def order_actions(
    layout: Layout, workers: Sequence[int], executors: Sequence[Sequence[int]]
) -> dict[int, tuple[Action, ...]]:
    """Each worker's actions in order, for 1F1B (Narayanan et al., PipeDream, SOSP 2019) or GPipe.

    The step is executed on paper with a forward costing 1 and a backward 2; whatever a free
    worker starts first is next in its order, so following the orders can always proceed.
    1F1B prefers backwards and keeps at most ``num_stages - stage`` microbatches of a stage in
    flight on a worker; GPipe runs all forwards of a worker before its first backward.
    """
    state = {w: _Worker() for w in workers}
    for runs in executors:
        for worker in runs:
            state[worker].forwards_left += 1
    last = layout.num_stages - 1
    for microbatch, worker in enumerate(executors[0]):
        state[worker].ready(Action("F", 0, microbatch))

    clock: list[tuple[int, int, Action]] = []
    started = 0
    free = list(workers)
    now = 0
    while True:
        for worker in free:
            me = state[worker]
            action = _take(me, layout)
            if action is None:
                continue
            me.busy = True
            me.order.append(action)
            step = 1 if action.kind == "F" else -1
            me.in_flight[action.stage] = me.in_flight.get(action.stage, 0) + step
            me.forwards_left -= action.kind == "F"
            heapq.heappush(clock, (now + _COST[action.kind], started, action))
            started += 1
        if not clock:
            break
        now, _, done = heapq.heappop(clock)
        worker = executors[done.stage][done.microbatch]
        state[worker].busy = False
        touched = {worker}
        follower = _follower(done, last)
        if follower is not None:
            heir = executors[follower.stage][follower.microbatch]
            state[heir].ready(follower)
            touched.add(heir)
        free = [w for w in sorted(touched) if not state[w].busy]
    if started != 2 * layout.num_stages * layout.microbatches:
        raise AssertionError(f"order of actions stopped after {started} actions")
    return {w: tuple(state[w].order) for w in workers}


def _follower(done: Action, last_stage: int) -> Action | None:
    """The action that ``done`` makes possible."""
    if done.kind == "F":
        if done.stage == last_stage:
            return Action("B", done.stage, done.microbatch)
        return Action("F", done.stage + 1, done.microbatch)
    return Action("B", done.stage - 1, done.microbatch) if done.stage > 0 else None


def _take(worker: _Worker, layout: Layout) -> Action | None:
    """The ready action that the schedule starts next on a free worker, if any."""
    if worker.busy:
        return None
    gpipe = layout.schedule == "gpipe"
    if worker.backwards and not (gpipe and worker.forwards_left):
        stage, microbatch = heapq.heappop(worker.backwards)
        return Action("B", -stage, microbatch)
    for stage in sorted(worker.forwards, reverse=not gpipe):
        in_flight = worker.in_flight.get(stage, 0)
        if worker.forwards[stage] and (gpipe or in_flight < layout.num_stages - stage):
            return Action("F", stage, heapq.heappop(worker.forwards[stage]))
    return None
