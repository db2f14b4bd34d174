"""When a trainer counts as hung, by its signs of life alone."""

from __future__ import annotations

from dtrain.launch.lease import Lease
from dtrain.runtime.heartbeat import Sign


def sign(
    beat_s: float, progress_s: float = 0.0, *, waiting: bool = False, phase: str = "forward"
) -> Sign:
    return Sign(beat_s, progress_s, waiting, 3, phase)


def looks(lease: Lease, times: list[float], seen: Sign) -> list[str | None]:
    return [lease.look(now, seen) for now in times]


def test_silence_beyond_the_lease_is_a_hang() -> None:
    lease = Lease(5.0, 0.0, 100.0)
    assert lease.tick_s == 1.0
    assert looks(lease, [101, 102, 103, 104, 105, 106], sign(101.0)) == [None] * 6
    reason = lease.look(106.1, sign(101.0, 100.5))
    assert reason == "no sign of life for 5.1 s (robust.lease_s), in forward of step 3"


def test_it_looks_again_when_the_allowed_time_ends() -> None:
    lease = Lease(5.0, 8.0, 100.0)
    assert lease.look(101.0, sign(101.0, 100.5)) is None
    assert lease.next_look_s(101.0) == 1.0
    for now in (102.0, 103.0, 104.0, 105.0):
        assert lease.look(now, sign(101.0, 100.5)) is None
    assert lease.look(105.7, sign(101.0, 100.5)) is None
    assert 0.3 < lease.next_look_s(105.7) < 0.31
    assert lease.look(106.2, sign(106.2, 100.5)) is None
    assert lease.look(107.7, sign(107.7, 100.5)) is None
    assert 0.8 < lease.next_look_s(107.7) < 0.81
    assert lease.look(108.51, sign(108.5, 100.5)) is not None


def test_beats_renew_the_lease() -> None:
    lease = Lease(5.0, 0.0, 0.0)
    assert all(lease.look(now, sign(now - 0.9)) is None for now in range(1, 60))


def test_before_the_first_beat_there_is_time_to_start() -> None:
    lease = Lease(1.0, 0.0, 0.0)
    times = [tenth / 5 for tenth in range(1, 300)]
    assert looks(lease, times, sign(0.0)) == [None] * 299
    reason = lease.look(60.1, sign(0.0))
    assert reason is not None
    assert reason.endswith("before its first action")


def test_a_late_look_forgives_all_silence_before_it() -> None:
    lease = Lease(5.0, 10.0, 0.0)
    assert lease.look(1.0, sign(1.0, 1.0)) is None
    # 3.5 s is a tick and half a lease: not late yet, and the silence counts.
    assert lease.look(4.5, sign(1.0, 1.0)) is None
    assert lease.look(6.1, sign(1.0, 1.0)) is not None
    late = Lease(5.0, 10.0, 0.0)
    assert late.look(20.0, sign(0.9, 0.9)) is None
    assert looks(late, [21, 22, 23, 24, 25], sign(0.9, 0.9)) == [None] * 5
    assert late.look(25.1, sign(0.9, 0.9)) is not None


def test_standing_still_is_a_hang_unless_it_waits_for_others() -> None:
    def after_a_minute(progress_s: float, seen_progress_s: float, waiting: bool) -> str | None:
        lease = Lease(5.0, progress_s, 0.0)
        for now in range(1, 60):
            lease.look(now, sign(now, seen_progress_s, waiting=waiting))
        return lease.look(60.0, sign(60.0, seen_progress_s, waiting=waiting, phase="F(1,2)"))

    reason = after_a_minute(50.0, 9.0, False)
    assert reason == "no progress for 51.0 s (robust.progress_s), in F(1,2) of step 3"
    assert after_a_minute(52.0, 9.0, False) is None
    assert after_a_minute(50.0, 9.0, True) is None
    assert after_a_minute(0.0, 9.0, False) is None, "0 is no limit"
    assert after_a_minute(50.0, 0.0, False) is None, "a trainer that never says what it does"
