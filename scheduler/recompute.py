"""Activation checkpointing: the stages that compute activations again instead of keeping them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, a stage at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from dtrain.scheduler.costs import StepCosts
from dtrain.scheduler.plan import Plan
from dtrain.scheduler.predict import peak_memory

Recompute = Literal["auto", "all", "none"]
"""Which stages compute activations again: those for which memory demands it, all, or none."""


def recomputed(costs: StepCosts, stages: Sequence[bool]) -> StepCosts:
    """The costs where some stages keep only what they receive and run their forward twice."""
    if not any(stages):
        return costs
    backward = tuple(
        tuple(f + b for f, b in zip(fs, bs, strict=True)) if again else bs
        for fs, bs, again in zip(costs.forward, costs.backward, stages, strict=True)
    )
    kept = tuple(
        (costs.sent_bytes[s - 1] if s and costs.sent_bytes else (0,) * len(row)) if again else row
        for s, (row, again) in enumerate(zip(costs.kept_bytes, stages, strict=False))
    )
    return replace(costs, backward=backward, kept_bytes=kept)


def hungriest(costs: StepCosts, stages: Iterable[int]) -> int:
    """The stage whose largest microbatch keeps most, the first of equal ones."""
    return max(stages, key=lambda s: (max(costs.kept_bytes[s]), -s))


def stages_to_recompute(
    plan: Plan, costs: StepCosts, memory_bytes: Mapping[int, int], how: Recompute = "auto"
) -> tuple[bool, ...]:
    """For each stage, whether a run of ``plan`` computes its activations again in the backward.

    Left to ``auto``, those stages of the workers whose ``memory_bytes`` are too few for the plan
    that keep most, one after the other until it fits or nothing is left to save.
    """
    again = [how == "all"] * plan.num_stages
    while how == "auto" and memory_bytes and costs.kept_bytes:
        peak = peak_memory(plan, recomputed(costs, again))
        over = [w for w in plan.workers if peak[w] > memory_bytes.get(w, peak[w])]
        held = {s for w in over for s in plan.stages_held(w)}
        left = [s for s in held if not again[s] and any(costs.kept_bytes[s])]
        if not left:
            break
        again[hungriest(costs, left)] = True
    return tuple(again)
