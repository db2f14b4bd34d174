"""The same cluster driven by hypothesis, which shrinks a failing history to a short one."""

from __future__ import annotations

import os

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dtrain.scheduler.simulator.histories import PEACE_S, make_peace, stays_possible
from dtrain.scheduler.simulator.world import World

picks = st.integers(0, 9)


class Cluster(RuleBasedStateMachine):
    """Faults in any order; every invariant is checked by the world itself, after every event."""

    world: World

    @initialize(
        seed=st.integers(0, 10_000),
        workers=st.integers(2, 5),
        stages=st.integers(1, 3),
        redundancy=st.integers(1, 3),
        sharded=st.booleans(),
    )
    def start(self, seed: int, workers: int, stages: int, redundancy: int, sharded: bool) -> None:
        self.world = World.small(
            seed,
            workers=workers,
            stages=min(stages, workers),
            redundancy=redundancy,
            sharded=sharded,
        )
        self.world.start(*range(workers))

    def _pick(self, pick: int) -> int:
        workers = sorted(self.world.current)
        return workers[pick % len(workers)]

    @rule(milliseconds=st.sampled_from([1, 5, 20, 100, 400, 1500]))
    def time_passes(self, milliseconds: int) -> None:
        self.world.run(milliseconds / 1e3)

    @rule(picks=st.sets(picks, min_size=1, max_size=3))
    def crash(self, picks: set[int]) -> None:
        for worker in sorted({self._pick(p) for p in picks}):
            self.world.crash(worker)

    @rule(pick=picks, name=st.sampled_from(["Announce", "Propose", "Answer", "Enter"]))
    def crash_after(self, pick: int, name: str) -> None:
        life = self.world.current[self._pick(pick)]
        planned = (life.peer.worker, name, life.instructions.get(name, 0) + 1)
        self.world.crash_on.append(planned)

    @rule(pick=picks)
    def stop(self, pick: int) -> None:
        self.world.stop(self._pick(pick))

    @rule()
    def wake_all(self) -> None:
        for life in list(self.world.living):
            self.world.wake(life)

    @rule(pick=picks)
    def replace_a_stopped_worker(self, pick: int) -> None:
        worker = self._pick(pick)
        if not self.world.active(worker):
            self.world.start(worker)

    @rule(picks=st.sets(picks), log_with=st.integers(0, 1))
    def split(self, picks: set[int], log_with: int) -> None:
        side = {self._pick(p) for p in picks}
        self.world.cut(side, set(self.world.current) - side, log_with=log_with)

    @rule(speaker=picks, hearer=picks)
    def silence(self, speaker: int, hearer: int) -> None:
        if self._pick(speaker) != self._pick(hearer):
            self.world.silence(self._pick(speaker), self._pick(hearer))

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        self.world.leave(self._pick(pick))

    @precondition(lambda self: len(self.world.current) < 7)
    @rule()
    def join(self) -> None:
        self.world.start(max(self.world.current) + 1)

    @rule()
    def restart_all(self) -> None:
        self.world.restart_all()

    @rule(on=st.booleans())
    def respawns(self, on: bool) -> None:
        self.world.respawns = on

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        make_peace(self.world, self.world.chance)
        settled = self.world.run(PEACE_S, self.world.settled)
        assert settled or not stays_possible(self.world), self.world.story()


Cluster.TestCase.settings = settings(
    max_examples=int(os.environ.get("DTRAIN_SIM_EXAMPLES", "60")),
    stateful_step_count=25,
    deadline=None,
    derandomize="DTRAIN_SIM_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
TestCluster = Cluster.TestCase
