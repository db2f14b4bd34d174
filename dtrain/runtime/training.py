"""The steps of one generation and what is due between them: saves, evaluations, reports."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import deque
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointError, PendingSave, weights_sha256
from dtrain.config import identity_digest
from dtrain.data.features import CacheUse, FeatureCache
from dtrain.errors import CannotGoOnError, LeftError, PeerLostError, ShutdownError
from dtrain.evaluate import MEMORY_BYTES, evaluate
from dtrain.planning import LEARN_FIRST, balance_policy, overhaul_policy
from dtrain.runfolder import RunFolder, RunRecord, versions
from dtrain.runtime.comm import MAX
from dtrain.runtime.exact_sum import NonFiniteGradientError
from dtrain.runtime.generation import Generation
from dtrain.runtime.inputs import Prefetcher
from dtrain.runtime.intervals import SaveInterval
from dtrain.runtime.reporting import ProgressReport
from dtrain.runtime.snapshots import Snapshots
from dtrain.runtime.spec import TrainerSpec
from dtrain.runtime.state import Best, StageState
from dtrain.runtime.transaction import Outcome, Wishes
from dtrain.runtime.transport import KIND_WEIGHTS, Key
from dtrain.scheduler.balance import Balancer, Move
from dtrain.scheduler.overhaul import Overhaul

_RECOVERIES = 20
_LEARN_EVERY = 200
_WINDOW = 16
"""Steps whose measured times count when a plan is looked for."""
_STARTS = ("resumed", "started_over")
"""Events of a start that had committed steps before it: from a checkpoint, or with none yet."""

Metrics = dict[str, dict[str, float]]


class Training:
    """One worker's steps under one plan."""

    def __init__(
        self,
        spec: TrainerSpec,
        generation: Generation,
        folder: RunFolder,
        report: ProgressReport,
        leaving: threading.Event,
        sharded: bool,
    ) -> None:
        self._spec = spec
        self._generation = generation
        self._around = generation.around
        self._holdings = generation.holdings
        self._job = generation.around.job
        self._folder = folder
        self._report = report
        self._leaving = leaving
        self._sharded = sharded
        self._snapshots: Snapshots | None = None
        self._prefetcher: Prefetcher | None = None
        self._pending: PendingSave | None = None
        policy = balance_policy(self._job.config)
        self._balancer = Balancer(policy) if policy is not None else None
        found = overhaul_policy(self._job.config)
        self._overhaul = Overhaul(found) if found is not None else None
        self._window: deque[Outcome] = deque(maxlen=_WINDOW)
        self._steps = 0

    def run(self) -> tuple[bool, str]:
        """Train; (True, reason) when the run is done, (False, reason) to regroup.

        Raises:
            PeerLostError: the generation broke. LeftError, ShutdownError: this worker, or all, left
                on request.
        """
        generation, holdings, job = self._generation, self._holdings, self._job
        self._snapshots = Snapshots(generation, self._sharded)
        self._around.intervals.recovered(
            holdings.progress.step,
            generation.settlement.tier,
            resumed=generation.resumed_from is not None,
        )
        if generation.leads:
            self._announce()
        self._end_if_too_few()
        self._due()
        self._prefetcher = generation.prefetcher()
        try:
            while holdings.progress.step < job.total_steps:
                step = holdings.progress.step
                wishes = self._wishes()
                outcome = self._step(step, wishes)
                self._committed(outcome)
                if outcome.leaving:
                    return self._leave(outcome, wishes)
                if outcome.regroup:
                    self._snapshot(force=True)
                    return self._part("somebody waits to be let in")
                self._steps += 1
                if not outcome.skipped:
                    self._window.append(outcome)
                self._rebalance(outcome)
                learnt = self._learn()
                better = self._better_plan()
                if better is not None:
                    self._snapshot(force=True)
                    generation.regroup_for(better)
                    return self._part(better.reason)
                if learnt:
                    self._window.clear()
        finally:
            self.stop()
        self._finish()
        return True, "done"

    def _wishes(self) -> Wishes:
        """What this worker asks of all after the step to come; the leader also to save."""
        step, intervals = self._holdings.progress.step + 1, self._around.intervals
        leads = self._generation.leads
        save, snapshot = (
            leads and kept is not None and kept.due(step)
            for kept in (intervals.checkpoint, intervals.snapshot)
        )
        return Wishes(self._around.roster.newcomers, self._leaving.is_set(), save, snapshot)

    def _end_if_too_few(self) -> None:
        """Save and end where the workers that are left have waited for more in vain."""
        parallel, robust = self._job.config.parallel, self._job.config.robust
        left, step = len(self._generation.peers), self._holdings.progress.step
        if left >= parallel.min_workers:
            return
        self._save(must=True)
        if self._generation.leads:
            self._folder.write_run(self._record("stopped"))
        raise CannotGoOnError(
            f"{left} workers are left, expected at least {parallel.min_workers} "
            f"(parallel.min_workers), and no more came within {robust.wait_s:g} s (robust.wait_s); "
            f"saved at step {step}: the same command resumes there"
        )

    def _rebalance(self, outcome: Outcome) -> None:
        """Share the work out anew where the times of the last steps say that it pays."""
        generation, prefetcher = self._generation, self._prefetcher
        if self._balancer is None or outcome.skipped or len(generation.peers) == 1:
            return
        plan, cluster, besides = generation.plan, generation.cluster, generation.costs_besides
        move = self._balancer.observe(plan, outcome.times, cluster, besides)
        if move is None:
            return
        assert prefetcher is not None
        prefetcher.close()
        generation.rebalance(move)
        self._window.clear()
        self._prefetcher = generation.prefetcher(prefetcher)
        if generation.leads:
            step = self._holdings.progress.step
            self._event(
                "load_moved",
                move.reason,
                step=step,
                generation=generation.number,
                executors=[list(e) for e in move.plan.executors],
                slowness={str(w): round(f, 3) for w, f in move.slowness.items()},
            )

    def _better_plan(self) -> Move | None:
        """Now and then, a plan with other holders that is worth to regroup for."""
        generation, job, done = self._generation, self._job, self._holdings.progress.step
        first, overhaul = self._steps == LEARN_FIRST, self._overhaul
        if overhaul is None or len(generation.peers) == 1 or not self._window:
            return None
        if not first and done % _LEARN_EVERY:
            return None
        members, memory = sorted(generation.peers), self._holdings.progress.memory
        window = [outcome.times for outcome in self._window]
        took_s = statistics.median(outcome.mean_s for outcome in self._window)
        move, trial = None, generation.trial() if first else None
        if trial is not None:
            move = overhaul.judge(generation.plan, window, trial, took_s, generation.cluster)
            if move is not None:
                memory["regretted"] = members
        elif memory.get("regretted") != members:
            left, besides = job.total_steps - done, generation.costs_besides
            move = overhaul.look(generation.plan, window, took_s, left, generation.cluster, besides)
            if move is not None:
                generation.begin_trial(took_s)
        if move is not None and generation.leads:
            self._event("plan_chosen", move.reason, step=done, generation=generation.number)
        return move

    def _learn(self) -> bool:
        """Now and then tell each other what the layers cost; the checkpoint keeps it."""
        done = self._holdings.progress.step
        if done != LEARN_FIRST and done % _LEARN_EVERY:
            return False
        generation = self._generation
        links = generation.learn()
        if self._balancer is not None:
            self._balancer.forget()
        if generation.leads:
            self._event("costs_learnt", f"links: {links}", step=done, links=links.as_json())
        return True

    def _step(self, step: int, wishes: Wishes) -> Outcome:
        transaction = self._holdings.transaction
        assert self._prefetcher is not None
        assert transaction is not None
        try:
            return transaction.run(step, self._prefetcher, wishes)
        except NonFiniteGradientError as error:
            # All stop here, in the same step: with what is committed saved.
            self._save(must=False)
            self._await_save()
            if self._generation.leads:
                self._event("bad_gradient", str(error), step=step)
                self._folder.write_run(self._record("stopped"))
            raise

    def stop(self) -> None:
        """Stop sampling ahead, and take in what has come for this worker's keeping."""
        if self._snapshots is not None:
            self._snapshots.leave()
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _snapshot(self, *, asked: bool = False, force: bool = False) -> None:
        assert self._snapshots is not None
        began, interval = time.perf_counter(), self._around.intervals.snapshot
        self._snapshots.take(asked=asked, force=force)
        if asked and interval is not None:
            interval.last = self._holdings.progress.step
            interval.cost(time.perf_counter() - began)

    def _part(self, reason: str) -> tuple[bool, str]:
        """Leave the generation in good order at a step boundary."""
        assert self._generation.comm is not None
        self._await_save()
        self._generation.comm.all_reduce(torch.zeros(1))
        self._generation.comm.close()
        return False, reason

    def _event(self, kind: str, reason: str, **fields: object) -> None:
        self._folder.event(kind, worker=self._spec.worker, reason=reason, **fields)

    def _announce(self) -> None:
        generation, plan = self._generation, self._generation.plan
        settlement = generation.settlement
        self._event(
            "generation_started",
            f"{generation.number}: {plan.reason}",
            generation=generation.number,
            workers=list(plan.workers),
            cuts=list(plan.layout.cuts),
            holders=[list(h) for h in plan.holders],
            executors=[list(e) for e in plan.executors],
            plan=plan.describe(),
            recompute=[s for s, again in enumerate(generation.recompute) if again],
            predicted_peak_bytes=self._job.predicted_peak_bytes,
            tier=settlement.tier,
            settlement=settlement.reason,
            step=self._holdings.progress.step,
            timeline_ms={k: round(v, 2) for k, v in generation.timeline_ms.items()},
        )
        for kind, reason, fields in generation.events:
            self._event(kind, reason, **fields)
        if settlement.tier == 2:
            self._announce_start(generation.resumed_from)
        if settlement.tier < 2:
            self._log_voted_step()
        self._folder.write_run(self._record("running"))

    def _announce_start(self, checkpoint: int | None) -> None:
        """Tell where this start goes on from, and how many committed steps it trains again."""
        step = checkpoint or 0
        before = [e["time"] for e in self._folder.events() if e["kind"] in _STARTS]
        # What came before the last start was counted by that start.
        since = max(before, default=0.0)
        logged = [m for m in self._folder.metrics() if "loss" in m and m["time"] > since]
        lost = max(0, max((m["step"] for m in logged), default=0) - step)
        if checkpoint is not None:
            where = f"from the checkpoint of step {step} at {self._around.checkpoints.url}"
            self._event("resumed", where, step=step, steps_lost=lost)
        elif lost:
            reason = f"no checkpoint counted yet: {lost} committed steps are trained again"
            self._event("started_over", reason, step=0, steps_lost=lost)

    def _last_logged(self) -> int:
        return max((m["step"] for m in self._folder.metrics() if "loss" in m), default=0)

    def _log_voted_step(self) -> None:
        """Write the newest step's metrics if its leader died before it could."""
        done, vote = self._holdings.progress.step, self._holdings.progress.vote
        if vote is not None and self._last_logged() < done:
            self._log_step(done - 1, *vote, seconds=None)

    def _log_step(self, step: int, loss: float, norm: float, seconds: float | None) -> None:
        self._folder.metric(
            step=step + 1,
            epoch=self._job.source.epoch_of(step),
            loss=_number(loss),
            grad_norm=_number(norm),
            lr=self._learning_rate(),
            seeds=self._job.source.step_seeds(step),
            **({} if seconds is None else {"step_time_s": seconds}),
        )

    def _learning_rate(self) -> float:
        return next((e.learning_rate for e in self._holdings.engines.values() if e.names), 0.0)

    def _committed(self, outcome: Outcome) -> None:
        """Book a committed step, and do what is due."""
        progress = self._holdings.progress
        self._holdings.commit(outcome.step, outcome.seeds)
        progress.seconds += outcome.mean_s
        progress.vote = None if outcome.skipped else (outcome.loss, outcome.norm)
        if outcome.skipped:
            progress.steps_skipped += 1
        self._tell_recovery(outcome)
        if self._generation.leads:
            if outcome.skipped:
                reason = "the gradient was not finite on two holders alike: step skipped"
                self._event("step_skipped", reason, step=outcome.step)
            self._log_step(outcome.step, outcome.loss, outcome.norm, outcome.step_time_s)
            self._report.step(progress.step, outcome.loss)
        self._around.intervals.stepped(outcome.step_time_s)
        self._snapshot(asked=outcome.snapshot)
        if self._pending is not None and self._pending.done():
            self._await_save()
        self._due(asked=outcome.save)

    def _tell_recovery(self, outcome: Outcome) -> None:
        """After the first step since a fault: how long each part of the recovery took."""
        holdings, generation = self._holdings, self._generation
        broke_s, holdings.broke_s = holdings.broke_s, None
        if broke_s is None or not generation.leads:
            return
        timeline = {k: round(v, 2) for k, v in generation.timeline_ms.items()}
        timeline["replay"] = round(outcome.step_time_s * 1e3, 2)
        timeline["total"] = round((time.perf_counter() - broke_s) * 1e3, 2)
        self._event(
            "recovered",
            f"step {outcome.step} committed {timeline['total']:.0f} ms after the fault was noticed",
            generation=generation.number,
            step=outcome.step,
            timeline_ms=timeline,
        )

    def _due(self, *, asked: bool = False) -> None:
        """Evaluate and save if the run stands where it is due and has not been done.

        ``asked``: the leader asked for a checkpoint.
        """
        progress, config = self._holdings.progress, self._job.config
        done = progress.step
        if done == 0 or done >= self._job.total_steps:
            return
        epochs, rest = divmod(done, self._job.source.steps_per_epoch)
        every = config.eval.every_epochs
        if every and not rest and epochs % every == 0 and self._oldest(progress.evaluated) < done:
            self._evaluate()
        steps, interval = config.checkpoint.every_steps, self._around.intervals.checkpoint
        if asked and interval is not None:
            interval.last = done
        if asked or (steps != "auto" and steps and done % steps == 0):
            self._save(must=False)

    def _oldest(self, value: int) -> int:
        """The least of the workers' values: a member may have come in between."""
        comm = self._generation.comm
        assert comm is not None
        return int(-comm.all_reduce(torch.tensor([-float(value)]).double(), MAX).item())

    def _states(self) -> dict[int, StageState]:
        return {stage: self._holdings.state(stage) for stage in sorted(self._holdings.engines)}

    def _save(self, *, must: bool) -> None:
        progress, checkpoints = self._holdings.progress, self._around.checkpoints
        comm = self._generation.comm
        assert comm is not None
        if self._oldest(checkpoints.last_saved or 0) >= progress.step:
            return
        self._around.heartbeat.phase("checkpoint", progress.step, waiting=True)
        # First, because the points of a save belong to the step that was last said to be saved.
        self._await_save()
        self._around.injector.reach("checkpoint", progress.step)
        self._pending = checkpoints.save_async(
            progress,
            self._states(),
            comm,
            lambda message: self._event("checkpoint_warning", message),
        )
        if must or not self._job.config.checkpoint.async_save:
            self._await_save(must=must)

    def _await_save(self, *, must: bool = False) -> None:
        """Wait for the save under way, and tell what came of it.

        Raises:
            CheckpointError: nothing was committed, and it ``must`` be. PeerLostError: a fault.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            info = pending.result()
        except CheckpointError as error:
            self._around.checkpoints.last_saved = None
            if self._generation.leads:
                self._event("checkpoint_failed", str(error), step=pending.step)
            if must:
                raise
            return
        interval = self._around.intervals.checkpoint
        if interval is not None:
            interval.cost(pending.stall_s)
            self._tell_interval(interval)
        if self._generation.leads:
            self._event(
                "checkpoint_saved",
                f"{info.name} committed at {self._around.checkpoints.url}",
                step=pending.step,
                stall_s=round(pending.stall_s, 4),
            )

    def _tell_interval(self, interval: SaveInterval) -> None:
        found = interval.interval()
        if found is not None and found.steps != interval.told and self._generation.leads:
            interval.told = found.steps
            self._event("checkpoint_interval", found.reason, steps=found.steps)

    def _leave(self, outcome: Outcome, wishes: Wishes) -> tuple[bool, str]:
        """Somebody was told to leave: save; then go without them, or stop if nobody is left."""
        progress = self._holdings.progress
        everybody = outcome.leaving >= len(self._generation.peers)
        self._snapshot(force=True)
        self._save(must=everybody)
        if everybody:
            if self._generation.leads:
                self._folder.write_run(self._record("stopped"))
            self._event("worker_stopped", f"saved at step {progress.step}", step=progress.step)
            self._part("all leave")
            raise ShutdownError(
                f"stopped on request after step {progress.step}; the same command resumes there"
            )
        done, reason = self._part(f"{outcome.leaving} workers leave")
        # What was wished at the vote counts: told since then, it leaves after the next step.
        if wishes.leave:
            announcement = self._holdings.announcement(
                self._around.me, sharded=self._sharded, leaving=True
            )
            self._around.roster.leave(announcement)
            self._event("worker_left", f"on request, at step {progress.step}", step=progress.step)
            raise LeftError(f"left on request after step {progress.step}; the others go on")
        return done, reason

    def _weights(self) -> dict[str, Tensor] | None:
        """On the leader all parameters by name; each comes from its stage's first holder."""
        generation, plan = self._generation, self._generation.plan
        weights: dict[str, Tensor] = {}
        leader = min(generation.peers)
        for stage in range(plan.num_stages):
            owner = plan.holders[stage][0]
            key = Key(KIND_WEIGHTS, self._holdings.progress.step, stage)
            names = self._job.parameter_names(self._job.layout.layers_of(stage))
            if owner == self._spec.worker:
                own = self._holdings.engines[stage].weights()
                if generation.leads:
                    weights |= own
                else:
                    self._around.transport.send(generation.peers[leader], key, list(own.values()))
            elif generation.leads:
                received = self._around.transport.receive(key, self._job.config.parallel.timeout_s)
                weights |= dict(zip(names, received, strict=True))
        return weights if generation.leads else None

    def _evaluate(self) -> tuple[Metrics, dict[str, Tensor] | None]:
        """Metrics of all splits, on every worker; the weights on the leader only."""
        progress, config = self._holdings.progress, self._job.config.eval
        self._around.heartbeat.phase("evaluate", progress.step, waiting=True)
        weights = self._weights()
        found = self._metrics(weights) if weights is not None else None
        metrics: Metrics = self._generation.tell_all(found)
        progress.evaluated = progress.step
        value = metrics["val"].get(config.metric)
        if config.select == "best" and value is not None:
            value = -value if config.metric == "loss" else value
            if progress.best is None or value > progress.best.value:
                progress.best = Best(progress.step, value, metrics)
                self._holdings.best = {
                    stage: engine.weights() for stage, engine in self._holdings.engines.items()
                }
        if self._generation.leads:
            self._folder.metric(step=progress.step, **{s: dict(m) for s, m in metrics.items()})
            shown = [f"{s} {_show(metrics, s, config.metric)}" for s in ("train", "val", "test")]
            self._report.say(f"step {progress.step}: {config.metric} {' '.join(shown)}")
        return metrics, weights

    def _metrics(self, weights: dict[str, Tensor]) -> Metrics:
        config = self._job.config
        layers = self._job.fresh_layers()
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                value = weights.get(f"layers.{index}.{name}")
                if value is not None:
                    parameter.data.copy_(value)
        room = self._job.budget.between_steps(self._generation.plan, self._spec.worker)
        return evaluate(
            layers,
            self._job.store,
            config.data.split,
            chunk_nodes=config.eval.chunk_nodes,
            workdir=self._folder.path,
            memory_bytes=MEMORY_BYTES if room is None else room,
        )

    def _finish(self) -> None:
        """Final metrics, checkpoint and record; then all part."""
        generation, progress = self._generation, self._holdings.progress
        self._check_holders()
        hit_rate = self._hit_rate()
        metrics, weights = self._evaluate()
        self._save(must=True)
        if weights is not None:
            if self._job.config.eval.select == "best" and progress.best is not None:
                metrics = progress.best.metrics
            record = self._record("done", metrics, weights_sha256(weights))
            record = replace(record, feature_cache_hit_rate=hit_rate)
            self._folder.write_run(record)
            self._event("run_done", f"{record.steps} steps committed", step=record.steps)
            self._folder.close()
            self._report.end()
            if self._spec.json_output:
                print(json.dumps(asdict(record)), flush=True)
            else:
                print(_summary(record, self._job.config.eval.metric), flush=True)
        self._around.heartbeat.phase("done", progress.step, waiting=True)
        assert generation.comm is not None
        try:
            generation.comm.all_reduce(torch.zeros(1))
        except PeerLostError:
            # Somebody left between the record and the last handshake; nothing depends on it.
            recorded = self._folder.read_run()
            if recorded is None or recorded.status != "done":
                raise
            generation.comm.abandon()
            return
        generation.comm.close()

    def _hit_rate(self) -> float | None:
        """Over all workers; None where no cache was asked for."""
        cache, comm = self._job.features, self._generation.comm
        if not isinstance(cache, FeatureCache):
            return None
        assert comm is not None
        use = torch.tensor([cache.use.rows, cache.use.hits], dtype=torch.float64)
        return CacheUse(*map(int, comm.all_reduce(use).tolist())).hit_rate

    def _check_holders(self) -> None:
        """All holders of a stage must hold the same bits; anything else is a bug of ours."""
        comm = self._generation.comm
        assert comm is not None
        for stage, engine in sorted(self._holdings.engines.items()):
            digest = int(weights_sha256(engine.weights())[:12], 16)
            both = torch.tensor([digest, -digest], dtype=torch.float64)
            largest = comm.all_reduce(both, MAX, comm.stage_group(stage)).tolist()
            if largest[0] != -largest[1]:
                raise AssertionError(f"holders of stage {stage} differ after the last step")

    def _record(
        self, status: str, metrics: Metrics | None = None, sha256: str | None = None
    ) -> RunRecord:
        progress, job = self._holdings.progress, self._job
        lines = [m for m in self._folder.metrics() if "loss" in m]
        times = [m["step_time_s"] for m in lines if "step_time_s" in m]
        events = self._folder.events()
        trained = [e["steps_lost"] for e in events if e["kind"] in _STARTS]
        started = [e["time"] for e in events if e["kind"] == "worker_started"]
        recovered = [e["timeline_ms"] for e in events if e["kind"] == "recovered"]
        device = job.device
        return RunRecord(
            status=status,
            steps=progress.step,
            epochs=progress.step // job.source.steps_per_epoch,
            loss=lines[-1]["loss"] if lines else None,
            metrics=metrics or {},
            weights_sha256=sha256,
            workers=len(self._generation.peers),
            generations=progress.generations,
            steps_replayed=progress.steps_replayed,
            steps_skipped=progress.steps_skipped,
            steps_lost=sum(trained),
            seeds_trained=progress.seeds_trained,
            step_time_p50_s=float(np.percentile(times, 50)) if times else None,
            step_time_p90_s=float(np.percentile(times, 90)) if times else None,
            wall_s=time.time() - min(started, default=time.time()),
            dataset_fingerprint=job.store.fingerprint,
            identity=identity_digest(job.identity),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            versions=versions(),
            run_dir=str(self._folder.path),
            recoveries=recovered[-_RECOVERIES:],
        )


def _number(value: float) -> float | None:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else None


def _show(metrics: Metrics, split: str, name: str) -> str:
    value = metrics[split].get(name)
    return "-" if value is None else f"{value:.4f}"


def _summary(record: RunRecord, metric: str) -> str:
    parts = [f"{s} {metric} {_show(record.metrics, s, metric)}" for s in ("test", "val", "train")]
    recovered = ""
    if record.recoveries:
        parts_ms = ", ".join(f"{k} {v:.0f}" for k, v in record.recoveries[-1].items())
        recovered = f"recovered from {len(record.recoveries)} faults; ms of the last: {parts_ms}\n"
    return (
        f"done: {record.steps} steps, {', '.join(parts)}\n{recovered}"
        f"weights_sha256 {record.weights_sha256}\nrun folder {record.run_dir}"
    )
