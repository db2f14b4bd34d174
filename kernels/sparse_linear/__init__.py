"""A linear map of sparse rows: bag-of-words features times a dense weight."""

from __future__ import annotations

from torch import Tensor

from dtrain.kernels.csr import SparseRows
from dtrain.kernels.spmm import spmm


def sparse_linear(rows: SparseRows, weight: Tensor) -> Tensor:
    """``rows @ weight``, touching only the entries of ``rows``.

    ``rows``: [N, F_in]; ``weight``: float [F_in, F_out]; returns [N, F_out] of ``weight``'s dtype.
    It is the weighted product of :func:`dtrain.kernels.spmm.spmm` with the weight as dense
    operand, so the gradient to ``weight`` runs over the pattern's cached transpose.

    Raises:
        ValueError: ``weight`` does not have ``F_in`` rows.
    """
    return spmm(rows.csr, weight, rows.values)
