"""``dtrain inject``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.faults.spec import FaultSpec

_KINDS = "crash, hang, slow, network, numeric, disk, store, agent, node, preempt, module:attribute"


def inject_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A live run's folder.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help=_KINDS)],
    worker: Annotated[str, typer.Option("--worker", help="A number, random or all.")] = "random",
    how: Annotated[str | None, typer.Option("--how", help="Which way, such as sigkill.")] = None,
    phase: Annotated[
        str | None, typer.Option("--phase", help="Strike in this phase; default at once.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Strike from this step on, counted from 0.")
    ] = None,
    point: Annotated[
        str | None, typer.Option("--point", help="Strike at this point of a checkpoint's save.")
    ] = None,
    factor: Annotated[float | None, typer.Option("--factor", help="slow: how much.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="How long it lasts.")] = None,
    delay_s: Annotated[float | None, typer.Option("--delay-s", help="network delay.")] = None,
    to: Annotated[
        list[int] | None, typer.Option("--to", help="network: a peer; may be repeated.")
    ] = None,
    stage: Annotated[int | None, typer.Option("--stage", help="numeric: only here.")] = None,
    microbatch: Annotated[
        int | None, typer.Option("--microbatch", help="numeric: only in this one.")
    ] = None,
    count: Annotated[int | None, typer.Option("--count", help="How often; 0: always.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of its random choices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a fault happen to a run that is under way."""
    from dtrain.faults.live import inject

    given = {
        "how": how,
        "phase": phase,
        "step": step,
        "point": point,
        "factor": factor,
        "seconds": seconds,
        "delay_s": delay_s,
        "to": to or None,
        "stage": stage,
        "microbatch": microbatch,
        "count": count,
        "seed": seed,
    }
    spec = check_fault(kind, worker, {k: v for k, v in given.items() if v is not None})
    done = inject(run_dir, spec)
    if as_json:
        typer.echo(json.dumps({"injected": [asdict(one) for one in done]}))
        return
    for one in done:
        if one.delivery == "signal":
            where = ", ".join(map(str, one.targets))
            typer.echo(f"worker {one.worker}: {spec.describe()}: done to process {where}")
        else:
            typer.echo(
                f"worker {one.worker}: {spec.describe()}: handed to its trainer (process {one.pid})"
            )


def check_fault(kind: str, worker: str, given: dict[str, Any]) -> FaultSpec:
    """The fault that the options describe.

    Raises:
        DtrainError: one line that names the option, what was expected and what came.
    """
    from pydantic import ValidationError

    from dtrain.faults.spec import FaultSpec

    victim = int(worker) if worker.lstrip("-").isdigit() else worker
    try:
        return FaultSpec(kind=kind, worker=victim, **given)
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{part}: " for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        raise DtrainError(f"dtrain inject: {where}{message}") from error
