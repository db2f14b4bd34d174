"""Snapshots in peer memory: who keeps whose, when one is due, what goes."""

from __future__ import annotations

from dtrain.scheduler.snapshots import due, keeper, outdated

NODES = {0: ("a",), 1: ("a",), 2: ("a",), 3: ("b",), 4: ("b",)}


def test_the_keeper_does_not_hold_the_stage_and_is_elsewhere_where_it_can_be() -> None:
    assert keeper(0, (0, 1), range(5), NODES) == 3
    assert keeper(4, (0, 1), range(5), NODES) == 4, "stages take different ones"
    assert keeper(0, (0, 3), range(5), NODES) == 1, "both nodes have it"
    assert keeper(0, (0, 1), (0, 1), NODES) is None


def test_when_one_is_due() -> None:
    def says(step: int, taken: list[int], every: object = 4, **how: bool) -> bool:
        found = due(step, taken, every, **{"asked": False, "last": False} | how)  # type: ignore[arg-type]
        assert found.reason
        return found.now

    assert says(5, [])
    assert [step for step in range(6, 14) if says(step, [5])] == [8, 12]
    assert not any(says(step, [5], "auto") for step in range(6, 14))
    assert says(6, [5], "auto", asked=True)
    assert says(6, [5], last=True)
    assert not says(8, [4, 8], asked=True, last=True)


def test_the_newest_stay_and_what_has_no_place_goes_when_it_is_replaced() -> None:
    held = [(step, 0) for step in range(1, 6)] + [(3, 1), (4, 1)]
    old = {(1, 0), (2, 0)}
    assert outdated(held, {0}, replaced=False) == old
    assert outdated(held, {0}, replaced=True) == old | {(3, 1), (4, 1)}
    assert outdated(held, {0, 1}, replaced=True) == old
