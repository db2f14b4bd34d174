"""One worker's life: generation after generation until the run is done."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from functools import partial

import torch

from dtrain.config import Config
from dtrain.deepspeed_options import zero_stage
from dtrain.errors import (
    EvictedError,
    FaultyHardwareError,
    LeftError,
    PeerLostError,
    ShutdownError,
    StoreLostError,
)
from dtrain.faults.injector import Injector
from dtrain.runfolder import RunFolder
from dtrain.runtime.comm import first_line, lone_group
from dtrain.runtime.delays import Delays
from dtrain.runtime.generation import Generation, Holdings, Surroundings
from dtrain.runtime.heartbeat import Heartbeat
from dtrain.runtime.intervals import Intervals
from dtrain.runtime.membership import Roster
from dtrain.runtime.recorder import ActionRecorder
from dtrain.runtime.reporting import ProgressReport
from dtrain.runtime.setup import prepare_job
from dtrain.runtime.spec import TrainerSpec
from dtrain.runtime.state import Checkpoints
from dtrain.runtime.store_log import StoreLog
from dtrain.runtime.training import Training
from dtrain.runtime.transport import Loss, Transport
from dtrain.runtime.warmup import warm_up
from dtrain.scheduler.costmodel import CostModel
from dtrain.scheduler.membership import MembershipPolicy, Peer

_STORE_CALL_S = 10.0
_STORE_STAYS_S = 5.0
"""For a membership to change, and for the workers of other nodes to be told to leave as well."""


def trainer_main(spec: TrainerSpec, heartbeat: Heartbeat | None = None) -> None:
    """Train as worker ``spec.worker`` until the run is done.

    Raises:
        DtrainError: bad input. EvictedError: the others went on without this life of the worker.
        StoreLostError: the job's store is gone and the membership changed. LeftError: SIGTERM came
            and the others go on. ShutdownError: all leave; the run was saved and can be resumed.
    """
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    config = Config.model_validate(spec.config)
    torch.set_num_threads(config.parallel.threads_per_worker)
    torch.use_deterministic_algorithms(True)
    # The default also fills all uninitialised memory, such as DeepSpeed's buckets of gigabytes.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _Life(spec, config, heartbeat or Heartbeat(), leaving).run()


class _Life:
    """A trainer from its start to its end."""

    def __init__(
        self, spec: TrainerSpec, config: Config, heartbeat: Heartbeat, leaving: threading.Event
    ) -> None:
        self._spec = spec
        self._config = config
        self._leaving = leaving
        self._folder = RunFolder(spec.run_dir)
        heartbeat.phase("setup", 0)
        active = max(1, spec.world_size - config.parallel.spares)
        job = prepare_job(config, spec.local_rank, active)
        if job.layout_reason and spec.worker == 0:
            self._event("stages_chosen", job.layout_reason, cuts=list(job.layout.cuts))
        injector = Injector.from_config(
            config,
            spec.worker,
            spec.incarnation,
            spec.run_dir,
            world_size=spec.world_size,
            supervisor_pid=spec.supervisor_pid,
        )
        log = StoreLog(
            spec.store_host,
            spec.store_port,
            hosts_it=spec.host_store,
            timeout_s=config.parallel.timeout_s,
            call_s=_STORE_CALL_S,
        )
        me = Peer(spec.worker, spec.incarnation)
        self._roster: Roster | None = None
        transport = Transport(
            me,
            _own_host(spec.store_host, spec.store_port),
            config.robust.lease_s,
            self._lost,
            lambda: injector.network,
        )
        policy = MembershipPolicy(
            world_size=spec.world_size,
            min_workers=config.parallel.min_workers,
            gather_s=config.parallel.timeout_s,
            split_s=config.robust.lease_s,
            wait_s=config.robust.wait_s,
            spares=config.parallel.spares,
        )
        roster = Roster(me, spec.domains, policy, log, transport, self._event)
        self._roster = roster
        url = config.checkpoint.url or str(self._folder.checkpoints)
        self._around = Surroundings(
            me,
            job,
            log,
            transport,
            roster,
            Checkpoints(url, job, injector.checkpoint_point),
            heartbeat,
            injector,
            lone_group(config.parallel.timeout_s),
            self._event,
            ActionRecorder(
                partial(self._folder.actions, spec.worker)
                if config.parallel.record_actions
                else None
            ),
            CostModel(),
            Delays(),
            Intervals.of(config),
        )
        self._holdings = Holdings()
        self._sharded = zero_stage(config.deepspeed) > 0
        self._report = ProgressReport(job.total_steps, shown=spec.progress)

    def _lost(self, loss: Loss) -> None:
        if self._roster is not None:
            self._roster.lost(loss)

    def _event(self, kind: str, reason: str, **fields: object) -> None:
        self._folder.event(kind, worker=self._spec.worker, reason=reason, **fields)

    def run(self) -> None:
        """Enter generations until one of them finishes the run."""
        around, reason = self._around, "started"
        self._event(
            "worker_started",
            "ready to join",
            node=self._spec.node,
            pid=os.getpid(),
            supervisor_pid=self._spec.supervisor_pid,
            incarnation=self._spec.incarnation,
        )
        warm_up(around.job)
        # What is there now stays: later collections need not look at it.
        gc.freeze()
        around.injector.reach("join", 0)
        try:
            with self._report:
                while True:
                    done, reason = self._generation(reason)
                    if done:
                        break
            around.transport.close()
        except ShutdownError:
            around.transport.close()
            raise
        except LeftError:
            around.transport.close()
            self._keep_store()
            raise
        except (EvictedError, StoreLostError) as error:
            self._event("worker_failed", str(error))
            raise
        finally:
            around.roster.stop()

    def _keep_store(self) -> None:
        """Leave no earlier than the others, who agree over this process's store, can do without."""
        if self._spec.host_store:
            self._around.heartbeat.phase(
                "keeping the job's store", self._holdings.progress.step, waiting=True
            )
            time.sleep(_STORE_STAYS_S)

    def _generation(self, reason: str) -> tuple[bool, str]:
        """One generation; whether the run is done, and else why a new one is needed."""
        around, holdings = self._around, self._holdings
        announcement = holdings.announcement(around.me, sharded=self._sharded)
        around.heartbeat.phase("agreeing", holdings.progress.step, waiting=True)
        agreement = around.roster.agree(announcement, reason, holdings.vote(), holdings.work())
        generation = Generation(around, holdings, agreement)
        training = Training(
            self._spec, generation, self._folder, self._report, self._leaving, self._sharded
        )
        try:
            generation.form()
            return training.run()
        except PeerLostError as error:
            noticed = time.perf_counter()
            why = generation.fault.reason or first_line(error)
            generation.fault.set(why)
            self._event("generation_broke", why, generation=generation.number)
            around.roster.post_broken(generation.number, why)
            if generation.comm is not None:
                generation.comm.abandon()
            training.stop()
            around.transport.enter(generation.number + 1, generation.fault)
            self._holdings.broke_s = self._holdings.broke_s or noticed
            return False, why
        except (LeftError, ShutdownError):
            raise
        except FaultyHardwareError as error:
            self._event("worker_faulty", str(error), generation=generation.number)
            raise
        except Exception as error:
            # The others must not wait for this worker, whatever it died of.
            self._event("worker_failed", f"{type(error).__name__}: {first_line(error)}")
            raise


def _own_host(store_host: str, store_port: int) -> str:
    """This node's address as the store's host sees it; loopback when that is the same node."""
    family = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing; it only picks the route.
        probe.connect(family[4])
        return str(probe.getsockname()[0])
