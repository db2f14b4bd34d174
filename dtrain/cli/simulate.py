"""``dtrain simulate``: what faults would cost a job, on a virtual clock."""

from __future__ import annotations

import csv
import json
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.scheduler.simulator.failures import CapacityChange
    from dtrain.scheduler.simulator.report import Report

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_HEADER = ["time", "kind", "count"]


def seconds(text: str, flag: str) -> float:
    """Seconds of a time like ``90``, ``1.5h`` or ``30d``.

    Raises:
        DtrainError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h|d|)", text.strip())
    if found is None:
        raise DtrainError(f"{flag}: expected a time like 90, 1.5h or 30d, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def read_trace(path: Path) -> list[CapacityChange]:
    """A spot trace: CSV with the header ``time,kind,count``; times in seconds, kinds add, remove.

    Raises:
        DtrainError: the file cannot be read, or a line of it makes no sense.
    """
    from dtrain.scheduler.simulator.failures import CapacityChange

    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DtrainError(f"--trace {path}: cannot be read ({error})") from error
    if not rows or [cell.strip() for cell in rows[0]] != _HEADER:
        raise DtrainError(
            f"--trace {path}, line 1: expected the header {','.join(_HEADER)}, got "
            f"{','.join(rows[0]) if rows else 'an empty file'}"
        )
    trace = []
    for line, row in enumerate(rows[1:], 2):
        try:
            time_text, kind, count_text = (cell.strip() for cell in row)
            time_s, count = float(time_text), int(count_text)
        except ValueError:
            time_s, kind, count = -1.0, "", 0
        if not 0 <= time_s < float("inf") or kind not in ("add", "remove") or count < 1:
            raise DtrainError(
                f"--trace {path}, line {line}: expected seconds, add or remove, and a count of at "
                f"least 1, got {','.join(row)}"
            )
        trace.append(CapacityChange(time_s, "add" if kind == "add" else "remove", count))
    return trace


def write_trace(path: Path, trace: list[CapacityChange]) -> None:
    """Write what :func:`read_trace` reads.

    Raises:
        DtrainError: the file cannot be written.
    """
    lines = [_HEADER, *([f"{c.time_s:.3f}", c.kind, str(c.count)] for c in trace)]
    try:
        path.write_text("".join(",".join(cells) + "\n" for cells in lines), encoding="utf-8")
    except OSError as error:
        raise DtrainError(f"--make-trace {path}: cannot be written ({error})") from error


def simulate_command(
    workers: Annotated[int, typer.Option(min=1, help="Workers at the start.")] = 64,
    duration: Annotated[str, typer.Option(help="Virtual time, like 2h or 30d.")] = "1d",
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    processes: Annotated[
        bool, typer.Option("--processes", help="Every process and message; else the leader's view.")
    ] = False,
    stages: Annotated[int, typer.Option(min=1)] = 4,
    microbatches: Annotated[
        int, typer.Option(min=0, help="In a step; 0: 16 for each executor.")
    ] = 0,
    redundancy: Annotated[int, typer.Option(min=1, help="Holders of each stage.")] = 2,
    min_workers: Annotated[int, typer.Option(min=1, help="Fewest to work with.")] = 1,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="Optimizer state is split over holders (ZeRO).")
    ] = False,
    forward: Annotated[str, typer.Option(help="A forward of a stage's microbatch.")] = "10ms",
    backward: Annotated[str, typer.Option(help="A backward.")] = "20ms",
    fixed: Annotated[str, typer.Option(help="Sum, vote and update of a step.")] = "10ms",
    stage_mb: Annotated[float, typer.Option(min=0, help="State of a stage, 10^6 bytes.")] = 100,
    bandwidth_mb: Annotated[float, typer.Option(min=1e-3, help="Of a link, 10^6 bytes/s.")] = 1000,
    failures_every: Annotated[
        str | None, typer.Option(help="Mean time between workers' failures in the whole cluster.")
    ] = None,
    worker_mtbf: Annotated[
        str | None, typer.Option(help="Mean time between failures of each worker.")
    ] = None,
    hang_share: Annotated[float, typer.Option(min=0, max=1, help="Of them: hangs.")] = 0.1,
    broken_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of them: the device is away for --repair.")
    ] = 0.25,
    repair: Annotated[str, typer.Option(help="How long a broken device is away.")] = "30m",
    node_failures_every: Annotated[str | None, typer.Option(help="Losses of whole nodes.")] = None,
    rack_failures_every: Annotated[str | None, typer.Option(help="Losses of whole racks.")] = None,
    node_size: Annotated[int, typer.Option(min=1, help="Workers in a node.")] = 8,
    rack_size: Annotated[int, typer.Option(min=1, help="Workers in a rack.")] = 32,
    flapping: Annotated[
        int, typer.Option(min=0, help="Workers that crash every --flap-every each.")
    ] = 0,
    flap_every: Annotated[str, typer.Option(help="See --flapping.")] = "10m",
    stragglers_every: Annotated[str | None, typer.Option(help="Some worker gets slow.")] = None,
    straggler_factor: Annotated[float, typer.Option(min=1, help="So many times.")] = 3.0,
    straggler_time: Annotated[str, typer.Option(help="For so long, on average.")] = "10m",
    partitions_every: Annotated[str | None, typer.Option(help="A rack is cut off.")] = None,
    partition_time: Annotated[str, typer.Option(help="For so long, on average.")] = "30s",
    delay: Annotated[
        str, typer.Option(help="Least and most of a message, with --processes.")
    ] = "0.1ms,1ms",
    loss: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of messages sent again after 200 ms.")
    ] = 0.0,
    trace: Annotated[
        Path | None, typer.Option(help="Spot trace, CSV: time,kind,count (kind: add, remove).")
    ] = None,
    spot_every: Annotated[
        str | None, typer.Option(help="Make a spot trace up, with changes so often on average.")
    ] = None,
    make_trace: Annotated[
        Path | None, typer.Option(help="Write the trace of --spot-every there, and do no more.")
    ] = None,
    warning: Annotated[str, typer.Option(help="Given before a removal in a trace.")] = "0",
    notice: Annotated[str, typer.Option(help="From a crash to its notice.")] = "20ms",
    lease: Annotated[str, typer.Option(help="Silence after which a worker is lost.")] = "5s",
    agree: Annotated[str, typer.Option(help="From the notice to a new generation.")] = "40ms",
    rebuild: Annotated[str, typer.Option(help="From there to its first step.")] = "110ms",
    respawn: Annotated[str, typer.Option(help="From an end to the next life.")] = "500ms",
    save: Annotated[str, typer.Option(help="What a checkpoint takes from training.")] = "1s",
    load: Annotated[str, typer.Option(help="To start from a checkpoint.")] = "5s",
    gang_restart: Annotated[str, typer.Option(help="A restart of all processes.")] = "6.6s",
    no_relayout: Annotated[
        bool, typer.Option("--no-relayout", help="Only ever move little at a change.")
    ] = False,
    histories: Annotated[
        int, typer.Option(min=0, help="Instead: so many random histories of small clusters.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a job with faults on a virtual clock, with the scheduler's own code.

    Times are numbers with ms, s, m, h or d. Exit code 1 where an invariant did not hold.
    """
    if histories:
        _histories(seed, histories, as_json)
        return
    from dtrain.scheduler.plan import Layout
    from dtrain.scheduler.planner import even_cuts
    from dtrain.scheduler.simulator.failures import (
        FailureModel,
        SplitModel,
        StragglerModel,
        draw_spot_trace,
    )
    from dtrain.scheduler.simulator.network import NetworkModel
    from dtrain.scheduler.simulator.scenario import Scenario, simulate
    from dtrain.scheduler.simulator.spec import JobSpec, RecoveryTimes
    from dtrain.scheduler.simulator.steptime import EvenCosts

    def optional(text: str | None, flag: str) -> float | None:
        return None if text is None else seconds(text, flag)

    try:
        duration_s = seconds(duration, "--duration")
        changes = read_trace(trace) if trace is not None else []
        if spot_every is not None:
            if trace is not None:
                raise DtrainError("--spot-every: expected no --trace beside it, got both")
            every_s = seconds(spot_every, "--spot-every")
            changes = draw_spot_trace(seed, workers, duration_s, every_s)
        if make_trace is not None:
            if spot_every is None:
                raise DtrainError("--make-trace: expected --spot-every with it, got none")
            write_trace(make_trace, changes)
            return
        low, _, high = delay.partition(",")
        costs = EvenCosts(
            seconds(forward, "--forward"),
            seconds(backward, "--backward"),
            seconds(fixed, "--fixed"),
        )
        executors = max(1, workers // stages)
        layout = Layout(even_cuts(stages, stages), microbatches or 16 * executors, redundancy)
        job = JobSpec(
            layout,
            workers,
            costs,
            costs.costs(layout),
            min_workers,
            round(stage_mb * 1e6),
            bandwidth_mb * 1e6,
            sharded,
            save_s=seconds(save, "--save"),
            load_s=seconds(load, "--load"),
            gang_restart_s=seconds(gang_restart, "--gang-restart"),
            relayout=not no_relayout,
            times=RecoveryTimes(
                seconds(notice, "--notice"),
                seconds(lease, "--lease"),
                seconds(agree, "--agree"),
                seconds(rebuild, "--rebuild"),
                seconds(respawn, "--respawn"),
            ),
        )
        scenario = Scenario(
            job,
            duration_s,
            seed,
            FailureModel(
                optional(failures_every, "--failures-every"),
                optional(worker_mtbf, "--worker-mtbf"),
                hang_share,
                broken_share,
                seconds(repair, "--repair"),
                optional(node_failures_every, "--node-failures-every"),
                node_size,
                optional(rack_failures_every, "--rack-failures-every"),
                rack_size,
                flapping,
                seconds(flap_every, "--flap-every"),
            ),
            StragglerModel(
                optional(stragglers_every, "--stragglers-every"),
                straggler_factor,
                seconds(straggler_time, "--straggler-time"),
            ),
            SplitModel(
                optional(partitions_every, "--partitions-every"),
                seconds(partition_time, "--partition-time"),
            ),
            changes,
            seconds(warning, "--warning"),
            NetworkModel(seconds(low, "--delay"), seconds(high or low, "--delay"), loss),
        )
        report = simulate(scenario, processes=processes)
    except DtrainError:
        raise
    except ValueError as error:
        raise DtrainError(f"dtrain simulate: {error}") from error
    _print(report, as_json)
    _end(bool(report.violations), report.violations)


def _end(broken: bool, said: list[str]) -> None:
    """Exit code 1 where an invariant did not hold, with what it takes to see it again."""
    if not broken:
        return
    for violation in said:
        print(f"invariant violated: {violation}", file=sys.stderr)
    print(f"again: {_again()}", file=sys.stderr)
    raise typer.Exit(1)


def _again() -> str:
    """The command line that gives the same simulation again."""
    return shlex.join(["dtrain", *sys.argv[1:]])


def _histories(seed: int, count: int, as_json: bool) -> None:
    """Random histories, each a cluster of a few processes with faults at any moment."""
    from dtrain.scheduler.simulator.errors import InvariantError
    from dtrain.scheduler.simulator.histories import any_history

    broken: list[str] = []
    generations = 0
    for number in range(seed, seed + count):
        try:
            generations += len(any_history(number).standing)
        except InvariantError as error:
            broken.append(str(error))
    found = {
        "histories": count,
        "seed": seed,
        "generations": generations,
        "invariant_violations": len(broken),
    }
    if as_json:
        print(json.dumps(found | {"violations": broken}))
    else:
        for name, value in found.items():
            print(f"{name:24} {value}")
    _end(bool(broken), broken)


def _print(report: Report, as_json: bool) -> None:
    raw = report.as_json()
    if as_json:
        print(json.dumps(raw))
        return
    raw.pop("plan_quality")
    raw.pop("violations")
    for name, value in raw.items():
        if not isinstance(value, dict):
            print(f"{name:28} {'-' if value is None else value}")
            continue
        print(name)
        for key, part in sorted(value.items(), key=lambda item: -abs(item[1])):
            share = f"  {part / report.duration_s:8.4%}" if name.startswith("lost") else ""
            print(f"    {key:24} {part:>14}{share}")
