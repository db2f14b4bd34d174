"""The only module that talks to ``torch.distributed``: generations, groups and polled collectives.

A *generation* is one agreed membership. Its number lives in the job's store and only grows; each
worker is (worker, incarnation), so a worker that was started again is a new member and a stale
proposal is never taken for a live one. Groups are built for a generation and never repaired. No
wait is bare: a collective is issued asynchronously, its completion wakes the waiter through the
fault flag, and so does a fault that anybody posts to the store.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.environment import default_variable
from dtrain.errors import PeerLostError
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.transport import Address, Transport

MAX = dist.ReduceOp.MAX
SUM = dist.ReduceOp.SUM
_POLL_S = 0.005
_WATCH_S = 0.05


def connect_store(host: str, port: int, hosts_it: bool, timeout_s: float) -> dist.Store:
    """The job's key-value store: torchrun's own, or one that this worker hosts.

    Raises:
        PeerLostError: it cannot be reached within ``timeout_s`` seconds.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(
            host, port, is_master=hosts_it, wait_for_workers=False, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(f"the job's store at {host}:{port} is not reachable") from error
    return dist.PrefixStore("dtrain", store)


@dataclass(frozen=True)
class Member:
    """One worker of a generation as it announced itself."""

    worker: int
    incarnation: str
    address: Address


@dataclass(frozen=True)
class Generation:
    """An agreed membership: a number and its members by worker."""

    number: int
    members: dict[int, Member]


def join_generation(
    store: dist.Store, me: Member, world_size: int, fault: FaultFlag, timeout_s: float
) -> Generation:
    """Announce ``me`` and wait until all ``world_size`` workers stand ready in one generation.

    Worker 0 leads: whenever the announcements change it proposes the next generation with them.
    A member answers only a proposal that names its own incarnation, so announcements left by an
    earlier attempt of the job delay the agreement and never enter it.

    Raises:
        PeerLostError: no generation came about within ``timeout_s`` seconds.
    """
    store.set(f"join/{me.worker}", json.dumps(asdict(me)))
    deadline = time.monotonic() + timeout_s
    proposed: dict[int, str] = {}
    answered = -1
    while time.monotonic() < deadline:
        fault.check()
        if me.worker == 0:
            proposed = _propose(store, world_size, proposed)
        number = int(store.add("generation", 0))
        if number and store.check([f"gen/{number}/members"]):
            members = json.loads(store.get(f"gen/{number}/members"))
            if members[str(me.worker)]["incarnation"] == me.incarnation:
                if answered != number:
                    store.set(f"gen/{number}/ready/{me.worker}", me.incarnation)
                    answered = number
                if store.check([f"gen/{number}/ready/{w}" for w in range(world_size)]):
                    return Generation(number, {int(w): _member(m) for w, m in members.items()})
        time.sleep(_POLL_S)
    present = [w for w in range(world_size) if store.check([f"join/{w}"])]
    raise PeerLostError(
        f"no generation of {world_size} workers within {timeout_s:g} s; announced: {present}"
    )


def _propose(store: dist.Store, world_size: int, proposed: dict[int, str]) -> dict[int, str]:
    """Propose a new generation if the announcements are complete and changed."""
    keys = [f"join/{w}" for w in range(world_size)]
    if not store.check(keys):
        return proposed
    members = [json.loads(store.get(key)) for key in keys]
    current = {m["worker"]: m["incarnation"] for m in members}
    if current != proposed:
        number = int(store.add("generation", 1))
        table = {str(m["worker"]): m for m in members}
        store.set(f"gen/{number}/members", json.dumps(table))
    return current


def _member(raw: dict[str, Any]) -> Member:
    return Member(raw["worker"], raw["incarnation"], Address(**raw["address"]))


class Communicator:
    """The groups of one generation, as one worker sees them.

    Ranks in torch's groups are positions among the generation's sorted workers; callers speak of
    workers only.
    """

    def __init__(
        self,
        generation: Generation,
        worker: int,
        stage_holders: Sequence[Sequence[int]],
        store: dist.Store,
        transport: Transport,
        fault: FaultFlag,
        timeout_s: float,
    ) -> None:
        self.generation = generation.number
        self.worker = worker
        self.transport = transport
        self.fault = fault
        self.timeout_s = timeout_s
        self._store = dist.PrefixStore(f"gen/{generation.number}", store)
        self._workers = sorted(generation.members)
        if all(m.address.host.startswith("127.") for m in generation.members.values()):
            default_variable("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=dist.PrefixStore("groups", self._store),
            rank=self._workers.index(worker),
            world_size=len(self._workers),
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        self.stage_groups = [self._new_group(holders) for holders in stage_holders]
        self.checkpoint_group = self._new_group(self._workers)
        self.own_group = dist.new_group([self.rank_of(worker)], use_local_synchronization=True)
        transport.start(generation.number, {w: m.address for w, m in generation.members.items()})
        self._watching = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="dtrain-watch", daemon=True)
        self._watcher.start()

    def _new_group(self, workers: Sequence[int]) -> dist.ProcessGroup:
        return dist.new_group([self.rank_of(w) for w in workers])

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
        self.wait(self._issue(dist.all_reduce, tensor, op=op, group=group), "all-reduce")
        return tensor

    def _issue(self, collective: Any, *args: Any, **kwargs: Any) -> Any:
        self.fault.check()
        try:
            return collective(*args, async_op=True, **kwargs)
        except RuntimeError as error:
            raise PeerLostError(f"collective could not start: {_first_line(error)}") from error

    def wait(self, work: Any, what: str) -> None:
        """Wait for an asynchronous collective, ending early on a fault.

        Raises:
            PeerLostError: the collective failed, a fault was noticed, or the time ran out.
        """
        future = work.get_future()
        future.add_done_callback(lambda _: self.fault.notify())
        self.fault.wait_for(future.done, self.timeout_s, what)
        try:
            future.wait()
        except RuntimeError as error:
            raise PeerLostError(f"{what} failed: {_first_line(error)}") from error

    def post_fault(self, reason: str) -> None:
        """Tell every worker of the generation that it is broken, so that none waits in vain."""
        self.fault.set(reason)
        self._store.set("fault", reason)

    def put(self, key: str, value: str) -> None:
        """Set a key of this generation in the store."""
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """Wait for a key of this generation.

        Raises:
            PeerLostError: a fault was noticed, or nothing came within the time-out.
        """
        deadline = time.monotonic() + self.timeout_s
        while not self._store.check([key]):
            self.fault.check()
            if time.monotonic() > deadline:
                raise PeerLostError(f"waiting for {key}: nothing came in {self.timeout_s:g} s")
            time.sleep(_POLL_S)
        return str(self._store.get(key).decode())

    def _watch(self) -> None:
        """Turn a fault posted by another worker into this worker's fault flag."""
        while not self._watching.wait(_WATCH_S):
            try:
                if self._store.check(["fault"]):
                    self.fault.set(str(self._store.get("fault").decode()))
                    return
            except RuntimeError as error:
                if not self._watching.is_set():
                    self.fault.set(f"the job's store is not reachable ({_first_line(error)})")
                return

    def close(self) -> None:
        """Leave the generation in good order; only after every worker has finished its work."""
        self._watching.set()
        self._watcher.join()
        self.transport.close()
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
