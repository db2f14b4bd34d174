"""Trainers that do one thing, and a script that supervises the one that is named.

``python launch_stubs.py TRAINER CONFIG [flags]`` is the supervisor of ``launch_stubs:TRAINER``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dtrain.errors import (
    CannotGoOnError,
    DtrainError,
    EvictedError,
    LeftError,
    PeerLostError,
    ShutdownError,
    StoreLostError,
)
from dtrain.runfolder import RunFolder, RunRecord
from dtrain.runtime.heartbeat import Heartbeat
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


def leaves_alone(spec: TrainerSpec) -> None:
    def leave(*_: object) -> None:
        raise LeftError("left at step 3")

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


def worker_1_cannot_go_on_once(spec: TrainerSpec) -> None:
    marker = Path(spec.run_dir, "failed")
    if spec.worker == 1 and not marker.exists():
        marker.touch()
        raise CannotGoOnError("first try")


def life(spec: TrainerSpec) -> int:
    """How many trainers the worker has had, this one included."""
    folder = Path(spec.run_dir, "lives")
    folder.mkdir(exist_ok=True)
    Path(folder, f"{spec.worker}-{spec.incarnation}").touch()
    return len(list(folder.glob(f"{spec.worker}-*")))


def raising(error: Exception) -> Callable[[TrainerSpec], None]:
    def trainer(spec: TrainerSpec) -> None:
        raise error

    return trainer


leaves_the_job = raising(LeftError("left at step 3"))
is_stopped = raising(ShutdownError("all saved at step 3"))
loses_store = raising(StoreLostError("the store does not answer"))
cannot_go_on = raising(CannotGoOnError("stage 1 has no holder"))


def exits_1(spec: TrainerSpec) -> None:
    os._exit(1)


def segfaults(spec: TrainerSpec) -> None:
    ctypes.string_at(0)


def fails_and_stays(spec: TrainerSpec) -> None:
    threading.Thread(target=time.sleep, args=(100,)).start()
    raise RuntimeError("loss is 7")


ENDS: tuple[Callable[[TrainerSpec], object], ...] = (
    exits_0,
    segfaults,
    raising(EvictedError("generation 4 goes on without it")),
    fails_and_stays,
)


def dies_in_turn(spec: TrainerSpec) -> None:
    """Dies in another way in each life, until there is none left."""
    number = life(spec)
    if number <= len(ENDS):
        ENDS[number - 1](spec)


def loses_peer_once(spec: TrainerSpec) -> None:
    if spec.worker == 1 and life(spec) == 1:
        raise PeerLostError("worker 3 is gone")


def completes_and_dies(spec: TrainerSpec) -> None:
    RunFolder(spec.run_dir).write_run(RunRecord("done", steps=1))
    os._exit(1)


def writes(spec: TrainerSpec) -> None:
    """Writes its incarnation and the time into one file, again and again."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(spec.run_dir, f"born-{spec.incarnation}").write_text(str(time.monotonic()))
    with Path(spec.run_dir, "written").open("a", buffering=1) as file:
        ready(spec)
        while True:
            file.write(f"{spec.incarnation} {time.time()}\n")
            time.sleep(0.005)


def hold_gil(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def loop() -> None:
    while True:
        pass


def hangs_in_turn(spec: TrainerSpec, heartbeat: Heartbeat) -> None:
    """Hangs in another way in each life, in step 7, until there is none left."""
    number = life(spec)
    heartbeat.phase(f"action {number}", 7)
    if number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif number == 2:
        hold_gil(100)
    elif number == 3:
        loop()


def locks_gil(spec: TrainerSpec) -> None:
    ready(spec)
    hold_gil(100)


def slow_but_alive(spec: TrainerSpec, heartbeat: Heartbeat) -> None:
    """A long first step that holds the GIL for half a second at a time, then a long wait."""
    heartbeat.phase("forward of microbatch 0", 0)
    for _ in range(3):
        hold_gil(0.5)
    heartbeat.phase("receive from worker 1", 0, waiting=True)
    time.sleep(2.3)


def agrees(spec: TrainerSpec, heartbeat: Heartbeat) -> None:
    heartbeat.phase("agreeing", 0, waiting=True)
    stays(spec)


def joins(spec: TrainerSpec) -> None:
    place = spec.worker, spec.world_size, spec.local_rank, spec.store_port, spec.host_store
    # Renamed into place, because the test reads it as soon as it is there.
    unfinished = Path(spec.run_dir, f"unfinished-{spec.worker}")
    unfinished.write_text(json.dumps(place))
    unfinished.rename(Path(spec.run_dir, f"joined-{spec.worker}"))
    leaves_alone(spec)


def tells_place(spec: TrainerSpec) -> None:
    """Says on its output what it has from its supervisor, and stays until it is told to leave."""
    umask = os.umask(0)
    os.umask(umask)
    open_files = {}
    for name in os.listdir("/proc/self/fd"):
        # The one that listed them is closed again.
        with contextlib.suppress(FileNotFoundError):
            open_files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    place = {
        "rank": os.environ["RANK"],
        "devices": os.environ["CUDA_VISIBLE_DEVICES"],
        "folder": os.getcwd(),
        "umask": umask,
        "arguments": sys.argv,
        "stdin": open_files[0],
        "held": sorted(f.partition(":")[0] for number, f in open_files.items() if number > 2),
    }
    print(json.dumps(place), flush=True)
    print(f"stderr of {spec.worker}", file=sys.stderr, flush=True)
    leaves_alone(spec)


def main(arguments: list[str]) -> int:
    from dtrain.launch.request import RunRequest
    from dtrain.launch.supervisor import supervise

    name, config, run_dir, *rest = arguments
    overrides = [word.removeprefix("--set=") for word in rest if word.startswith("--set=")]
    request = RunRequest(config, tuple(overrides), run_dir=run_dir)
    preload = [word.removeprefix("--preload=") for word in rest if word.startswith("--preload=")]
    code = supervise(request, entry=f"launch_stubs:{name}", preload=preload)
    heavy = [module for module in HEAVY if module in sys.modules]
    if heavy:
        print(f"the supervisor imported {heavy}", file=sys.stderr)
        return 99
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
