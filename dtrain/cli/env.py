"""``dtrain env``: what this machine offers, what is missing and how to get it."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
from typing import Annotated, Any

import typer

from dtrain.environment import usable_cores

EXTRAS = {
    "pyg": ("torch_geometric", "PyG datasets and convolutions as layers"),
    "ogb": ("ogb", "OGB datasets"),
    "dgl": ("dgl", "DGL datasets"),
    "parquet": ("pyarrow", "edge lists in Parquet"),
    "s3": ("s3fs", "stores and checkpoints on s3://"),
    "export": ("safetensors", "exports as safetensors"),
    "triton": ("triton", "GPU kernels"),
    "tensorboard": ("tensorboard", "scalars for TensorBoard"),
    "dev": ("pytest", "the tests and checks"),
}


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show versions, devices, backends, and the extras that are missing and how to get them."""
    found = environment_report()
    if as_json:
        print(json.dumps(found))
        return
    for name, version in found["versions"].items():
        print(f"{name:<12} {version}")
    print(f"{'platform':<12} {found['platform']}")
    print(f"{'cpu':<12} {found['cpu']['model']}, {found['cpu']['usable_cores']} usable cores")
    for device in found["devices"]:
        print(f"{'device':<12} {device['name']}, {device['memory_bytes'] / 2**30:.1f} GiB")
    if not found["devices"]:
        print(f"{'device':<12} no GPU: trainers run on the CPU")
    for device, how in found["kernels"].items():
        print(f"{'kernels':<12} {device}: {how}")
    print(f"{'backends':<12} {', '.join(found['backends'])}")
    print(f"{'threads':<12} one per worker unless parallel.threads_per_worker says otherwise")
    print(f"{'compiler':<12} {found['compiler'] or 'none'} (only GPU kernels need one)")
    for extra in found["missing"]:
        print(f"{'missing':<12} {extra['extra']}: {extra['for']}; {extra['get']}")


def environment_report() -> dict[str, Any]:
    """What ``dtrain env --json`` prints."""
    # Imported here: help must not wait for torch.
    import torch
    import torch.distributed

    from dtrain.kernels import dispatch
    from dtrain.runfolder import versions

    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
        }
        for index in range(torch.cuda.device_count())
    ]
    available = {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
    }
    missing = dispatch.why_not_triton()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "usable_cores": usable_cores()},
        "devices": devices,
        "cuda": torch.version.cuda,
        "kernels": {
            "cpu": "numba",
            "gpu": f"plain torch operations, far slower; {missing}" if missing else "triton",
        },
        "backends": [name for name, there in available.items() if there],
        "compiler": shutil.which("cc") or shutil.which("gcc"),
        "missing": missing_extras(),
    }


def missing_extras() -> list[dict[str, str]]:
    """The extras that are not installed: name, what for, and the command that installs it."""
    return [
        {"extra": extra, "for": purpose, "get": f"pip install 'dtrain[{extra}]'"}
        for extra, (module, purpose) in EXTRAS.items()
        if importlib.util.find_spec(module) is None
    ]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = (
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
