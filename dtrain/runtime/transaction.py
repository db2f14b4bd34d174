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
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from dtrain.data.batches import BatchSource
from dtrain.runtime.attempt import Attempt, Links
from dtrain.runtime.audit import Auditor
from dtrain.runtime.comm import MAX
from dtrain.runtime.compute import StageCompute
from dtrain.runtime.engine import StageEngine
from dtrain.runtime.exact_sum import NonFiniteGradientError, exact_sum
from dtrain.runtime.inputs import Prefetcher
from dtrain.scheduler import Action, Plan
from dtrain.scheduler.balance import StepTimes

_ASKED = 6
"""Entries of a ballot for what its worker says of the step and asks of all."""


@dataclass(frozen=True)
class Wishes:
    """What a worker asks of all at the end of a step: to regroup, to let it leave, or to save.

    ``save``: a durable checkpoint; ``snapshot``: in peer memory.
    """

    regroup: bool = False
    leave: bool = False
    save: bool = False
    snapshot: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a committed step tells: the same on every worker but for ``step_time_s``.

    ``loss``: mean over the step's seeds; ``norm``: L2 norm of the exact gradient over all stages;
    ``regroup``: somebody waits to be let in; ``leaving``: how many workers ask to leave; ``save``,
    ``snapshot``: somebody asks for one; ``skipped``: the gradient was not finite, and the weights
    stay as they were. ``mean_s``: seconds that the workers took to come to the vote, in the mean;
    ``times``: what every action took on its executor.
    """

    step: int
    loss: float
    norm: float
    seeds: int
    regroup: bool
    leaving: int
    save: bool
    snapshot: bool
    mean_s: float
    step_time_s: float
    skipped: bool
    times: StepTimes


@dataclass(frozen=True)
class _Ballot:
    loss: float
    norm: float
    bad: bool
    regroup: bool
    leaving: int
    save: bool
    snapshot: bool
    mean_s: float
    times: StepTimes


@dataclass
class Pending:
    """A step whose reduced gradients this worker holds and has not applied.

    ``grads[stage]``: the exact sums. ``vote``: (loss, norm) once the full vote was seen.
    """

    step: int
    grads: dict[int, list[Tensor]]
    vote: tuple[float, float] | None = None


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
        auditor: Auditor,
        *,
        skip_bad: bool,
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._comm = links.comm
        self._links = links
        self._engines = engines
        self._computes = computes
        self._source = source
        self._position = {name: i for i, name in enumerate(parameter_stage)}
        self._auditor = auditor
        self._skip_bad = skip_bad
        self.pending: Pending | None = None
        # Stages that the same workers hold are summed together: each sum makes all wait for all.
        together: dict[tuple[int, ...], list[int]] = {}
        for stage in sorted(engines):
            together.setdefault(plan.holders[stage], []).append(stage)
        self._summed_together = list(together.values())

    def run(self, step: int, prefetcher: Prefetcher, wishes: Wishes) -> Outcome:
        """Run and commit one step.

        Raises:
            PeerLostError: this step is not committed here; ``pending`` says how far it came.
            NonFiniteGradientError: a gradient holds NaN or infinity, whoever computes it, and
                ``robust.on_bad_gradient`` is ``stop``. FaultyHardwareError: this worker computes
                wrong. CannotGoOnError: somebody does, and it cannot be told who.
        """
        began = time.perf_counter()
        reach, recorder = self._links.injector.reach, self._links.recorder
        recorder.begin(step, self._plan.generation)
        attempt = Attempt(
            self._plan,
            self._worker,
            self._links,
            self._computes,
            self._source,
            step,
            digested=self._auditor.sample(step),
            turns=prefetcher.turns,
        )
        attempt.run(prefetcher.take)
        self._auditor.check_sample(attempt)
        at = time.perf_counter()
        self._phase("sum", step, waiting=True)
        grads: dict[int, list[Tensor]] = {}
        bad = False
        for stages in self._summed_together:
            summed = self._reduce(stages, attempt)
            bad = bad or summed is None
            grads |= summed or {}
        if not bad:
            self.pending = Pending(step, grads)
        at = recorder.phase("sum", at)
        self._phase("vote", step, waiting=True)
        reach("vote", step)
        ballot = self._vote(grads, attempt, wishes, began, bad=bad)
        if ballot.bad:
            self.pending = None
            self._bad_gradient(attempt)
        else:
            assert self.pending is not None
            self.pending.vote = (ballot.loss, ballot.norm)
            at = recorder.phase("vote", at)
            self._phase("apply", step)
            reach("apply", step)
            self.apply_pending(ballot.norm)
            recorder.phase("apply", at)
            recorder.commit()
        seeds, took = self._source.step_seeds(step), time.perf_counter() - began
        return Outcome(
            step,
            ballot.loss,
            ballot.norm,
            seeds,
            ballot.regroup,
            ballot.leaving,
            ballot.save,
            ballot.snapshot,
            ballot.mean_s,
            took,
            ballot.bad,
            ballot.times,
        )

    def _bad_gradient(self, attempt: Attempt) -> None:
        """Find out why; return if the step is to be skipped."""
        why = self._auditor.explain_bad_gradient(attempt)
        if not self._skip_bad:
            raise NonFiniteGradientError(
                f"{why}; lower the learning rate, check the features, or set "
                "robust.on_bad_gradient=skip to leave such steps out"
            )

    def apply_pending(self, norm: float) -> None:
        """Apply the pending step's gradients, whose norm over all stages is ``norm``."""
        assert self.pending is not None
        for stage, engine in sorted(self._engines.items()):
            engine.apply(self.pending.grads[stage], norm)
        self.pending = None

    def _phase(self, what: str, step: int, *, waiting: bool = False) -> None:
        self._links.heartbeat.phase(what, step, waiting=waiting)

    def _reduce(self, stages: Sequence[int], attempt: Attempt) -> dict[int, list[Tensor]] | None:
        """The exact sums of the gradients of some stages that the same workers hold.

        None where one is not finite, on all holders.
        """
        engines = [self._engines[stage] for stage in stages]
        names = [name for engine in engines for name in engine.names]
        if not names:
            return {stage: [] for stage in stages}
        group = self._comm.stage_group(stages[0])
        sizes = [len(engine.names) for engine in engines]
        computed = {m for stage in stages for m in attempt.grads[stage]}
        grads: dict[int, list[Tensor | None]] = {
            m: [
                grad
                for stage, size in zip(stages, sizes, strict=True)
                for grad in attempt.grads[stage].get(m, [None] * size)
            ]
            for m in computed
        }

        def gather(rows: Tensor) -> list[Tensor]:
            return self._comm.gather(rows, group)

        try:
            summed = exact_sum(
                grads,
                [parameter for engine in engines for parameter in engine.parameters],
                names,
                self._plan.layout.microbatches,
                lambda t: self._comm.all_reduce(t, MAX, group),
                lambda t: self._comm.all_reduce(t, group=group),
                gather if self._comm.gathers(group, engines[0].device) else None,
            )
        except NonFiniteGradientError:
            return None
        each = iter(summed)
        return {stage: list(islice(each, size)) for stage, size in zip(stages, sizes, strict=True)}

    def _vote(
        self,
        grads: Mapping[int, Sequence[Tensor]],
        attempt: Attempt,
        wishes: Wishes,
        began: float,
        *,
        bad: bool,
    ) -> _Ballot:
        """Learn every microbatch's loss, every tensor's squared norm, all wishes and all times.

        Each entry comes from one worker and zeros from the others, so the sum is exact.
        """
        microbatches, stages = self._plan.layout.microbatches, self._plan.num_stages
        squares = microbatches + len(self._position)
        head = squares + _ASKED
        ballot = [0.0] * (head + 3 * stages * microbatches)
        for microbatch, loss in attempt.losses.items():
            ballot[microbatch] = loss
        for stage, tensors in grads.items():
            if self._plan.holders[stage][0] == self._worker and tensors:
                found = torch.stack([grad.double().square().sum() for grad in tensors]).tolist()
                for name, square in zip(self._engines[stage].names, found, strict=True):
                    ballot[microbatches + self._position[name]] = square
        seconds = time.perf_counter() - began
        asked = (bad, wishes.regroup, wishes.leave, wishes.save, wishes.snapshot, seconds)
        ballot[squares:head] = map(float, asked)
        for (stage, microbatch), work in attempt.work.items():
            ahead = attempt.seconds[Action("F", stage, microbatch)]
            back = attempt.seconds[Action("B", stage, microbatch)]
            for row, told in enumerate((ahead, back, work)):
                ballot[head + (row * stages + stage) * microbatches + microbatch] = told
        whole = self._comm.all_reduce(torch.tensor(ballot, dtype=torch.float64))
        values = whole[:head].tolist()
        times = whole[head:].view(3, stages, microbatches)
        any_bad, regroup, leaving, save, snapshot = (round(v) for v in values[squares:-1])
        norm = math.sqrt(math.fsum(values[microbatches:squares])) if not any_bad else math.nan
        return _Ballot(
            math.fsum(values[:microbatches]),
            norm,
            any_bad > 0,
            regroup > 0,
            leaving,
            save > 0,
            snapshot > 0,
            values[-1] / len(self._plan.workers),
            StepTimes(*times.tolist()),
        )
