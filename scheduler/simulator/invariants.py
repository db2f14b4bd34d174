"""What must hold whatever happens, checked when it could first be broken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from itertools import pairwise
from operator import lt
from typing import TYPE_CHECKING

from dtrain.scheduler.costs import UNIFORM, Cluster
from dtrain.scheduler.domains import domain_labels, in_one_domain
from dtrain.scheduler.events import Interrupt, MembershipPolicy, Peer, Proposal
from dtrain.scheduler.plan import Orders, Plan
from dtrain.scheduler.recovery import Settlement
from dtrain.scheduler.simulator.errors import require
from dtrain.scheduler.simulator.training import Course, best_step

if TYPE_CHECKING:
    from dtrain.scheduler.simulator.process import Life


def check_plan(
    plan: Plan, number: int, members: Collection[int], cluster: Cluster = UNIFORM
) -> None:
    """A plan is of its generation and members, and does all the work once.

    Every (stage, microbatch) has one executor, which holds the stage; every stage has
    ``min(redundancy, workers)`` holders or more, not all of them in one failure domain where that
    can be avoided; every worker's actions are those that it executes.

    Raises:
        InvariantError: as ``require``.
    """
    workers, layout = set(members), plan.layout
    require(set(plan.workers) == workers, f"a plan for {plan.workers}, not for the members")
    require(plan.generation == number, f"a plan of generation {plan.generation} in {number}")
    require(len(plan.holders) == len(plan.executors) == layout.num_stages, "stages are missing")
    least = min(layout.redundancy, len(workers))
    labels = domain_labels(cluster, sorted(workers)) if least > 1 else {}
    for stage, (held, runs) in enumerate(zip(plan.holders, plan.executors, strict=True)):
        require(len(runs) == layout.microbatches, f"stage {stage} runs {len(runs)} microbatches")
        holding = set(held)
        require(holding <= workers, f"stage {stage} is held by strangers")
        require(len(holding) == len(held) >= least, f"stage {stage} has holders {held}")
        require(holding.issuperset(runs), f"stage {stage} is executed by others than its holders")
        require(not in_one_domain(held, labels), f"one domain has all copies of stage {stage}")
    if isinstance(plan.actions, Orders):
        _check_orders(plan, plan.actions)
    else:
        _check_actions(plan)


def _check_orders(plan: Plan, orders: Orders) -> None:
    """Orders sort what the executors execute; planned starts rise along every microbatch's way."""
    require(orders.executors == plan.executors, "orders of other executors")
    require(set(orders.workers) == set(plan.workers), "orders of other workers")
    way = [*orders.forward, *reversed(orders.backward)]
    require(len(way) == 2 * plan.num_stages, "starts of other stages")
    for before, after in pairwise(way):
        rising = all(map(lt, before, after)) and len(before) == len(after)
        require(rising, "an action is planned before what it needs")


def _check_actions(plan: Plan) -> None:
    mine: dict[int, list[tuple[int, int]]] = {w: [] for w in plan.workers}
    for stage, runs in enumerate(plan.executors):
        for microbatch, worker in enumerate(runs):
            mine[worker].append((stage, microbatch))
    for worker, pairs in mine.items():
        done = plan.actions.get(worker, ())
        require(len(done) == 2 * len(pairs), f"worker {worker} does {len(done)} actions")
        for kind in ("F", "B"):
            does = sorted((a.stage, a.microbatch) for a in done if a.kind == kind)
            require(does == pairs, f"worker {worker}'s {kind} actions are not what it executes")


class Invariants(ABC):
    """The invariants of the whole cluster, seen from outside.

    ``standing``: the proposal of each generation. ``commits``: the steps that each generation
    committed. ``tiers``: the tier of recovery that each generation started from. ``on_commit``: is
    told the generation and number of each step that is committed.
    """

    living: list[Life]
    lives: dict[Peer, Life]
    current: dict[int, Life]
    policy: MembershipPolicy
    sharded: bool
    cluster: Cluster

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
        self.commits: dict[int, list[int]] = {}
        self.progress = 0
        self.durable = 0
        self.tiers: list[int] = []
        self.on_commit: Callable[[int, int], None] | None = None

    @abstractmethod
    def record(self, life: Life | None, arrow: str, what: object) -> None:
        """Keep a line of the story."""

    def check_proposal(self, life: Life, proposal: Proposal) -> None:
        """The first proposal of a number stands; it never takes a running job over."""
        number = proposal.number
        require((life.peer, number) not in self.proposed, "proposes a number twice")
        self.proposed.add((life.peer, number))
        if number in self.standing:
            return
        require(number == len(self.standing) + 1, "a number was left out")
        peers = proposal.peers()
        workers = [p.worker for p in peers]
        require(len(set(workers)) == len(workers), "two lives of one worker in a generation")
        require(len(peers) >= self.policy.min_workers, f"{len(peers)} members are too few")
        again = {p for p in peers if p in self.evicted}
        require(not again, f"evicted lives {again} are proposed again")
        before = self.standing.get(number - 1)
        if before is not None:
            self._check_succession(life, before, proposal)
        self.standing[number] = proposal
        self.evicted |= {p: number for p in self.named - peers if p not in self.evicted}
        self.named |= peers
        for peer in peers:
            self.newest_life[peer.worker] = (number, peer)
        for course in self._running():
            require(
                not peers.isdisjoint(course.peers.values()),
                f"generation {number} takes over from generation {course.number}, which runs",
            )

    def _check_succession(self, life: Life, before: Proposal, proposal: Proposal) -> None:
        """Members lead, and only who is lost for somebody is left behind."""
        former, peers = before.peers(), proposal.peers()
        require(life.peer in former or not former & peers, "a newcomer leads members")
        for peer in former - peers:
            left = self.lives[peer]
            replaced = self.current[peer.worker] is not left
            if not left.alive or left.leaving or replaced:
                continue
            lost = any(
                (peer, sure) in self.lives[p].told or (p, sure) in left.told
                for p in peers
                for sure in (True, False)
            )
            require(lost, f"{peer} is left behind for nothing")

    def _running(self) -> list[Course]:
        """One course of each generation that all its members are in and can go on with."""
        found: dict[int, Course] = {}
        broken: set[int] = set()
        for life in self.living:
            course = life.course
            if course is None or course.number in found or course.number in broken:
                continue
            if all(self._is_in(self.lives[p], course.number) for p in course.peers.values()):
                found[course.number] = course
            else:
                broken.add(course.number)
        return list(found.values())

    def _is_in(self, life: Life, number: int) -> bool:
        """Whether a life is in a generation and can go on with it."""
        return (
            life.alive
            and life is self.current[life.peer.worker]
            and not life.stopped
            and life.course is not None
            and life.course.number == number
            and not any(isinstance(i, Interrupt) for i in life.to_do)
        )

    def check_enter(self, life: Life, proposal: Proposal) -> None:
        """All enter what stands, in rising numbers, and nobody who was evicted or replaced."""
        number, peer = proposal.number, life.peer
        require(proposal == self.standing[number], "another membership than the one that stands")
        peers = proposal.peers()
        require(peer in peers, "enters a generation that does not name it")
        answered = all((number, p) in self.answered for p in peers)
        require(answered, "enters before all have answered")
        require(number > self.entered.get(peer, 0), "a number that does not grow")
        self.entered[peer] = number
        require(self.evicted.get(peer, number + 1) > number, "an evicted life enters")
        since, newest = self.newest_life[peer.worker]
        require(newest == peer or since > number, "a replaced life enters")

    def check_generation(self, course: Course) -> None:
        """All members come to the same plan and settlement, and these fit what memories hold."""
        number, plan, settlement = course.number, course.plan, course.settlement
        if number in self.plans:
            require(plan == self.plans[number], "members make different plans")
            require(settlement == self.settlements[number], "members settle differently")
            return
        self.plans[number], self.settlements[number] = plan, settlement
        self.tiers.append(settlement.tier)
        self.record(None, "==", f"generation {number} starts: {settlement.reason}")
        self.record(None, "==", f"plan: {plan.describe()} ({plan.reason})")
        check_plan(plan, number, course.peers, self.cluster)
        memories = [(a, self.lives[a.peer].memory) for a in course.members]
        best = best_step(memories, plan.num_stages, sharded=self.sharded)
        require(
            settlement.step == best, f"goes on from {settlement.step} where {best} is to be had"
        )
        require((settlement.tier == 2) == (best is None), f"tier {settlement.tier} at {best}")

    def check_commit(self, course: Course) -> None:
        """Steps are committed one after the other, by one generation after the other."""
        number, step = course.number, course.step_at
        if course.life.peer in self.evicted:
            # It sees what others went on without; nothing of it counts any more.
            return
        require(number >= self.progress, "an older generation makes progress beside a newer one")
        self.progress = number
        done = self.commits.setdefault(number, [])
        if not done:
            settled = self.settlements[number].step
            require(settled is None or step == settled, "steps were left out or are done twice")
        if done and done[-1] == step:
            return
        require(not done or step == done[-1] + 1, "steps were left out or are done twice")
        done.append(step)
        self.record(None, "==", f"generation {number} commits step {step}")
        if self.on_commit is not None:
            self.on_commit(number, step)

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
