"""One worker's machine, told what others did: each rule by itself."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from dtrain.scheduler.events import (
    Announce,
    Announced,
    Announcement,
    Answer,
    Answered,
    Enter,
    Instruction,
    Interrupt,
    Lost,
    MembershipPolicy,
    Peer,
    Proposal,
    Propose,
    Proposed,
    Regroup,
    Tick,
    Withdraw,
)
from dtrain.scheduler.membership import ImpossibleTransitionError, Membership

POLICY = MembershipPolicy(world_size=3, min_workers=1, gather_s=30.0, split_s=3.0)


def peer(worker: int, life: str = "a") -> Peer:
    return Peer(worker, life)


def said(worker: int, life: str = "a", **fields: object) -> Announcement:
    return replace(Announcement(peer(worker, life), round=1), **fields)  # type: ignore[arg-type]


def machine(worker: int, policy: MembershipPolicy = POLICY) -> Membership:
    return Membership(Announcement(peer(worker)), policy)


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(i).__name__ for i in instructions]


def member(worker: int, *others: int, number: int = 1) -> Membership:
    """The machine of a worker that is in generation ``number`` with ``others`` at time 1."""
    me = machine(worker)
    me.step(0.0, Regroup(me.me, "started"))
    members = tuple(said(w) for w in sorted((worker, *others)))
    echo = Announced(said(worker))
    me.step(0.5, echo, *(Announced(a) for a in members), Proposed(Proposal(number, members, "")))
    out = me.step(1.0, *(Answered(number, peer(w)) for w in others))
    assert kinds(out) == ["Enter"]
    return me


def regrouping(worker: int, *others: int, lost: tuple[Lost, ...] = ()) -> Membership:
    """The same, just after it has left generation 1 at time 2, having lost somebody."""
    me = member(worker, *others)
    me.step(2.0, *lost)
    me.step(2.0, Regroup(replace(me.me, committed=4, stages=(0,)), "a fault"))
    return me


def ended(worker: int) -> Lost:
    return Lost(peer(worker), "has ended", True)


def silent(worker: int) -> Lost:
    return Lost(peer(worker), "is silent", False)


def back(worker: int, **fields: object) -> Announced:
    """A member of generation 1 announces itself after it."""
    return Announced(said(worker, **{"round": 2, "since": 1, "seen": 1, "stages": (0,)} | fields))


def proposed(instructions: list[Instruction]) -> tuple[int, ...] | None:
    found = [i.proposal.workers() for i in instructions if isinstance(i, Propose)]
    assert len(found) <= 1
    return found[0] if found else None


def test_messages_survive_json() -> None:
    a = said(1, stages=(0, 2), snapshots=((3, 0), (3, 2)), unreachable=(peer(2, "b"),), voted=True)
    proposal = Proposal(4, (a, said(2)), "because")
    assert Announcement.from_json(json.loads(json.dumps(asdict(a)))) == a
    assert Proposal.from_json(json.loads(json.dumps(asdict(proposal)))) == proposal


def test_the_lowest_worker_proposes_once_all_are_there_and_only_once() -> None:
    me = machine(0)
    assert kinds(me.step(0.0, Regroup(me.me, "started"))) == ["Announce"]
    assert me.step(1.0, Announced(said(1))) == []
    assert proposed(me.step(2.0, Announced(said(2)))) == (0, 1, 2)
    assert me.step(3.0, Tick()) == []


def test_too_few_newcomers_start_when_they_have_waited() -> None:
    me = machine(0)
    me.step(0.0, Regroup(me.me, "started"), Announced(said(1)))
    assert me.step(29.9, Tick()) == []
    assert proposed(me.step(30.0, Tick())) == (0, 1)


def test_a_member_that_is_merely_slow_is_waited_for() -> None:
    me = regrouping(0, 1, 2)
    assert proposed(me.step(2.1, back(1))) is None
    assert proposed(me.step(500.0, Tick())) is None
    assert proposed(me.step(501.0, back(2))) == (0, 1, 2)


def test_an_announcement_from_before_the_newest_proposal_does_not_count() -> None:
    me = regrouping(0, 1, 2)
    assert proposed(me.step(2.1, back(1), Announced(said(2, round=2, seen=0)))) is None


def test_survivors_go_on_at_once_without_a_minority_that_ended_or_is_silent() -> None:
    assert proposed(regrouping(0, 1, 2, lost=(ended(2),)).step(2.1, back(1))) == (0, 1)
    assert proposed(regrouping(0, 1, 2, lost=(silent(2),)).step(2.1, back(1))) == (0, 1)


def test_the_smaller_side_of_a_split_waits_for_the_larger() -> None:
    me = regrouping(0, 1, 2, lost=(silent(1), silent(2)))
    assert proposed(me.step(4.9, Tick())) is None
    assert proposed(me.step(5.0, Tick())) == (0,)
    # Those that ended are no side.
    me = regrouping(0, 1, 2, lost=(silent(1), ended(2)))
    assert proposed(me.step(4.9, Tick())) is None
    me = regrouping(0, 1, 2, lost=(ended(1), ended(2)))
    assert me.state == "gathering"
    assert me.proposed == 2


def test_the_wait_of_the_smaller_side_begins_with_the_newest_loss() -> None:
    me = regrouping(0, 1, 2)
    me.step(20.0, silent(1), silent(2))
    assert proposed(me.step(22.9, Tick())) is None
    assert proposed(me.step(23.0, Tick())) == (0,)


def test_whoever_cannot_reach_most_is_left_out_even_if_it_is_the_lowest() -> None:
    me = regrouping(1, 0, 2, 3)
    assert me.step(2.1, back(0), back(2, unreachable=(peer(0),))) == []
    assert proposed(me.step(2.2, back(3, unreachable=(peer(0),)))) == (1, 2, 3)


def test_of_two_who_cannot_reach_each_other_the_higher_gives_way() -> None:
    me = regrouping(0, 1, 2)
    assert proposed(me.step(2.1, back(1, unreachable=(peer(2),)), back(2))) == (0, 1)


def test_a_lost_worker_that_announced_itself_afterwards_is_silent_again_after_a_while() -> None:
    me = regrouping(1, 0, 2, lost=(silent(0),))
    me.step(2.1, back(2), back(0))
    # For the others worker 0 is there and the lower of the two; it does not propose, however.
    assert proposed(me.step(5.0, Tick())) is None
    assert proposed(me.step(5.2, Tick())) == (1, 2)


def test_a_loss_is_told_to_the_others_while_they_gather() -> None:
    me = regrouping(1, 0, 2)
    out = me.step(2.5, silent(2))
    assert [type(i) for i in out] == [Announce]
    assert isinstance(out[0], Announce)
    assert out[0].announcement.unreachable == (peer(2),)
    assert me.step(2.6, silent(2)) == []


def test_a_proposal_with_a_lost_member_is_not_answered() -> None:
    me = regrouping(1, 0, 2, lost=(ended(2),))
    members = (said(0, seen=1), me.me, said(2, seen=1))
    out = me.step(3.0, Proposed(Proposal(2, members, "")))
    assert kinds(out) == ["Announce"]
    assert me.me.seen == 2


def test_a_loss_or_a_retreat_before_all_have_answered_starts_again() -> None:
    for event in (ended(2), back(2, seen=2)):
        me = regrouping(1, 0, 2)
        members = (said(0, seen=1), me.me, said(2, seen=1))
        assert kinds(me.step(3.0, Proposed(Proposal(2, members, "")))) == ["Answer"]
        assert kinds(me.step(3.1, event)) == ["Announce"]
        assert me.step(3.2, Answered(2, peer(0)), Answered(2, peer(2))) == []


def test_nobody_enters_before_all_have_answered_nor_on_answers_to_another_number() -> None:
    me = regrouping(1, 0, 2)
    members = (said(0, seen=1), me.me, said(2, seen=1))
    me.step(3.0, Answered(1, peer(0)), Answered(1, peer(2)), Proposed(Proposal(2, members, "")))
    assert me.step(3.1, Answered(1, peer(2)), Answered(2, peer(0))) == []
    out = me.step(3.2, Answered(2, peer(2)))
    assert kinds(out) == ["Enter"]
    assert isinstance(out[0], Enter)
    assert out[0].proposal.number == 2


def test_the_first_proposal_of_a_number_stands() -> None:
    me = regrouping(1, 0, 2)
    first = Proposal(2, (said(0, seen=1), me.me), "first")
    second = Proposal(2, (said(0, seen=1), said(2, seen=1)), "second")
    assert kinds(me.step(3.0, Proposed(first), Proposed(second))) == ["Answer"]
    assert me.newest == first


def test_a_member_is_interrupted_once_when_its_generation_breaks() -> None:
    for event in (ended(2), silent(2), back(2), Announced(said(2, "b"))):
        me = member(0, 1, 2)
        out = me.step(2.0, event)
        assert kinds(out)[:1] == ["Interrupt"]
        assert isinstance(out[0], Interrupt)
        assert not [i for i in me.step(2.1, ended(1)) if isinstance(i, Interrupt)]


def test_who_is_left_out_withdraws_and_does_nothing_more() -> None:
    me = regrouping(1, 0, 2)
    out = me.step(3.0, Proposed(Proposal(2, (said(0, seen=1), said(2, seen=1)), "")))
    assert kinds(out) == ["Withdraw"]
    assert me.step(4.0, Regroup(me.me, "again"), ended(0), Tick()) == []
    # Also out of the generation, and when it slept through several.
    me = member(1, 0, 2)
    proposals = [Proposal(n, (said(0, seen=n - 1), said(2, seen=n - 1)), "") for n in (2, 3)]
    assert kinds(me.step(3.0, *map(Proposed, proposals))) == ["Withdraw"]


def test_a_worker_that_was_started_again_withdraws() -> None:
    me = member(1, 0, 2)
    out = me.step(2.0, Announced(said(1, "b")))
    assert isinstance(out[0], Withdraw)
    assert "started again" in out[0].reason


def test_what_an_older_life_left_in_the_log_is_of_no_account() -> None:
    me = machine(1)
    old = Proposal(1, (said(0), said(1, "z")), "")
    me.step(0.0, Announced(said(1, "z")), Announced(said(0)), Proposed(old))
    out = me.step(0.1, Regroup(me.me, "started"), Announced(said(1, "z", round=2, seen=1)))
    assert kinds(out) == ["Announce"]
    assert me.lost[peer(1, "z")].certain
    me.step(0.2, Announced(me.me), Announced(said(1, "z", round=3, seen=1)))
    assert me.state == "gathering"


def test_a_new_life_ends_the_old_one_and_is_let_in() -> None:
    me = regrouping(0, 1, 2)
    me.step(2.1, back(1))
    assert proposed(me.step(2.2, Announced(said(2, "b")))) == (0, 1, 2)
    # Entries of the old life that are told again change nothing.
    me.step(2.3, back(2))
    assert me.known[2].peer == peer(2, "b")


def test_newcomers_do_not_take_over_while_a_member_may_live() -> None:
    me = machine(5)
    me.step(0.0, Announced(said(0)), Announced(said(1)))
    me.step(0.0, Proposed(Proposal(1, (said(0), said(1)), "")), Regroup(me.me, "started"))
    newcomers = [Announced(said(w)) for w in (6, 7)]
    assert proposed(me.step(0.1, *newcomers)) is None
    me.step(1.0, silent(0), silent(1))
    assert proposed(me.step(30.9, Tick())) is None
    assert proposed(me.step(31.0, Tick())) == (5, 6, 7)


def test_newcomers_take_over_soon_when_a_member_ended_and_at_once_from_older_lives() -> None:
    me = machine(0)
    members = (said(0, "z"), said(1, "z"), said(2, "z"))
    me.step(0.0, *map(Announced, members), Proposed(Proposal(1, members, "")))
    me.step(0.0, Regroup(me.me, "started"), Announced(said(1)), Announced(said(3)))
    assert proposed(me.step(0.1, Lost(peer(2, "z"), "is silent", False))) is None
    assert proposed(me.step(3.1, Tick())) == (0, 1, 3)
    me = machine(0)
    me.step(0.0, *map(Announced, members), Proposed(Proposal(1, members, "")))
    out = me.step(0.0, Regroup(me.me, "started"), Announced(said(1)), Announced(said(2)))
    assert proposed(out) == (0, 1, 2)


def test_the_leader_vouches_for_its_generation_and_no_other_member_does() -> None:
    out = member(0, 1).step(2.0, Announced(said(5)))
    assert [type(i) for i in out] == [Answer]
    assert member(1, 0).step(2.0, Announced(said(5))) == []


def test_a_newcomer_that_lost_a_living_member_makes_room_for_a_new_life() -> None:
    me = machine(5)
    me.step(0.0, Announced(said(0)), Proposed(Proposal(1, (said(0),), "")))
    me.step(0.0, Regroup(me.me, "started"), ended(0))
    assert me.step(0.1, Answered(1, peer(0))) == []
    me.step(0.2, Announced(me.me))
    assert kinds(me.step(0.3, Answered(1, peer(0)))) == ["Withdraw"]


def test_a_newcomer_that_is_never_let_in_makes_room_for_a_new_life() -> None:
    me = machine(5)
    me.step(0.0, Announced(said(0)), Proposed(Proposal(1, (said(0),), "")))
    me.step(0.0, Regroup(me.me, "started"))
    assert me.step(29.0, Tick()) == []
    assert kinds(me.step(30.0, Tick())) == ["Withdraw"]


def test_a_newcomer_that_a_member_cannot_reach_is_passed_over_for_good() -> None:
    accusing = said(0, round=2, since=1, seen=1, unreachable=(peer(5),))
    second = Proposal(2, (accusing, said(1, round=2, since=1, seen=1)), "")
    newcomer = machine(5)
    newcomer.step(0.0, Announced(said(0)), Announced(said(1)))
    newcomer.step(0.0, Proposed(Proposal(1, (said(0), said(1)), "")))
    newcomer.step(0.0, Regroup(newcomer.me, "started"))
    assert kinds(newcomer.step(1.0, Proposed(second))) == ["Withdraw"]
    other = regrouping(1, 0)
    other.step(2.1, Announced(said(5)), Announced(accusing), Proposed(second))
    assert other.state == "answering"
    other.step(2.2, Answered(2, peer(0)))
    assert other.joiners() == ()


def test_newcomers_give_way_to_members_whatever_their_numbers() -> None:
    me = member(2, 1)
    me.step(1.5, Announced(said(0)))
    me.step(2.0, Lost(peer(1), "has ended", True), Regroup(replace(me.me, stages=(0,)), "a fault"))
    assert me.proposed == 2
    me = member(2, 1)
    me.step(1.5, Announced(said(0, unreachable=(peer(1), peer(2)))))
    me.step(2.0, Regroup(replace(me.me, stages=(0,)), "a fault"))
    assert me.step(2.1, back(1)) == []
    # Worker 1 leads, not 0; without 1 the newcomer is not taken either.
    assert proposed(me.step(2.2, ended(1))) == (2,)


def test_a_life_that_was_evicted_before_it_entered_does_not_count() -> None:
    me = regrouping(0, 1)
    me.step(2.1, Announced(said(5)), back(1))
    everybody = (me.me, said(1, round=2, since=1, seen=1), said(5))
    me.step(2.2, Proposed(Proposal(2, everybody, "")))
    me.step(2.3, back(1, seen=2), Announced(said(5, round=2, seen=2)))
    without = (me.me, said(1, round=3, since=1, seen=2))
    assert kinds(me.step(2.4, Proposed(Proposal(3, without, "")))) == ["Answer"]
    me.step(2.5, Announced(said(1, round=4, since=1, seen=3)))
    assert me.proposed == 4
    assert me.state == "gathering"
    assert {a.peer for a in me._present()} == {peer(0), peer(1)}


def test_members_ask_to_regroup_for_newcomers_who_are_not_lost() -> None:
    me = member(0, 1)
    me.step(2.0, Announced(said(5)))
    assert me.joiners() == (peer(5),)
    me.step(2.1, Lost(peer(5), "has ended", True))
    assert me.joiners() == ()


def test_a_worker_that_leaves_is_not_waited_for_and_is_told_when_it_may_go() -> None:
    me = regrouping(0, 1, 2)
    assert proposed(me.step(2.1, back(1, leaving=True), back(2))) == (0, 2)
    leaver = member(1, 0)
    leaver.step(2.0, Regroup(replace(leaver.me, leaving=True), "told to leave"))
    out = leaver.step(2.1, Proposed(Proposal(2, (said(0, seen=1),), "")))
    assert isinstance(out[0], Withdraw)
    assert "as it asked" in out[0].reason


def test_when_all_leave_nobody_waits() -> None:
    leaver = member(1, 0)
    leaver.step(2.0, Regroup(replace(leaver.me, leaving=True), "told to leave"))
    out = leaver.step(2.1, back(0, leaving=True))
    assert isinstance(out[0], Withdraw)
    assert "nobody stays" in out[0].reason


def test_fewer_than_min_workers_wait_for_more() -> None:
    me = machine(0, replace(POLICY, min_workers=2))
    me.step(0.0, Regroup(me.me, "started"))
    assert proposed(me.step(100.0, Tick())) is None
    assert proposed(me.step(101.0, Announced(said(1)))) == (0, 1)


def test_of_two_at_odds_who_are_both_needed_the_higher_makes_room_for_a_new_life() -> None:
    policy = replace(POLICY, min_workers=2)
    for worker, other, expected in ((1, 0, ["Withdraw"]), (0, 1, [])):
        me = member(worker, other)
        me.policy = policy
        me.step(2.0, silent(other))
        me.step(2.0, Regroup(me.me, "a fault"), back(other, unreachable=(peer(worker),)))
        assert me.step(4.9, Tick()) == []
        assert kinds(me.step(6.0, Tick())) == expected


def test_two_at_odds_agree_on_who_gives_way_though_only_one_has_entered() -> None:
    """Generation 2 let worker 0 in, and broke before anybody brought it the state."""
    both_needed = replace(POLICY, min_workers=2)
    veteran = said(1, round=2, since=1, seen=1, stages=(0,))
    proposal = Proposal(2, (said(0, "b"), veteran), "")
    at_odds = (
        Announced(said(0, "b", round=2, since=2, seen=2, unreachable=(peer(1),))),
        Announced(said(1, round=3, since=1, seen=2, stages=(0,), unreachable=(peer(0, "b"),))),
    )
    entered = Membership(Announcement(peer(0, "b")), both_needed)
    entered.step(0.0, Regroup(entered.me, "started"), Announced(entered.me))
    entered.step(1.0, Proposed(proposal), Answered(2, peer(1)))
    assert entered.state == "member"
    entered.step(2.0, Lost(peer(1), "is silent", False))
    entered.step(2.0, Regroup(entered.me, "a fault"))
    not_entered = member(1, 0)
    not_entered.step(1.0, Lost(peer(0), "has ended", True))
    not_entered.step(1.0, Regroup(replace(veteran, round=0), "a fault"), Announced(said(0, "b")))
    not_entered.step(1.0, Proposed(proposal))
    not_entered.step(2.0, Lost(peer(0, "b"), "is silent", False))
    out = [kinds(m.step(60.0, *at_odds, Tick())) for m in (entered, not_entered)]
    assert out[0][-1:] == ["Withdraw"]
    assert "Withdraw" not in out[1]


def test_a_newcomer_without_state_does_not_evict_members_who_have_it() -> None:
    """Named together with two members, and cut off from them before it entered."""
    me = machine(0)
    first = Proposal(1, (said(1), said(2)), "")
    me.step(0.0, Announced(said(1)), Announced(said(2)), Proposed(first))
    me.step(0.0, Regroup(me.me, "started"))
    members = (me.me, *(said(w, round=2, since=1, seen=1, stages=(0,)) for w in (1, 2)))
    assert kinds(me.step(1.0, Proposed(Proposal(2, members, "")))) == ["Answer"]
    me.step(2.0, silent(1), silent(2))
    assert proposed(me.step(31.9, Tick())) is None
    assert proposed(me.step(32.0, Tick())) == (0,)


def test_watched_are_members_and_newcomers_until_they_have_ended() -> None:
    me = member(0, 1, 2)
    me.step(2.0, Announced(said(5)), silent(1), ended(2))
    assert me.watched() == {peer(1), peer(5)}
    asked = [peer(w, life) for w in range(7) for life in "ab"]
    assert {p for p in asked if me.watches(p)} == me.watched()


@pytest.mark.parametrize("wrong", ["regroup twice", "another peer", "itself lost", "not asked"])
def test_what_cannot_be_is_refused_with_the_story(wrong: str) -> None:
    me = member(0, 1)
    if wrong == "regroup twice":
        events = [Regroup(me.me, "once"), Regroup(me.me, "twice")]
    elif wrong == "another peer":
        events = [Regroup(said(1), "of somebody else")]
    elif wrong == "itself lost":
        events = [Lost(me.me.peer, "", True)]  # type: ignore[list-item]
    else:
        events = [Proposed(Proposal(2, (said(0), said(1)), ""))]  # type: ignore[list-item]
    with pytest.raises(ImpossibleTransitionError, match=r"story: .*Proposed generation 1 of"):
        me.step(2.0, *events)
