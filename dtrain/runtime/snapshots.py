"""Snapshots in peer memory: tier 1 of recovery.

Every ``robust.snapshot_every`` steps each holder keeps a copy of its stages' state in host memory,
and the first holder of each stage sends one to a worker that does not hold the stage, on another
node than the holders where there is one. With sharded optimizer state (ZeRO) the copy is the whole
state, gathered from the holders: at once where it is small, so that the loss of a holder costs no
step but its own, else while the next step runs, of which the loss then costs one step more.

A copy is incremental: a tensor with the same bits as in the copy before (the best evaluation's
weights, the state of partitions nobody trained on) is neither copied nor sent again. One that
changed twice running is taken as changed without a look for a while. Small tensors travel joined,
as each costs both ends a call that lets other threads run. Where the network is slower than
training, a copy waits until the one before has left, so that none pile up.

A new generation has other holders and keepers: it takes its first snapshots after its first step,
whole, and what no longer has a place is dropped once they are made.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from dtrain.errors import PeerLostError
from dtrain.runtime.engine import Gathering
from dtrain.runtime.generation import Generation
from dtrain.runtime.state import Progress, StageState, pack_json, unpack_json
from dtrain.runtime.transport import KIND_SNAPSHOT, Key
from dtrain.scheduler.membership import Peer
from dtrain.scheduler.snapshots import due, keeper, outdated

_POLL_S = 0.0005
_SMALL_BYTES = 8 << 20
"""Of sharded state of the whole model, which takes a few milliseconds to gather."""
_LOOK_AT_ALL = 16
"""After so many copies those are compared again that were taken as changed."""
_JOINED_BYTES = 4 << 10
"""Larger tensors travel by themselves: to copy them once more would cost what joining saves."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Forms = list[list[tuple[str, list[int]]]]


@dataclass
class _Begun:
    """A copy of which something may be on its way: ``same`` as in that of step ``base``."""

    step: int
    stage: int
    state: StageState
    gathering: Gathering
    base: int | None
    same: set[str]


class Snapshots:
    """Takes one worker's snapshots in one generation, and keeps those that others send."""

    def __init__(self, generation: Generation, sharded: bool) -> None:
        self._generation = generation
        self._holdings = generation.holdings
        self._every = generation.around.job.config.robust.snapshot_every
        self._sharded = sharded
        self._at_once = sharded and generation.around.job.sharded_bytes <= _SMALL_BYTES
        plan, me = generation.plan, generation.around.me.worker
        domains = generation.domains
        keepers = {
            s: keeper(s, plan.holders[s], plan.workers, domains) for s in range(plan.num_stages)
        }
        self._send = {
            s: k for s, k in keepers.items() if k is not None and plan.holders[s][0] == me
        }
        self._keep = [s for s, k in keepers.items() if k == me]
        # Steps whose snapshots were begun in this generation, and those of them still to come.
        self._taken: list[int] = []
        self._awaited: list[int] = []
        self._begun: list[_Begun] = []
        # Who had room at the step that is being sent, whose stages need not wait for each other.
        self._let_in: set[tuple[int, Peer]] = set()
        self._changing = {stage: Changing() for stage in self._holdings.engines}
        # Where the run went back to an older step, that which it goes through again is not kept.
        held, now = self._holdings.snapshots, self._holdings.progress.step
        for later in [key for key in held if key[0] > now]:
            del held[later]

    def take(self, *, asked: bool = False, force: bool = False) -> None:
        """Take the snapshot of this step boundary if one is due, was ``asked`` for, or ``force``.

        ``force``: this generation comes to an end, and what is gathered must be waited for.

        Raises:
            PeerLostError: a fault was noticed.
        """
        step = self._holdings.progress.step
        self._finish()
        self.collect()
        if due(step, self._taken, self._every, asked=asked, last=force).now:
            self._take(step)
        if force:
            self._finish(wait=True)

    def _take(self, step: int) -> None:
        if not self._sharded and not self._send and not self._keep and self._alone():
            # Every worker holds every stage: while one lives, tier 0 serves.
            self._holdings.snapshots.clear()
            return
        # The next copies build on these.
        self._finish(wait=True)
        for stage in sorted(self._holdings.engines):
            self._begin_stage(step, stage)
        self._finish(wait=self._at_once)
        if self._at_once:
            # Nobody begins the next step before all have this one: its loss costs no other step.
            assert self._generation.comm is not None
            self._generation.comm.all_reduce(torch.zeros(1))
        if self._keep:
            self._awaited.append(step)
        self._taken = [*self._taken[-1:], step]
        self._drop_old()

    def _begin_stage(self, step: int, stage: int) -> None:
        held = self._holdings.snapshots
        base = next((s for s in self._taken[::-1] if (s, stage) in held), None)
        before = held[base, stage].tensors if base is not None else {}
        live, gathering = self._holdings.begin_state(stage)
        changing = self._changing[stage]
        state, same = copy_changed(live, before, changing.names())
        changing.copied({*state.tensors} - same)
        self._begun.append(_Begun(step, stage, state, gathering, base, same))

    def _finish(self, *, wait: bool = False, send: bool = True) -> None:
        """Keep the copies that are whole, and send those that go to others.

        With sharded state they become so while training goes on; ``wait`` for all of them.
        """
        while self._begun and (wait or self._begun[0].gathering.done()):
            begun = self._begun.pop(0)
            state = begun.state
            state.tensors |= begun.gathering.wait()
            self._holdings.snapshots[begun.step, begun.stage] = state
            if send and begun.stage in self._send:
                self._send_copy(begun)

    def _send_copy(self, begun: _Begun) -> None:
        generation = self._generation
        tensors = {n: t for n, t in begun.state.tensors.items() if n not in begun.same}
        forms, flat = joined(tensors)
        head = {
            "base": begun.base,
            "same": sorted(begun.same),
            "forms": forms,
            "progress": begun.state.progress.as_json(),
        }
        peer = generation.peers[self._send[begun.stage]]
        if (begun.step, peer) not in self._let_in:
            self._wait_for_room(peer)
            self._let_in = {(begun.step, peer), *(s for s in self._let_in if s[0] == begun.step)}
        key = Key(KIND_SNAPSHOT, begun.step, begun.stage)
        generation.around.transport.send(peer, key, [pack_json(head), *flat])

    def _wait_for_room(self, peer: Peer) -> None:
        """Wait until the peer has what was sent to it at earlier steps."""
        generation = self._generation
        deadline = time.monotonic() + generation.around.job.config.parallel.timeout_s
        while not generation.around.transport.sent(peer):
            generation.fault.check()
            if time.monotonic() > deadline:
                raise PeerLostError(f"worker {peer.worker} takes no snapshots")
            time.sleep(_POLL_S)

    def _alone(self) -> bool:
        plan = self._generation.plan
        return all(set(h) == set(plan.workers) for h in plan.holders)

    def leave(self) -> None:
        """Save what has come, or was gathered, before the generation is left."""
        try:
            self._finish(send=False)
        except PeerLostError:
            # A holder died while it was gathered: there is no such snapshot then.
            self._begun.clear()
        self.collect()

    def collect(self) -> None:
        """Take in the copies that have come."""
        transport, held = self._generation.around.transport, self._holdings.snapshots
        for step in list(self._awaited):
            keys = {s: Key(KIND_SNAPSHOT, step, s) for s in self._keep}
            if not all(transport.has(key) for key in keys.values()):
                # Those of a stage build on each other.
                break
            for stage, key in keys.items():
                head, *flat = transport.receive(key, 1.0)
                said = unpack_json(head)
                tensors = parted(said["forms"], flat)
                if said["same"]:
                    before = held[said["base"], stage].tensors
                    tensors |= {name: before[name] for name in said["same"]}
                held[step, stage] = StageState(tensors, Progress.of(said["progress"]))
            self._awaited.remove(step)
            self._drop_old()

    def _drop_old(self) -> None:
        held = self._holdings.snapshots
        placed = {*self._holdings.engines, *self._keep}
        replaced = len(self._taken) > 1 and not self._awaited[:-1]
        for key in outdated(held, placed, replaced=replaced):
            del held[key]


class Changing:
    """Which tensors of a stage differed in both of the last two copies."""

    def __init__(self) -> None:
        self._last: set[str] = set()
        self._before: set[str] = set()
        self._copies = 0

    def names(self) -> set[str]:
        """Those that need not be compared at the next copy; none now and then."""
        return self._last & self._before if self._copies % _LOOK_AT_ALL else set()

    def copied(self, changed: set[str]) -> None:
        """A copy was made, in which ``changed`` differed or were not compared."""
        self._last, self._before = changed, self._last
        self._copies += 1


def copy_changed(
    live: StageState, before: Mapping[str, Tensor], changing: Container[str] = ()
) -> tuple[StageState, set[str]]:
    """A copy of ``live`` that training does not change, and the names of what is as ``before``.

    ``before``: the tensors of an earlier copy, which are shared where no bit differs; those that
    are ``changing`` are not compared.
    """
    copies: dict[str, Tensor] = {}
    same: set[str] = set()
    differ: dict[str, Tensor] = {}
    for name, value in live.tensors.items():
        tensor, old = value.detach(), before.get(name)
        if old is not None and name not in changing and _same_bits(old, tensor):
            same.add(name)
            copies[name] = old
        else:
            differ[name] = tensor
            copies[name] = torch.empty_like(tensor, device="cpu")
    if differ:
        torch._foreach_copy_([copies[name] for name in differ], [*differ.values()])
    return StageState(copies, live.progress.copy()), same


def joined(tensors: Mapping[str, Tensor]) -> tuple[Forms, list[Tensor]]:
    """Fewer tensors with the elements of all: small ones of a dtype in one, others as they are.

    Also names and shapes of what is in each, as JSON, from which :func:`parted` makes them again.
    """
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        key = name if tensor.nbytes > _JOINED_BYTES else tensor.dtype
        groups.setdefault(key, []).append(name)
    forms = [[(name, [*tensors[name].shape]) for name in names] for names in groups.values()]
    flat = []
    for names in groups.values():
        if len(names) == 1:
            flat.append(tensors[names[0]])
        else:
            flat.append(torch.cat([tensors[name].reshape(-1) for name in names]))
    return forms, flat


def parted(forms: Forms, flat: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors that were :func:`joined`, by name; they share the memory of ``flat``."""
    tensors = {}
    for group, elements in zip(forms, flat, strict=True):
        if len(group) == 1:
            tensors[group[0][0]] = elements
            continue
        sizes = [prod(shape) for _, shape in group]
        pieces = torch.split(elements, sizes)
        for (name, shape), piece in zip(group, pieces, strict=True):
            tensors[name] = piece.view(shape)
    return tensors


def _same_bits(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors are equal to the bit; NaN is equal to itself, 0 is not -0."""
    if old.dtype != new.dtype or old.shape != new.shape or new.device != old.device:
        return False
    kind = _INTEGERS.get(new.element_size())
    return kind is not None and torch.equal(old.view(kind), new.view(kind))
