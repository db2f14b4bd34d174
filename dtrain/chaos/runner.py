"""Runs scenarios: the undisturbed job once, the disturbed one, and the comparison."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dtrain.chaos import base, judge
from dtrain.chaos.hosts import Hosts, why_not
from dtrain.chaos.job import TorchrunJob, shared_memory
from dtrain.chaos.scenario import Act, Scenario
from dtrain.chaos.watch import Watch
from dtrain.config import Config
from dtrain.errors import DtrainError
from dtrain.runfolder import RunFolder, RunRecord

_LOOK_S = 0.02
_BARRIER_S = 5.0
"""How long agents may wait for those that were killed, once the run is done: torchrun's barrier at
the end knows nothing of hosts that are gone and would wait for five minutes."""

Say = Callable[[str], None]


@dataclass
class Verdict:
    """How a scenario went. ``passed`` is None when it could not be run; ``reasons`` say why."""

    scenario: str
    model: str
    zero: int
    passed: bool | None
    reasons: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    recovery_s: float | None = None
    steps_replayed: int = 0
    steps_lost: int = 0
    generations: int = 0
    starts: int = 0
    descriptors: int = 0
    threads: int = 0
    faults: list[str] = field(default_factory=list)
    run_dir: str = ""


class Runner:
    """Runs scenarios in ``folder``, with one model and ZeRO stage.

    ``keep``: keep the run folders of scenarios that passed.
    """

    def __init__(
        self, folder: Path, *, model: str, zero: int, keep: bool = False, say: Say = print
    ) -> None:
        self.folder = folder.absolute()
        self.model, self.zero = model, zero
        self._keep = keep
        self._say = say
        base.base_config("", model, zero)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._store = base.make_store(self.folder)

    def run(self, scenario: Scenario) -> Verdict:
        """Run one scenario and judge it."""
        began = time.monotonic()
        verdict = Verdict(scenario.name, self.model, self.zero, None)
        count = scenario.hosts + scenario.spare_hosts
        obstacle = why_not() if count > 1 else None
        if obstacle is not None:
            verdict.reasons = [f"needs network namespaces: {obstacle}"]
            return verdict
        raw = base.with_overrides(
            base.base_config(self._store, self.model, self.zero), scenario.overrides
        )
        config = base.checked(raw, scenario.name)
        shape = base.shape_of(config, scenario.workers)
        raw["faults"] = list(scenario.faults(shape))
        config = base.checked(raw, scenario.name)
        twin = self._twin(config)
        folder = self.folder / f"{scenario.name}-{self.model}-zero{self.zero}"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        verdict.run_dir = str(folder / "run")
        verdict.faults = [fault.describe() for fault in config.faults]
        verdict.faults += [act.describe() for act in scenario.acts]
        self._say(f"{scenario.name} ({self.model}, ZeRO {self.zero}): {scenario.about}")
        for line in verdict.faults:
            self._say(f"  {line}")
        self._disturb(scenario, config, twin, folder, verdict)
        verdict.passed = not verdict.reasons
        verdict.wall_s = round(time.monotonic() - began, 1)
        if verdict.passed and not self._keep:
            shutil.rmtree(folder)
        return verdict

    def _twin(self, config: Config) -> judge.Twin:
        """The undisturbed run of the same result, from the cache or run now, by one worker alone:
        the number of workers must not matter either.

        Raises:
            DtrainError: it failed: then nothing can be compared.
        """
        identity = config.identity("")
        key = json.dumps([identity, config.train.model_dump(mode="json")], sort_keys=True)
        folder = self.folder / "undisturbed" / hashlib.sha256(key.encode()).hexdigest()[:12]
        run_dir = folder / "run"
        record = RunFolder(run_dir).read_run() if run_dir.is_dir() else None
        if record is None or record.status != "done":
            self._say(f"undisturbed run of {config.train.max_steps} steps ({self.model})")
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            undisturbed = config.model_copy(update={"faults": []})
            job = TorchrunJob(_write(folder, undisturbed), run_dir, folder, workers=1)
            try:
                job.start()
                _wait(job, Watch(run_dir), (), None, 300.0)
                record = RunFolder(run_dir).read_run()
                if record is None or record.status != "done":
                    tail = " | ".join(job.output().strip().splitlines()[-3:])
                    raise DtrainError(f"chaos: the undisturbed run failed ({tail}); see {folder}")
            finally:
                job.close()
        watch = Watch(run_dir)
        watch.look()
        return judge.twin_of(record, watch.steps)

    def _disturb(
        self,
        scenario: Scenario,
        config: Config,
        twin: judge.Twin,
        folder: Path,
        verdict: Verdict,
    ) -> None:
        run_dir = folder / "run"
        watch = Watch(run_dir)
        with ExitStack() as stack:
            count = scenario.hosts + scenario.spare_hosts
            hosts = stack.enter_context(Hosts(count)) if count > 1 else None
            known = shared_memory()
            job = TorchrunJob(
                _write(folder, config),
                run_dir,
                folder,
                workers=scenario.workers,
                num_hosts=scenario.hosts,
                max_hosts=count if scenario.elastic else 0,
                hosts=hosts,
                flags=scenario.torchrun,
            )
            stack.callback(job.close)
            job.start()
            verdict.starts = 1
            verdict.reasons += _wait(job, watch, scenario.acts, hosts, scenario.limit_s)
            record = RunFolder(run_dir).read_run()
            verdict.reasons += _end_missed(scenario, job, record)
            scratch = scenario.expect.scratch
            left = job.leftovers(known, scratch=scratch)
            verdict.reasons += [f"left behind: {what}" for what in left]
            output = job.output()
        first = record
        may_resume = scenario.expect.ends != "done"
        if may_resume and record is not None and record.status != "done":
            record = self._resume(scenario, config, folder, watch, verdict)
        verdict.reasons += judge.promise_broken(twin, record, watch.steps, scenario.expect.lost)
        verdict.reasons += judge.expectation_missed(scenario, watch, first, output)
        if record is not None:
            verdict.steps_replayed = record.steps_replayed
            verdict.steps_lost = record.steps_lost
            verdict.generations = record.generations
            verdict.reasons += judge.resources_kept(watch, record.generations)
        verdict.recovery_s = round(max(watch.pauses(), default=0.0), 2) or None
        verdict.descriptors, verdict.threads = watch.growth()

    def _resume(
        self, scenario: Scenario, config: Config, folder: Path, watch: Watch, verdict: Verdict
    ) -> RunRecord | None:
        """Start the ended job again, undisturbed and on this host."""
        undisturbed = config.model_copy(update={"faults": []})
        again = folder / "again"
        again.mkdir()
        run_dir = folder / "run"
        job = TorchrunJob(_write(again, undisturbed), run_dir, again, workers=scenario.workers)
        verdict.starts += 1
        known = shared_memory()
        try:
            job.start()
            verdict.reasons += _wait(job, watch, (), None, scenario.limit_s)
            verdict.reasons += [f"left behind: {what}" for what in job.leftovers(known)]
        finally:
            job.close()
        return RunFolder(run_dir).read_run()


def _write(folder: Path, config: Config) -> Path:
    file = folder / "config.yaml"
    raw = config.model_dump(mode="json", exclude_defaults=True)
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    return file


def _wait(
    job: TorchrunJob, watch: Watch, acts: tuple[Act, ...], hosts: Hosts | None, limit_s: float
) -> list[str]:
    """Watch the job to its end and do what is due; reasons why it did not end well."""
    end = time.monotonic() + limit_s
    left, due = list(acts), []
    done_since: float | None = None
    while not job.ended():
        now = time.monotonic()
        if now > end:
            said = " | ".join(job.output().strip().splitlines()[-3:])
            job.stop()
            return [f"did not end within {limit_s:g} s: step {watch.committed}; last: {said}"]
        watch.look()
        for act in [a for a in left if _is_due(a, watch)]:
            left.remove(act)
            due.append((now + act.after_s, act))
        for entry in [d for d in due if d[0] <= now]:
            due.remove(entry)
            if entry[1].deed not in ("heal", "cont", "start", "join"):
                watch.struck_s.append(time.time())
            _do(entry[1], job, hosts)
        if done_since is None and watch.of_kind("run_done"):
            done_since = now
        disturbed = bool(job.killed or acts)
        if done_since is not None and disturbed and now > done_since + _BARRIER_S:
            _end_barriers(job)
        time.sleep(_LOOK_S)
    watch.look()
    return [f"{act.describe()}: did not come to pass, the job ended before" for act in left]


def _is_due(act: Act, watch: Watch) -> bool:
    if act.event is not None:
        return bool(watch.of_kind(act.event))
    return watch.committed >= act.step


def _do(act: Act, job: TorchrunJob, hosts: Hosts | None) -> None:
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
    if act.deed in numbers:
        job.signal_host(act.host, numbers[act.deed])
    elif act.deed == "start":
        job.start_host(act.host)
    elif act.deed == "join":
        job.join(act.host, 2)
    elif act.deed == "sigterm":
        job.agents[act.host].send_signal(signal.SIGTERM)
    else:
        assert hosts is not None
        if act.deed == "delay":
            hosts.delay(act.host, act.delay_s)
        else:
            {"cut": hosts.cut, "mute": hosts.mute, "heal": hosts.heal}[act.deed](act.host)


def _end_barriers(job: TorchrunJob) -> None:
    """End agents that have nothing left to do but to wait for killed ones."""
    for host, agent in job.agents.items():
        if agent.poll() is None and job.processes(host) == [agent.pid]:
            job.killed.add(host)
            agent.kill()


def _end_missed(scenario: Scenario, job: TorchrunJob, record: RunRecord | None) -> list[str]:
    """Whether the job ended as it should: done with exit code 0, or to be resumed."""
    done = record is not None and record.status == "done"
    codes = {host: code for host, code in job.exit_codes().items() if host not in job.killed}
    codes |= {job.num_hosts + i: joiner.poll() for i, joiner in enumerate(job.joiners)}
    wanted = scenario.expect.ends
    if wanted == "resumable" and done:
        return ["end: expected a run to be resumed, got one that is done"]
    if wanted != "done":
        return []
    said = " | ".join(job.output().strip().splitlines()[-3:])
    if not done:
        return [f"end: expected the run to be done, exit codes {codes}; last: {said}"]
    if any(codes.values()):
        return [f"end: expected exit code 0, got {codes}; last: {said}"]
    return []


def as_json(verdicts: list[Verdict]) -> dict[str, Any]:
    """All verdicts, and whether every scenario that could be run passed."""
    return {
        "passed": all(v.passed is not False for v in verdicts),
        "scenarios": [asdict(v) for v in verdicts],
    }
