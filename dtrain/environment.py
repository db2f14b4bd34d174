"""The one place that reads and sets environment variables.

The user's own variables have the prefix ``DTRAIN_``; the others are torchrun's, or those that
libraries read when a trainer imports them.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrain.errors import DtrainError

DEFAULT_GRACE_S = 25.0
"""Below torchrun's own 30 s, so that a trainer is ended by its supervisor and never by torchrun."""

_PER_WORKER = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "ROLE_RANK",
        "TORCHELASTIC_ERROR_FILE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    )
)
"""What tells one worker of a node from another, and is not looked at when modules are imported."""

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg", "/dev/accel")


@dataclass(frozen=True)
class WorkerPlace:
    """Where a supervisor stands among the others.

    ``host_store``: the worker must host the TCPStore itself, since no torchrun agent does.
    ``restart``: how often torchrun has restarted the workers of this node (for messages only; the
    nodes need not agree on it). ``run_id``: torchrun's name for the job.
    """

    worker: int
    world_size: int
    local_rank: int
    store_host: str
    store_port: int
    host_store: bool
    restart: int
    run_id: str = ""


def worker_place(environ: Mapping[str, str] = os.environ) -> WorkerPlace:
    """Read torchrun's variables; without them, the place of a single worker on a free port.

    Raises:
        DtrainError: some of torchrun's variables are missing or not whole numbers.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return WorkerPlace(0, 1, 0, "127.0.0.1", _free_port(), True, 0)
    rank = _whole_number(environ, "RANK")
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    return WorkerPlace(
        worker=rank,
        world_size=_whole_number(environ, "WORLD_SIZE"),
        local_rank=_whole_number(environ, "LOCAL_RANK"),
        store_host=_present(environ, "MASTER_ADDR"),
        store_port=_whole_number(environ, "MASTER_PORT"),
        host_store=rank == 0 and not agent_store,
        restart=_whole_number(environ, "TORCHELASTIC_RESTART_COUNT", default="0"),
        run_id=_present(environ, "TORCHELASTIC_RUN_ID", default=""),
    )


def place_variables(place: WorkerPlace, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The whole environment of a supervisor that is to stand at ``place``, as torchrun would
    give it; the store is never hosted by its trainer."""
    return dict(environ) | {
        "RANK": str(place.worker),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.store_host,
        "MASTER_PORT": str(place.store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(place.restart),
        "TORCHELASTIC_RUN_ID": place.run_id,
    }


def failure_domains(hostname: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names of the domains that fail together with this node, from the largest to the node itself.

    ``DTRAIN_FAILURE_DOMAIN`` names what the node lies in, as in ``zone2/rack17``.
    """
    outer = environ.get("DTRAIN_FAILURE_DOMAIN", "")
    return (*(part for part in outer.split("/") if part), hostname)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def grace_s(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds that a trainer has to leave after SIGTERM (``DTRAIN_GRACE_S``, default 25).

    Raises:
        DtrainError: the variable is not a number of at least 0.
    """
    text = environ.get("DTRAIN_GRACE_S")
    if text is None:
        return DEFAULT_GRACE_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise DtrainError(f"DTRAIN_GRACE_S: expected seconds of at least 0, got {text!r}; mend it")
    return value


def trainer_variables(
    threads_per_worker: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables that a trainer's process must have before it imports torch.

    Thread counts are part of the run and always set. A value of the user's own stays for
    ``MKL_CBWR``, ``CUBLAS_WORKSPACE_CONFIG``, the cache folders, ``DS_ACCELERATOR`` and those
    that only decide speed: threads that wait for work sleep instead of taking the cores of those
    that sample, large tensors lie in huge pages, and freed memory is used again instead of being
    given back and zeroed anew at each step (a GraphSAGE step on the CPU took 25 ms instead of 30).

    ``MKL_CBWR=AUTO`` fixes MKL's cache sizes, schedules and reductions, so that a product has the
    same bits in every process on one model of CPU whatever the alignment of its operands, and it
    costs nothing measurable (sgemm at 113, 148 and 163 GFLOP/s against 112, 147 and 156 without,
    one thread, AVX-512). Where workers have CPUs of different models, ``AVX2`` gives equal bits at
    half that speed and ``COMPATIBLE`` at a fifth.
    """
    threads = str(threads_per_worker)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "NUMBA_NUM_THREADS": threads,
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        # torch then asks NVML and not CUDA whether there are devices: CUDA must not be
        # initialised in the process that trainers are forked from.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    defaults = {
        "MKL_CBWR": "AUTO",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "OMP_WAIT_POLICY": "PASSIVE",
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }
    if not any(Path(device).exists() for device in _DEVICE_FILES):
        # DeepSpeed otherwise warns on stdout, in every process, that it found no device.
        defaults["DS_ACCELERATOR"] = "cpu"
    package = Path(__file__).resolve().parent
    if not os.access(package, os.W_OK):
        defaults["NUMBA_CACHE_DIR"] = str(_user_cache(environ) / "dtrain" / "numba")
    home = environ.get("HOME", "")
    if not (home and os.access(home, os.W_OK)):
        defaults["TRITON_CACHE_DIR"] = str(_user_cache(environ) / "dtrain" / "triton")
    return fixed | {name: environ.get(name, value) for name, value in defaults.items()}


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables for this process and those that it starts."""
    os.environ.update(variables)


def with_variables(
    variables: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """This process's environment with ``variables``, for a process to be started."""
    return dict(environ) | dict(variables)


def replace_variables(variables: Mapping[str, str]) -> None:
    """Make ``variables`` the whole environment of this process."""
    os.environ.clear()
    os.environ.update(variables)


def shared_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The part of the environment in which the workers of one agent agree.

    An empty list of devices stays in it: libraries then take the node for one without any.
    """
    return {name: value for name, value in environ.items() if name not in _PER_WORKER or not value}


def real_graphs(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of published graphs that tests and benchmarks use (``DTRAIN_TEST_DATA``)."""
    folder = environ.get("DTRAIN_TEST_DATA")
    return Path(folder) if folder else None


def default_variable(name: str, value: str) -> None:
    """Set a variable unless the user has."""
    os.environ.setdefault(name, value)


def _user_cache(environ: Mapping[str, str]) -> Path:
    """A writable folder for caches: the user's, or a private one under the temporary folder."""
    home = environ.get("HOME", "")
    cache = Path(
        environ.get("XDG_CACHE_HOME") or (Path(home) / ".cache" if home else "/nonexistent")
    )
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if os.access(nearest, os.W_OK):
        return cache
    return Path(tempfile.gettempdir()) / f"dtrain-cache-{os.getuid()}"


def _present(environ: Mapping[str, str], name: str, default: str | None = None) -> str:
    text = environ.get(name, default)
    if text is None:
        raise DtrainError(
            f"environment variable {name}: expected torchrun's value, got none; start the workers "
            "with torchrun or dtrain run"
        )
    return text


def _whole_number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = _present(environ, name, default)
    try:
        return int(text)
    except ValueError:
        raise DtrainError(
            f"environment variable {name}: expected a whole number, got {text!r}"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
