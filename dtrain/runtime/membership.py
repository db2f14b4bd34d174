"""The IO shell of the membership machine: it runs over the job's log and the worker's connections.

One thread feeds the machine with what the log and the transport tell, and carries out its
instructions; the main thread asks for the next generation and waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dtrain.errors import EvictedError, StoreLostError
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.store_log import Entry, StoreLog
from dtrain.runtime.transport import Address, Loss, Transport
from dtrain.scheduler import membership as core
from dtrain.scheduler.membership import Announcement, Membership, MembershipPolicy, Peer, Proposal

_AGREEING_S = 0.002
_STEADY_S = 0.05


@dataclass(frozen=True)
class Detail:
    """What a member's announcement carries besides what the machine decides on.

    ``domains``: failure domains from the largest to the node. ``host``: where it receives.
    ``vote``: (loss, gradient norm) of the newest step whose full vote it saw. ``work``: the newest
    plan that it worked under and what was known of costs then, as ``Holdings.work`` has it.
    """

    domains: tuple[str, ...]
    host: str
    vote: tuple[float, float] | None
    work: dict[str, Any] | None


@dataclass(frozen=True)
class Agreement:
    """A generation that all its members have agreed on, and each one's details."""

    proposal: Proposal
    details: dict[Peer, Detail]
    seconds: float


class Roster:
    """This worker's part in the membership of the job.

    ``on_event(kind, reason, **fields)`` is told what a person may want to know.
    """

    def __init__(
        self,
        me: Peer,
        domains: tuple[str, ...],
        policy: MembershipPolicy,
        log: StoreLog,
        transport: Transport,
        on_event: Callable[..., None],
    ) -> None:
        self._me = me
        self._domains = domains
        self._log = log
        self._transport = transport
        self._on_event = on_event
        self._machine = Membership(Announcement(me), policy)
        self._queue: queue.SimpleQueue[core.Event] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._condition = threading.Condition()
        self._fault: FaultFlag | None = None
        self._vote: tuple[float, float] | None = None
        self._work: dict[str, Any] | None = None
        self._addresses: dict[Peer, Address] = {}
        self._details: dict[Peer, Detail] = {}
        self._entered: Proposal | None = None
        self._error: Exception | None = None
        self._broken: dict[int, str] = {}
        self._interrupted: core.Interrupt | None = None
        self._newcomers = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dtrain-roster", daemon=True)
        self._thread.start()

    @property
    def newcomers(self) -> bool:
        """Whether somebody waits to be let in at a step boundary."""
        return self._newcomers

    def address_of(self, peer: Peer) -> Address:
        """Where a peer receives."""
        return self._addresses[peer]

    def lost(self, loss: Loss) -> None:
        """A peer is gone; called by the transport, from its thread."""
        machine = self._machine
        current = machine.current
        self._queue.put(core.Lost(loss.peer, loss.reason, loss.certain))
        if current is not None and loss.peer in current.peers() and self._fault is not None:
            self._fault.set(f"worker {loss.peer.worker} {loss.reason}")
        self._wake.set()

    def agree(
        self,
        announcement: Announcement,
        reason: str,
        vote: tuple[float, float] | None,
        work: dict[str, Any] | None,
    ) -> Agreement:
        """Stand at a step boundary as ``announcement`` says, and wait for the next generation.

        Raises:
            EvictedError: the others go on without this life of the worker.
            StoreLostError: the job's store is gone.
        """
        began = time.monotonic()
        with self._condition:
            self._check()
            self._entered = None
            self._fault = None
            self._vote = vote
            self._work = work
            self._queue.put(core.Regroup(announcement, reason))
            self._wake.set()
            while self._entered is None:
                self._check()
                self._condition.wait()
            proposal = self._entered
        took = time.monotonic() - began
        return Agreement(proposal, {p: self._details[p] for p in proposal.peers()}, took)

    def watch(self, fault: FaultFlag) -> None:
        """From now on set ``fault`` when the generation breaks."""
        self._fault = fault
        self._look_for_faults()

    def _look_for_faults(self) -> None:
        machine, fault = self._machine, self._fault
        if fault is None or machine.current is None:
            return
        members = machine.current.peers()
        for peer, lost in list(machine.lost.items()):
            if peer in members:
                fault.set(f"worker {peer.worker} {lost.reason}")
        if machine.current.number in self._broken:
            fault.set(self._broken[machine.current.number])
        interrupted = self._interrupted
        if interrupted is not None and interrupted.number == machine.current.number:
            # One that came while this worker had left already is of an older generation.
            fault.set(interrupted.reason)
        if machine.state == "evicted":
            fault.set("evicted")

    def post_broken(self, generation: int, reason: str) -> None:
        """Tell the other members that the generation is broken."""
        self._wake.set()
        self._log.append({"type": "broken", "generation": generation, "reason": reason})

    def leave(self, announcement: Announcement) -> None:
        """Tell the others that this worker leaves at this step boundary."""
        self._queue.put(core.Regroup(announcement, "told to leave"))
        self._turn_until(lambda: self._machine.me.leaving)

    def _turn_until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 5.0
        while not true() and time.monotonic() < end and self._error is None:
            self._wake.set()
            time.sleep(0.002)

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(2.0)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except StoreLostError as error:
                # Training goes on until the next change of membership.
                self._on_event("store_lost", str(error))
                self._give_up(error)
                return
            except Exception as error:
                self._give_up(error)
                if self._fault is not None:
                    self._fault.set(f"membership failed: {error!r}")
                raise
            busy = self._machine.state in ("gathering", "answering")
            self._wake.wait(_AGREEING_S if busy else _STEADY_S)
            self._wake.clear()

    def _give_up(self, error: Exception) -> None:
        with self._condition:
            self._error = error
            self._condition.notify_all()

    def _turn(self) -> None:
        events: list[core.Event] = [core.Tick()]
        for entry in self._log.read():
            events += self._understand(entry)
        while True:
            try:
                events.append(self._queue.get_nowait())
            except queue.Empty:
                break
        with self._condition:
            instructions = self._machine.step(time.monotonic(), *events)
        for instruction in instructions:
            self._carry_out(instruction)
        for announcement in self._machine.known.values():
            peer = announcement.peer
            if peer != self._me and peer not in self._machine.lost and peer in self._addresses:
                self._transport.connect(peer, self._addresses[peer])
        self._look_for_faults()
        self._look_for_newcomers()

    def _look_for_newcomers(self) -> None:
        self._newcomers = bool(self._machine.joiners())

    def _understand(self, entry: Entry) -> list[core.Event]:
        kind = entry["type"]
        if kind == "announced":
            announcement = Announcement.from_json(entry["announcement"])
            self._addresses[announcement.peer] = Address(**entry["address"])
            vote = entry["vote"]
            self._details[announcement.peer] = Detail(
                tuple(entry["domains"]),
                entry["address"]["host"],
                tuple(vote) if vote else None,
                entry["work"],
            )
            return [core.Announced(announcement)]
        if kind == "proposed":
            return [core.Proposed(Proposal.from_json(entry["proposal"]))]
        if kind == "answered":
            return [core.Answered(entry["number"], Peer(**entry["peer"]))]
        if kind == "broken":
            self._broken.setdefault(entry["generation"], entry["reason"])
        return []

    def _carry_out(self, instruction: core.Instruction) -> None:
        match instruction:
            case core.Announce(announcement):
                self._log.append(
                    {
                        "type": "announced",
                        "announcement": asdict(announcement),
                        "address": asdict(self._transport.address),
                        "domains": self._domains,
                        "vote": self._vote,
                        "work": self._work,
                    }
                )
            case core.Propose(proposal):
                self._log.append({"type": "proposed", "proposal": asdict(proposal)})
            case core.Answer(number):
                self._log.append({"type": "answered", "number": number, "peer": asdict(self._me)})
            case core.Enter(proposal):
                with self._condition:
                    self._entered = proposal
                    self._condition.notify_all()
            case core.Interrupt():
                self._interrupted = instruction
                self._look_for_faults()
            case core.Withdraw(reason):
                with self._condition:
                    self._error = EvictedError(f"worker {self._me.worker}: {reason}")
                    self._condition.notify_all()
        # Something follows from most instructions: look again at once.
        self._wake.set()
