"""How often and how soon a trainer is started anew."""

from __future__ import annotations

from dtrain.config import RobustConfig
from dtrain.launch.respawn import GiveUp, Respawn, RespawnPolicy


def delays(policy: RespawnPolicy, lived_s: list[float]) -> list[float | None]:
    found: list[float | None] = []
    now = 0.0
    for life, lived in enumerate(lived_s, start=1):
        now += lived
        decision = policy.after_death(now, lived, life=life, failure=None)
        found.append(decision.delay_s if isinstance(decision, Respawn) else None)
    return found


def test_the_wait_doubles_while_trainers_die_young() -> None:
    policy = RespawnPolicy(RobustConfig(respawns=100))
    lived_s = [1.0] * 9 + [60.0, 1.0]
    assert delays(policy, lived_s) == [0, 0.25, 0.5, 1, 2, 4, 8, 10, 10, 0, 0.25]


def test_the_wait_starts_where_the_user_says() -> None:
    policy = RespawnPolicy(RobustConfig(respawns=100, respawn_backoff_s=3.0))
    assert delays(policy, [60.0, 1.0, 1.0, 1.0, 60.0]) == [3, 6, 10, 10, 3]
    policy = RespawnPolicy(RobustConfig(respawns=100, respawn_backoff_s=30.0))
    assert delays(policy, [1.0, 1.0]) == [30, 30]


def test_the_budget_counts_within_its_window() -> None:
    policy = RespawnPolicy(RobustConfig(respawns=2, respawn_window_s=100.0))
    assert delays(policy, [40.0, 40.0, 40.0]) == [0, 0, None]
    policy = RespawnPolicy(RobustConfig(respawns=2, respawn_window_s=100.0))
    assert delays(policy, [40.0, 40.0, 60.0, 40.0]) == [0, 0, 0, 0]
    assert delays(RespawnPolicy(RobustConfig(respawns=0)), [40.0]) == [None]


def test_the_same_exception_young_thrice_is_a_bug() -> None:
    def failures(told: list[tuple[str | None, float]]) -> list[bool]:
        policy = RespawnPolicy(RobustConfig())
        return [
            isinstance(policy.after_death(9.0, lived, life=life, failure=failure), GiveUp)
            for life, (failure, lived) in enumerate(told, start=1)
        ]

    assert failures([("a", 1.0), ("a", 1.0), ("a", 1.0)]) == [False, False, True]
    assert failures([("a", 1.0), ("b", 1.0), ("a", 1.0)]) == [False, False, False]
    assert failures([("a", 1.0), (None, 1.0), ("a", 1.0), ("a", 1.0)]) == [False] * 4
    assert failures([(None, 1.0)] * 4) == [False] * 4, "killed again and again is chance"
    assert failures([("a", 9.0)] * 4) == [False] * 4
    assert failures([("a", 9.0), ("a", 1.0), ("a", 1.0)]) == [False, False, True]
