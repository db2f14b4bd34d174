"""What a user asks for on a command line, and the checks that come before anything starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from dtrain.config import Config, load_config
from dtrain.data.location import locate
from dtrain.data.meta import META_FILE, GraphMeta, check_sizes, parse_meta
from dtrain.errors import DtrainError
from dtrain.runfolder import RunFolder


@dataclass(frozen=True)
class RunRequest:
    """One call of ``dtrain run`` or ``python -m dtrain.train``.

    ``overrides``: ``section.field=value`` each. ``run_dir``: None for the default.
    """

    config: str
    overrides: tuple[str, ...] = ()
    run_dir: str | None = None
    json_output: bool = False
    debug: bool = False

    def arguments(self) -> list[str]:
        """The request as arguments of ``dtrain.train``."""
        words = [self.config]
        for override in self.overrides:
            words += ["--set", override]
        if self.run_dir is not None:
            words += ["--run-dir", self.run_dir]
        words += ["--json"] * self.json_output + ["--debug"] * self.debug
        return words

    def in_folder(self, run_dir: str | os.PathLike[str]) -> RunRequest:
        """The same request with a run folder."""
        return replace(self, run_dir=os.fspath(run_dir))

    def stable_run_dir(self) -> str:
        """The run folder, by default one that every worker and every restart derives alike."""
        return self.run_dir or str(Path("runs") / Path(self.config).stem)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add dtrain's own flags to a parser."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="override a field of the configuration; may be repeated",
    )
    parser.add_argument(
        "--strict",
        dest="overrides",
        action="append_const",
        const="checkpoint.strict=true",
        help="stop at a damaged newest checkpoint instead of taking the next older",
    )
    parser.add_argument("--run-dir", metavar="DIR", help="the run's folder; resumes the run in it")
    parser.add_argument(
        "--json", action="store_true", help="print run.json as the last line of stdout"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def run_request(parsed: argparse.Namespace) -> RunRequest:
    """The request in a parser's result."""
    return RunRequest(
        config=parsed.config,
        overrides=tuple(parsed.overrides),
        run_dir=parsed.run_dir,
        json_output=parsed.json,
        debug=parsed.debug,
    )


@dataclass(frozen=True)
class CheckedRun:
    """A request that can start: its resolved configuration and its dataset's fingerprint."""

    request: RunRequest
    config: Config
    dataset_fingerprint: str

    def open_folder(self) -> RunFolder:
        """Make or open the run's folder and check that it is this run's.

        Raises:
            DtrainError: it cannot be made, or belongs to a run of another identity.
        """
        folder = RunFolder(self.request.stable_run_dir())
        folder.claim(self.config, self.dataset_fingerprint)
        return folder


def check(request: RunRequest, world_size: int | None) -> CheckedRun:
    """Check all that can be checked in a moment; writes nothing.

    ``world_size``: the number of workers, None where it is not known yet.

    Raises:
        DtrainError: the configuration or the store is bad, or there are too few workers.
    """
    config = load_config(request.config, list(request.overrides))
    least = config.parallel.min_workers
    if world_size is not None and world_size < least:
        raise DtrainError(
            f"parallel.min_workers: expected at least {least} workers, got {world_size}; start "
            "more (--nproc-per-node) or lower it"
        )
    spares = config.parallel.spares
    if world_size is not None and world_size - spares < least:
        raise DtrainError(
            f"parallel.spares: expected at most {world_size - least} of {world_size} workers "
            f"(parallel.min_workers is {least}), got {spares}; start more (--nproc-per-node) or "
            "lower it"
        )
    return CheckedRun(request, config, read_meta(config).fingerprint)


def read_meta(config: Config) -> GraphMeta:
    """What the graph store of a configuration says of itself, read without opening the graph.

    Raises:
        DtrainError: there is no graph store, it is not readable, a file is damaged, or it lacks the
            split.
    """
    store = locate(config.data.store)
    if not store.exists(META_FILE):
        raise DtrainError(
            f"data.store: expected a graph store at {store.url}, got no {META_FILE} there; make "
            "one with dtrain data import or dtrain data synth"
        )
    meta = parse_meta(store.read_bytes(META_FILE), store.url)
    check_sizes(store, meta)
    if config.data.split >= meta.num_splits:
        raise DtrainError(
            f"data.split: expected less than the {meta.num_splits} splits of {store.url}, "
            f"got {config.data.split}"
        )
    return meta
