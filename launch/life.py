"""One life of a trainer, from its start to its end, under its supervisor's eyes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from dtrain.launch.completion import Completion
from dtrain.launch.lease import Lease
from dtrain.launch.process import TrainerProcess
from dtrain.launch.report import Report
from dtrain.launch.signals import StopSignals
from dtrain.runtime.heartbeat import Heartbeat, Sign

AGREEING = "agreeing"
"""The phase, by a trainer's heartbeat, in which it waits for others to form a generation."""

_LEAVE_S = 0.5
"""Time to end for a trainer that has reported a failure: its parked groups may block for longer."""


@dataclass(frozen=True)
class Hang:
    """A trainer that has to be killed: why, and the last that was seen of it."""

    reason: str
    sign: Sign


@dataclass(frozen=True)
class LifeEnd:
    """How a trainer ended. ``exit_code``: None where nobody saw it. ``lived_s``: since its start.

    ``began``: it had said by its heartbeat what it does.
    """

    report: Report | None
    exit_code: int | None
    hang: Hang | None
    lived_s: float
    began: bool

    @property
    def reason(self) -> str:
        """In one line, why it ended."""
        if self.report is not None:
            return self.report.reason
        if self.hang is not None:
            return f"hung: {self.hang.reason}"
        if self.exit_code is None:
            return "ended, and the process that it was forked from did not say how"
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        return f"ended with exit code {self.exit_code} before the job was complete"


class Life:
    """Watches one trainer.

    ``grace_s``: how long it may take to leave once told to. ``on_hang``: called before a hung
    trainer is killed.
    """

    def __init__(
        self,
        trainer: TrainerProcess,
        heartbeat: Heartbeat,
        lease: Lease,
        signals: StopSignals,
        completion: Completion,
        grace_s: float,
        on_hang: Callable[[Hang], None],
    ) -> None:
        self._trainer = trainer
        self._heartbeat = heartbeat
        self._lease = lease
        self._signals = signals
        self._completion = completion
        self._grace_s = grace_s
        self._on_hang = on_hang
        self._began_s = time.monotonic()
        self._deadline_s: float | None = None
        self._complete_s: float | None = None
        self._hang: Hang | None = None

    def watch(self, stop: signal.Signals | None) -> tuple[LifeEnd, signal.Signals | None]:
        """Watch until the trainer has ended; returns its end, and the stop signal if one came.

        ``stop``: a signal that came before this life; the trainer is told at once.
        """
        if stop is not None:
            self._tell_to_leave()
        while True:
            what = self._trainer.wait(self._signals, self._wait_s())
            if what == "ended":
                break
            if what == "signal":
                number = self._signals.take()
                if number is not None and stop is None:
                    stop = number
                    self._tell_to_leave()
            elif what == "report":
                self._shorten(time.monotonic() + self._time_to_end())
            if self._must_end():
                # Nothing of it runs any more once it is killed, even if the kernel takes its time.
                break
        sign = self._heartbeat.read()
        code = self._trainer.finish()
        # A signal to the whole group may have ended the trainer before it was noticed here.
        return self._end(code, sign), stop or self._signals.take()

    def _end(self, code: int | None, sign: Sign) -> LifeEnd:
        return LifeEnd(
            report=self._trainer.report,
            exit_code=code,
            hang=self._hang,
            lived_s=time.monotonic() - self._began_s,
            began=sign.progress_s > 0,
        )

    def _tell_to_leave(self) -> None:
        self._trainer.signal(signal.SIGTERM)
        self._shorten(time.monotonic() + self._grace_s)

    def _time_to_end(self) -> float:
        report = self._trainer.report
        orderly = report is None or report.kind in ("done", "stopped", "left", "user_error")
        return self._grace_s if orderly else min(self._grace_s, _LEAVE_S)

    def _shorten(self, deadline_s: float) -> None:
        self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)

    def _wait_s(self) -> float:
        now = time.monotonic()
        look_s = self._lease.next_look_s(now)
        return look_s if self._deadline_s is None else min(look_s, max(0.0, self._deadline_s - now))

    def _must_end(self) -> bool:
        """Whether the trainer's time is over: past its deadline, hung, or without a job to join."""
        now = time.monotonic()
        if self._deadline_s is not None and now >= self._deadline_s:
            return True
        if self._trainer.report is not None:
            return False
        sign = self._heartbeat.read()
        reason = self._lease.look(now, sign)
        if reason is not None:
            self._hang = Hang(reason, sign)
            self._on_hang(self._hang)
            return True
        if not self._completion.done():
            return False
        if self._complete_s is None:
            self._complete_s = now
            self._shorten(now + self._grace_s)
        # A member of the last generation is about to end by itself; a latecomer would wait for
        # a generation that never comes.
        waits = sign.waiting and sign.phase.startswith(AGREEING)
        return waits and now - self._complete_s >= self._lease.tick_s
