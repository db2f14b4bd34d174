"""``dtrain bench``: measure on this machine, against what a user would pick instead."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli import bench_speed

app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")
app.command("kernels")(bench_speed.kernels)
app.command("sample")(bench_speed.sample)
app.command("train")(bench_speed.train)


@app.command()
def recovery(
    kills: Annotated[int, typer.Option(min=1, help="trainers killed, one after the other")] = 10,
    workers: Annotated[int, typer.Option(min=2)] = 4,
    restarts: Annotated[int, typer.Option(min=0, help="torchrun restarts, for comparison")] = 3,
    stops: Annotated[int, typer.Option(min=0, help="trainers stopped by SIGSTOP")] = 3,
    nodes: Annotated[int, typer.Option(min=1000, help="nodes of the generated graph")] = 100_000,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """From a kill to the next committed step, to full strength, and torchrun's restart instead."""
    from dtrain.bench.recovery import bench_recovery

    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        result = bench_recovery(
            Path(folder),
            kills=kills,
            workers=workers,
            restarts=restarts,
            stops=stops,
            nodes=nodes,
        )
    if as_json:
        print(json.dumps(asdict(result)))
        return
    for name, value in asdict(result).items():
        print(f"{name:24} {value}")


@app.command("checkpoint")
def checkpoint_command(
    megabytes: Annotated[int, typer.Option(help="Size of the state in 10^6 bytes.")] = 400,
    repeats: Annotated[int, typer.Option(help="Repetitions; medians are reported.")] = 7,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="A folder on the disk to measure; default a temporary one.")
    ] = None,
    snapshot_pairs: Annotated[
        int, typer.Option(help="Steps with a snapshot, among thrice as many; 0: not measured.")
    ] = 100,
    graph: Annotated[
        str | None, typer.Option(help="Store for these steps; default a generated graph.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure what checkpoints and snapshots in peer memory cost, beside torch.save and DCP."""
    from dtrain.bench.checkpoint import run

    report = run(
        megabytes,
        repeats,
        threads,
        folder,
        lambda text: typer.echo(text, err=True),
        snapshot_pairs=snapshot_pairs,
        graph=graph,
    )
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    rows = [
        ("stall of training / memory copy", report.stall_vs_memcpy),
        ("stall of training / DCP's async_save", report.stall_vs_dcp_async),
        ("slowdown of training / DCP's async_save", report.slowdown_vs_dcp_async),
        ("throughput of a save / torch.save", report.save_vs_torch_save),
        ("time to load / DCP's", report.load_vs_dcp),
    ]
    for what, ratio in rows:
        typer.echo(f"{what:42s} {ratio:6.2f}")
    for name, seconds in report.seconds.items():
        low, high = report.spread[name]
        typer.echo(f"  {name:16s} {seconds * 1e3:8.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f})")
    for name, share in report.slowdown.items():
        typer.echo(f"  training while saving, {name}: {share:.0%} slower")
    if report.snapshot_overhead_pct is not None:
        typer.echo(
            f"a snapshot to a peer at each step: {report.snapshot_overhead_pct:+.1f} % step time "
            "(95 %: {:+.1f} to {:+.1f})".format(*report.snapshot["interval_pct"])
        )


@app.command()
def schedule(
    store: Annotated[
        list[str] | None, typer.Option(help="graph store to take microbatches of; may be repeated")
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=0, help="nodes of the generated graph; 0: none")
    ] = 1_000_000,
    real: Annotated[bool, typer.Option(help="train on the graphs to test predictions")] = True,
    steps: Annotated[int, typer.Option(min=5, help="steps to predict, after 20 to fit")] = 40,
    workers: Annotated[int, typer.Option(min=1, help="workers of the real runs")] = 2,
    repeats: Annotated[
        int, typer.Option(min=1, help="real runs of each job, for medians of actions' times")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Plans against 1F1B and bounds, predictions against real runs, and planning at scale."""
    from dtrain.bench.schedule import bench_schedule, summary

    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as folder:
        result = bench_schedule(
            Path(folder),
            stores=store or [],
            nodes=nodes,
            real=real,
            steps=steps,
            workers=workers,
            repeats=repeats,
            say=lambda text: typer.echo(text, err=True),
        )
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    for line in summary(result):
        typer.echo(line)
