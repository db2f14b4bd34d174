"""Unpickling that builds plain data only: numbers, containers, arrays and sparse matrices.

Pickles run whatever they name. Here the names that occur in Planetoid's files lead to the classes
below, and all others are refused; not even numpy's own reconstruction code sees the file.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import DtrainError

_KINDS = "fiub"


@dataclass(frozen=True)
class CsrMatrix:
    """A pickled ``scipy.sparse.csr_matrix``: ``indptr`` [rows + 1], ``indices``, ``data`` [nnz]."""

    indptr: NDArray[Any]
    indices: NDArray[Any]
    data: NDArray[Any]
    shape: tuple[int, int]


def load_plain(content: bytes, where: str) -> Any:
    """Unpickle ``content`` (protocols of Python 2 and 3); ``where`` is named in messages.

    Arrays become ``np.ndarray``, sparse matrices :class:`CsrMatrix`; both only at the top level.

    Raises:
        DtrainError: the pickle names anything else, or is damaged.
    """
    try:
        loaded = _PlainUnpickler(content, where).load()
        if isinstance(loaded, _Array):
            return loaded.to_numpy()
        if isinstance(loaded, _Csr):
            return loaded.to_matrix()
        return loaded
    except DtrainError:
        raise
    except Exception as error:
        # A damaged pickle fails in any of a dozen ways, and all mean the same to the user.
        raise DtrainError(
            f"{where}: expected a pickle of plain arrays, got a damaged or other file "
            f"({type(error).__name__})"
        ) from error


class _Dtype:
    """Stands for ``numpy.dtype``: a code such as ``f4`` and a byte order."""

    def __init__(self, code: str, *_: object) -> None:
        self.code, self.order = str(code), "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] in ("<", ">"):
            self.order = state[1]

    def to_numpy(self) -> np.dtype[Any]:
        if len(self.code) > 3 or self.code[:1] not in _KINDS:
            raise ValueError(f"array of {self.code}")
        return np.dtype(self.order + self.code)


class _Array:
    """Stands for ``numpy.ndarray``."""

    state: tuple[Any, ...]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def to_numpy(self) -> NDArray[Any]:
        _, shape, dtype, fortran, raw = self.state
        content = raw.encode("latin1") if isinstance(raw, str) else bytes(raw)
        array = np.frombuffer(content, dtype=dtype.to_numpy())
        return array.reshape(shape, order="F" if fortran else "C")


class _Csr:
    """Stands for ``scipy.sparse.csr_matrix``, whose state is the dictionary of its fields."""

    fields: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fields = state

    def to_matrix(self) -> CsrMatrix:
        rows, columns = (int(n) for n in self.fields["_shape"])
        parts = [self.fields[name].to_numpy() for name in ("indptr", "indices", "data")]
        return CsrMatrix(parts[0], parts[1], parts[2], (rows, columns))


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _dict_with_default(*_: object) -> dict[Any, Any]:
    return {}


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"encoding {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("scipy.sparse._csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): _dict_with_default,
    ("collections", "OrderedDict"): _dict_with_default,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
    ("_codecs", "encode"): _encode,
}


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None:
            raise DtrainError(
                f"{self._where}: unsafe pickle: expected arrays and containers only, got a call of "
                f"{module}.{name}; do not use this file"
            )
        return found
