"""A cluster on a virtual clock around the pure membership: log, network, processes, supervisors.

Everything random comes from one seed. The shell of each process does what the real one does: it
reads the job's log in order, tells its machine, and carries the instructions out; a process that
cannot reach the log waits, and ends when it has waited too long.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from sim_checks import Checks
from sim_story import describe
from sim_training import Course, Memory

from dtrain.scheduler import Layout, Plan, even_cuts
from dtrain.scheduler import events as core
from dtrain.scheduler.events import Announcement, MembershipPolicy, Peer
from dtrain.scheduler.membership import Membership

LEASE_S = 1.0
PROBE_S = 0.25


class Life:
    """A worker's process from its start to its end, as its machine and its memory know it."""

    def __init__(self, world: World, peer: Peer, policy: MembershipPolicy) -> None:
        self.world, self.peer = world, peer
        self.machine = Membership(Announcement(peer), policy)
        self.memory = Memory()
        self.plans: dict[Peer, Plan | None] = {}
        self.course: Course | None = None
        self.alive, self.stopped, self.leaving = True, False, False
        self.read = 0
        self.queue: list[core.Event] = []
        self.told: set[tuple[Peer, bool]] = set()
        self.woken: list[Callable[[], None]] = []
        self.turn_due = False
        self.to_do: list[core.Instruction] = []
        self.cut_off_s: float | None = None
        self.instructions: dict[str, int] = {}

    def notice(self, event: core.Event) -> None:
        """Something for the machine."""
        self.queue.append(event)
        self.soon()

    def soon(self) -> None:
        """Take a turn before long."""
        if not self.turn_due:
            self.turn_due = True
            self.world.later(self, self.world.delay(), self.turn)

    def turn(self) -> None:
        """Read the log, tell the machine, carry out what it says."""
        self.turn_due = False
        if self.to_do or not self.world.reaches_log(self):
            # The log blocks; a loss is only acted on when it answers again.
            return
        entries = self.world.log[self.read :]
        again = self.world.old_entries(self)
        self.read = len(self.world.log)
        events: list[core.Event] = [core.Tick(), *again]
        for event, plan in entries:
            if isinstance(event, core.Announced):
                self.plans[event.announcement.peer] = plan
            events.append(event)
        events += self.queue
        self.queue = []
        self.world.record_events(self, events)
        self.to_do = self.machine.step(self.world.now, *events)
        self.carry_on()

    def carry_on(self) -> None:
        """Carry out one instruction after the other; a stop or an end may come between them."""
        if not self.to_do:
            if self.queue or self.read < len(self.world.log):
                self.soon()
            return
        if not self.world.reaches_log(self):
            self.world.later(self, 0.05, self.carry_on)
            return
        instruction = self.to_do.pop(0)
        self.world.record(self, "->", instruction)
        self._carry_out(instruction)
        name = type(instruction).__name__
        self.instructions[name] = self.instructions.get(name, 0) + 1
        self.world.on_instruction(self, name)
        if self.to_do:
            self.world.later(self, self.world.delay() / 4, self.carry_on)
        else:
            self.carry_on()

    def _carry_out(self, instruction: core.Instruction) -> None:
        world = self.world
        match instruction:
            case core.Announce(announcement):
                world.append(core.Announced(announcement), self.memory.plan)
            case core.Propose(proposal):
                world.propose(self, proposal)
            case core.Answer(number):
                world.answered.add((number, self.peer))
                world.append(core.Answered(number, self.peer))
            case core.Enter(proposal):
                world.check_enter(self, proposal)
                self.course = Course(world, self, proposal)
                self.cut_off_s = None
                world.enter(self.course)
            case core.Withdraw():
                world.end(self, "withdrew")
            case core.Interrupt(reason):
                if self.course is not None:
                    world.later(self, world.delay(), lambda: self.regroup(reason, self.course))

    def regroup(self, reason: str, course: Course | None = None) -> None:
        """Leave the generation and ask for the next."""
        if self.course is None or (course is not None and course is not self.course):
            return
        self.course.left = True
        self.course = None
        announcement = self.memory.announcement(
            self.peer, sharded=self.world.sharded, leaving=self.leaving
        )
        self.notice(core.Regroup(announcement, reason))


class World(Checks):
    """The cluster. Faults are methods; ``run`` lets time pass."""

    def __init__(
        self,
        seed: int = 0,
        *,
        workers: int = 4,
        stages: int = 2,
        microbatches: int = 4,
        redundancy: int = 2,
        world_size: int | None = None,
        min_workers: int = 1,
        sharded: bool = False,
        jitter: bool = True,
        compute_s: float = 0.2,
        closes_on_loss: bool = False,
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.seed, self.jitter, self.compute_s, self.sharded = seed, jitter, compute_s, sharded
        self.closes_on_loss = closes_on_loss
        self.layout = Layout(even_cuts(stages, stages), microbatches, redundancy)
        self.policy = MembershipPolicy(world_size or workers, min_workers, 12.0, 2.0)
        self.now = 0.0
        self.clock: list[tuple[float, int, Life | None, Callable[[], None]]] = []
        self.ticket = 0
        self.log: list[tuple[core.Event, Plan | None]] = []
        self.current: dict[int, Life] = {}
        self.living: list[Life] = []
        self.lives: dict[Peer, Life] = {}
        self.born: dict[int, int] = {}
        self.respawns = True
        self.gone_for_good: set[int] = set()
        self.side: dict[int, int] = {}
        self.log_side = 0
        self.deaf: set[tuple[int, int]] = set()
        self.silent_s: dict[tuple[Peer, Peer], float] = {}
        self.crash_on: list[tuple[int, str, int]] = []
        self.recording = False
        self.lines: list[tuple[float, str, str, object]] = []
        self._rounds: dict[tuple[int, str], dict[Peer, bool]] = {}
        self._at(0.0, None, self._probe)

    # Time

    def delay(self) -> float:
        """A short delay, in seconds."""
        return self.random.uniform(0.001, 0.02) if self.jitter else 0.005

    def _at(self, time: float, life: Life | None, action: Callable[[], None]) -> None:
        self.ticket += 1
        heapq.heappush(self.clock, (time, self.ticket, life, action))

    def later(self, life: Life, delay_s: float, action: Callable[[], None]) -> None:
        """Do something as ``life``, if it still lives then; after it wakes, if it is stopped."""
        # Without jitter the workers still differ a little, so that nothing is a tie.
        skew = 0.0 if self.jitter else life.peer.worker * 1e-4
        self._at(self.now + delay_s + skew, life, action)

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; whether ``until`` came true (checked after every event)."""
        end = self.now + seconds
        while self.clock and self.clock[0][0] <= end:
            self.now, _, life, action = heapq.heappop(self.clock)
            if life is None:
                action()
            elif life.alive and life.stopped:
                life.woken.append(action)
            elif life.alive:
                action()
            if until is not None and until():
                return True
        self.now = end
        return False

    # The log

    def reaches_log(self, life: Life) -> bool:
        """Whether the process can reach the job's log; it ends when it cannot for too long."""
        if self.side.get(life.peer.worker, 0) == self.log_side:
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
        if not self.jitter or not life.read or self.random.random() > 0.1:
            return []
        start = self.random.randrange(life.read)
        return [event for event, _ in self.log[start : min(start + 3, life.read)]]

    # Messages between trainers

    def connected(self, a: int, b: int) -> bool:
        """Whether what worker ``a`` sends reaches worker ``b``."""
        return self.side.get(a, 0) == self.side.get(b, 0) and (a, b) not in self.deaf

    def send(self, course: Course, to: Peer, action: Callable[[Any], None]) -> None:
        """Deliver within the generation, unless the network or an end of life prevents it."""
        sender, target = course.life.peer, self.lives[to]

        def deliver() -> None:
            there = target.course
            if not self.connected(sender.worker, to.worker):
                # The connection tries again for as long as nobody gives the other up.
                self._at(self.now + 0.05, target, deliver)
            elif there is not None and there.number == course.number and there.begun:
                action(there)
            elif course.left and not course.life.alive:
                return
            elif target.machine.number <= course.number:
                # It enters a little later, or never.
                self._at(self.now + 0.02, target, deliver)

        self._at(self.now + self.delay(), target, deliver)

    def all_at(
        self, course: Course, what: str, wish: bool, action: Callable[[Any, bool], None]
    ) -> None:
        """``action`` on every member once all have come to ``what``; its bool: anybody's wish."""
        came = self._rounds.setdefault((course.number, what), {})
        assert course.life.peer not in came, f"{course.life.peer} came to {what} twice"
        came[course.life.peer] = wish
        if len(came) < len(course.peers):
            return
        wished = any(came.values())
        for peer in course.peers.values():
            self._complete(course, peer, lambda c: action(c, wished))

    def _complete(self, course: Course, peer: Peer, action: Callable[[Any], None]) -> None:
        target = self.lives[peer]

        def deliver() -> None:
            ended = any(not self.lives[p].alive for p in course.peers.values())
            if ended and self.random.random() < 0.5:
                # What the dead had still to pass on never comes.
                return
            if target.course is None or target.course.number != course.number:
                return
            if all(self.connected(p.worker, peer.worker) for p in course.peers.values()):
                action(target.course)
            else:
                self._at(self.now + 0.05, target, deliver)

        self._at(self.now + self.delay() + peer.worker * 1e-4, target, deliver)

    def enter(self, course: Course) -> None:
        """A member forms its generation."""
        self.later(course.life, self.delay(), lambda: None if course.left else course.form())

    # Losses

    def _probe(self) -> None:
        """Notice who is silent, who has ended, who waits for the log; and let machines tick."""
        self._at(self.now + PROBE_S, None, self._probe)
        for life in list(self.living):
            if life.stopped:
                continue
            if not self.reaches_log(life):
                self._cut_off(life)
            elif life.machine.state in ("gathering", "answering"):
                life.soon()
            for peer in sorted(life.machine.watched()):
                self._look_at(life, peer)

    def _cut_off(self, life: Life) -> None:
        """Without the log a generation trains on, but not for as long as others wait for it."""
        life.cut_off_s = self.now if life.cut_off_s is None else life.cut_off_s
        limit = self.policy.gather_s / 2 if life.course is not None else 2.0
        if self.now - life.cut_off_s > limit:
            self.end(life, "could not reach the log")

    def _look_at(self, life: Life, peer: Peer) -> None:
        other = self.lives[peer]
        both = self.connected(peer.worker, life.peer.worker)
        both = both and self.connected(life.peer.worker, peer.worker)
        if not other.alive and both:
            self._tell_lost(life, peer, "has ended", True)
        elif other.alive and not other.stopped and self.connected(peer.worker, life.peer.worker):
            self.silent_s.pop((life.peer, peer), None)
        elif self.now - self.silent_s.setdefault((life.peer, peer), self.now) >= LEASE_S:
            self._tell_lost(life, peer, f"was silent for {LEASE_S:g} s", False)

    def _tell_lost(self, life: Life, peer: Peer, reason: str, certain: bool) -> None:
        if (peer, certain) in life.told or (peer, True) in life.told:
            return
        life.told.add((peer, certain))
        life.notice(core.Lost(peer, reason, certain))
        if self.closes_on_loss and not certain and self.connected(life.peer.worker, peer.worker):
            # It closes its connections to whom it has lost, who takes that for its end.
            other = self.lives[peer]
            self.later(
                other,
                self.delay(),
                lambda: self._tell_lost(other, life.peer, "closed its connection", True),
            )
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
            assert worker not in self.current or not self.active(worker)
            self.current[worker] = self.lives[peer] = life
            self.living.append(life)
            self.record(life, "**", "starts")
            life.notice(core.Regroup(Announcement(peer), "started"))

    def start_late(self, worker: int, time: float) -> None:
        """Start a worker at a time, unless it has been started by then."""
        self._at(time, None, lambda: None if worker in self.current else self.start(worker))

    def end(self, life: Life, why: str) -> None:
        """A process ends; its peers notice, its supervisor may start it again."""
        if not life.alive:
            return
        life.alive, life.stopped = False, False
        self.living.remove(life)
        self.record(life, "**", why)
        if life.course is not None:
            life.course.left = True
        worker = life.peer.worker
        for other in self.living:
            near = self.connected(worker, other.peer.worker)
            if near and life.peer in other.machine.watched():
                self.later(other, self.delay(), partial(self._look_at, other, life.peer))
        if why == "withdrew" and life.leaving:
            self.gone_for_good.add(worker)
        if self.respawns:
            self._at(self.now + 0.3 + self.delay(), None, lambda: self._respawn(life))

    def _respawn(self, ended: Life) -> None:
        worker = ended.peer.worker
        if self.current.get(worker) is not ended or worker in self.gone_for_good:
            return
        if not self.respawns:
            return
        if self.side.get(worker, 0) != self.log_side:
            self._at(self.now + 1.0, None, lambda: self._respawn(ended))
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
            self.record(life, "**", "is stopped")

    def wake(self, life: Life) -> None:
        """SIGCONT: it does first what it was about to do when it was stopped."""
        if life.alive and life.stopped:
            life.stopped = False
            self.record(life, "**", "wakes")
            woken, life.woken = life.woken, []
            for action in woken:
                if life.alive:
                    action()
            if life.alive:
                life.soon()

    def cut(self, *sides: Iterable[int], log_with: int = 0) -> None:
        """Split the network; the log is on the side number ``log_with``."""
        self.side = {w: i for i, side in enumerate(sides) for w in side}
        self.log_side = log_with
        self.record(None, "**", f"network split: {[sorted(s) for s in sides]}, log: {log_with}")

    def heal(self) -> None:
        """Mend the network."""
        self.side, self.log_side, self.deaf = {}, 0, set()
        self.record(None, "**", "network mended")
        for life in self.living:
            life.cut_off_s = None
            life.soon()

    def silence(self, speaker: int, hearer: int) -> None:
        """From now on nothing from ``speaker`` reaches ``hearer``."""
        self.deaf.add((speaker, hearer))
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
        for event in events:
            if not isinstance(event, core.Tick):
                self.record(life, "<-", event)

    def story(self, lines: int = 120) -> str:
        """The end of the story, for a person."""
        return "\n".join(
            f"{time:8.3f} {who:>4} {arrow} {describe(what)}"
            for time, who, arrow, what in self.lines[-lines:]
        )
