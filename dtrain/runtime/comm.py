"""The only module that talks to ``torch.distributed``'s collectives: the groups of a generation.

Groups are built for a generation and never repaired. They are plain objects: nothing is registered
with ``torch.distributed``, so that a generation that breaks while its groups are being built leaves
nothing behind that the next one could meet. No wait is bare: a collective is issued asynchronously,
its completion wakes the waiter through the fault flag, and so does a fault. After a fault the
groups' connections are shut down, which ends at once whatever waits on them, here and at the other
members, and the groups are let go in a thread of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from dtrain.environment import default_variable
from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.mesh import MOST_BYTES, MOST_MEMBERS, Mesh

Group = dist.ProcessGroup
MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM
_FORM_S = 10.0
"""Longest wait for a member while groups are built: all have just said that they are ready."""

T = TypeVar("T")


class Communicator:
    """The groups of one generation, as one worker sees them.

    Ranks in groups are positions among the group's sorted workers; callers speak of workers only.
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
        own_group: Group,
        host: str,
        loopback: bool,
        foreign: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Build the groups; every member does so at the same time.

        ``own_group``: what :func:`lone_group` made, for all generations of this worker, since
        engines of old ones may hold on to it. ``host``: this worker's address. ``loopback``: all
        members are on this host.
        ``foreign``: descriptors of sockets that are not the groups', whenever they were opened.

        Raises:
            PeerLostError: a member did not come, or a fault was noticed.
        """
        self.generation = generation
        self.worker = worker
        self.fault = fault
        self.timeout_s = timeout_s
        self.own_group = own_group
        self._workers = sorted(workers)
        self._foreign = foreign
        self._before = _open_sockets()
        self._sockets: dict[int, int] | None = None
        self._groups: dict[str, Group] = {}
        self._mesh: Mesh | None = None
        self._members = {id(own_group): [worker]}
        self._parked: list[object] = []
        self._under_way: set[Reduction] = set()
        self._released = False
        if loopback:
            default_variable("GLOO_SOCKET_IFNAME", "lo")
        try:
            # A member that died meanwhile keeps the others in native code until a time-out.
            self.run_aside(lambda: self._build(store, stage_holders, host), "building groups")
        except (OSError, RuntimeError, ValueError) as error:
            self.abandon()
            raise PeerLostError(f"groups could not be built: {first_line(error)}") from error
        except PeerLostError:
            self.abandon()
            raise

    def _build(self, store: Store, stage_holders: Sequence[Sequence[int]], host: str) -> None:
        wanted: list[tuple[str, Sequence[int], Store]] = [
            ("all", self._workers, store),
            ("checkpoint", self._workers, store),
        ]
        wanted += [
            (f"stage{stage}", holders, store)
            for stage, holders in enumerate(stage_holders)
            if self.worker in holders
        ]
        for name, workers, where in wanted:
            self.fault.check()
            members = sorted(workers)
            prefixed = PrefixStore(name, where)
            rank = members.index(self.worker)
            group = _new_group(rank, len(members), prefixed, self.timeout_s)
            self._groups[name] = group
            self._members[id(group)] = members
        if 1 < len(self._workers) <= MOST_MEMBERS:
            self.fault.check()
            mesh = Mesh(self.worker, self._workers, host, store, _FORM_S)
            if self._released:
                mesh.close()
            else:
                self._mesh = mesh
        self._sockets = _since(self._before)

    def _group(self, name: str) -> Group:
        if self._released:
            raise PeerLostError(f"generation {self.generation} has ended")
        return self._groups[name]

    def stage_group(self, stage: int) -> Group:
        """The holders of ``stage``, of which this worker is one.

        Raises:
            PeerLostError: the generation has ended. So do the other groups.
        """
        return self._group(f"stage{stage}")

    @property
    def all_group(self) -> Group:
        """All workers."""
        return self._group("all")

    @property
    def checkpoint_group(self) -> Group:
        """All workers, for saves alone."""
        return self._group("checkpoint")

    @property
    def workers(self) -> list[int]:
        """The generation's workers, sorted."""
        return list(self._workers)

    def rank_of(self, worker: int) -> int:
        """The position of ``worker`` among the generation's workers."""
        return self._workers.index(worker)

    def members_of(self, group: Group) -> list[int]:
        """The workers of a group, in the order of their ranks in it."""
        return self._members[id(group)]

    def all_reduce(self, tensor: Tensor, op: Any = SUM, group: Group | None = None) -> Tensor:
        """All-reduce in place over ``group`` (all workers when None); returns ``tensor``.

        Raises:
            PeerLostError: a member is gone, or a fault was noticed.
        """
        group = self.all_group if group is None else group
        if group.size() == 1:
            return tensor
        if op not in (SUM, MAX) or not self._by_mesh(tensor, group):
            self.wait(self._start(tensor, op, group), "all-reduce", tensor)
            return tensor
        parts = [part.view(tensor.shape) for part in self._exchanged(tensor, group)]
        # In the same order everywhere: the same bits.
        total = parts[0].clone()
        for part in parts[1:]:
            if op == SUM:
                total += part
            else:
                torch.maximum(total, part, out=total)
        return tensor.copy_(total)

    def gathers(self, group: Group, device: torch.device) -> bool:
        """Whether :meth:`gather` serves a group's tensors on ``device``; the same on all."""
        return group.size() == 1 or (self._mesh is not None and device.type == "cpu")

    def gather(self, tensor: Tensor, group: Group) -> list[Tensor]:
        """Everybody's tensors, alike but for the first dimension, in the order of workers.

        Their bytes are at most :data:`dtrain.runtime.mesh.MOST_BYTES` each.

        Raises:
            PeerLostError: a member is gone, or a fault was noticed.
        """
        if group.size() == 1:
            return [tensor]
        rest = tensor.shape[1:]
        return [
            part.view(len(part) // rest.numel(), *rest) for part in self._exchanged(tensor, group)
        ]

    def _by_mesh(self, tensor: Tensor, group: Group) -> bool:
        # Saves have threads of their own.
        apart = "checkpoint" in self._groups and group is self._groups["checkpoint"]
        small = tensor.nbytes <= MOST_BYTES and tensor.device.type == "cpu"
        return self._mesh is not None and small and not apart

    def _exchanged(self, tensor: Tensor, group: Group) -> list[Tensor]:
        """What each member of a group gave, flat."""
        assert self._mesh is not None
        self.fault.check()
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        came = self._mesh.exchange(raw, self._members[id(group)], self.fault, self.timeout_s)
        return [
            torch.frombuffer(part, dtype=tensor.dtype) if len(part) else tensor.new_empty(0)
            for part in came
        ]

    def begin_all_reduce(self, tensor: Tensor, group: Group) -> Reduction:
        """Begin to sum over ``group`` in place; nobody may touch ``tensor`` until it is done.

        All members begin at the same point, and may do other collectives meanwhile.

        Raises:
            PeerLostError: a member is gone, or a fault was noticed.
        """
        work = self._start(tensor, SUM, group) if group.size() > 1 else None
        begun = Reduction(self, tensor, work)
        if work is not None:
            self._under_way.add(begun)
        return begun

    def _start(self, tensor: Tensor, op: Any, group: Group) -> Any:
        self.fault.check()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        try:
            return group.allreduce([tensor], options)
        except RuntimeError as error:
            raise PeerLostError(f"all-reduce could not start: {first_line(error)}") from error

    def finished(self, reduction: Reduction) -> None:
        """Let go of a reduction that is done."""
        self._under_way.discard(reduction)

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
            # The group's thread may still write to the tensors.
            self._parked.append((work, future, tensors))
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
        """End a broken generation's groups without waiting for anybody; idempotent."""
        sockets = self._sockets if self._sockets is not None else _since(self._before)
        self._sockets = {}
        foreign = set(self._foreign())
        for fd, inode in sockets.items():
            if fd not in foreign:
                _shut_down(fd, inode)
        self._let_go()

    def close(self) -> None:
        """Leave the generation in good order, when every worker has finished its part of it."""
        self._let_go()

    def _let_go(self) -> None:
        self._released = True
        if self._mesh is not None:
            self._mesh.close()
        doomed: list[object] = [self._parked, self._under_way, self._groups]
        self._parked, self._under_way, self._groups = [], set(), {}

        def let_go() -> None:
            # Native destructors may wait for members; they do so without the interpreter's lock.
            doomed.clear()

        threading.Thread(target=let_go, name="dtrain-reaper", daemon=True).start()


class Reduction:
    """An all-reduce that was begun; its generation keeps it until somebody has waited for it."""

    def __init__(self, comm: Communicator, tensor: Tensor, work: Any) -> None:
        self._comm = comm
        self._tensor = tensor
        self._work = work

    def done(self) -> bool:
        """Whether :meth:`wait` would return, or raise, at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait for the sum.

        Raises:
            PeerLostError: a member is gone, or a fault was noticed before it was done.
        """
        if self._work is not None:
            self._comm.wait(self._work, "all-reduce", self._tensor)
            self._work = None
        self._comm.finished(self)


def lone_group(timeout_s: float) -> Group:
    """A group of this worker alone."""
    return _new_group(0, 1, HashStore(), timeout_s)


def _new_group(rank: int, size: int, store: Store, timeout_s: float) -> Group:
    form = datetime.timedelta(seconds=_FORM_S)
    longest = datetime.timedelta(seconds=timeout_s)
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout=form)
    gloo._set_sequence_number_for_group()
    gloo._set_default_timeout(longest)
    group._register_backend(torch.device("cpu"), kind, gloo)
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = longest
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
        nccl._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.NCCL
        group._register_backend(torch.device("cuda"), kind, nccl)
    group._set_default_backend(kind)
    return group


def _open_sockets() -> dict[int, int]:
    """This process's open sockets: descriptor -> inode."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(name)] = int(target[8:-1])
    return found


def _since(before: dict[int, int]) -> dict[int, int]:
    known = set(before.values())
    return {fd: inode for fd, inode in _open_sockets().items() if inode not in known}


def _shut_down(fd: int, inode: int) -> None:
    """Shut a connection down if ``fd`` is still that socket."""
    with contextlib.suppress(OSError):
        copy = os.dup(fd)
        with socket.socket(fileno=copy) as ours:
            listens = ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if os.fstat(copy).st_ino == inode and not listens:
                # Gloo takes the end of a listener for a bug of its own, that of a connection for
                # the other side's end.
                ours.shutdown(socket.SHUT_RDWR)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
