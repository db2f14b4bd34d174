"""Inner loops of the sparse-dense products: one row of the pattern times all columns of ``x``.

A tile of up to 16 vectors of columns stays in registers while the row's entries pass by. The
entries are added in their order whatever the tile, so tiling never changes a bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
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

_EXTREME_TILES = (8, 4, 3, 2, 1)  # each vector with one of positions beside it, in 32 registers
_FAR, _NEAR = 32, 16  # entries between the request for a narrow or wide tile of x and its use


@intrinsic
def sum_row(
    typing: Any,
    x: Any,
    indices: Any,
    weight: Any,
    out: Any,
    start: Any,
    stop: Any,
    width: Any,
    row: Any,
    mean: Any,
) -> Any:
    """``out[row] = sum(weight[k] * x[indices[k]])`` for entries k in [start, stop).

    All arrays are flat; ``weight`` may be numba's None for ones. With ``mean`` (bool) the sum is
    divided by the number of entries.
    """
    weighted = not isinstance(weight, types.NoneType)
    signature = types.void(x, indices, weight, out, *[types.int64] * 4, types.boolean)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, indices, out = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in (0, 1, 3)
        )
        if weighted:
            weight = data_of(context, builder, signature.args[2], arguments[2])
        start, stop, width, row, mean = arguments[4:]
        code = VectorCode(builder, signature.args[0].dtype)
        source = _Source(
            code, x, indices, length_of(context, builder, signature.args[1], arguments[1]), width
        )
        entries = code.splat(builder.sitofp(builder.sub(stop, start), code.scalar))
        one = code.constant(1.0)
        divisor = builder.select(builder.icmp_signed(">", stop, start), entries, one)
        divisor = builder.select(mean, divisor, one)

        def tile(column: Any, count: int, left: Any) -> None:
            masks = _masks(code, count, left)
            with EntryLoop(builder, start, stop, [code.constant(0.0)] * count) as loop:
                place = source.begin(loop.index, column, count)
                factor = None
                if weighted:
                    factor = code.splat(builder.load(builder.gep(weight, [loop.index])))
                sums = []
                for i, total in enumerate(loop.carried):
                    values = code.load(x, builder.add(place, I64(i * code.lanes)), masks[i])
                    if factor is None:
                        sums.append(builder.fadd(total, values))
                    else:
                        sums.append(code.fma(factor, values, total))
                loop.carry(sums)
            at = builder.add(builder.mul(row, width), column)
            for i, total in enumerate(loop.carried):
                result = total if weighted else builder.fdiv(total, divisor)
                code.store(result, out, builder.add(at, I64(i * code.lanes)), masks[i])

        over_columns(code, width, tile)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def extreme_row(
    typing: Any,
    x: Any,
    indices: Any,
    out: Any,
    argument: Any,
    start: Any,
    stop: Any,
    width: Any,
    row: Any,
    order: Any,
) -> Any:
    """Largest (``order`` ">") or smallest ("<") value of a non-empty row, and its first entry.

    ``argument``: flat int32 or int64, entries of the pattern; the others as in :func:`sum_row`.
    """
    relation = order.literal_value
    signature = types.void(x, indices, out, argument, *[types.int64] * 4, order)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, indices, out, argument = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in range(4)
        )
        start, stop, width, row = arguments[4:8]
        code = VectorCode(builder, signature.args[0].dtype)
        source = _Source(
            code, x, indices, length_of(context, builder, signature.args[1], arguments[1]), width
        )
        position = ir.IntType(signature.args[3].dtype.bitwidth)

        def entry_lanes(entry: Any) -> Any:
            return code.splat(entry if position.width == 64 else builder.trunc(entry, position))

        def tile(column: Any, count: int, left: Any) -> None:
            masks = _masks(code, count, left)

            def load(entry: Any) -> list[Any]:
                place = source.begin(entry, column, count)
                return [
                    code.load(x, builder.add(place, I64(i * code.lanes)), masks[i])
                    for i in range(count)
                ]

            initial = load(start) + [entry_lanes(start)] * count
            with EntryLoop(builder, builder.add(start, I64(1)), stop, initial) as loop:
                best, where = [], []
                entry = entry_lanes(loop.index)
                for i, values in enumerate(load(loop.index)):
                    better = builder.fcmp_ordered(relation, values, loop.carried[i])
                    best.append(builder.select(better, values, loop.carried[i]))
                    where.append(builder.select(better, entry, loop.carried[count + i]))
                loop.carry(best + where)
            at = builder.add(builder.mul(row, width), column)
            for i in range(count):
                to = builder.add(at, I64(i * code.lanes))
                code.store(loop.carried[i], out, to, masks[i])
                code.store(loop.carried[count + i], argument, to, masks[i])

        over_columns(code, width, tile, _EXTREME_TILES)
        return context.get_dummy_value()

    return signature, generate


class _Source:
    """Where the rows of ``x`` lie that a row's entries name."""

    def __init__(self, code: VectorCode, x: Any, indices: Any, nnz: Any, width: Any) -> None:
        self._code, self._x, self._indices, self._width = code, x, indices, width
        self._last = code.builder.sub(nnz, I64(1))

    def begin(self, entry: Any, column: Any, count: int) -> Any:
        """Index in ``x`` of the entry's row from ``column`` on; a later entry's is requested."""
        builder = self._code.builder
        ahead = builder.add(entry, I64(_FAR if count <= 2 else _NEAR))
        ahead = builder.select(builder.icmp_signed("<", ahead, self._last), ahead, self._last)
        later = self._place(ahead, column)
        for i in range(0, count, 2 if self._code.narrow else 1):
            self._code.prefetch(self._x, builder.add(later, I64(i * self._code.lanes)))
        return self._place(entry, column)

    def _place(self, entry: Any, column: Any) -> Any:
        builder = self._code.builder
        source = builder.load(builder.gep(self._indices, [entry]))
        return builder.add(builder.mul(source, self._width), column)


def _masks(code: VectorCode, count: int, left: Any) -> list[Any]:
    """For every vector of a tile the mask of its lanes; None where all exist."""
    return [None] * (count - 1) + [code.first_lanes(left)]
