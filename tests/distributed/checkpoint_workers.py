"""What the worker processes of the checkpoint tests run; imported by name in each of them."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.checkpoint import CheckpointError, CheckpointStore, weights_sha256
from dtrain.errors import PeerLostError

LAYERS = 4


def layer_tensors(layer: int, step: int) -> dict[str, Tensor]:
    """Parameters and optimizer state of a layer, the same on every holder."""
    g = torch.Generator().manual_seed(1000 * step + layer)
    weight = torch.randn(64, 32, generator=g)
    return {
        f"model/layers.{layer}.weight": weight,
        f"optim/layers.{layer}.weight/exp_avg": weight * 0.1,
        f"optim/layers.{layer}.weight/step": torch.tensor(float(step)),
    }


def stage_tensors(layers: range, step: int) -> dict[str, Tensor]:
    """Tensors of a contiguous run of layers."""
    return {k: v for layer in layers for k, v in layer_tensors(layer, step).items()}


class Group:
    """A gloo group as the workers of a save."""

    def __init__(self, worker: int, group: Any = None) -> None:
        self.worker = worker
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group

    def all_gather(self, data: bytes) -> list[bytes]:
        gathered: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(gathered, data, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(str(error).splitlines()[0]) from error
        return gathered

    def check(self) -> None:
        pass


def join(rank: int, world: int, folder: str) -> None:
    """Enter a gloo group that meets in a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=20),
    )


def answer(folder: str, rank: int, content: dict[str, Any]) -> None:
    """Leave a result for the test."""
    (Path(folder) / f"answer-{rank}.json").write_text(json.dumps(content))


def killer(number: int) -> Any:
    """A hook that ends this process with SIGKILL at the given point, counted from 0."""
    left = [number]

    def at(point: str) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    return at


def two_stages(rank: int, world: int, folder: str, url: str) -> None:
    """Save with two holders a stage; then once more in a group without the first worker."""
    join(rank, world, folder)
    store = CheckpointStore(url)
    own = range(0, 2) if rank < 2 else range(2, LAYERS)
    other = range(2, LAYERS) if rank < 2 else range(0, 2)
    everyone = dist.new_group(list(range(world)), backend="gloo")
    progress = {"saved_by": rank}
    info = store.save(1, stage_tensors(own, 1), progress, exchange=Group(rank, everyone))
    targets = {k: torch.zeros_like(v) for k, v in stage_tensors(other, 1).items()}
    store.load_into(info, targets)
    result: dict[str, Any] = {"first": info.name, "other": weights_sha256(targets)}

    some = dist.new_group([1, 2, 3], backend="gloo")
    if rank > 0:
        again = store.save(2, stage_tensors(own, 2), progress, exchange=Group(rank, some))
        result["second"] = again.name
    answer(folder, rank, result)
    dist.destroy_process_group()


def one_fails(rank: int, world: int, folder: str, url: str, failing: int, point: str) -> None:
    """One worker cannot write; all are told, and the next save succeeds."""
    join(rank, world, folder)
    broken = [rank == failing]

    def fail(at: str) -> None:
        if broken[0] and at == point:
            raise OSError(28, "No space left on device")

    store = CheckpointStore(url, fail)
    tensors = layer_tensors(rank, 1)
    try:
        store.save(1, tensors, {}, exchange=Group(rank))
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    left = sorted(os.listdir(url)) if rank == 0 else []
    broken[0] = False
    info = store.save(1, tensors, {}, exchange=Group(rank))
    answer(folder, rank, {"said": said, "left": left, "next": info.name})
    dist.destroy_process_group()


def disagree(rank: int, world: int, folder: str, url: str) -> None:
    """Holders of a tensor give it different shapes."""
    join(rank, world, folder)
    store = CheckpointStore(url)
    try:
        store.save(1, {"x": torch.zeros(rank + 1)}, {}, exchange=Group(rank))
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    answer(folder, rank, {"said": said})
    dist.destroy_process_group()


def unshared(rank: int, world: int, folder: str, url: str) -> None:
    """Each worker writes to a store of its own."""
    join(rank, world, folder)
    store = CheckpointStore("memory://checkpoints")
    try:
        store.save(1, layer_tensors(rank, 1), {}, exchange=Group(rank))
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    answer(folder, rank, {"said": said})
    dist.destroy_process_group()


def one_dies(rank: int, world: int, folder: str, url: str, dying: int, point: str) -> None:
    """One worker is killed while it saves."""
    join(rank, world, folder)

    def die(at: str) -> None:
        if rank == dying and at == point:
            os.kill(os.getpid(), signal.SIGKILL)

    store = CheckpointStore(url, die)
    try:
        store.save_async(2, layer_tensors(rank, 2), {}, exchange=Group(rank)).result()
        said = "saved"
    except PeerLostError as error:
        said = f"lost: {error}"
    answer(folder, rank, {"said": said})
