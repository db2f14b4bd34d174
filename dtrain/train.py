"""The torchrun entry: ``torchrun --nproc-per-node=N -m dtrain.train CONFIG ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dtrain.launch.request import add_run_arguments, run_request
from dtrain.launch.supervisor import supervise


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervise one worker of a run; returns the exit code (``dtrain/launch/supervisor.py``)."""
    parser = argparse.ArgumentParser(
        prog="python -m dtrain.train",
        description="One worker of a training run. Started by torchrun; alone, the only worker.",
    )
    add_run_arguments(parser)
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML configuration")
    return supervise(run_request(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
