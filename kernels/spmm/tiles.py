"""Inner loops of the sparse-dense products: rows of a pattern times all columns of ``x``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from dtrain.kernels.simd import I64, data_of, intrinsic
from dtrain.kernels.spmm.walk import Place, Reduction, Tile, Vectors, Walk


@intrinsic
def sum_rows(
    typing: Any,
    x: Any,
    indices: Any,
    indptr: Any,
    weight: Any,
    out: Any,
    first: Any,
    end: Any,
    width: Any,
    mean: Any,
    begin: Any,
    stride: Any,
    past_caches: Any,
    lanes: Any,
) -> Any:
    """``out[row] = sum(weight[k] * x[indices[k]])`` for the entries k of rows first .. end - 1.

    All arrays are flat, ``indices`` and ``indptr`` int32 or int64; ``weight`` may be numba's None
    for ones. With ``mean`` (bool) the sum is divided by the number of entries. For ``begin``,
    ``stride`` and ``past_caches`` see :class:`dtrain.kernels.spmm.walk.Place`; ``lanes`` is "whole"
    where all vectors are, or "some".
    """
    weighted = not isinstance(weight, types.NoneType)
    flag = types.boolean
    numbers = types.int64
    signature = types.void(
        x, indices, indptr, weight, out, *[numbers] * 3, flag, numbers, numbers, flag, lanes
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, distance, past = arguments[9:12]
        to = Place(at, distance, past, whole=lanes.literal_value == "whole")
        walk = Walk(context, builder, signature, arguments, range(5, 8), to=to)
        code, mean = walk.code, arguments[8]
        out = data_of(context, builder, signature.args[4], arguments[4])
        if weighted:
            weight = data_of(context, builder, signature.args[3], arguments[3])

        def begin(start: Any, stop: Any, tile: Tile) -> Vectors:
            return [code.constant(0.0)] * tile.count

        def add(entry: Any, tile: Tile, sums: Vectors) -> Vectors:
            values = tile.load(entry)
            if not weighted:
                return [builder.fadd(*pair) for pair in zip(sums, values, strict=True)]
            factor = code.splat(builder.load(builder.gep(weight, [entry])))
            return [code.fma(factor, *pair) for pair in zip(values, sums, strict=True)]

        def finish(start: Any, stop: Any, sums: Vectors, store: Callable[..., None]) -> None:
            if weighted:
                store(out, sums)
                return
            count = builder.sub(stop, start)
            divide = builder.and_(mean, builder.icmp_signed(">", count, I64(1)))
            with builder.if_else(divide) as (then, otherwise):
                with then:
                    entries = code.splat(builder.sitofp(count, code.scalar))
                    store(out, [builder.fdiv(total, entries) for total in sums])
                with otherwise:
                    store(out, sums)

        walk.emit(Reduction(begin, add, finish))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def extreme_rows(
    typing: Any,
    x: Any,
    indices: Any,
    indptr: Any,
    out: Any,
    argument: Any,
    first: Any,
    end: Any,
    width: Any,
    order: Any,
) -> Any:
    """Largest (``order`` ">") or smallest ("<") values of rows first .. end - 1, and their entries.

    ``argument``: flat int32 or int64, the first entry of the pattern that has the value and -1 in
    an empty row, or numba's None where nobody asks for it; ``indices`` has an element at least;
    all else as in :func:`sum_rows`. Empty rows become 0.
    """
    relation = order.literal_value
    wanted = not isinstance(argument, types.NoneType)
    signature = types.void(x, indices, indptr, out, argument, *[types.int64] * 3, order)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        walk = Walk(context, builder, signature, arguments, range(5, 8))
        code = walk.code
        out = data_of(context, builder, signature.args[3], arguments[3])
        if wanted:
            argument = data_of(context, builder, signature.args[4], arguments[4])
            position = ir.IntType(signature.args[4].dtype.bitwidth)

        def entry_lanes(entry: Any) -> Any:
            return code.splat(entry if position.width == 64 else builder.trunc(entry, position))

        def begin(start: Any, stop: Any, tile: Tile) -> Vectors:
            # The entry of an empty row is any: its value is not used.
            found = tile.load(builder.select(builder.icmp_signed("<", start, stop), start, I64(0)))
            return found + [entry_lanes(start)] * tile.count if wanted else found

        def better(entry: Any, tile: Tile, carried: Vectors) -> Vectors:
            values = tile.load(entry)
            best, where = [], []
            for i, value in enumerate(values):
                wins = builder.fcmp_ordered(relation, value, carried[i])
                best.append(builder.select(wins, value, carried[i]))
                if wanted:
                    where.append(builder.select(wins, entry_lanes(entry), carried[tile.count + i]))
            return best + where

        def finish(start: Any, stop: Any, carried: Vectors, store: Callable[..., None]) -> None:
            some = builder.icmp_signed("<", start, stop)
            count = len(carried) // (2 if wanted else 1)
            store(out, [builder.select(some, v, code.constant(0.0)) for v in carried[:count]])
            if wanted:
                none = code.splat(ir.Constant(position, -1))
                store(argument, [builder.select(some, v, none) for v in carried[count:]])

        walk.emit(Reduction(begin, better, finish))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def chosen_rows(
    typing: Any,
    x: Any,
    indices: Any,
    indptr: Any,
    entries: Any,
    argument: Any,
    out: Any,
    first: Any,
    end: Any,
    width: Any,
) -> Any:
    """``out[row] = sum(x[indices[k]])`` of those elements whose ``argument`` is ``entries[k]``.

    ``entries``: int64 [nnz]; ``argument``: flat int32 or int64 as large as ``x``; all else as in
    :func:`sum_rows`.
    """
    signature = types.void(x, indices, indptr, entries, argument, out, *[types.int64] * 3)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entries, argument, out = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in (3, 4, 5)
        )
        walk = Walk(context, builder, signature, arguments, range(6, 9), [argument])
        code = walk.code
        position = ir.IntType(signature.args[4].dtype.bitwidth)
        positions = ir.VectorType(position, code.lanes)

        def begin(start: Any, stop: Any, tile: Tile) -> Vectors:
            return [code.constant(0.0)] * tile.count

        def add(entry: Any, tile: Tile, sums: Vectors) -> Vectors:
            own = builder.load(builder.gep(entries, [entry]))
            own = code.splat(own if position.width == 64 else builder.trunc(own, position))
            places, values = tile.load_as(positions, entry, argument), tile.load(entry)
            added = []
            for place, value, total in zip(places, values, sums, strict=True):
                chosen = builder.icmp_signed("==", place, own)
                added.append(builder.select(chosen, builder.fadd(total, value), total))
            return added

        def finish(start: Any, stop: Any, sums: Vectors, store: Callable[..., None]) -> None:
            store(out, sums)

        walk.emit(Reduction(begin, add, finish))
        return context.get_dummy_value()

    return signature, generate
