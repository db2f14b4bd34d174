"""The exact gradient sum: the same bits whoever computed what, in any order or grouping.

Every microbatch's gradient of a parameter tensor is rounded to a multiple of one power of two
``q = 2**(e + ceil(log2 M) - 52)``, where ``maxabs < 2**e`` over all microbatches of all holders.
Then every partial sum of at most M terms is a multiple of ``q`` below ``2**53 q``, hence exact in
float64, and addition becomes associative. The rounding error of a term is at most ``q / 2``, that
is ``2**-53 * M`` of the largest entry: far under float32's own ``2**-24``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dtrain.errors import DtrainError

Reduce = Callable[[Tensor], Tensor]
"""An in-place all-reduce over a stage's holders (MAX or SUM) that returns its argument."""


class NonFiniteGradientError(DtrainError):
    """A microbatch's gradient holds NaN or infinity."""


def exact_sum(
    grads: Mapping[int, Sequence[Tensor | None]],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    num_microbatches: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
) -> list[Tensor]:
    """Sum the gradients of a stage over all microbatches and holders.

    ``grads[m][i]``: gradient of ``parameters[i]`` (its shape, any float dtype) from microbatch
    ``m`` as computed here; None where the parameter was not used. A holder that computed nothing
    passes an empty mapping and still takes part. Returns float32 tensors shaped as the parameters,
    bit-identical on every holder.

    Raises:
        NonFiniteGradientError: some holder's gradient is not finite (raised on every holder).
    """
    sizes = [p.numel() for p in parameters]
    device = parameters[0].device
    total = sum(sizes)
    rows = [_flat(grads[m], sizes, device) for m in sorted(grads)]
    local = torch.stack(rows) if rows else torch.zeros(0, total, dtype=torch.float32, device=device)
    maxabs = torch.zeros(len(sizes), dtype=torch.float64, device=device)
    for i, part in enumerate(_columns(local, sizes)):
        if part.numel():
            # A NaN would get lost in an all-reduce MAX; infinity does not.
            largest = part.abs().amax().double()
            maxabs[i] = torch.where(torch.isfinite(largest), largest, math.inf)
    maxabs = reduce_max(maxabs)
    largest_of = maxabs.tolist()
    for name, largest in zip(names, largest_of, strict=True):
        if not math.isfinite(largest):
            raise NonFiniteGradientError(
                f"gradient of {name}: expected finite numbers, got NaN or infinity; "
                "lower the learning rate or check the features"
            )
    steps = [quantum(largest, num_microbatches) for largest in largest_of]
    acc = torch.zeros(total, dtype=torch.float64, device=device)
    for part, out, q in zip(_columns(local, sizes), _columns(acc, sizes), steps, strict=True):
        for row in part:
            out += (row.double() / q).round_()
    acc = reduce_sum(acc)
    result = []
    for part, q, parameter in zip(_columns(acc, sizes), steps, parameters, strict=True):
        result.append((part * q).float().reshape(parameter.shape))
    return result


def quantum(maxabs: float, num_microbatches: int) -> float:
    """The power of two to whose multiples gradients up to ``maxabs`` are rounded."""
    if maxabs == 0.0:
        return 1.0
    _, exponent = math.frexp(maxabs)
    return math.ldexp(1.0, exponent + (num_microbatches - 1).bit_length() - 52)


def _columns(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The last dimension's parts of the given sizes, as views."""
    ends = list(itertools.accumulate(sizes))
    return [flat[..., end - n : end] for n, end in zip(sizes, ends, strict=True)]


def _flat(grads: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device) -> Tensor:
    parts = [
        g.detach().reshape(-1).float() if g is not None else torch.zeros(n, device=device)
        for g, n in zip(grads, sizes, strict=True)
    ]
    return torch.cat(parts)
