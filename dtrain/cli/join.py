"""``dtrain join``."""

from __future__ import annotations

from typing import Annotated

import typer


def join_command(
    context: typer.Context,
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="The job's run folder.")],
    workers: Annotated[int, typer.Option(min=1, help="How many, on this machine.")] = 1,
) -> None:
    """Add workers on this machine to a job that runs, until it ends; nothing is restarted.

    They enter at a step boundary. Ctrl-C lets them leave at one, and the job goes on.
    """
    from dtrain.launch.join import join

    raise typer.Exit(join(run_dir, workers, debug=bool(context.obj)))
