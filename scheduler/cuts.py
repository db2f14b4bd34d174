"""Where to cut the layers into stages: PipeDream's dynamic programme, and how many stages to take.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.1: the slowest stage is made as fast as can be, where a stage of ``r`` workers takes a
``r``-th of the time, transfers between stages take part, and each worker has limited memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts
from dtrain.scheduler.plan import Layout, Schedule
from dtrain.scheduler.search import Choice, choose_plan

_MOST_WORKERS = 64
"""Above so many workers the programme deals out as many shares of them."""


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs per step: means over microbatches times their number.

    ``ticks[l]``: forward and backward of all microbatches on a worker of slowness 1.
    ``transfer_ticks[l]``: what the sends from layer ``l`` to the next take, both ways.
    ``sum_ticks[l]``: the exact sum and update of the layer's parameters.
    ``state_bytes[l]`` of a holder. ``kept_bytes[l]``: largest activations of one microbatch.
    """

    ticks: tuple[int, ...]
    transfer_ticks: tuple[int, ...]
    sum_ticks: tuple[int, ...]
    state_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]


def layer_costs(costs: StepCosts, cluster: Cluster = UNIFORM) -> LayerCosts:
    """Layer costs from the costs of a step that is cut into single layers."""
    zeros = (0,) * costs.num_stages
    sent = costs.sent_bytes or (zeros[:0],) * costs.num_stages
    return LayerCosts(
        tuple(sum(row) for row in costs.work()),
        tuple(2 * sum(cluster.transfer_ticks(-1, -2, size) for size in row) for row in sent),
        costs.sum_ticks or zeros,
        costs.state_bytes or zeros,
        tuple(max(row) for row in costs.kept_bytes) if costs.kept_bytes else zeros,
    )


def cut_stages(
    layers: LayerCosts, stages: int, workers: int, memory_bytes: int | None = None
) -> tuple[int, ...] | None:
    """The cuts into so many stages whose slowest one is fastest; None: none fits in memory.

    ``workers``: at least as many as stages get a stage of their own, or several; with fewer the
    stages are made equally long, since a worker runs several. ``memory_bytes``: of a worker; stage
    ``s`` keeps at most ``stages - s`` microbatches in flight.

    Raises:
        ValueError: there are more stages than layers.
    """
    count = len(layers.ticks)
    if not 1 <= stages <= count:
        raise ValueError(f"stages: expected 1 to {count} (the layers), got {stages}")
    shares = max(stages, min(workers, _MOST_WORKERS))
    size = max(1.0, workers / shares)

    @cache
    def best(first: int, left: int, power: int) -> tuple[float, tuple[int, ...]]:
        """Slowest of the last ``left`` stages from layer ``first`` on, and their cuts."""
        if left == 1:
            return _stage_ticks(layers, first, count, power * size, 1, memory_bytes), (first,)
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for end in range(first + 1, count - left + 2):
            for mine in range(1, power - left + 2):
                here = _stage_ticks(layers, first, end, mine * size, left, memory_bytes)
                if here >= found[0]:
                    continue
                rest, cuts = best(end, left - 1, power - mine)
                slowest = max(here, rest, layers.transfer_ticks[end - 1] / (mine * size))
                if slowest < found[0]:
                    found = (slowest, (first, *cuts))
        return found

    slowest, cuts = best(0, stages, shares)
    return (*cuts, count) if slowest < float("inf") else None


def _stage_ticks(
    layers: LayerCosts, first: int, end: int, power: float, left: int, memory_bytes: int | None
) -> float:
    """Time of the stage of layers [first, end) on ``power`` workers, the last but ``left - 1``."""
    if memory_bytes is not None:
        needed = sum(layers.state_bytes[first:end]) + left * sum(layers.kept_bytes[first:end])
        if needed > memory_bytes:
            return float("inf")
    compute = sum(layers.ticks[first:end]) / power
    return max(compute, float(sum(layers.sum_ticks[first:end])))


@dataclass(frozen=True)
class StageCount:
    """The number of stages that was found fastest.

    ``choices[n]``: the best plan with ``n`` stages, fit for memory or not.
    """

    stages: int
    choices: dict[int, Choice]
    reason: str

    @property
    def choice(self) -> Choice:
        """The plan to take."""
        return self.choices[self.stages]


def choose_stages(
    costs_of: Callable[[tuple[int, ...]], StepCosts],
    num_layers: int,
    microbatches: int,
    workers: Sequence[int],
    generation: int,
    *,
    redundancy: int = 2,
    schedule: Schedule = "1f1b",
    cluster: Cluster = UNIFORM,
    most: int | None = None,
) -> StageCount:
    """Try 1 (pure data parallelism) to ``most`` stages and take the fastest within memory.

    ``costs_of(cuts)``: the costs of the step under those cuts. Of equal ones the fewest stages.

    Raises:
        ValueError: as :func:`dtrain.scheduler.make_plan`.
    """
    single = layer_costs(costs_of(tuple(range(num_layers + 1))), cluster)
    memory = min(
        (cluster.memory_bytes[w] for w in workers if w in cluster.memory_bytes), default=None
    )
    choices: dict[int, Choice] = {}
    for stages in range(1, min(most or num_layers, num_layers) + 1):
        cuts = cut_stages(single, stages, len(workers), memory)
        if cuts is None:
            # Recomputing activations may still make it fit.
            cuts = cut_stages(single, stages, len(workers))
        assert cuts is not None
        layout = Layout(cuts, microbatches, redundancy, schedule)
        choices[stages] = choose_plan(layout, workers, generation, costs_of(cuts), cluster)

    def worth(stages: int) -> tuple[bool, int, int]:
        found = choices[stages].prediction
        return bool(found.over), found.step_ticks, stages

    best = min(choices, key=worth)
    return StageCount(best, choices, _compared(choices, best))


def _compared(choices: dict[int, Choice], best: int) -> str:
    parts = []
    for stages, choice in choices.items():
        found = choice.prediction
        said = f"{stages}: {found.step_ticks / 1e6:.2f} ms"
        if found.over:
            said += " (does not fit in memory)"
        elif any(choice.recompute):
            said += " (recomputing activations)"
        parts.append(said)
    kind = "1 stage (pure data parallelism)" if best == 1 else f"{best} stages"
    return f"{kind} predicted fastest; " + ", ".join(parts)
