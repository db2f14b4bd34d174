"""Compares a disturbed run with the undisturbed one and says what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.chaos.scenario import Scenario
from dtrain.chaos.watch import Watch
from dtrain.runfolder import RunRecord

_LOOP_DESCRIPTORS = 6
"""Of the loop of a gloo group's device: an epoll, two pipes and their like."""


@dataclass(frozen=True)
class Twin:
    """The undisturbed run: its record, and loss and seeds of each step."""

    record: RunRecord
    losses: dict[int, float]
    seeds: dict[int, int]


def twin_of(record: RunRecord, steps: Sequence[dict[str, Any]]) -> Twin:
    """From a finished run's record and the metrics of its steps."""
    return Twin(
        record, {m["step"]: m["loss"] for m in steps}, {m["step"]: m["seeds"] for m in steps}
    )


def promise_broken(
    twin: Twin, record: RunRecord | None, steps: Sequence[dict[str, Any]], lost: int
) -> list[str]:
    """What of the promise does not hold, each in a line; none if all does.

    ``lost``: how many steps may stand in the metrics more than once.
    """
    if record is None or record.status != "done":
        status = "none" if record is None else record.status
        return [f"run.json: expected status done, got {status}"]
    reasons = []
    for name in ("weights_sha256", "steps", "seeds_trained", "loss", "metrics"):
        wanted, got = getattr(twin.record, name), getattr(record, name)
        if wanted != got:
            reasons.append(f"{name}: expected {wanted} as without faults, got {got}")
    times = Counter(m["step"] for m in steps)
    missing = sorted(set(twin.losses) - set(times))
    if missing:
        reasons.append(f"metrics.jsonl: steps {_few(missing)} are missing")
    again = sum(times.values()) - len(times)
    if again > lost:
        twice = sorted(step for step, count in times.items() if count > 1)
        reasons.append(
            f"metrics.jsonl: expected at most {lost} steps committed again, got {again}: "
            f"{_few(twice)}"
        )
    for name, wanted in (("loss", twin.losses), ("seeds", twin.seeds)):
        other = sorted({m["step"] for m in steps if m[name] != wanted.get(m["step"])})
        if other:
            reasons.append(f"metrics.jsonl: {name} of steps {_few(other)} differ")
    return reasons


def expectation_missed(
    scenario: Scenario, watch: Watch, record: RunRecord | None, output: str
) -> list[str]:
    """What of a scenario's expectation does not hold, each in a line."""
    expect, reasons = scenario.expect, []
    fired = watch.of_kind("fault_injected")
    if len(fired) < expect.fired:
        refused = [e["reason"] for e in watch.of_kind("fault_refused")]
        reasons.append(
            f"faults: expected at least {expect.fired} to strike, got {len(fired)}"
            + (f" ({'; '.join(refused)})" if refused else "")
        )
    if record is not None:
        if record.steps_replayed > expect.replayed:
            reasons.append(
                f"steps_replayed: expected at most {expect.replayed}, got {record.steps_replayed}"
            )
        if record.steps_lost > expect.lost:
            reasons.append(f"steps_lost: expected at most {expect.lost}, got {record.steps_lost}")
        if record.workers < expect.workers:
            reasons.append(
                f"workers: expected at least {expect.workers} at the end, got {record.workers}"
            )
    longest = max(watch.pauses(), default=0.0)
    if longest > expect.recovery_s:
        reasons.append(
            f"recovery: expected at most {expect.recovery_s:g} s to the next committed step, got "
            f"{longest:.1f} s"
        )
    evicted = watch.of_kind("trainer_hung", "trainer_evicted")
    if evicted and not expect.evicted:
        reasons.append(f"eviction: expected none, got {evicted[0]['reason']}")
    if expect.says is not None:
        said = [output, *(e["reason"] for e in watch.events.lines)]
        if not any(expect.says in text for text in said):
            reasons.append(f"message: expected {expect.says!r} in output or events, got none")
    return reasons


def resources_kept(watch: Watch, generations: int) -> list[str]:
    """Whether a trainer holds ever more descriptors or threads, generation by generation.

    A further worker brings connections of its own, and so does each stage that a worker comes to
    hold with others; a generation must bring nothing.
    """
    plans = watch.of_kind("generation_started")
    needs = [_descriptors_of(plan, worker) for plan in plans for worker in plan["workers"]]
    limits = 16 + max(needs, default=0) - min(needs, default=0), 16
    names = ("descriptors", "threads")
    return [
        f"{name}: expected growth of at most {limit} in {generations} generations, got {grown}"
        for name, limit, grown in zip(names, limits, watch.growth(), strict=True)
        if grown > limit
    ]


def _descriptors_of(plan: Mapping[str, Any], worker: int) -> int:
    """What the groups of a worker take: each a loop of its own, and a socket for each member."""
    shared = [held for held in plan["holders"] if worker in held and len(held) > 1]
    return 2 * len(plan["workers"]) + sum(_LOOP_DESCRIPTORS + len(held) for held in shared)


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:5])
    return shown + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
