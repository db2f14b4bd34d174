"""Transcripts of the scenarios that matter, for a person to review.

Each line: time in seconds, worker and life, and ``<-`` what its machine was told by other than the
log, ``->`` what the machine instructed (announcements, proposals and answers go into the log, which
all read), ``**`` what happened to it, ``==`` what the cluster came to. In an announcement ``+``
means a pending step and ``!`` that its full vote was seen. ``DTRAIN_REWRITE_GOLDEN=1`` writes the
files anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sim_world import World, describe

from dtrain.scheduler import events as core

GOLDEN = Path(__file__).parent / "golden"
Scenario = Callable[[World], None]


def settle(world: World) -> None:
    assert world.run(60.0, world.settled), world.story()


def running(world: World) -> None:
    world.start(0, 1, 2, 3)
    settle(world)


def first_start(world: World) -> None:
    world.start(0, 1)
    world.run(0.1)
    world.start(2)
    world.run(0.3)
    world.start(3)
    settle(world)


def worker_crashes(world: World) -> None:
    running(world)
    world.respawns = False
    world.crash(2)
    settle(world)


def leader_crashes(world: World) -> None:
    running(world)
    world.respawns = False
    world.crash(0)
    settle(world)


def leader_crashes_with_its_proposal(world: World) -> None:
    running(world)
    world.respawns = False
    world.crash_on.append((0, "Propose", 2))
    world.crash(3)
    settle(world)


def crash_between_answers_and_enter(world: World) -> None:
    running(world)
    world.respawns = False
    world.crash_on.append((2, "Answer", 2))
    world.crash(3)
    settle(world)


def two_at_once(world: World) -> None:
    running(world)
    world.respawns = False
    world.crash(1, 3)
    settle(world)


def all_holders_of_a_stage(world: World) -> None:
    running(world)
    world.run(0.8)
    world.respawns = False
    world.crash(2, 3)
    settle(world)


def rejoin(world: World) -> None:
    running(world)
    world.crash(1)
    settle(world)


def voted_step_is_applied(world: World) -> None:
    """The crash comes when only one worker has seen the full vote."""
    world.start(0, 1, 2, 3)
    world.respawns = False
    world.run(10.0, lambda: len(world.commits.get(1, [])) == 2)
    world.crash(3)
    settle(world)


def hang_and_zombie(world: World) -> None:
    running(world)
    hung = world.current[1]
    world.stop(1)
    world.run(1.0, lambda: False)
    settled = world.run(30.0, lambda: any(n >= 2 and len(c) >= 2 for n, c in world.commits.items()))
    assert settled
    world.wake(hung)
    settle(world)


def split_of_two_and_two(world: World) -> None:
    running(world)
    world.cut([0, 1], [2, 3], log_with=1)
    world.run(8.0)
    world.heal()
    settle(world)


def split_of_three_and_one(world: World) -> None:
    running(world)
    world.cut([0], [1, 2, 3], log_with=0)
    world.run(0.5)
    world.cut([0], [1, 2, 3], log_with=1)
    world.run(4.0)
    world.heal()
    settle(world)


def one_way_silence(world: World) -> None:
    """Both reach the log, and nothing from the leader reaches worker 2."""
    running(world)
    world.silence(0, 2)
    world.run(3.0)
    world.heal()
    settle(world)


def whole_restart_over_a_stale_log(world: World) -> None:
    running(world)
    world.run(0.9)
    world.restart_all()
    settle(world)


def worker_leaves(world: World) -> None:
    running(world)
    world.leave(1)
    world.run(5.0, lambda: 1 in world.gone_for_good)
    settle(world)


def newcomer_while_a_fault_is_handled(world: World) -> None:
    running(world)
    world.respawns = False
    world.crash(3)
    world.run(0.012)
    world.start(4)
    settle(world)


def newcomer_that_cannot_reach_the_members(world: World) -> None:
    """It reaches the log alone: the leader vouches for the generation, the newcomer withdraws."""
    running(world)
    world.deaf = {(a, 4) for a in range(4)} | {(4, a) for a in range(4)}
    world.compute_s = 3.0
    world.run(1.0)
    world.start(4)
    world.run(4.0)
    world.heal()
    settle(world)


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        first_start,
        worker_crashes,
        leader_crashes,
        leader_crashes_with_its_proposal,
        crash_between_answers_and_enter,
        two_at_once,
        all_holders_of_a_stage,
        rejoin,
        voted_step_is_applied,
        hang_and_zombie,
        split_of_two_and_two,
        split_of_three_and_one,
        one_way_silence,
        whole_restart_over_a_stale_log,
        worker_leaves,
        newcomer_while_a_fault_is_handled,
        newcomer_that_cannot_reach_the_members,
    )
}


def transcript(name: str) -> str:
    world = World(jitter=False)
    SCENARIOS[name](world)
    doc = (SCENARIOS[name].__doc__ or name.replace("_", " ")).strip()
    lines = [f"# {doc}"]
    for time, who, arrow, what in world.lines:
        if arrow != "<-" or isinstance(what, core.Lost | core.Regroup):
            lines.append(f"{time:7.3f} {who:>3} {arrow} {describe(what)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_transcript_is_the_reviewed_one(name: str) -> None:
    path = GOLDEN / f"{name}.txt"
    said = transcript(name)
    if os.environ.get("DTRAIN_REWRITE_GOLDEN"):
        path.write_text(said)
    assert said == path.read_text()


def test_no_transcript_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SCENARIOS)
