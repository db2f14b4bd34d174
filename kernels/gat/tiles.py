"""Inner loops of graph attention: coefficients of a node's entries, and the sums they weigh.

Coefficients of up to :data:`CHUNK` entries at a time lie in a scratch buffer that stays in the
first-level cache. Vectors go over the heads in the one part and over columns in the other.
"""

from __future__ import annotations

from typing import Any

from numba import types

from dtrain.kernels.simd import I64, EntryLoop, VectorCode, cgutils, data_of, intrinsic, length_of

CHUNK = 64
HEADS = 8
"""Heads that one call of the functions of scores computes, from ``head`` on."""

_UNITS = (8, 4, 2, 1)
_AHEAD = 16


@intrinsic
def row_maximum(
    typing: Any,
    far: Any,
    indices: Any,
    home: Any,
    out: Any,
    start: Any,
    stop: Any,
    row: Any,
    heads: Any,
    head: Any,
    slope: Any,
) -> Any:
    """``out[row, h]``: largest logit ``leaky(far[indices[k], h] + home[row, h])`` of [start, stop).

    ``far``, ``home``, ``out``: flat [., heads]; the entries are not none.
    """
    signature = types.void(far, indices, home, out, *[types.int64] * 5, slope)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        far, indices, home, out = _pointers(context, builder, signature, arguments, 4)
        start, stop, row, heads, head, slope = arguments[4:]
        code = VectorCode(builder, signature.args[0].dtype, HEADS)
        score = _Scores(code, home, row, heads, head, slope)
        lowest = code.constant(float("-inf"))
        ahead = _Ahead(code, indices, length_of(context, builder, signature.args[1], arguments[1]))
        with EntryLoop(builder, start, stop, [lowest]) as loop:
            code.prefetch(far, score.at(builder.mul(ahead.source(loop.index), heads)))
            source = builder.load(builder.gep(indices, [loop.index]))
            logit, _ = score.logit(far, builder.mul(source, heads))
            loop.carry([code.maximum(logit, loop.carried[0])])
        code.store(loop.carried[0], out, score.at(builder.mul(row, heads)), score.mask)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def row_coefficients(
    typing: Any,
    x: Any,
    far: Any,
    indices: Any,
    home: Any,
    maxima: Any,
    plain: Any,
    sloped: Any,
    totals: Any,
    start: Any,
    stop: Any,
    row: Any,
    heads: Any,
    head: Any,
    size: Any,
    slope: Any,
    key: Any,
    threshold: Any,
) -> Any:
    """``plain``: ``exp(logit - maxima[row])`` of every entry and head, 0 where dropped.

    ``x``: flat, rows of ``size`` elements that :func:`add_weighted` will read: requested here.

    ``sloped``: the same times the leaky rectifier's derivative. ``totals[h]`` and
    ``totals[heads + h]`` grow by the sums of both before dropout. ``key``: uint64 or None.
    """
    signature = types.void(
        x, far, indices, home, maxima, plain, sloped, totals,
        *[types.int64] * 6, slope, key, threshold,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, far, indices, home, maxima, plain, sloped, totals = _pointers(
            context, builder, signature, arguments, 8
        )
        start, stop, row, heads, head, size, slope, key, threshold = arguments[8:]
        code = VectorCode(builder, signature.args[0].dtype, HEADS)
        score = _Scores(code, home, row, heads, head, slope)
        largest = code.load(maxima, score.at(builder.mul(row, heads)), score.mask)
        kept = _Kept(code, signature.args[15], key, threshold, score)
        initial = [code.load(totals, score.at(I64(0)), score.mask)]
        initial += [code.load(totals, score.at(heads), score.mask)]
        with EntryLoop(builder, start, stop, initial) as loop:
            source = builder.load(builder.gep(indices, [loop.index]))
            code.prefetch_row(x, builder.mul(source, size), size)
            logit, derivative = score.logit(far, builder.mul(source, heads))
            power = code.exp(builder.fsub(logit, largest))
            inclined = builder.fmul(power, derivative)
            at = score.at(builder.mul(builder.sub(loop.index, start), heads))
            code.store(kept.or_zero(power, loop.index), plain, at, score.mask)
            code.store(kept.or_zero(inclined, loop.index), sloped, at, score.mask)
            loop.carry(
                [builder.fadd(loop.carried[0], power), builder.fadd(loop.carried[1], inclined)]
            )
        code.store(loop.carried[0], totals, score.at(I64(0)), score.mask)
        code.store(loop.carried[1], totals, score.at(heads), score.mask)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def column_coefficients(
    typing: Any,
    x: Any,
    far: Any,
    indices: Any,
    entries: Any,
    home: Any,
    plain: Any,
    sloped: Any,
    totals: Any,
    start: Any,
    stop: Any,
    column: Any,
    heads: Any,
    head: Any,
    size: Any,
    slope: Any,
    key: Any,
    threshold: Any,
    scale: Any,
) -> Any:
    """As :func:`row_coefficients`, for the transposed pattern: ``plain`` and ``sloped`` are final.

    ``far``: flat [num_rows, 4, heads]: scores, maxima, inverse sums and ``grad . out`` of the
    rows; ``entries``: which entry of the pattern each one is. ``totals[h]`` grows by the softmax
    times the rectifier's derivative times ``grad . out``.
    """
    signature = types.void(
        x, far, indices, entries, home, plain, sloped, totals,
        *[types.int64] * 6, slope, key, threshold, scale,
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, far, indices, entries, home, plain, sloped, totals = _pointers(
            context, builder, signature, arguments, 8
        )
        start, stop, column, heads, head, size, slope, key, threshold, scale = arguments[8:]
        code = VectorCode(builder, signature.args[0].dtype, HEADS)
        score = _Scores(code, home, column, heads, head, slope)
        kept = _Kept(code, signature.args[15], key, threshold, score)
        factor = code.splat(scale)
        ahead = _Ahead(code, indices, length_of(context, builder, signature.args[2], arguments[2]))
        per_row = builder.mul(heads, I64(4))
        with EntryLoop(
            builder, start, stop, [code.load(totals, score.at(I64(0)), score.mask)]
        ) as loop:
            later = builder.mul(ahead.source(loop.index), per_row)
            code.prefetch_row(far, later, per_row)
            row = builder.load(builder.gep(indices, [loop.index]))
            code.prefetch_row(x, builder.mul(row, size), size)
            place = builder.mul(row, per_row)
            logit, derivative = score.logit(far, place)
            largest, inverse, own = (
                code.load(far, score.at(builder.add(place, builder.mul(heads, I64(i)))), score.mask)
                for i in (1, 2, 3)
            )
            softmax = builder.fmul(code.exp(builder.fsub(logit, largest)), inverse)
            entry = builder.load(builder.gep(entries, [loop.index]))
            weight = kept.or_zero(builder.fmul(softmax, factor), entry)
            at = score.at(builder.mul(builder.sub(loop.index, start), heads))
            code.store(weight, plain, at, score.mask)
            code.store(builder.fmul(weight, derivative), sloped, at, score.mask)
            loop.carry([code.fma(builder.fmul(softmax, derivative), own, loop.carried[0])])
        code.store(loop.carried[0], totals, score.at(I64(0)), score.mask)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_weighted(
    typing: Any,
    x: Any,
    indices: Any,
    plain: Any,
    sloped: Any,
    out: Any,
    out_sloped: Any,
    start: Any,
    stop: Any,
    at: Any,
    at_sloped: Any,
    heads: Any,
    width: Any,
    fresh: Any,
    lanes: Any,
) -> Any:
    """``out[at + h * width + d] += plain[k - start, h] * x[indices[k], h, d]`` over [start, stop).

    The same with ``sloped`` into ``out_sloped``, if that is not None. ``fresh`` (bool): what was
    there counts as zero. ``lanes`` (literal): columns in a vector.
    """
    signature = types.void(
        x, indices, plain, sloped, out, out_sloped, *[types.int64] * 6, types.boolean, lanes
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, indices, plain, sloped, out, out_sloped = _pointers(
            context, builder, signature, arguments, 6
        )
        start, stop, at, at_sloped, heads, width, fresh, _ = arguments[6:]
        code = VectorCode(builder, signature.args[0].dtype, lanes.literal_value)
        row_size = builder.mul(heads, width)
        sides = [(plain, out, at)]
        if out_sloped is not None:
            sides.append((sloped, out_sloped, at_sloped))

        def emit(units: list[_Unit]) -> None:
            initial = [
                builder.select(
                    fresh,
                    code.constant(0.0),
                    code.load(to, builder.add(begin, unit.column), unit.mask),
                )
                for _, to, begin in sides
                for unit in units
            ]
            with EntryLoop(builder, start, stop, initial) as loop:
                source = builder.mul(builder.load(builder.gep(indices, [loop.index])), row_size)
                values = [code.load(x, builder.add(source, u.column), u.mask) for u in units]
                number = builder.mul(builder.sub(loop.index, start), heads)
                sums = []
                for i, (weights, _, _) in enumerate(sides):
                    for j, unit in enumerate(units):
                        place = builder.gep(weights, [builder.add(number, unit.head)])
                        total = loop.carried[i * len(units) + j]
                        sums.append(code.fma(code.splat(builder.load(place)), values[j], total))
                loop.carry(sums)
            for i, (_, to, begin) in enumerate(sides):
                for j, unit in enumerate(units):
                    total = loop.carried[i * len(units) + j]
                    code.store(total, to, builder.add(begin, unit.column), unit.mask)

        _over_units(code, heads, width, emit)
        return context.get_dummy_value()

    return signature, generate


class _Ahead:
    """The sources of later entries, whose scores are requested before their turn."""

    def __init__(self, code: VectorCode, indices: Any, nnz: Any) -> None:
        self._builder, self._indices = code.builder, indices
        self._last = code.builder.sub(nnz, I64(1))

    def source(self, entry: Any) -> Any:
        """The source of the entry some places on, at most the last one."""
        builder = self._builder
        later = builder.add(entry, I64(_AHEAD))
        later = builder.select(builder.icmp_signed("<", later, self._last), later, self._last)
        return builder.load(builder.gep(self._indices, [later]))


class _Unit:
    """A vector of columns of one head: where it begins in a row, its head, its mask."""

    def __init__(self, code: VectorCode, number: Any, per_head: Any, width: Any) -> None:
        builder = code.builder
        self.head = builder.udiv(number, per_head)
        inside = builder.mul(builder.urem(number, per_head), I64(code.lanes))
        self.column = builder.add(builder.mul(self.head, width), inside)
        self.mask = code.first_lanes(builder.sub(width, inside))


def _over_units(code: VectorCode, heads: Any, width: Any, emit: Any) -> None:
    """Emit the code of tiles of 8, 4, 2 and 1 units, and the loops over them."""
    builder = code.builder
    per_head = builder.udiv(builder.add(width, I64(code.lanes - 1)), I64(code.lanes))
    total = builder.mul(heads, per_head)
    place = cgutils.alloca_once_value(builder, I64(0))
    for count in _UNITS:
        head, body, done = (
            builder.append_basic_block(f"units{count}.{part}") for part in ("head", "body", "done")
        )
        builder.branch(head)
        builder.position_at_end(head)
        first = builder.load(place)
        end = builder.add(first, I64(count))
        builder.cbranch(builder.icmp_signed("<=", end, total), body, done)
        builder.position_at_end(body)
        emit([_Unit(code, builder.add(first, I64(i)), per_head, width) for i in range(count)])
        builder.store(end, place)
        builder.branch(head)
        builder.position_at_end(done)


class _Scores:
    """Logits of one node's entries for the heads from ``head`` on."""

    def __init__(
        self, code: VectorCode, home: Any, node: Any, heads: Any, head: Any, slope: Any
    ) -> None:
        builder = code.builder
        self._code, self._head = code, head
        self.heads = heads
        self.mask = code.first_lanes(builder.sub(heads, head))
        self._home = code.load(home, self.at(builder.mul(node, heads)), self.mask)
        self._slope = code.splat(slope)

    def at(self, begin: Any) -> Any:
        """The first of the heads in a row that begins there."""
        return self._code.builder.add(begin, self._head)

    def logit(self, far: Any, begin: Any) -> tuple[Any, Any]:
        """The leaky rectified sum of both ends' scores, and the rectifier's derivative there."""
        code, builder = self._code, self._code.builder
        score = builder.fadd(code.load(far, self.at(begin), self.mask), self._home)
        positive = builder.fcmp_ordered(">", score, code.constant(0.0))
        logit = builder.select(positive, score, builder.fmul(score, self._slope))
        return logit, builder.select(positive, code.constant(1.0), self._slope)


class _Kept:
    """Which coefficients dropout keeps: those whose draw reaches the threshold."""

    def __init__(
        self, code: VectorCode, key_type: Any, key: Any, threshold: Any, score: _Scores
    ) -> None:
        self._code, self._score = code, score
        self._key = None if isinstance(key_type, types.NoneType) else key
        self._threshold = threshold

    def or_zero(self, values: Any, entry: Any) -> Any:
        """``values`` of an entry's heads, 0 where they are dropped."""
        if self._key is None:
            return values
        code, builder = self._code, self._code.builder
        first = self._score.at(builder.mul(entry, self._score.heads))
        draws = code.mix64(self._key, first)
        kept = builder.icmp_unsigned(">=", draws, code.splat(self._threshold))
        return builder.select(kept, values, code.constant(0.0))


def _pointers(
    context: Any, builder: Any, signature: Any, arguments: Any, count: int
) -> list[Any | None]:
    """Data of the first ``count`` arguments, which are arrays or None."""
    return [
        None
        if isinstance(signature.args[i], types.NoneType)
        else data_of(context, builder, signature.args[i], arguments[i])
        for i in range(count)
    ]
