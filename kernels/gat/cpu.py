"""Graph attention on the CPU: scores, softmax, dropout and sum in one pass over the rows.

Nothing is kept for an entry between the passes. The backward pass goes over the columns, computes
each coefficient again from its row's maximum and sum, and adds in the order of the transpose.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from dtrain.kernels.csr import Csr
from dtrain.kernels.dropout.reference import keep_threshold
from dtrain.kernels.gat.reference import Attention
from dtrain.kernels.rng import mix64_jit


@numba.njit(cache=True, nogil=True)
def _forward(
    indptr: Any,
    indices: Any,
    x: Any,
    src_score: Any,
    dst_score: Any,
    slope: Any,
    key: Any,
    threshold: Any,
    scale: Any,
    out: Any,
    maxima: Any,
    sums: Any,
) -> None:
    heads, width = x.shape[1], x.shape[2]
    zero = x.dtype.type(0)
    for row in range(indptr.size - 1):
        start, stop = indptr[row], indptr[row + 1]
        for k in range(start, stop):
            column = indices[k]
            for h in range(heads):
                score = src_score[column, h] + dst_score[row, h]
                logit = score if score > zero else score * slope
                if k == start or logit > maxima[row, h]:
                    maxima[row, h] = logit
        for k in range(start, stop):
            column = indices[k]
            for h in range(heads):
                score = src_score[column, h] + dst_score[row, h]
                logit = score if score > zero else score * slope
                exponent = np.exp(logit - maxima[row, h])
                sums[row, h] += exponent
                kept = threshold == 0 or mix64_jit(key, np.uint64(k * heads + h)) >= threshold
                if kept:
                    for d in range(width):
                        out[row, h, d] += exponent * x[column, h, d]
        for h in range(heads):
            if stop > start:
                factor = scale / sums[row, h]
                for d in range(width):
                    out[row, h, d] *= factor


@numba.njit(cache=True, nogil=True)
def _backward(
    indptr: Any,
    indices: Any,
    perm: Any,
    x: Any,
    src_score: Any,
    dst_score: Any,
    slope: Any,
    key: Any,
    threshold: Any,
    scale: Any,
    maxima: Any,
    sums: Any,
    grad: Any,
    own: Any,
    to_x: Any,
    to_src: Any,
    to_entry: Any,
) -> None:
    heads, width = x.shape[1], x.shape[2]
    zero = x.dtype.type(0)
    for column in range(indptr.size - 1):
        for t in range(indptr[column], indptr[column + 1]):
            row, k = indices[t], perm[t]
            for h in range(heads):
                score = src_score[column, h] + dst_score[row, h]
                logit = score if score > zero else score * slope
                softmax = np.exp(logit - maxima[row, h]) / sums[row, h]
                dot = zero
                kept = threshold == 0 or mix64_jit(key, np.uint64(k * heads + h)) >= threshold
                if kept:
                    coefficient = softmax * scale
                    for d in range(width):
                        dot += grad[row, h, d] * x[column, h, d]
                        to_x[column, h, d] += coefficient * grad[row, h, d]
                to_logit = softmax * (scale * dot - own[row, h])
                to_score = to_logit if score > zero else to_logit * slope
                to_src[column, h] += to_score
                to_entry[k, h] = to_score


@numba.njit(cache=True, nogil=True)
def _row_sums(indptr: Any, entries: Any, out: Any) -> None:
    for row in range(indptr.size - 1):
        for k in range(indptr[row], indptr[row + 1]):
            for h in range(entries.shape[1]):
                out[row, h] += entries[k, h]


def forward(
    csr: Csr, x: Tensor, src_score: Tensor, dst_score: Tensor, attention: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dtrain.kernels.gat.reference.forward`, for float32 or float64 on the CPU."""
    arrays = [_array(t) for t in (csr.indptr, csr.indices, x, src_score, dst_score)]
    numbers = _numbers(attention, arrays[2].dtype)
    results = [torch.zeros(shape, dtype=x.dtype) for shape in _result_shapes(x, dst_score)]
    arguments: list[Any] = [*arrays, *numbers, *(_array(t) for t in results)]
    _forward(*arguments)
    out, maxima, sums = results
    return out, maxima, sums


def backward(
    csr: Csr,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    attention: Attention,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`dtrain.kernels.gat.reference.backward`, for float32 or float64 on the CPU."""
    x, src_score, dst_score, out, maxima, sums = tensors
    transposed, perm = csr.transpose()
    to_x, to_src, to_dst = (torch.zeros(t.shape, dtype=t.dtype) for t in (x, src_score, dst_score))
    to_entry = torch.empty(csr.nnz, x.shape[1], dtype=x.dtype)
    structure = (transposed.indptr, transposed.indices, perm, x, src_score, dst_score)
    rest = (maxima, sums, grad, (grad * out).sum(-1), to_x, to_src, to_entry)
    arguments: list[Any] = [_array(t) for t in structure]
    arguments += _numbers(attention, arguments[3].dtype)
    arguments += [_array(t) for t in rest]
    _backward(*arguments)
    _row_sums(_array(csr.indptr), _array(to_entry), _array(to_dst))
    return to_x, to_src, to_dst


def _result_shapes(x: Tensor, dst_score: Tensor) -> list[tuple[int, ...]]:
    return [(*dst_score.shape, x.shape[2]), tuple(dst_score.shape), tuple(dst_score.shape)]


def _numbers(attention: Attention, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Slope, key, threshold and scale in the types that keep the loops in one precision."""
    return (
        dtype.type(attention.slope),
        np.uint64(attention.key),
        np.uint64(keep_threshold(attention.p)),
        dtype.type(1.0 / (1.0 - attention.p)),
    )


def _array(x: Tensor) -> Any:
    return x.detach().contiguous().numpy()
