"""``dtrain bench``: measure on this machine, against what a user would pick instead."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure on this machine.")


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
