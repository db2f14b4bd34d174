"""Who computed wrong: plans by which a step is computed again, and the verdict on what came of it.

A microbatch is a pure function of the step, so two holders of a stage that compute it differ only
if the hardware of one of them is faulty (or a fault was injected). What is compared are digests of
actions, keyed by :func:`position`; equal digests mean equal bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dtrain.scheduler.chance import uniform
from dtrain.scheduler.order import order_actions
from dtrain.scheduler.plan import Action, Layout, Plan


@dataclass(frozen=True)
class Verdict:
    """``culprit``: the worker whose hardware is faulty, None where it cannot be told."""

    culprit: int | None
    reason: str


def position(layout: Layout, action: Action) -> int:
    """The place of an action's digest among the ``2 * stages * microbatches`` of a step."""
    row = action.stage if action.kind == "F" else layout.num_stages + action.stage
    return row * layout.microbatches + action.microbatch


def flow(layout: Layout, microbatch: int) -> list[Action]:
    """The actions of a microbatch in the order in which each one's result feeds the next."""
    stages = range(layout.num_stages)
    return [Action("F", s, microbatch) for s in stages] + [
        Action("B", s, microbatch) for s in reversed(stages)
    ]


def rotated(plan: Plan, turn: int, microbatches: Collection[int]) -> Plan:
    """``plan`` with every executor replaced by the holder ``turn`` places after it.

    Only ``microbatches`` are run. A stage with one holder keeps it.
    """
    executors = []
    for held, runs in zip(plan.holders, plan.executors, strict=True):
        place = {worker: i for i, worker in enumerate(held)}
        executors.append(tuple(held[(place[w] + turn) % len(held)] for w in runs))
    actions = order_actions(plan.layout, plan.workers, executors)
    wanted = set(microbatches)
    return replace(
        plan,
        executors=tuple(executors),
        actions={
            worker: tuple(a for a in ordered if a.microbatch in wanted)
            for worker, ordered in actions.items()
        },
        reason=f"microbatches {sorted(wanted)} again, on other holders",
    )


def sampled(seed: int, step: int, microbatches: int, rate: float) -> tuple[int, ...]:
    """The microbatches of a step that are computed twice: a share ``rate`` of all."""
    if rate <= 0.0:
        return ()
    return tuple(m for m in range(microbatches) if uniform(seed, step, m) < rate)


def differing(layout: Layout, first: Sequence[int], second: Sequence[int]) -> list[Action]:
    """For every microbatch whose digests differ, the first action in its flow that does."""
    found = []
    for microbatch in range(layout.microbatches):
        for action in flow(layout, microbatch):
            at = position(layout, action)
            if first[at] != second[at]:
                found.append(action)
                break
    return found


def judge(
    plans: Sequence[Plan], digests: Sequence[Sequence[int]], disputed: Sequence[Action]
) -> Verdict | None:
    """Who computed the disputed actions wrong, from three or four computations of them.

    ``plans[i]`` and ``digests[i]``: of the i-th computation; the first two differ, the third is by
    the first's executors again, the fourth by others than the second's where there are any. None:
    a fourth computation is needed.
    """
    layout = plans[0].layout
    for action in disputed:
        at = position(layout, action)
        who = [p.executors[action.stage][action.microbatch] for p in plans]
        what = [d[at] for d in digests]
        told = f"{action} by workers {who[0]} and {who[1]} differ"
        if what[2] == what[1]:
            return Verdict(who[0], f"{told}; computed again, worker {who[0]} agrees with the other")
        if what[2] != what[0]:
            return Verdict(who[0], f"{told}; computed again, worker {who[0]} differs from itself")
        if len(what) < 4:
            continue
        if what[3] == what[0]:
            return Verdict(who[1], f"{told}; computed again, worker {who[3]} agrees with {who[0]}")
        if who[3] == who[1] and what[3] != what[1]:
            return Verdict(who[1], f"{told}; computed again, worker {who[1]} differs from itself")
        if who[3] != who[1] and what[3] == what[1]:
            return Verdict(who[0], f"{told}; worker {who[3]} agrees with {who[1]}")
    if len(digests) < 4:
        return None
    pairs = sorted({(p.executors[a.stage][a.microbatch]) for p in plans[:2] for a in disputed})
    return Verdict(None, f"workers {pairs} differ again and again, and no third can tell who errs")


def not_finite(plans: Sequence[Plan], flags: Sequence[Sequence[int]]) -> Verdict | None:
    """What follows from a step whose gradients were not finite, computed a second time.

    ``flags[i]``: for every action of the i-th computation whether its result was not finite. None:
    it began in the same actions both times, so that no hardware is to blame.
    """
    layout = plans[0].layout
    roots = [
        {
            action
            for microbatch in range(layout.microbatches)
            for action in _first_bad(layout, microbatch, flag)
        }
        for flag in flags
    ]
    if roots[0] == roots[1]:
        return None
    workers = [
        {p.executors[a.stage][a.microbatch] for a in found}
        for p, found in zip(plans, roots, strict=True)
    ]
    suspects = workers[0] & workers[1] if roots[1] else workers[0]
    first = ", ".join(str(a) for a in sorted(roots[0]))
    if len(suspects) != 1:
        return Verdict(None, f"{first} were not finite, and no single worker can be blamed")
    culprit = suspects.pop()
    return Verdict(culprit, f"{first} by worker {culprit} was not finite, and is when done again")


def _first_bad(layout: Layout, microbatch: int, flags: Sequence[int]) -> list[Action]:
    return [a for a in flow(layout, microbatch) if flags[position(layout, a)]][:1]
