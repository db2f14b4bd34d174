"""Settling an interrupted step: which step, from whom, who applies, what moves."""

from __future__ import annotations

from dtrain.scheduler import Layout, even_cuts, make_plan
from dtrain.scheduler.events import Announcement, Peer
from dtrain.scheduler.recovery import (
    Settlement,
    Transfer,
    base_generation,
    kept,
    settle,
    transfers,
)


def at(
    worker: int,
    committed: int,
    stages: tuple[int, ...] = (),
    *,
    since: int = 1,
    pending: bool = False,
    voted: bool = False,
    snapshots: tuple[tuple[int, int], ...] = (),
) -> Announcement:
    return Announcement(
        Peer(worker, "a"),
        since=since,
        committed=committed,
        pending=pending,
        voted=voted,
        stages=stages,
        snapshots=snapshots,
    )


def test_newcomers_alone_start_from_the_checkpoint() -> None:
    settled = settle([at(0, 0, since=0), at(1, 0, since=0)], 1, sharded=False)
    assert (settled.tier, settled.step, settled.replayed) == (2, None, False)


def test_a_step_that_nobody_saw_the_vote_of_is_replayed() -> None:
    settled = settle([at(0, 7, (0,), pending=True), at(1, 7, (1,), pending=True)], 2, sharded=False)
    assert (settled.tier, settled.step, settled.apply) == (0, 7, ())
    assert settled.replayed
    assert settled.sources == (0, 1)


def test_a_step_that_one_saw_the_vote_of_is_applied_by_all() -> None:
    members = [at(0, 7, (0,), pending=True), at(1, 7, (1,), pending=True, voted=True)]
    settled = settle(members, 2, sharded=False)
    assert (settled.step, settled.apply, settled.witnesses) == (8, (0, 1), (1,))
    assert not settled.replayed
    # One that has applied it already knows the vote as well.
    settled = settle([at(0, 7, (0,), pending=True), at(1, 8, (1,))], 2, sharded=False)
    assert (settled.step, settled.apply, settled.witnesses) == (8, (0,), (1,))


def test_a_worker_without_a_stage_is_a_witness_too() -> None:
    members = [at(0, 7, (0,), pending=True), at(1, 7, pending=True, voted=True)]
    settled = settle(members, 1, sharded=False)
    assert (settled.step, settled.apply, settled.witnesses) == (8, (0, 1), (1,))


def test_who_cannot_reach_the_voted_step_gets_its_state_from_who_can() -> None:
    members = [at(0, 7, (0,)), at(1, 8, (0, 1))]
    settled = settle(members, 2, sharded=False)
    assert (settled.step, settled.sources, settled.apply) == (8, (1, 1), ())
    plan = make_plan(Layout(even_cuts(2, 2), 2), [0, 1], 2)
    assert transfers(plan, settled, members) == (Transfer(0, 1, 0), Transfer(1, 1, 0))


def test_a_stage_that_no_holder_is_left_of_comes_from_peer_memory() -> None:
    taken = ((6, 0), (6, 1), (9, 0), (9, 1))
    members = [at(0, 11, (0,), snapshots=taken), at(1, 11, (0,))]
    settled = settle(members, 2, sharded=False)
    assert (settled.tier, settled.step, settled.sources) == (1, 9, (0, 0))
    assert settled.replayed
    assert "stages [1]" in settled.reason
    assert kept(members[0], 0, settled) == "snapshot"
    assert kept(members[1], 0, settled) is None


def test_holders_and_snapshots_of_the_same_step_serve_together() -> None:
    members = [at(0, 9, (0,)), at(1, 9, (0,), snapshots=((9, 1),))]
    settled = settle(members, 2, sharded=False)
    assert (settled.tier, settled.step, settled.sources, settled.replayed) == (1, 9, (0, 1), False)
    assert kept(members[0], 0, settled) == "held"
    assert kept(members[1], 1, settled) == "snapshot"


def test_nobody_applies_what_nobody_is_left_to_tell_the_vote_of() -> None:
    """The snapshot is of the step after the pending one, whose vote all that remain have missed."""
    members = [
        at(0, 8, (0,), pending=True),
        at(1, 11, snapshots=((9, 1),)),
        at(2, 8, (0, 1)),
    ]
    settled = settle(members, 2, sharded=False)
    assert (settled.tier, settled.step, settled.apply) == (0, 8, ())


def test_states_of_different_steps_do_not_mix() -> None:
    members = [at(0, 9, (0,)), at(1, 7, (1,), snapshots=((6, 0),))]
    assert settle(members, 2, sharded=False).tier == 2
    members = [at(0, 9, (0,), snapshots=((7, 0),)), at(1, 7, (1,))]
    settled = settle(members, 2, sharded=False)
    assert (settled.tier, settled.step, settled.sources) == (1, 7, (0, 1))


def test_sharded_state_comes_from_snapshots_only() -> None:
    members = [at(0, 9, (0,), snapshots=((6, 0),)), at(1, 9, (0,))]
    settled = settle(members, 1, sharded=True)
    assert (settled.tier, settled.step, settled.apply) == (1, 6, ())
    assert settle([at(0, 9, (0,)), at(1, 9, (0,))], 1, sharded=True).tier == 2


def test_nothing_moves_to_who_has_it_and_newcomers_get_all_they_hold() -> None:
    members = [at(0, 5, (0,)), at(1, 5, (1,)), at(2, 0, (0,), since=0)]
    settled = settle(members, 2, sharded=False)
    plan = make_plan(Layout(even_cuts(2, 2), 4, redundancy=1), [0, 1, 2], 2)
    assert plan.holders == ((0, 1), (2,))
    assert transfers(plan, settled, members) == (Transfer(0, 0, 1), Transfer(1, 1, 2))
    assert transfers(plan, Settlement(2, None, (), (), False, ""), members) == ()


def test_the_plan_of_the_newest_generation_that_anybody_entered_is_the_base() -> None:
    assert base_generation([at(0, 0, since=0)]) is None
    assert base_generation([at(3, 0, since=4), at(1, 0, since=5), at(2, 0, since=5)]) == (5, 1)


def test_a_newcomer_is_served_from_its_own_node_and_senders_take_turns() -> None:
    members = [at(w, 5, (0,)) for w in range(4)] + [at(w, 0, since=0) for w in range(4, 8)]
    settled = settle(members, 1, sharded=False)
    plan = make_plan(Layout((0, 2), 8), range(8), 2)
    assert plan.holders == (tuple(range(8)),)
    node = {w: ("rack", "b" if w in (2, 3, 4, 5) else "a") for w in range(8)}
    found = transfers(plan, settled, members, node)
    assert [(m.source, m.target) for m in found] == [(2, 4), (3, 5), (0, 6), (1, 7)]
    assert [m.source for m in transfers(plan, settled, members)] == [0, 1, 2, 3]
