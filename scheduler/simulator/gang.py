"""The same job under gang restart: any loss stops all workers, which start from a checkpoint.

The strongest form of it: whoever is there starts again at once, with a plan made afresh for their
number; workers that come back are taken in right after a checkpoint; a warning before a removal is
used to save; the intervals are Daly's for the true failure rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal

from dtrain.scheduler.intervals import daly_s
from dtrain.scheduler.simulator.clock import Clock, Do
from dtrain.scheduler.simulator.failures import FailureModel, Incident, Slowness
from dtrain.scheduler.simulator.progress import MOMENT_S, Progress
from dtrain.scheduler.simulator.report import Account, Ideal
from dtrain.scheduler.simulator.spec import JobSpec


class GangRun:
    """The run. :meth:`run` goes through all incidents; then ``account`` says what came of it."""

    def __init__(
        self,
        spec: JobSpec,
        incidents: Sequence[Incident],
        duration_s: float,
        failures: FailureModel,
        ideal: Ideal,
    ) -> None:
        self.spec, self.duration_s, self.ideal = spec, duration_s, ideal
        self.account = Account()
        self.clock = Clock()
        losses = failures.losses_per_s(spec.workers)
        losses += sum(i.cause in ("removed", "partition") for i in incidents) / duration_s
        self.interval_s = (
            min(spec.longest_interval_s, daly_s(spec.save_s, 1 / losses))
            if losses
            else spec.longest_interval_s
        )
        self.provisioned = set(range(spec.workers))
        self.away_until_s: dict[int, float] = {}
        self.slowness = Slowness()
        self.members: set[int] = set()
        self.progress = Progress(1.0)
        self.phase: Literal["down", "running", "paused"] = "down"
        self.replayed = 0
        self._cause = "start"
        self._accounted_s = 0.0
        self._restarts = 0
        self._asked = 0
        self._usual_s = 1.0
        self._whole_at_s = 0.0
        for incident in incidents:
            self._at(incident.time_s, partial(self._meet, incident))

    def run(self) -> GangRun:
        """Go through everything that happens before the end."""
        self._at(0.0, partial(self._start, 0))
        self.clock.run(self.duration_s)
        self._account()
        if self.phase != "down":
            self.account.lose(self.progress.trained_s() / self.progress.step_s, "unfinished")
        return self

    @property
    def now(self) -> float:
        """Virtual time, in seconds."""
        return self.clock.now

    def _at(self, time_s: float, action: Do) -> None:
        def account_and_act() -> None:
            self._account()
            action()

        self.clock.at(time_s, None, account_and_act)

    def _up(self) -> set[int]:
        return {w for w in self.provisioned if self.away_until_s.get(w, 0.0) <= self.now}

    def _account(self) -> None:
        seconds, self._accounted_s = self.now - self._accounted_s, self.now
        count = len(self.provisioned)
        if seconds <= 0 or not count:
            return
        ideal_s = self.ideal.step_s(count)
        if self.phase != "running":
            self.account.idle(seconds, ideal_s, self._cause)
            return
        passed = self.progress.run_to(self.now)
        paces = [("absent", self._usual_s), ("straggler", self.progress.step_s)]
        self.account.train(passed, ideal_s, paces)

    def _meet(self, incident: Incident) -> None:
        lease_s, notice_s = self.spec.times.lease_s, self.spec.times.notice_s
        match incident.cause:
            case "straggler":
                self._at(self.slowness.strike(incident), self._set_pace)
                self._set_pace()
            case "added":
                self.provisioned.update(incident.workers)
                self.away_until_s |= dict.fromkeys(incident.workers, self.now)
                self._come_back(incident.workers)
            case "preempted":
                if self.phase == "running" and self.members & set(incident.workers):
                    self._lose_work(incident.cause)
                    self.progress.durable = self.progress.committed
                    self._restart(incident.cause, self.spec.save_s, incident.workers)
            case "partition" if incident.away_s < lease_s:
                self._lose(incident, 0.0, restart=False)
            case "partition" | "hang":
                self._lose(incident, lease_s)
            case "removed":
                self.provisioned.difference_update(incident.workers)
                self.slowness.replaced(incident.workers)
                self._lose(incident, notice_s)
            case _:
                self._lose(incident, notice_s)

    def _lose(self, incident: Incident, notice_s: float, *, restart: bool = True) -> None:
        struck = [w for w in incident.workers if self.away_until_s.get(w, 0.0) <= self.now]
        for w in incident.workers:
            until_s = self.now + incident.away_s
            self.away_until_s[w] = max(self.away_until_s.get(w, 0.0), until_s)
        if incident.away_s < math.inf and incident.away_s > 0:
            self._at(self.now + incident.away_s, partial(self._come_back, incident.workers))
        if self.members.isdisjoint(struck):
            return
        if restart:
            if self.phase != "down":
                self._lose_work(incident.cause)
                again = self.progress.roll_back(self.progress.durable)
                self.replayed += again
                self.account.commit(-again)
                self.account.lose(again, incident.cause)
            self._restart(incident.cause, notice_s, ())
        elif self.phase != "down":
            self.phase, self._cause = "paused", incident.cause
            self._whole_at_s = max(self._whole_at_s, self.now + incident.away_s)
            self._at(self.now + incident.away_s, self._go_on)

    def _lose_work(self, cause: str) -> None:
        under_way_s = self.progress.trained_s()
        self.progress.break_off()
        if under_way_s > MOMENT_S:
            self.replayed += 1
            self.account.lose(under_way_s / self.progress.step_s, cause)

    def _restart(self, cause: str, notice_s: float, without: Iterable[int]) -> None:
        """All start anew; ``without``: workers that are about to go."""
        self.phase, self._cause = "down", cause
        self._restarts += 1
        for w in without:
            self.away_until_s[w] = math.inf
        ready_s = self.now + notice_s + self.spec.gang_restart_s + self.spec.load_s
        self._at(ready_s, partial(self._start, self._restarts))

    def _go_on(self) -> None:
        """The network is whole again: what could not be done meanwhile is done now."""
        if self.phase != "paused" or self.now < self._whole_at_s:
            return
        self.phase, self._asked = "running", 0
        self.progress.at_s = self.now
        self._set_pace()
        self._come_back(self.provisioned)

    def _start(self, restarts: int) -> None:
        if restarts != self._restarts or self.phase != "down":
            return
        self.members = self._up()
        if len(self.members) < max(1, self.spec.min_workers):
            self._cause = "absent"
            return
        self.phase = "running"
        self.progress.at_s, self.progress.into_s = self.now, 0.0
        self._set_pace()
        self.progress.every = max(1, round(self.interval_s / self.progress.step_s))
        self.progress.save_s = self.spec.save_s

    def _set_pace(self) -> None:
        if self.phase != "running":
            return
        self._usual_s = pace_s = self.ideal.step_s(len(self.members))
        factors = self.slowness.slow(self.now)
        slow = {i: factors[w] for i, w in enumerate(sorted(self.members)) if w in factors}
        if slow:
            pace_s = self.spec.step_time(self.ideal.plan(len(self.members)), slow)
        self.progress.change_pace(pace_s)

    def _come_back(self, workers: Iterable[int]) -> None:
        """Devices are there again: they are taken in after the next checkpoint."""
        back = self._up().intersection(workers) - self.members
        if self.phase != "running":
            if len(self.members) < max(1, self.spec.min_workers):
                self._restart("added", 0.0, ())
            return
        if back and self._asked != self._restarts + 1:
            self._asked = self._restarts + 1
            self._at(self.now + self.progress.to_save_s(), partial(self._take_in, self._restarts))

    def _take_in(self, restarts: int) -> None:
        if restarts != self._restarts or self.phase != "running":
            return
        if self.progress.committed > self.progress.durable:
            # The pace has changed since.
            self._at(self.now + self.progress.to_save_s(), partial(self._take_in, restarts))
            return
        self._lose_work("join")
        self._restart("join", 0.0, ())
