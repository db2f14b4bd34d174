"""One computation of a step's microbatches on one worker: its actions, and what they made."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtrain.data.batches import BatchSource
from dtrain.faults.injector import Injector
from dtrain.runtime.comm import Communicator
from dtrain.runtime.compute import Rows, StageCompute
from dtrain.runtime.delays import Delays
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.inputs import MicrobatchInputs
from dtrain.runtime.recorder import ActionRecorder
from dtrain.runtime.transport import KIND_ACTIVATION, KIND_GRADIENT, Key, Transport
from dtrain.runtime.turns import CoreTurns
from dtrain.scheduler import Action, Plan
from dtrain.scheduler.costmodel import CostModel
from dtrain.scheduler.membership import Peer

_ROUND = 64
"""Added to the kind of a transfer for each further computation of the same step."""

Take = Callable[[int, int], MicrobatchInputs]
"""(step, microbatch) -> inputs."""


@dataclass(frozen=True)
class Links:
    """How a worker reaches the others, its supervisor and its faults.

    ``model``: what it learns from its actions' times, and ``delays`` from waiting for rows.
    """

    comm: Communicator
    transport: Transport
    peers: Mapping[int, Peer]
    heartbeat: Heartbeat
    injector: Injector
    recorder: ActionRecorder
    model: CostModel
    delays: Delays


@dataclass
class Attempt:
    """The actions of ``plan`` on ``worker`` for one step.

    ``number``: 0, and more for further computations of the step. ``digested``: the microbatches of
    which to take digests. ``turns``: those with the thread that samples ahead.

    Afterwards ``grads[stage][m]`` are the microbatches' gradients (as :class:`StageCompute` has
    them), ``losses[m]`` their losses on the last stage's executors, ``sums[action]`` a tensor each
    that is not finite where the action's rows are not, ``digests[action]`` those of the rows of
    digested ones, ``seconds[action]`` what it took, and ``work[stage, m]`` what forward and
    backward would take on a reference.
    """

    plan: Plan
    worker: int
    links: Links
    computes: Mapping[int, StageCompute]
    source: BatchSource
    step: int
    number: int = 0
    digested: Collection[int] = ()
    turns: CoreTurns = field(default_factory=lambda: CoreTurns(scarce=False))
    grads: dict[int, dict[int, list[Tensor | None]]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    sums: dict[Action, list[Tensor]] = field(default_factory=dict)
    digests: dict[Action, bytes] = field(default_factory=dict)
    seconds: dict[Action, float] = field(default_factory=dict)
    work: dict[tuple[int, int], float] = field(default_factory=dict)
    _inputs: dict[int, MicrobatchInputs] = field(default_factory=dict)
    _uses_left: dict[int, int] = field(default_factory=dict)
    _handoff: dict[Key, Rows] = field(default_factory=dict)

    def run(self, take: Take) -> None:
        """Run the actions.

        Raises:
            PeerLostError: a fault came meanwhile.
        """
        for compute in self.computes.values():
            compute.reset()
        seeds = self.source.step_seeds(self.step)
        actions = [
            a
            for a in self.plan.actions[self.worker]
            if len(self.source.seeds(self.step, a.microbatch))
        ]
        for action in actions:
            self._uses_left[action.microbatch] = self._uses_left.get(action.microbatch, 0) + 1
        with self.turns.computing():
            self._run_actions(actions, seeds, take)
        for stage, compute in self.computes.items():
            self.grads[stage] = dict(compute.grads)
            self.losses |= compute.losses
        self._reach_sum()

    def _run_actions(self, actions: Sequence[Action], seeds: int, take: Take) -> None:
        for action in actions:
            microbatch = action.microbatch
            if microbatch not in self._inputs:
                self._phase(f"sample microbatch {microbatch}")
                self.links.injector.reach("sample", self.step, microbatch=microbatch)
                self._inputs[microbatch] = take(self.step, microbatch)
            if action.kind == "F":
                self._forward(action, seeds)
            else:
                self._backward(action)
            self._uses_left[microbatch] -= 1
            if not self._uses_left[microbatch]:
                del self._inputs[microbatch]

    def _reach_sum(self) -> None:
        for stage in sorted(self.grads):
            for microbatch, grads in sorted(self.grads[stage].items()):
                tensors = [g for g in grads if g is not None]
                self.links.injector.reach(
                    "sum", self.step, stage=stage, microbatch=microbatch, tensors=tensors
                )

    def _phase(self, what: str, *, waiting: bool = False) -> None:
        again = f" (computation {self.number + 1})" if self.number else ""
        self.links.heartbeat.phase(what + again, self.step, waiting=waiting)

    def _forward(self, action: Action, seeds: int) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = None
        if stage > 0:
            key = self._key(KIND_ACTIVATION, stage, microbatch)
            received = self._receive(key, self.plan.executors[stage - 1][microbatch])
        self._phase(str(action))
        self.links.injector.reach("forward", self.step, stage=stage, microbatch=microbatch)
        began, cpu = time.perf_counter(), time.thread_time()
        out = self.computes[stage].forward(
            self.step, microbatch, self._inputs[microbatch], received, seeds
        )
        self.links.injector.after_action(time.perf_counter() - began)
        self._record(action, began, cpu)
        if stage + 1 < self.plan.num_stages:
            out = self._send(self._key(KIND_ACTIVATION, stage + 1, microbatch), out)
        self._note(action, out)

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        received = None
        if stage + 1 < self.plan.num_stages:
            key = self._key(KIND_GRADIENT, stage, microbatch)
            received = self._receive(key, self.plan.executors[stage + 1][microbatch])
        self._phase(str(action))
        self.links.injector.reach("backward", self.step, stage=stage, microbatch=microbatch)
        began, cpu = time.perf_counter(), time.thread_time()
        out = self.computes[stage].backward(microbatch, received)
        self.links.injector.after_action(time.perf_counter() - began)
        self._record(action, began, cpu)
        if stage > 0:
            out = self._send(self._key(KIND_GRADIENT, stage - 1, microbatch), out)
        self._note(action, out)

    def _record(self, action: Action, began: float, cpu: float) -> None:
        if self.number:
            return
        ended, spent = time.perf_counter(), time.thread_time() - cpu
        self.seconds[action] = ended - began
        compute, inputs = self.computes[action.stage], self._inputs[action.microbatch]
        self.work[action.stage, action.microbatch] = compute.work(inputs)
        compute.teach(self.links.model, action.kind, inputs, self.seconds[action])
        self.links.recorder.action(
            action, (began, ended), spent, inputs.blocks, compute.layer_seconds
        )

    def _key(self, kind: int, stage: int, microbatch: int) -> Key:
        return Key(kind + _ROUND * self.number, self.step, stage, microbatch)

    def _note(self, action: Action, rows: Rows) -> None:
        self.sums[action] = [t.sum() for t in rows if t.is_floating_point()]
        if action.microbatch in self.digested:
            self.digests[action] = digest(rows)

    def _send(self, key: Key, rows: Rows) -> Rows:
        """Send rows to who runs the next action; what was sent."""
        to = self.plan.executors[key.stage][key.microbatch]
        if to == self.worker:
            self._handoff[key] = rows
            return rows
        if self.links.injector.spoils:
            # What is spoilt on its way stays as it was where it came from.
            rows = tuple(t.clone() for t in rows)
        self.links.injector.reach(
            "send", self.step, stage=key.stage, microbatch=key.microbatch, tensors=list(rows)
        )
        self.links.transport.send(self.links.peers[to], key, rows)
        return rows

    def _receive(self, key: Key, source: int) -> Rows:
        if key in self._handoff:
            return self._handoff.pop(key)
        self._phase(f"receive stage {key.stage} microbatch {key.microbatch}", waiting=True)
        self.links.injector.reach("receive", self.step, stage=key.stage, microbatch=key.microbatch)
        there = self.links.transport.has(key)
        with contextlib.nullcontext() if there else self.turns.waiting():
            parcel = self.links.transport.receive_parcel(key, self.links.comm.timeout_s)
            passed_s = time.time() - parcel.sent_s
        rows = parcel.tensors
        if not there and not self.number:
            self.links.delays.observe(source, sum(t.nbytes for t in rows), passed_s)
        if self.links.injector.spoils:
            self.links.injector.reach(
                "receive",
                self.step,
                stage=key.stage,
                microbatch=key.microbatch,
                tensors=[t for t in rows if t.is_floating_point()],
            )
        device = self.computes[key.stage].device
        return tuple(t.to(device) for t in rows)


def digest(tensors: Sequence[Tensor]) -> bytes:
    """A digest of tensors' bytes (BLAKE2b, RFC 7693), for comparison only."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(flat.numpy().data)
    return found.digest()
