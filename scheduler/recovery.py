"""What a new generation goes on from: the settlement of the step that a fault interrupted.

The rule (a step is a transaction): if any survivor saw the full vote on a step, every survivor
holds its reduced gradients, so all apply it; else nobody does and it is replayed. Stages that no
survivor holds come from the newest tier that has them: host memory of a peer, a durable
checkpoint, the initial weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtrain.scheduler.membership import Announcement
from dtrain.scheduler.plan import Plan


@dataclass(frozen=True)
class Settlement:
    """Where a generation starts.

    ``tier``: 0 holders, 1 peer memory, 2 durable checkpoint (or a fresh start). ``step``: committed
    steps that the generation starts with; None in tier 2, where the checkpoint says. ``apply``:
    workers that must apply their pending step first. ``sources[stage]``: the worker that has the
    stage's state at ``step`` (tiers 0 and 1). ``replayed``: a step was begun and is discarded.
    """

    tier: int
    step: int | None
    apply: tuple[int, ...]
    sources: tuple[int, ...]
    replayed: bool
    reason: str


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
    veterans = [a for a in members if a.since > 0 and (a.stages or a.snapshots)]
    if not veterans:
        return Settlement(2, None, (), (), False, "no member has any state")
    step = max(a.committed + a.voted for a in veterans)
    able = [a for a in veterans if a.committed == step or (a.committed == step - 1 and a.pending)]
    apply = tuple(sorted(a.peer.worker for a in able if a.committed < step))
    replayed = any(a.pending and a.committed == step for a in able)
    holders = [
        sorted(a.peer.worker for a in able if stage in a.stages) for stage in range(num_stages)
    ]
    if not sharded and all(holders):
        what = f"every stage has a holder at step {step}"
        if apply:
            what += f"; workers {list(apply)} apply the step that was voted"
        sources = tuple(h[0] for h in holders)
        return Settlement(0, step, apply, sources, replayed, what)
    why = "sharded optimizer state is incomplete without all holders"
    if not sharded:
        missing = [s for s, h in enumerate(holders) if not h]
        why = f"no holder of stages {missing} is left"
    return _from_snapshots(members, num_stages, step, why)


def _from_snapshots(
    members: Sequence[Announcement], num_stages: int, step: int, why: str
) -> Settlement:
    keepers: dict[int, dict[int, list[int]]] = {}
    for announcement in members:
        for snapshot_step, stage in announcement.snapshots:
            at = keepers.setdefault(snapshot_step, {})
            at.setdefault(stage, []).append(announcement.peer.worker)
    for snapshot_step in sorted(keepers, reverse=True):
        found = keepers[snapshot_step]
        if all(stage in found for stage in range(num_stages)):
            sources = tuple(min(found[stage]) for stage in range(num_stages))
            reason = f"{why}; snapshots of step {snapshot_step} in peer memory have every stage"
            return Settlement(1, snapshot_step, (), sources, step > snapshot_step, reason)
    reason = f"{why}, and no snapshot has every stage: newest durable checkpoint"
    return Settlement(2, None, (), (), True, reason)


def transfers(
    plan: Plan, settlement: Settlement, members: Sequence[Announcement]
) -> tuple[Transfer, ...]:
    """The states that must move before ``plan`` can run, in stage and then target order.

    In tier 1 every holder needs the snapshot; one that has it in its own memory does not ask.
    """
    if settlement.tier == 2:
        return ()
    by_worker = {a.peer.worker: a for a in members}
    out = []
    for stage, holders in enumerate(plan.holders):
        source = settlement.sources[stage]
        for worker in holders:
            if not _has(by_worker[worker], stage, settlement):
                out.append(Transfer(stage, source, worker))
    return tuple(out)


def _has(announcement: Announcement, stage: int, settlement: Settlement) -> bool:
    step = settlement.step
    assert step is not None
    if settlement.tier == 1:
        return (step, stage) in announcement.snapshots
    applied = announcement.committed == step or announcement.peer.worker in settlement.apply
    return announcement.since > 0 and applied and stage in announcement.stages
