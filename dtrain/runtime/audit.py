"""Numeric faults: gradients that are not finite, and microbatches that are computed twice.

A step whose gradients hold NaN or infinity is computed once more, each microbatch on another
holder. Where that begins elsewhere or not at all, the hardware of the worker that made it is
faulty. ``robust.recompute_check`` has a share of healthy microbatches computed twice likewise, and
compared to the bit (silent data corruption). What all decide, they decide from the same digests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.errors import CannotGoOnError, FaultyHardwareError, PeerLostError
from dtrain.runtime.attempt import Attempt, digest
from dtrain.runtime.inputs import InputFetcher
from dtrain.scheduler import Plan
from dtrain.scheduler.audit import (
    Verdict,
    differing,
    flow,
    judge,
    not_finite,
    position,
    rotated,
    sampled,
)

_GOING_S = 10.0
"""Longest wait for the end of a worker that knows itself to be faulty."""
_DIGEST_BYTES = 6
"""A digest travels as a float64, in an all-reduce that adds zeros to it."""


@dataclass(frozen=True)
class Auditor:
    """Computes steps again and compares, for one worker under one plan.

    ``rate``: the share of healthy microbatches to check. ``inputs_of(plan)``: a fetcher for another
    plan's executors. ``on_event(kind, reason, **fields)`` is told what a person must know; the
    lowest worker tells it.
    """

    plan: Plan
    worker: int
    seed: int
    rate: float
    inputs_of: Callable[[Plan], InputFetcher]
    on_event: Callable[..., None]

    def check_sample(self, first: Attempt) -> None:
        """Compute the sampled microbatches of a step a second time and compare.

        Raises:
            PeerLostError: they differ, and the step is to be done again without the worker that is
                to blame. FaultyHardwareError: this is that worker. CannotGoOnError: they differ,
                and nobody can tell who is to blame.
        """
        if not first.digested:
            return
        attempts = [first, self._again(first, 1, first.digested, digested=True)]
        digests = [self._digests(a) for a in attempts]
        disputed = differing(self.plan.layout, digests[0], digests[1])
        if not disputed:
            return
        batches = sorted({a.microbatch for a in disputed})
        verdict = None
        for turn in (0, 2 if max(len(h) for h in self.plan.holders) > 2 else 1):
            again = self._again(first, turn, batches, number=len(attempts), digested=True)
            attempts.append(again)
            digests.append(self._digests(attempts[-1]))
            verdict = judge([a.plan for a in attempts], digests, disputed)
            if verdict is not None:
                break
        assert verdict is not None
        self._convict(verdict, first)

    def sample(self, step: int) -> tuple[int, ...]:
        """The microbatches of ``step`` that are computed twice."""
        return sampled(self.seed, step, self.plan.layout.microbatches, self.rate)

    def explain_bad_gradient(self, first: Attempt) -> str:
        """Compute a step again whose gradients were not finite; why it is so, if it is again.

        Raises:
            PeerLostError, FaultyHardwareError, CannotGoOnError: as :meth:`check_sample`.
        """
        second = self._again(first, 1, range(self.plan.layout.microbatches))
        flags = [self._flags(first), self._flags(second)]
        verdict = not_finite([first.plan, second.plan], flags)
        if verdict is not None:
            self._convict(verdict, first)
        where = [
            str(a)
            for m in range(self.plan.layout.microbatches)
            for a in flow(self.plan.layout, m)
            if flags[0][position(self.plan.layout, a)]
        ]
        return f"step {first.step}: {where[0]} gave NaN or infinity on two holders alike"

    def _again(
        self,
        first: Attempt,
        turn: int,
        microbatches: Collection[int],
        *,
        number: int = 1,
        digested: bool = False,
    ) -> Attempt:
        plan = rotated(self.plan, turn, microbatches)
        attempt = Attempt(
            plan,
            self.worker,
            first.links,
            first.computes,
            first.source,
            first.step,
            number=number,
            digested=microbatches if digested else (),
        )
        fetcher = self.inputs_of(plan)
        attempt.run(lambda step, microbatch: fetcher.fetch(step, microbatch).ready())
        return attempt

    def _digests(self, attempt: Attempt) -> list[int]:
        values = self._zeros()
        for action, rows in attempt.digests.items():
            parts = rows
            if action.kind == "B":
                grads = attempt.grads[action.stage][action.microbatch]
                parts += digest([g for g in grads if g is not None])
            short = hashlib.blake2b(parts, digest_size=_DIGEST_BYTES).digest()
            values[position(self.plan.layout, action)] = int.from_bytes(short, "big")
        return [int(v) for v in attempt.links.comm.all_reduce(values).tolist()]

    def _flags(self, attempt: Attempt) -> list[int]:
        values = self._zeros()
        for action, sums in attempt.sums.items():
            tensors = list(sums)
            if action.kind == "B":
                grads = attempt.grads[action.stage][action.microbatch]
                tensors += [g.sum() for g in grads if g is not None]
            bad = not all(math.isfinite(float(t)) for t in tensors)
            values[position(self.plan.layout, action)] = float(bad)
        return [int(v) for v in attempt.links.comm.all_reduce(values).tolist()]

    def _zeros(self) -> Tensor:
        layout = self.plan.layout
        return torch.zeros(2 * layout.num_stages * layout.microbatches, dtype=torch.float64)

    def _convict(self, verdict: Verdict, first: Attempt) -> None:
        step, fault = first.step, first.links.comm.fault
        reason = f"step {step}: {verdict.reason}"
        if self.worker == min(self.plan.workers):
            self.on_event("numeric_fault", reason, step=step, culprit=verdict.culprit)
        if verdict.culprit is None:
            raise CannotGoOnError(reason)
        if len(self.plan.workers) == 1:
            # Nobody else is there to go on: what a second computation cannot repeat was passing.
            raise PeerLostError(reason)
        if verdict.culprit == self.worker:
            raise FaultyHardwareError(f"its hardware computes wrong: {reason}")
        # It may not have all digests yet: whoever went now would break what brings them to it.
        fault.wait_for(
            lambda: False, _GOING_S, f"worker {verdict.culprit} computes wrong: {reason}"
        )
