"""The only module that talks to ``torch.distributed``'s collectives: the groups of a generation.

Groups are built for a generation and never repaired. No wait is bare: a collective is issued
asynchronously, its completion wakes the waiter through the fault flag, and so does a fault. After a
fault the groups are set aside, not destroyed: destroying one blocks for as long as a member is
stopped.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from dtrain.environment import default_variable
from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag

MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM
_FORM_S = 10.0
"""Longest wait for a member while groups are built: all have just said that they are ready."""

T = TypeVar("T")

# Works and groups of broken generations, for which somebody may still wait in native code.
_parked: list[object] = []


class Communicator:
    """The groups of one generation, as one worker sees them.

    Ranks in torch's groups are positions among the generation's sorted workers; callers speak of
    workers only.
    """

    def __init__(
        self,
        generation: int,
        worker: int,
        workers: Sequence[int],
        stage_holders: Sequence[Sequence[int]],
        store: Store,
        fault: FaultFlag,
        timeout_s: float,
        *,
        loopback: bool,
    ) -> None:
        """Build the groups; every member does so at the same time.

        ``loopback``: all members are on this host.

        Raises:
            PeerLostError: a member did not come, or a fault was noticed.
        """
        self.generation = generation
        self.worker = worker
        self.fault = fault
        self.timeout_s = timeout_s
        self._workers = sorted(workers)
        if loopback:
            default_variable("GLOO_SOCKET_IFNAME", "lo")
        try:
            # A member that died meanwhile keeps the others in native code until a time-out.
            self.run_aside(lambda: self._build(store, stage_holders), "building groups")
        except (RuntimeError, ValueError) as error:
            self.abandon()
            raise PeerLostError(f"groups could not be built: {first_line(error)}") from error
        longest = datetime.timedelta(seconds=timeout_s)
        for group in (None, *self.stage_groups, self.checkpoint_group):
            if group is None or isinstance(group, dist.ProcessGroup):
                c10d._set_pg_timeout(longest, group)

    def _build(self, store: Store, stage_holders: Sequence[Sequence[int]]) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=self.rank_of(self.worker),
            world_size=len(self._workers),
            timeout=datetime.timedelta(seconds=_FORM_S),
        )
        self.stage_groups = [self._new_group(holders) for holders in stage_holders]
        self.checkpoint_group = self._new_group(self._workers)
        self.own_group = dist.new_group([self.rank_of(self.worker)], use_local_synchronization=True)

    def _new_group(self, workers: Sequence[int]) -> dist.ProcessGroup:
        self.fault.check()
        group: dist.ProcessGroup = dist.new_group([self.rank_of(w) for w in workers])
        return group

    @property
    def workers(self) -> list[int]:
        """The generation's workers, sorted."""
        return list(self._workers)

    def rank_of(self, worker: int) -> int:
        """The position of ``worker`` among the generation's workers."""
        return self._workers.index(worker)

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """All-reduce in place over ``group`` (all workers when None); returns ``tensor``.

        Raises:
            PeerLostError: a member is gone, or a fault was noticed.
        """
        if (dist.get_world_size(group) if group is not None else len(self._workers)) == 1:
            return tensor
        self.fault.check()
        try:
            work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
        except RuntimeError as error:
            raise PeerLostError(f"all-reduce could not start: {first_line(error)}") from error
        self.wait(work, "all-reduce", tensor)
        return tensor

    def wait(self, work: Any, what: str, *tensors: Tensor) -> None:
        """Wait for an asynchronous collective on ``tensors``, ending early on a fault.

        Raises:
            PeerLostError: the collective failed, a fault was noticed, or the time ran out.
        """
        future = work.get_future()
        # The callback runs in a thread of the group: it must not keep the group alive, whose
        # destructor would then run there and wait for that very thread.
        notify = self.fault.notify
        future.add_done_callback(lambda _: notify())
        try:
            self.fault.wait_for(future.done, self.timeout_s, what)
        except PeerLostError:
            _parked.append((work, future, tensors))
            raise
        try:
            future.wait()
        except RuntimeError as error:
            raise PeerLostError(f"{what} failed: {first_line(error)}") from error

    def run_aside(self, function: Callable[[], T], what: str) -> T:
        """Run what waits barely (a library's collectives) in a thread; a fault ends the wait.

        Raises:
            PeerLostError: a fault was noticed or the time ran out. Errors of ``function`` are
                raised as they were.
        """
        answer: list[T] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                answer.append(function())
            except BaseException as error:
                # Raised again in the thread that waits.
                errors.append(error)
            self.fault.notify()

        thread = threading.Thread(target=body, name="dtrain-aside", daemon=True)
        thread.start()
        self.fault.wait_for(lambda: bool(answer or errors), self.timeout_s, what)
        if errors:
            raise errors[0]
        return answer[0]

    def abandon(self) -> None:
        """Set the groups of a broken generation aside; torch.distributed is as new afterwards."""
        world = c10d._world
        _parked.append((list(world.pg_map), dict(world.pg_names), self))
        if dist.is_initialized():
            c10d._update_default_pg(None)
        for table in (
            world.pg_map,
            world.pg_names,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.tags_to_pg,
            world.pg_coalesce_state,
        ):
            table.clear()
        c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
        world.group_count = 0

    def close(self) -> None:
        """Leave the generation in good order, when every worker has finished its part of it."""
        dist.destroy_process_group()


def reap_parked() -> None:
    """Let go of the groups of broken generations, in a thread that may block for long."""
    if not _parked:
        return
    doomed = _parked[:]
    del _parked[: len(doomed)]

    def let_go() -> None:
        # Native destructors wait for members; they do so without the interpreter's lock.
        doomed.clear()

    threading.Thread(target=let_go, name="dtrain-reaper", daemon=True).start()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
