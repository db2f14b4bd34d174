"""Snapshots in peer memory: tier 1 of recovery.

Every ``robust.snapshot_every`` steps each holder keeps a copy of its stages' state in host memory,
and the first holder of each stage sends one to a worker that does not hold the stage, on another
node where there is one. With sharded optimizer state (ZeRO) the copy is the whole state, gathered
from the holders. The two newest snapshot steps are kept: a copy may still be on its way.
"""

from __future__ import annotations

from dtrain.runtime.generation import Generation
from dtrain.runtime.state import StageState
from dtrain.runtime.transport import KIND_SNAPSHOT, Key

_KEPT_STEPS = 2


class Snapshots:
    """Takes one worker's snapshots in one generation, and keeps those that others send."""

    def __init__(self, generation: Generation, sharded: bool) -> None:
        self._generation = generation
        self._holdings = generation.holdings
        self._every = generation.around.job.config.robust.snapshot_every
        self._sharded = sharded
        plan, me = generation.plan, generation.around.me.worker
        keepers = {s: self._keeper(s) for s in range(plan.num_stages)}
        self._send = {
            s: k for s, k in keepers.items() if k is not None and plan.holders[s][0] == me
        }
        self._keep = [s for s, k in keepers.items() if k == me]
        self._awaited: list[int] = []

    def _keeper(self, stage: int) -> int | None:
        """Who keeps a copy of ``stage`` though it does not hold it."""
        plan = self._generation.plan
        holders = set(plan.holders[stage])
        others = [w for w in plan.workers if w not in holders]
        if not others:
            return None
        nodes = self._generation.nodes
        taken = {nodes[w] for w in holders}
        return min(others, key=lambda w: (nodes[w] in taken, (w - stage) % (max(others) + 1)))

    def take(self, *, force: bool = False) -> None:
        """Take the snapshot of this step boundary if one is due (or ``force``)."""
        step = self._holdings.progress.step
        self._collect()
        if not force and step % self._every:
            return
        if not self._sharded and not self._send and not self._keep and self._alone():
            # Every worker holds every stage: while one lives, tier 0 serves.
            return
        for stage in sorted(self._holdings.engines):
            state = self._holdings.state(stage).cloned()
            self._holdings.snapshots[step, stage] = state
            if stage in self._send:
                peer = self._generation.peers[self._send[stage]]
                key = Key(KIND_SNAPSHOT, step, stage)
                self._generation.around.transport.send(peer, key, state.packed())
        self._awaited += [step] if self._keep else []
        self._drop_old()

    def _alone(self) -> bool:
        plan = self._generation.plan
        return all(set(h) == set(plan.workers) for h in plan.holders)

    def _collect(self) -> None:
        """Take in the copies that have come."""
        transport = self._generation.around.transport
        for step in list(self._awaited):
            keys = {s: Key(KIND_SNAPSHOT, step, s) for s in self._keep}
            if all(transport.has(key) for key in keys.values()):
                for stage, key in keys.items():
                    packed = transport.receive(key, 1.0)
                    self._holdings.snapshots[step, stage] = StageState.unpacked(packed)
                self._awaited.remove(step)
        self._drop_old()

    def _drop_old(self) -> None:
        steps = sorted({step for step, _ in self._holdings.snapshots})
        for step, stage in list(self._holdings.snapshots):
            if step in steps[: -_KEPT_STEPS - 1]:
                del self._holdings.snapshots[step, stage]
