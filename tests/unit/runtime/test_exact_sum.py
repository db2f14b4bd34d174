"""The exact gradient sum does not depend on who computed what, and errs less than float32's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.runtime.exact_sum import NonFiniteGradientError, exact_sum, quantum

SHAPES = [(3, 5), (7,), ()]
NAMES = ["w", "b", "s"]


def gradients(seed: int, microbatches: int) -> dict[int, list[Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    out: dict[int, list[Tensor | None]] = {}
    for m in range(microbatches):
        scale = 10.0 ** torch.randint(-20, 20, (), generator=generator).item()
        out[m] = [torch.randn(s, generator=generator) * scale for s in SHAPES]
    return out


class Exchange:
    """In-place reductions of as many threads as there are holders."""

    def __init__(self, holders: int) -> None:
        self.given: list[Tensor] = []
        self.rounds = 0
        self._barrier = threading.Barrier(holders)
        self._lock = threading.Lock()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        with self._lock:
            self.given.append(tensor.clone())
        self._barrier.wait()
        found = list(self.given)
        if self._barrier.wait() == 0:
            self.given.clear()
            self.rounds += 1
        self._barrier.wait()
        return found

    def reduce(self, tensor: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        return tensor.copy_(combine(torch.stack(self.gather(tensor))))


def summed(
    grads: dict[int, list[Tensor | None]],
    owners: list[int],
    microbatches: int,
    *,
    one_round: bool = True,
) -> tuple[list[list[Tensor]], int]:
    """What the holders named in ``owners`` find, each in a thread, and in how many rounds."""
    parameters = [torch.zeros(s) for s in SHAPES]
    holders = sorted(set(owners))
    exchange = Exchange(len(holders))

    def find(holder: int) -> list[Tensor]:
        return exact_sum(
            {m: grads[m] for m in grads if owners[m] == holder},
            parameters,
            NAMES,
            microbatches,
            lambda t: exchange.reduce(t, lambda all_of: all_of.amax(0)),
            lambda t: exchange.reduce(t, lambda all_of: all_of.sum(0)),
            exchange.gather if one_round else None,
        )

    with ThreadPoolExecutor(len(holders)) as pool:
        return list(pool.map(find, holders)), exchange.rounds


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_split_over_holders_gives_the_same_bits(
    seed: int, microbatches: int, random: object
) -> None:
    grads = gradients(seed, microbatches)
    (alone,), _ = summed(grads, [0] * microbatches, microbatches)
    owners = [random.randrange(4) for _ in range(microbatches)]  # type: ignore[attr-defined]
    for one_round in (True, False):
        found, took = summed(grads, owners, microbatches, one_round=one_round)
        assert took == (1 if one_round else 2)
        for result in found:
            for a, b in zip(alone, result, strict=True):
                assert torch.equal(a, b)
                assert a.dtype == torch.float32


@pytest.mark.parametrize("seed", range(20))
def test_error_is_at_most_that_of_a_float32_sum(seed: int) -> None:
    microbatches = 8
    generator = torch.Generator().manual_seed(seed)
    grads = {m: [torch.randn(s, generator=generator) for s in SHAPES] for m in range(microbatches)}
    (result,), _ = summed(grads, [0] * microbatches, microbatches)
    for i, got in enumerate(result):
        true = np.sum([grads[m][i].numpy().astype(np.longdouble) for m in grads], axis=0)
        plain = grads[0][i].clone()
        for m in range(1, microbatches):
            plain += grads[m][i]
        error = np.abs(got.numpy() - true)
        assert error.max() <= np.abs(plain.numpy() - true).max()
        # Correctly rounded: half a unit in the last place of the float32 result.
        assert (error <= np.spacing(np.abs(got.numpy())) / 2 * (1 + 1e-6)).all()


def test_unused_parameters_and_empty_shares_count_as_zero() -> None:
    parameters = [torch.zeros(s) for s in SHAPES]
    grads: dict[int, list[Tensor | None]] = {0: [None, torch.ones(7), None]}
    got = exact_sum(grads, parameters, NAMES, 2, lambda t: t, lambda t: t)
    assert torch.equal(got[0], torch.zeros(3, 5))
    assert torch.equal(got[1], torch.ones(7))
    assert [g.shape for g in exact_sum({}, parameters, NAMES, 2, lambda t: t, lambda t: t)] == [
        torch.Size(s) for s in SHAPES
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named(bad: float) -> None:
    grads: dict[int, list[Tensor | None]] = {0: [torch.zeros(3, 5), torch.ones(7), torch.ones(())]}
    broken = torch.ones(7)
    broken[3] = bad
    grads[1] = [torch.zeros(3, 5), broken, torch.ones(())]
    parameters = [torch.zeros(s) for s in SHAPES]
    for gather in (None, lambda t: [t]):
        with pytest.raises(NonFiniteGradientError, match="gradient of b: expected finite"):
            exact_sum(grads, parameters, NAMES, 2, lambda t: t, lambda t: t, gather)


@given(st.floats(1.0, 2.0, exclude_max=True), st.integers(-149, 127), st.integers(1, 5000))
def test_the_quantum_keeps_every_partial_sum_in_53_bits(
    mantissa: float, exponent: int, microbatches: int
) -> None:
    maxabs = mantissa * 2.0**exponent
    q = quantum(maxabs, microbatches)
    assert np.frexp(q)[0] == 0.5
    assert microbatches * (maxabs / q + 0.5) <= 2.0**53
