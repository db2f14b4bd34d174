"""When the next save of a tier is due, by what saves cost and how often faults come."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from dtrain.config import Config
from dtrain.scheduler.fit import median
from dtrain.scheduler.intervals import FailureRate, Interval, IntervalPolicy, SaveCost

_STEPS = 64


@dataclass
class SaveInterval:
    """The steps between two saves, estimated anew as the run goes (Daly, FGCS 22(3), 2006).

    Every worker measures, so that whoever comes to lead knows; the leader's opinion counts, and all
    learn it with the vote. ``last``: committed steps at the newest save, whatever came of it.
    ``told``: the interval that was told last.
    """

    policy: IntervalPolicy
    last: int = 0
    told: int = 0
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _start_s: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, mtbf_s: float, first_guess_s: float) -> SaveInterval:
        """Before there is any experience."""
        return cls(IntervalPolicy(FailureRate(mtbf_s), SaveCost(first_guess_s)))

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._step_s.append(seconds)

    def cost(self, seconds: float) -> None:
        """A save took so much time from training."""
        self.policy.cost.measured(seconds)

    def fault(self) -> None:
        """A fault came that this tier was needed for."""
        self.policy.rate.failed(time.monotonic() - self._start_s)

    def interval(self) -> Interval | None:
        """What it is now; None before the first step."""
        if not self._step_s:
            return None
        self.policy.rate.watch(time.monotonic() - self._start_s)
        return self.policy.interval(median(list(self._step_s)))

    def due(self, step: int) -> bool:
        """Whether to save after ``step`` committed steps."""
        now = self.interval()
        return now is not None and step - self.last >= now.steps


@dataclass
class Intervals:
    """The intervals of both tiers that save, where they are left open; else None."""

    checkpoint: SaveInterval | None
    snapshot: SaveInterval | None

    @classmethod
    def of(cls, config: Config) -> Intervals:
        """As ``checkpoint.every_steps`` and ``robust.snapshot_every`` say."""
        mtbf_s = config.robust.mtbf_s
        auto = config.checkpoint.every_steps, config.robust.snapshot_every
        return cls(
            SaveInterval.of(mtbf_s, 0.5) if auto[0] == "auto" else None,
            SaveInterval.of(mtbf_s, 0.01) if auto[1] == "auto" else None,
        )

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        for kept in (self.checkpoint, self.snapshot):
            if kept is not None:
                kept.stepped(seconds)

    def recovered(self, step: int, tier: int, *, resumed: bool) -> None:
        """A generation began at ``step``, by recovery from ``tier``; ``resumed``: a checkpoint."""
        for kept in (self.checkpoint, self.snapshot):
            if kept is not None:
                kept.last = min(kept.last, step) if not resumed else step
        if tier == 1 and self.snapshot is not None:
            self.snapshot.fault()
        if resumed:
            for kept in (self.checkpoint, self.snapshot):
                if kept is not None:
                    kept.fault()
