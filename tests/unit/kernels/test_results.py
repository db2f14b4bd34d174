"""Memory of results is used again, but never while anything still refers to it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.kernels import results

LARGE = (1 << 20, 2)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(results, "_LARGE", 1 << 20)
    monkeypatch.setattr(results._kept(), "most", 1 << 30)
    results.release()
    yield
    results.release()


def _address(array: Any) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("shape", [(3,), (7, 5), LARGE])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_results_begin_with_a_cache_line(shape: tuple[int, ...], dtype: Any) -> None:
    made = [results.empty(shape, dtype) for _ in range(3)]
    for i, array in enumerate(made):
        assert array.shape == shape
        assert array.dtype == dtype
        assert _address(array) % 64 == 0
        array[...] = i
    assert all((array == i).all() for i, array in enumerate(made))


def test_memory_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    array = results.empty(LARGE, np.float32)
    address = _address(array)
    view = torch.from_numpy(array.reshape(-1))[5:].view(-1)
    del array
    gc.collect()
    assert _address(results.empty(LARGE, np.float32)) != address
    view.zero_()
    del view
    assert _address(results.empty(LARGE[::-1], np.int32)) == address


def test_no_small_result_holds_large_memory_and_no_large_one_gets_small_memory() -> None:
    address = _address(results.empty(LARGE, np.float32))
    half, double = (LARGE[0] // 2 - 64, 2), (LARGE[0] * 2, 2)
    others = [results.empty(shape, np.float32) for shape in (half, double)]
    assert address not in map(_address, others)


def test_what_is_kept_has_a_limit_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results._kept(), "most", 20 << 20)
    held = [results.empty(LARGE, np.float32) for _ in range(4)]
    addresses = [_address(array) for array in held]
    while held:
        del held[0]
    assert [_address(results.empty(LARGE, np.float32)) for _ in range(2)] == [addresses[3]] * 2
    kept = results._kept()._free.values()
    assert len(kept) == 2
    assert sum(raw.size for raw in kept) <= 20 << 20


def test_a_process_whose_memory_is_limited_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results._kept(), "most", 20 << 20)
    held = [results.empty(LARGE, np.float32) for _ in range(2)]
    del held[0]
    assert results._kept()._free
    results.keep_nothing()
    assert not results._kept()._free
    held.clear()
    assert not results._kept()._free


def test_threads_never_share_a_result() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            array = results.empty(LARGE, np.float32)
            array[0] = number
            again = results.empty(LARGE, np.float32)
            again[0] = -number
            if not (array[0] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
