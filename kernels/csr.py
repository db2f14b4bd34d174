"""The sparse structure that every operator takes: CSR rows of destinations, columns of sources."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Csr:
    """A sparse 0/1 pattern of shape ``[num_rows, num_cols]``, prepared once and reused.

    ``indptr``: int64 [num_rows + 1]; ``indices``: int64 [nnz], values in [0, num_cols).
    Row ``i`` (a destination) holds the columns (sources) ``indices[indptr[i]:indptr[i + 1]]`` in
    a fixed order, which is the order of accumulation.
    """

    indptr: Tensor
    indices: Tensor
    num_cols: int
    _transposed: tuple[Csr, Tensor] | None = field(default=None, repr=False)

    @property
    def num_rows(self) -> int:
        return int(self.indptr.numel()) - 1

    @property
    def nnz(self) -> int:
        return int(self.indices.numel())

    def transpose(self) -> tuple[Csr, Tensor]:
        """The transposed pattern and ``perm`` (int64 [nnz]): its entry ``k`` is our entry ``perm[k]``.

        Computed once. Within a column, entries keep the order of their rows.
        """
        if self._transposed is None:
            rows = self.row_of_entry()
            perm = torch.argsort(self.indices, stable=True)
            counts = torch.bincount(self.indices, minlength=self.num_cols)
            indptr = torch.zeros(self.num_cols + 1, dtype=torch.int64, device=self.indptr.device)
            torch.cumsum(counts, 0, out=indptr[1:])
            self._transposed = (Csr(indptr, rows[perm], self.num_rows), perm)
        return self._transposed

    def row_of_entry(self) -> Tensor:
        """int64 [nnz]: the row of every entry."""
        counts = self.indptr[1:] - self.indptr[:-1]
        rows = torch.arange(self.num_rows, device=self.indptr.device)
        return torch.repeat_interleave(rows, counts)

    def row_counts(self) -> Tensor:
        """int64 [num_rows]: entries in every row."""
        return self.indptr[1:] - self.indptr[:-1]

    def to(self, device: torch.device | str) -> Csr:
        """The same pattern on ``device``."""
        return Csr(self.indptr.to(device), self.indices.to(device), self.num_cols)


@dataclass(eq=False)
class SparseRows:
    """A sparse float matrix ``[num_rows, num_cols]``: a pattern and ``values`` (float [nnz]).

    Bag-of-words features are this; it stands wherever a layer's dense input ``x`` may stand.
    """

    csr: Csr
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return (self.csr.num_rows, self.csr.num_cols)

    def to(self, device: torch.device | str) -> SparseRows:
        """The same matrix on ``device``."""
        return SparseRows(self.csr.to(device), self.values.to(device))
