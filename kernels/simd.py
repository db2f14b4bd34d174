"""Explicit vector code for compiled loops, where the compiler's own vectorisation falls short.

The intrinsics of the operators are written with :class:`VectorCode`, which emits LLVM vectors of
64 bytes. LLVM cuts them into what the processor has, and every operation is defined lane by lane
(fused multiply-add included), so no bit of a result depends on the processor's vector width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic as _intrinsic

cgutils: Any = _cgutils  # its functions are not annotated

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

BFLOAT16 = types.uint16
"""How arrays of bfloat16 are passed to compiled loops: by their bits."""

_LOG2_E = 1.4426950408889634074
# ln 2 in two parts, the first short enough that its product with a small integer is exact.
_LN2 = {
    32: (0.693359375, -2.12194440054690583e-4),
    64: (0.693147180369123816490, 1.90821492927058770e-10),
}
_EXP_TERMS = {32: 7, 64: 13}
_EXP_LOWEST = {32: -87.0, 64: -708.0}


def intrinsic(function: Callable[..., Any]) -> Any:
    """Make a typing function into an intrinsic; constants reach it as literal types."""
    return _intrinsic(prefer_literal=True)(function)


def data_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Pointer to the first element of a contiguous numba array."""
    if array_type.layout != "C":
        raise TypeError(f"vector code: expected a contiguous array, got {array_type}")
    return context.make_array(array_type)(context, builder, array).data


def length_of(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    """Number of elements of a numba array, an int64."""
    return context.make_array(array_type)(context, builder, array).nitems


@intrinsic
def prefetch(typing: Any, values: Any, index: Any) -> Any:
    """Ask for the cache line of ``values[index]``; any index is harmless."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = data_of(context, builder, signature.args[0], arguments[0])
        VectorCode(builder, types.float32).prefetch(data, arguments[1])
        return context.get_dummy_value()

    return types.void(values, types.int64), generate


@intrinsic
def copy_elements(
    typing: Any, to: Any, to_first: Any, source: Any, source_first: Any, count: Any
) -> Any:
    """Copy ``count`` elements between flat arrays of one type that do not overlap.

    To assign a slice checks and prepares so much that rows of 256 bytes took four times as long.
    """
    signature = types.void(to, types.int64, source, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = []
        for i in (0, 2):
            data = data_of(context, builder, signature.args[i], arguments[i])
            places.append(builder.gep(data, [arguments[i + 1]]))
        size = signature.args[0].dtype.bitwidth // 8
        cgutils.raw_memcpy(builder, *places, arguments[4], size)
        return context.get_dummy_value()

    return signature, generate


class VectorCode:
    """Emits operations on vectors of ``lanes`` floats at the builder's place.

    ``element``: numba's type of the elements in memory, float32, float64 or :data:`BFLOAT16`, which
    is computed in float32. ``lanes``: 16, or 8 of float64, if not given.
    """

    def __init__(self, builder: Any, element: Any, lanes: int | None = None) -> None:
        self.builder = builder
        self.narrow = element == BFLOAT16
        self.bits = 64 if element == types.float64 else 32
        self.lanes = lanes or 512 // self.bits
        self.scalar = ir.DoubleType() if self.bits == 64 else ir.FloatType()
        self.type = ir.VectorType(self.scalar, self.lanes)
        self.integer = ir.IntType(self.bits)
        self._suffix = f"v{self.lanes}f{self.bits}"

    def constant(self, value: float) -> Any:
        """The vector whose lanes are all ``value``."""
        # Rounded here: LLVM takes a float32 constant only if it is one exactly.
        exact = float(np.float32(value)) if self.bits == 32 else value
        return ir.Constant(self.type, [exact] * self.lanes)

    def splat(self, value: Any) -> Any:
        """A scalar of any type in every lane."""
        vector = ir.VectorType(value.type, self.lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
        return self._shuffle(first, [0] * self.lanes)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """``a * b + c`` with one rounding."""
        return self._call("fma", self.type, [a, b, c])

    def total(self, vector: Any) -> Any:
        """The sum of all lanes, a scalar: halves are added until one lane is left."""
        left = self.lanes
        while left > 1:
            left //= 2
            low = self._shuffle(vector, list(range(left)))
            high = self._shuffle(vector, list(range(left, 2 * left)))
            vector = self.builder.fadd(low, high)
        return self.builder.extract_element(vector, I32(0))

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger lane, ``b`` where either is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def first_lanes(self, count: Any) -> Any:
        """Mask of the first ``count`` (int64) lanes."""
        numbers = ir.Constant(ir.VectorType(I64, self.lanes), list(range(self.lanes)))
        return self.builder.icmp_signed("<", numbers, self.splat(count))

    def load(self, data: Any, index: Any, mask: Any = None) -> Any:
        """Elements from ``index`` on; lanes outside the mask are zero and not read."""
        if not self.narrow:
            return self.load_as(self.type, data, index, mask)
        raw = self.load_as(ir.VectorType(I16, self.lanes), data, index, mask)
        wide = ir.VectorType(I32, self.lanes)
        shifted = self.builder.shl(
            self.builder.zext(raw, wide), ir.Constant(wide, [16] * self.lanes)
        )
        return self.builder.bitcast(shifted, self.type)

    def load_as(self, vector: Any, data: Any, index: Any, mask: Any = None) -> Any:
        """A vector of another type; as :meth:`load`."""
        pointer = self._pointer(data, index, vector)
        align, suffix = _layout(vector)
        if mask is None:
            return self.builder.load(pointer, align=align)
        arguments = [pointer, I32(align), mask, ir.Constant(vector, None)]
        return self._call(f"masked.load.{suffix}.p0", vector, arguments, named=True)

    def stream(self, value: Any, data: Any, index: Any) -> None:
        """Write a whole vector past the caches; ``index`` is at a multiple of its size."""
        pointer = self._pointer(data, index, value.type)
        written = self.builder.store(value, pointer, align=self.lanes * self.bits // 8)
        written.set_metadata("nontemporal", self.builder.module.add_metadata([I32(1)]))

    def store(self, value: Any, data: Any, index: Any, mask: Any = None) -> None:
        """Write a vector of any type from ``index`` on; lanes outside the mask are left alone."""
        pointer = self._pointer(data, index, value.type)
        align, suffix = _layout(value.type)
        if mask is None:
            self.builder.store(value, pointer, align=align)
            return
        arguments = [value, pointer, I32(align), mask]
        self._call(f"masked.store.{suffix}.p0", ir.VoidType(), arguments, named=True)

    def prefetch(self, data: Any, index: Any) -> None:
        """Ask for the cache line of an element that will be read soon."""
        pointer = self._pointer(data, index, I8)
        self._call("prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(3), I32(1)], named=True)

    def prefetch_row(self, data: Any, begin: Any, size: Any) -> None:
        """The same for all lines of the ``size`` (int64) elements from ``begin`` on."""
        builder = self.builder
        line = I64(64 // (2 if self.narrow else self.bits // 8))
        lines = builder.udiv(builder.add(size, builder.sub(line, I64(1))), line)
        with cgutils.for_range(builder, lines) as loop:
            self.prefetch(data, builder.add(begin, builder.mul(loop.index, line)))

    def exp(self, x: Any) -> Any:
        """``e ** x`` for ``x`` of at most 0, to about 1 unit in the last place.

        Cody and Waite's reduction to ``2 ** n * e ** r`` with ``|r| <= ln(2) / 2`` and Taylor's
        polynomial of r; values below the smallest normal number become it. Not a number stays so.
        """
        builder, given = self.builder, x
        x = self.maximum(x, self.constant(_EXP_LOWEST[self.bits]))
        scaled = builder.fmul(x, self.constant(_LOG2_E))
        n = self._call("rint", self.type, [scaled])
        high, low = _LN2[self.bits]
        r = self.fma(n, self.constant(-high), x)
        r = self.fma(n, self.constant(-low), r)
        terms, factor = [1.0], 1.0
        for k in range(1, _EXP_TERMS[self.bits] + 1):
            factor /= k
            terms.append(factor)
        value = self.constant(terms[-1])
        for term in reversed(terms[:-1]):
            value = self.fma(value, r, self.constant(term))
        # Multiply by 2 ** n: add n to the exponent's bits.
        integers = ir.VectorType(self.integer, self.lanes)
        mantissa = 52 if self.bits == 64 else 23
        shift = ir.Constant(integers, [mantissa] * self.lanes)
        exponent = builder.shl(builder.fptosi(n, integers), shift)
        power = builder.bitcast(builder.add(builder.bitcast(value, integers), exponent), self.type)
        return builder.select(builder.fcmp_unordered("uno", given, given), given, power)

    def tile_masks(self, count: int, left: Any) -> list[Any]:
        """For each of a tile's vectors the mask of its lanes, of which the last has ``left``; None
        where all exist."""
        return [None] * (count - 1) + [self.first_lanes(left)]

    def mix64(self, key: Any, first: Any) -> Any:
        """Draws of :func:`dtrain.kernels.rng.mix64_jit` for the counters from ``first`` on.

        ``key``, ``first``: int64. The product with the counter is that of the first one, and a
        constant for each lane.
        """
        builder, golden = self.builder, 0x9E3779B97F4A7C15

        def lanes(values: list[int]) -> Any:
            return ir.Constant(ir.VectorType(I64, self.lanes), [v % 2**64 for v in values])

        def mixed(z: Any, shift: int) -> Any:
            return builder.xor(z, builder.lshr(z, lanes([shift] * self.lanes)))

        begin = builder.add(key, builder.mul(builder.add(first, I64(1)), I64(golden)))
        z = builder.add(self.splat(begin), lanes([lane * golden for lane in range(self.lanes)]))
        z = builder.mul(mixed(z, 30), lanes([0xBF58476D1CE4E5B9] * self.lanes))
        z = builder.mul(mixed(z, 27), lanes([0x94D049BB133111EB] * self.lanes))
        return mixed(z, 31)

    def _pointer(self, data: Any, index: Any, to: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [index]), to.as_pointer())

    def _shuffle(self, vector: Any, pattern: list[int]) -> Any:
        nothing = ir.Constant(vector.type, ir.Undefined)
        chosen = ir.Constant(ir.VectorType(I32, len(pattern)), pattern)
        return self.builder.shuffle_vector(vector, nothing, chosen)

    def _call(self, name: str, result: Any, arguments: list[Any], named: bool = False) -> Any:
        function = ir.FunctionType(result, [a.type for a in arguments])
        full = f"llvm.{name}" if named else f"llvm.{name}.{self._suffix}"
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, function, full), arguments
        )


def _layout(vector: Any) -> tuple[int, str]:
    """Alignment of a vector's elements in bytes, and how intrinsics name its type."""
    element = vector.element
    if isinstance(element, ir.IntType):
        return element.width // 8, f"v{vector.count}i{element.width}"
    bits = 64 if isinstance(element, ir.DoubleType) else 32
    return bits // 8, f"v{vector.count}f{bits}"


class EntryLoop:
    """A loop over entries ``start .. stop - 1`` that carries vectors from turn to turn.

    Between :meth:`__enter__` and :meth:`__exit__`, ``index`` is the entry and ``carried`` the
    vectors; :meth:`carry` gives their next values. After it, ``carried`` holds the results.
    """

    def __init__(self, builder: Any, start: Any, stop: Any, initial: list[Any]) -> None:
        self._builder, self._stop = builder, stop
        before = builder.block
        self._head = builder.append_basic_block("entries.head")
        self._body = builder.append_basic_block("entries.body")
        self._done = builder.append_basic_block("entries.done")
        builder.branch(self._head)
        builder.position_at_end(self._head)
        self.index = builder.phi(I64)
        self.index.add_incoming(start, before)
        self.carried = []
        for value in initial:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            self.carried.append(phi)
        self._next: list[Any] = []

    def __enter__(self) -> EntryLoop:
        inside = self._builder.icmp_signed("<", self.index, self._stop)
        self._builder.cbranch(inside, self._body, self._done)
        self._builder.position_at_end(self._body)
        return self

    def carry(self, values: list[Any]) -> None:
        """The carried vectors of the next turn."""
        self._next = values

    def __exit__(self, *_: object) -> None:
        following = self._builder.add(self.index, I64(1))
        self.index.add_incoming(following, self._builder.block)
        for phi, value in zip(self.carried, self._next, strict=True):
            phi.add_incoming(value, self._builder.block)
        self._builder.branch(self._head)
        self._builder.position_at_end(self._done)


def over_columns(
    code: VectorCode,
    width: Any,
    emit: Callable[[Any, int, Any], None],
    tiles: Sequence[int] = (16, 8, 4, 3, 2, 1),
) -> None:
    """Cut ``width`` (int64) columns into tiles of vectors and emit the code of each size.

    ``emit(column, count, left)`` is called once a size: a tile begins at ``column`` and has
    ``count`` vectors, of whose last one only the first ``left`` lanes exist.
    """
    builder, lanes = code.builder, code.lanes
    place = cgutils.alloca_once_value(builder, I64(0))
    for count in tiles:
        head, body, done = (
            builder.append_basic_block(f"columns{count}.{part}")
            for part in ("head", "body", "done")
        )
        builder.branch(head)
        builder.position_at_end(head)
        column = builder.load(place)
        last = builder.sub(builder.sub(width, column), I64((count - 1) * lanes))
        builder.cbranch(builder.icmp_signed(">", last, I64(0)), body, done)
        builder.position_at_end(body)
        left = builder.select(builder.icmp_signed("<", last, I64(lanes)), last, I64(lanes))
        emit(column, count, left)
        builder.store(builder.add(column, I64(count * lanes)), place)
        builder.branch(head)
        builder.position_at_end(done)
