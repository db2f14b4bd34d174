"""The scenarios by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dtrain.chaos.scenario import Act, Expectation, Scenario, Shape
from dtrain.errors import DtrainError
from dtrain.faults.spec import HOW, PHASES

# In checkpoint, recovery and join a fault strikes when the job next comes there.
_STEP = 12
_LONG = {"train.max_steps": 300}
"""Whoever comes or comes back must find the job still running, on a busy machine too."""


def catalog() -> dict[str, Scenario]:
    """All scenarios, by name, in the order in which they are listed and run."""
    groups = (_kills(), _crashes(), _hangs(), _several(), _soft(), _storage(), _job(), _hosts())
    return {scenario.name: scenario for group in groups for scenario in group}


def scenario_named(name: str) -> Scenario:
    """The scenario of this name.

    Raises:
        DtrainError: there is none; the nearest name is given.
    """
    known = catalog()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "see dtrain chaos --list"
        raise DtrainError(f"--scenario: expected a scenario's name, got {name!r}; {hint}")
    return known[name]


def crash(worker: int, step: int = _STEP, **more: Any) -> dict[str, Any]:
    """A fault: SIGKILL for ``worker`` at ``step`` unless ``how`` says otherwise."""
    return {"kind": "crash", "worker": worker, "step": step, **more}


def _one(**fault: Any) -> Callable[[Shape], Sequence[dict[str, Any]]]:
    return lambda shape: [fault]


def _all(*faults: dict[str, Any]) -> Callable[[Shape], Sequence[dict[str, Any]]]:
    return lambda shape: faults


def _executor(stage: int, **more: Any) -> Callable[[Shape], Sequence[dict[str, Any]]]:
    return lambda shape: [crash(shape.executors[stage][0], **more)]


def _kills() -> Iterator[Scenario]:
    for phase in PHASES:
        if phase in ("recovery", "join"):
            continue
        yield Scenario(
            f"kill-{phase}",
            f"SIGKILL in the phase {phase}",
            _one(**crash(1, phase=phase)),
            expect=Expectation(lost=1),
        )
    yield Scenario(
        "kill-recovery",
        "a second SIGKILL while the others recover from the first",
        lambda shape: [crash(1, phase="forward"), crash(2, phase="recovery")],
        expect=Expectation(replayed=2, lost=1, fired=2),
    )
    yield Scenario(
        "kill-join",
        "SIGKILL of a worker that comes back, while it joins",
        lambda shape: [crash(1, phase="forward"), crash(1, phase="join")],
        overrides=_LONG,
        expect=Expectation(replayed=2, fired=2),
    )
    yield Scenario(
        "kill-giver",
        "SIGKILL of a survivor while another worker joins",
        lambda shape: [crash(1, phase="forward"), crash(0, phase="join")],
        overrides=_LONG,
        expect=Expectation(replayed=2, lost=1, fired=2),
    )
    for name, stage in (("first", 0), ("middle", 1), ("last", 2)):
        yield Scenario(
            f"kill-{name}-stage",
            f"SIGKILL of the executor of the {name} stage",
            _executor(stage, phase="backward"),
        )
    yield Scenario(
        "kill-leader",
        "SIGKILL of worker 0: local rank 0 and leader",
        _one(**crash(0, phase="forward")),
    )
    yield Scenario(
        "kill-two-leaders",
        "SIGKILL of the leader, then of the one that follows it",
        lambda shape: [crash(0, phase="forward"), crash(1, _STEP + 3, phase="vote")],
        expect=Expectation(replayed=2, lost=1, fired=2),
    )
    yield Scenario(
        "kill-last-copy",
        "SIGKILL of the only holder of a stage (tier 1 or 2)",
        _executor(1, phase="forward"),
        overrides={"parallel.redundancy": 1},
        # The newest snapshot may be of the step before the one that was being committed.
        expect=Expectation(replayed=2, lost=12),
    )


def _crashes() -> Iterator[Scenario]:
    for how in HOW["crash"]:
        if how != "sigkill":
            yield Scenario(
                f"crash-{how}",
                f"a trainer ends by {how}",
                _one(**crash(2, phase="backward", how=how)),
            )


def _hangs() -> Iterator[Scenario]:
    about = {
        "sigstop": "a trainer is stopped and stays so",
        "gil": "a trainer's interpreter lock is never free again",
        "loop": "a trainer turns in an endless loop",
    }
    for how in HOW["hang"]:
        yield Scenario(
            f"hang-{how}",
            about[how],
            _one(kind="hang", how=how, worker=1, step=_STEP, phase="backward"),
            # The loop lets the heart beat: it shows by standing still in one action.
            overrides={"robust.progress_s": 5.0} if how == "loop" else {},
            expect=Expectation(recovery_s=20.0),
        )
    yield Scenario(
        "zombie",
        "a stopped trainer goes on after it was evicted",
        _one(kind="hang", worker=1, step=_STEP, phase="vote", seconds=5.0),
        overrides={"train.max_steps": 120},
        expect=Expectation(recovery_s=20.0),
    )


def _several() -> Iterator[Scenario]:
    def two_stages(shape: Shape) -> list[dict[str, Any]]:
        return [crash(shape.executors[stage][0], phase="backward") for stage in (0, 2)]

    yield Scenario(
        "two-at-once",
        "SIGKILL of two workers of different stages in one step",
        two_stages,
        expect=Expectation(replayed=2, lost=1, fired=2),
    )
    yield Scenario(
        "all-holders",
        "SIGKILL of all holders of one stage in one step (tier 1 or 2)",
        lambda shape: [crash(w, phase="sum") for w in shape.holders[1]],
        expect=Expectation(replayed=3, lost=12, fired=2),
    )
    yield Scenario(
        "everybody",
        "SIGKILL of all trainers in one step (tier 2)",
        lambda shape: [{"kind": "crash", "worker": "all", "step": _STEP, "phase": "vote"}],
        expect=Expectation(ends="either", replayed=4, lost=14, fired=4, recovery_s=60.0),
    )
    yield Scenario(
        "phases",
        "one SIGKILL after the other, each of another worker in another phase",
        lambda shape: [
            crash(index % shape.workers, 6 + 14 * index, phase=phase)
            for index, phase in enumerate(("forward", "receive", "sum", "vote", "apply", "send"))
        ],
        overrides={"train.max_steps": 100},
        expect=Expectation(replayed=8, lost=6, fired=6),
        limit_s=240.0,
    )
    yield Scenario(
        "churn",
        "25 generations: a SIGKILL every few steps, and the worker comes back",
        lambda shape: [
            crash(index % shape.workers, 8 + 16 * index, phase="forward") for index in range(25)
        ],
        overrides={"train.max_steps": 430, "robust.respawns": 100},
        expect=Expectation(replayed=40, lost=25, fired=25),
        limit_s=600.0,
    )


def _soft() -> Iterator[Scenario]:
    for factor in (2, 5):
        yield Scenario(
            f"slow-{factor}x",
            f"a worker is {factor} times slower from some step on: no eviction, less load",
            _one(kind="slow", worker=1, step=5, factor=float(factor)),
            expect=Expectation(replayed=0, evicted=False, says="worker 1 takes"),
        )
    yield Scenario(
        "slow-first-step",
        "a worker takes 8 s for its first action: no eviction",
        _one(kind="hang", how="loop", worker=1, step=0, phase="forward", seconds=8.0),
        expect=Expectation(replayed=0, evicted=False, recovery_s=30.0),
    )
    yield Scenario(
        "net-cut",
        "a worker's connections to the others carry nothing either way",
        _one(kind="network", how="cut", worker=1, step=_STEP, phase="forward"),
        expect=Expectation(replayed=2, lost=1, recovery_s=20.0),
    )
    yield Scenario(
        "net-oneway",
        "what a worker sends to the others is lost",
        _one(kind="network", how="oneway", worker=2, step=_STEP, phase="forward"),
        expect=Expectation(replayed=2, lost=1, recovery_s=20.0),
    )
    yield Scenario(
        "net-delay",
        "what a worker sends is 200 ms late for some seconds: no eviction",
        _one(kind="network", how="delay", worker=1, step=_STEP, seconds=4.0, phase="forward"),
        expect=Expectation(replayed=0, evicted=False),
    )
    yield Scenario(
        "nan-once",
        "a NaN in one gradient that another holder does not see: the worker is faulty",
        _one(kind="numeric", how="nan", worker=1, step=_STEP),
    )
    yield Scenario(
        "nan-always",
        "a NaN in one gradient, whoever computes it: the run stops and says so",
        _one(
            kind="numeric",
            how="nan",
            worker="all",
            step=_STEP,
            until_step=_STEP,
            microbatch=3,
            count=0,
        ),
        overrides={"robust.on_bad_gradient": "stop"},
        expect=Expectation(ends="resumable", lost=_STEP, recovery_s=120.0),
    )
    yield Scenario(
        "bitflip",
        "one inverted bit in a gradient, found by recomputing",
        _one(kind="numeric", how="bitflip", worker=1, step=_STEP),
        overrides={"robust.recompute_check": 1.0},
    )


def _storage() -> Iterator[Scenario]:
    for how, about in (("full", "is full"), ("rename", "fails in a rename")):
        yield Scenario(
            f"disk-{how}",
            f"the disk {about} while a checkpoint is saved: training goes on",
            _one(kind="disk", how=how, worker=0, step=10),
            expect=Expectation(replayed=0, evicted=False),
        )
    yield Scenario(
        "disk-partial",
        "a checkpoint that lost half a file is passed over when all must resume",
        lambda shape: [
            {"kind": "disk", "how": "partial", "worker": 0, "step": 20},
            {"kind": "crash", "worker": "all", "step": 24, "phase": "vote"},
        ],
        expect=Expectation(ends="either", replayed=4, lost=16, fired=5, recovery_s=60.0),
    )


def _job() -> Iterator[Scenario]:
    for how, past in (("kill", "killed"), ("stop", "stopped")):
        fault: dict[str, Any] = {"kind": "store", "how": how, "worker": 0, "step": _STEP}
        if how == "stop":
            # It goes on after the workers have given it up: so torchrun's agent ends too.
            fault["seconds"] = 45.0
        yield Scenario(
            f"store-{how}",
            f"the process that hosts the job's store is {past}: training goes on",
            _one(**fault),
            expect=Expectation(ends="either", lost=14, recovery_s=120.0),
        )
        yield Scenario(
            f"store-{how}-crash",
            f"the store's host is {past}, then a trainer: the run ends so that it can be resumed",
            _all(fault, crash(2, _STEP + 6, phase="forward")),
            expect=Expectation(
                ends="resumable", lost=20, fired=2, recovery_s=120.0, says="the job's store"
            ),
        )
    yield Scenario(
        "agent-kill",
        "torchrun's agent is killed",
        _one(kind="agent", worker=1, step=_STEP),
        expect=Expectation(ends="either", lost=14, recovery_s=120.0),
    )
    yield Scenario(
        "node-kill",
        "all processes of the only node are killed",
        _one(kind="node", worker=1, step=_STEP),
        expect=Expectation(ends="resumable", lost=14, recovery_s=120.0, scratch=True),
    )
    yield Scenario(
        "preempt-one",
        "SIGTERM for one worker: it leaves at a step boundary",
        _one(kind="preempt", worker=1, step=_STEP),
        expect=Expectation(ends="either", replayed=0, evicted=False, recovery_s=60.0),
    )
    yield Scenario(
        "preempt-all",
        "SIGTERM for the whole job: it saves at a step boundary and leaves",
        _one(kind="preempt", how="node", worker=1, step=_STEP),
        expect=Expectation(ends="resumable", replayed=0, evicted=False, recovery_s=60.0),
    )


def _hosts() -> Iterator[Scenario]:
    for hosts, workers in ((2, 4), (3, 6)):
        last = hosts - 1
        common: dict[str, Any] = {
            "hosts": hosts,
            "workers": workers,
            "limit_s": 240.0,
        }
        slow = Expectation(replayed=2, lost=1, recovery_s=30.0, fired=0, scratch=True)
        yield Scenario(
            f"hosts{hosts}-killed",
            f"one of {hosts} hosts is killed",
            acts=(Act("kill", last, _STEP),),
            expect=slow,
            **common,
        )
        yield Scenario(
            f"hosts{hosts}-cut",
            f"one of {hosts} hosts is cut off: it must never commit",
            acts=(Act("cut", last, _STEP),),
            expect=slow,
            **common,
        )
        yield Scenario(
            f"hosts{hosts}-oneway",
            f"what one of {hosts} hosts sends is lost, what it is sent arrives",
            acts=(Act("mute", last, _STEP),),
            expect=slow,
            **common,
        )
        yield Scenario(
            f"hosts{hosts}-delay",
            f"the network to one of {hosts} hosts is 200 ms late: no eviction",
            acts=(Act("delay", last, _STEP), Act("heal", last, _STEP + 8)),
            expect=Expectation(replayed=0, evicted=False, recovery_s=30.0, fired=0),
            **common,
        )
        yield Scenario(
            f"hosts{hosts}-frozen",
            f"one of {hosts} hosts stands still, and goes on after it was evicted",
            acts=(Act("stop", last, _STEP), Act("cont", last, _STEP + 10)),
            expect=slow,
            **common,
        )
    yield Scenario(
        "hosts3-cut-store",
        "the host of the store is cut off: who cannot reach it must not commit",
        acts=(Act("cut", 0, _STEP),),
        hosts=3,
        workers=6,
        expect=Expectation(
            ends="either", replayed=4, lost=20, fired=0, recovery_s=120.0, scratch=True
        ),
        limit_s=240.0,
    )
    yield from _newcomers()


def _newcomers() -> Iterator[Scenario]:
    yield Scenario(
        "join",
        "two workers join a job that runs",
        acts=(Act("join", 0, _STEP),),
        overrides=_LONG,
        expect=Expectation(replayed=0, evicted=False, fired=0, workers=6),
    )
    yield Scenario(
        "host-joins",
        "a third host joins a job of two",
        acts=(Act("join", 2, _STEP),),
        hosts=2,
        spare_hosts=1,
        overrides=_LONG,
        expect=Expectation(replayed=0, evicted=False, fired=0, workers=6),
        limit_s=300.0,
    )
    yield Scenario(
        "host-returns",
        "one of two hosts is killed, and comes back",
        acts=(Act("kill", 1, _STEP), Act("join", 1, _STEP + 10)),
        hosts=2,
        overrides=_LONG,
        expect=Expectation(replayed=2, lost=1, recovery_s=30.0, fired=0, workers=4, scratch=True),
        limit_s=300.0,
    )
    yield Scenario(
        "torchrun-joins",
        "torchrun restarts all workers when a third host's agent joins: nothing is replayed",
        acts=(Act("start", 2, _STEP),),
        hosts=2,
        spare_hosts=1,
        elastic=True,
        overrides=_LONG,
        expect=Expectation(replayed=0, evicted=False, fired=0, workers=6),
        limit_s=300.0,
    )
