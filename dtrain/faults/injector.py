"""The one object through which faults reach a trainer."""

from __future__ import annotations

import importlib
import os
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from dtrain.data.location import locate
from dtrain.errors import DtrainError
from dtrain.faults import actions
from dtrain.faults.actions import NetworkFault
from dtrain.faults.context import Moment, OwnFault
from dtrain.faults.inbox import Inbox
from dtrain.faults.ledger import Ledger
from dtrain.faults.spec import FaultSpec
from dtrain.runfolder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from dtrain.config import Config

_POLL_S = 0.05


@dataclass
class _Armed:
    """A fault that may still strike this worker."""

    name: str
    spec: FaultSpec
    first_step: int
    seed: str
    own: OwnFault | None = None
    fired: int = 0
    last_step: int | None = None

    def strikes(self, phase: str, step: int, stage: int | None, microbatch: int | None) -> bool:
        spec = self.spec
        return (
            (spec.phase is None or spec.phase == phase)
            and step >= self.first_step
            and (spec.until_step is None or step <= spec.until_step)
            and (self.last_step is None or step >= self.last_step + spec.every_steps)
            and (spec.stage is None or spec.stage == stage)
            and (spec.microbatch is None or spec.microbatch == microbatch)
        )

    @property
    def spent(self) -> bool:
        return 0 < self.spec.count <= self.fired


class Injector:
    """The faults of one life of one worker, from the configuration and from ``dtrain inject``.

    The runtime calls :meth:`reach` in every phase, :meth:`after_action` after every forward and
    backward, hands :meth:`checkpoint_point` to the checkpoint store and lets the transport look at
    :attr:`network`. Without an armed fault each of them costs a microsecond at most. Every firing
    is booked in the run folder and told in the event log before the fault acts.
    """

    def __init__(
        self,
        worker: int,
        incarnation: str,
        folder: RunFolder,
        *,
        world_size: int,
        supervisor_pid: int,
        checkpoints: Path | None,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._folder = folder
        self._world_size = world_size
        self._checkpoints = checkpoints
        self._supervisor_pid = supervisor_pid
        self._ledger = Ledger(folder.path)
        self._inbox = Inbox(folder.path)
        self._lock = threading.Lock()
        self._armed: list[_Armed] = []
        self._next_poll_s = 0.0
        self._slow: tuple[float, float] | None = None
        self._network: tuple[NetworkFault, float] | None = None
        self._save_step = 0

    @classmethod
    def from_config(
        cls,
        config: Config,
        worker: int,
        incarnation: str,
        run_dir: str | os.PathLike[str],
        *,
        world_size: int,
        supervisor_pid: int,
    ) -> Injector:
        """The injector of ``worker`` in this life.

        ``world_size``: workers that the job was launched with, among which a random worker is
        drawn. ``supervisor_pid``: for faults of store, agent, node and preemption notices.

        Raises:
            DtrainError: a fault of the user's own cannot be imported, or a fault does not fit the
                run.
        """
        folder = RunFolder(run_dir)
        url = config.checkpoint.url
        checkpoints: Path | None = folder.checkpoints
        if url is not None:
            place = locate(url)
            checkpoints = Path(place.path) if place.is_local else None
        injector = cls(
            worker,
            incarnation,
            folder,
            world_size=world_size,
            supervisor_pid=supervisor_pid,
            checkpoints=checkpoints,
        )
        for index, spec in enumerate(config.faults):
            seed = f"{config.seed if spec.seed is None else spec.seed}:{index}"
            # Drawn by all workers alike.
            rng = random.Random(seed)
            drawn_worker = rng.randrange(world_size)
            drawn_step = rng.randrange(config.train.max_steps or 1)
            victim = drawn_worker if spec.worker == "random" else spec.worker
            if victim in (worker, "all"):
                name = f"{index:03d}-{spec.digest()}"
                injector.arm(
                    f"{name}-w{worker}" if victim == "all" else name,
                    spec,
                    seed,
                    drawn_step if spec.step == "random" else int(spec.step or 0),
                )
        return injector

    def arm(self, name: str, spec: FaultSpec, seed: str, first_step: int) -> None:
        """Add a fault for this worker, less the firings that are booked under ``name``.

        ``seed``: of the choices that the fault makes when it strikes.

        Raises:
            DtrainError: the user's own fault cannot be imported, or the fault does not fit the run.
        """
        if (spec.kind, spec.how) == ("disk", "partial") and self._checkpoints is None:
            raise DtrainError(
                "fault disk (partial): expected checkpoint.url to be a local folder, got a remote "
                "store; use a local one or disk (full)"
            )
        fault = _Armed(name, spec, first_step, seed, _load(spec.kind) if spec.is_own else None)
        firings = self._ledger.firings(name)
        fault.fired = len(firings)
        if firings:
            fault.last_step = firings[-1].get("step")
        if not fault.spent:
            # A new list: threads that look at the old one go on undisturbed.
            self._armed = [*self._armed, fault]

    def reach(
        self,
        phase: str,
        step: int,
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """Say that the worker is in ``phase`` of ``step``; a fault may strike here.

        ``step`` counts from 0; in checkpoint, recovery and join it is the number of committed steps
        (a newcomer, which cannot know it, says 0). ``tensors``: what the phase (send, receive, sum)
        works on; numeric faults change them in place. May be called from any thread, and may raise,
        stop or end the process.

        Raises:
            InjectedError: a crash by exception.
        """
        if time.monotonic() >= self._next_poll_s:
            self._poll()
        if phase == "checkpoint":
            self._save_step = step
        if not self._armed:
            return
        if phase == "join" and step == 0:
            step = max((m["step"] for m in self._folder.metrics() if "loss" in m), default=0)
        self._strike(phase, step, None, stage, microbatch, tensors)

    def after_action(self, duration_s: float) -> None:
        """Be as slow as a slow fault says, after an action that took ``duration_s`` seconds."""
        slow = self._slow
        if slow is None:
            return
        factor, until_s = slow
        if time.monotonic() > until_s:
            self._slow = None
        else:
            time.sleep((factor - 1.0) * duration_s)

    def checkpoint_point(self, point: str) -> None:
        """Pass a named point of a save (``CheckpointStore(url, on_point=...)``).

        Raises:
            OSError: a disk fault.
        """
        if self._armed:
            self._strike("checkpoint", self._save_step, point, None, None, ())

    @property
    def spoils(self) -> bool:
        """Whether a fault stands that may change tensors in place."""
        return any(fault.spec.kind == "numeric" or fault.own for fault in self._armed)

    @property
    def network(self) -> NetworkFault | None:
        """What the transport must do to this worker's sends now; None as a rule."""
        standing = self._network
        if standing is None:
            return None
        fault, until_s = standing
        if time.monotonic() > until_s:
            self._network = None
            return None
        return fault

    def _poll(self) -> None:
        """Take what ``dtrain inject`` handed over."""
        with self._lock:
            self._next_poll_s = time.monotonic() + _POLL_S
            if not self._inbox.changed():
                return
            for name, text in self._inbox.take(self._worker, self._incarnation):
                try:
                    spec = FaultSpec.model_validate_json(text)
                    self.arm(name, spec, name, int(spec.step or 0))
                except (ValidationError, DtrainError) as error:
                    reason = " ".join(str(error).split())
                    self._event("fault_refused", f"{name}: {reason}")

    def _strike(
        self,
        phase: str,
        step: int,
        point: str | None,
        stage: int | None,
        microbatch: int | None,
        tensors: Sequence[Tensor],
    ) -> None:
        for fault in self._armed:
            if fault.spec.strikes_at_point != point:
                continue
            if not fault.strikes(phase, step, stage, microbatch):
                continue
            if fault.spec.kind == "numeric" and not tensors:
                continue
            with self._lock:
                number = fault.fired
                if fault.spent or not self._claim(fault, phase, step):
                    continue
            moment = Moment(
                worker=self._worker,
                step=step,
                phase=phase,
                node=socket.gethostname(),
                pid=os.getpid(),
                supervisor_pid=self._supervisor_pid,
                run_dir=self._folder.path,
                tensors=tensors,
                stage=stage,
                microbatch=microbatch,
                options=fault.spec.options,
            )
            self._act(fault, moment, random.Random(f"{fault.seed}:{number}"))

    def _claim(self, fault: _Armed, phase: str, step: int) -> bool:
        """Book the next firing; False when another life of the worker has booked it."""
        number = fault.fired
        fault.fired += 1
        fault.last_step = step
        if not fault.spec.count and not fault.spec.every_steps:
            # It strikes every time: there is nothing to remember.
            return True
        mine = self._ledger.claim(
            fault.name,
            number,
            worker=self._worker,
            incarnation=self._incarnation,
            phase=phase,
            step=step,
        )
        if fault.spent:
            self._armed = [other for other in self._armed if other is not fault]
        return mine

    def _act(self, fault: _Armed, moment: Moment, rng: random.Random) -> None:
        spec, how = fault.spec, fault.spec.how or ""
        if spec.kind in ("store", "agent", "node", "preempt"):
            try:
                pids = actions.targets(spec.kind, how, moment.supervisor_pid, moment.pid)
            except DtrainError as error:
                self._event("fault_refused", f"{fault.name}: {error}", fault=spec.kind)
                return
            self._tell(fault, moment, pids=pids)
            actions.strike_processes(spec.kind, how, pids, spec.seconds)
            return
        self._tell(fault, moment)
        if spec.kind == "crash":
            actions.crash(how, spec.memory_mib)
        elif spec.kind == "hang":
            actions.hang(how, spec.seconds)
        elif spec.kind == "slow":
            self._slow = (spec.factor, self._end_of(spec))
        elif spec.kind == "network":
            self._network = (self._network_fault(spec), self._end_of(spec))
        elif spec.kind == "numeric":
            what = actions.spoil(how, moment.tensors, rng)
            self._event("fault_acted", what, fault=fault.name, step=moment.step)
        elif spec.kind == "disk":
            assert self._checkpoints is not None
            actions.fail_disk(how, self._checkpoints)
        else:
            assert fault.own is not None
            for event in fault.own(moment, rng) or ():
                self._event(event.kind, event.reason, fault=fault.name, **event.fields)

    def _network_fault(self, spec: FaultSpec) -> NetworkFault:
        peers = frozenset(range(self._world_size)) if spec.to is None else frozenset(spec.to)
        peers -= {self._worker}
        if spec.how == "delay":
            return NetworkFault(delay_s=spec.delay_s)
        return NetworkFault(drop_to=peers, drop_from=peers if spec.how == "cut" else frozenset())

    @staticmethod
    def _end_of(spec: FaultSpec) -> float:
        return float("inf") if spec.seconds is None else time.monotonic() + spec.seconds

    def _tell(self, fault: _Armed, moment: Moment, **fields: Any) -> None:
        place = {"stage": moment.stage, "microbatch": moment.microbatch}
        self._event(
            "fault_injected",
            f"{fault.spec.describe()}: firing {fault.fired}",
            fault=fault.name,
            fault_kind=fault.spec.kind,
            how=fault.spec.how,
            phase=moment.phase,
            step=moment.step,
            pid=moment.pid,
            incarnation=self._incarnation,
            **{name: value for name, value in place.items() if value is not None},
            **fields,
        )

    def _event(self, kind: str, reason: str, **fields: Any) -> None:
        self._folder.event(kind, worker=self._worker, reason=reason, **fields)


def _load(kind: str) -> OwnFault:
    """Import a user's own fault."""
    module, _, attribute = kind.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise DtrainError(
            f"faults: kind {kind} cannot be imported ({error}); check the name and PYTHONPATH"
        ) from error
    if not callable(found):
        raise DtrainError(
            f"faults: kind {kind}: expected a callable fault(state, rng), got "
            f"{type(found).__name__}; name a function"
        )
    return cast(OwnFault, found)
