"""What a step costs, stage by stage and microbatch by microbatch, and on which workers it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import add
from typing import Any

from dtrain.scheduler.plan import Layout, Table

TICKS_PER_S = 1_000_000_000
"""Planned times are whole nanoseconds, so that all members compute the very same ones."""


@dataclass(frozen=True)
class StepCosts:
    """Predicted costs of one step on a worker of slowness 1.

    Every table is ``[stage][microbatch]``.

    ``forward``, ``backward``: ticks (nanoseconds where they come from measurements), at least 1.
    ``sent_bytes``: activations from the stage to the next; their gradients take the same way back.
    ``kept_bytes``: activations that the stage keeps from its forward to its backward.
    ``state_bytes[s]``: parameters, gradients and optimizer state of a holder of the stage.
    ``sum_ticks[s]``: what the exact sum and the update of the stage cost each holder.
    ``fixed_ticks``: what a step costs besides, on every worker.
    """

    forward: Table
    backward: Table
    sent_bytes: Table = ()
    kept_bytes: Table = ()
    state_bytes: tuple[int, ...] = ()
    sum_ticks: tuple[int, ...] = ()
    fixed_ticks: int = 0

    @classmethod
    def even(cls, layout: Layout) -> StepCosts:
        """Before anything is known: every forward costs 1, every backward 2."""
        row = (1,) * layout.microbatches
        return cls((row,) * layout.num_stages, ((2,) * layout.microbatches,) * layout.num_stages)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> StepCosts:
        """From what :meth:`as_json` made."""

        def table(name: str) -> Table:
            return tuple(map(tuple, raw[name]))

        return cls(
            table("forward"),
            table("backward"),
            table("sent_bytes"),
            table("kept_bytes"),
            tuple(raw["state_bytes"]),
            tuple(raw["sum_ticks"]),
            raw["fixed_ticks"],
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def with_bytes_of(self, sized: StepCosts) -> StepCosts:
        """These costs with the bytes that ``sized`` knows."""
        return replace(
            self,
            sent_bytes=sized.sent_bytes,
            kept_bytes=sized.kept_bytes,
            state_bytes=sized.state_bytes,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def microbatches(self) -> int:
        return len(self.forward[0])

    def work(self) -> Table:
        """Ticks of forward and backward together."""
        return self._work

    @cached_property
    def _work(self) -> Table:
        return tuple(
            tuple(map(add, fs, bs)) for fs, bs in zip(self.forward, self.backward, strict=True)
        )

    def check(self, layout: Layout) -> None:
        """Raise ValueError where the tables do not fit ``layout``."""
        shape = (layout.num_stages, layout.microbatches)
        for name in ("forward", "backward", "sent_bytes", "kept_bytes"):
            table: Table = getattr(self, name)
            if not table and name.endswith("bytes"):
                continue
            found = (len(table), *sorted({len(row) for row in table}))
            if found != shape:
                raise ValueError(f"costs.{name}: expected a table {shape}, got {found}")
        if min(map(min, (*self.forward, *self.backward))) < 1:
            raise ValueError("costs: expected every forward and backward to cost at least 1 tick")


def scaled(ticks: int, factor: float) -> int:
    """Ticks on a worker of that slowness, at least 1."""
    return max(1, round(ticks * factor))


@dataclass(frozen=True)
class Cluster:
    """What is known of the workers; a worker that is not named is an ordinary one.

    Everything here must be something that all members agree on, like the plans made from it.

    ``slowness[w]``: time of an action on ``w`` over that on the reference (2.0: half as fast).
    ``risk[w]``: expected share of the work of ``w`` that its failures waste, at least 0; a risky
    worker gets less work and is the last to be chosen as a further holder. ``domains[w]``: names of
    the failure domains that ``w`` lies in, from the largest to the smallest (rack, node, device).
    ``memory_bytes[w]``: what stages and activations may take, without it there is no limit.
    ``bandwidth_bytes_s``: of a link between two nodes; None: bytes take no time.
    ``latency_s``: of each transfer besides. ``local_bandwidth_bytes_s``, ``local_latency_s``: the
    same within a node; None: as between nodes.
    """

    slowness: Mapping[int, float] = field(default_factory=dict)
    risk: Mapping[int, float] = field(default_factory=dict)
    domains: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    memory_bytes: Mapping[int, int] = field(default_factory=dict)
    bandwidth_bytes_s: float | None = None
    local_bandwidth_bytes_s: float | None = None
    latency_s: float = 0.0
    local_latency_s: float | None = None

    def slow(self, worker: int) -> float:
        """How many times the reference's time ``worker`` takes."""
        return self.slowness.get(worker, 1.0)

    def weight(self, worker: int) -> float:
        """Slowness with the work that failures waste: what load is divided by."""
        return self.slow(worker) * (1.0 + self.risk.get(worker, 0.0))

    def transfer_ticks(self, source: int, target: int, num_bytes: int) -> int:
        """Ticks from the end of an action to its result's arrival at another worker."""
        if source == target:
            return 0
        bandwidth, latency_s = self.bandwidth_bytes_s, self.latency_s
        if self.local_links and self._same_node(source, target):
            if self.local_bandwidth_bytes_s is not None:
                bandwidth = self.local_bandwidth_bytes_s
            if self.local_latency_s is not None:
                latency_s = self.local_latency_s
        seconds = latency_s + (num_bytes / bandwidth if bandwidth else 0.0)
        return round(seconds * TICKS_PER_S)

    def delay(self, costs: StepCosts, source: int, target: int, lower: int, microbatch: int) -> int:
        """Ticks that activations (or gradients) take between stage ``lower`` and the one above."""
        if source == target or not self.transfers_cost:
            return 0
        sent = costs.sent_bytes[lower][microbatch] if costs.sent_bytes else 0
        return self.transfer_ticks(source, target, sent)

    def _same_node(self, a: int, b: int) -> bool:
        return node_of(self.domains.get(a)) == node_of(self.domains.get(b))

    @property
    def transfers_cost(self) -> bool:
        """Whether transfers take any time at all."""
        return (
            self.bandwidth_bytes_s is not None
            or self.local_bandwidth_bytes_s is not None
            or self.latency_s > 0
            or bool(self.local_latency_s)
        )

    @property
    def local_links(self) -> bool:
        """Whether links within a node are others than those between nodes."""
        return self.local_bandwidth_bytes_s is not None or self.local_latency_s is not None


def node_of(domains: Sequence[str] | None) -> tuple[str, ...]:
    """The part of a worker's domains that names its node: (rack, node) of (rack, node, device)."""
    return tuple(domains[:2]) if domains else ()


UNIFORM = Cluster()
"""Workers of which nothing is known."""
