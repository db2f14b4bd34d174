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

from dtrain.scheduler import events as core
from dtrain.scheduler.chance import Chance
from dtrain.scheduler.simulator.story import describe
from dtrain.scheduler.simulator.world import World

GOLDEN = Path(__file__).parent / "golden"
Scenario = Callable[[World], None]


def settle(world: World) -> None:
    """Wait until all that live commit steps in a newer generation than there is now."""
    before = len(world.standing)
    newer = world.run(60.0, lambda: len(world.standing) > before and world.settled())
    assert newer, world.story()


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
    running(world)
    world.respawns = False
    assert world.run(1.0, lambda: any(life.memory.voted for life in world.living))
    # The seed decides who does not see the end of the vote any more.
    world.chance = Chance(1)
    world.crash(3)
    settle(world)


def hang_and_zombie(world: World) -> None:
    running(world)
    hung = world.current[1]
    world.respawns = False
    world.stop(1)
    assert world.run(30.0, lambda: len(world.commits.get(2, [])) == 2)
    world.wake(hung)
    world.run(0.1)
    assert world.settled()


def split_of_two_and_two(world: World) -> None:
    """Only one side reaches the log; it goes on after a while, and the other ends."""
    running(world)
    world.respawns = False
    world.cut([0, 1], [2, 3], log_with=1)
    settle(world)


def split_of_two_and_two_that_reach_the_log(world: World) -> None:
    """Both sides announce themselves, so that all know who cannot reach whom."""
    running(world)
    world.respawns = False
    world.keep_apart([0, 1], [2, 3])
    settle(world)


def split_of_three_and_one(world: World) -> None:
    """The leader's side is the smaller one and has the log: it waits, but nobody else can go on."""
    running(world)
    world.respawns = False
    world.cut([0], [1, 2, 3], log_with=0)
    settle(world)


def split_of_three_and_one_that_reach_the_log(world: World) -> None:
    running(world)
    world.respawns = False
    world.keep_apart([0], [1, 2, 3])
    settle(world)


def one_way_silence(world: World) -> None:
    """Both reach the log, and nothing from the leader reaches worker 2."""
    running(world)
    world.respawns = False
    world.silence(0, 2)
    settle(world)


def whole_restart_over_a_stale_log(world: World) -> None:
    running(world)
    world.run(0.9)
    world.restart_all()
    settle(world)


def worker_leaves(world: World) -> None:
    running(world)
    world.leave(1)
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
    world.keep_apart([4], range(4))
    world.compute_time = lambda course: 5.0
    world.run(1.0)
    world.respawns = False
    world.start(4)
    world.run(2.0, lambda: not world.current[4].alive)
    assert world.settled()


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
        split_of_two_and_two_that_reach_the_log,
        split_of_three_and_one,
        split_of_three_and_one_that_reach_the_log,
        one_way_silence,
        whole_restart_over_a_stale_log,
        worker_leaves,
        newcomer_while_a_fault_is_handled,
        newcomer_that_cannot_reach_the_members,
    )
}


def transcript(name: str) -> str:
    world = World.small(jitter=False)
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
