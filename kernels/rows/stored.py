"""Rows of a matrix that lies in memory or in a mapped file, named and not yet gathered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StoredRows:
    """``matrix[rows]``, for operators that read each row where it lies.

    ``matrix``: float32 [N, F], contiguous, perhaps read-only; ``rows``: int64 [n], in [0, N).
    """

    matrix: NDArray[np.float32]
    rows: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.rows), self.matrix.shape[1])

    def gather(self) -> Tensor:
        """The rows as a fresh float32 tensor [n, F]."""
        out = torch.empty(self.shape, dtype=torch.float32)
        # mode="clip" lets numpy write straight into the tensor; the numbers are known to be right.
        np.take(self.matrix, self.rows, axis=0, out=out.numpy(), mode="clip")
        return out
