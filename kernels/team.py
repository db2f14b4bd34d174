"""Compiled loops on torch's OpenMP threads, entered without the interpreter.

:func:`dtrain.kernels.threads.over_rows` calls Python on every thread: a product of half a
millisecond waits as long again for the interpreter's lock and for thread states, more where the
caches hold other things. Here one compiled call starts the threads and each of them runs compiled
code alone, which takes its ranges of rows by adding to a counter.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from dtrain.kernels.simd import I8, I32, I64, cgutils, data_of, intrinsic

_POINTER = I8.as_pointer()
_BODY = ir.FunctionType(ir.VoidType(), [_POINTER])
_PARALLEL = ir.FunctionType(ir.VoidType(), [_BODY.as_pointer(), _POINTER, I32, I32])


@intrinsic
def on_team(typing: Any, parallel: Any, threads: Any, function: Any, arguments: Any) -> Any:
    """Call ``function(*arguments)`` on each of ``threads`` threads and wait for all of them.

    ``parallel``: address of ``GOMP_parallel`` (:func:`dtrain.kernels.threads.team_address`);
    ``function``: compiled, without a result, and unable to raise: nobody could hear it;
    ``arguments``: a tuple, the same for every thread.
    """
    signature = types.void(types.intp, types.intp, function, arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        parallel, threads, _, packed = values
        callee, inner = _resolved(context, signature.args[2], signature.args[3])
        name = f"team.{callee.mangled_name}"
        body = ir.Function(builder.module, _BODY, builder.module.get_unique_name(name))
        body.linkage = "internal"
        code = ir.IRBuilder(body.append_basic_block("entry"))
        given = code.load(code.bitcast(body.args[0], packed.type.as_pointer()))
        context.call_internal_no_propagate(code, callee, inner, cgutils.unpack_tuple(code, given))
        code.ret_void()

        kept = builder.bitcast(cgutils.alloca_once_value(builder, packed), _POINTER)
        start = builder.inttoptr(parallel, _PARALLEL.as_pointer())
        builder.call(start, [body, kept, builder.trunc(threads, I32), I32(0)])
        return context.get_dummy_value()

    return signature, generate


def _resolved(context: Any, function: Any, arguments: Any) -> Any:
    """What the compiled function is called and takes, linked to the code being made."""
    signature = function.get_call_type(context.typing_context, arguments.types, {})
    compiled = function.dispatcher.get_compile_result(signature)
    context.add_linking_libs([compiled.library])
    return compiled.fndesc, signature


@intrinsic
def next_turn(typing: Any, counter: Any) -> Any:
    """Add one to ``counter[0]`` (int64), which threads share; returns what it was.

    It also orders what a thread wrote past the caches before anything that follows, so a loop's
    last turn, of which nothing is left, comes after all of its results.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = data_of(context, builder, signature.args[0], arguments[0])
        return builder.atomic_rmw("add", place, I64(1), "seq_cst")

    return types.int64(counter), generate
