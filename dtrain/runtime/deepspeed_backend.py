"""DeepSpeed made to live with generations: its module-level state, and waits that end on a fault.

DeepSpeed keeps one communication backend (``deepspeed.comm.comm.cdb``) and one ``mpu`` for the
whole process. Here the backend is ours, so that no collective it issues waits barely, and the
``mpu`` says which workers share the optimizer state of the stage at hand.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
from deepspeed.comm.torch import TorchBackend
from deepspeed.utils import groups
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from dtrain.environment import default_variable
from dtrain.runtime.comm import Communicator, Group


class PolledWork:
    """A collective under way whose ``wait()`` ends when a fault is noticed."""

    def __init__(self, work: Any, comm: Communicator, what: str) -> None:
        self._work, self._comm, self._what = work, comm, what

    def wait(self) -> None:
        self._comm.wait(self._work, self._what)


class GenerationBackend(TorchBackend):  # type: ignore[misc]
    """DeepSpeed's backend over one generation's groups."""

    def __init__(self, comm: Communicator) -> None:
        timeout = datetime.timedelta(seconds=comm.timeout_s)
        super().__init__("nccl" if torch.cuda.is_available() else "gloo", timeout, None)
        self._comm = comm
        self.building = False
        self.initialized = True

    def init_process_group(self, *_: Any) -> None:
        """The generation's groups are there already."""

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return self._comm.rank_of(self._comm.worker) if group is None else group.rank()

    def get_world_size(self, group: Any = None) -> int:
        return len(self._comm.workers) if group is None else group.size()

    def get_global_rank(self, group: Any, group_rank: int) -> int:
        if group.size() == 1:
            return self.get_rank()
        return self._comm.rank_of(self._comm.members_of(group)[group_rank])

    def _group_rank(self, group: Any, global_rank: int) -> int:
        return self._comm.members_of(group).index(self._comm.workers[global_rank])

    def _run(self, work: Any, what: str, async_op: bool) -> PolledWork | None:
        polled = PolledWork(work, self._comm, f"DeepSpeed {what}")
        if async_op:
            return polled
        polled.wait()
        return None

    def all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> PolledWork | None:
        group = self._comm.all_group if group is None else group
        if group.size() == 1:
            # Also after a fault, when the groups are gone and a voted step is still to be applied.
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = self._reduce_op(op)
        return self._run(group.allreduce([tensor], options), "all-reduce", async_op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> PolledWork | None:
        group = self._comm.all_group if group is None else group
        options = dist.ReduceOptions()
        options.reduceOp = self._reduce_op(op)
        options.rootRank = self._group_rank(group, dst)
        return self._run(group.reduce([tensor], options), "reduce", async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> PolledWork | None:
        group = self._comm.all_group if group is None else group
        work = group._allgather_base(output_tensor, input_tensor, AllgatherOptions())
        return self._run(work, "all-gather", async_op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> PolledWork | None:
        group = self._comm.all_group if group is None else group
        work = group.allgather([tensor_list], [tensor], AllgatherOptions())
        return self._run(work, "all-gather", async_op)

    def broadcast(
        self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False
    ) -> PolledWork | None:
        if self.building:
            # Holders have the same weights by construction (same seed, or state from a holder).
            return None
        group = self._comm.all_group if group is None else group
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._group_rank(group, src), 0
        return self._run(group.broadcast([tensor], options), "broadcast", async_op)

    def barrier(
        self, group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> PolledWork | None:
        if self.building:
            # Workers build different numbers of engines; a barrier of all would never meet.
            return None
        group = self._comm.all_group if group is None else group
        return self._run(group.barrier(dist.BarrierOptions()), "barrier", async_op)


class StageTopology:
    """DeepSpeed's ``mpu`` protocol for one stage: its holders are the data-parallel group."""

    def __init__(self, comm: Communicator, group: Group) -> None:
        self._group = group
        self._ranks = [comm.rank_of(w) for w in comm.members_of(group)]

    def get_data_parallel_group(self) -> Group:
        return self._group

    def get_data_parallel_world_size(self) -> int:
        return self._group.size()

    def get_data_parallel_rank(self) -> int:
        return self._group.rank()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._ranks

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's progress talk out of the user's terminal; warnings stay."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.utils.logger.setLevel(logging.WARNING)


def install_backend(comm: Communicator) -> GenerationBackend:
    """Make ``comm`` DeepSpeed's backend, forgetting the groups of any earlier generation."""
    quiet_deepspeed()
    # On CPUs DeepSpeed would compile a shared-memory operator at first use (a compiler, 50 s), and
    # already to ask which operators could be compiled takes most of a second.
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # DeepSpeed insists on the variable, which its own use of devices does not read on CPUs.
    default_variable("LOCAL_RANK", "0")
    groups._release_process_group_references()
    deepspeed_comm.cdb = None
    backend = GenerationBackend(comm)
    deepspeed_comm.cdb = backend
    return backend


@contextlib.contextmanager
def building_engine(backend: GenerationBackend, topology: StageTopology) -> Iterator[None]:
    """While an engine is being built: no barrier, no broadcast, and this stage's ``mpu``."""
    backend.building = True
    groups.mpu = topology
    try:
        yield
    finally:
        backend.building = False
