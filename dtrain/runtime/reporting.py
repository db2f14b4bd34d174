"""What the user sees of a run while it goes: a progress bar, or a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY_S = 10.0


class ProgressReport:
    """Steps done and the newest loss, on stderr; silent unless ``shown``.

    On a terminal a bar is drawn; elsewhere a line is printed every ten seconds and at the end.
    """

    def __init__(self, total: int, *, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._last = time.monotonic()
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("training", total=total, loss="-")

    def __enter__(self) -> ProgressReport:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Take the bar down, so that what follows is the last on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, done: int, loss: float) -> None:
        """Report that ``done`` steps are committed."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, loss=f"{loss:.4f}")
        elif self._shown:
            now = time.monotonic()
            if now - self._last >= _EVERY_S or done == self._total:
                self._last = now
                print(f"step {done}/{self._total} loss {loss:.4f}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._shown:
            print(text, file=sys.stderr, flush=True)
