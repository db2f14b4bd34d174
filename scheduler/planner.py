"""Making a plan: a pure function of the layout, the workers, and what is known of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from itertools import cycle, islice

from dtrain.scheduler.assignment import Assignment
from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, scaled
from dtrain.scheduler.domains import Labels, dealt_over_domains, domain_labels, in_one_domain
from dtrain.scheduler.order import Policy, order_actions
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


def make_plan(
    layout: Layout,
    workers: Sequence[int],
    generation: int,
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
    policy: Policy | None = None,
) -> Plan:
    """Lay out the work of one step on ``workers``.

    With at least as many workers as stages every worker executes one stage, in numbers that follow
    the stages' work, and the stage's executors share its microbatches, the longest given out first
    to whoever would be done first. With fewer, each worker executes a contiguous run of stages. A
    stage with fewer than ``redundancy`` executors gets standby holders (of other stages, nearest
    first) as far as there are workers; where failure domains are known, no domain has all copies of
    a stage if that can be avoided.

    ``costs``: what the step's actions take; None: all microbatches of all stages are alike.
    ``policy``: the order of actions; None: the one that ``layout.schedule`` names, with the longest
    microbatches first where costs are known. All members must agree on every argument.

    Raises:
        ValueError: there is no worker, or one is named twice, or the costs do not fit the layout.
    """
    plan = assigned(layout, workers, generation, costs, cluster)
    return in_order(plan, costs, cluster, policy)


def assigned(
    layout: Layout,
    workers: Sequence[int],
    generation: int,
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
) -> Plan:
    """The plan of :func:`make_plan` without the order of actions."""
    members = checked_members(workers)
    if costs is not None:
        costs.check(layout)
    known = costs or StepCosts.even(layout)
    primaries = _primaries(known, members, cluster)
    labels = domain_labels(cluster, members)
    holders = tuple(
        _with_standbys(primary, members, layout.redundancy, labels) for primary in primaries
    )
    executors = tuple(
        shared_out(row, primary, cluster)
        for row, primary in zip(known.work(), primaries, strict=True)
    )
    reason = _why(layout, members, primaries, executors)
    return Plan(generation, layout, members, holders, executors, {}, reason)


def in_order(
    plan: Plan,
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
    policy: Policy | None = None,
) -> Plan:
    """The same plan with its actions in the order that :func:`order_actions` gives them."""
    actions = order_actions(plan.layout, plan.workers, plan.executors, costs, cluster, policy)
    return replace(plan, actions=actions)


def first_plan(
    layout: Layout, workers: Sequence[int], generation: int, cluster: Cluster = UNIFORM
) -> Plan:
    """The plan that a run begins with, when nothing is known of costs and speeds.

    Of ``cluster`` only the failure domains count, which workers tell when they join.

    Raises:
        ValueError: as :func:`make_plan`.
    """
    return make_plan(layout, workers, generation, cluster=Cluster(domains=cluster.domains))


def checked_members(workers: Sequence[int]) -> tuple[int, ...]:
    """The workers in ascending order.

    Raises:
        ValueError: there is none, or one is named twice.
    """
    members = tuple(sorted(workers))
    if not members or len(set(members)) != len(members):
        raise ValueError(f"workers: expected distinct workers, at least one, got {list(workers)}")
    return members


def _why(
    layout: Layout,
    members: tuple[int, ...],
    primaries: Sequence[Sequence[int]],
    executors: Sequence[Sequence[int]],
) -> str:
    shape = " + ".join(str(len(p)) for p in primaries)
    if len(members) >= layout.num_stages:
        reason = f"{len(members)} workers over {layout.num_stages} stages: {shape} executors"
    else:
        reason = f"{len(members)} workers for {layout.num_stages} stages: some run several"
    idle = sorted(set(members).difference(*executors))
    if idle:
        which = f"workers {idle}" if len(idle) <= 16 else f"{len(idle)} workers"
        reason += f"; {layout.microbatches} microbatches leave {which} without work (standby)"
    return reason


def _primaries(
    costs: StepCosts, members: tuple[int, ...], cluster: Cluster
) -> list[tuple[int, ...]]:
    """For every stage, the workers that execute it."""
    n, num_stages = len(members), costs.num_stages
    if n < num_stages:
        return [(members[stage * n // num_stages],) for stage in range(num_stages)]
    order = dealt_over_domains(members, cluster)
    out, start = [], 0
    for size in team_sizes(costs, n):
        out.append(tuple(sorted(order[start : start + size])))
        start += size
    return out


def team_sizes(costs: StepCosts, workers: int) -> list[int]:
    """How many of at least as many workers as stages execute each stage.

    The next worker goes to the stage whose workers have the most to do, and of equal ones to the
    first, whose blocks are the largest.
    """
    work = [sum(row) for row in costs.work()]
    # This is Adams's method of apportionment: it gives a stage at least the part of its work in all
    # work of as many workers less than there are stages, so nearly all are given out at once.
    certain = workers - len(work)
    sizes = [max(1, ticks * certain // sum(work) - 1) for ticks in work]
    busiest = [
        (-ticks / size, stage) for stage, (ticks, size) in enumerate(zip(work, sizes, strict=True))
    ]
    heapify(busiest)
    for _ in range(workers - sum(sizes)):
        stage = busiest[0][1]
        sizes[stage] += 1
        heapreplace(busiest, (-work[stage] / sizes[stage], stage))
    return sizes


def shared_out(row: Sequence[int], executors: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Who executes each microbatch of a stage: longest first to the least load (Graham, 1969).

    ``row[m]``: ticks of microbatch ``m`` on the stage.
    """
    weights = [cluster.weight(w) for w in executors] if cluster.slowness or cluster.risk else []
    if not weights and row.count(row[0]) == len(row):
        return tuple(islice(cycle(executors), len(row)))
    mean = sum(row) // len(row)
    # By the end of a microbatch of mean length, which tells slow workers from busy ones.
    ends = [(scaled(mean, weight), i) for i, weight in enumerate(weights)]
    ends = ends or [(mean, i) for i in range(len(executors))]
    heapify(ends)
    out = [0] * len(row)
    for m in sorted(range(len(row)), key=row.__getitem__, reverse=True):
        end, i = ends[0]
        out[m] = executors[i]
        heapreplace(ends, (end + (scaled(row[m], weights[i]) if weights else row[m]), i))
    return tuple(out)


def _with_standbys(
    primary: tuple[int, ...], members: tuple[int, ...], redundancy: int, labels: Labels
) -> tuple[int, ...]:
    """The executors of a stage with the standbys that redundancy and failure domains ask for."""
    wanted = min(redundancy, len(members))
    alone = wanted > 1 and in_one_domain(primary, labels)
    if len(primary) >= wanted and not alone:
        return primary
    after = members.index(primary[-1]) + 1
    chosen = set(primary)
    ring = [w for w in members[after:] + members[:after] if w not in chosen]
    held = list(primary)
    if alone:
        held += [w for w in ring if labels[w] != labels[held[0]]][:1]
    held += [w for w in ring if w not in held][: max(0, wanted - len(held))]
    return tuple(sorted(held))


def replan(
    old: Plan,
    workers: Sequence[int],
    generation: int,
    reason: str = "",
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
    policy: Policy | None = None,
) -> Plan:
    """The plan for a changed membership, without moving more than it must.

    Workers that stay keep the stages they hold and the microbatches they execute. Newcomers take
    the places of lost workers. Otherwise a microbatch that lost an executor goes whole to a worker
    of what is left of its route through the stages, or to another route, whichever has less to do;
    a stage without holders goes to the worker with the least work. Then the workers with the least
    work take over single microbatches as long as that levels loads (without ``costs``, until they
    differ by one at most): of stages they hold where that helps, else as further holders. Stages
    with too few holders, or all of them in one failure domain, get standbys that hold the fewest
    stages, a worker that holds none becomes a standby, surplus standbys are let go. All actions are
    ordered anew.

    Arguments are as in :func:`make_plan`; all members must agree on them, and on the old plan's
    workers, holders and executors.

    Raises:
        ValueError: there is no worker, or one is named twice, or the costs do not fit the layout.
    """
    plan = reassigned(old, workers, generation, reason, costs, cluster)
    return in_order(plan, costs, cluster, policy)


def reassigned(
    old: Plan,
    workers: Sequence[int],
    generation: int,
    reason: str = "",
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
) -> Plan:
    """The plan of :func:`replan` without the order of actions."""
    members = checked_members(workers)
    layout = old.layout
    if costs is not None:
        costs.check(layout)
    known = costs or StepCosts.even(layout)
    gone = sorted(set(old.workers) - set(members))
    new = sorted(set(members) - set(old.workers))
    work = Assignment(old, members, known, cluster)
    work.fill_gaps()
    moved = work.level() if gone or new or costs is not None or cluster != UNIFORM else 0
    work.fill_standbys(layout.redundancy)
    work.drop_surplus(layout.redundancy)
    holders = tuple(tuple(sorted(held)) for held in work.holders)
    executors = tuple(tuple(runs) for runs in work.executors)
    said = [reason] if reason else []
    said += [f"without {gone}"] if gone else []
    said += [f"with new {new}"] if new else []
    said += [f"{moved} microbatches moved to level the load"] if moved else []
    why = "; ".join(said) or "nothing changed"
    return Plan(generation, layout, members, holders, executors, {}, why)
