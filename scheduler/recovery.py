"""What a new generation goes on from: the settlement of the step that a fault interrupted.

The rule (a step is a transaction): if any member saw the full vote on a step, every former member
holds its reduced gradients, so all apply it; else it is replayed. The generation goes on from the
newest step at which every stage is to be had: from a holder, else from host memory; where no step
has every stage, from the newest durable checkpoint or the initial weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from dtrain.scheduler.events import Announcement
from dtrain.scheduler.plan import Plan


@dataclass(frozen=True)
class Settlement:
    """Where a generation starts.

    ``tier``: 0 holders, 1 peer memory, 2 durable checkpoint (or a fresh start). ``step``: committed
    steps that the generation starts with; None in tier 2, where the checkpoint says. ``apply``:
    workers that must apply their pending step first. ``sources[stage]``: the worker that has the
    stage's state at ``step`` (tiers 0 and 1). ``replayed``: a step was begun and is discarded, or
    committed ones are done again. ``witnesses``: workers that know what the vote on the applied
    step said (its loss and norm), where ``apply`` is not empty.
    """

    tier: int
    step: int | None
    apply: tuple[int, ...]
    sources: tuple[int, ...]
    replayed: bool
    reason: str
    witnesses: tuple[int, ...] = ()


@dataclass(frozen=True)
class Transfer:
    """``source`` sends the state of ``stage`` to ``target``."""

    stage: int
    source: int
    target: int


def settle(members: Sequence[Announcement], num_stages: int, *, sharded: bool) -> Settlement:
    """Decide where to go on from what the members announced.

    ``sharded``: optimizer state is split over a stage's holders (ZeRO), so that the holders that
    are left do not have it all and a snapshot must serve.
    """
    veterans = [a for a in members if a.since > 0]
    if not any(a.stages or a.snapshots for a in veterans):
        return Settlement(2, None, (), (), False, "no member has any state")
    newest = max(a.committed + a.voted for a in veterans)
    steps = {step for a in veterans for step, _ in a.snapshots}
    if not sharded:
        steps |= {a.committed for a in veterans} | {a.committed + a.voted for a in veterans}
    for step in sorted(steps, reverse=True):
        found = _sources(veterans, step, num_stages, sharded)
        if found is not None:
            return _going_on(veterans, step, newest, found, sharded)
    reason = f"{_why_not(veterans, newest, num_stages, sharded)}, and no step has every stage"
    return Settlement(2, None, (), (), True, f"{reason}: newest durable checkpoint")


def base_generation(members: Sequence[Announcement]) -> tuple[int, int] | None:
    """The generation whose plan the next one is made from, and a worker that knows that plan.

    None where no member was in any generation. All members must take the same plan, so the newest
    generation that any of them entered counts.
    """
    if not any(a.since for a in members):
        return None
    newest = max(members, key=lambda a: (a.since, -a.peer.worker))
    return newest.since, newest.peer.worker


def kept(announcement: Announcement, stage: int, settlement: Settlement) -> str | None:
    """How the announcing worker has the state of ``stage`` that ``settlement`` goes on from.

    ``"held"``: it is the state of the stage that it holds, once its pending step is applied where
    ``settlement.apply`` says so. ``"snapshot"``: it is in its host memory. None: it has it not.
    """
    if settlement.step is None or announcement.since == 0:
        return None
    applied = announcement.committed + (announcement.peer.worker in settlement.apply)
    if stage in announcement.stages and applied == settlement.step:
        return "held"
    return "snapshot" if (settlement.step, stage) in announcement.snapshots else None


def transfers(
    plan: Plan,
    settlement: Settlement,
    members: Sequence[Announcement],
    domains: Mapping[int, Sequence[str]] | None = None,
) -> tuple[Transfer, ...]:
    """The states that must move before ``plan`` can run, in stage and then target order.

    A holder that has the state in any way does not ask. Who does is served by the worker that has
    it and shares most failure ``domains`` with it (the same node before the same rack), and of
    those by the one that sends least so far.
    """
    if settlement.tier == 2:
        return ()
    by_worker = {a.peer.worker: a for a in members}
    sends: Counter[int] = Counter()
    found = []
    for stage, holders in enumerate(plan.holders):
        has = {w for w, a in by_worker.items() if kept(a, stage, settlement) is not None}
        for target in holders:
            if target in has:
                continue
            source = min(
                has,
                key=lambda w: (
                    -_shared(domains, w, target),
                    sends[w],
                    w != settlement.sources[stage],
                    w,
                ),
            )
            sends[source] += 1
            found.append(Transfer(stage, source, target))
    return tuple(found)


def _shared(domains: Mapping[int, Sequence[str]] | None, a: int, b: int) -> int:
    """How many failure domains, from the largest on, two workers share."""
    if domains is None:
        return 0
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(domains[a], domains[b], strict=False))
    return sum(1 for _ in pairs)


def _can_be_at(veterans: Sequence[Announcement], step: int) -> tuple[list[int], list[int]]:
    """Workers that have ``step`` committed steps or can have, and those who know its vote."""
    witnesses = sorted(a.peer.worker for a in veterans if a.committed + a.voted == step)
    able = [
        a.peer.worker
        for a in veterans
        if a.committed == step or (a.committed == step - 1 and a.pending and witnesses)
    ]
    return sorted(able), witnesses


def _sources(
    veterans: Sequence[Announcement], step: int, num_stages: int, sharded: bool
) -> tuple[tuple[int, ...], bool] | None:
    """For every stage a worker with its state at ``step``, holders before snapshots.

    And whether all are holders; None if some stage is not to be had.
    """
    able = set(_can_be_at(veterans, step)[0]) if not sharded else set()
    holders: dict[int, int] = {}
    keepers: dict[int, int] = {}
    for a in sorted(veterans, key=lambda a: -a.peer.worker):
        if a.peer.worker in able:
            holders |= dict.fromkeys(a.stages, a.peer.worker)
        keepers |= {stage: a.peer.worker for at, stage in a.snapshots if at == step}
    stages = range(num_stages)
    if any(s not in holders and s not in keepers for s in stages):
        return None
    sources = tuple(holders[s] if s in holders else keepers[s] for s in stages)
    return sources, all(s in holders for s in stages)


def _going_on(
    veterans: Sequence[Announcement],
    step: int,
    newest: int,
    found: tuple[tuple[int, ...], bool],
    sharded: bool,
) -> Settlement:
    sources, all_held = found
    able, witnesses = _can_be_at(veterans, step) if not sharded else ([], [])
    committed = {a.peer.worker: a.committed for a in veterans}
    apply = tuple(w for w in able if committed[w] < step)
    replayed = newest > step or any(a.pending and a.committed >= step for a in veterans)
    if all_held:
        reason = f"every stage has a holder at step {step}"
        if newest > step:
            reason += f", and none after it up to {newest}"
    else:
        why = _why_not(veterans, newest, len(sources), sharded)
        reason = f"{why}; with snapshots in peer memory every stage is to be had at step {step}"
    if apply:
        reason += f"; workers {list(apply)} apply the step that was voted"
    return Settlement(
        0 if all_held else 1,
        step,
        apply,
        sources,
        replayed,
        reason,
        tuple(witnesses) if apply else (),
    )


def _why_not(veterans: Sequence[Announcement], newest: int, num_stages: int, sharded: bool) -> str:
    """Why the newest step cannot simply go on with its holders."""
    if sharded:
        return "sharded optimizer state is incomplete without all holders"
    able = set(_can_be_at(veterans, newest)[0])
    held = {stage for a in veterans if a.peer.worker in able for stage in a.stages}
    return f"no holder of stages {sorted(set(range(num_stages)) - held)} is left at step {newest}"
