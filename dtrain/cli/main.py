"""The console script ``dtrain``."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dtrain.cli import bench, checkpoint, data
from dtrain.cli.chaos import chaos_command
from dtrain.cli.env import env_command
from dtrain.cli.eval import eval_command
from dtrain.cli.inject import inject_command
from dtrain.cli.join import join_command
from dtrain.cli.plan import plan_command
from dtrain.cli.run import CONTEXT, USAGE, run_command
from dtrain.cli.simulate import simulate_command
from dtrain.errors import DtrainError

# Typer brings its own copy of this class or takes click's, depending on its version.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="dtrain",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; also after a command.")
    ] = False,
) -> None:
    """Train graph neural networks across many GPUs that fail."""


app.add_typer(data.app, name="data", help="Make and look at graph stores.")
app.add_typer(bench.app, name="bench")
app.add_typer(checkpoint.app, name="checkpoint", help="Look at, verify, compare and export.")
app.command("run", context_settings=CONTEXT, help=USAGE)(run_command)
app.command("join")(join_command)
app.command("plan")(plan_command)
app.command("eval")(eval_command)
app.command("inject")(inject_command)
app.command("chaos")(chaos_command)
app.command("simulate")(simulate_command)
app.command("env")(env_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 well, 1 failed, 2 bad input (one line), 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        code = app(
            args=[word for word in words if word != "--debug"],
            prog_name="dtrain",
            obj=debug,
            standalone_mode=False,
        )
        sys.exit(code if isinstance(code, int) else 0)
    except _UsageError as error:
        sys.exit(_say_usage(error))
    except DtrainError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _say_usage(error: _UsageError) -> int:
    """One line on a command line that cannot be parsed, or help where there was no command."""
    path = error.ctx.command_path if error.ctx is not None else "dtrain"
    message = " ".join(error.format_message().split()).rstrip(".")
    if message.startswith("Usage:"):
        error.show()
    else:
        message = message[:1].lower() + message[1:]
        print(f"error: {path}: {message}; see {path} --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
