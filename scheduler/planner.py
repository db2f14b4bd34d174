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


def replan(old: Plan, workers: Sequence[int], generation: int, reason: str = "") -> Plan:
    """The plan for a changed membership that moves as little as it can.

    Survivors keep the stages they hold and the microbatches they execute. A lost worker's
    microbatches go to the stage's other holders, one by one to the holder with the least work; a
    stage without holders goes to the worker with the least work. New workers then take over from
    the most loaded executors until loads differ by less than one microbatch, and stages left with
    too few holders get standbys that hold the fewest stages.

    Raises:
        ValueError: there is no worker, or one is named twice.
    """
    members = tuple(sorted(workers))
    if not members or len(set(members)) != len(members):
        raise ValueError(f"workers: expected distinct workers, at least one, got {list(workers)}")
    layout = old.layout
    stages, microbatches = layout.num_stages, layout.microbatches
    holders = [[w for w in old.holders[s] if w in members] for s in range(stages)]
    executors = [[w if w in members else -1 for w in old.executors[s]] for s in range(stages)]
    load = dict.fromkeys(members, 0)
    for runs in executors:
        for w in runs:
            if w >= 0:
                load[w] += 1
    for s in range(stages):
        if not holders[s]:
            holders[s] = [min(members, key=lambda w: (load[w], w))]
        for m in range(microbatches):
            if executors[s][m] < 0:
                heir = min(holders[s], key=lambda w: (load[w], w))
                executors[s][m] = heir
                load[heir] += 1
    moved = _balance(members, holders, executors, load)
    _fill_standbys(members, holders, layout.redundancy, load)
    _drop_surplus(members, holders, executors, layout.redundancy)
    fixed_holders = tuple(tuple(sorted(h)) for h in holders)
    fixed_executors = tuple(tuple(e) for e in executors)
    actions = order_actions(layout, members, fixed_executors)
    gone = sorted(set(old.workers) - set(members))
    new = sorted(set(members) - set(old.workers))
    said = [reason] if reason else []
    said += [f"without {gone}"] if gone else []
    said += [f"with new {new}"] if new else []
    said += [f"{moved} microbatches moved to level the load"] if moved else []
    why = "; ".join(said) or "nothing changed"
    return Plan(generation, layout, members, fixed_holders, fixed_executors, actions, why)


def _balance(
    members: tuple[int, ...],
    holders: list[list[int]],
    executors: list[list[int]],
    load: dict[int, int],
) -> int:
    """Move microbatches from the most to the least loaded workers; how many were moved.

    Within a stage's holders first; a worker without any work may become a further holder.
    """
    moved = 0
    while True:
        idle = min(members, key=lambda w: (load[w], w))
        best: tuple[int, int, int, int] | None = None
        for s, runs in enumerate(executors):
            joins = idle not in holders[s]
            if joins and load[idle]:
                # A busy worker keeps to its stages; only an idle one learns another.
                continue
            for m, w in enumerate(runs):
                if load[w] - load[idle] >= 2:
                    found = (-load[w], int(joins), s, m)
                    best = found if best is None or found < best else best
        if best is None:
            return moved
        _, joins_stage, s, m = best
        if joins_stage:
            holders[s].append(idle)
        load[executors[s][m]] -= 1
        load[idle] += 1
        executors[s][m] = idle
        moved += 1


def _fill_standbys(
    members: tuple[int, ...], holders: list[list[int]], redundancy: int, load: dict[int, int]
) -> None:
    wanted = min(redundancy, len(members))
    for held in holders:
        while len(held) < wanted:
            counts = {w: sum(w in h for h in holders) for w in members if w not in held}
            held.append(min(counts, key=lambda w: (counts[w], load[w], w)))


def _drop_surplus(
    members: tuple[int, ...], holders: list[list[int]], executors: list[list[int]], redundancy: int
) -> None:
    """Let standbys go that redundancy does not need, from the workers that hold most stages."""
    wanted = min(redundancy, len(members))
    for held, runs in zip(holders, executors, strict=True):
        idle = [w for w in held if w not in runs]
        while idle and len(held) > wanted:
            counts = {w: sum(w in h for h in holders) for w in idle}
            dropped = max(idle, key=lambda w: (counts[w], w))
            # The only stage of a worker without work stays with it, as a hot standby.
            if counts[dropped] == 1:
                break
            held.remove(dropped)
            idle.remove(dropped)
