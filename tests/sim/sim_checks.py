"""What must hold whatever happens, checked when it could first be broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sim_training import best_step

from dtrain.scheduler import Plan
from dtrain.scheduler.events import Interrupt, MembershipPolicy, Peer, Proposal
from dtrain.scheduler.recovery import Settlement


class Checks:
    """The invariants of the whole cluster, seen from outside."""

    living: list[Any]
    lives: dict[Peer, Any]
    current: dict[int, Any]
    policy: MembershipPolicy
    sharded: bool
    record: Callable[[Any, str, object], None]

    def __init__(self) -> None:
        self.standing: dict[int, Proposal] = {}
        self.proposed: set[tuple[Peer, int]] = set()
        self.answered: set[tuple[int, Peer]] = set()
        self.named: set[Peer] = set()
        self.evicted: dict[Peer, int] = {}
        self.newest_life: dict[int, tuple[int, Peer]] = {}
        self.entered: dict[Peer, int] = {}
        self.plans: dict[int, Plan] = {}
        self.settlements: dict[int, Settlement] = {}
        self.starts: dict[int, int] = {}
        self.commits: dict[int, list[int]] = {}
        self.progress = 0
        self.durable = 0
        self.tiers: list[int] = []

    def check_proposal(self, life: Any, proposal: Proposal) -> None:
        """The first proposal of a number stands; it never takes a running job over."""
        number = proposal.number
        assert (life.peer, number) not in self.proposed, "proposes a number twice"
        self.proposed.add((life.peer, number))
        if number in self.standing:
            return
        assert number == len(self.standing) + 1, "a number was left out"
        peers = proposal.peers()
        workers = [p.worker for p in peers]
        assert len(set(workers)) == len(workers), "two lives of one worker in a generation"
        assert len(peers) >= self.policy.min_workers
        again = {p for p in peers if p in self.evicted}
        assert not again, f"evicted lives {again} are proposed again"
        before = self.standing.get(number - 1)
        if before is not None:
            self._check_succession(life, before, proposal)
        self.standing[number] = proposal
        self.evicted |= {p: number for p in self.named - peers if p not in self.evicted}
        self.named |= peers
        for peer in peers:
            self.newest_life[peer.worker] = (number, peer)
        for course in self._running():
            assert peers & set(course.peers.values()), (
                f"generation {number} takes over from generation {course.number}, which runs"
            )

    def _check_succession(self, life: Any, before: Proposal, proposal: Proposal) -> None:
        """Members lead, and only who is lost for somebody is left behind."""
        former, peers = before.peers(), proposal.peers()
        assert life.peer in former or not former & peers, "a newcomer leads members"
        for peer in former - peers:
            left = self.lives[peer]
            replaced = self.newest_life_of(peer.worker) is not left
            if not left.alive or left.leaving or replaced:
                continue
            lost = any(
                (peer, sure) in self.lives[p].told or (p, sure) in left.told
                for p in peers
                for sure in (True, False)
            )
            assert lost, f"{peer} is left behind for nothing"

    def newest_life_of(self, worker: int) -> Any:
        """The newest life of a worker."""
        return self.current[worker]

    def _running(self) -> list[Any]:
        """One course of each generation that all its members are in and can go on with."""
        found = {}
        for life in self.living:
            course = life.course
            if course is None or course.number in found:
                continue
            lives = [self.lives[p] for p in course.peers.values()]
            together = all(
                other.alive
                and other is self.newest_life_of(other.peer.worker)
                and not other.stopped
                and other.course is not None
                and other.course.number == course.number
                and not any(isinstance(i, Interrupt) for i in other.to_do)
                for other in lives
            )
            if together:
                found[course.number] = course
        return list(found.values())

    def check_enter(self, life: Any, proposal: Proposal) -> None:
        """All enter what stands, in rising numbers, and nobody who was evicted or replaced."""
        number, peer = proposal.number, life.peer
        assert proposal == self.standing[number], "another membership than the one that stands"
        assert peer in proposal.peers()
        answered = {p for n, p in self.answered if n == number}
        assert answered >= proposal.peers(), "enters before all have answered"
        assert number > self.entered.get(peer, 0), "a number that does not grow"
        self.entered[peer] = number
        assert self.evicted.get(peer, number + 1) > number, "an evicted life enters"
        since, newest = self.newest_life[peer.worker]
        assert newest == peer or since > number, "a replaced life enters"

    def check_generation(self, course: Any) -> None:
        """All members come to the same plan and settlement, and these fit what memories hold."""
        number, plan, settlement = course.number, course.plan, course.settlement
        if number in self.plans:
            assert plan == self.plans[number], "members make different plans"
            assert settlement == self.settlements[number]
            return
        self.plans[number], self.settlements[number] = plan, settlement
        self.tiers.append(settlement.tier)
        self.record(None, "==", f"generation {number} starts: {settlement.reason}")
        self.record(None, "==", f"plan: {plan.describe()} ({plan.reason})")
        self._check_plan(plan, course)
        memories = [(a, self.lives[a.peer].memory) for a in course.members]
        best = best_step(memories, plan.num_stages, sharded=self.sharded)
        assert settlement.step == best, f"goes on from {settlement.step} where {best} is to be had"
        assert (settlement.tier == 2) == (best is None)

    @staticmethod
    def _check_plan(plan: Plan, course: Any) -> None:
        workers = set(course.peers)
        assert set(plan.workers) == workers
        assert plan.generation == course.number
        for held, runs in zip(plan.holders, plan.executors, strict=True):
            assert len(runs) == plan.layout.microbatches
            assert set(runs) <= set(held) <= workers
            assert len(set(held)) == len(held) >= min(plan.layout.redundancy, len(workers))
        done = [a for actions in plan.actions.values() for a in actions]
        assert len(done) == len(set(done)) == 2 * plan.num_stages * plan.layout.microbatches

    def check_commit(self, course: Any) -> None:
        """Steps are committed one after the other, by one generation after the other."""
        number, step = course.number, course.step_at
        if course.life.peer in self.evicted:
            # It sees what others went on without; nothing of it counts any more.
            return
        assert number >= self.progress, "an older generation makes progress beside a newer one"
        self.progress = number
        done = self.commits.setdefault(number, [])
        if not done:
            settled = self.settlements[number].step
            assert settled is None or step == settled, "steps were left out or are done twice"
        if done and done[-1] == step:
            return
        assert not done or step == done[-1] + 1, "steps were left out or are done twice"
        done.append(step)
        self.record(None, "==", f"generation {number} commits step {step}")

    def saved(self, step: int) -> None:
        """A checkpoint is durable: all members have written it."""
        self.durable = step

    def settled(self) -> bool:
        """Whether everyone alive is in one generation that commits steps."""
        numbers = set()
        for life in self.living:
            if life.course is None or life.stopped:
                return False
            numbers.add(life.course.number)
        if len(numbers) != 1:
            return False
        number = numbers.pop()
        members = self.standing[number].peers()
        alive = {life.peer for life in self.living}
        return members == alive and len(self.commits.get(number, [])) >= 2
