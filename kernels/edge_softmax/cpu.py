"""Edge softmax on the CPU: each row is computed by one thread, in the order of its entries."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from dtrain.kernels.arrays import wide
from dtrain.kernels.csr import Csr
from dtrain.kernels.results import empty
from dtrain.kernels.simd import VectorCode, data_of, intrinsic
from dtrain.kernels.threads import over_rows

_BLOCK = 8


def forward(csr: Csr, scores: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.edge_softmax.reference.forward`, for tensors on the CPU."""
    source = wide(scores).numpy()
    out = empty(source.shape, source.dtype)
    indptr = csr.indptr.numpy()
    heads = source.shape[1]

    def loop(first: int, end: int) -> None:
        _softmax_rows(first, end, indptr, source.reshape(-1), heads, out.reshape(-1))

    over_rows(indptr, heads, loop)
    return torch.from_numpy(out).to(scores.dtype)


def backward(csr: Csr, softmax: Tensor, grad: Tensor) -> Tensor:
    """As :func:`dtrain.kernels.edge_softmax.reference.backward`, for tensors on the CPU."""
    weights, source = wide(softmax).numpy(), wide(grad).numpy()
    out = empty(source.shape, source.dtype)
    indptr = csr.indptr.numpy()
    over_rows(
        indptr,
        source.shape[1],
        lambda first, end: _gradient_rows(first, end, indptr, weights, source, out),
    )
    return torch.from_numpy(out).to(grad.dtype)


@intrinsic
def _exp_block(typing: Any, values: Any, at: Any, count: Any) -> Any:
    """Replace up to 8 values from ``at`` on, none above 0, by their exponentials."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = data_of(context, builder, signature.args[0], arguments[0])
        code = VectorCode(builder, signature.args[0].dtype, _BLOCK)
        mask = code.first_lanes(arguments[2])
        code.store(code.exp(code.load(data, arguments[1], mask)), data, arguments[1], mask)
        return context.get_dummy_value()

    return types.void(values, types.int64, types.int64), generate


@numba.njit(cache=True, nogil=True)
def _softmax_rows(first: Any, end: Any, indptr: Any, scores: Any, heads: Any, out: Any) -> None:
    maxima, sums = np.empty(heads, scores.dtype), np.empty(heads, scores.dtype)
    for row in range(first, end):
        start, stop = indptr[row] * heads, indptr[row + 1] * heads
        maxima[:] = -np.inf
        sums[:] = 0
        for at in range(start, stop, heads):
            for h in range(heads):
                maxima[h] = max(maxima[h], scores[at + h])
        for at in range(start, stop, heads):
            for h in range(heads):
                out[at + h] = scores[at + h] - maxima[h]
        for at in range(start, stop, _BLOCK):
            _exp_block(out, at, min(_BLOCK, stop - at))
        for at in range(start, stop, heads):
            for h in range(heads):
                sums[h] += out[at + h]
        for at in range(start, stop, heads):
            for h in range(heads):
                out[at + h] /= sums[h]


@numba.njit(cache=True, nogil=True)
def _gradient_rows(first: Any, end: Any, indptr: Any, softmax: Any, grad: Any, out: Any) -> None:
    sums = np.empty(grad.shape[1], grad.dtype)
    for row in range(first, end):
        sums[:] = 0
        for k in range(indptr[row], indptr[row + 1]):
            for h in range(grad.shape[1]):
                sums[h] += softmax[k, h] * grad[k, h]
        for k in range(indptr[row], indptr[row + 1]):
            for h in range(grad.shape[1]):
                out[k, h] = softmax[k, h] * (grad[k, h] - sums[h])
