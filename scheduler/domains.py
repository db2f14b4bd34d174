"""Failure domains: which workers can be expected to fail together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dtrain.scheduler.costs import Cluster

Labels = Mapping[int, tuple[str, ...]]
"""For every worker the name of its failure domain, at the level that decides; empty: none known."""


def domain_labels(cluster: Cluster, members: Sequence[int]) -> Labels:
    """The domains that copies of a stage are to be spread over.

    They are those of the coarsest level at which members differ: copies in two racks are in two
    nodes as well, and where all members are in one rack, nothing can be done about racks. Empty
    where members do not differ at any level or some have not said where they are.
    """
    if not cluster.domains:
        return {}
    names = [cluster.domains.get(w, ()) for w in members]
    depth = min((len(name) for name in names), default=0)
    for level in range(1, depth + 1):
        if len({name[:level] for name in names}) > 1:
            return {w: name[:level] for w, name in zip(members, names, strict=True)}
    return {}


def in_one_domain(workers: Iterable[int], labels: Labels) -> bool:
    """Whether one failure could take all of ``workers``; False where no domains are known."""
    return bool(labels) and len({labels[w] for w in workers}) < 2


def dealt_over_domains(members: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """``members`` in an order whose neighbours lie in different domains, the largest first.

    Every domain is dealt in turn one worker of each of its parts. So a contiguous run of as many
    workers as there are nodes has one worker in each, and the same places of two such runs, which
    pass activations to each other, tend to lie in one node.
    """
    return tuple(_deal(sorted(members), cluster, 0))


def _deal(members: list[int], cluster: Cluster, level: int) -> list[int]:
    parts: dict[str | None, list[int]] = {}
    for w in members:
        names = cluster.domains.get(w, ())
        parts.setdefault(names[level] if level < len(names) else None, []).append(w)
    if set(parts) == {None} or len(members) == 1:
        return members
    dealt = [_deal(part, cluster, level + 1) for part in parts.values()]
    longest = max(len(part) for part in dealt)
    return [part[i] for i in range(longest) for part in dealt if i < len(part)]
