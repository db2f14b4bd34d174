"""Turns of the thread that computes and the one that samples, on a core that both need."""

from __future__ import annotations

import threading
import time

import pytest

from dtrain.runtime.turns import CoreTurns, cores_are_scarce


class _Sampler:
    """Samples pieces of two parts, until it is told to stop; notes when it begins a part."""

    def __init__(self, turns: CoreTurns, part_s: float = 0.0) -> None:
        self.parts = 0
        self.within = False
        self._turns, self._part_s = turns, part_s
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            with self._turns.sampling():
                self._part()
                self._turns.give_way()
                self._part()

    def _part(self) -> None:
        self.within = True
        self.parts += 1
        time.sleep(self._part_s)
        self.within = False

    def stop(self) -> bool:
        self._stop = True
        self._thread.join(5.0)
        return not self._thread.is_alive()


def _comes(sampler: _Sampler) -> bool:
    """Whether the sampler begins another part soon."""
    before, end = sampler.parts, time.monotonic() + 5.0
    while sampler.parts == before and time.monotonic() < end:
        time.sleep(0.001)
    return sampler.parts > before


def test_sampling_waits_while_the_other_computes() -> None:
    turns = CoreTurns(scarce=True)
    sampler = _Sampler(turns, 0.002)
    try:
        assert _comes(sampler)
        for _ in range(5):
            with turns.computing():
                assert not sampler.within
                parts = sampler.parts
                time.sleep(0.01)
                assert sampler.parts == parts
                with turns.waiting():
                    assert _comes(sampler)
                assert not sampler.within
                parts = sampler.parts
                time.sleep(0.01)
                assert sampler.parts == parts
            assert _comes(sampler)
    finally:
        turns.end()
        assert sampler.stop()


def test_a_wait_outside_computing_leaves_the_core() -> None:
    turns = CoreTurns(scarce=True)
    sampler = _Sampler(turns)
    try:
        with turns.waiting():
            assert _comes(sampler)
        assert _comes(sampler)
    finally:
        turns.end()
        assert sampler.stop()


def test_what_waits_for_a_disk_does_not_keep_the_core() -> None:
    turns = CoreTurns(scarce=True)
    sampler = _Sampler(turns, 1.2)
    assert _comes(sampler)
    began = time.monotonic()
    with turns.computing():
        assert sampler.within
    assert time.monotonic() - began < 1.0
    turns.end()
    assert sampler.stop()


def test_the_end_lets_a_waiting_sampler_go() -> None:
    turns = CoreTurns(scarce=True)
    with turns.computing():
        sampler = _Sampler(turns)
        time.sleep(0.01)
        assert not sampler.parts
        turns.end()
        assert _comes(sampler)
        assert sampler.stop()


def test_with_cores_to_spare_both_run() -> None:
    turns = CoreTurns(scarce=False)
    sampler = _Sampler(turns)
    with turns.computing():
        assert _comes(sampler)
    assert sampler.stop()


@pytest.mark.parametrize(
    ("threads", "workers", "cores", "scarce"),
    [(1, 2, 2, True), (1, 4, 2, True), (1, 2, 3, False), (2, 1, 2, False), (1, 1, 1, True)],
)
def test_cores_are_scarce_where_each_has_a_worker_of_one_thread(
    threads: int, workers: int, cores: int, scarce: bool
) -> None:
    assert cores_are_scarce(threads, workers, cores) is scarce
