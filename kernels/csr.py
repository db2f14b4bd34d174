"""The sparse structure that every operator takes: CSR rows of destinations, columns of sources."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dtrain.kernels import csr_cpu, threads
from dtrain.kernels.pieces import Pieces, cut_rows


@dataclass(eq=False)
class Csr:
    """A sparse 0/1 pattern of shape ``[num_rows, num_cols]``, prepared once and reused.

    ``indptr``: int64 [num_rows + 1]; ``indices``: int64 [nnz], values in [0, num_cols).
    Row ``i`` (a destination) holds the columns (sources) ``indices[indptr[i]:indptr[i + 1]]`` in
    a fixed order, which is the order of accumulation. Views with gaps are copied.
    """

    indptr: Tensor
    indices: Tensor
    num_cols: int
    _transposed: tuple[Csr, Tensor] | None = field(default=None, repr=False)
    _with_self: Csr | None = field(default=None, repr=False)
    _head: Csr | None = field(default=None, repr=False)
    _by_column: tuple[Any, int, Tensor] | None = field(default=None, repr=False)
    _longest: int | None = field(default=None, repr=False)
    _pieces: Pieces | None = field(default=None, repr=False)
    _rows: Tensor | None = field(default=None, repr=False)
    _narrow: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _used: bool = field(default=False, repr=False)
    _arrays: tuple[Any, Any] | None = field(default=None, repr=False)
    _bounds: dict[int, Any] = field(default_factory=dict, repr=False)
    _shares: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)
    _ones: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.indptr, self.indices = self.indptr.contiguous(), self.indices.contiguous()

    @cached_property
    def num_rows(self) -> int:
        return int(self.indptr.numel()) - 1

    @cached_property
    def nnz(self) -> int:
        return int(self.indices.numel())

    def transpose(self) -> tuple[Csr, Tensor]:
        """The transposed pattern, and which of our entries each of its entries is.

        The second is ``perm``, int64 [nnz]: entry ``k`` of the transposed pattern is our entry
        ``perm[k]``. Computed once. Within a column, entries keep the order of their rows.

        Raises:
            IndexError: an index lies outside [0, num_cols).
        """
        if self._transposed is None:
            if self.indices.device.type == "cpu":
                self._transposed = self._transpose_cpu()
            else:
                self._transposed = self._transpose_by_sort()
        return self._transposed

    def by_column(self, weight: Tensor) -> Tensor:
        """``weight`` ([nnz], one for each entry) in the order of the transposed pattern's entries.

        The answer for the constant weight asked about last is kept until another is asked about,
        and given again for that same tensor unless it was changed in place: constant edge weights
        are put in order once, not in every backward pass.
        """
        kept = self._by_column
        if kept is not None and kept[0]() is weight and kept[1] == weight._version:
            return kept[2]
        ordered = weight.detach()[self.transpose()[1]]
        if not weight.requires_grad:
            self._by_column = (weakref.ref(weight), weight._version, ordered)
        return ordered

    def _transpose_cpu(self) -> tuple[Csr, Tensor]:
        indptr, rows, perm, bad = csr_cpu.transpose(
            self.indptr.numpy(), self.indices.numpy(), self.num_cols
        )
        if bad >= 0:
            raise IndexError(
                f"indices[{bad}]: expected a column in [0, {self.num_cols}), "
                f"got {int(self.indices[bad])}"
            )
        transposed = Csr(torch.from_numpy(indptr), torch.from_numpy(rows), self.num_rows)
        return transposed, torch.from_numpy(perm)

    def _transpose_by_sort(self) -> tuple[Csr, Tensor]:
        perm = torch.argsort(self.indices, stable=True)
        # Counted by searching the sorted columns: bincount adds with atomics on a GPU.
        bounds = torch.arange(self.num_cols + 1, device=self.indices.device)
        indptr = torch.searchsorted(self.indices[perm], bounds)
        return Csr(indptr, self.row_of_entry()[perm], self.num_rows), perm

    def with_self_entries(self) -> Csr:
        """The pattern in which row ``i`` has column ``i`` exactly once, as its first entry.

        The other entries follow in their order. Needs ``num_rows <= num_cols``, as in a block,
        whose destinations are its first sources. Computed once.
        """
        if self._with_self is None:
            if self.indices.device.type == "cpu":
                arrays = csr_cpu.with_self_entries(self.indptr.numpy(), self.indices.numpy())
                indptr, indices = (torch.from_numpy(a) for a in arrays)
                self._with_self = Csr(indptr, indices, self.num_cols)
            else:
                self._with_self = self._with_self_by_search()
        return self._with_self

    def _with_self_by_search(self) -> Csr:
        rows = self.row_of_entry()
        others = self.indices != rows
        other_rows, columns = rows[others], self.indices[others]
        numbers = torch.arange(self.num_rows + 1, device=rows.device)
        indptr = torch.searchsorted(other_rows, numbers) + numbers
        indices = columns.new_empty(len(columns) + self.num_rows)
        indices[indptr[:-1]] = numbers[:-1]
        # Before an entry stand the other ones and the own one of each row up to its own.
        indices[torch.arange(len(columns), device=rows.device) + other_rows + 1] = columns
        return Csr(indptr, indices, self.num_cols)

    def head(self, num_rows: int) -> Csr:
        """The first ``num_rows`` rows; the last answer is kept, so its transpose is reused."""
        if num_rows == self.num_rows:
            return self
        if self._head is None or self._head.num_rows != num_rows:
            indptr = self.indptr[: num_rows + 1]
            self._head = Csr(indptr, self.indices[: int(indptr[-1])], self.num_cols)
        return self._head

    def row_of_entry(self) -> Tensor:
        """int64 [nnz]: the row of every entry."""
        counts = self.indptr[1:] - self.indptr[:-1]
        rows = torch.arange(self.num_rows, device=self.indptr.device)
        return torch.repeat_interleave(rows, counts, output_size=self.nnz)

    def row_counts(self) -> Tensor:
        """int64 [num_rows]: entries in every row."""
        return self.indptr[1:] - self.indptr[:-1]

    def longest_row(self) -> int:
        """Entries of the longest row, 0 without rows; found once."""
        if self._longest is None:
            counts = self.row_counts()
            self._longest = int(counts.max()) if len(counts) else 0
        return self._longest

    def pieces(self) -> Pieces | None:
        """Rows cut into pieces of bounded length, made once; None where no row is longer."""
        if self._pieces is None:
            self._pieces = cut_rows(self.indptr, self.longest_row())
        return self._pieces

    def entry_rows(self) -> Tensor:
        """:meth:`row_of_entry`, made once and kept, int32 where the rows can be numbered so."""
        if self._rows is None:
            rows = self.row_of_entry()
            self._rows = rows.int() if self.num_rows < 2**31 else rows
        return self._rows

    def narrow(self) -> tuple[Tensor, Tensor]:
        """``indptr`` and ``indices``, kept in int32 where the entries can be numbered so."""
        if max(self.nnz, self.num_rows, self.num_cols) >= 2**31:
            return self.indptr, self.indices
        if self._narrow is None:
            self._narrow = self.indptr.int(), self.indices.int()
        return self._narrow

    def for_loops(self) -> tuple[Any, Any]:
        """``indptr`` and ``indices`` as arrays for loops on the CPU: :meth:`narrow` from the second
        time on, half the bytes. To make them for a block that is used once would cost more."""
        if not self._used:
            self._used = True
            return self.indptr.numpy(), self.indices.numpy()
        if self._arrays is None:
            indptr, indices = self.narrow()
            self._arrays = indptr.numpy(), indices.numpy()
        return self._arrays

    def bounds(self, parts: int) -> Any:
        """int64 [parts + 1]: rows at which ranges of about equal work begin, and the end; kept.

        There are as many ranges as rows at most, and one at least.
        """
        parts = max(1, min(parts, self.num_rows))
        if parts not in self._bounds:
            work = self.nnz + self.num_rows
            self._bounds[parts] = threads.balanced(self.indptr.numpy(), work, parts)
        return self._bounds[parts]

    def shares(self, dtype: torch.dtype) -> Tensor:
        """What each entry of the transposed pattern has of the mean of its row here, kept."""
        if dtype not in self._shares:
            each = self.row_counts().clamp(min=1).to(dtype).reciprocal()
            self._shares[dtype] = each[self.transpose()[0].indices]
        return self._shares[dtype]

    def ones(self, dtype: torch.dtype) -> Tensor:
        """A one for every entry, kept."""
        if dtype not in self._ones:
            self._ones[dtype] = torch.ones(self.nnz, dtype=dtype, device=self.indices.device)
        return self._ones[dtype]

    def to(self, device: torch.device | str) -> Csr:
        """The same pattern on ``device``."""
        return self.map(lambda t: t.to(device))

    def map(self, move: Callable[[Tensor], Tensor]) -> Csr:
        """The same pattern of tensors that ``move`` made of ours, on another device say."""
        moved = Csr(move(self.indptr), move(self.indices), self.num_cols)
        if self.indptr.device.type == "cpu" and moved.indptr.device.type != "cpu":
            # Found here, the device need not be waited for later.
            moved._longest = self.longest_row()
        return moved


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

    def head(self, num_rows: int) -> SparseRows:
        """The first ``num_rows`` rows."""
        csr = self.csr.head(num_rows)
        return SparseRows(csr, self.values[: csr.nnz])

    def to_dense(self) -> Tensor:
        """float [num_rows, num_cols]: the same matrix; entries of one place are added."""
        dense = self.values.new_zeros(self.shape)
        at = (self.csr.row_of_entry(), self.csr.indices)
        return dense.index_put(at, self.values, accumulate=True)

    def to(self, device: torch.device | str) -> SparseRows:
        """The same matrix on ``device``."""
        return self.map(lambda t: t.to(device))

    def map(self, move: Callable[[Tensor], Tensor]) -> SparseRows:
        """The same matrix of tensors that ``move`` made of ours."""
        return SparseRows(self.csr.map(move), move(self.values))
