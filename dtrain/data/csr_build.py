"""Compressed adjacency from edge lists, and gathers from it: the loops that must be compiled."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

_INT32_NODES = np.iinfo(np.int32).max


def build_csr(
    num_nodes: int,
    src: NDArray[Any],
    dst: NDArray[Any],
    *,
    undirected: bool,
    keep_self_loops: bool = False,
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Rows of in-neighbours of the edges ``src[i] -> dst[i]`` (integers [n], in [0, num_nodes)).

    With ``undirected`` every edge also counts in the other direction. Duplicates are removed, and
    self loops unless kept. Returns ``indptr`` int64 [num_nodes + 1] and ``indices`` [E] (int32
    where the node ids fit, else int64), increasing within a row. Needs 8 bytes a node and one
    array of all directed edges beyond its arguments.
    """
    degree = np.zeros(num_nodes + 1, dtype=np.int64)
    _count(src, dst, undirected, keep_self_loops, degree)
    indptr = np.cumsum(degree)
    dtype = np.int32 if num_nodes <= _INT32_NODES else np.int64
    indices = np.empty(int(indptr[-1]), dtype=dtype)
    cursor = degree
    cursor[:] = indptr
    _fill(src, dst, undirected, keep_self_loops, cursor, indices)
    size = _sort_and_compact(indptr, indices)
    return indptr, indices if size == len(indices) else indices[:size].copy()


def renumber_csr(
    indptr: NDArray[np.int64], indices: NDArray[Any], order: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The same graph with new ids: node ``order[i]`` becomes ``i`` (``order``: int64 [N])."""
    new_id = np.empty(len(order), dtype=indices.dtype)
    new_id[order] = np.arange(len(order), dtype=indices.dtype)
    new_ptr = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(np.diff(indptr)[order], out=new_ptr[1:])
    new_indices = np.empty_like(indices)
    _copy_renumbered(indptr, indices, order, new_id, new_ptr, new_indices)
    return new_ptr, new_indices


def transpose_csr(
    indptr: NDArray[np.int64], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The graph with every edge turned round; rows stay increasing."""
    num_nodes = len(indptr) - 1
    out_ptr = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(indices, minlength=num_nodes), out=out_ptr[1:])
    out_indices = np.empty_like(indices)
    _fill_transposed(indptr, indices, out_ptr[:-1].copy(), out_indices)
    return out_ptr, out_indices


def symmetrize_csr(
    indptr: NDArray[np.int64], indices: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The union of the graph and its reverse, without self loops."""
    num_nodes = len(indptr) - 1
    back_ptr, back = transpose_csr(indptr, indices)
    out_ptr = np.zeros(num_nodes + 1, dtype=np.int64)
    out = np.empty(2 * len(indices), dtype=indices.dtype)
    size = _merge_rows(indptr, indices, back_ptr, back, out_ptr, out)
    return out_ptr, out[:size].copy()


def is_symmetric(indptr: NDArray[np.int64], indices: NDArray[Any]) -> bool:
    """Whether every edge is there in both directions."""
    back_ptr, back = transpose_csr(indptr, indices)
    return bool(np.array_equal(indptr, back_ptr) and np.array_equal(indices, back))


def take_csr_rows(
    indptr: NDArray[np.int64],
    indices: NDArray[Any],
    values: NDArray[Any],
    rows: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Rows ``rows`` (int64 [n]) of a sparse matrix, in that order.

    Returns ``indptr`` int64 [n + 1], ``indices`` int64 [nnz], ``values`` float32 [nnz].
    """
    out_ptr = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(indptr[rows + 1] - indptr[rows], out=out_ptr[1:])
    out_indices = np.empty(int(out_ptr[-1]), dtype=np.int64)
    out_values = np.empty(int(out_ptr[-1]), dtype=np.float32)
    _take_rows(indptr, indices, values, rows, out_ptr, out_indices, out_values)
    return out_ptr, out_indices, out_values


@numba.njit(nogil=True, cache=True)
def _count(src: Any, dst: Any, undirected: Any, keep_loops: Any, degree: Any) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v:
            if keep_loops:
                degree[v + 1] += 1
            continue
        degree[v + 1] += 1
        if undirected:
            degree[u + 1] += 1


@numba.njit(nogil=True, cache=True)
def _fill(src: Any, dst: Any, undirected: Any, keep_loops: Any, cursor: Any, indices: Any) -> None:
    for i in range(len(src)):
        u, v = src[i], dst[i]
        if u == v and not keep_loops:
            continue
        indices[cursor[v]] = u
        cursor[v] += 1
        if undirected and u != v:
            indices[cursor[u]] = v
            cursor[u] += 1


@numba.njit(nogil=True, cache=True)
def _sort_and_compact(indptr: Any, indices: Any) -> Any:
    """Sort every row, drop repeats, close the gaps; returns the number of entries left."""
    out = 0
    start = indptr[0]
    for v in range(len(indptr) - 1):
        stop = indptr[v + 1]
        row = indices[start:stop]
        row.sort()
        for i in range(len(row)):
            if i == 0 or row[i] != row[i - 1]:
                # Never ahead of what is still to be read: out <= start + i. The comparison above
                # reads row[i - 1], which is overwritten only by itself or a later position.
                indices[out] = row[i]
                out += 1
        start = stop
        indptr[v + 1] = out
    return out


@numba.njit(nogil=True, cache=True)
def _copy_renumbered(
    indptr: Any, indices: Any, order: Any, new_id: Any, new_ptr: Any, new_indices: Any
) -> None:
    for i in range(len(order)):
        start = indptr[order[i]]
        row = new_indices[new_ptr[i] : new_ptr[i + 1]]
        for k in range(len(row)):
            row[k] = new_id[indices[start + k]]
        row.sort()


@numba.njit(nogil=True, cache=True)
def _fill_transposed(indptr: Any, indices: Any, cursor: Any, out: Any) -> None:
    for v in range(len(indptr) - 1):
        for k in range(indptr[v], indptr[v + 1]):
            u = indices[k]
            out[cursor[u]] = v
            cursor[u] += 1


@numba.njit(nogil=True, cache=True)
def _merge_rows(a_ptr: Any, a: Any, b_ptr: Any, b: Any, out_ptr: Any, out: Any) -> Any:
    size = 0
    for v in range(len(a_ptr) - 1):
        i, j = a_ptr[v], b_ptr[v]
        while i < a_ptr[v + 1] or j < b_ptr[v + 1]:
            if j >= b_ptr[v + 1] or (i < a_ptr[v + 1] and a[i] <= b[j]):
                u = a[i]
                if j < b_ptr[v + 1] and b[j] == u:
                    j += 1
                i += 1
            else:
                u = b[j]
                j += 1
            if u != v:
                out[size] = u
                size += 1
        out_ptr[v + 1] = size
    return size


@numba.njit(nogil=True, cache=True)
def _take_rows(
    indptr: Any,
    indices: Any,
    values: Any,
    rows: Any,
    out_ptr: Any,
    out_indices: Any,
    out_values: Any,
) -> None:
    for i in range(len(rows)):
        start = indptr[rows[i]]
        for k in range(out_ptr[i + 1] - out_ptr[i]):
            out_indices[out_ptr[i] + k] = indices[start + k]
            out_values[out_ptr[i] + k] = values[start + k]
