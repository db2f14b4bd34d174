"""Steps that pass at an even pace, with saves in between that take time of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_EPSILON = 1e-9
"""In steps: what rounding may take from a whole one."""

MOMENT_S = 1e-6
"""What a step must have taken to count as begun."""


class Passed(NamedTuple):
    """What came of some time: steps committed, and seconds spent on steps and on saves."""

    steps: int
    trained_s: float
    saved_s: float


@dataclass
class Progress:
    """Steps committed since a run began, at a pace that changes at times.

    ``committed``: steps by the time ``at_s``, of which ``durable`` by the newest save. ``into_s``:
    seconds into what comes next, a step or the save that is due. ``step_s``: seconds of a step;
    ``every``: steps from save to save, 0: no saves; ``save_s``: seconds of a save.
    """

    step_s: float
    every: int = 0
    save_s: float = 0.0
    committed: int = 0
    durable: int = 0
    into_s: float = 0.0
    at_s: float = 0.0

    def run_to(self, time_s: float) -> Passed:
        """Train until ``time_s``."""
        steps, trained_s = self.committed, self.trained_s()
        passed_s = time_s - self.at_s
        self._run(time_s)
        steps = self.committed - steps
        trained_s = steps * self.step_s + self.trained_s() - trained_s
        return Passed(steps, trained_s, passed_s - trained_s)

    def _run(self, time_s: float) -> None:
        left = time_s - self.at_s + self.into_s
        self.at_s = time_s
        if self.every and self._steps_unsaved() > self.every:
            # The interval has become shorter than what is unsaved already.
            if left < self.save_s:
                self.into_s = left
                return
            left -= self.save_s
            self.durable = self.committed
        if self.every:
            left += self._steps_unsaved() * self.step_s
            round_s = self.every * self.step_s + self.save_s
            rounds = int(left / round_s)
            left -= rounds * round_s
            self.durable += rounds * self.every
            steps = min(self.every, int(left / self.step_s + _EPSILON))
            self.committed = self.durable + steps
        else:
            steps = int(left / self.step_s + _EPSILON)
            self.committed += steps
        self.into_s = max(0.0, left - steps * self.step_s)

    @property
    def is_saving(self) -> bool:
        """Whether a save is what is under way."""
        return bool(self.every) and self._steps_unsaved() >= self.every

    def trained_s(self) -> float:
        """Seconds that the step under way has taken so far."""
        return 0.0 if self.is_saving else self.into_s

    def to_boundary_s(self) -> float:
        """Seconds until the step or save that is under way ends."""
        return max(0.0, (self.save_s if self.is_saving else self.step_s) - self.into_s)

    def to_save_s(self) -> float:
        """Seconds until the next save has ended."""
        steps = max(0, self.every - self._steps_unsaved())
        return steps * self.step_s + self.save_s - self.into_s + _EPSILON

    def change_pace(self, step_s: float) -> None:
        """From now on a step takes ``step_s``; what was done of the one under way counts."""
        if not self.is_saving:
            self.into_s *= step_s / self.step_s
        self.step_s = step_s

    def break_off(self) -> float:
        """Discard the step or the save that is under way; how many seconds it had taken."""
        lost_s, self.into_s = self.into_s, 0.0
        return lost_s

    def roll_back(self, step: int) -> int:
        """Go back to ``step``; how many committed steps have to be done again."""
        again = self.committed - step
        self.committed = step
        self.durable = min(self.durable, step)
        return again

    def _steps_unsaved(self) -> int:
        return self.committed - self.durable
