"""``dtrain chaos``."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.chaos.runner import Verdict
    from dtrain.chaos.scenario import Scenario


def chaos_command(
    show_list: Annotated[bool, typer.Option("--list", help="Name the scenarios.")] = False,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="Run this one; may be repeated.")
    ] = None,
    run_all: Annotated[bool, typer.Option("--all", help="Run every scenario.")] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Each with both models and both ZeRO stages.")
    ] = False,
    soak: Annotated[
        float | None,
        typer.Option("--soak", metavar="MINUTES", help="Run random schedules for so long."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random schedules.")] = 0,
    model: Annotated[
        str | None, typer.Option("--model", help="sage or gcn; a soak draws it, else sage.")
    ] = None,
    zero: Annotated[
        int | None, typer.Option("--zero", help="ZeRO stage 0 or 1; a soak draws it, else 0.")
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where graph and runs go.")] = Path(
        "runs/chaos"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep run folders that passed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run jobs under faults and compare them with the same jobs without.

    Exit code 0 when all scenarios passed that could be run, 1 otherwise.
    """
    from dtrain.chaos.base import MODELS, ZERO_STAGES
    from dtrain.chaos.catalog import catalog, scenario_named
    from dtrain.chaos.runner import as_json as verdicts_as_json

    if show_list:
        _list(list(catalog().values()), as_json)
        return
    if sum((bool(scenario), run_all, soak is not None)) != 1:
        raise DtrainError(
            "dtrain chaos: expected one of --list, --scenario NAME, --all, --soak MINUTES; see "
            "dtrain chaos --help"
        )
    verdicts: list[Verdict] = []
    if soak is not None:
        verdicts = _soak(soak, seed, model, zero, folder, keep)
    else:
        models = MODELS if matrix and model is None else (model or "sage",)
        stages = ZERO_STAGES if matrix and zero is None else (zero or 0,)
        names = list(catalog()) if run_all else scenario or []
        for one in [scenario_named(name) for name in names]:
            for its_model, its_zero in product(models, stages):
                verdicts.append(_run(one, folder, its_model, its_zero, keep))
    if as_json:
        typer.echo(json.dumps(verdicts_as_json(verdicts)))
    else:
        _table(verdicts)
    raise typer.Exit(int(any(v.passed is False for v in verdicts)))


def _run(scenario: Scenario, folder: Path, model: str, zero: int, keep: bool) -> Verdict:
    from dtrain.chaos.runner import Runner

    runner = Runner(folder, model=model, zero=zero, keep=keep, say=_say)
    verdict = runner.run(scenario)
    words = {True: "passed", False: "failed", None: "skipped"}[verdict.passed]
    _say("; ".join([f"{scenario.name}: {words} in {verdict.wall_s:g} s", *verdict.reasons]))
    return verdict


def _soak(
    minutes: float, seed: int, model: str | None, zero: int | None, folder: Path, keep: bool
) -> list[Verdict]:
    from dtrain.chaos.soak import schedules

    _say(f"soak: {minutes:g} minutes, --seed {seed}")
    end = time.monotonic() + 60 * minutes
    verdicts = []
    for scenario, its_model, its_zero in schedules(seed, model=model, zero=zero):
        if time.monotonic() >= end:
            break
        verdicts.append(_run(scenario, folder, its_model, its_zero, keep))
    return verdicts


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the result's."""
    typer.echo(text, err=True)


def _list(scenarios: list[Scenario], as_json: bool) -> None:
    if as_json:
        listed = [{"name": s.name, "about": s.about, "hosts": s.hosts} for s in scenarios]
        typer.echo(json.dumps({"scenarios": listed}))
        return
    width = max(len(s.name) for s in scenarios)
    for one in scenarios:
        typer.echo(f"{one.name:<{width}}  {one.about}")


def _table(verdicts: list[Verdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("scenario", "model", "ZeRO", "result", "recovery s", "replayed", "lost", "s"):
        table.add_column(column)
    for v in verdicts:
        result = {True: "passed", False: "failed", None: "skipped"}[v.passed]
        table.add_row(
            v.scenario,
            v.model,
            str(v.zero),
            result,
            "-" if v.recovery_s is None else f"{v.recovery_s:g}",
            str(v.steps_replayed),
            str(v.steps_lost),
            f"{v.wall_s:g}",
        )
    Console().print(table)
    for v in verdicts:
        for reason in v.reasons:
            typer.echo(f"{v.scenario}: {reason}")
