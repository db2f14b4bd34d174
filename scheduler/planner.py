"""Making a plan: a pure function of the layout and the workers."""

from __future__ import annotations

from collections.abc import Sequence

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
