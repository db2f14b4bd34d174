"""``dtrain run``."""

from __future__ import annotations

from typing import Annotated

import typer

CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}

USAGE = """Train: dtrain run CONFIG [torchrun's flags] [--set a.b=c]... [--run-dir DIR] [--json].

The same as `torchrun [flags] -m dtrain.train CONFIG ...`, checked before anything starts. Flags
may stand before or after CONFIG. Without a rendezvous flag it is torchrun's --standalone; the
number of workers is --nproc-per-node (default 1). `torchrun --help` lists torchrun's flags.

--set SECTION.FIELD=VALUE overrides a field of the configuration, and may be repeated.
--strict is --set checkpoint.strict=true: a damaged newest checkpoint stops the run.
--run-dir DIR is the run's folder (default runs/NAME-TIME); an unfinished run in it is resumed.
--json prints run.json as the last line of stdout.
"""


def run_command(
    context: typer.Context,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="CONFIG_AND_FLAGS")] = None,
) -> None:
    """Parse and start a job; exits with its exit code."""
    from dtrain.launch.torchrun import launch

    raise typer.Exit(launch(arguments or [], debug=bool(context.obj)))
