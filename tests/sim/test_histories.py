"""Thousands of random histories, each from a seed that a failure names with its story.

``DTRAIN_SIM_HISTORIES`` sets how many (default 2000); ``DTRAIN_SIM_SEED`` the first seed.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from dtrain.scheduler.simulator.histories import any_history

HISTORIES = int(os.environ.get("DTRAIN_SIM_HISTORIES", "2000"))
FIRST = int(os.environ.get("DTRAIN_SIM_SEED", "0"))
PARTS = 8


@pytest.mark.timeout(120 + HISTORIES // 10)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_invariant_holds_in_random_histories(part: int) -> None:
    tiers: Counter[int] = Counter()
    generations = 0
    for seed in range(FIRST + part, FIRST + HISTORIES, PARTS):
        world = any_history(seed)
        tiers.update(world.tiers)
        generations += len(world.standing)
    if HISTORIES >= 100 * PARTS:
        # The histories are worth their name: all ways of recovering were taken.
        assert min(tiers[tier] for tier in range(3)) > 0
        assert generations > 2 * HISTORIES / PARTS


def test_a_history_is_the_same_whenever_it_is_run() -> None:
    first, second = any_history(11), any_history(11)
    assert first.story(10_000) == second.story(10_000)
