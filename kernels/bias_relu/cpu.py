"""Bias and rectifier on the CPU, and their gradients, as one pass each."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.arrays import array
from dtrain.kernels.bias_relu.tiles import activate_row, gradient_row
from dtrain.kernels.results import empty
from dtrain.kernels.threads import over_range

_RUN = 512
"""Rows whose gradients of the bias are added one after the other: part of what the result is."""


def bias_relu_(h: Tensor, bias: Tensor) -> None:
    """``h = relu(h + bias)`` in place; ``h``: contiguous float32 or float64 [N, F]."""
    count, width = h.shape
    rows, added = h.detach().numpy().reshape(-1), array(bias)
    over_range(count, width, lambda first, end: _activate(first, end, rows, added, width))


def bias_relu_backward(activated: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``h`` [N, F] and of the bias [F], of that of what was made of them."""
    count, width = activated.shape
    rows, given = array(activated).reshape(-1), array(grad).reshape(-1)
    out = empty((count, width), rows.dtype)
    runs = -(-count // _RUN)
    sums = np.zeros((runs, width), rows.dtype)
    results = (out.reshape(-1), sums.reshape(-1))

    def loop(first: int, end: int) -> None:
        for run in range(first, end):
            begin = run * _RUN
            _gradients(begin, min(begin + _RUN, count), rows, given, *results, run, width)

    over_range(runs, _RUN * width, loop)
    return torch.from_numpy(out), torch.from_numpy(sums.sum(0))


@numba.njit(cache=True, nogil=True)
def _activate(first: Any, end: Any, rows: Any, bias: Any, width: Any) -> None:
    for row in range(first, end):
        activate_row(rows, bias, row * width, width)


@numba.njit(cache=True, nogil=True)
def _gradients(
    first: Any, end: Any, rows: Any, grad: Any, out: Any, sums: Any, run: Any, width: Any
) -> None:
    for row in range(first, end):
        gradient_row(rows, grad, out, sums, row * width, run * width, width)
