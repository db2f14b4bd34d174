"""The ``faults`` section of the configuration."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

PHASES = (
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
"""The parts of a worker's life in which a fault can strike."""

HOW: dict[str, tuple[str, ...]] = {
    "crash": ("sigkill", "segfault", "exit0", "exit1", "exception", "oom"),
    "hang": ("sigstop", "gil", "loop"),
    "slow": (),
    "network": ("cut", "oneway", "delay"),
    "numeric": ("nan", "bitflip"),
    "disk": ("full", "rename", "partial"),
    "store": ("kill", "stop"),
    "agent": ("kill", "stop"),
    "node": ("kill", "stop"),
    "preempt": ("worker", "node"),
}
"""The kinds of fault, each with its ways to happen; the first is the default."""

TENSOR_PHASES = ("send", "receive", "sum")
"""The phases that show their tensors."""

DISK_POINTS = {"full": "file.flush", "rename": "rename", "partial": "marker.write"}
"""Where in a save each disk fault strikes (names of ``CheckpointStore``'s points)."""

POINTS = (
    "stage.begin",
    "stage.tensor",
    "stage.end",
    "save.begin",
    "data.write",
    "file.open",
    "file.flush",
    "file.closed",
    "data.written",
    "metadata.write",
    "manifest.write",
    "rename",
    "marker.write",
    "committed",
    "remove.marker",
    "remove.files",
)
"""The named points of a checkpoint's save."""

_OWN_KIND = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

# Which optional fields mean something for which kind.
_FIELDS = {
    "factor": ("slow",),
    "seconds": ("hang", "slow", "network", "store", "agent", "node"),
    "delay_s": ("network",),
    "to": ("network",),
    "stage": ("numeric",),
    "microbatch": ("numeric",),
    "memory_mib": ("crash",),
}


class FaultSpec(BaseModel):
    """One fault: what happens, to whom, and when.

    It strikes at the first ``count`` occasions on which its worker reaches ``phase`` in a step
    from ``step`` on (until ``until_step``), counted over all lives of the worker. In checkpoint,
    recovery and join the step is the number of committed steps.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True)

    kind: str = Field(description="a kind of fault, or the user's own as module:attribute")
    how: str | None = Field(None, description="which way; none: the kind's first")
    worker: int | str = Field("random", description="a worker, random, or all")
    phase: str | None = Field(None, description="none: sum (numeric), checkpoint (disk), else any")
    step: int | str | None = Field(
        None, description="first step, counted from 0, or random in train.max_steps; none: any"
    )
    until_step: int | None = Field(None, ge=0, description="last step; none: no end")
    count: int = Field(1, ge=0, description="how often; 0: every time")
    every_steps: int = Field(0, ge=0, description="least steps from one firing to the next")
    seed: int | None = Field(None, ge=0, description="of its random choices; none: the run's")
    point: str | None = Field(None, description="a named point of a save; phase checkpoint only")
    factor: float = Field(2.0, gt=1, description="slow: how many times slower")
    seconds: float | None = Field(None, gt=0, description="how long it lasts; none: for good")
    delay_s: float = Field(0.2, gt=0, description="network delay: how late what is sent leaves")
    to: list[int] | None = Field(None, description="network: to these workers; none: to all")
    stage: int | None = Field(None, ge=0, description="numeric: only here; none: any stage")
    microbatch: int | None = Field(None, ge=0, description="numeric: only in this one")
    memory_mib: int = Field(256, ge=1, description="crash oom: what it takes before it is killed")
    options: dict[str, Any] = Field(default_factory=dict, description="for the user's own")

    @model_validator(mode="after")
    def _check(self) -> FaultSpec:
        self._check_kind()
        self._check_time_and_place()
        for name, kinds in _FIELDS.items():
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and self.kind not in kinds and not self.is_own:
                raise ValueError(
                    f"{name}: only for the kinds {', '.join(kinds)}, got it for {self.kind}; "
                    "leave it out"
                )
        if self.options and not self.is_own:
            raise ValueError(
                f"options: only for a fault of your own (module:attribute), got {self.options} "
                f"for {self.kind}; leave it out"
            )
        return self

    def _check_kind(self) -> None:
        if not self.is_own:
            expect_one_of("kind", self.kind, tuple(HOW), "or your own as module:attribute")
        ways = HOW.get(self.kind, ())
        if self.how is None:
            self.__dict__["how"] = ways[0] if ways else None
        elif not ways:
            raise ValueError(f"how: {self.kind} has one way only, got {self.how!r}; leave it out")
        else:
            expect_one_of("how", self.how, ways)

    def _check_time_and_place(self) -> None:
        if isinstance(self.worker, str):
            if self.worker not in ("random", "all"):
                raise ValueError(f"worker: expected a number, random or all, got {self.worker!r}")
        elif self.worker < 0:
            raise ValueError(f"worker: expected a number of at least 0, got {self.worker}")
        if isinstance(self.step, str) and self.step != "random":
            raise ValueError(f"step: expected a number or random, got {self.step!r}")
        if isinstance(self.step, int) and self.step < 0:
            raise ValueError(f"step: expected a number of at least 0, got {self.step}")
        if self.phase is None:
            self.__dict__["phase"] = self._default_phase()
        else:
            expect_one_of("phase", self.phase, PHASES)
        if self.kind == "numeric":
            expect_one_of("phase", self.phase, TENSOR_PHASES, "where there are tensors to spoil")
        if self.kind == "disk" and self.phase != "checkpoint":
            raise ValueError(f"phase: expected checkpoint for kind disk, got {self.phase}")
        if self.point is not None:
            expect_one_of("point", self.point, POINTS)
            if self.phase != "checkpoint" or self.kind == "disk":
                raise ValueError(
                    f"point: expected phase checkpoint and another kind than disk, got phase "
                    f"{self.phase} and kind {self.kind}"
                )

    def _default_phase(self) -> str | None:
        if self.kind == "disk" or self.point is not None:
            return "checkpoint"
        return "sum" if self.kind == "numeric" else None

    @property
    def is_own(self) -> bool:
        """Whether it is a fault of the user's own."""
        return _OWN_KIND.fullmatch(self.kind) is not None

    @property
    def strikes_at_point(self) -> str | None:
        """The point of a save at which it strikes; None if it strikes in a phase as such."""
        return DISK_POINTS[str(self.how)] if self.kind == "disk" else self.point

    def digest(self) -> str:
        """Eight hexadecimal digits that tell this fault from others."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]

    def describe(self) -> str:
        """In a few words, for people."""
        words = [self.kind if self.how is None else f"{self.kind} ({self.how})"]
        words.append("on all workers" if self.worker == "all" else f"on worker {self.worker}")
        if self.phase is not None:
            words.append(f"in {self.phase}")
        if self.step is not None:
            words.append(f"from step {self.step}")
        if self.count != 1:
            words.append(f"{self.count} times" if self.count else "every time")
        return " ".join(words)


def expect_one_of(field: str, value: object, allowed: Sequence[str], otherwise: str = "") -> None:
    """Raise ValueError with the nearest name unless ``value`` is among ``allowed``."""
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, 1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    choices = ", ".join(allowed) + (f", {otherwise}" if otherwise else "")
    raise ValueError(f"{field}: expected one of {choices}; got {value!r}{hint}")
