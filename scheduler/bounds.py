"""What no plan can beat: lower bounds on a step, whoever computes what and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import add

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts, scaled
from dtrain.scheduler.plan import Table


def least_load(pieces: Sequence[int], workers: int) -> int:
    """Ticks that the busiest of some workers has at least, where no piece can be divided.

    All work shared evenly; and, by the pigeonhole principle, of the ``k n + 1`` longest pieces some
    worker has ``k + 1``, which are at least as long as the last ``k + 1`` of them.
    """
    falling = sorted(pieces, reverse=True)
    before = [0, *accumulate(falling)]
    most = max(falling[0], -(-before[-1] // workers))
    for end in range(workers + 1, len(falling) + 1, workers):
        most = max(most, before[end] - before[end - 1 - (end - 1) // workers])
    return most


def least_step_ticks(costs: StepCosts, workers: Sequence[int], cluster: Cluster = UNIFORM) -> int:
    """No plan on ``workers`` can be shorter, whoever executes what.

    It takes as long as the longest chain of a microbatch, and as what the busiest worker has at
    least. Times on slow workers are whole ticks: each may be half a tick shorter than counted here.
    """
    fastest = min(cluster.slow(w) for w in workers)
    quick = StepCosts(_on(fastest, costs.forward), _on(fastest, costs.backward)).work()
    power = sum(1.0 / cluster.slow(w) for w in workers)
    shared = int(sum(map(sum, costs.work())) / power)
    return max(
        longest_chain(costs, fastest),
        shared,
        least_load([t for row in quick for t in row], len(workers)),
    )


def longest_chain(costs: StepCosts, fastest: float = 1.0) -> int:
    """What a microbatch takes at most, all of it on a worker of that slowness."""
    forward, backward = _on(fastest, costs.forward), _on(fastest, costs.backward)
    return max(map(sum, zip(*forward, *backward, strict=True)))


def least_staged_ticks(costs: StepCosts, sizes: Sequence[int], fastest: float = 1.0) -> int:
    """No plan can be shorter where each worker executes one stage.

    ``sizes[s]``: how many workers execute stage ``s``; ``fastest``: the least slowness of any. It
    takes as long as the longest chain; and before the first forward of a stage's busiest worker
    that microbatch runs on all stages below, as one does after its last backward.
    """
    forward, backward = _on(fastest, costs.forward), _on(fastest, costs.backward)
    work = costs.work() if fastest == 1.0 else StepCosts(forward, backward).work()
    most = longest_chain(costs, fastest)
    ahead = after = [0] * costs.microbatches
    for fs, bs, row, size in zip(forward, backward, work, sizes, strict=True):
        most = max(most, min(ahead) + least_load(row, size) + min(after))
        ahead, after = list(map(add, ahead, fs)), list(map(add, after, bs))
    return most


def _on(slowness: float, table: Table) -> Table:
    if slowness == 1.0:
        return table
    return tuple(tuple(scaled(ticks, slowness) for ticks in row) for row in table)
