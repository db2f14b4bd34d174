"""How good the scheduler's plans and predictions are: against 1F1B, bounds, losses, and a real run.

The sizes of microbatches are those of real samples and clusters of the graphs. Step times of plans
come from the predictor; those of the real runs are measured.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dtrain.bench.losses import LossResult, measure_losses
from dtrain.bench.prediction import Job, RealRuns, job_config, real_runs, samplers
from dtrain.data.store import GraphStore
from dtrain.data.synth import SynthSpec, synthesize
from dtrain.data.writer import write_store
from dtrain.errors import DtrainError
from dtrain.planning import batch_source, block_sizes, costs_of_sizes, model_shapes
from dtrain.scheduler import Layout, Plan, StepCosts, even_cuts, make_plan
from dtrain.scheduler.costmodel import BlockSize, CostModel
from dtrain.scheduler.planner import first_plan
from dtrain.scheduler.predict import predict
from dtrain.scheduler.relayout import replan_or_relayout
from dtrain.scheduler.search import BASELINE, choose_plan, levelled

_FIT_STEPS = 20
_SCALE = ((640, 256), (1280, 512), (2560, 1024), (5120, 2048), (10240, 4096))
_SHAPES = ((2, 2, 8), (3, 3, 8), (3, 4, 16), (3, 16, 16))
"""Stages, workers and microbatches of the cases."""

Say = Callable[[str], None]


@dataclass
class Case:
    """One comparison: step times in milliseconds, as predicted."""

    graph: str
    sampler: str
    stages: int
    workers: int
    microbatches: int
    size_ratio: float
    plain_1f1b_ms: float
    chosen_ms: float
    staged_ms: float
    lower_bound_ms: float
    chosen: str


@dataclass
class Scale:
    """Seconds of a plan and milliseconds of a replan, of one core's time.

    ``plan_s``: a run's first plan; ``searched_s``: one for uneven costs, searched where it is
    small. ``replan_ms``: what a run does after a loss (``replan_or_relayout``) while no costs are
    known; ``measured_ms``: the same with those of uneven microbatches, after load was moved for
    them. The least of three losses each.
    """

    workers: int
    microbatches: int
    plan_s: float
    searched_s: float
    replan_ms: float
    measured_ms: float


@dataclass
class ScheduleResult:
    """What ``dtrain bench schedule`` reports; the worse of the graphs where there are several.

    ``step_time_error_median``: of all steps after the fit, of all runs of a graph.
    ``action_rank_correlation``: of actions' medians over the runs of a graph; with ``_single`` the
    worst of one run alone. See :class:`~dtrain.bench.prediction.RealRuns`.

    ``vs_1f1b_*``: chosen plan over plain 1F1B in arrival order; ``vs_1f1b_staged_geomean``: the
    same where each worker runs its own stage only. ``vs_lower_bound_geomean``: chosen plan over
    max(critical path, busiest worker). ``plan_10240_s``: the longer one of both plans;
    ``replan_10240_ms``: of both replans.
    ``plan_growth``, ``replan_growth``: the exponent ``p`` of the time ~ size**p over the five
    sizes, where ``n log n`` has 1.13.
    """

    step_time_error_median: float | None
    action_rank_correlation: float | None
    action_rank_correlation_single: float | None
    vs_1f1b_geomean: float
    vs_1f1b_max: float
    vs_1f1b_staged_geomean: float
    vs_lower_bound_geomean: float
    plan_10240_s: float
    replan_10240_ms: float
    plan_growth: float
    replan_growth: float
    losses: LossResult
    real: list[RealRuns] = field(default_factory=list)
    scale: list[Scale] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)


def bench_schedule(
    folder: Path,
    *,
    stores: Sequence[str],
    nodes: int,
    real: bool,
    steps: int,
    workers: int,
    repeats: int,
    say: Say,
) -> ScheduleResult:
    """Run the benchmark in ``folder``.

    ``stores``: graph stores to take microbatches of, besides a generated one of ``nodes`` nodes (0:
    none). ``real``: also train on each of them for ``steps`` steps with ``workers`` workers,
    ``repeats`` times.

    Raises:
        DtrainError: a store cannot be opened, there is none, or a job failed.
    """
    graphs = [(Path(url).name, url) for url in stores]
    if nodes:
        graphs.append((f"synthetic-{nodes}", _synthetic(folder, nodes, say)))
    if not graphs:
        raise DtrainError("--store, --nodes: expected at least one graph; name a store or nodes")
    models, runs = dict[str, CostModel](), list[RealRuns]()
    for name, url in graphs:
        models[name] = CostModel()
        if real:
            for sampler in samplers(url):
                say(
                    f"training {steps} steps on {name}, {sampler['name']} sampling, {repeats} times"
                )
                job = Job(name, url, sampler, steps, workers)
                runs.append(real_runs(folder, job, repeats, models[name]))
    cases = []
    for name, url in graphs:
        say(f"planning for microbatches of {name}")
        cases += list(_cases(name, url, models[name]))
    say("losing workers of a 4x4 grid")
    losses = measure_losses()
    say("planning for up to 10,240 workers")
    scale = [_scale(n, m) for n, m in _SCALE]
    ratios = [c.chosen_ms / c.plain_1f1b_ms for c in cases]
    return ScheduleResult(
        step_time_error_median=max((r.error for r in runs), default=None),
        action_rank_correlation=min((r.correlation for r in runs), default=None),
        action_rank_correlation_single=min((min(r.single) for r in runs), default=None),
        vs_1f1b_geomean=geomean(ratios),
        vs_1f1b_max=max(ratios),
        vs_1f1b_staged_geomean=geomean([c.staged_ms / c.plain_1f1b_ms for c in cases]),
        vs_lower_bound_geomean=geomean([c.chosen_ms / c.lower_bound_ms for c in cases]),
        plan_10240_s=max(scale[-1].plan_s, scale[-1].searched_s),
        replan_10240_ms=max(scale[-1].replan_ms, scale[-1].measured_ms),
        plan_growth=_growth([(s.workers, s.plan_s) for s in scale]),
        replan_growth=max(
            _growth([(s.workers, s.replan_ms) for s in scale]),
            _growth([(s.workers, s.measured_ms) for s in scale]),
        ),
        losses=losses,
        real=runs,
        scale=scale,
        cases=cases,
    )


def summary(result: ScheduleResult) -> Iterator[str]:
    """The results in lines for a person."""
    for run in result.real:
        yield (
            f"{run.graph}, {run.sampler}: predicted step time off by {run.error:.1%} (median of "
            f"{run.steps} steps of {len(run.errors)} runs), rank correlation of actions "
            f"{run.correlation:.3f}, of one run alone {min(run.single):.3f} or better"
        )
    worst = result.vs_1f1b_max
    yield f"chosen plan / plain 1F1B: {result.vs_1f1b_geomean:.3f}, at most {worst:.3f}"
    yield f"  with a stage a worker:  {result.vs_1f1b_staged_geomean:.3f}"
    yield f"chosen plan / lower bound: {result.vs_lower_bound_geomean:.3f}"
    losses = result.losses
    yield (
        f"throughput after losses / what it should be, over {losses.losses} losses: at least "
        f"{losses.even_worst:.3f} with even microbatches; with uneven ones {losses.worst:.3f} "
        f"({losses.below} below 0.95), and {losses.settled_worst:.3f} ten steps later"
    )
    yield f"ten steps after a worker is slowed threefold, step / best: {losses.straggler:.3f}"
    for row in result.scale:
        yield (
            f"{row.workers:6d} workers, {row.microbatches:4d} microbatches: "
            f"plan {row.plan_s:.3f} s, replan {row.replan_ms:.1f} ms, "
            f"with costs measured {row.measured_ms:.1f} ms"
        )


def geomean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(v) for v in values))


def _growth(points: Sequence[tuple[int, float]]) -> float:
    """The exponent ``p`` of time ~ size**p, from the smallest to the largest."""
    (n0, t0), (n1, t1) = points[0], points[-1]
    return math.log(t1 / t0) / math.log(n1 / n0)


def _synthetic(folder: Path, nodes: int, say: Say) -> str:
    store = folder / f"synthetic-{nodes}"
    if not (store / "meta.json").is_file():
        say(f"generating a graph of {nodes:,} nodes")
        spec = SynthSpec(nodes=nodes, avg_degree=15, classes=10, features=64, seed=0)
        write_store(str(store), synthesize(spec), partitions=128, partitioner="stream")
    return str(store)


def _cases(name: str, url: str, model: CostModel) -> Iterator[Case]:
    """Comparisons on sampled and on clustered microbatches of one graph."""
    store = GraphStore.open(url)
    for sampler in samplers(url):
        for stages, workers, microbatches in _SHAPES:
            config = job_config(url, sampler, stages, microbatches)
            source = batch_source(config, store)
            shapes = model_shapes(config, store)
            cuts = even_cuts(config.model.layers, stages)
            for step in range(2 if source.steps_per_epoch > 1 else 1):
                sizes = block_sizes(source, step, microbatches)
                costs = costs_of_sizes(config, model, "cpu", shapes, cuts, sizes)
                yield _case(
                    name, sampler["name"], workers, Layout(cuts, microbatches), costs, sizes
                )


def _case(
    graph: str,
    sampler: str,
    workers: int,
    layout: Layout,
    costs: StepCosts,
    sizes: Sequence[Sequence[BlockSize]],
) -> Case:
    members = range(workers)
    chosen = choose_plan(layout, members, 1, costs)
    staged = choose_plan(layout, members, 1, costs, staged=True)
    # What one gets without any costs, or with stages' workers by their costs: the better of both.
    plain = predict(make_plan(layout, members, 1), costs).step_ticks
    plain = min(plain, staged.compared[BASELINE])
    edges = [sum(block.nnz for block in of) for of in sizes]
    overhead = chosen.prediction.step_ticks - chosen.prediction.makespan
    return Case(
        graph,
        sampler,
        layout.num_stages,
        workers,
        layout.microbatches,
        round(max(edges) / max(1, min(edges)), 2),
        plain / 1e6,
        chosen.prediction.step_ticks / 1e6,
        staged.prediction.step_ticks / 1e6,
        (chosen.prediction.lower_bound + overhead) / 1e6,
        chosen.name,
    )


def _scale(workers: int, microbatches: int) -> Scale:
    """Plan, and replan after the loss of one worker, as a run does; and a plan for uneven costs."""
    layout = Layout(even_cuts(4, 4), microbatches)
    draw = random.Random(workers)
    sizes = [math.exp(draw.gauss(0.0, 0.5)) for _ in range(microbatches)]
    forward = tuple(round(1e6 * z) for z in sizes)
    costs = StepCosts((forward,) * 4, (tuple(2 * f for f in forward),) * 4)
    members = list(range(workers))
    first = first_plan(layout, members, 1)
    # As members know them that have only been told of them.
    plan, moved = (
        Plan.from_json(made.as_json(), layout, 1) for made in (first, levelled(first, costs))
    )
    rest = [[w for w in members if w != lost] for lost in (5, workers // 2, workers - 1)]

    def again(old: Plan, costs: StepCosts | None) -> list[Callable[[], Plan]]:
        return [partial(replan_or_relayout, old, left, 2, "", costs, search=True) for left in rest]

    return Scale(
        workers,
        microbatches,
        round(_least_s([lambda: first_plan(layout, members, 1)] * 3), 4),
        round(_least_s([lambda: choose_plan(layout, members, 1, costs).plan]), 3),
        round(1e3 * _least_s(again(plan, None)), 1),
        round(1e3 * _least_s(again(moved, costs)), 1),
    )


def _least_s(makers: Sequence[Callable[[], Plan]]) -> float:
    """The least processor time of making one of some plans, a worker's own order included."""
    taken = []
    for make in makers:
        began = time.process_time()
        _sort_own(make())
        taken.append(time.process_time() - began)
    return min(taken)


def _sort_own(plan: Plan) -> int:
    """What a member does with a plan: it looks at its own actions, which are sorted then."""
    return len(plan.actions[plan.workers[0]])
