"""A step as a transaction: actions, exact sum within each stage's holders, vote, apply.

The vote is one all-reduce over all workers, which each enters only when it holds its reduced
gradients. Whoever completes it knows that everybody does: from then on the step is committed.
A fault before that discards the step, which can be replayed because its microbatches are the same
whoever runs them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain.data.batches import BatchSource
from dtrain.runtime.comm import MAX, Communicator
from dtrain.runtime.compute import Rows, StageCompute
from dtrain.runtime.engine import StageEngine
from dtrain.runtime.exact_sum import exact_sum
from dtrain.runtime.inputs import MicrobatchInputs, Prefetcher
from dtrain.runtime.transport import KIND_ACTIVATION, KIND_GRADIENT, Key
from dtrain.scheduler import Action, Plan


@dataclass(frozen=True)
class Outcome:
    """What a committed step tells: the same on every worker but for ``step_time_s``.

    ``loss``: mean over the step's seeds; ``norm``: L2 norm of the exact gradient over all stages;
    ``stop``: some worker was told to leave.
    """

    step: int
    loss: float
    norm: float
    seeds: int
    stop: bool
    step_time_s: float


@dataclass
class _Work:
    """One step's handoffs and inputs on this worker."""

    step: int
    seeds: int
    inputs: dict[int, MicrobatchInputs] = field(default_factory=dict)
    uses_left: dict[int, int] = field(default_factory=dict)
    handoff: dict[Key, Rows] = field(default_factory=dict)


class StepTransaction:
    """Runs and commits the steps of one worker under one plan.

    ``parameter_stage``: every trainable parameter's name (in the model's order) -> its stage.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        comm: Communicator,
        engines: Mapping[int, StageEngine],
        computes: Mapping[int, StageCompute],
        source: BatchSource,
        prefetcher: Prefetcher,
        parameter_stage: Mapping[str, int],
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._comm = comm
        self._engines = engines
        self._computes = computes
        self._source = source
        self._prefetcher = prefetcher
        self._stage_of = parameter_stage
        self._position = {name: i for i, name in enumerate(parameter_stage)}

    def run(self, step: int, *, leaving: bool) -> Outcome:
        """Run and commit one step; ``leaving``: this worker asks all to stop after it.

        Raises:
            PeerLostError: the step is discarded here; nothing was applied.
            NonFiniteGradientError: a gradient holds NaN or infinity.
        """
        began = time.perf_counter()
        for compute in self._computes.values():
            compute.reset()
        self._run_actions(step)
        grads = {stage: self._reduce(stage) for stage in sorted(self._engines)}
        losses, norm, stop = self._vote(grads, leaving)
        for stage, engine in sorted(self._engines.items()):
            engine.apply(grads[stage], norm)
        seeds = self._source.step_seeds(step)
        return Outcome(step, losses, norm, seeds, stop, time.perf_counter() - began)

    def _run_actions(self, step: int) -> None:
        work = _Work(step, self._source.step_seeds(step))
        actions = [
            a
            for a in self._plan.actions[self._worker]
            if len(self._source.seeds(step, a.microbatch))
        ]
        for action in actions:
            left = work.uses_left.get(action.microbatch, 0)
            work.uses_left[action.microbatch] = left + 1
        for action in actions:
            if action.microbatch not in work.inputs:
                taken = self._prefetcher.take(step, action.microbatch)
                work.inputs[action.microbatch] = taken
            if action.kind == "F":
                self._forward(action, work)
            else:
                self._backward(action, work)
            work.uses_left[action.microbatch] -= 1
            if not work.uses_left[action.microbatch]:
                del work.inputs[action.microbatch]

    def _forward(self, action: Action, work: _Work) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = None
        if stage > 0:
            received = self._receive(Key(KIND_ACTIVATION, work.step, stage, microbatch), work)
        out = self._computes[stage].forward(
            work.step, microbatch, work.inputs[microbatch], received, work.seeds
        )
        if stage + 1 < self._plan.num_stages:
            self._send(Key(KIND_ACTIVATION, work.step, stage + 1, microbatch), out, work)

    def _backward(self, action: Action, work: _Work) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = None
        if stage + 1 < self._plan.num_stages:
            received = self._receive(Key(KIND_GRADIENT, work.step, stage, microbatch), work)
        out = self._computes[stage].backward(microbatch, received)
        if stage > 0:
            self._send(Key(KIND_GRADIENT, work.step, stage - 1, microbatch), out, work)

    def _send(self, key: Key, rows: Rows, work: _Work) -> None:
        to = self._plan.executors[key.stage][key.microbatch]
        if to == self._worker:
            work.handoff[key] = rows
        else:
            self._comm.transport.send(to, key, rows)

    def _receive(self, key: Key, work: _Work) -> Rows:
        if key in work.handoff:
            return work.handoff.pop(key)
        rows = self._comm.transport.receive(key, self._comm.timeout_s)
        device = self._engines[key.stage].device
        return tuple(t.to(device) for t in rows)

    def _reduce(self, stage: int) -> list[Tensor]:
        engine, group = self._engines[stage], self._comm.stage_groups[stage]
        if not engine.names:
            return []
        return exact_sum(
            self._computes[stage].grads,
            engine.parameters,
            engine.names,
            self._plan.layout.microbatches,
            lambda t: self._comm.all_reduce(t, MAX, group),
            lambda t: self._comm.all_reduce(t, group=group),
        )

    def _vote(
        self, grads: Mapping[int, Sequence[Tensor]], leaving: bool
    ) -> tuple[float, float, bool]:
        """Learn every microbatch's loss, every tensor's squared norm, and whether to stop.

        Each entry comes from one worker and zeros from the others, so the sum is exact.
        """
        microbatches = self._plan.layout.microbatches
        ballot = torch.zeros(microbatches + len(self._position) + 1, dtype=torch.float64)
        for microbatch, loss in self._last_losses().items():
            ballot[microbatch] = loss
        for stage, tensors in grads.items():
            if self._plan.holders[stage][0] == self._worker:
                for name, grad in zip(self._engines[stage].names, tensors, strict=True):
                    square = grad.double().square().sum()
                    ballot[microbatches + self._position[name]] = square
        ballot[-1] = float(leaving)
        values = self._comm.all_reduce(ballot).tolist()
        loss = math.fsum(values[:microbatches])
        norm = math.sqrt(math.fsum(values[microbatches:-1]))
        return loss, norm, values[-1] > 0

    def _last_losses(self) -> Mapping[int, float]:
        last = self._computes.get(self._plan.num_stages - 1)
        return last.losses if last is not None else {}
