"""Copies beside compute: what is queued and waited for, on a device that only notes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.data.block import Block
from dtrain.kernels.csr import Csr, SparseRows
from dtrain.runtime.fault import FaultFlag
from dtrain.runtime.inputs import InputFetcher, MicrobatchInputs, Prefetcher
from dtrain.runtime.staging import side_stream


class _Noted:
    """Copies are new tensors; waits are noted with the number of copies that they are for."""

    def __init__(self) -> None:
        self.copied: list[Tensor] = []
        self.waits: list[object] = []
        self.used: list[Tensor] = []

    def copy(self, tensor: Tensor) -> Tensor:
        self.copied.append(tensor.clone())
        return self.copied[-1]

    def mark(self) -> object:
        return len(self.copied)

    def wait(self, mark: object) -> None:
        self.waits.append(mark)

    def in_use(self, tensor: Tensor) -> None:
        self.used.append(tensor)


def _inputs(sparse: bool) -> MicrobatchInputs:
    csr = Csr(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2]), 3)
    block = Block(csr, torch.tensor([2, 1, 4]))
    features: Any = torch.arange(6.0).view(3, 2)
    if sparse:
        features = SparseRows(Csr(torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0]), 2), features[0])
    return MicrobatchInputs({1: block}, features, torch.tensor([1, 0]), torch.tensor([0, 1]))


def _tensors(inputs: MicrobatchInputs) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    inputs.map(note)
    return found


@pytest.mark.parametrize("sparse", [False, True])
def test_everything_is_copied_and_waited_for_before_use(sparse: bool) -> None:
    side, inputs = _Noted(), _inputs(sparse)
    sent = inputs.sent_on(side)
    assert len(side.copied) == (8 if sparse else 6)
    assert all(a is b for a, b in zip(_tensors(sent), side.copied, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(_tensors(sent), _tensors(inputs), strict=True))
    assert sent.blocks[1].num_src == 3
    assert side.waits == side.used == []
    assert sent.ready() is sent
    assert side.waits == [len(side.copied)]
    assert all(a is b for a, b in zip(side.used, side.copied, strict=True))
    assert inputs.ready() is inputs


def test_the_thread_that_computes_waits_and_the_one_that_fetches_does_not() -> None:
    side = _Noted()

    class Source:
        static = False

        def seeds(self, step: int, microbatch: int) -> list[int]:
            return [0]

    class Fetcher(InputFetcher):
        def __init__(self) -> None:
            self.order = [0, 1]

        def fetch(self, step: int, microbatch: int) -> MicrobatchInputs:
            return _inputs(False).sent_on(side)

    source: Any = Source()
    prefetcher = Prefetcher(Fetcher(), source, range(2), 2, FaultFlag(), 30.0)
    try:
        for number, (step, microbatch) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)], 1):
            taken = prefetcher.take(step, microbatch)
            assert side.waits == [6 * k for k in range(1, number + 1)]
            assert torch.equal(taken.blocks[1].csr.indptr, torch.tensor([0, 2, 3]))
    finally:
        prefetcher.close()


def test_a_cpu_has_no_side_stream() -> None:
    assert side_stream(torch.device("cpu")) is None
