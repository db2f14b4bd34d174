"""``dtrain plan``: show what a plan looks like, what it is predicted to take, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.config import Config
    from dtrain.data.budget import Budget
    from dtrain.planview import Spans
    from dtrain.scheduler import Cluster, Layout, Plan, StepCosts
    from dtrain.scheduler.costmodel import CostModel
    from dtrain.scheduler.predict import Prediction


@dataclass
class Shown:
    """A plan with its prediction, and the pictures to draw: title -> spans."""

    plan: Plan
    prediction: Prediction
    why: str
    pictures: dict[str, Spans]
    compared_ms: dict[str, float]
    measured_ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Everything that is shown, times in milliseconds."""
        plan, found = self.plan, self.prediction
        return {
            "generation": plan.generation,
            "cuts": list(plan.layout.cuts),
            "workers": list(plan.workers),
            "holders": [list(held) for held in plan.holders],
            "executors": [list(runs) for runs in plan.executors],
            "actions": {
                str(w): [
                    {
                        "kind": s.action.kind,
                        "stage": s.action.stage,
                        "microbatch": s.action.microbatch,
                        "start_ms": s.start / 1e6,
                        "end_ms": s.end / 1e6,
                    }
                    for s in spans
                ]
                for w, spans in found.spans.items()
            },
            "predicted_step_ms": found.step_ticks / 1e6,
            "makespan_ms": found.makespan / 1e6,
            "critical_path_ms": found.critical_path / 1e6,
            "busy_ms": {str(w): ticks / 1e6 for w, ticks in found.busy.items()},
            "bubble": found.bubble,
            "memory_bytes": {str(w): size for w, size in found.memory_bytes.items()},
            "over_memory": list(found.over),
            "compared_ms": self.compared_ms,
            "measured_step_ms": self.measured_ms,
            "reason": self.why,
        }


def plan_command(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A run's configuration.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="workers to plan for")] = 4,
    fail: Annotated[str, typer.Option(metavar="W,...", help="workers lost after that")] = "",
    slow: Annotated[
        str, typer.Option(metavar="W=F,...", help="workers that take F times as long")
    ] = "",
    stages: Annotated[
        str | None, typer.Option(help="stages instead of the configuration's, or auto")
    ] = None,
    memory_mib: Annotated[
        int | None, typer.Option(min=1, help="memory of each worker for states and activations")
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="workers on a node: a failure domain")
    ] = None,
    gbit_s: Annotated[float | None, typer.Option(help="bandwidth between workers")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="step whose microbatches are planned for")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="the best plan found for these costs, at once")
    ] = False,
    learn: Annotated[
        Path | None, typer.Option(help="run folder whose recorded actions the costs are fitted to")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="show a recorded step of this run, and its prediction")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value; may be repeated")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="draw to this SVG file")] = None,
    png: Annotated[Path | None, typer.Option(help="draw to this PNG file")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the plan that a run makes: who does what when, who holds what, how long, and why."""
    if (config is None) == (run is None):
        raise DtrainError("plan: expected CONFIG or --run, one of them; see dtrain plan --help")
    if run is not None:
        shown = _recorded(run, step)
    else:
        assert config is not None
        from dtrain.config import load_config

        changes = list(overrides or [])
        if stages is not None:
            changes.append(f"parallel.stages={stages}")
        loaded = load_config(config, changes)
        members = list(range(workers))
        memory_mib = memory_mib or loaded.parallel.memory_mib
        parallel = loaded.parallel.model_copy(update={"memory_mib": memory_mib})
        loaded = loaded.model_copy(update={"parallel": parallel})
        cluster = _cluster(members, _pairs(slow, workers), memory_mib, per_node, gbit_s)
        lost = _numbers("--fail", fail, workers)
        shown = _planned(loaded, members, lost, cluster, step or 0, learn, search)
    _write(shown, svg, png, trace)
    if as_json:
        typer.echo(json.dumps(shown.as_json()))
    else:
        _print(shown)


def _numbers(option: str, text: str, workers: int) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if any(not part.isdigit() or int(part) >= workers for part in parts):
        raise DtrainError(f"{option}: expected workers 0 to {workers - 1}, got {text!r}")
    found = sorted({int(part) for part in parts})
    if len(found) == workers:
        raise DtrainError(f"{option}: expected at least one worker to stay, got all {workers}")
    return found


def _pairs(text: str, workers: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for part in (p for p in text.split(",") if p.strip()):
        name, _, factor = part.partition("=")
        try:
            worker, value = int(name), float(factor)
        except ValueError:
            worker, value = -1, 0.0
        if not 0 <= worker < workers or not 0 < value < 1e6:
            raise DtrainError(
                f"--slow: expected WORKER=FACTOR with a worker of 0 to {workers - 1} and a factor "
                f"above 0, got {part!r}"
            )
        found[worker] = value
    return found


def _cluster(
    members: Sequence[int],
    slowness: Mapping[int, float],
    memory_mib: int | None,
    per_node: int | None,
    gbit_s: float | None,
) -> Cluster:
    from dtrain.scheduler import Cluster

    return Cluster(
        slowness=slowness,
        domains={w: ("rack", f"node{w // per_node}") for w in members} if per_node else {},
        memory_bytes=dict.fromkeys(members, memory_mib << 20) if memory_mib else {},
        bandwidth_bytes_s=gbit_s * 1e9 / 8 if gbit_s else None,
    )


def _planned(
    config: Config,
    members: Sequence[int],
    lost: Sequence[int],
    cluster: Cluster,
    step: int,
    learn: Path | None,
    search: bool,
) -> Shown:
    from dtrain.data.store import GraphStore
    from dtrain.planning import (
        batch_source,
        block_sizes,
        costs_of_sizes,
        find_stages,
        fixed_cuts,
        layout_of,
        model_shapes,
        total_steps,
        within_memory,
    )
    from dtrain.scheduler.costmodel import CostModel

    store = GraphStore.open(config.data.store, config.data.cache_dir)
    config, budget = within_memory(config, store)
    parallel = config.parallel
    source = batch_source(config, store)
    sizes = block_sizes(source, step, parallel.microbatches)
    shapes = model_shapes(config, store)
    model, device, origin = CostModel(), "cpu", "recorded defaults for a CPU"
    if learn is not None:
        model, device = _learned(learn)
        origin = f"the recorded actions of {learn}"
        cluster = _with_links(cluster, model)
    said = [f"costs from {origin}"]
    cuts = fixed_cuts(config)
    if cuts is None:
        found = find_stages(config, model, device, shapes, sizes, members, cluster)
        cuts = found.plan.layout.cuts
        said.append(found.reason)
    layout = layout_of(config, cuts)
    costs = costs_of_sizes(config, model, device, shapes, layout.cuts, sizes)
    if search:
        shown = _searched(layout, members, lost, costs, cluster)
    else:
        steps = total_steps(config, source)
        shown = _as_run(config, budget, layout, members, lost, costs, cluster, steps)
    shown.why = "; ".join([shown.why, *said])
    return shown


def _with_links(cluster: Cluster, model: CostModel) -> Cluster:
    """The cluster with links as they were measured; ``--gbit-s`` stays for those between nodes."""
    bandwidth, latency_s = model.link
    return replace(
        cluster,
        bandwidth_bytes_s=cluster.bandwidth_bytes_s or bandwidth,
        local_bandwidth_bytes_s=bandwidth,
        latency_s=latency_s,
    )


def _as_run(
    config: Config,
    budget: Budget,
    layout: Layout,
    members: Sequence[int],
    lost: Sequence[int],
    costs: StepCosts,
    cluster: Cluster,
    steps: int,
) -> Shown:
    """What a run of ``steps`` steps does, with the same functions: it begins, moves load, goes over
    to a better plan, and goes on after losses."""
    from dtrain.planning import balance_policy, known_cluster, moves_ahead
    from dtrain.scheduler import Cluster
    from dtrain.scheduler.planner import first_plan
    from dtrain.scheduler.predict import predict
    from dtrain.scheduler.recompute import recomputed, stages_to_recompute
    from dtrain.scheduler.relayout import replan_or_relayout

    def again(plan: Plan) -> tuple[bool, ...]:
        return stages_to_recompute(plan, costs, cluster.memory_bytes, config.parallel.recompute)

    def charged(plan: Plan) -> StepCosts:
        """The costs with what the plan has to compute again."""
        return recomputed(costs, again(plan))

    measured, slowness = None, dict[int, float]()
    plan = first_plan(layout, members, 1, Cluster(domains=cluster.domains))
    said = [plan.reason]
    expected = before = predict(plan, charged(plan), cluster)
    pictures: dict[str, Spans] = {"predicted": expected.spans}
    for when, move in moves_ahead(config, budget, plan, charged, cluster, steps):
        said.append(f"after {when} steps {move.reason}")
        plan, measured, slowness = move.plan, move.costs, dict(move.slowness)
        expected = predict(plan, charged(plan), cluster)
        pictures = {"begun": before.spans, f"after {when} steps": expected.spans}
    before = expected
    if lost:
        policy = balance_policy(config)
        left = [w for w in members if w not in lost]
        search = policy is not None and policy.search
        known = known_cluster(config, budget, layout.cuts, left, cluster.domains)
        known = replace(known, slowness=slowness)
        plan = replan_or_relayout(
            plan, left, plan.generation + 1, "", measured, known, search=search
        )
        expected = predict(plan, charged(plan), cluster)
        said += [plan.reason, _share(before, expected, members)]
        pictures = {"before": before.spans, "after the loss": expected.spans}
    stages = [s for s, does in enumerate(again(plan)) if does]
    if stages:
        said.append(f"stages {stages} recompute activations, which memory has no room for")
    if expected.over:
        said.append(f"does not fit in the memory of workers {list(expected.over)}")
    return Shown(plan, expected, "; ".join(said), pictures, {})


def _share(before: Prediction, after: Prediction, members: Sequence[int]) -> str:
    share = before.step_ticks / after.step_ticks
    return f"{share:.1%} of the throughput with all {len(members)} workers"


def _searched(
    layout: Layout, members: Sequence[int], lost: Sequence[int], costs: StepCosts, cluster: Cluster
) -> Shown:
    """The best plan that a search finds for these very costs."""
    from dtrain.scheduler.search import choose_plan, choose_replan

    choice = choose_plan(layout, members, 1, costs, cluster)
    said = ["searched at once; a run goes over to it when costs are measured, if that pays"]
    pictures: dict[str, Spans] = {"predicted": choice.prediction.spans}
    if lost:
        before = choice.prediction
        left = [w for w in members if w not in lost]
        choice = choose_replan(choice.plan, left, 2, "", costs, cluster)
        said.append(_share(before, choice.prediction, members))
        pictures = {"before": before.spans, "after the loss": choice.prediction.spans}
    compared = {name: ticks / 1e6 for name, ticks in choice.compared.items()}
    why = "; ".join([choice.plan.reason.removeprefix("; "), *said])
    return Shown(choice.plan, choice.prediction, why, pictures, compared)


def _learned(run: Path) -> tuple[CostModel, str]:
    from dtrain.recorded import RecordedRun
    from dtrain.scheduler.costmodel import CostModel

    recorded = RecordedRun(str(run))
    model = CostModel()
    recorded.teach(model, recorded.steps)
    return model, recorded.device


def _recorded(run: Path, step: int | None) -> Shown:
    """A step as it was measured, and as a model fitted to the other steps predicts it."""
    from dtrain.recorded import RecordedRun
    from dtrain.scheduler.costmodel import CostModel

    recorded = RecordedRun(str(run))
    steps = recorded.steps
    if step is None and steps:
        step = sorted(steps, key=recorded.measured_s)[len(steps) // 2]
    others = [t for t in steps if t != step]
    if step not in steps or not others:
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise DtrainError(f"--step: expected a recorded step of two at least ({known}), got {step}")
    model = CostModel()
    recorded.teach(model, others)
    expected = recorded.prediction(step, model)
    measured_s = recorded.measured_s(step)
    pictures: dict[str, Spans] = {"predicted": expected.spans, "measured": recorded.spans(step)}
    off = expected.step_ticks / 1e9 / measured_s - 1
    why = f"step {step} of {run}: predicted {off:+.1%} of what was measured"
    return Shown(recorded.plan(step), expected, why, pictures, {}, 1e3 * measured_s)


def _write(shown: Shown, svg: Path | None, png: Path | None, trace: Path | None) -> None:
    from dtrain.planview import chrome_trace, save_figure

    for target, suffix in ((svg, ".svg"), (png, ".png")):
        if target is not None:
            if target.suffix != suffix:
                raise DtrainError(
                    f"--{suffix[1:]}: expected a name that ends in {suffix}, got {target}"
                )
            save_figure(shown.pictures, target, shown.plan.describe())
    if trace is not None:
        try:
            trace.write_text(json.dumps(chrome_trace(shown.pictures)))
        except OSError as error:
            raise DtrainError(f"--trace {trace}: cannot be written ({error.strerror})") from error


def _print(shown: Shown) -> None:
    from rich.console import Console
    from rich.table import Table

    from dtrain.planview import end_of, grid, legend

    console = Console()
    plan, found = shown.plan, shown.prediction
    last = end_of(*shown.pictures.values())
    for title, spans in shown.pictures.items():
        console.print(f"{title} (0 to {last / 1e6:.2f} ms)", highlight=False)
        for line in grid(spans, console.width, last):
            console.print(line, no_wrap=True, overflow="crop")
    console.print(legend(plan.num_stages))
    table = Table("stage", "layers", "holders", "executes")
    for s, held in enumerate(plan.holders):
        layers = plan.layout.layers_of(s)
        runs = ", ".join(f"{w}: {n}" for w in held if (n := plan.executors[s].count(w)))
        table.add_row(str(s), f"{layers.start}-{layers.stop - 1}", ", ".join(map(str, held)), runs)
    console.print(table)
    table = Table("worker", "busy ms", "memory MiB")
    for w in plan.workers:
        mark = " (too much)" if w in found.over else ""
        size = f"{found.memory_bytes[w] / 2**20:.1f}{mark}"
        table.add_row(str(w), f"{found.busy[w] / 1e6:.2f}", size)
    console.print(table)
    bound = found.lower_bound / 1e6
    console.print(
        f"predicted step {found.step_ticks / 1e6:.2f} ms: actions {found.makespan / 1e6:.2f} ms "
        f"(at least {bound:.2f}), {found.bubble:.0%} of the workers' time waiting",
        highlight=False,
    )
    if shown.measured_ms is not None:
        console.print(f"measured step {shown.measured_ms:.2f} ms", highlight=False)
    console.print(shown.why, highlight=False, markup=False)
