"""Laying the work out anew where small changes have added up to a poor plan.

``replan`` moves as little as it can, so that survivors can go on at once. After many losses and
arrivals the pieces lie badly: workers run several stages, and wait for each other. A plan made
afresh has none of that, and costs the transfer of some states; its places are given to those
workers that hold most of what the place needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dtrain.scheduler.bounds import least_staged_ticks, least_step_ticks, longest_chain
from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, node_of
from dtrain.scheduler.domains import Labels, domain_labels, in_one_domain
from dtrain.scheduler.plan import Action, Orders, Plan
from dtrain.scheduler.planner import (
    assigned,
    checked_members,
    in_order,
    reassigned,
    team_sizes,
)
from dtrain.scheduler.predict import planned_end
from dtrain.scheduler.search import quickly_ordered

SLACK = 0.03
"""How much slower than a plan made afresh a plan may be before the work is laid out anew."""


def replan_or_relayout(
    old: Plan,
    workers: Sequence[int],
    generation: int,
    reason: str = "",
    costs: StepCosts | None = None,
    cluster: Cluster = UNIFORM,
    *,
    fresh: Plan | None = None,
    search: bool = False,
) -> Plan:
    """``replan``'s plan, or one made afresh where that is faster by more than ``SLACK``.

    Arguments are as in :func:`replan`. ``fresh``: a plan for as many workers and the same costs,
    whatever the workers' numbers, where one is at hand; it is not taken where it breaks the rule of
    failure domains, nor where more than their domains is known of the workers. ``search``: where
    costs or speeds are known, take the best of a few orders of actions, which may keep more
    microbatches in flight than the layout's schedule does.

    Raises:
        ValueError: as :func:`replan`.
    """
    members = checked_members(workers)
    known = costs or StepCosts.even(old.layout)

    def ordered(plan: Plan) -> Plan:
        return put_in_order(plan, costs, cluster, search=search)

    moved_little = ordered(reassigned(old, members, generation, reason, costs, cluster))
    now, _ = planned_end(moved_little, known, cluster)
    spread = domain_labels(cluster, members) if old.layout.redundancy > 1 else {}
    labels = exchangeable(cluster, members, spread)

    def laid_out(plan: Plan, keep: Labels) -> Plan | None:
        best, _ = planned_end(plan, known, cluster)
        if now <= (1 + SLACK) * best:
            return None
        said = [reason] if reason else []
        said.append(f"laid out anew, which is {now / best - 1:.0%} faster than moving little")
        return relabelled(plan, takers(plan, old, members, keep), generation, "; ".join(said))

    if fresh is not None and labels == spread:
        found = laid_out(fresh, {})
        if found is None or not any(in_one_domain(held, spread) for held in found.holders):
            return found or moved_little
    if _cannot_win(now / (1 + SLACK), known, members, cluster):
        return moved_little
    fresh = ordered(assigned(old.layout, members, generation, costs, cluster))
    return laid_out(fresh, labels) or moved_little


def put_in_order(
    plan: Plan, costs: StepCosts | None = None, cluster: Cluster = UNIFORM, *, search: bool = False
) -> Plan:
    """The plan with its actions in order, for a job that waits for it.

    ``search``: where costs or speeds are known, the best of a few orders.
    """
    if search and (costs is not None or cluster.slowness):
        return quickly_ordered(plan, costs or StepCosts.even(plan.layout), cluster)
    return in_order(plan, costs, cluster)


def _cannot_win(ticks: float, costs: StepCosts, members: Sequence[int], cluster: Cluster) -> bool:
    """Whether no plan that is made afresh can be shorter than ``ticks``."""
    fastest = min(map(cluster.slow, members)) if cluster.slowness else 1.0
    if ticks <= longest_chain(costs, fastest):
        return True
    if len(members) < costs.num_stages:
        return ticks <= least_step_ticks(costs, members, cluster)
    return ticks <= least_staged_ticks(costs, team_sizes(costs, len(members)), fastest)


def exchangeable(cluster: Cluster, members: Sequence[int], spread: Labels) -> Labels:
    """Labels by which two workers may change places in a plan: those of equal ones.

    ``spread``: the failure domains that copies of a stage are spread over. Workers are equal where
    these, their slowness, risk and memory, and, where a node has links of its own, their nodes are.
    """
    near = cluster.transfers_cost and cluster.local_links
    if not (cluster.slowness or cluster.risk or cluster.memory_bytes or near):
        return spread

    def traits(w: int) -> tuple[str, ...]:
        known = (cluster.slow(w), cluster.risk.get(w, 0.0), cluster.memory_bytes.get(w))
        node = node_of(cluster.domains.get(w)) if near else ()
        return (*spread.get(w, ()), *map(repr, known), *node)

    return {w: traits(w) for w in members}


def relabelled(plan: Plan, to: Mapping[int, int], generation: int, reason: str) -> Plan:
    """The same plan where worker ``to[w]`` takes the place of ``w``.

    Raises:
        ValueError: two workers are to take one place.
    """
    workers = tuple(sorted(to[w] for w in plan.workers))
    if len(set(workers)) != len(plan.workers):
        raise ValueError("relabelled: expected another worker for each place")
    executors = tuple(tuple(to[w] for w in runs) for runs in plan.executors)
    actions: Mapping[int, tuple[Action, ...]]
    if isinstance(plan.actions, Orders):
        actions = Orders(workers, executors, plan.actions.forward, plan.actions.backward)
    else:
        actions = {to[w]: plan.actions[w] for w in plan.workers}
    holders = tuple(tuple(sorted(to[w] for w in held)) for held in plan.holders)
    return Plan(generation, plan.layout, workers, holders, executors, actions, reason)


def takers(
    fresh: Plan, old: Plan, members: tuple[int, ...], labels: Labels | None = None
) -> dict[int, int]:
    """For each place of ``fresh``, a member that holds the stage that is most worked on there.

    ``labels``: of places and members alike, as :func:`exchangeable` gives them; a place is taken by
    a member of its own label, so that the copies of a stage stay as spread, and every place's work
    with a worker as fast, as the plan has it.

    Raises:
        ValueError: there are not as many members as places.
    """
    if len(members) != len(fresh.workers):
        raise ValueError(f"takers: expected {len(fresh.workers)} members, got {len(members)}")
    needs, has = _main_stage(fresh), _main_stage(old)
    labels = labels or {}
    free: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for w in reversed(members):
        piles = free.setdefault(labels.get(w, ()), {})
        piles.setdefault(has.get(w, -1), []).append(w)
    to: dict[int, int] = {}
    left: dict[tuple[str, ...], list[int]] = {}
    for place in fresh.workers:
        label = labels.get(place, ())
        pile = free[label].get(needs.get(place, -1))
        if pile:
            to[place] = pile.pop()
        else:
            left.setdefault(label, []).append(place)
    for label, places in left.items():
        rest = sorted(w for pile in free[label].values() for w in pile)
        to |= zip(places, rest, strict=True)
    return to


def _main_stage(plan: Plan) -> dict[int, int]:
    """For every worker, the stage of which it executes most; one it holds where it has no work."""
    counts: dict[int, Counter[int]] = {}
    for stage, runs in enumerate(plan.executors):
        for w, n in Counter(runs).items():
            counts.setdefault(w, Counter())[stage] = n
    main = {w: min(c, key=lambda s: (-c[s], s)) for w, c in counts.items()}
    for stage, held in enumerate(plan.holders):
        for w in held:
            main.setdefault(w, stage)
    return main
