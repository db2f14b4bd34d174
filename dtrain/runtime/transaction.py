"""A step as a transaction: actions, exact sum within each stage's holders, vote, apply.

The vote is one all-reduce over all workers, which each enters only when it holds its reduced
gradients. Whoever completes it knows that everybody does: from then on the step is committed, and
whoever did not see it applies what it holds when the survivors settle. A fault before anybody saw
it discards the step, which is replayed: its microbatches are the same whoever runs them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain.data.batches import BatchSource
from dtrain.faults.injector import Injector
from dtrain.runtime.comm import MAX, Communicator
from dtrain.runtime.compute import Rows, StageCompute
from dtrain.runtime.engine import StageEngine
from dtrain.runtime.exact_sum import exact_sum
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.inputs import MicrobatchInputs, Prefetcher
from dtrain.runtime.transport import KIND_ACTIVATION, KIND_GRADIENT, Key, Transport
from dtrain.scheduler import Action, Plan
from dtrain.scheduler.membership import Peer


@dataclass(frozen=True)
class Wishes:
    """What a worker asks of all at the end of a step: to regroup, or to let it leave."""

    regroup: bool = False
    leave: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a committed step tells: the same on every worker but for ``step_time_s``.

    ``loss``: mean over the step's seeds; ``norm``: L2 norm of the exact gradient over all stages;
    ``regroup``: somebody waits to be let in; ``leaving``: how many workers ask to leave.
    """

    step: int
    loss: float
    norm: float
    seeds: int
    regroup: bool
    leaving: int
    step_time_s: float


@dataclass
class Pending:
    """A step whose reduced gradients this worker holds and has not applied.

    ``grads[stage]``: the exact sums. ``vote``: (loss, norm) once the full vote was seen.
    """

    step: int
    grads: dict[int, list[Tensor]]
    vote: tuple[float, float] | None = None


@dataclass
class _Work:
    """One step's handoffs and inputs on this worker."""

    step: int
    seeds: int
    inputs: dict[int, MicrobatchInputs] = field(default_factory=dict)
    uses_left: dict[int, int] = field(default_factory=dict)
    handoff: dict[Key, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class Links:
    """How a worker reaches the others, its supervisor and its faults."""

    comm: Communicator
    transport: Transport
    peers: Mapping[int, Peer]
    heartbeat: Heartbeat
    injector: Injector


class StepTransaction:
    """Runs and commits the steps of one worker under one plan.

    ``parameter_stage``: every trainable parameter's name (in the model's order) -> its stage.
    ``pending`` is the step under way as far as it must survive a fault.
    """

    def __init__(
        self,
        plan: Plan,
        worker: int,
        links: Links,
        engines: Mapping[int, StageEngine],
        computes: Mapping[int, StageCompute],
        source: BatchSource,
        parameter_stage: Mapping[str, int],
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._comm = links.comm
        self._links = links
        self._engines = engines
        self._computes = computes
        self._source = source
        self._position = {name: i for i, name in enumerate(parameter_stage)}
        self.pending: Pending | None = None

    def run(self, step: int, prefetcher: Prefetcher, wishes: Wishes) -> Outcome:
        """Run and commit one step.

        Raises:
            PeerLostError: this step is not committed here; ``pending`` says how far it came.
            NonFiniteGradientError: a gradient holds NaN or infinity.
        """
        began = time.perf_counter()
        reach = self._links.injector.reach
        for compute in self._computes.values():
            compute.reset()
        self._run_actions(step, prefetcher)
        self._phase("sum", step, waiting=True)
        grads = {stage: self._reduce(step, stage) for stage in sorted(self._engines)}
        self.pending = Pending(step, grads)
        self._phase("vote", step, waiting=True)
        reach("vote", step)
        loss, norm, regroup, leaving = self._vote(grads, wishes)
        self.pending.vote = (loss, norm)
        self._phase("apply", step)
        reach("apply", step)
        self.apply_pending(norm)
        seeds = self._source.step_seeds(step)
        return Outcome(step, loss, norm, seeds, regroup, leaving, time.perf_counter() - began)

    def apply_pending(self, norm: float) -> None:
        """Apply the pending step's gradients, whose norm over all stages is ``norm``."""
        assert self.pending is not None
        for stage, engine in sorted(self._engines.items()):
            engine.apply(self.pending.grads[stage], norm)
        self.pending = None

    def _phase(self, what: str, step: int, *, waiting: bool = False) -> None:
        self._links.heartbeat.phase(what, step, waiting=waiting)

    def _run_actions(self, step: int, prefetcher: Prefetcher) -> None:
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
                self._phase(f"sample microbatch {action.microbatch}", step)
                self._links.injector.reach("sample", step, microbatch=action.microbatch)
                taken = prefetcher.take(step, action.microbatch)
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
        self._phase(str(action), work.step)
        self._links.injector.reach("forward", work.step, stage=stage, microbatch=microbatch)
        began = time.perf_counter()
        out = self._computes[stage].forward(
            work.step, microbatch, work.inputs[microbatch], received, work.seeds
        )
        self._links.injector.after_action(time.perf_counter() - began)
        if stage + 1 < self._plan.num_stages:
            self._send(Key(KIND_ACTIVATION, work.step, stage + 1, microbatch), out, work)

    def _backward(self, action: Action, work: _Work) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = None
        if stage + 1 < self._plan.num_stages:
            received = self._receive(Key(KIND_GRADIENT, work.step, stage, microbatch), work)
        self._phase(str(action), work.step)
        self._links.injector.reach("backward", work.step, stage=stage, microbatch=microbatch)
        began = time.perf_counter()
        out = self._computes[stage].backward(microbatch, received)
        self._links.injector.after_action(time.perf_counter() - began)
        if stage > 0:
            self._send(Key(KIND_GRADIENT, work.step, stage - 1, microbatch), out, work)

    def _send(self, key: Key, rows: Rows, work: _Work) -> None:
        to = self._plan.executors[key.stage][key.microbatch]
        if to == self._worker:
            work.handoff[key] = rows
            return
        self._links.injector.reach(
            "send", work.step, stage=key.stage, microbatch=key.microbatch, tensors=list(rows)
        )
        self._links.transport.send(self._links.peers[to], key, rows)

    def _receive(self, key: Key, work: _Work) -> Rows:
        if key in work.handoff:
            return work.handoff.pop(key)
        self._phase(
            f"receive stage {key.stage} microbatch {key.microbatch}", key.step, waiting=True
        )
        self._links.injector.reach("receive", work.step, stage=key.stage, microbatch=key.microbatch)
        rows = self._links.transport.receive(key, self._comm.timeout_s)
        device = self._engines[key.stage].device
        return tuple(t.to(device) for t in rows)

    def _reduce(self, step: int, stage: int) -> list[Tensor]:
        engine, group = self._engines[stage], self._comm.stage_group(stage)
        grads = self._computes[stage].grads
        for microbatch in sorted(grads):
            tensors = [g for g in grads[microbatch] if g is not None]
            self._links.injector.reach(
                "sum", step, stage=stage, microbatch=microbatch, tensors=tensors
            )
        if not engine.names:
            return []
        return exact_sum(
            grads,
            engine.parameters,
            engine.names,
            self._plan.layout.microbatches,
            lambda t: self._comm.all_reduce(t, MAX, group),
            lambda t: self._comm.all_reduce(t, group=group),
        )

    def _vote(
        self, grads: Mapping[int, Sequence[Tensor]], wishes: Wishes
    ) -> tuple[float, float, bool, int]:
        """Learn every microbatch's loss, every tensor's squared norm, and all wishes.

        Each entry comes from one worker and zeros from the others, so the sum is exact.
        """
        microbatches = self._plan.layout.microbatches
        ballot = torch.zeros(microbatches + len(self._position) + 2, dtype=torch.float64)
        for microbatch, loss in self._last_losses().items():
            ballot[microbatch] = loss
        for stage, tensors in grads.items():
            if self._plan.holders[stage][0] == self._worker:
                for name, grad in zip(self._engines[stage].names, tensors, strict=True):
                    square = grad.double().square().sum()
                    ballot[microbatches + self._position[name]] = square
        ballot[-2] = float(wishes.regroup)
        ballot[-1] = float(wishes.leave)
        values = self._comm.all_reduce(ballot).tolist()
        loss = math.fsum(values[:microbatches])
        norm = math.sqrt(math.fsum(values[microbatches:-2]))
        return loss, norm, values[-2] > 0, round(values[-1])

    def _last_losses(self) -> Mapping[int, float]:
        last = self._computes.get(self._plan.num_stages - 1)
        return last.losses if last is not None else {}
