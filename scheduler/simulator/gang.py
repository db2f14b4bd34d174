"""The same job under gang restart: any loss stops all workers, which start from a checkpoint.

The strongest form of it: whoever is there starts again at once, with a plan made afresh for their
number; workers that come back are taken in right after a checkpoint; a warning before a removal is
used to save; the intervals are Daly's for the true failure rate.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dtrain.scheduler.intervals import daly_s
from dtrain.scheduler.simulator.failures import FailureModel, Incident
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
        self.now = 0.0
        losses = failures.losses_per_s(spec.workers)
        losses += sum(i.cause in ("removed", "partition") for i in incidents) / duration_s
        self.interval_s = (
            min(spec.longest_interval_s, daly_s(spec.save_s, 1 / losses))
            if losses
            else spec.longest_interval_s
        )
        self.provisioned = set(range(spec.workers))
        self.away_until_s: dict[int, float] = {}
        self.slow: dict[int, float] = {}
        self.members: set[int] = set()
        self.progress = Progress(1.0)
        self.running = False
        self.replayed = 0
        self._cause = "start"
        self._accounted_s = 0.0
        self._restarts = 0
        self._asked = 0
        self._usual_s = 1.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = 0
        for incident in incidents:
            self._at(incident.time_s, partial(self._meet, incident))

    def run(self) -> GangRun:
        """Go through everything that happens before the end."""
        self._at(0.0, partial(self._start, 0))
        while self._queue and self._queue[0][0] <= self.duration_s:
            self.now, _, action = heapq.heappop(self._queue)
            self._account()
            action()
        self.now = self.duration_s
        self._account()
        if self.running:
            self.account.lose(self.progress.trained_s() / self.progress.step_s, "unfinished")
        return self

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._ticket += 1
        heapq.heappush(self._queue, (time_s, self._ticket, action))

    def _up(self) -> set[int]:
        return {w for w in self.provisioned if self.away_until_s.get(w, 0.0) <= self.now}

    def _account(self) -> None:
        seconds, self._accounted_s = self.now - self._accounted_s, self.now
        count = len(self.provisioned)
        if seconds <= 0 or not count:
            return
        ideal_s = self.ideal.step_s(count)
        if not self.running:
            self.account.idle(seconds, ideal_s, self._cause)
            return
        passed = self.progress.run_to(self.now)
        paces = [("absent", self._usual_s), ("straggler", self.progress.step_s)]
        self.account.train(passed, ideal_s, paces)

    def _meet(self, incident: Incident) -> None:
        lease_s, notice_s = self.spec.times.lease_s, self.spec.times.notice_s
        match incident.cause:
            case "straggler":
                self.slow |= dict.fromkeys(incident.workers, incident.factor)
                self._at(self.now + incident.away_s, partial(self._recover, incident.workers))
                self._set_pace()
            case "added":
                self.provisioned.update(incident.workers)
                self.away_until_s |= dict.fromkeys(incident.workers, self.now)
                self._come_back(incident.workers)
            case "preempted":
                if self.running and self.members & set(incident.workers):
                    self._lose_work(incident.cause)
                    self.progress.durable = self.progress.committed
                    self._restart(incident.cause, self.spec.save_s, incident.workers)
            case "partition" if incident.away_s < lease_s:
                self._lose(incident, 0.0, restart=False)
            case "partition" | "hang":
                self._lose(incident, lease_s)
            case "removed":
                self.provisioned.difference_update(incident.workers)
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
            if self.running:
                self._lose_work(incident.cause)
                again = self.progress.roll_back(self.progress.durable)
                self.replayed += again
                self.account.commit(-again)
                self.account.lose(again, incident.cause)
            self._restart(incident.cause, notice_s, ())
        elif self.running:
            self.running, self._cause = False, incident.cause
            self._at(self.now + incident.away_s, partial(self._go_on, self._restarts))

    def _lose_work(self, cause: str) -> None:
        under_way_s = self.progress.trained_s()
        self.progress.break_off()
        if under_way_s > MOMENT_S:
            self.replayed += 1
            self.account.lose(under_way_s / self.progress.step_s, cause)

    def _restart(self, cause: str, notice_s: float, without: Iterable[int]) -> None:
        """All start anew; ``without``: workers that are about to go."""
        self.running, self._cause = False, cause
        self._restarts += 1
        for w in without:
            self.away_until_s[w] = math.inf
        ready_s = self.now + notice_s + self.spec.gang_restart_s + self.spec.load_s
        self._at(ready_s, partial(self._start, self._restarts))

    def _go_on(self, restarts: int) -> None:
        if restarts == self._restarts:
            self.running = True
            self.progress.at_s = self.now

    def _start(self, restarts: int) -> None:
        if restarts != self._restarts or self.running:
            return
        self.members = self._up()
        if len(self.members) < max(1, self.spec.min_workers):
            self._cause = "absent"
            return
        self.running = True
        self.progress.at_s, self.progress.into_s = self.now, 0.0
        self._set_pace()
        self.progress.every = max(1, round(self.interval_s / self.progress.step_s))
        self.progress.save_s = self.spec.save_s

    def _set_pace(self) -> None:
        if not self.running:
            return
        self._usual_s = pace_s = self.ideal.step_s(len(self.members))
        slow = {
            i: f for i, w in enumerate(sorted(self.members)) if (f := self.slow.get(w)) is not None
        }
        if slow:
            pace_s = self.spec.step_time(self.ideal.plan(len(self.members)), slow)
        self.progress.change_pace(pace_s)

    def _recover(self, workers: Iterable[int]) -> None:
        for w in workers:
            self.slow.pop(w, None)
        self._set_pace()

    def _come_back(self, workers: Iterable[int]) -> None:
        """Devices are there again: they are taken in after the next checkpoint."""
        back = self._up().intersection(workers) - self.members
        if not self.running:
            if len(self.members) < max(1, self.spec.min_workers):
                self._restart("added", 0.0, ())
            return
        if back and self._asked != self._restarts + 1:
            self._asked = self._restarts + 1
            self._at(self.now + self.progress.to_save_s(), partial(self._take_in, self._restarts))

    def _take_in(self, restarts: int) -> None:
        if restarts != self._restarts or not self.running:
            return
        if self.progress.committed > self.progress.durable:
            # The pace has changed since.
            self._at(self.now + self.progress.to_save_s(), partial(self._take_in, restarts))
            return
        self._lose_work("join")
        self._restart("join", 0.0, ())
