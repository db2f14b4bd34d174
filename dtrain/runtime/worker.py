"""One worker's life: join a generation, restore, run steps as transactions, evaluate, leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointError, weights_sha256
from dtrain.config import Config
from dtrain.errors import PeerLostError, ShutdownError
from dtrain.evaluate import evaluate
from dtrain.models.build import build_layers
from dtrain.runfolder import RunFolder, RunRecord, versions
from dtrain.runtime.comm import (
    MAX,
    Communicator,
    Generation,
    Member,
    connect_store,
    join_generation,
)
from dtrain.runtime.compute import StageCompute
from dtrain.runtime.deepspeed_backend import install_backend
from dtrain.runtime.engine import StageEngine
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.inputs import InputFetcher, Prefetcher
from dtrain.runtime.reporting import ProgressReport
from dtrain.runtime.setup import Job, prepare_job
from dtrain.runtime.spec import TrainerSpec
from dtrain.runtime.state import Best, Progress, RunState
from dtrain.runtime.transaction import Outcome, StepTransaction
from dtrain.runtime.transport import KIND_WEIGHTS, Key, Transport
from dtrain.scheduler import Plan, make_plan

# Groups of a broken generation: their destructors may block for as long as a peer is stopped.
_parked: list[object] = []


def trainer_main(spec: TrainerSpec) -> None:
    """Train as worker ``spec.worker`` until the run is done.

    Raises:
        DtrainError: bad input. PeerLostError: another worker is gone; the run can be resumed.
        ShutdownError: SIGTERM came, the run was saved at a step boundary and can be resumed.
    """
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    config = Config.model_validate(spec.config)
    torch.set_num_threads(config.parallel.threads_per_worker)
    torch.use_deterministic_algorithms(True)
    # The default also fills all uninitialised memory, such as DeepSpeed's buckets of gigabytes.
    torch.utils.deterministic.fill_uninitialized_memory = False
    folder = RunFolder(spec.run_dir)
    job = prepare_job(config, spec.local_rank)
    fault = FaultFlag()
    generation, transport, store = _join(spec, config, fault)
    plan = make_plan(job.layout, sorted(generation.members), generation.number)
    comm = Communicator(
        generation,
        spec.worker,
        plan.holders,
        store,
        transport,
        fault,
        config.parallel.timeout_s,
    )
    folder.event(
        "worker_started",
        worker=spec.worker,
        reason=f"joined generation {generation.number}",
        node=spec.node,
        pid=os.getpid(),
        supervisor_pid=spec.supervisor_pid,
        incarnation=spec.incarnation,
        generation=generation.number,
    )
    try:
        _Run(spec, job, plan, comm, folder, leaving).run()
    except ShutdownError:
        comm.close()
        raise
    except BaseException as error:
        _parked.append(comm)
        reason = f"worker {spec.worker}: {str(error).splitlines()[0] if str(error) else error!r}"
        if not isinstance(error, PeerLostError) or fault.reason is None:
            reason = f"{type(error).__name__} in {reason}"
        folder.event("worker_failed", worker=spec.worker, reason=reason)
        _tell(comm, reason)
        raise
    comm.close()


def _tell(comm: Communicator, reason: str) -> None:
    """Post a fault, unless the store does not answer: then the others notice it by themselves."""
    done = threading.Thread(target=comm.post_fault, args=(reason,), daemon=True)
    done.start()
    done.join(2.0)


def _join(
    spec: TrainerSpec, config: Config, fault: FaultFlag
) -> tuple[Generation, Transport, object]:
    timeout_s = config.parallel.timeout_s
    store = connect_store(spec.store_host, spec.store_port, spec.host_store, timeout_s)
    transport = Transport(spec.worker, _own_host(spec.store_host, spec.store_port), fault)
    me = Member(spec.worker, spec.incarnation, transport.address)
    return join_generation(store, me, spec.world_size, fault, timeout_s), transport, store


def _own_host(store_host: str, store_port: int) -> str:
    """This node's address as the store's host sees it; loopback when that is the same node."""
    family = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect(family[4])
        return str(probe.getsockname()[0])


@dataclass
class _Counters:
    """What only the leader keeps for the run's record."""

    began: float = field(default_factory=time.monotonic)
    step_times_s: list[float] = field(default_factory=list)
    steps_lost: int = 0
    generations: int = 1
    loss: float | None = None


class _Run:
    """The steps of one worker under one plan."""

    def __init__(
        self,
        spec: TrainerSpec,
        job: Job,
        plan: Plan,
        comm: Communicator,
        folder: RunFolder,
        leaving: threading.Event,
    ) -> None:
        self.spec, self.job, self.plan, self.comm = spec, job, plan, comm
        self.folder, self.leaving = folder, leaving
        self.leads = spec.worker == plan.workers[0]
        url = job.config.checkpoint.url or str(folder.checkpoints)
        self.state = RunState(url, job, comm, self.leads)
        self.progress = Progress()
        self.best_weights: dict[str, Tensor] = {}
        self.engines: dict[int, StageEngine] = {}
        self.counters = _Counters()

    def run(self) -> None:
        """Restore, train, evaluate, report."""
        if self.leads:
            self._announce()
        self._restore()
        source, config = self.job.source, self.job.config
        fetcher = InputFetcher(source, self.job.store, self.plan, self.spec.worker, self.job.device)
        computes = {
            s: StageCompute(
                engine,
                self.job.layout.layers_of(s),
                config.seed,
                is_last=s == self.plan.num_stages - 1,
            )
            for s, engine in self.engines.items()
        }
        steps = range(self.progress.step, self.job.total_steps)
        prefetcher = Prefetcher(
            fetcher, source, steps, len(fetcher.order) + 1, self.comm.fault, self.comm.timeout_s
        )
        transaction = StepTransaction(
            self.plan,
            self.spec.worker,
            self.comm,
            self.engines,
            computes,
            source,
            prefetcher,
            self.job.parameter_stage(),
        )
        shown = self.spec.progress and self.leads
        try:
            with ProgressReport(self.job.total_steps, self.progress.step, shown=shown) as report:
                for step in steps:
                    outcome = transaction.run(step, leaving=self.leaving.is_set())
                    self._committed(outcome, report)
        finally:
            prefetcher.close()
        self._finish()

    def _announce(self) -> None:
        previous = self.folder.read_run()
        if previous is not None:
            self.counters.generations = previous.generations + 1
        self.folder.event(
            "generation_started",
            worker=self.spec.worker,
            reason=self.plan.reason,
            generation=self.plan.generation,
            workers=list(self.plan.workers),
            holders=[list(h) for h in self.plan.holders],
            executors=[list(e) for e in self.plan.executors],
            plan=self.plan.describe(),
        )

    def _event(self, kind: str, reason: str, **fields: object) -> None:
        self.folder.event(kind, worker=self.spec.worker, reason=reason, **fields)

    def _restore(self) -> None:
        found = self.state.find(lambda message: self._event("checkpoint_skipped", message))
        held = self.plan.stages_held(self.spec.worker)
        if found is not None:
            info, self.progress = found
            for stage in held:
                self.state.load_weights(info, self.job.layout.layers_of(stage))
            if self.leads and self.progress.best is not None:
                self.best_weights = self.state.load_best(info)
        backend = install_backend(self.comm)
        for stage in held:
            engine = StageEngine(
                stage,
                {i: self.job.layers[i] for i in self.job.layout.layers_of(stage)},
                self.job.config.deepspeed,
                self.job.config.train.weight_decay_layers,
                self.comm,
                backend,
                contributes=self.plan.holders[stage][0] == self.spec.worker,
                device=self.job.device,
            )
            self.engines[stage] = engine
            if found is not None:
                self.state.load_engine(found[0], self.progress, engine)
        if self.leads:
            self._tell_resumed(found is not None)

    def _tell_resumed(self, resumed: bool) -> None:
        if resumed:
            known = [m["step"] for m in self.folder.metrics() if "loss" in m]
            self.counters.steps_lost = max(0, max(known, default=0) - self.progress.step)
            self._event(
                "resumed",
                f"newest intact checkpoint at {self.state.url} is of step {self.progress.step}",
                step=self.progress.step,
                steps_lost=self.counters.steps_lost,
            )
        self.folder.write_run(self._record("running"))

    def _committed(self, outcome: Outcome, report: ProgressReport) -> None:
        """Book a committed step; save, evaluate and leave where it is time."""
        self.progress.step = outcome.step + 1
        self.progress.seeds_trained += outcome.seeds
        done, config = self.progress.step, self.job.config
        if self.leads:
            self.counters.loss = outcome.loss
            self.counters.step_times_s.append(outcome.step_time_s)
            self.folder.metric(
                step=done,
                epoch=self.job.source.epoch_of(outcome.step),
                loss=outcome.loss,
                grad_norm=outcome.norm,
                lr=self._learning_rate(),
                seeds=outcome.seeds,
                step_time_s=outcome.step_time_s,
            )
            report.step(done, outcome.loss)
        epochs, rest = divmod(done, self.job.source.steps_per_epoch)
        every = config.eval.every_epochs
        if every and not rest and epochs % every == 0 and done < self.job.total_steps:
            self._evaluate(report.say)
        every = config.checkpoint.every_steps
        if outcome.stop or (every and done % every == 0 and done < self.job.total_steps):
            self._save(must=outcome.stop)
        if outcome.stop:
            if self.leads:
                self.folder.write_run(self._record("stopped"))
            self._event("worker_stopped", f"SIGTERM came; saved at step {done}", step=done)
            raise ShutdownError(
                f"stopped on request after step {done}; the same command resumes from there"
            )

    def _learning_rate(self) -> float:
        return next((e.learning_rate for e in self.engines.values() if e.names), 0.0)

    def _save(self, *, must: bool) -> None:
        if self.state.last_saved == self.progress.step:
            return
        engine = next((e for e in self.engines.values() if e.names), None)
        self.progress.schedule = engine.schedule_state() if engine is not None else {}
        began = time.perf_counter()
        try:
            info = self.state.save(
                self.progress,
                self.engines,
                self.best_weights,
                lambda message: self._event("checkpoint_warning", message),
            )
        except CheckpointError as error:
            if self.leads:
                self._event("checkpoint_failed", str(error), step=self.progress.step)
            if must:
                raise
            return
        if self.leads:
            took = time.perf_counter() - began
            self._event(
                "checkpoint_saved",
                f"{info.name} committed at {self.state.url}",
                step=self.progress.step,
                seconds=round(took, 4),
            )

    def _weights(self) -> dict[str, Tensor] | None:
        """On the leader all parameters by name; each comes from its stage's first holder."""
        weights: dict[str, Tensor] = {}
        leader = self.plan.workers[0]
        for stage in range(self.plan.num_stages):
            owner = self.plan.holders[stage][0]
            key = Key(KIND_WEIGHTS, self.progress.step, stage)
            names = self.job.parameter_names(self.job.layout.layers_of(stage))
            if owner == self.spec.worker:
                own = self.engines[stage].weights()
                if self.leads:
                    weights |= own
                else:
                    self.comm.transport.send(leader, key, list(own.values()))
            elif self.leads:
                received = self.comm.transport.receive(key, self.comm.timeout_s)
                weights |= dict(zip(names, received, strict=True))
        return weights if self.leads else None

    def _evaluate(
        self, say: Callable[[str], None]
    ) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]] | None:
        """Metrics of all splits and the weights, on the leader; None on the others."""
        weights = self._weights()
        if weights is None:
            return None
        metrics = self._metrics(weights)
        config = self.job.config.eval
        self.folder.metric(
            step=self.progress.step, **{split: dict(m) for split, m in metrics.items()}
        )
        value = metrics["val"].get(config.metric)
        if config.select == "best" and value is not None:
            value = -value if config.metric == "loss" else value
            if self.progress.best is None or value > self.progress.best.value:
                self.progress.best = Best(self.progress.step, value, metrics)
                self.best_weights = weights
        shown = f"{config.metric} train {_show(metrics, 'train', config.metric)}"
        say(
            f"step {self.progress.step}: {shown} val {_show(metrics, 'val', config.metric)} "
            f"test {_show(metrics, 'test', config.metric)}"
        )
        return metrics, weights

    def _metrics(self, weights: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        config, meta = self.job.config, self.job.store.meta
        layers = build_layers(config.model, meta.num_features, meta.num_classes, config.seed)
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                value = weights.get(f"layers.{index}.{name}")
                if value is not None:
                    parameter.data.copy_(value)
        return evaluate(
            layers,
            self.job.store,
            config.data.split,
            chunk_nodes=config.eval.chunk_nodes,
            workdir=self.folder.path,
        )

    def _finish(self) -> None:
        """Final metrics, checkpoint and record."""
        self._check_holders()
        found = self._evaluate(lambda _: None)
        self._save(must=True)
        if found is None:
            return
        metrics, weights = found
        if self.job.config.eval.select == "best" and self.progress.best is not None:
            metrics = self.progress.best.metrics
        record = self._record("done", metrics, weights_sha256(weights))
        self.folder.write_run(record)
        self._event("run_done", f"{record.steps} steps committed", step=record.steps)
        self.folder.close()
        if self.spec.json_output:
            print(json.dumps(asdict(record)), flush=True)
        else:
            print(_summary(record, self.job.config.eval.metric), flush=True)

    def _check_holders(self) -> None:
        """All holders of a stage must hold the same bits; anything else is a bug of ours."""
        for stage, engine in sorted(self.engines.items()):
            digest = int(weights_sha256(engine.weights())[:12], 16)
            both = torch.tensor([digest, -digest], dtype=torch.float64)
            largest = self.comm.all_reduce(both, MAX, self.comm.stage_groups[stage]).tolist()
            if largest[0] != -largest[1]:
                raise AssertionError(f"holders of stage {stage} differ after the last step")

    def _record(
        self,
        status: str,
        metrics: dict[str, dict[str, float]] | None = None,
        sha256: str | None = None,
    ) -> RunRecord:
        from dtrain.config import identity_digest

        times = self.counters.step_times_s
        device = self.job.device
        return RunRecord(
            status=status,
            steps=self.progress.step,
            epochs=self.progress.step // self.job.source.steps_per_epoch,
            loss=self.counters.loss,
            metrics=metrics or {},
            weights_sha256=sha256,
            workers=len(self.plan.workers),
            generations=self.counters.generations,
            steps_replayed=0,
            steps_lost=self.counters.steps_lost,
            seeds_trained=self.progress.seeds_trained,
            step_time_p50_s=float(np.percentile(times, 50)) if times else None,
            step_time_p90_s=float(np.percentile(times, 90)) if times else None,
            wall_s=time.monotonic() - self.counters.began,
            dataset_fingerprint=self.job.store.fingerprint,
            identity=identity_digest(self.job.identity),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            versions=versions(),
            run_dir=str(self.folder.path),
        )


def _show(metrics: dict[str, dict[str, float]], split: str, name: str) -> str:
    value = metrics[split].get(name)
    return "-" if value is None else f"{value:.4f}"


def _summary(record: RunRecord, metric: str) -> str:
    parts = [f"{s} {metric} {_show(record.metrics, s, metric)}" for s in ("test", "val", "train")]
    return (
        f"done: {record.steps} steps, {', '.join(parts)}\n"
        f"weights_sha256 {record.weights_sha256}\nrun folder {record.run_dir}"
    )
