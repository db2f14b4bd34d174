from __future__ import annotations

from dtrain.scheduler import Action, Layout, make_plan
from dtrain.scheduler.audit import (
    differing,
    flow,
    judge,
    not_finite,
    position,
    rotated,
    sampled,
)

LAYOUT = Layout((0, 1, 2), microbatches=4)
PLAN = make_plan(LAYOUT, range(4), 1)
OTHER = rotated(PLAN, 1, range(4))
SIZE = 2 * LAYOUT.num_stages * LAYOUT.microbatches


def made(wrong: dict[Action, int]) -> list[int]:
    """Digests of a computation; whatever follows a wrong action is wrong too."""
    out = [7] * SIZE
    for action, value in wrong.items():
        actions = flow(LAYOUT, action.microbatch)
        for later in actions[actions.index(action) :]:
            out[position(LAYOUT, later)] = value
    return out


def test_every_microbatch_goes_to_another_holder_and_the_order_can_proceed() -> None:
    for stage in range(2):
        for m in range(4):
            assert OTHER.executors[stage][m] != PLAN.executors[stage][m]
            assert OTHER.executors[stage][m] in PLAN.holders[stage]
    some = rotated(PLAN, 1, [2])
    assert {a.microbatch for ordered in some.actions.values() for a in ordered} == {2}
    assert sum(len(ordered) for ordered in some.actions.values()) == 4


def test_the_share_of_sampled_microbatches() -> None:
    assert sampled(0, 3, 8, 0.0) == ()
    assert sampled(0, 3, 8, 1.0) == tuple(range(8))
    count = sum(len(sampled(5, step, 8, 0.25)) for step in range(500))
    assert 800 < count < 1200
    assert sampled(5, 3, 8, 0.25) == sampled(5, 3, 8, 0.25)


def test_a_passing_error_is_the_first_ones() -> None:
    action = Action("B", 1, 2)
    first, second, third = made({action: 1}), made({}), made({})
    assert differing(LAYOUT, first, second) == [action]
    verdict = judge([PLAN, OTHER, PLAN], [first, second, third], [action])
    assert verdict is not None
    assert verdict.culprit == PLAN.executors[1][2]


def test_an_error_of_the_second_shows_when_it_differs_from_itself() -> None:
    action = Action("F", 0, 1)
    digests = [made({}), made({action: 1}), made({})]
    assert judge([PLAN, OTHER, PLAN], digests, [action]) is None
    verdict = judge([PLAN, OTHER, PLAN, OTHER], [*digests, made({action: 2})], [action])
    assert verdict is not None
    assert verdict.culprit == OTHER.executors[0][1]


def test_a_third_holder_decides_and_without_one_nobody_is_blamed() -> None:
    action = Action("F", 0, 1)
    three = make_plan(Layout((0, 1), microbatches=3), range(3), 1)
    plans = [three, rotated(three, 1, [1]), three, rotated(three, 2, [1])]
    at = position(three.layout, action)
    right, wrong = [7] * 6, [7] * 6
    wrong[at] = 1
    verdict = judge(plans, [right, wrong, right, right], [action])
    assert verdict is not None
    assert verdict.culprit == plans[1].executors[0][1]
    verdict = judge(plans, [wrong, right, wrong, right], [action])
    assert verdict is not None
    assert verdict.culprit == plans[0].executors[0][1]
    tied = [made({}), made({action: 1}), made({}), made({action: 1})]
    verdict = judge([PLAN, OTHER, PLAN, OTHER], tied, [action])
    assert verdict is not None
    assert verdict.culprit is None


def flags(*actions: Action) -> list[int]:
    return [int(v == 1) for v in made(dict.fromkeys(actions, 1))]


def test_not_finite_once_is_the_first_executors_fault() -> None:
    verdict = not_finite([PLAN, OTHER], [flags(Action("F", 0, 3)), flags()])
    assert verdict is not None
    assert verdict.culprit == PLAN.executors[0][3]


def test_not_finite_twice_alike_is_nobodys_fault() -> None:
    same = flags(Action("B", 1, 0))
    assert not_finite([PLAN, OTHER], [same, same]) is None


def test_a_worker_that_always_errs_is_found_by_being_in_both() -> None:
    worker = PLAN.executors[0][0]
    again = next(m for m in range(4) if OTHER.executors[0][m] == worker)
    bad = [flags(Action("B", 0, 0)), flags(Action("B", 0, again))]
    verdict = not_finite([PLAN, OTHER], bad)
    assert verdict is not None
    assert verdict.culprit == worker
