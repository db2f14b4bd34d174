"""A cluster on a virtual clock around the pure membership: log, network, processes, supervisors.

Everything random comes from one seed. Processes (``process.py``) run the real membership machine,
recovery and planner; training (``training.py``) is a model. A process that cannot reach the log
waits, and ends when it has waited too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dtrain.scheduler import events as core
from dtrain.scheduler.chance import Chance
from dtrain.scheduler.costs import UNIFORM, Cluster
from dtrain.scheduler.events import Announcement, MembershipPolicy, Peer
from dtrain.scheduler.plan import Layout, Plan
from dtrain.scheduler.planner import even_cuts, make_plan, replan
from dtrain.scheduler.recovery import Settlement, settle
from dtrain.scheduler.relayout import replan_or_relayout
from dtrain.scheduler.simulator.clock import Clock, Do
from dtrain.scheduler.simulator.errors import require
from dtrain.scheduler.simulator.invariants import Invariants
from dtrain.scheduler.simulator.network import Network, NetworkModel
from dtrain.scheduler.simulator.process import Life
from dtrain.scheduler.simulator.story import describe
from dtrain.scheduler.simulator.training import Course

PROBE_S = 0.25
"""Seconds between two looks at who is silent."""

Line = tuple[float, str, str, object]


@dataclass(frozen=True)
class Shape:
    """What a simulated job is like, apart from its faults.

    ``world_size``: workers that it was launched with. ``sharded``: optimizer state is split over a
    stage's holders. ``lease_s``: silence after which a peer counts as lost. ``respawn_s``: from a
    process's end to its next life. ``closes_on_loss``: of whoever gives a peer up, the peer sees
    nothing but the end of the connection, and takes that for a death. ``snapshot_every``,
    ``checkpoint_every``: in steps.
    ``cluster``: failure domains. ``relayout``: the work may be laid out anew.
    """

    layout: Layout
    world_size: int
    min_workers: int = 1
    sharded: bool = False
    compute_s: float = 0.2
    closes_on_loss: bool = False
    lease_s: float = 1.0
    respawn_s: float = 0.3
    gather_s: float = 12.0
    split_s: float = 2.0
    snapshot_every: int = 3
    checkpoint_every: int = 4
    cluster: Cluster = UNIFORM
    relayout: bool = False


class World(Invariants):
    """The cluster. Faults are methods; ``run`` lets time pass.

    ``jitter``: delays are drawn from ``network_model`` and the log tells entries again at times;
    else everything takes 5 ms. ``compute_time``: seconds of a step's compute on one worker.
    ``crash_on``: (worker, instruction, how many-th) after which that worker crashes.
    """

    def __init__(
        self,
        seed: int,
        shape: Shape,
        network_model: NetworkModel | None = None,
        *,
        jitter: bool = True,
        story_length: int | None = None,
    ) -> None:
        super().__init__()
        self.seed, self.shape, self.jitter = seed, shape, jitter
        self.chance = Chance("world", seed)
        self.network = Network()
        self.network_model = network_model or NetworkModel()
        self.policy = MembershipPolicy(
            shape.world_size, shape.min_workers, shape.gather_s, shape.split_s
        )
        self.layout, self.sharded = shape.layout, shape.sharded
        self.cluster = shape.cluster
        self.snapshot_every, self.checkpoint_every = shape.snapshot_every, shape.checkpoint_every
        self.snapshots_kept = 2
        self.states_moved = 0
        self.compute_time: Callable[[Course], float] = lambda course: shape.compute_s
        self.clock = Clock()
        self.log: list[tuple[core.Event, Plan | None]] = []
        self.current: dict[int, Life] = {}
        self.living: list[Life] = []
        self.lives: dict[Peer, Life] = {}
        self.born: dict[int, int] = {}
        self.respawns = True
        self.gone_for_good: set[int] = set()
        self.silent_s: dict[tuple[Peer, Peer], float] = {}
        self.crash_on: list[tuple[int, str, int]] = []
        self.lines: deque[Line] = deque(maxlen=story_length)
        # Ended or stopped: in a whole network, nobody else need be looked at.
        self._suspects: set[Peer] = set()
        self._changes = 0
        # Generations of which a member has ended.
        self._struck: set[int] = set()
        self._made: dict[tuple[int, int], tuple[Plan | None, Plan, Settlement]] = {}
        self._rounds: dict[tuple[int, str], dict[Peer, bool]] = {}
        self.clock.at(0.0, None, self._probe)

    @classmethod
    def small(
        cls,
        seed: int = 0,
        *,
        workers: int = 4,
        stages: int = 2,
        microbatches: int = 4,
        redundancy: int = 2,
        jitter: bool = True,
        **shape: Any,
    ) -> World:
        """A world of a few workers. ``shape``: further fields of ``Shape``."""
        layout = Layout(even_cuts(stages, stages), microbatches, redundancy)
        return cls(seed, Shape(layout, workers, **shape), jitter=jitter)

    # Time

    @property
    def now(self) -> float:
        """Virtual time, in seconds."""
        return self.clock.now

    def delay(self) -> float:
        """The delay of a message, in seconds."""
        return self.network_model.draw(self.chance) if self.jitter else 0.005

    def later(self, life: Life, delay_s: float, action: Do) -> None:
        """Do something as ``life``, if it still lives then; after it wakes, if it is stopped."""
        # Without jitter the workers still differ a little, so that nothing is a tie.
        skew = 0.0 if self.jitter else life.peer.worker * 1e-4
        self.clock.at(self.now + delay_s + skew, life, action)

    def at(self, time_s: float, action: Do) -> None:
        """Do something from outside the cluster at a time."""
        self.clock.at(time_s, None, action)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; whether ``until`` came true (it is looked at after every event)."""
        return self.clock.run(seconds, until)

    # The log

    def reaches_log(self, life: Life) -> bool:
        """Whether the process can reach the job's log; it ends when it cannot for too long."""
        if self.network.reaches_log(life.peer.worker):
            life.cut_off_s = None
            return True
        return False

    def append(self, event: core.Event, plan: Plan | None = None) -> None:
        """Append to the log; everybody hears of it in time."""
        self.log.append((event, plan))
        for life in self.living:
            life.soon()

    def propose(self, life: Life, proposal: core.Proposal) -> None:
        """The first proposal of a number stands."""
        self.check_proposal(life, proposal)
        self.append(core.Proposed(proposal))

    def old_entries(self, life: Life) -> list[core.Event]:
        """Some entries that were read before and are told once more."""
        if not self.jitter or not life.read or self.chance.random() > 0.1:
            return []
        start = self.chance.randrange(life.read)
        return [event for event, _ in self.log[start : min(start + 3, life.read)]]

    # Messages between trainers

    def send(self, course: Course, to: Peer, action: Callable[[Course], None]) -> None:
        """Deliver within the generation, unless the network or an end of life prevents it."""
        sender, target = course.life.peer, self.lives[to]

        def deliver() -> None:
            there = target.course
            if not self.network.connected(sender.worker, to.worker):
                # The connection tries again for as long as nobody gives the other up.
                self.clock.at(self.now + 0.05, target, deliver)
            elif there is not None and there.number == course.number and there.begun:
                action(there)
            elif course.left and not course.life.alive:
                return
            elif target.machine.number <= course.number:
                # It enters a little later, or never.
                self.clock.at(self.now + 0.02, target, deliver)

        self.clock.at(self.now + self.delay(), target, deliver)

    def all_at(
        self, course: Course, what: str, wish: bool, action: Callable[[Course, bool], None]
    ) -> None:
        """``action`` on every member once all have come to ``what``; its bool: anybody's wish."""
        came = self._rounds.setdefault((course.number, what), {})
        require(course.life.peer not in came, f"{course.life.peer} came to {what} twice")
        came[course.life.peer] = wish
        if len(came) < len(course.peers):
            return
        wished = any(came.values())
        for peer in course.peers.values():
            self._complete(course, peer, lambda c: action(c, wished))

    def _complete(self, course: Course, peer: Peer, action: Callable[[Course], None]) -> None:
        target = self.lives[peer]

        def deliver() -> None:
            if course.number in self._struck and self.chance.random() < 0.5:
                # What the dead had still to pass on never comes.
                return
            if target.course is None or target.course.number != course.number:
                return
            network = self.network
            if network.whole or all(
                network.connected(p.worker, peer.worker) for p in course.peers.values()
            ):
                action(target.course)
            else:
                self.clock.at(self.now + 0.05, target, deliver)

        self.clock.at(self.now + self.delay() + peer.worker * 1e-4, target, deliver)

    def decide(self, old: Plan | None, proposal: core.Proposal) -> tuple[Plan, Settlement]:
        """The plan and the settlement of a generation, for a member that knows plan ``old``.

        Both are pure functions, so members that start from one and the same plan share the result.
        """
        key = (proposal.number, id(old))
        if key not in self._made:
            workers, number = proposal.workers(), proposal.number
            if old is None:
                plan = make_plan(self.layout, workers, number, None, self.cluster)
            else:
                again = replan_or_relayout if self.shape.relayout else replan
                plan = again(old, workers, number, proposal.reason, None, self.cluster)
            settlement = settle(proposal.members, plan.num_stages, sharded=self.sharded)
            # The old plan is kept too, so that no other comes to have its id.
            self._made[key] = old, plan, settlement
        return self._made[key][1:]

    def enter(self, course: Course) -> None:
        """A member forms its generation."""
        self.later(course.life, self.delay(), lambda: None if course.left else course.form())
        for made in [k for k in self._made if k[0] < course.number - 1]:
            del self._made[made]
        for key in [k for k in self._rounds if k[0] < course.number - 1]:
            del self._rounds[key]

    # Losses

    def _probe(self) -> None:
        """Notice who is silent, who has ended, who waits for the log; and let machines tick."""
        self.clock.at(self.now + PROBE_S, None, self._probe)
        whole = self.network.whole
        suspects = self._suspects | {peer for _, peer in self.silent_s} if whole else None
        for life in list(self.living):
            if life.stopped:
                continue
            if not self.reaches_log(life):
                self._cut_off(life)
            elif life.machine.state in ("gathering", "answering"):
                life.soon()
            if suspects is None:
                for peer in sorted(life.machine.watched()):
                    self._look_at(life, peer)
            elif life.looked != (key := (life.turns, self._changes)):
                pending = sorted(filter(life.machine.watches, suspects))
                for peer in pending:
                    self._look_at(life, peer)
                if not pending:
                    # Until it hears something or somebody else is in trouble, nothing changes.
                    life.looked = key

    def _cut_off(self, life: Life) -> None:
        """Without the log a generation trains on, but not for as long as others wait for it."""
        life.cut_off_s = self.now if life.cut_off_s is None else life.cut_off_s
        limit = self.policy.gather_s / 2 if life.course is not None else 2.0
        if self.now - life.cut_off_s > limit:
            self.end(life, "could not reach the log")

    def _look_at(self, life: Life, peer: Peer) -> None:
        other, lease_s = self.lives[peer], self.shape.lease_s
        heard = self.network.connected(peer.worker, life.peer.worker)
        both = heard and self.network.connected(life.peer.worker, peer.worker)
        if not other.alive and both:
            self.silent_s.pop((life.peer, peer), None)
            self._tell_lost(life, peer, "has ended", True)
        elif other.alive and not other.stopped and heard:
            self.silent_s.pop((life.peer, peer), None)
        elif self.now - self.silent_s.setdefault((life.peer, peer), self.now) >= lease_s:
            self._tell_lost(life, peer, f"was silent for {lease_s:g} s", False)

    def _tell_lost(self, life: Life, peer: Peer, reason: str, certain: bool) -> None:
        if (peer, certain) in life.told or (peer, True) in life.told:
            return
        life.told.add((peer, certain))
        life.notice(core.Lost(peer, reason, certain))
        near = self.network.connected(life.peer.worker, peer.worker)
        if not certain and near:
            # It tells whom it gives up; in the worst case only the connection's end comes through.
            other, ends = self.lives[peer], self.shape.closes_on_loss
            how = "closed its connection" if ends else "does not hear this worker"
            self.later(other, self.delay(), lambda: self._tell_lost(other, life.peer, how, ends))
        course = life.course
        if course is not None and peer in course.peers.values() and not self.reaches_log(life):
            # The membership has to change and cannot: this is the end, in a resumable state.
            self.end(life, "lost a member without the log")

    # Processes

    def start(self, *workers: int) -> None:
        """Start a new life of each worker."""
        for worker in workers:
            number = self.born.get(worker, 0)
            self.born[worker] = number + 1
            peer = Peer(worker, "abcdefghijklmnopqrstuvwxyz"[number % 26] + str(number // 26 or ""))
            life = Life(self, peer, self.policy)
            # An old life may still be there, stopped: its host was given up, and it will wake.
            assert worker not in self.current or not self.active(worker), "it runs already"
            self.current[worker] = self.lives[peer] = life
            self.living.append(life)
            self.record(life, "**", "starts")
            life.notice(core.Regroup(Announcement(peer), "started"))

    def start_late(self, worker: int, time_s: float) -> None:
        """Start a worker at a time, unless it has been started by then."""
        self.at(time_s, lambda: None if worker in self.current else self.start(worker))

    def end(self, life: Life, why: str) -> None:
        """A process ends; its peers notice, its supervisor may start it again."""
        if not life.alive:
            return
        life.alive, life.stopped = False, False
        self._suspects.add(life.peer)
        self._changes += 1
        for pair in [pair for pair in self.silent_s if pair[0] == life.peer]:
            del self.silent_s[pair]
        self._struck.add(self.entered.get(life.peer, 0))
        self.living.remove(life)
        self.record(life, "**", why)
        if life.course is not None:
            life.course.left = True
        worker = life.peer.worker
        for other in self.living:
            near = self.network.connected(worker, other.peer.worker)
            if near and other.machine.watches(life.peer):
                self.later(other, self.delay(), partial(self._look_at, other, life.peer))
        if why == "withdrew" and life.leaving:
            self.gone_for_good.add(worker)
        if self.respawns:
            respawn_s = self.shape.respawn_s
            self.at(self.now + respawn_s + self.delay(), lambda: self._respawn(life))

    def _respawn(self, ended: Life) -> None:
        worker = ended.peer.worker
        if self.current.get(worker) is not ended or worker in self.gone_for_good:
            return
        if not self.respawns:
            return
        if not self.network.reaches_log(worker):
            self.at(self.now + 1.0, lambda: self._respawn(ended))
        else:
            self.start(worker)

    # Faults

    def active(self, worker: int) -> bool:
        """Whether the worker's newest life is alive and not stopped."""
        return self.current[worker].alive and not self.current[worker].stopped

    def crash(self, *workers: int) -> None:
        """SIGKILL."""
        for worker in workers:
            self.end(self.current[worker], "crashes")

    def stop(self, worker: int) -> None:
        """SIGSTOP."""
        life = self.current[worker]
        if life.alive:
            life.stopped = True
            self._suspects.add(life.peer)
            self._changes += 1
            self.record(life, "**", "is stopped")

    def wake(self, life: Life) -> None:
        """SIGCONT: it does first what it was about to do when it was stopped."""
        if life.alive and life.stopped:
            life.stopped = False
            self._suspects.discard(life.peer)
            self.record(life, "**", "wakes")
            woken, life.woken = life.woken, []
            for action in woken:
                if life.alive:
                    action()
            if life.alive:
                life.soon()

    def cut(self, *sides: Iterable[int], log_with: int = 0) -> None:
        """Split the network; the log is on the side number ``log_with``."""
        groups = [sorted(side) for side in sides]
        self.network.cut(*groups, log_with=log_with)
        self.record(None, "**", f"network split: {groups}, log: {log_with}")

    def keep_apart(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Nothing goes between the two groups, both of which reach the log."""
        a, b = sorted(some), sorted(others)
        self.network.keep_apart(a, b)
        self.record(None, "**", f"nothing goes between {a} and {b}")

    def heal(self) -> None:
        """Mend the network."""
        self.network.heal()
        self._changes += 1
        self.record(None, "**", "network mended")
        for life in self.living:
            life.cut_off_s = None
            life.soon()

    def silence(self, speaker: int, hearer: int) -> None:
        """From now on nothing from ``speaker`` reaches ``hearer``."""
        self.network.silence(speaker, hearer)
        self.record(None, "**", f"nothing from worker {speaker} reaches worker {hearer}")

    def leave(self, worker: int) -> None:
        """SIGTERM with grace: the worker leaves at a step boundary."""
        self.current[worker].leaving = True
        self.record(self.current[worker], "**", "is told to leave")

    def restart_all(self) -> None:
        """Every process is killed and started anew over the same log."""
        workers = list(self.current)
        respawns, self.respawns = self.respawns, False
        for life in list(self.living):
            self.end(life, "is killed with the whole job")
        self.respawns = respawns
        self.gone_for_good = set()
        self.start(*workers)

    def on_instruction(self, life: Life, name: str) -> None:
        """Crash where a fault waits for this instruction of this worker."""
        for planned in self.crash_on:
            if planned == (life.peer.worker, name, life.instructions[name]):
                self.crash_on.remove(planned)
                self.end(life, f"crashes after {name}")
                return

    # The story

    def record(self, life: Life | None, arrow: str, what: object) -> None:
        """Keep a line of the story; it is written out only when somebody reads it."""
        who = f"{life.peer.worker}{life.peer.incarnation}" if life is not None else ""
        self.lines.append((self.now, who, arrow, what))

    def record_events(self, life: Life, events: Iterable[core.Event]) -> None:
        """Keep what a machine is told."""
        for event in events:
            if not isinstance(event, core.Tick):
                self.record(life, "<-", event)

    def story(self, lines: int = 120) -> str:
        """The end of the story, for a person."""
        return "\n".join(
            f"{time:8.3f} {who:>4} {arrow} {describe(what)}"
            for time, who, arrow, what in list(self.lines)[-lines:]
        )
