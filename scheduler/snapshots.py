"""Snapshots in peer memory, tier 1 of recovery: who keeps whose, when one is due, what goes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

KEPT_STEPS = 3
"""A copy may still be on its way when the next one is taken, and workers may be a step apart."""


@dataclass(frozen=True)
class Due:
    """Whether to take a snapshot, and why."""

    now: bool
    reason: str


def keeper(
    stage: int,
    holders: Collection[int],
    workers: Iterable[int],
    domains: Mapping[int, Sequence[str]],
) -> int | None:
    """The worker that keeps a copy of ``stage`` though it does not hold it; None if all hold it.

    One of another failure domain than all the holders where there is one; of several, neighbouring
    stages take different ones.
    """
    others = [w for w in workers if w not in holders]
    if not others:
        return None
    taken = {tuple(domains[w]) for w in holders}
    wrap = max(others) + 1
    return min(others, key=lambda w: (tuple(domains[w]) in taken, (w - stage) % wrap))


def due(
    step: int, taken: Collection[int], every: int | Literal["auto"], *, asked: bool, last: bool
) -> Due:
    """Whether a snapshot is to be taken after ``step`` committed steps.

    ``taken``: the steps whose snapshots this generation has taken. ``every``: steps from one to the
    next; auto: when the leader has ``asked``. ``last``: the generation ends with this step.
    """
    if step in taken:
        return Due(False, f"that of step {step} was taken")
    if not taken:
        return Due(True, "the generation has none")
    if last:
        return Due(True, "the generation ends")
    if asked:
        return Due(True, "the leader asked for it")
    if every != "auto" and step % every == 0:
        return Due(True, f"every {every} steps")
    return Due(False, "its time has not come")


def outdated(
    held: Iterable[tuple[int, int]], placed: Collection[int], *, replaced: bool
) -> set[tuple[int, int]]:
    """The snapshots that a worker forgets, of those it has: (step, stage).

    ``placed``: stages whose snapshots belong to it, of which the newest ``KEPT_STEPS`` stay. Those
    of other stages, from before a change of membership, go once they are ``replaced``: the new
    keepers have theirs.
    """
    steps: dict[int, list[int]] = {}
    for step, stage in held:
        steps.setdefault(stage, []).append(step)
    gone = set()
    for stage, of_stage in steps.items():
        if stage in placed:
            gone |= {(step, stage) for step in sorted(of_stage)[:-KEPT_STEPS]}
        elif replaced:
            gone |= {(step, stage) for step in of_stage}
    return gone
