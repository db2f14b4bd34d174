"""A simulated worker's process: what the shell around the membership machine does.

It reads the job's log in order, tells its machine, and carries the instructions out; a stop or an
end may come between any two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtrain.scheduler import events as core
from dtrain.scheduler.events import Announcement, MembershipPolicy, Peer
from dtrain.scheduler.membership import Membership
from dtrain.scheduler.plan import Plan
from dtrain.scheduler.simulator.clock import Do
from dtrain.scheduler.simulator.training import Course, Memory

if TYPE_CHECKING:
    from dtrain.scheduler.simulator.world import World


class Life:
    """A worker's process from its start to its end, as its machine and its memory know it.

    ``told``: whom it was told to be lost, and whether for certain. ``cut_off_s``: since when it
    cannot reach the log. ``turns``: how often its machine was told something; ``looked``: that and
    the troubles of others when there was last nobody to look at.
    """

    def __init__(self, world: World, peer: Peer, policy: MembershipPolicy) -> None:
        self.world, self.peer = world, peer
        self.machine = Membership(Announcement(peer), policy)
        self.memory = Memory(world.snapshots_kept)
        self.plans: dict[Peer, Plan | None] = {}
        self.course: Course | None = None
        self.alive, self.stopped, self.leaving = True, False, False
        self.read = 0
        self.queue: list[core.Event] = []
        self.told: set[tuple[Peer, bool]] = set()
        self.woken: list[Do] = []
        self.turn_due = False
        self.turns = 0
        self.looked = (-1, -1)
        self._joiners: tuple[int, bool] = (-1, False)
        self.to_do: list[core.Instruction] = []
        self.cut_off_s: float | None = None
        self.instructions: dict[str, int] = {}

    def notice(self, event: core.Event) -> None:
        """Something for the machine."""
        self.queue.append(event)
        self.soon()

    def wants_regroup(self) -> bool:
        """Whether it leaves, or knows of newcomers; asked once a step."""
        if self._joiners[0] != self.turns:
            # The machine's mind changes only when it is told something.
            self._joiners = self.turns, bool(self.machine.joiners())
        return self.leaving or self._joiners[1]

    def soon(self) -> None:
        """Take a turn before long."""
        if not self.turn_due:
            self.turn_due = True
            self.world.later(self, self.world.delay(), self.turn)

    def turn(self) -> None:
        """Read the log, tell the machine, carry out what it says."""
        self.turn_due = False
        self.turns += 1
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
