"""Tables of text and Parquet, read so that a mistake can be named with its line."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import fsspec
import numba
import numpy as np
from numpy.typing import NDArray

from dtrain.data.location import locate, unreadable
from dtrain.errors import DtrainError

_READ_BYTES = 1 << 26
_HEADER_WORDS = {
    "src", "dst", "source", "target", "from", "to", "u", "v", "head", "tail", "id", "id_1", "id_2",
    "id1", "id2", "node", "node1", "node2", "node_1", "node_2", "node_id", "name",
}  # fmt: skip
_OK, _NOT_INTEGER, _NEGATIVE, _TOO_FEW, _TOO_LARGE, _OUTSIDE = range(6)


@dataclass(frozen=True)
class IdPairs:
    """Two id columns of equal length: int64 arrays, or lists of str where ``is_text``."""

    src: Any
    dst: Any
    is_text: bool

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True)
class _Dialect:
    """How a text table is laid out, judged by its first lines; ``delimiter`` "" is white space."""

    delimiter: str
    first_rows: list[list[str]]

    def split(self, line: str) -> list[str]:
        if not self.delimiter:
            return line.split()
        return [f.strip() for f in next(csv.reader([line], delimiter=self.delimiter), [])]


def is_parquet(url: str) -> bool:
    """Whether the name says that a file is Parquet."""
    return url.lower().endswith((".parquet", ".pq"))


def open_binary(url: str, what: str) -> IO[bytes]:
    """Open a file for reading, decompressing by its suffix; ``what`` is named in messages."""
    locate(url)
    try:
        opened: IO[bytes] = fsspec.open(url, "rb", compression="infer").open()
    except Exception as error:
        unreadable(f"{what} {url}", error)
    return opened


def text_rows(url: str, what: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every row of a text table; blank and comment lines are left out.

    Fields are separated by tabs, semicolons, commas or white space, whichever the first row has
    (in that order). Lines that begin with ``#`` or ``%`` are comments.
    """
    with open_binary(url, what) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline=None)
        dialect: _Dialect | None = None
        number = 0
        try:
            for number, line in enumerate(text, start=1):
                if not line.strip() or line[0] in "#%":
                    continue
                if dialect is None:
                    dialect = _Dialect(_delimiter(line), [])
                yield number, dialect.split(line)
        except (UnicodeDecodeError, EOFError, OSError) as error:
            raise DtrainError(
                f"{what} {url}, after line {number}: expected UTF-8 text, got other bytes"
            ) from error


def read_id_pairs(
    url: str,
    *,
    columns: tuple[str, str] | None = None,
    header: bool | None = None,
    ids: str = "auto",
    num_nodes: int | None = None,
) -> IdPairs:
    """Read the two id columns of an edge list (text or Parquet); the first two unless named.

    ``header`` None: told by the first rows. ``ids`` "auto": integers where the first row has
    numbers. ``num_nodes``: integer ids must be below it.

    Raises:
        DtrainError: a file that cannot be read, a column that is missing, or an id that is
            negative, not an integer or too large, with its line (text) or row (Parquet).
    """
    if is_parquet(url):
        return _parquet_pairs(url, columns, ids, num_nodes)
    dialect = _probe(url)
    has_header = columns is not None or _has_header(dialect.first_rows, ids, header)
    picked = _pick(dialect.first_rows[0], columns, url) if has_header else (0, 1)
    data_row = dialect.first_rows[1 if has_header else 0 :][:1]
    if not data_row:
        raise DtrainError(f"edges {url}: expected at least one edge, got none")
    fields = [data_row[0][k] for k in picked if k < len(data_row[0])]
    if ids == "string" or (ids == "auto" and not all(_is_number(f) for f in fields)):
        return _text_pairs(url, picked, has_header)
    return _integer_pairs(url, picked, has_header, dialect.delimiter, num_nodes)


def parse_id(text: str, is_text: bool, where: str) -> int | str:
    """An id of a feature, label or split file; raises DtrainError unless it is of the kind."""
    if is_text:
        return text
    if not (text.isascii() and text.isdigit()):
        raise DtrainError(f"{where}: expected a node id (an integer of at least 0), got {text!r}")
    return int(text)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _delimiter(line: str) -> str:
    return next((mark for mark in "\t;," if mark in line), "")


def _probe(url: str) -> _Dialect:
    """The first two rows of a text table and what separates its fields."""
    with open_binary(url, "edges") as file:
        try:
            head = file.read(1 << 16).decode("utf-8-sig", errors="replace")
        except (OSError, EOFError) as error:
            unreadable(f"edges {url}", error)
    lines = [line for line in head.splitlines() if line.strip() and line[0] not in "#%"]
    if not lines:
        raise DtrainError(f"edges {url}: expected at least one edge, got none")
    dialect = _Dialect(_delimiter(lines[0]), [])
    dialect.first_rows.extend(dialect.split(line) for line in lines[:2])
    return dialect


def _has_header(rows: list[list[str]], ids: str, header: bool | None) -> bool:
    if header is not None:
        return header
    first = rows[0][:2]
    if all(_is_number(field) for field in first):
        return False
    known = all(field.lower() in _HEADER_WORDS for field in first)
    numbers_follow = len(rows) > 1 and all(_is_number(field) for field in rows[1][:2])
    return known or (numbers_follow and ids != "string")


def _pick(names: Sequence[str], columns: tuple[str, str] | None, url: str) -> tuple[int, int]:
    if columns is None:
        return 0, 1
    for name in columns:
        if name not in names:
            raise DtrainError(
                f"edges {url}: expected a column named {name!r}, got {', '.join(names)}"
            )
    return list(names).index(columns[0]), list(names).index(columns[1])


def _text_pairs(url: str, picked: tuple[int, int], has_header: bool) -> IdPairs:
    rows = text_rows(url, "edges")
    if has_header:
        next(rows)
    src: list[str] = []
    dst: list[str] = []
    for number, fields in rows:
        if len(fields) <= max(picked) or not (fields[picked[0]] and fields[picked[1]]):
            raise DtrainError(f"edges {url}, line {number}: expected two ids, got {fields}")
        src.append(fields[picked[0]])
        dst.append(fields[picked[1]])
    return IdPairs(src, dst, True)


def _integer_pairs(
    url: str, picked: tuple[int, int], has_header: bool, delimiter: str, num_nodes: int | None
) -> IdPairs:
    """Parse in compiled code, piece by piece: an edge list may have a billion lines."""
    limit = num_nodes if num_nodes is not None else np.iinfo(np.int64).max
    pieces: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    lines_before, skip = 0, has_header  # the header may still be to come
    for piece in _line_pieces(url):
        data = np.frombuffer(piece, dtype=np.uint8)
        capacity = int(np.count_nonzero(data == 10)) + 1
        src, dst = np.empty(capacity, dtype=np.int64), np.empty(capacity, dtype=np.int64)
        rows, lines, start, skip, code = _parse_pairs(
            data, ord(delimiter or " "), picked[0], picked[1], skip, limit, src, dst
        )
        if code != _OK:
            line = piece[start:].split(b"\n", 1)[0].decode("utf-8", errors="replace").strip()
            expected = {
                _NOT_INTEGER: "integer ids (or --ids string)",
                _NEGATIVE: "ids of at least 0",
                _TOO_FEW: "two ids",
                _TOO_LARGE: "ids below 2**63",
                _OUTSIDE: f"ids in [0, {limit - 1}]",
            }[code]
            raise DtrainError(
                f"edges {url}, line {lines_before + lines}: expected {expected}, got {line[:80]!r}"
            )
        lines_before += lines
        pieces.append((src[:rows], dst[:rows]))
    return IdPairs(
        np.concatenate([p[0] for p in pieces]), np.concatenate([p[1] for p in pieces]), False
    )


def _line_pieces(url: str) -> Iterator[bytes]:
    """The file in large pieces that end where a line ends."""
    with open_binary(url, "edges") as file:
        rest = b""
        while True:
            try:
                data = file.read(_READ_BYTES)
            except (OSError, EOFError) as error:
                unreadable(f"edges {url}", error)
            if not data:
                break
            data = rest + data
            end = data.rfind(b"\n") + 1
            rest = data[end:]
            if end:
                yield data[:end]
        if rest:
            yield rest


@numba.njit(nogil=True, cache=True)
def _parse_pairs(
    data: Any, delimiter: Any, col_a: Any, col_b: Any, skip: Any, limit: Any, src: Any, dst: Any
) -> Any:
    """Returns rows, lines, where the last line began, whether to skip still, an error code."""
    rows, lines, pos, size = 0, 0, 0, len(data)
    blank = delimiter == 32
    if size >= 3 and data[0] == 0xEF and data[1] == 0xBB and data[2] == 0xBF:
        pos = 3
    while pos < size:
        start = pos
        end = pos
        while end < size and data[end] != 10:
            end += 1
        pos = end + 1
        lines += 1
        while end > start and (data[end - 1] == 13 or data[end - 1] == 32 or data[end - 1] == 9):
            end -= 1
        k = start
        while k < end and (data[k] == 32 or data[k] == 9):
            k += 1
        if k == end or data[start] == 35 or data[start] == 37:
            continue
        if skip:
            skip = False
            continue
        found, column = 0, 0
        while k <= end and found < 2:
            # One field: [k, stop).
            stop = k
            while stop < end and not (data[stop] == delimiter or (blank and data[stop] == 9)):
                stop += 1
            if column in (col_a, col_b):
                low, high = k, stop
                while low < high and (data[low] == 32 or data[low] == 34):
                    low += 1
                while high > low and (data[high - 1] == 32 or data[high - 1] == 34):
                    high -= 1
                negative = low < high and data[low] == 45
                if negative:
                    low += 1
                if low == high:
                    return rows, lines, start, skip, _NOT_INTEGER if negative else _TOO_FEW
                if high - low > 18:
                    return rows, lines, start, skip, _TOO_LARGE
                value = np.int64(0)
                for i in range(low, high):
                    if data[i] < 48 or data[i] > 57:
                        return rows, lines, start, skip, _NOT_INTEGER
                    value = value * 10 + (np.int64(data[i]) - 48)
                if negative:
                    return rows, lines, start, skip, _NEGATIVE
                if value >= limit:
                    return rows, lines, start, skip, _OUTSIDE
                if column == col_a:
                    src[rows] = value
                if column == col_b:
                    dst[rows] = value
                found += 2 if col_a == col_b else 1
            k = stop + 1
            while blank and k < end and (data[k] == 32 or data[k] == 9):
                k += 1
            column += 1
        if found < 2:
            return rows, lines, start, skip, _TOO_FEW
        rows += 1
    return rows, lines, 0, skip, _OK


def read_parquet_columns(url: str, what: str, columns: Sequence[str] | None) -> Any:
    """A pyarrow table; raises DtrainError where pyarrow is missing or the file is not Parquet."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DtrainError(
            f"{what} {url}: Parquet needs pyarrow, which is missing: pip install 'dtrain[parquet]'"
        ) from error
    with open_binary(url, what) as file:
        try:
            names = parquet.ParquetFile(file).schema_arrow.names
            missing = [name for name in columns or () if name not in names]
            if missing:
                raise DtrainError(
                    f"{what} {url}: expected a column named {missing[0]!r}, got {', '.join(names)}"
                )
            file.seek(0)
            return parquet.read_table(file, columns=list(columns) if columns else None)
        except DtrainError:
            raise
        except Exception as error:
            raise DtrainError(
                f"{what} {url}: expected a Parquet file, got another or a damaged one "
                f"({type(error).__name__})"
            ) from error


def parquet_ids(column: Any, where: str, ids: str = "auto") -> Any:
    """An id column as int64 [n] or a list of str; raises DtrainError for nulls and other types."""
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise DtrainError(f"{where}, row {row}: expected an id, got none")
    values = column.to_numpy()
    if values.dtype.kind in "iu":
        if ids == "string":
            return [str(value) for value in values.tolist()]
        if values.dtype.kind == "i" and len(values) and values.min() < 0:
            row = int(np.flatnonzero(values < 0)[0])
            raise DtrainError(f"{where}, row {row}: expected ids of at least 0, got {values[row]}")
        return values.astype(np.int64)
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        return values.tolist()
    raise DtrainError(f"{where}: expected integer or string ids, got {column.type}")


def _parquet_pairs(
    url: str, columns: tuple[str, str] | None, ids: str, num_nodes: int | None
) -> IdPairs:
    table = read_parquet_columns(url, "edges", columns)
    if table.num_columns < 2 or table.num_rows == 0:
        raise DtrainError(f"edges {url}: expected two id columns and at least one edge, got none")
    names = columns or tuple(table.column_names[:2])
    found = []
    for name in names:
        values = parquet_ids(table.column(name), f"edges {url}, column {name}", ids)
        if num_nodes is not None and isinstance(values, np.ndarray) and values.max() >= num_nodes:
            row = int(np.flatnonzero(values >= num_nodes)[0])
            raise DtrainError(
                f"edges {url}, column {name}, row {row}: expected ids in [0, {num_nodes - 1}], got "
                f"{values[row]}"
            )
        found.append(values)
    kinds = {isinstance(values, list) for values in found}
    if len(kinds) > 1:
        raise DtrainError(f"edges {url}: expected both id columns of one type, got two")
    return IdPairs(found[0], found[1], kinds.pop())
