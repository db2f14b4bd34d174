"""Trainers that do one thing, and a script that supervises the one that is named.

``python launch_stubs.py TRAINER CONFIG [flags]`` is the supervisor of ``launch_stubs:TRAINER``.
"""

from __future__ import annotations

import ctypes
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


def second_life_is_done(end: Callable[[TrainerSpec], object]) -> Callable[[TrainerSpec], None]:
    """A trainer that ends badly in its first life and well in its second."""

    def trainer(spec: TrainerSpec) -> None:
        if life(spec) == 1:
            end(spec)

    return trainer


def raising(error: Exception) -> Callable[[TrainerSpec], None]:
    def trainer(spec: TrainerSpec) -> None:
        raise error

    return trainer


exits_0_once = second_life_is_done(exits_0)
exits_1_once = second_life_is_done(lambda spec: os._exit(1))
segfaults_once = second_life_is_done(lambda spec: ctypes.string_at(0))
raises_once = second_life_is_done(raises)
loses_peer_once = second_life_is_done(raising(PeerLostError("worker 3 is gone")))
evicted_once = second_life_is_done(raising(EvictedError("generation 4 goes on without it")))
leaves_the_job = raising(LeftError("left at step 3"))
is_stopped = raising(ShutdownError("all saved at step 3"))
loses_store = raising(StoreLostError("the store does not answer"))
cannot_go_on = raising(CannotGoOnError("stage 1 has no holder"))


def lingers_after_failure(spec: TrainerSpec) -> None:
    if life(spec) == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()
        raise RuntimeError("loss is 7")


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


def hangs_in_stop(heartbeat: Heartbeat) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hangs_in_gil(heartbeat: Heartbeat) -> None:
    hold_gil(100)


def hangs_in_loop(heartbeat: Heartbeat) -> None:
    while True:
        pass


def hanging(hang: Callable[[Heartbeat], None]) -> Callable[[TrainerSpec, Heartbeat], None]:
    """A trainer that hangs in its first life, in step 7."""

    def trainer(spec: TrainerSpec, heartbeat: Heartbeat) -> None:
        heartbeat.phase("backward of microbatch 2", 7)
        if life(spec) == 1:
            hang(heartbeat)

    return trainer


stops = hanging(hangs_in_stop)
locks_gil = hanging(hangs_in_gil)
loops = hanging(hangs_in_loop)


def slow_but_alive(spec: TrainerSpec, heartbeat: Heartbeat) -> None:
    """A long first step that holds the GIL for half a second at a time, then a long wait."""
    heartbeat.phase("forward of microbatch 0", 0)
    for _ in range(4):
        hold_gil(0.5)
    heartbeat.phase("receive from worker 1", 0, waiting=True)
    time.sleep(2.5)


def gathers(spec: TrainerSpec, heartbeat: Heartbeat) -> None:
    heartbeat.phase("gathering", 0, waiting=True)
    stays(spec)


def gives_address(spec: TrainerSpec) -> None:
    print(spec.worker, spec.world_size, spec.local_rank, spec.store_port, spec.host_store)


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
