"""Pictures of a step: a grid for terminals, a trace for Chrome, and figures.

All are drawn from spans: what each worker does when, in nanoseconds from the step's beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.errors import DtrainError
from dtrain.scheduler.predict import Span

if TYPE_CHECKING:
    from rich.text import Text

Spans = Mapping[int, Sequence[Span]]

_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
_BUBBLE = "·"


def stage_color(stage: int) -> str:
    """The colour of a stage, as #rrggbb; they repeat after eight."""
    return _COLORS[stage % len(_COLORS)]


def end_of(*pictures: Spans) -> int:
    """When the last action of any of them ends."""
    return max((s.end for spans in pictures for row in spans.values() for s in row), default=0)


def grid(spans: Spans, width: int, end: int | None = None) -> list[Text]:
    """A line for each worker: time goes right, colours are stages, numbers are microbatches.

    Forwards are single lines, backwards double ones in a darker shade, waiting is dots. ``width``:
    columns of a line, names included. ``end``: the time of the right edge.
    """
    from rich.text import Text

    last = end or end_of(spans) or 1
    head = max(len(f"w{w}") for w in spans) + 1
    columns = max(10, width - head)
    lines = []
    for worker, row in spans.items():
        line = Text(f"w{worker}".ljust(head))
        at = 0
        for span in row:
            begin = max(at, round(span.start * columns / last))
            finish = max(begin, min(columns, round(span.end * columns / last)))
            line.append(_BUBBLE * (begin - at), style="dim")
            number = str(span.action.microbatch)
            cell = number if len(number) <= finish - begin else ""
            fill = "─" if span.action.kind == "F" else "═"
            line.append(cell.ljust(finish - begin, fill), style=f"black on {_shade(span)}")
            at = finish
        line.append(_BUBBLE * (columns - at), style="dim")
        lines.append(line)
    return lines


def legend(stages: int) -> Text:
    """What the colours mean."""
    from rich.text import Text

    line = Text()
    for stage in range(stages):
        for kind, name in (("F", "forward"), ("B", "backward")):
            style = _tint(stage_color(stage), 1.0 if kind == "F" else 0.72)
            line.append(
                f" {'─' if kind == 'F' else '═'} stage {stage} {name} ", style=f"black on {style}"
            )
        line.append(" ")
    line.append(f" {_BUBBLE} waiting")
    return line


def _shade(span: Span) -> str:
    return _tint(stage_color(span.action.stage), 1.0 if span.action.kind == "F" else 0.72)


def _tint(color: str, factor: float) -> str:
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part * factor):02x}" for part in parts)


def chrome_trace(pictures: Mapping[str, Spans]) -> dict[str, Any]:
    """The pictures in the Trace Event Format of chrome://tracing and Perfetto.

    Each picture is a process and each worker one of its threads; times are microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (title, spans) in enumerate(pictures.items()):
        head = {"ph": "M", "pid": process, "tid": 0}
        events.append({**head, "name": "process_name", "args": {"name": title}})
        for worker, row in spans.items():
            named = {"name": f"worker {worker}"}
            events.append({**head, "tid": worker, "name": "thread_name", "args": named})
            for span in row:
                kind, stage, microbatch = span.action
                events.append(
                    {
                        "ph": "X",
                        "pid": process,
                        "tid": worker,
                        "ts": span.start / 1e3,
                        "dur": (span.end - span.start) / 1e3,
                        "name": str(span.action),
                        "cat": "forward" if kind == "F" else "backward",
                        "args": {"stage": stage, "microbatch": microbatch},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_figure(pictures: Mapping[str, Spans], target: Path, title: str) -> None:
    """Draw the pictures one under the other, at one scale, to an SVG or PNG file.

    Raises:
        DtrainError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DtrainError(
            f"{target}: drawing needs matplotlib; run pip install 'dtrain[plot]', or take --json "
            "or --trace"
        ) from error
    last = end_of(*pictures.values()) / 1e6
    rows = sum(len(spans) for spans in pictures.values())
    figure = Figure(figsize=(12, 1.2 + 0.8 * len(pictures) + 0.32 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(pictures), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (name, spans) in zip(axes, pictures.items(), strict=True):
        for place, row in enumerate(spans.values()):
            for span in row:
                begin, length = span.start / 1e6, (span.end - span.start) / 1e6
                axis.barh(place, length, 0.86, begin, color=_shade(span), edgecolor="white", lw=0.4)
                if length > last / 60:
                    middle = begin + length / 2
                    label = str(span.action.microbatch)
                    axis.text(middle, place, label, ha="center", va="center", fontsize=7)
        axis.set_yticks(range(len(spans)), [f"worker {w}" for w in spans])
        axis.invert_yaxis()
        axis.set_xlim(0, last)
        axis.set_title(name, fontsize=10, loc="left")
    axes[-1].set_xlabel("ms; colours are stages, backwards darker, numbers are microbatches")
    figure.suptitle(title, fontsize=10)
    try:
        figure.savefig(target, format=target.suffix.removeprefix("."))
    except OSError as error:
        raise DtrainError(f"{target}: cannot be written ({error.strerror})") from error
