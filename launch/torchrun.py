"""``dtrain run``: the user's torchrun call, built with torch's own parser and checked first."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dtrain.environment import set_variables, trainer_variables
from dtrain.errors import DtrainError
from dtrain.launch.request import RunRequest, add_run_arguments, check, run_request
from dtrain.runfolder import RunFolder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

WORKER_MODULE = "dtrain.train"


def launch(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run a job as ``torchrun [flags] -m dtrain.train CONFIG ...`` would; returns its exit code.

    ``arguments``: CONFIG, dtrain's own flags and torchrun's flags, in any order. The exit code is
    0 for a job that is done, 2 for bad input, 128 + signal when stopped, 1 otherwise.

    Raises:
        DtrainError: the arguments, the configuration or the store are bad; nothing was started.
    """
    request, torchrun = parse(arguments)
    if debug or request.debug:
        request = replace(request, debug=True)
    run = check(request, _world_size(torchrun))
    if request.run_dir is None and torchrun.nnodes == "1":
        # With more nodes, each has its own clock: they fall back on the name that all derive alike.
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        request = request.in_folder(f"{request.stable_run_dir()}-{stamp}")
    folder = check(request, None).open_folder()
    torchrun.module = True
    torchrun.training_script = WORKER_MODULE
    torchrun.training_script_args = request.arguments()
    # torchrun would choose it, with a warning, and the workers would then set it anyway.
    set_variables(trainer_variables(run.config.parallel.threads_per_worker))
    started_s = time.time()
    end = _run(torchrun, request.debug)
    if end.code not in (0, 2):
        _say_failure(end, folder, started_s)
    return end.code


def parse(arguments: Sequence[str]) -> tuple[RunRequest, argparse.Namespace]:
    """Split a command line into dtrain's request and torchrun's arguments.

    Raises:
        DtrainError: an unknown flag, a bad value, or not exactly one CONFIG.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    add_run_arguments(parser)
    parser.error = _refuse  # type: ignore[method-assign]
    # torch's parser takes all that follows the script as the script's own. So: what stands before
    # CONFIG first, then what followed it, as if CONFIG came last.
    parsed = parser.parse_args(list(arguments))
    config, rest = parsed.training_script, parsed.training_script_args
    parsed = parser.parse_args([*rest, config], namespace=parsed)
    extra = [
        word for word in (parsed.training_script, *parsed.training_script_args) if word != config
    ]
    if extra:
        raise DtrainError(f"dtrain run: expected one CONFIG, got {config} and {extra[0]}")
    for flag in ("module", "no_python", "run_path"):
        if getattr(parsed, flag, False):
            raise DtrainError(
                f"dtrain run: --{flag.replace('_', '-')} is set by dtrain run itself; leave it out"
            )
    parsed.config = config
    _default_rendezvous(parsed, parser)
    return run_request(parsed), parsed


def _default_rendezvous(parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """One node and no word about a rendezvous: torchrun's ``--standalone``, a free port."""
    names = ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "master_addr", "master_port", "node_rank")
    untouched = all(getattr(parsed, name) == parser.get_default(name) for name in names)
    # torchrun's own default is "1:1", the elastic spelling of one node.
    if parsed.nnodes in ("1", "1:1"):
        parsed.nnodes = "1"
        parsed.standalone = parsed.standalone or untouched


def _refuse(message: str) -> NoReturn:
    if "training_script" in message:
        message = "expected the CONFIG to run, got none"
    raise DtrainError(f"dtrain run: {message}; see dtrain run --help")


def _world_size(torchrun: argparse.Namespace) -> int | None:
    """The number of workers, where the flags say it in numbers."""
    nodes, each = str(torchrun.nnodes), str(torchrun.nproc_per_node)
    return int(nodes) * int(each) if nodes.isdigit() and each.isdigit() else None


@dataclass(frozen=True)
class _JobEnd:
    """A job's exit code, and its cause where torchrun knows it best."""

    code: int
    cause: str | None = None


def _run(torchrun: argparse.Namespace, debug: bool) -> _JobEnd:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    if not debug:
        # The supervisors say in one line each what happened; torchrun's account is a page.
        logging.disable(logging.ERROR)
    try:
        run(torchrun)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        if debug:
            print(error, file=sys.stderr)
        codes = {failure.exitcode for failure in error.failures.values()}
        return _JobEnd(2 if 2 in codes else 1, _killed_supervisor(error))
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        return _JobEnd(128 + int(error.sigval), f"the run was stopped by {name}")
    except KeyboardInterrupt:
        return _JobEnd(128 + signal.SIGINT, "the run was stopped by SIGINT")
    except Exception as error:
        if debug:
            raise
        return _JobEnd(1, f"torchrun: {type(error).__name__}: {' '.join(str(error).split())}")
    finally:
        logging.disable(logging.NOTSET)
    return _JobEnd(0)


def _killed_supervisor(error: ChildFailedError) -> str | None:
    """Who was killed, if the first to fail was: all others leave events behind."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return None
    name = signal.Signals(-failure.exitcode).name
    return f"the run failed; first: the supervisor of worker {rank} was killed by {name}"


def _say_failure(end: _JobEnd, folder: RunFolder, started_s: float) -> None:
    """One line on why, one on how to go on; what a run that is done says, its worker 0 says."""
    where = _short(folder.path)
    print(f"error: {end.cause or _cause(folder, started_s)}", file=sys.stderr)
    print(
        f"run folder {where}: the same command with --run-dir {where} resumes from its newest "
        "checkpoint",
        file=sys.stderr,
    )


def _cause(folder: RunFolder, started_s: float) -> str:
    """Why the first supervisor ended that could not go on in place."""
    for event in folder.events():
        if event.get("exit_code") == 1 and event["time"] >= started_s:
            return f"the run failed; first: worker {event['worker']}, {event['reason']}"
    return "the run failed; torchrun's account is shown with --debug"


def _short(path: Path) -> str:
    """The path as a person would type it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
