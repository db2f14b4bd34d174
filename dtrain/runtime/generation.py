"""One generation of one worker: from the agreement to the engines, and the steps under one plan."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.checkpoint import CheckpointInfo
from dtrain.data.location import locate
from dtrain.deepspeed_options import zero_stage
from dtrain.environment import usable_cores
from dtrain.errors import DtrainError, PeerLostError
from dtrain.faults.injector import Injector
from dtrain.planning import (
    balance_policy,
    costs_of_sizes,
    counted,
    known_cluster,
    recomputing,
)
from dtrain.runtime.attempt import Links
from dtrain.runtime.audit import Auditor
from dtrain.runtime.comm import Communicator, Group
from dtrain.runtime.compute import StageCompute
from dtrain.runtime.deepspeed_backend import install_backend
from dtrain.runtime.delays import Delays
from dtrain.runtime.engine import Gathering, StageEngine
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.inputs import InputFetcher, Prefetcher
from dtrain.runtime.intervals import Intervals
from dtrain.runtime.membership import Agreement, Roster
from dtrain.runtime.partitions import Partitions
from dtrain.runtime.recorder import ActionRecorder
from dtrain.runtime.setup import Job
from dtrain.runtime.state import Checkpoints, Progress, StageState, pack_json, unpack_json
from dtrain.runtime.store_log import StoreLog
from dtrain.runtime.transaction import StepTransaction
from dtrain.runtime.transport import KIND_NOTE, KIND_STATE, Key, Transport
from dtrain.runtime.turns import CoreTurns, cores_are_scarce
from dtrain.scheduler import Plan
from dtrain.scheduler.balance import Move
from dtrain.scheduler.costmodel import CostModel
from dtrain.scheduler.costs import Cluster, StepCosts
from dtrain.scheduler.links import LinkSpeeds, measured_links
from dtrain.scheduler.membership import Announcement, Peer
from dtrain.scheduler.overhaul import Trial
from dtrain.scheduler.planner import first_plan
from dtrain.scheduler.recompute import recomputed
from dtrain.scheduler.recovery import Settlement, kept, settle, transfers
from dtrain.scheduler.relayout import put_in_order, replan_or_relayout
from dtrain.scheduler.risk import RiskLedger

_FAILURE_COSTS_S = 1.0
"""What a failure takes from a worker's work: its absence and what is done again."""


@dataclass
class Holdings:
    """What a worker has in memory that outlives a generation.

    ``engines`` and ``transaction`` are those of the newest generation that was formed; ``best`` its
    stages' weights at the best evaluation; ``partitions``: with stage 0, the state of the graph's
    partitions; ``snapshots``: (step, stage) -> state. ``costs`` and ``slowness``: what ``plan`` was
    made for, where it was measured. ``wanted``: the plan that the members regroup for.
    """

    progress: Progress = field(default_factory=Progress)
    plan: Plan | None = None
    wanted: Plan | None = None
    costs: StepCosts | None = None
    slowness: dict[int, float] = field(default_factory=dict)
    engines: dict[int, StageEngine] = field(default_factory=dict)
    transaction: StepTransaction | None = None
    best: dict[int, dict[str, Any]] = field(default_factory=dict)
    partitions: Partitions | None = None
    snapshots: dict[tuple[int, int], StageState] = field(default_factory=dict)
    broke_s: float | None = None

    def state(self, stage: int) -> StageState:
        """The state of a held stage as it is now; the tensors are the live ones."""
        state, gathering = self.begin_state(stage)
        state.tensors |= gathering.wait()
        return state

    def begin_state(self, stage: int) -> tuple[StageState, Gathering]:
        """The same, less the tensors that are still on their way from the stage's holders."""
        tensors, gathering = self.engines[stage].begin_state()
        tensors |= {f"best/{name}": value for name, value in self.best.get(stage, {}).items()}
        if stage == 0 and self.partitions is not None:
            tensors |= self.partitions.tensors()
        self.progress.schedule = self.engines[stage].schedule_state() or self.progress.schedule
        return StageState(tensors, self.progress), gathering

    def commit(self, step: int, seeds: int) -> None:
        """Book step ``step``, which trained ``seeds`` seeds, as committed."""
        self.progress.step = step + 1
        self.progress.seeds_trained += seeds
        if self.partitions is not None:
            self.partitions.advance(step)

    def announcement(self, peer: Peer, *, sharded: bool, leaving: bool = False) -> Announcement:
        """Where this worker stands, for the next generation."""
        pending = self.transaction.pending if self.transaction is not None else None
        return Announcement(
            peer,
            committed=self.progress.step,
            pending=pending is not None,
            voted=pending is not None and pending.vote is not None,
            stages=() if sharded else tuple(sorted(self.engines)),
            snapshots=tuple(sorted(self.snapshots)),
            leaving=leaving,
        )

    def work(self) -> dict[str, Any] | None:
        """The newest plan and what it was made for, as JSON; None before the first one."""
        if self.plan is None:
            return None
        costs, wanted = self.costs, self.wanted
        return {
            "plan": self.plan.as_json(),
            "wanted": None if wanted is None else [wanted.as_json(), wanted.reason],
            "slowness": sorted(self.slowness.items()),
            "risk": sorted(self.risk().items()),
            "costs": None if costs is None else costs.as_json(),
            "links": self.progress.memory.get("links"),
        }

    def risk(self) -> dict[int, float]:
        """The share of its work that each worker's failures are expected to waste.

        Rounded, so that only a worker that fails again and again differs from the others.
        """
        progress, ledger = self.progress, RiskLedger()
        passed_s = progress.seconds / max(1, progress.step)
        for worker, steps in progress.departures.items():
            for step in steps:
                ledger.record(step * passed_s, int(worker), "crash")
        workers = [int(w) for w in progress.departures]
        share = ledger.wasted_share(progress.seconds, workers, _FAILURE_COSTS_S)
        return {w: round(value, 3) for w, value in share.items() if round(value, 3) > 0}

    def vote(self) -> tuple[float, float] | None:
        """(loss, norm) of the newest step whose full vote was seen here, unless one is pending
        whose vote was not."""
        pending = self.transaction.pending if self.transaction is not None else None
        return pending.vote if pending is not None else self.progress.vote


@dataclass(frozen=True)
class Surroundings:
    """What a worker has for its whole life."""

    me: Peer
    job: Job
    log: StoreLog
    transport: Transport
    roster: Roster
    checkpoints: Checkpoints
    heartbeat: Heartbeat
    injector: Injector
    own_group: Group
    on_event: Callable[..., None]
    recorder: ActionRecorder
    model: CostModel
    delays: Delays
    intervals: Intervals


class Generation:
    """An entered generation. Forming it leaves ``holdings`` as they were until all is built."""

    def __init__(self, around: Surroundings, holdings: Holdings, agreement: Agreement) -> None:
        self.around = around
        self.holdings = holdings
        self.number = agreement.proposal.number
        self.members = agreement.proposal.members
        self.peers = {a.peer.worker: a.peer for a in self.members}
        self.domains = {p.worker: d.domains for p, d in agreement.details.items()}
        self.fault = FaultFlag()
        self.timeline_ms: dict[str, float] = {"agree": agreement.seconds * 1e3}
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self._agreement = agreement
        self._clock = time.perf_counter()
        self.comm: Communicator | None = None
        self.resumed_from: int | None = None
        self._told: Progress | None = None
        self._departed: list[int] = []
        self._notes = 0
        around.transport.enter(self.number, self.fault)
        around.roster.watch(self.fault)

    @property
    def leads(self) -> bool:
        """Whether this worker is the generation's leader: it keeps the run's record."""
        return self.around.me.worker == min(self.peers)

    def form(self) -> None:
        """Build groups, settle the interrupted step, move states and build engines.

        Raises:
            PeerLostError: a fault came meanwhile. DtrainError: the checkpoint store is unusable.
        """
        job, me = self.around.job, self.around.me.worker
        self.around.heartbeat.phase("recovery", self.holdings.progress.step, waiting=True)
        self.around.injector.reach("recovery", self.holdings.progress.step)
        self.plan = self._plan()
        self._lap("plan")
        hosts = {d.host for d in self._agreement.details.values()}
        self.comm = Communicator(
            self.number,
            me,
            self.plan.workers,
            self.plan.holders,
            self.around.log.group_store(self.number),
            self.fault,
            job.config.parallel.timeout_s,
            own_group=self.around.own_group,
            host=self.around.transport.address.host,
            loopback=all(host.startswith("127.") for host in hosts),
            foreign=self.around.transport.descriptors,
        )
        self._lap("groups")
        sharded = zero_stage(job.config.deepspeed) > 0
        settlement = settle(self.members, self.plan.num_stages, sharded=sharded)
        before = max(a.committed + a.voted for a in self.members)
        self._apply_voted(settlement)
        states = self._states(settlement)
        progress = next((s.progress for s in states.values() if s is not None), self._told)
        if self.holdings.engines and self.holdings.progress.step == settlement.step:
            progress = self.holdings.progress
        progress = (progress or Progress()).copy()
        progress.generations += 1
        progress.departed(self._departed)
        if any(a.since > 0 for a in self.members):
            begun = any(a.pending and not a.voted and a.committed == before for a in self.members)
            progress.steps_replayed += max(0, before - progress.step) + begun
        # Snapshots may be older than what the scheduler has learnt since: all go on from the same.
        progress.memory = self.tell_all(progress.memory)
        self._lap("state")
        self._build(states, progress)
        self._lap("engines")
        if any(a.since > 0 for a in self.members):
            # The former engines are full of cycles, and hold their generation's groups.
            gc.collect()
        self.settlement = settlement

    def _lap(self, what: str) -> None:
        now = time.perf_counter()
        self.timeline_ms[what] = (now - self._clock) * 1e3
        self._clock = now

    def _plan(self) -> Plan:
        """The plan that every member computes alike from what the log says."""
        job = self.around.job
        self.cluster, self.costs = self._members(), None
        veterans = [a for a in self.members if a.since > 0]
        reason = self._agreement.proposal.reason
        if veterans:
            newest = max(veterans, key=lambda a: (a.since, -a.peer.worker))
            old = self._agreement.details[newest.peer].work
            if old is not None:
                former = Plan.from_json(old["plan"], job.layout, self.number)
                stayed = {a.peer.worker for a in veterans}
                self._departed = sorted(set(former.workers) - stayed)
                slowness = {w: factor for w, factor in old["slowness"] if w in stayed}
                risk = {w: share for w, share in old["risk"] if w in self.peers}
                if old["costs"] is not None:
                    self.costs = StepCosts.from_json(old["costs"])
                self.cluster = replace(self.cluster, slowness=slowness, risk=risk)
                policy = balance_policy(job.config)
                search = policy is not None and policy.search
                if old["wanted"] is not None:
                    plan, why = old["wanted"]
                    wanted = Plan.from_json(plan, job.layout, self.number, why)
                    if set(wanted.workers) == set(self.peers):
                        linked = _links(old["links"]).of(self.cluster)
                        return put_in_order(wanted, self.costs, linked, search=search)
                # With transfers a large plan takes several times as long, and the job stands still:
                # the balancer counts them soon.
                return replan_or_relayout(
                    former,
                    list(self.peers),
                    self.number,
                    reason,
                    self.costs,
                    self.cluster,
                    search=search,
                )
        spread = Cluster(domains=self.domains)
        return first_plan(job.layout, list(self.peers), self.number, spread)

    def _members(self) -> Cluster:
        """The members as all know them alike, but for their links and speeds."""
        job, members = self.around.job, sorted(self.peers)
        return known_cluster(job.config, job.budget, job.layout.cuts, members, self.domains)

    def _apply_voted(self, settlement: Settlement) -> None:
        """Apply the step that somebody saw the full vote of, if this worker has not."""
        if self.around.me.worker not in settlement.apply:
            return
        holdings = self.holdings
        assert holdings.transaction is not None
        details = self._agreement.details
        votes = [details[self.peers[w]].vote for w in settlement.witnesses]
        vote = next(v for v in votes if v is not None)
        holdings.transaction.apply_pending(vote[1])
        holdings.progress.vote = vote
        step = holdings.progress.step
        holdings.commit(step, self.around.job.source.step_seeds(step))

    def _states(self, settlement: Settlement) -> dict[int, StageState | None]:
        """The states of the stages that this worker holds from now on; None: initial weights."""
        me, held = self.around.me.worker, self.plan.stages_held(self.around.me.worker)
        if settlement.tier == 2:
            return self._from_checkpoint(held)
        step = settlement.step
        assert step is not None
        moves = transfers(self.plan, settlement, self.members, self.domains)
        for move in moves:
            if move.source == me and move.target != me:
                self.around.injector.reach("join", step, stage=move.stage)
                state = self._own(move.stage, settlement)
                key = Key(KIND_STATE, step, move.stage)
                self.around.transport.send(self.peers[move.target], key, state.packed())
        states: dict[int, StageState | None] = {}
        for stage in held:
            if any(m.stage == stage and m.target == me for m in moves):
                key = Key(KIND_STATE, step, stage)
                received = self.around.transport.receive(key, self._timeout_s)
                states[stage] = StageState.unpacked(received)
            else:
                states[stage] = self._own(stage, settlement)
        self._tell_progress(settlement)
        if moves:
            what = [f"stage {m.stage}: {m.source}->{m.target}" for m in moves]
            self.events.append(("state_moved", ", ".join(what), {"moves": len(moves)}))
        return states

    def _tell_progress(self, settlement: Settlement) -> None:
        """A worker that holds nothing learns how far the run is from the first source."""
        me, source = self.around.me.worker, settlement.sources[0]
        key = Key(KIND_NOTE, 0, 0)
        idle = [w for w in self.peers if not self.plan.stages_held(w)]
        if me == source:
            progress = self._own(0, settlement).progress
            for worker in idle:
                packed = [pack_json(progress.as_json())]
                self.around.transport.send(self.peers[worker], key, packed)
        if me in idle:
            received = self.around.transport.receive(key, self._timeout_s)
            self._told = Progress.of(unpack_json(received[0]))

    def _own(self, stage: int, settlement: Settlement) -> StageState:
        mine = next(a for a in self.members if a.peer == self.around.me)
        assert settlement.step is not None
        if kept(mine, stage, settlement) == "held":
            return self.holdings.state(stage)
        return self.holdings.snapshots[settlement.step, stage].cloned()

    def _from_checkpoint(self, held: tuple[int, ...]) -> dict[int, StageState | None]:
        checkpoints = self.around.checkpoints
        found = None
        if self.leads:
            found = checkpoints.find(
                lambda message: self.events.append(("checkpoint_skipped", message, {}))
            )
        found = self.tell_all(found)
        if "error" in found:
            raise DtrainError(found["error"])
        if found["info"] is None:
            return dict.fromkeys(held)
        info, progress = CheckpointInfo(**found["info"]), Progress.of(found["progress"])
        checkpoints.last_saved = progress.step
        self.resumed_from = progress.step
        return {stage: checkpoints.load_stage(info, stage, progress) for stage in held}

    @property
    def _timeout_s(self) -> float:
        return self.around.job.config.parallel.timeout_s

    def tell_all(self, value: Any) -> Any:
        """The leader's JSON value, on every member; all call it at the same point."""
        self._notes += 1
        key = Key(KIND_NOTE, self._notes, 0)
        if not self.leads:
            return unpack_json(self.around.transport.receive(key, self._timeout_s)[0])
        packed = [pack_json(value)]
        for worker, peer in self.peers.items():
            if worker != self.around.me.worker:
                self.around.transport.send(peer, key, packed)
        return value

    def _ask_all(self, value: Any) -> list[Any]:
        """Every member's JSON value, on the leader; all call it at the same point."""
        self._notes += 1
        me, leader = self.around.me.worker, min(self.peers)
        if me != leader:
            key = Key(KIND_NOTE, self._notes, 1 + me)
            self.around.transport.send(self.peers[leader], key, [pack_json(value)])
            return []
        return [value] + [
            unpack_json(
                self.around.transport.receive(
                    Key(KIND_NOTE, self._notes, 1 + worker), self._timeout_s
                )[0]
            )
            for worker in sorted(self.peers)
            if worker != me
        ]

    def _build(self, states: Mapping[int, StageState | None], progress: Progress) -> None:
        """Build the engines; from here on they and ``progress`` are what this worker holds."""
        job = self.around.job
        assert self.comm is not None
        engines, best = self._engines(states, progress)
        self._links = Links(
            self.comm,
            self.around.transport,
            self.peers,
            self.around.heartbeat,
            self.around.injector,
            self.around.recorder,
            self.around.model,
            self.around.delays,
        )
        reference = CostModel.of_learnt(progress.memory.get("costs", []))
        self._computes = {
            s: StageCompute(
                engine,
                job.layout.layers_of(s),
                job.shapes,
                reference,
                job.config.seed,
                is_last=s == self.plan.num_stages - 1,
            )
            for s, engine in engines.items()
        }
        holdings = self.holdings
        former = holdings.engines
        holdings.partitions = None
        if 0 in states:
            first = states[0]
            tensors = first.tensors if first is not None else {}
            holdings.partitions = Partitions(job, progress.step, tensors)
        holdings.engines, holdings.best = engines, best
        for engine in former.values():
            engine.release()
        holdings.progress = progress
        self._know(_links(progress.memory.get("links")))
        self._work_by(self.plan)

    def _engines(
        self, states: Mapping[int, StageState | None], progress: Progress
    ) -> tuple[dict[int, StageEngine], dict[int, dict[str, Any]]]:
        """The engines of this worker's stages with their states, and the weights that were best."""
        job, me = self.around.job, self.around.me.worker
        assert self.comm is not None
        backend = install_backend(self.comm)
        layers = job.fresh_layers()
        engines: dict[int, StageEngine] = {}
        best: dict[int, dict[str, Any]] = {}
        try:
            for stage, state in states.items():
                layer_range = job.layout.layers_of(stage)
                if state is not None:
                    for index in layer_range:
                        for name, parameter in layers[index].named_parameters():
                            saved = state.tensors.get(f"model/layers.{index}.{name}")
                            if saved is not None:
                                parameter.data.copy_(saved)
                    best[stage] = {
                        name.removeprefix("best/"): value
                        for name, value in state.tensors.items()
                        if name.startswith("best/")
                    }
                engines[stage] = StageEngine(
                    stage,
                    {i: layers[i] for i in layer_range},
                    job.config.deepspeed,
                    job.config.train.weight_decay_layers,
                    self.comm,
                    backend,
                    contributes=self.plan.holders[stage][0] == me,
                    device=job.device,
                )
                if state is not None:
                    engines[stage].load_optimizer(state.tensors)
                    engines[stage].load_schedule(progress.schedule)
        except PeerLostError:
            for engine in engines.values():
                engine.release()
            raise
        return engines, best

    def _work_by(self, plan: Plan) -> None:
        """Run steps by ``plan`` from now on."""
        job, me, holdings = self.around.job, self.around.me.worker, self.holdings
        self.plan = holdings.plan = plan
        holdings.wanted = None
        self.recompute = recomputing(job.config, plan, job.shapes, lambda: job.sizes)
        for stage, compute in self._computes.items():
            compute.recompute = self.recompute[stage]
        holdings.costs, holdings.slowness = self.costs, dict(self.cluster.slowness)
        holdings.transaction = StepTransaction(
            plan,
            me,
            self._links,
            holdings.engines,
            self._computes,
            job.source,
            job.parameter_stage(),
            Auditor(
                plan,
                me,
                job.config.seed,
                job.config.robust.recompute_check,
                self._fetcher,
                self.around.on_event,
            ),
            skip_bad=job.config.robust.on_bad_gradient == "skip",
        )

    def learn(self) -> LinkSpeeds:
        """Measure work by what all have learnt of layers' costs; all do so at the same step.

        Returns the links as they are known now.
        """
        around, memory = self.around, self.holdings.progress.memory
        told = self._ask_all([around.me.worker, around.model.learnt(), around.delays.told()])
        # Who runs a layer knows it; what nobody has seen of late is as it was.
        learnt = [memory.get("costs", []), *(costs for _, costs, _ in told)]
        costs = {tuple(entry[:5]): entry for entries in learnt for entry in entries}
        delays = [d for worker, _, raw in told for d in Delays.of_told(worker, raw)]
        links = measured_links(delays, self.domains, _links(memory.get("links")))
        memory |= self.tell_all({"costs": [*costs.values()], "links": links.as_json()})
        links = _links(memory["links"])
        self._know(links)
        for compute in self._computes.values():
            compute.reference = CostModel.of_learnt(memory["costs"])
        return links

    def _know(self, links: LinkSpeeds) -> None:
        """Count with these links from now on."""
        self.cluster = links.of(self.cluster)

    def rebalance(self, move: Move) -> None:
        """Go on by another plan of the same members and holders; all do so at the same step."""
        self.costs = move.costs
        self.cluster = replace(self.cluster, slowness=move.slowness)
        self._work_by(move.plan)

    def costs_besides(self) -> StepCosts:
        """Of the first step's blocks: bytes, and what sums and updates take by recorded defaults.

        The same on all members, whatever their devices.
        """
        job = self.around.job
        config, cuts = job.config, job.layout.cuts
        costs = costs_of_sizes(config, CostModel(), "cpu", job.shapes, cuts, job.sizes)
        return counted(config, job.budget, recomputed(costs, self.recompute), cuts)

    def begin_trial(self, seconds: float) -> None:
        """Remember, with all others, what a step of this plan took before the next generation's."""
        self.holdings.progress.memory["trial"] = {
            "generation": self.number + 1,
            "seconds": seconds,
            "plan": self.plan.as_json(),
        }

    def trial(self) -> Trial | None:
        """What this generation's plan has to be better than, if it is on trial; asked once."""
        raw = self.holdings.progress.memory.pop("trial", None)
        if raw is None or raw["generation"] != self.number:
            return None
        former = Plan.from_json(raw["plan"], self.around.job.layout, self.number - 1)
        return Trial(former, raw["seconds"])

    def regroup_for(self, move: Move) -> None:
        """Want another plan of the same members in the next generation; all do so at the same
        step."""
        self.holdings.wanted, self.holdings.costs = move.plan, move.costs

    def _fetcher(self, plan: Plan, between: Callable[[], None] = lambda: None) -> InputFetcher:
        job = self.around.job
        me = self.around.me.worker
        return InputFetcher(
            job.source, job.store, plan, me, job.device, job.features, job.prepare, between
        )

    def prefetcher(self, former: Prefetcher | None = None) -> Prefetcher:
        """Inputs of all steps from the current one on; ``former``: an ended one, to be followed."""
        job, turns = self.around.job, self._turns()
        fetcher = self._fetcher(self.plan, turns.give_way)
        if former is not None:
            fetcher.take_over(former.fetcher)
        steps = range(self.holdings.progress.step, job.total_steps)
        ahead = job.budget.ahead(self.plan, self.around.me.worker)
        return Prefetcher(fetcher, job.source, steps, ahead, self.fault, self._timeout_s, turns)

    def _turns(self) -> CoreTurns:
        """Whether inputs may be made beside compute: where there are cores for it, and in any case
        where compute is a GPU's or most of the time goes into reading from afar."""
        job, mine = self.around.job, self.domains[self.around.me.worker]
        beside = sum(domains == mine for domains in self.domains.values())
        threads = job.config.parallel.threads_per_worker
        near = job.device.type == "cpu" and locate(job.store.url).is_local
        return CoreTurns(scarce=near and cores_are_scarce(threads, beside, usable_cores()))


def _links(raw: dict[str, Any] | None) -> LinkSpeeds:
    return LinkSpeeds() if raw is None else LinkSpeeds.from_json(raw)
