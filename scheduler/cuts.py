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
from dtrain.scheduler.plan import Layout, Plan, Schedule
from dtrain.scheduler.planner import first_plan
from dtrain.scheduler.predict import Prediction, excess_bytes, predict
from dtrain.scheduler.recompute import Recompute, recomputed, stages_to_recompute

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

    ``plans[n]``, ``predictions[n]``: the plan with ``n`` stages, fit for memory or not;
    ``recompute[n]``: which of them compute activations again, as :func:`stages_to_recompute` says.
    """

    stages: int
    plans: dict[int, Plan]
    predictions: dict[int, Prediction]
    recompute: dict[int, tuple[bool, ...]]
    reason: str

    @property
    def plan(self) -> Plan:
        """The plan to take."""
        return self.plans[self.stages]

    @property
    def prediction(self) -> Prediction:
        """What it takes."""
        return self.predictions[self.stages]


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
    recompute: Recompute = "auto",
    stages: int | None = None,
) -> StageCount:
    """Cut the layers into so many stages where that is fastest within memory.

    ``stages``: None: 1 (pure data parallelism) to ``num_layers``, whichever is fastest.

    What is compared are the plans that a run makes (:func:`dtrain.scheduler.planner.first_plan`),
    which nobody searches, with the time that the stages take which compute activations again. Cuts
    are those that are fastest where nothing is computed again, and those that are if memory has no
    limit, with as many workers for each stage or as many as its work asks for. Of equal plans the
    fewest stages; where none fits, the one that lacks the least memory.

    ``costs_of(cuts)``: the costs of the step under those cuts. ``recompute``: as a run has it.

    Raises:
        ValueError: as :func:`dtrain.scheduler.make_plan`.
    """
    single = layer_costs(costs_of(tuple(range(num_layers + 1))), cluster)
    memory = min(
        (cluster.memory_bytes[w] for w in workers if w in cluster.memory_bytes), default=None
    )
    found: dict[int, _Cut] = {}
    for count in range(1, num_layers + 1) if stages is None else [stages]:
        # The programme gives a heavy stage more workers; a first plan deals out as many to each.
        tried = {
            cut_stages(single, count, shares, limit)
            for limit in (memory, None)
            for shares in (len(workers), count)
        }
        candidates = []
        for cuts in sorted(cuts for cuts in tried if cuts is not None):
            layout = Layout(cuts, microbatches, redundancy, schedule)
            plan = first_plan(layout, workers, generation, cluster)
            costs = costs_of(cuts)
            again = stages_to_recompute(plan, costs, cluster.memory_bytes, recompute)
            prediction = predict(plan, recomputed(costs, again), cluster)
            candidates.append(_Cut(plan, prediction, again))
        found[count] = min(candidates, key=lambda cut: cut.worth(cluster))
    best = min(found, key=lambda count: (found[count].worth(cluster), count))
    return StageCount(
        best,
        {stages: cut.plan for stages, cut in found.items()},
        {stages: cut.prediction for stages, cut in found.items()},
        {stages: cut.again for stages, cut in found.items()},
        _compared(found, best, schedule),
    )


@dataclass(frozen=True)
class _Cut:
    plan: Plan
    prediction: Prediction
    again: tuple[bool, ...]

    def worth(self, cluster: Cluster) -> tuple[int, int]:
        return excess_bytes(self.prediction, cluster), self.prediction.step_ticks


def _compared(found: dict[int, _Cut], best: int, schedule: Schedule) -> str:
    if len(found) == 1:
        said = f"{found[best].prediction.step_ticks / 1e6:.2f} ms in {schedule} order"
        return f"{best} stages cut before layers {found[best].plan.layout.cuts[1:-1]}: {said}"
    parts = []
    for stages, cut in found.items():
        said = f"{stages}: {cut.prediction.step_ticks / 1e6:.2f} ms"
        again = [s for s, does in enumerate(cut.again) if does]
        said += f" (stages {again} recompute activations)" if again else ""
        said += " (does not fit in memory)" if cut.prediction.over else ""
        parts.append(said)
    kind = "1 stage (pure data parallelism)" if best == 1 else f"{best} stages"
    over = found[best].prediction.over
    why = "nearest to fitting in memory" if over else "predicted fastest"
    compared = f"of a run's plans by number of stages, in {schedule} order"
    return f"{kind} {why} {compared}; {', '.join(parts)}"
