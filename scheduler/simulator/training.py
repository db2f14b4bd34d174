"""A minimal model of training: what a worker's memory holds, and how steps commit in a generation.

It keeps no tensors: the state of a stage is the number of updates applied to it. The rules are
those of the real thing: a step's contributions, then the vote, then the update; snapshots in the
memory of the worker itself and of its neighbour; a durable checkpoint that all members write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtrain.scheduler.events import Announcement, Peer, Proposal
from dtrain.scheduler.plan import Plan
from dtrain.scheduler.recovery import base_generation, kept, transfers
from dtrain.scheduler.simulator.errors import require

if TYPE_CHECKING:
    from dtrain.scheduler.simulator.process import Life
    from dtrain.scheduler.simulator.world import World


@dataclass
class Memory:
    """What a worker remembers beyond a generation.

    ``stages[s]``: updates applied to stage s. ``snapshots``: (step, stage) of the states in its
    host memory, the newest ``snapshots_kept`` steps of them.
    """

    snapshots_kept: int = 2
    committed: int = 0
    pending: bool = False
    voted: bool = False
    knows_vote: bool = False
    stages: dict[int, int] = field(default_factory=dict)
    snapshots: set[tuple[int, int]] = field(default_factory=set)
    plan: Plan | None = None

    def announcement(self, peer: Peer, *, sharded: bool, leaving: bool = False) -> Announcement:
        """Where the worker stands. Stages that do not stand with the others are not offered."""
        whole = tuple(sorted(s for s, at in self.stages.items() if at == self.committed))
        return Announcement(
            peer,
            committed=self.committed,
            pending=self.pending,
            voted=self.voted,
            stages=() if sharded else whole,
            snapshots=tuple(sorted(self.snapshots)),
            leaving=leaving,
        )

    def apply(self) -> None:
        """Apply the pending step to every held stage, each exactly once."""
        require(self.pending, "an update without reduced gradients")
        for stage, at in self.stages.items():
            require(at == self.committed, f"stage {stage} is at {at}, not at {self.committed}")
            self.stages[stage] = at + 1
        self.committed += 1
        self.pending = self.voted = False
        self.knows_vote = True

    def keep(self, taken: set[tuple[int, int]]) -> None:
        """Take snapshots in, and forget the oldest."""
        self.snapshots |= taken
        newest = sorted({step for step, _ in self.snapshots})[-self.snapshots_kept :]
        self.snapshots = {s for s in self.snapshots if s[0] in newest}


class Course:
    """One worker's way through one generation. ``world`` carries messages and checks claims."""

    def __init__(self, world: World, life: Life, proposal: Proposal) -> None:
        self.world, self.life = world, life
        self.number = proposal.number
        self.members = proposal.members
        self.peers = {a.peer.worker: a.peer for a in proposal.members}
        self.missing: set[int] = set()
        self.coming: dict[int, int] = {}
        self.step_at = 0
        self.begun = self.left = False
        base = base_generation(self.members)
        old = life.plans[self.peers[base[1]]] if base else None
        self.plan, self.settlement = world.decide(old, proposal)

    def form(self) -> None:
        """Settle the interrupted step, and send and await what has to move."""
        memory, me = self.life.memory, self.life.peer.worker
        self.world.check_generation(self)
        self.begun = True
        settlement = self.settlement
        if me in settlement.apply:
            told = [self.world.lives[self.peers[w]].memory for w in settlement.witnesses]
            require(any(m.knows_vote or m.voted for m in told), "nobody knows what the vote said")
            memory.apply()
        held = self.plan.stages_held(me)
        if settlement.tier == 2:
            self.missing = set(held)
            if me == min(self.peers):
                step = self.world.durable
                for peer in self.peers.values():
                    self.world.send(self, peer, lambda c: c.resume(step))
            return
        assert settlement.step is not None, "tiers 0 and 1 know their step"
        mine = next(a for a in self.members if a.peer == self.life.peer)
        for stage in held:
            how = kept(mine, stage, settlement)
            if how is None:
                self.missing.add(stage)
                continue
            self._claim(stage, how == "held", settlement.step)
            self.coming[stage] = settlement.step
        for move in transfers(self.plan, settlement, self.members):
            if move.source == me:
                how = kept(mine, move.stage, settlement)
                require(how is not None, f"is to send stage {move.stage} that it has not")
                self._claim(move.stage, how == "held", settlement.step)
                self._send_state(move.stage, move.target, settlement.step)
        self._go_on(settlement.step)

    def _claim(self, stage: int, held: bool, step: int) -> None:
        memory = self.life.memory
        there = memory.stages.get(stage) == step if held else (step, stage) in memory.snapshots
        require(there, f"is said to have stage {stage} at step {step}")

    def _send_state(self, stage: int, target: int, step: int) -> None:
        self.world.states_moved += 1
        self.world.send(self, self.peers[target], lambda c: c.receive(stage, step))

    def receive(self, stage: int, step: int) -> None:
        """The state of a stage has come."""
        self.coming[stage] = step
        self.missing.discard(stage)
        self._go_on(step)

    def resume(self, step: int) -> None:
        """The leader says which checkpoint all resume from."""
        self.coming = dict.fromkeys(self.missing, step)
        self.missing = set()
        self._go_on(step)

    def _go_on(self, step: int) -> None:
        """Once all is there, forget what was before: only now, so that a fault loses nothing."""
        if self.missing:
            return
        memory = self.life.memory
        memory.stages, memory.committed, memory.plan = dict(self.coming), step, self.plan
        memory.pending = memory.voted = False
        memory.knows_vote = True
        self.world.all_at(self, "formed", False, lambda c, _: c.begin_step())

    def begin_step(self) -> None:
        """Compute this worker's share of the step and contribute it to the sums."""
        memory = self.life.memory
        held = set(self.plan.stages_held(self.life.peer.worker))
        require(set(memory.stages) == held, "other stages in memory than the plan says")
        at_hand = set(memory.stages.values())
        require(at_hand <= {memory.committed}, f"stages at {at_hand}, not {memory.committed}")
        self.step_at = memory.committed
        self.world.later(
            self.life, self.world.compute_time(self), lambda: self._when_in(self._contribute)
        )

    def _when_in(self, action: Callable[[], None]) -> None:
        if not self.left:
            action()

    def _contribute(self) -> None:
        self.world.all_at(self, f"sum {self.step_at}", False, lambda c, _: c.reduced())

    def reduced(self) -> None:
        """This worker holds its reduced gradients: vote."""
        self.life.memory.pending = True
        wish = self.life.wants_regroup()
        self.world.all_at(self, f"vote {self.step_at}", wish, lambda c, w: c.voted(w))

    def voted(self, regroup: bool) -> None:
        """The full vote was seen: the step is committed."""
        self.life.memory.voted = True
        self.world.check_commit(self)
        self.world.later(
            self.life, 2 * self.world.delay(), lambda: self._when_in(lambda: self._apply(regroup))
        )

    def _apply(self, regroup: bool) -> None:
        memory, me = self.life.memory, self.life.peer.worker
        memory.apply()
        if memory.committed % self.world.snapshot_every == 0:
            taken = {(memory.committed, stage) for stage in memory.stages}
            memory.keep(taken)
            workers = sorted(self.peers)
            neighbour = workers[(workers.index(me) + 1) % len(workers)]
            self.world.send(self, self.peers[neighbour], lambda c: c.life.memory.keep(taken))
        if memory.committed % self.world.checkpoint_every == 0:
            step = memory.committed
            self.world.all_at(self, f"saved {step}", False, lambda c, _: c.world.saved(step))
        if regroup:
            self.life.regroup("somebody wants to join or to leave")
        else:
            self.begin_step()


def best_step(
    members: Sequence[tuple[Announcement, Memory]], num_stages: int, *, sharded: bool
) -> int | None:
    """The newest step of which the members' memories have every stage, by looking into them."""
    memories = [m for a, m in members if a.since > 0]
    best = None
    steps = {at for m in memories for at in (m.committed, m.committed + 1)}
    steps |= {at for m in memories for at, _ in m.snapshots}
    for step in sorted(steps):
        have: set[int] = set()
        knows = any(
            (m.voted and m.committed == step - 1) or (m.knows_vote and m.committed == step)
            for m in memories
        )
        for m in memories:
            have |= {stage for at, stage in m.snapshots if at == step}
            if not sharded:
                ahead = int(m.pending and knows and m.committed == step - 1)
                have |= {stage for stage, at in m.stages.items() if at + ahead == step}
        if have == set(range(num_stages)):
            best = step
    return best
