"""How loops of vector code go over the rows of a pattern and the rows of ``x`` that those name.

A tile of up to 8 vectors of columns stays in registers while a row's entries pass by, and one tile
after the other goes over the rows. The entries of a row are taken in their order whatever the way,
so no way changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from dtrain.kernels.simd import I64, EntryLoop, VectorCode, data_of, length_of, over_columns

Vectors = list[Any]

_TILES = (8, 4, 3, 2, 1)
_AHEAD = 16  # entries between the request for a row of x and its use
_LONG = 32  # entries in a row from which two rows of one vector each go side by side


@dataclass(frozen=True)
class Reduction:
    """What becomes of the entries of a row, as emitted code.

    ``begin(start, stop, tile)``: the vectors to begin with; ``step(entry, tile, carried)``: their
    next values; ``finish(start, stop, carried, store)``: writes the results by
    ``store(flat array, vectors)``.
    """

    begin: Callable[[Any, Any, Tile], Vectors]
    step: Callable[[Any, Tile, Vectors], Vectors]
    finish: Callable[[Any, Any, Vectors, Callable[[Any, Vectors], None]], None]


@dataclass(frozen=True)
class Place:
    """Where results go, as emitted values: row ``i`` begins at ``begin + i * stride`` (int64).

    ``past_caches`` (bool): whether they are written to memory at once, for which every row begins
    with a cache line. ``whole``: a width is known to be a multiple of a vector's lanes, so nothing
    is masked; only then can results go past the caches.
    """

    begin: Any
    stride: Any
    past_caches: Any
    whole: bool


class Walk:
    """Rows ``first .. end - 1`` of a pattern, in the code of an intrinsic.

    Its first arguments are ``x``, ``indices`` and ``indptr``; ``bounds`` says which are ``first``,
    ``end`` and ``width``. ``others``: flat arrays that are read where ``x`` is. ``to``: where
    results go, by default to rows of ``width``.
    """

    def __init__(
        self,
        context: Any,
        builder: Any,
        signature: Any,
        arguments: Any,
        bounds: range,
        others: Sequence[Any] = (),
        to: Place | None = None,
    ) -> None:
        self.builder = builder
        self.x, self._indices, self._indptr = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in range(3)
        )
        self.sources = [self.x, *others]
        self._first, self._end, self.width = (arguments[i] for i in bounds)
        self.to = to or Place(I64(0), self.width, ir.IntType(1)(0), whole=False)
        self._nnz = length_of(context, builder, signature.args[1], arguments[1])
        self.code = VectorCode(builder, signature.args[0].dtype)

    def emit(self, reduction: Reduction) -> None:
        """The loops over rows, entries and columns."""
        builder = self.builder
        entries = builder.sub(self._pointer(self._end), self._pointer(self._first))
        rows = builder.sub(self._end, self._first)
        narrow = builder.icmp_signed("<=", self.width, I64(self.code.lanes))
        long = builder.icmp_signed(">=", entries, builder.mul(rows, I64(_LONG)))
        with builder.if_else(builder.and_(narrow, long)) as (then, otherwise):
            with then:
                self._side_by_side(reduction)
            with otherwise:
                self._one_by_one(reduction)

    def place(self, entry: Any, column: Any) -> Any:
        """Index in ``x`` of the entry's row from ``column`` on."""
        source = self._number(self._indices, entry)
        return self.builder.add(self.builder.mul(source, self.width), column)

    def _one_by_one(self, reduction: Reduction) -> None:
        builder = self.builder
        # Behind the last entries there is nothing to ask for: they ask for themselves.
        after = builder.add(self._pointer(self._end), I64(_AHEAD))
        inside = builder.icmp_signed("<=", after, self._nnz)
        ahead = builder.select(inside, I64(_AHEAD), I64(0))

        def emit(column: Any, count: int, left: Any) -> None:
            tile = Tile(self, column, count, left)
            with EntryLoop(builder, self._first, self._end, []) as rows:
                start, stop = self._bounds(rows.index)
                initial = reduction.begin(start, stop, tile)
                with EntryLoop(builder, start, stop, initial) as loop:
                    tile.request(builder.add(loop.index, ahead))
                    loop.carry(reduction.step(loop.index, tile, loop.carried))
                reduction.finish(start, stop, loop.carried, tile.storing(rows.index))

        over_columns(self.code, self.width, emit, _TILES)

    def _side_by_side(self, reduction: Reduction) -> None:
        """Two rows at a time: within one, each addition would wait for the one before it.

        When the row that has fewer entries left is done, the next takes its place.
        """
        builder = self.builder
        tile = Tile(self, I64(0), 1, self.width)

        def begun(row: Any) -> list[Any]:
            start, stop = self._bounds(row)
            return [row, start, stop, start, *reduction.begin(start, stop, tile)]

        def finish(row: Any, start: Any, stop: Any, carried: Vectors) -> None:
            reduction.finish(start, stop, carried, tile.storing(row))

        def left(row: list[Any]) -> Any:
            return builder.sub(row[2], row[3])

        next_row = builder.add(self._first, I64(1))
        with EntryLoop(builder, next_row, self._end, begun(self._first)) as rows:
            one, other = begun(rows.index), rows.carried
            swap = builder.icmp_signed("<", left(other), left(one))
            both = list(zip(one, other, strict=True))
            shorter = [builder.select(swap, b, a) for a, b in both]
            longer = [builder.select(swap, a, b) for a, b in both]
            beside = builder.sub(longer[3], shorter[3])
            with EntryLoop(builder, shorter[3], shorter[2], shorter[4:] + longer[4:]) as loop:
                half = len(loop.carried) // 2
                entries = loop.index, builder.add(loop.index, beside)
                carried = loop.carried[:half], loop.carried[half:]
                first, second = (
                    reduction.step(entry, tile, vectors)
                    for entry, vectors in zip(entries, carried, strict=True)
                )
                loop.carry(first + second)
            row, start, stop = shorter[:3]
            finish(row, start, stop, loop.carried[:half])
            reached = builder.add(longer[3], left(shorter))
            rows.carry([*longer[:3], reached, *loop.carried[half:]])
        row, start, stop, entry, *vectors = rows.carried
        with EntryLoop(builder, entry, stop, vectors) as loop:
            loop.carry(reduction.step(loop.index, tile, loop.carried))
        finish(row, start, stop, loop.carried)

    def _bounds(self, row: Any) -> tuple[Any, Any]:
        """The row's first entry, and the one after its last."""
        return self._pointer(row), self._pointer(self.builder.add(row, I64(1)))

    def _pointer(self, row: Any) -> Any:
        return self._number(self._indptr, row)

    def _number(self, numbers: Any, at: Any) -> Any:
        number = self.builder.load(self.builder.gep(numbers, [at]))
        return number if number.type.width == 64 else self.builder.sext(number, I64)


class Tile:
    """``count`` vectors of columns from ``column`` on; the last has ``left`` lanes."""

    def __init__(self, walk: Walk, column: Any, count: int, left: Any) -> None:
        self._walk, self._column, self.count = walk, column, count
        whole = walk.to.whole
        self._masks = [None] * count if whole else walk.code.tile_masks(count, left)

    def load(self, entry: Any) -> Vectors:
        """The vectors of the row of ``x`` that the entry names."""
        code = self._walk.code
        return [code.load(self._walk.x, at, mask) for at, mask in self._places(entry)]

    def load_as(self, vector: Any, entry: Any, source: Any) -> Vectors:
        """Vectors of another type from another flat array, at the same place."""
        code = self._walk.code
        return [code.load_as(vector, source, at, mask) for at, mask in self._places(entry)]

    def request(self, entry: Any) -> None:
        """Ask for what :meth:`load` will read."""
        code, builder = self._walk.code, self._walk.builder
        place = self._walk.place(entry, self._column)
        for source in self._walk.sources:
            for i in range(0, self.count, 2 if code.narrow else 1):
                code.prefetch(source, builder.add(place, I64(i * code.lanes)))

    def storing(self, row: Any) -> Callable[[Any, Vectors], None]:
        """A function that writes vectors to the row's place in a flat array."""
        walk, builder = self._walk, self._walk.builder
        begin = builder.add(builder.mul(row, walk.to.stride), walk.to.begin)
        places = self._from(builder.add(begin, self._column))

        def store(to: Any, vectors: Vectors) -> None:
            pairs = list(zip(vectors, places, strict=True))
            if not walk.to.whole:
                for vector, (at, mask) in pairs:
                    walk.code.store(vector, to, at, mask)
                return
            with builder.if_else(walk.to.past_caches) as (then, otherwise):
                with then:
                    for vector, (at, _) in pairs:
                        walk.code.stream(vector, to, at)
                with otherwise:
                    for vector, (at, _) in pairs:
                        walk.code.store(vector, to, at)

        return store

    def _places(self, entry: Any) -> list[tuple[Any, Any]]:
        return self._from(self._walk.place(entry, self._column))

    def _from(self, begin: Any) -> list[tuple[Any, Any]]:
        """Where each vector lies and the mask of its lanes, None where it has all."""
        lanes = self._walk.code.lanes
        at = [self._walk.builder.add(begin, I64(i * lanes)) for i in range(self.count)]
        return list(zip(at, self._masks, strict=True))
