"""What only a GPU can show: copies beside compute, and the benchmark's report of its kernels.

The operators' own tests run on a GPU too, from ``tests/unit/kernels/test_triton.py``.
"""

from __future__ import annotations

import pytest
import torch

from dtrain.bench.gpu import bench_gpu
from dtrain.data.block import Block
from dtrain.kernels.csr import Csr
from dtrain.runtime.inputs import MicrobatchInputs
from dtrain.runtime.staging import CudaSideStream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


def test_copies_on_a_side_stream_are_there_when_compute_begins() -> None:
    side = CudaSideStream(torch.device("cuda"))
    csr = Csr(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2]), 3)
    for turn in range(20):
        features = torch.full((3, 1 << 20), float(turn))
        inputs = MicrobatchInputs(
            {0: Block(csr, torch.tensor([2, 1, 4]))}, features, torch.tensor([1]), torch.empty(0)
        )
        taken = inputs.sent_on(side).ready()
        assert isinstance(taken.features, torch.Tensor)
        assert taken.features.is_cuda
        assert bool((taken.features == turn).all())
        assert taken.blocks[0].csr.longest_row() == 2


@pytest.mark.timeout(300)
def test_every_kernel_gives_the_same_bits_twice() -> None:
    report = bench_gpu("", nodes=5000, folder=None, budget_s=0.0, only="", say=print, limit_s=200.0)
    assert report.rows
    assert [row.op for row in report.rows if not row.same_bits] == []
