"""The exact gradient sum: the same bits whoever computed what, in any order or grouping.

Every microbatch's gradient of a parameter tensor is rounded to a multiple of one power of two
``q = 2**(e + ceil(log2 M) - 52)``, where ``maxabs < 2**e`` over all microbatches of all holders.
Then every partial sum of at most M terms is a multiple of ``q`` below ``2**53 q``, hence exact in
float64, and addition becomes associative. The rounding error of a term is at most ``q / 2``, that
is ``2**-53 * M`` of the largest entry: far under float32's own ``2**-24``.

Holders exchange either what they computed, in one round, or the largest entries and then the sums,
in two. One round is less where the gradients are small, since to wait for each other takes longer
than to add; the terms are the same, and so is the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dtrain.errors import DtrainError

Reduce = Callable[[Tensor], Tensor]
"""An in-place all-reduce over a stage's holders (MAX or SUM) that returns its argument."""

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Every holder's tensor, alike but for the first dimension."""

GATHERED_BYTES = 1 << 20
"""Gradients of all microbatches together that are exchanged in one round."""


class NonFiniteGradientError(DtrainError):
    """A microbatch's gradient holds NaN or infinity."""


def exact_sum(
    grads: Mapping[int, Sequence[Tensor | None]],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    num_microbatches: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
    gather: Gather | None = None,
) -> list[Tensor]:
    """Sum the gradients of a stage over all microbatches and holders.

    ``grads[m][i]``: gradient of ``parameters[i]`` (its shape, any float dtype) from microbatch
    ``m`` as computed here; None where the parameter was not used, or somebody else computed it. A
    holder that computed nothing passes an empty mapping and still takes part. ``gather``: for
    gradients of at most :data:`GATHERED_BYTES`; all holders have one or none has. Returns float32
    tensors shaped as the parameters, bit-identical on every holder and with ``gather`` or without.

    Raises:
        NonFiniteGradientError: some holder's gradient is not finite (raised on every holder).
    """
    sizes = [p.numel() for p in parameters]
    device = parameters[0].device
    total = sum(sizes)
    rows = [_flat(of, sizes, device) for _, of in sorted(grads.items())]
    local = torch.stack(rows) if rows else torch.zeros(0, total, device=device)
    if 4 * num_microbatches * total > GATHERED_BYTES:
        gather = None
    if gather is not None:
        local = torch.cat(list(gather(local)))
    maxabs = _largest(local, sizes)
    if gather is None:
        maxabs = reduce_max(maxabs)
    largest_of = maxabs.tolist()
    for name, largest in zip(names, largest_of, strict=True):
        if not math.isfinite(largest):
            raise NonFiniteGradientError(
                f"gradient of {name}: expected finite numbers, got NaN or infinity; "
                "lower the learning rate or check the features"
            )
    steps = [quantum(largest, num_microbatches) for largest in largest_of]
    # Powers of two: to multiply by them, or by their inverses, is exact.
    step = torch.repeat_interleave(
        torch.tensor(steps, dtype=torch.float64, device=device),
        torch.tensor(sizes, device=device),
        output_size=total,
    )
    if gather is not None:
        acc = local.double().div_(step).round_().sum(0)
    else:
        acc = torch.zeros(total, dtype=torch.float64, device=device)
        for row in local:
            acc += row.double().div_(step).round_()
        acc = reduce_sum(acc)
    flat = acc.mul_(step).float()
    return [
        part.reshape(parameter.shape)
        for part, parameter in zip(torch.split(flat, sizes), parameters, strict=True)
    ]


def _largest(local: Tensor, sizes: Sequence[int]) -> Tensor:
    """float64 [tensors]: each tensor's largest absolute entry, infinity where one is none."""
    if not len(local):
        return torch.zeros(len(sizes), dtype=torch.float64, device=local.device)
    parts = torch.split(local.abs().amax(0), list(sizes))
    zero = local.new_zeros(())
    largest = torch.stack([part.amax() if part.numel() else zero for part in parts]).double()
    # A NaN would get lost in an all-reduce MAX; infinity does not.
    return torch.where(torch.isfinite(largest), largest, math.inf)


def quantum(maxabs: float, num_microbatches: int) -> float:
    """The power of two to whose multiples gradients up to ``maxabs`` are rounded."""
    if maxabs == 0.0:
        return 1.0
    _, exponent = math.frexp(maxabs)
    return math.ldexp(1.0, exponent + (num_microbatches - 1).bit_length() - 52)


def _flat(grads: Sequence[Tensor | None], sizes: Sequence[int], device: torch.device) -> Tensor:
    parts = [
        g.detach().reshape(-1).float() if g is not None else torch.zeros(n, device=device)
        for g, n in zip(grads, sizes, strict=True)
    ]
    return torch.cat(parts)
