"""Inner loop of the sampled dense-dense product: one row of the pattern, entry by entry."""

from __future__ import annotations

from typing import Any

from numba import types

from dtrain.kernels.simd import I64, EntryLoop, VectorCode, data_of, intrinsic, length_of

_AHEAD = 16  # entries between the request for a row of b and its use


@intrinsic
def dot_row(
    typing: Any,
    a: Any,
    b: Any,
    indices: Any,
    out: Any,
    start: Any,
    stop: Any,
    width: Any,
    row: Any,
) -> Any:
    """``out[k] = a[row] . b[indices[k]]`` for entries k in [start, stop); all arrays are flat.

    Every lane adds up its columns, then the lanes are added in halves: the same order always.
    """
    signature = types.void(a, b, indices, out, *[types.int64] * 4)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, indices, out = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in range(4)
        )
        start, stop, width, row = arguments[4:]
        code = VectorCode(builder, signature.args[0].dtype)
        nnz = length_of(context, builder, signature.args[2], arguments[2])
        last = builder.sub(nnz, I64(1))
        vectors = builder.udiv(builder.add(width, I64(code.lanes - 1)), I64(code.lanes))
        home = builder.mul(row, width)
        with EntryLoop(builder, start, stop, []) as entries:
            ahead = builder.add(entries.index, I64(_AHEAD))
            ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
            later = builder.load(builder.gep(indices, [ahead]))
            code.prefetch_row(b, builder.mul(later, width), width)
            source = builder.load(builder.gep(indices, [entries.index]))
            far = builder.mul(source, width)
            with EntryLoop(builder, I64(0), vectors, [code.constant(0.0)]) as parts:
                column = builder.mul(parts.index, I64(code.lanes))
                mask = code.first_lanes(builder.sub(width, column))
                left = code.load(a, builder.add(home, column), mask)
                right = code.load(b, builder.add(far, column), mask)
                parts.carry([code.fma(left, right, parts.carried[0])])
            builder.store(code.total(parts.carried[0]), builder.gep(out, [entries.index]))
        return context.get_dummy_value()

    return signature, generate
