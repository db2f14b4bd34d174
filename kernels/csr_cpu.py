"""Loops over CSR structure on the CPU, compiled when first used."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


@numba.njit(cache=True, nogil=True)
def transpose(indptr: Any, indices: Any, num_cols: int) -> Any:
    """Counting sort of the entries by column, stable in the entries' order.

    ``indptr``: int64 [num_rows + 1]; ``indices``: int64 [nnz]. Returns the transposed ``indptr``
    (int64 [num_cols + 1]), its ``indices`` and ``perm`` (int64 [nnz]), and the position of an
    entry outside [0, num_cols) or -1.
    """
    nnz = indices.size
    out_indptr = np.zeros(num_cols + 1, np.int64)
    rows = np.empty(nnz, np.int64)
    perm = np.empty(nnz, np.int64)
    for k in range(nnz):
        column = indices[k]
        if column < 0 or column >= num_cols:
            return out_indptr, rows, perm, k
        out_indptr[column + 1] += 1
    for column in range(num_cols):
        out_indptr[column + 1] += out_indptr[column]
    cursor = out_indptr[:-1].copy()
    for row in range(indptr.size - 1):
        for k in range(indptr[row], indptr[row + 1]):
            column = indices[k]
            at = cursor[column]
            cursor[column] = at + 1
            rows[at] = row
            perm[at] = k
    return out_indptr, rows, perm, -1


@numba.njit(cache=True, nogil=True)
def with_self_entries(indptr: Any, indices: Any) -> Any:
    """The pattern whose row ``i`` is column ``i`` followed by the row's other columns.

    ``indptr``: int64 [num_rows + 1]; ``indices``: int64 [nnz]; returns both of the new pattern.
    """
    num_rows = indptr.size - 1
    out_indptr = np.empty(num_rows + 1, np.int64)
    out_indices = np.empty(indices.size + num_rows, np.int64)
    at = 0
    for row in range(num_rows):
        out_indptr[row] = at
        out_indices[at] = row
        at += 1
        for k in range(indptr[row], indptr[row + 1]):
            if indices[k] != row:
                out_indices[at] = indices[k]
                at += 1
    out_indptr[num_rows] = at
    return out_indptr, out_indices[:at].copy()
