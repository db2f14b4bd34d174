"""Sparse matrices in MatrixMarket's coordinate format, taken as graphs."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dtrain.data.graph import GraphArrays
from dtrain.data.importers.attributes import assemble
from dtrain.data.importers.options import ImportOptions
from dtrain.data.importers.tables import IdPairs, open_binary
from dtrain.data.location import unreadable
from dtrain.errors import DtrainError

_BANNER = b"%%MatrixMarket"
_LAYOUT = "%%MatrixMarket matrix coordinate"


@dataclass(frozen=True)
class _Entries:
    """1-based positions, and how many nodes there are if the file says so."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    num_nodes: int | None
    symmetric: bool


def read_mtx(src: str, options: ImportOptions) -> GraphArrays:
    """A square matrix in coordinate format: entry ``(i, j)`` is the edge ``i -> j``.

    Values are ignored. The banner and the line of sizes may be missing (all entries are then edges,
    and the largest id is the number of nodes). Node ids are the matrix's own, from 1; feature and
    label files use them. The graph is undirected, unless the banner says ``general`` or
    ``undirected`` is False.

    Raises:
        DtrainError: another MatrixMarket format, or a bad entry with its line.
    """
    entries = _read(src)
    if options.undirected is None:
        options = replace(options, undirected=entries.symmetric)
    pairs = IdPairs(entries.rows, entries.columns, False)
    if entries.num_nodes is None:
        everyone = np.arange(1, int(max(entries.rows.max(), entries.columns.max())) + 1)
    else:
        everyone = np.arange(1, entries.num_nodes + 1)
    graph = assemble(pairs, everyone, f"mtx {src.rsplit('/', 1)[-1]}", options)
    if graph.num_nodes > len(everyone):
        raise DtrainError(
            f"mtx {src}: expected feature and label ids in [1, {len(everyone)}], got others"
        )
    return graph


def _read(src: str) -> _Entries:
    where = f"mtx {src}"
    with open_binary(src, "mtx") as file:
        try:
            lines = file.read().split(b"\n")
        except (OSError, EOFError) as error:
            unreadable(where, error)
    banner = lines[0].startswith(_BANNER)
    symmetric = _check_banner(lines[0].decode(errors="replace"), where) if banner else True
    numbers = [k for k, line in enumerate(lines) if line.strip() and not line.startswith(b"%")]
    if not numbers:
        raise DtrainError(f"{where}: expected at least one entry, got none")
    sizes = _sizes(lines, numbers, banner, where)
    if sizes:
        numbers = numbers[1:]
        if sizes[0] != sizes[1]:
            raise DtrainError(f"{where}: expected a square matrix, got {sizes[0]} x {sizes[1]}")
        if sizes[2] != len(numbers):
            raise DtrainError(
                f"{where}: expected {sizes[2]} entries as its line of sizes says, got "
                f"{len(numbers)}; the file is cut off or damaged"
            )
    limit = sizes[0] if sizes else None
    table = _positions(lines, numbers, limit, where)
    return _Entries(table[:, 0], table[:, 1], limit, symmetric)


def _check_banner(banner: str, where: str) -> bool:
    """Whether the matrix is symmetric; raises DtrainError for what is no sparse matrix."""
    words = banner.lower().split()
    if len(words) < 5 or words[1] != "matrix" or words[2] != "coordinate":
        raise DtrainError(f"{where}, line 1: expected {_LAYOUT} ..., got {banner.strip()!r}")
    return words[4] != "general"


def _sizes(
    lines: list[bytes], numbers: list[int], banner: bool, where: str
) -> tuple[int, int, int] | None:
    """The line ``rows columns entries``: always after a banner, else where the counts agree."""
    fields = lines[numbers[0]].split()
    whole = len(fields) == 3 and all(field.isdigit() for field in fields)
    if banner and not whole:
        raise DtrainError(
            f"{where}, line {numbers[0] + 1}: expected rows, columns and entries, got "
            f"{lines[numbers[0]].decode(errors='replace').strip()!r}"
        )
    if whole and (banner or int(fields[2]) == len(numbers) - 1):
        return int(fields[0]), int(fields[1]), int(fields[2])
    return None


def _positions(
    lines: list[bytes], numbers: list[int], limit: int | None, where: str
) -> NDArray[np.int64]:
    """int64 [n, 2]: row and column of every entry, checked."""
    try:
        text = io.BytesIO(b"\n".join(lines[k] for k in numbers))
        table = np.loadtxt(text, dtype=np.int64, usecols=(0, 1), ndmin=2)
    except ValueError:
        table = None
    top = limit if limit is not None else np.iinfo(np.int64).max
    if table is not None and (not len(table) or (table.min() >= 1 and table.max() <= top)):
        return table
    for k in numbers:
        fields = lines[k].split()
        ok = len(fields) >= 2 and all(f.isdigit() and 1 <= int(f) <= top for f in fields[:2])
        if not ok:
            span = f"in [1, {limit}]" if limit is not None else "of at least 1"
            raise DtrainError(
                f"{where}, line {k + 1}: expected two integer ids {span}, got "
                f"{lines[k].decode(errors='replace').strip()[:80]!r}"
            )
    raise DtrainError(f"{where}: expected two integer ids a line")
