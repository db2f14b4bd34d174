"""Trainers that do one thing, and a script that supervises the one that is named.

``python launch_stubs.py TRAINER CONFIG [flags]`` is the supervisor of ``launch_stubs:TRAINER``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from dtrain.errors import DtrainError, ShutdownError
from dtrain.runtime.spec import TrainerSpec

HEAVY = ("torch", "numpy", "numba", "deepspeed")


def ready(spec: TrainerSpec) -> None:
    Path(spec.run_dir, f"ready-{spec.worker}").touch()


def done(spec: TrainerSpec) -> None:
    print(f"worker {spec.worker} of {spec.world_size}, {os.environ['OMP_NUM_THREADS']} threads")


def exits_0(spec: TrainerSpec) -> None:
    os._exit(0)


def system_exit_0(spec: TrainerSpec) -> None:
    sys.exit(0)


def bad_input(spec: TrainerSpec) -> None:
    raise DtrainError("data.store: array labels is truncated;\n import the graph again")


def raises(spec: TrainerSpec) -> None:
    raise RuntimeError("loss is 7")


def sleeps(spec: TrainerSpec) -> None:
    ready(spec)
    time.sleep(100)


def stays(spec: TrainerSpec) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeps(spec)


def leaves(spec: TrainerSpec) -> None:
    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise ShutdownError("saved at step 3")

    signal.signal(signal.SIGTERM, leave)
    sleeps(spec)


def finishes(spec: TrainerSpec) -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    ready(spec)
    while not told:
        time.sleep(0.01)


def hangs_after_done(spec: TrainerSpec) -> None:
    threading.Thread(target=time.sleep, args=(100,)).start()


def worker_1_fails_once(spec: TrainerSpec) -> None:
    marker = Path(spec.run_dir, "failed")
    if spec.worker == 1 and not marker.exists():
        marker.touch()
        raise RuntimeError("first try")


def main(arguments: list[str]) -> int:
    from dtrain.launch.request import RunRequest
    from dtrain.launch.supervisor import supervise

    name, config, run_dir, *rest = arguments
    request = RunRequest(config, run_dir=run_dir)
    preload = [word.removeprefix("--preload=") for word in rest if word.startswith("--preload=")]
    code = supervise(request, entry=f"launch_stubs:{name}", preload=preload)
    heavy = [module for module in HEAVY if module in sys.modules]
    if heavy:
        print(f"the supervisor imported {heavy}", file=sys.stderr)
        return 99
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
