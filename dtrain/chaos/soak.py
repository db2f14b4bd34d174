"""Random schedules of faults, each a pure function of a seed and its number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.chaos.base import MODELS, ZERO_STAGES
from dtrain.chaos.scenario import Expectation, Scenario, Shape

_STEPS = 120
_KILL_PHASES = (
    "sample",
    "forward",
    "backward",
    "send",
    "receive",
    "sum",
    "vote",
    "apply",
    "checkpoint",
    "recovery",
    "join",
)
_CRASHES = ("sigkill", "sigkill", "segfault", "exit0", "exit1", "exception", "oom")
_HANGS = ("sigstop", "gil")


def schedule(
    seed: int, number: int, *, model: str | None = None, zero: int | None = None
) -> tuple[Scenario, str, int]:
    """Schedule ``number`` of ``seed``: (scenario, model, ZeRO stage).

    ``model`` and ``zero`` replace what is drawn and change nothing else.
    """
    rng = random.Random(f"soak:{seed}:{number}")
    drawn_model, drawn_zero = rng.choice(MODELS), rng.choice(ZERO_STAGES)
    workers = rng.choice((3, 4, 4))
    faults = [_fault(rng, workers) for _ in range(rng.randint(2, 6))]
    struck = len(faults)
    scenario = Scenario(
        f"soak-{seed}-{number}",
        f"{struck} random faults among {workers} workers",
        _always(faults),
        workers=workers,
        overrides={
            "train.max_steps": _STEPS,
            "parallel.stages": rng.choice((2, 3)),
            "robust.respawns": 50,
            "robust.recompute_check": 1.0 if any(f["kind"] == "numeric" for f in faults) else 0.0,
        },
        # Several faults may take all holders of a stage at once; then tiers 1 and 2 roll back.
        expect=Expectation(
            replayed=3 * struck, lost=12 * struck, fired=0, recovery_s=15.0 * (1 + struck)
        ),
        limit_s=300.0,
    )
    return scenario, model or drawn_model, drawn_zero if zero is None else zero


def schedules(
    seed: int, *, model: str | None = None, zero: int | None = None
) -> Iterator[tuple[Scenario, str, int]]:
    """The schedules of a seed, without end."""
    number = 0
    while True:
        yield schedule(seed, number, model=model, zero=zero)
        number += 1


def _always(faults: Sequence[dict[str, Any]]) -> Callable[[Shape], Sequence[dict[str, Any]]]:
    return lambda shape: faults


def _fault(rng: random.Random, workers: int) -> dict[str, Any]:
    """One fault that a run must survive in place."""
    worker, step = rng.randrange(workers), rng.randrange(3, _STEPS - 20)
    chance = rng.random()
    if chance < 0.65:
        phase = rng.choice(_KILL_PHASES)
        how = rng.choice(_CRASHES)
        return {"kind": "crash", "how": how, "worker": worker, "step": step, "phase": phase}
    if chance < 0.80:
        how = rng.choice(_HANGS)
        return {"kind": "hang", "how": how, "worker": worker, "step": step}
    if chance < 0.90:
        factor = float(rng.choice((2, 3, 5)))
        return {"kind": "slow", "factor": factor, "worker": worker, "step": step, "seconds": 5.0}
    if chance < 0.95:
        how = rng.choice(("full", "rename"))
        return {"kind": "disk", "how": how, "worker": worker, "step": step}
    return {
        "kind": "numeric",
        "how": rng.choice(("nan", "bitflip")),
        "worker": worker,
        "step": step,
    }
