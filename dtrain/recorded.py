"""Steps of a run as they were recorded, beside what the cost model says of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dtrain.config import Config, load_config
from dtrain.data.store import GraphStore
from dtrain.errors import DtrainError
from dtrain.planning import costs_of_sizes, layout_of, model_shapes
from dtrain.runfolder import RunFolder
from dtrain.runtime.recorder import StepRecord, step_record, teach
from dtrain.scheduler import Action, Layout, Plan, StepCosts
from dtrain.scheduler.costmodel import BlockSize, CostModel, LayerShape, sent_bytes
from dtrain.scheduler.costs import TICKS_PER_S, Cluster
from dtrain.scheduler.predict import Prediction, Span, predict

_WARM_UP = 2
"""The first steps of a run compile and touch memory for the first time."""
_ALIKE = 5
"""Steps that tell what a step takes besides its actions."""


@dataclass(frozen=True)
class ActionTimes:
    """An action's seconds: predicted, measured by the clock, and computed by its thread."""

    action: Action
    predicted_s: float
    measured_s: float
    cpu_s: float


@dataclass(frozen=True)
class Compared:
    """One step, predicted and measured, and each of its actions."""

    step: int
    predicted_s: float
    measured_s: float
    actions: list[ActionTimes]

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


class RecordedRun:
    """A run folder's recorded steps that all workers committed in one generation."""

    def __init__(self, path: str) -> None:
        """Read what was recorded.

        Raises:
            DtrainError: nothing was recorded there, or the run's graph is gone.
        """
        self.folder = RunFolder(path)
        raw = self.folder.action_records()
        if not raw:
            raise DtrainError(
                f"--run {path}: no recorded actions; run with --set parallel.record_actions=true"
            )
        self.config: Config = load_config(str(self.folder.path / "config.yaml"))
        self._by_step: dict[int, dict[int, StepRecord]] = {}
        for worker, records in raw.items():
            for entry in records:
                done = step_record(entry)
                self._by_step.setdefault(done.step, {})[worker] = done
        self._members = {
            event["generation"]: event
            for event in self.folder.events()
            if event["kind"] == "generation_started"
        }
        record = self.folder.read_run()
        self.device = record.device if record is not None else "cpu"

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The shapes of the model's layers."""
        store = GraphStore.open(self.config.data.store, self.config.data.cache_dir)
        return model_shapes(self.config, store)

    @cached_property
    def layout(self) -> Layout:
        """The run's layout."""
        newest = self._members[max(self._members)]
        return layout_of(self.config, tuple(newest["cuts"]))

    @cached_property
    def steps(self) -> list[int]:
        """Steps of which every member's record is there, the first few left out."""
        whole = []
        for step, records in sorted(self._by_step.items()):
            generations = {record.generation for record in records.values()}
            members = self._members.get(min(generations), {}).get("workers")
            if len(generations) == 1 and members == sorted(records):
                whole.append(step)
        return whole[_WARM_UP:]

    def records(self, step: int) -> dict[int, StepRecord]:
        """Each worker's record of a step."""
        return self._by_step[step]

    def measured_s(self, step: int) -> float:
        """From the first worker's begin of a step to the last one's end."""
        records = self.records(step).values()
        return max(r.end_s for r in records) - min(r.start_s for r in records)

    def spans(self, step: int) -> dict[int, list[Span]]:
        """The actions as they were run, in nanoseconds from the step's beginning."""
        records = self.records(step)
        zero = min(r.start_s for r in records.values())
        return {
            w: [
                Span(
                    Action(a.kind, a.stage, a.microbatch),  # type: ignore[arg-type]
                    round((a.start_s - zero) * TICKS_PER_S),
                    round((a.end_s - zero) * TICKS_PER_S),
                )
                for a in record.actions
            ]
            for w, record in sorted(records.items())
        }

    def sizes(self, step: int) -> list[list[BlockSize]]:
        """Sizes of the blocks, ``[microbatch][layer]``; a microbatch without seeds has none."""
        nothing = BlockSize(0, 0, 0)
        found = [[nothing] * len(self.shapes) for _ in range(self.layout.microbatches)]
        for record in self.records(step).values():
            for action in record.actions:
                for layer in action.layers:
                    size = BlockSize(layer.nnz, layer.num_src, layer.num_dst)
                    found[action.microbatch][layer.layer] = size
        return found

    def plan(self, step: int) -> Plan:
        """The plan that the step was run by, in the order in which it was run."""
        records = self.records(step)
        number = next(iter(records.values())).generation
        event = self._members[number]
        workers = tuple(event["workers"])
        orders = {w: tuple(span.action for span in spans) for w, spans in self.spans(step).items()}
        executors = [list(row) for row in event["executors"]]
        for w, order in orders.items():
            for action in order:
                executors[action.stage][action.microbatch] = w
        return Plan(
            number,
            self.layout,
            workers,
            tuple(tuple(held) for held in event["holders"]),
            tuple(tuple(row) for row in executors),
            orders,
            event["reason"],
        )

    def sum_s(self, step: int) -> float:
        """Sum, vote and update, from when the last worker came to it."""
        phases = [record.phases for record in self.records(step).values()]
        return max(p["apply"][1] for p in phases) - max(p["sum"][0] for p in phases)

    def costs(self, step: int, model: CostModel) -> StepCosts:
        """What ``model`` says that the step costs."""
        sizes = self.sizes(step)
        return costs_of_sizes(self.config, model, self.device, self.shapes, self.layout.cuts, sizes)

    def teach(self, model: CostModel, steps: Sequence[int]) -> None:
        """Let a cost model learn from some steps."""
        for step in steps:
            teach(model, self.device, self.shapes, self.records(step).values())
            plan = self.plan(step)
            held = max((plan.stages_held(w) for w in plan.workers), key=len)
            layers = [i for s in held for i in self.layout.layers_of(s)]
            count = sum(self.shapes[i].parameters for i in layers)
            model.observe_sum(4 * count, len(held), self.sum_s(step))
            for num_bytes, seconds in self._waits(step):
                model.observe_transfer(num_bytes, seconds)
        for step in self._alike(steps):
            costs = self.costs(step, model)
            found = predict(self.plan(step), costs, links(model))
            known_s = (found.step_ticks - costs.fixed_ticks) / TICKS_PER_S
            model.observe_step(known_s, self.measured_s(step))

    def _waits(self, step: int) -> list[tuple[int, float]]:
        """Bytes of rows that a worker waited for, doing nothing, and seconds from when they were
        computed until it went on with them."""
        spans, sizes, found = self.spans(step), self.sizes(step), []
        ends = {span.action: (w, span.end) for w, own in spans.items() for span in own}
        for w, own in spans.items():
            free = 0
            for span in own:
                kind, stage, m = span.action
                # Activations come from the stage below, gradients from the one above.
                lower = stage - 1 if kind == "F" else stage
                sender, sent = ends.get(
                    Action(kind, stage - 1 if kind == "F" else stage + 1, m), (w, 0)
                )
                if sender != w and free <= sent:
                    last = self.layout.layers_of(lower)[-1]
                    num_bytes = sent_bytes(self.shapes[last], sizes[m][last])
                    found.append((num_bytes, (span.start - sent) / TICKS_PER_S))
                free = span.end
        return found

    def _alike(self, steps: Sequence[int]) -> list[int]:
        """Those executed by the same workers as the last one, all if these are too few.

        What a step takes besides its actions depends on what its workers send each other.
        """
        executors = {step: self.plan(step).executors for step in steps}
        alike = [step for step in steps if executors[step] == executors[steps[-1]]]
        return alike if len(alike) >= _ALIKE else list(steps)

    def prediction(self, step: int, model: CostModel) -> Prediction:
        """The step as ``model`` expects it."""
        return predict(self.plan(step), self.costs(step, model), links(model))

    def compare(self, step: int, model: CostModel) -> Compared:
        """A step's predicted and measured times."""
        expected, found = self.prediction(step, model), list[ActionTimes]()
        for w, spans in self.spans(step).items():
            records = self.records(step)[w].actions
            for said, was, record in zip(expected.spans[w], spans, records, strict=True):
                predicted_s, measured_s = (
                    (span.end - span.start) / TICKS_PER_S for span in (said, was)
                )
                found.append(ActionTimes(was.action, predicted_s, measured_s, record.cpu_s))
        return Compared(step, expected.step_ticks / TICKS_PER_S, self.measured_s(step), found)


def links(model: CostModel) -> Cluster:
    """Workers with links between them as ``model`` has learnt that they are within a node."""
    bandwidth, latency_s = model.link
    return Cluster(bandwidth_bytes_s=bandwidth, latency_s=latency_s)


def medians(runs: Sequence[Sequence[Compared]]) -> list[ActionTimes]:
    """The actions of steps that all of some runs of one job have, with medians of their times.

    Microbatches are the same in each, so that an action has the same work, whoever executes it.
    """
    times: dict[tuple[int, Action], list[ActionTimes]] = {}
    for run in runs:
        for compared in run:
            for found in compared.actions:
                times.setdefault((compared.step, found.action), []).append(found)
    return [
        ActionTimes(
            action,
            statistics.median(t.predicted_s for t in found),
            statistics.median(t.measured_s for t in found),
            statistics.median(t.cpu_s for t in found),
        )
        for (_, action), found in times.items()
        if len(found) == len(runs)
    ]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    x, y = _ranks(a), _ranks(b)
    if len(x) < 2 or len(set(x)) == 1 or len(set(y)) == 1:
        return 0.0
    return statistics.correlation(x, y)


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end < len(order) and values[order[end]] == values[order[at]]:
            end += 1
        for i in order[at:end]:
            ranks[i] = (at + end - 1) / 2
        at = end
    return ranks
