"""How an operator is described to ``torch.library``: schema, computation, shapes and gradients.

A :class:`~dtrain.kernels.csr.Csr` is no tensor, so operators over a graph begin with the five
tensors of a :class:`Pattern`. What computes is an operator too, in backward passes as well: a
compiler that traces them with tensors of no content sees into none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.kernels.csr import Csr

Gradients = Mapping[str, Tensor]


class Pattern(NamedTuple):
    """The tensors of a pattern [num_rows, num_cols] and of its transpose, all int64.

    ``indptr`` [num_rows + 1], ``indices`` [nnz], ``t_indptr`` [num_cols + 1], ``t_indices`` [nnz];
    ``perm`` [nnz]: which of the pattern's entries each of the transpose's is. Its sizes may be
    symbols.
    """

    indptr: Tensor
    indices: Tensor
    t_indptr: Tensor
    t_indices: Tensor
    perm: Tensor

    @classmethod
    def of(cls, csr: Csr) -> Pattern:
        """The tensors that ``csr`` holds, and those of its transpose."""
        transposed, perm = csr.transpose()
        return cls(csr.indptr, csr.indices, transposed.indptr, transposed.indices, perm)

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def num_cols(self) -> int:
        return self.t_indptr.shape[0] - 1

    @property
    def nnz(self) -> int:
        return self.indices.shape[0]

    def csr(self) -> Csr:
        """The structure itself, for a computation."""
        transposed = Csr(self.t_indptr, self.t_indices, self.num_rows)
        return Csr(self.indptr, self.indices, self.num_cols, (transposed, self.perm))


@dataclass(frozen=True)
class Operator:
    """One operator ``dtrain::<name>``.

    ``arguments``, ``results``: their part of the schema; with ``pattern`` the tensors of a
    :class:`Pattern` come before, and functions get that object for them. ``compute(...)`` gives the
    results, none of which may be an argument; ``shapes(...)`` the same of tensors without content.

    ``gradients(kept, *grads)``: by argument, what is asked for. ``kept`` has the tensors named in
    ``saved`` (arguments or results), the pattern and all arguments that are no tensors under their
    names, the arguments' shapes by name as ``shapes`` and the names of those that a gradient is
    asked for as ``asked``. Results in ``constant`` have no gradient. An operator without
    ``gradients`` is a part of others' backward passes.
    """

    name: str
    arguments: str
    results: str
    compute: Callable[..., Any]
    shapes: Callable[..., Any]
    gradients: Callable[..., Gradients] | None = None
    saved: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    pattern: bool = True

    def register(self) -> None:
        """Make it known to torch, which refuses to be told twice."""
        name = f"dtrain::{self.name}"
        fields = [f"Tensor {field}" for field in Pattern._fields] if self.pattern else []
        schema = f"({', '.join([*fields, self.arguments])}) -> {self.results}"
        torch.library.custom_op(name, self._taking(self.compute), mutates_args=(), schema=schema)
        torch.library.register_fake(name, self._taking(self.shapes))
        if self.gradients is not None:
            torch.library.register_autograd(name, self._backward, setup_context=self._keep)

    def _taking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of a pattern as one of its tensors."""
        if not self.pattern:
            return function
        fields = len(Pattern._fields)
        return lambda *given: function(Pattern(*given[:fields]), *given[fields:])

    def _names(self) -> tuple[list[str], list[str]]:
        """Names of arguments and results, in order."""
        schema = getattr(torch.ops.dtrain, self.name).default._schema
        return [a.name for a in schema.arguments], [r.name for r in schema.returns]

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        names, results = self._names()
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip(names, inputs, strict=True))
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        ctx.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        ctx.rest = {name: value for name, value in values.items() if name not in tensors}
        values |= zip(results, outputs, strict=True)
        ctx.mark_non_differentiable(*(values[name] for name in self.constant))
        ctx.save_for_backward(*(values[name] for name in self._saved()))

    def _saved(self) -> tuple[str, ...]:
        return (*Pattern._fields, *self.saved) if self.pattern else self.saved

    def _backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        assert self.gradients is not None
        names, _ = self._names()
        saved = dict(zip(self._saved(), ctx.saved_tensors, strict=True))
        kept = SimpleNamespace(**(ctx.rest | saved), shapes=ctx.shapes)
        if self.pattern:
            kept.pattern = Pattern(*(saved[field] for field in Pattern._fields))
        needs = zip(names, ctx.needs_input_grad, strict=True)
        kept.asked = {name for name, needed in needs if needed}
        found = self.gradients(kept, *grads)
        return tuple(found.get(name) for name in names)
