"""Bytes that the GPU's kernels ask for, in float32 unless an item's size is given.

Rows that are gathered count each time, results once, and the structure's numbers are int64.
"""

from __future__ import annotations

from dtrain.kernels.csr import Csr

_INDEX = 8
_FLOAT = 4


def sum_bytes(csr: Csr, width: int, itemsize: int, *, weighted: bool) -> int:
    """A sum or mean over rows of ``width`` items."""
    per_entry = _INDEX + width * itemsize + (itemsize if weighted else 0)
    return csr.nnz * per_entry + csr.num_rows * (width * itemsize + _INDEX)


def maximum_bytes(csr: Csr, width: int) -> int:
    """A maximum with its argument (int32), and its gradient over the transposed pattern."""
    forward = csr.nnz * (_INDEX + width * _FLOAT) + csr.num_rows * (2 * width * _FLOAT + _INDEX)
    per_entry = 2 * _INDEX + 2 * width * _FLOAT
    return forward + csr.nnz * per_entry + csr.num_cols * (width * _FLOAT + _INDEX)


def sddmm_bytes(csr: Csr, width: int) -> int:
    """A dot product for every entry, whose row is an int32."""
    return csr.nnz * (_INDEX + 4 + 2 * width * _FLOAT + _FLOAT)


def softmax_bytes(csr: Csr, heads: int) -> int:
    """Both passes of an edge softmax, which read scores three times and gradients twice."""
    forward = csr.nnz * (4 * heads * _FLOAT + 4) + 4 * csr.num_rows * heads * _FLOAT
    return forward + csr.nnz * (5 * heads * _FLOAT + 4) + 2 * csr.num_rows * heads * _FLOAT


def attention_bytes(csr: Csr, heads: int, width: int) -> int:
    """Both passes of fused attention: see :mod:`dtrain.kernels.gat.triton`."""
    scores, row = heads * _FLOAT, heads * width * _FLOAT
    forward = csr.nnz * (2 * _INDEX + 2 * scores + row) + csr.num_rows * (2 * row + 4 * scores)
    rows = csr.num_rows * (3 * row + 9 * scores)
    columns = csr.nnz * (2 * _INDEX + 4 * scores + row) + csr.num_cols * (2 * row + 2 * scores)
    return forward + rows + columns + csr.num_cols * (2 * row + 2 * scores)


def maxk_bytes(csr: Csr, width: int, k: int) -> int:
    """Choice, packing, the product of k items a row with its bits, and its gradient."""
    words = -(-width // 32) * 8
    stored = k * _FLOAT
    nodes = csr.num_cols * (width * _FLOAT + 2 * stored + words)
    forward = csr.nnz * (_INDEX + _FLOAT + stored + words) + csr.num_rows * width * _FLOAT
    return nodes + forward + csr.nnz * (_INDEX + _FLOAT + stored) + csr.num_cols * (k + stored)
