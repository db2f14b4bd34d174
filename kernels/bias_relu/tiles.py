"""Inner loops of bias and rectifier: one row, all columns."""

from __future__ import annotations

from typing import Any

from numba import types

from dtrain.kernels.simd import I64, VectorCode, data_of, intrinsic, over_columns

_TILES = (4, 1)


@intrinsic
def activate_row(typing: Any, rows: Any, bias: Any, at: Any, width: Any) -> Any:
    """``h = relu(h + bias)`` for the row at ``at`` of flat ``rows``; not a number stays so."""
    signature = types.void(rows, bias, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, bias = (data_of(context, builder, signature.args[i], arguments[i]) for i in (0, 1))
        at, width = arguments[2:]
        code = VectorCode(builder, signature.args[0].dtype)

        def tile(column: Any, count: int, left: Any) -> None:
            for place, lanes in _vectors(code, column, count, left):
                to = builder.add(at, place)
                value = builder.fadd(code.load(rows, to, lanes), code.load(bias, place, lanes))
                code.store(_where_positive(code, value, value), rows, to, lanes)

        over_columns(code, width, tile, _TILES)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def gradient_row(
    typing: Any, rows: Any, grad: Any, out: Any, sums: Any, at: Any, sums_at: Any, width: Any
) -> Any:
    """``out = grad`` where the result in ``rows`` is not zero, else 0, and added to ``sums``.

    All arrays are flat; the row begins at ``at`` and its sums at ``sums_at``.
    """
    signature = types.void(rows, grad, out, sums, types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, grad, out, sums = (
            data_of(context, builder, signature.args[i], arguments[i]) for i in range(4)
        )
        at, sums_at, width = arguments[4:]
        code = VectorCode(builder, signature.args[0].dtype)

        def tile(column: Any, count: int, left: Any) -> None:
            for place, lanes in _vectors(code, column, count, left):
                to, total = builder.add(at, place), builder.add(sums_at, place)
                given = code.load(grad, to, lanes)
                value = _where_positive(code, code.load(rows, to, lanes), given)
                code.store(value, out, to, lanes)
                code.store(builder.fadd(code.load(sums, total, lanes), value), sums, total, lanes)

        over_columns(code, width, tile, _TILES)
        return context.get_dummy_value()

    return signature, generate


def _where_positive(code: VectorCode, condition: Any, value: Any) -> Any:
    """``value`` where the condition is not at most zero, else zero."""
    zero = code.constant(0.0)
    return code.builder.select(code.builder.fcmp_ordered("<=", condition, zero), zero, value)


def _vectors(code: VectorCode, column: Any, count: int, left: Any) -> list[tuple[Any, Any]]:
    """Where the vectors of a tile begin, and the masks of their lanes; None where all exist."""
    places = [code.builder.add(column, I64(i * code.lanes)) for i in range(count)]
    return list(zip(places, code.tile_masks(count, left), strict=True))
