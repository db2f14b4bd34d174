"""Inner loops of own rows beside means: one row, all columns, dropout's mask drawn in passing."""

from __future__ import annotations

from typing import Any

from numba import types

from dtrain.kernels.simd import (
    I64,
    EntryLoop,
    VectorCode,
    data_of,
    intrinsic,
    length_of,
    over_columns,
)

_TILES = (8, 4, 2, 1)
_MASKED_TILES = (4, 2, 1)  # draws take registers, too
_AHEAD = 32  # entries between the request for a row and its use


@intrinsic
def forward_row(
    typing: Any,
    x: Any,
    names: Any,
    indices: Any,
    out: Any,
    start: Any,
    stop: Any,
    width: Any,
    row: Any,
    key: Any,
    threshold: Any,
    scale: Any,
    dropped: Any,
) -> Any:
    """``out[row] = [y[row] | mean(y[indices[k]])]`` for entries k in [start, stop), flat arrays.

    ``y`` is ``x``, of which with ``dropped`` (a literal) element ``i`` is scaled if
    ``mix64(key, i) >= threshold`` and else zero. Row ``r`` of ``x`` is stored as row ``names[r]``
    (int64), or as row ``r`` where ``names`` is numba's None; the masks do not depend on it.
    """
    named = not isinstance(names, types.NoneType)
    signature = types.void(
        x, names, indices, out, *[types.int64] * 4, key, threshold, scale, dropped
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, indices, out = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in (0, 2, 3)
        )
        names = data_of(context, builder, signature.args[1], arguments[1]) if named else None
        start, stop, width, row, key, threshold, scale, _ = arguments[4:]
        code = VectorCode(builder, signature.args[0].dtype)
        mask = _Mask(code, key, threshold, scale) if dropped.literal_value else None
        source = _Rows(code, x, width, mask, names)
        ahead = _Ahead(
            builder, indices, length_of(context, builder, signature.args[2], arguments[2])
        )
        divisor = code.splat(builder.sitofp(builder.sub(stop, start), code.scalar))
        one = code.constant(1.0)
        divisor = builder.select(builder.icmp_signed(">", stop, start), divisor, one)

        def tile(column: Any, count: int, left: Any) -> None:
            lanes = code.tile_masks(count, left)
            at = builder.add(builder.mul(row, builder.shl(width, I64(1))), column)
            for i, value in enumerate(source.load(row, column, lanes)):
                code.store(value, out, builder.add(at, I64(i * code.lanes)), lanes[i])
            with EntryLoop(builder, start, stop, [code.constant(0.0)] * count) as loop:
                source.request(ahead.of(loop.index), column, count)
                column_of = builder.load(builder.gep(indices, [loop.index]))
                values = source.load(column_of, column, lanes)
                loop.carry([builder.fadd(a, b) for a, b in zip(loop.carried, values, strict=True)])
            at = builder.add(at, width)
            for i, total in enumerate(loop.carried):
                mean = builder.fdiv(total, divisor)
                code.store(mean, out, builder.add(at, I64(i * code.lanes)), lanes[i])

        over_columns(code, width, tile, _MASKED_TILES if mask else _TILES)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def gradient_row(
    typing: Any,
    grad: Any,
    rows: Any,
    share: Any,
    out: Any,
    start: Any,
    stop: Any,
    width: Any,
    column: Any,
    own: Any,
    key: Any,
    threshold: Any,
    scale: Any,
    dropped: Any,
) -> Any:
    """The gradient of row ``column`` of the input, of that of the results in ``grad``.

    ``own`` (bool): whether the row stands in a result itself. It has ``share[r]`` of the mean of
    each row ``r = rows[k]`` with k in [start, stop). The mask as in :func:`forward_row`.
    """
    signature = types.void(
        grad, rows, share, out, *[types.int64] * 4, types.boolean, key, threshold, scale, dropped
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        grad, rows, share, out = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in range(4)
        )
        start, stop, width, row, own, key, threshold, scale, _ = arguments[4:]
        code = VectorCode(builder, signature.args[0].dtype)
        mask = _Mask(code, key, threshold, scale) if dropped.literal_value else None
        given = _Rows(code, grad, builder.shl(width, I64(1)), None)
        ahead = _Ahead(builder, rows, length_of(context, builder, signature.args[1], arguments[1]))
        # A row that stands in no result reads row 0, of which then nothing is taken.
        place = builder.select(own, row, I64(0))
        owned = code.splat(own)

        def tile(first: Any, count: int, left: Any) -> None:
            lanes = code.tile_masks(count, left)
            zero = code.constant(0.0)
            initial = [
                builder.select(owned, value, zero) for value in given.load(place, first, lanes)
            ]
            of_means = builder.add(width, first)
            with EntryLoop(builder, start, stop, initial) as loop:
                given.request(ahead.of(loop.index), of_means, count)
                result = builder.load(builder.gep(rows, [loop.index]))
                factor = code.splat(builder.load(builder.gep(share, [result])))
                values = given.load(result, of_means, lanes)
                loop.carry(
                    [code.fma(factor, v, a) for a, v in zip(loop.carried, values, strict=True)]
                )
            at = builder.add(builder.mul(row, width), first)
            for i, total in enumerate(loop.carried):
                to = builder.add(at, I64(i * code.lanes))
                if mask is not None:
                    total = mask.apply(total, to)
                code.store(total, out, to, lanes[i])

        over_columns(code, width, tile, _TILES)
        return context.get_dummy_value()

    return signature, generate


class _Mask:
    """Dropout of vectors of elements that follow each other."""

    def __init__(self, code: VectorCode, key: Any, threshold: Any, scale: Any) -> None:
        self._code, self._key = code, key
        self._threshold, self._scale = code.splat(threshold), code.splat(scale)

    def apply(self, values: Any, at: Any) -> Any:
        """Elements ``at`` and following, scaled or zero."""
        builder, code = self._code.builder, self._code
        draws = code.mix64(self._key, at)
        kept = builder.icmp_unsigned(">=", draws, self._threshold)
        scaled = builder.fmul(values, self._scale)
        return builder.select(kept, scaled, code.constant(0.0))


class _Rows:
    """Rows of a flat matrix of ``stride`` elements a row, dropped where there is a mask.

    ``names``: where each row lies, if not in its own place.
    """

    def __init__(
        self, code: VectorCode, data: Any, stride: Any, mask: _Mask | None, names: Any = None
    ) -> None:
        self._code, self._data, self._stride = code, data, stride
        self._mask, self._names = mask, names

    def load(self, row: Any, column: Any, lanes: list[Any]) -> list[Any]:
        """The vectors of a tile that begins at ``column``."""
        builder, code = self._code.builder, self._code
        begin, number = self._place(row, column), self._number(row, column)
        values = []
        for i, live in enumerate(lanes):
            offset = I64(i * code.lanes)
            value = code.load(self._data, builder.add(begin, offset), live)
            if self._mask is not None:
                value = self._mask.apply(value, builder.add(number, offset))
            values.append(value)
        return values

    def request(self, row: Any, column: Any, count: int) -> None:
        """Ask for the cache lines of a tile."""
        begin = self._place(row, column)
        for i in range(0, count, 2 if self._code.narrow else 1):
            self._code.prefetch(
                self._data, self._code.builder.add(begin, I64(i * self._code.lanes))
            )

    def _place(self, row: Any, column: Any) -> Any:
        if self._names is not None:
            row = self._code.builder.load(self._code.builder.gep(self._names, [row]))
        return self._number(row, column)

    def _number(self, row: Any, column: Any) -> Any:
        return self._code.builder.add(self._code.builder.mul(row, self._stride), column)


class _Ahead:
    """The row that an entry some way ahead names, the last one's near the end."""

    def __init__(self, builder: Any, indices: Any, nnz: Any) -> None:
        self._builder, self._indices = builder, indices
        self._last = builder.sub(nnz, I64(1))

    def of(self, entry: Any) -> Any:
        builder = self._builder
        later = builder.add(entry, I64(_AHEAD))
        later = builder.select(builder.icmp_signed("<", later, self._last), later, self._last)
        return builder.load(builder.gep(self._indices, [later]))
