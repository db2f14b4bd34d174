"""How two checkpoints differ."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.manifest import CheckpointInfo, differing
from dtrain.checkpoint.store import CheckpointStore

_BATCH_BYTES = 256 << 20


@dataclass(frozen=True)
class Changed:
    """A tensor that is in both and differs.

    ``elements``: how many of ``of`` differ in their bits; ``max_abs``: the largest difference, as
    float64; None where dtype or shape differ, which ``forms`` then shows.
    """

    elements: int | None
    of: int
    max_abs: float | None
    forms: tuple[str, str]


@dataclass
class Difference:
    """What differs between a left and a right checkpoint; all empty where nothing does.

    ``identity``, ``progress``: fields of the manifest. The run's layout is not compared.
    """

    identity: list[str] = field(default_factory=builtins.list)
    progress: list[str] = field(default_factory=builtins.list)
    only_left: list[str] = field(default_factory=builtins.list)
    only_right: list[str] = field(default_factory=builtins.list)
    changed: dict[str, Changed] = field(default_factory=dict)
    equal: int = 0

    def __bool__(self) -> bool:
        return bool(
            self.identity or self.progress or self.only_left or self.only_right or self.changed
        )


def diff(
    left: CheckpointStore,
    left_info: CheckpointInfo,
    right: CheckpointStore,
    right_info: CheckpointInfo,
) -> Difference:
    """Compare two checkpoints, tensor by tensor and bit by bit.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    found = Difference()
    ours, theirs = left.progress(left_info), right.progress(right_info)
    found.identity = differing(ours.get("identity"), theirs.get("identity") or {})
    found.progress = differing(ours.get("progress"), theirs.get("progress") or {})
    forms, others = left.forms(left_info), right.forms(right_info)
    found.only_left = sorted({*forms} - {*others})
    found.only_right = sorted({*others} - {*forms})
    both = [name for name in forms if name in others]
    for name in both:
        if forms[name] != others[name]:
            count = _count(forms[name][1])
            found.changed[name] = Changed(
                None, count, None, (_shown(forms[name]), _shown(others[name]))
            )
    for batch in _batches([name for name in both if name not in found.changed], forms):
        a, b = left.load_tensors(left_info, batch), right.load_tensors(right_info, batch)
        for name in batch:
            change = _compare(a[name], b[name], _shown(forms[name]))
            if change is None:
                found.equal += 1
            else:
                found.changed[name] = change
    return found


def _compare(a: Tensor, b: Tensor, form: str) -> Changed | None:
    unequal = (_bytes(a) != _bytes(b)).any(-1)
    elements = int(unequal.sum())
    if not elements:
        return None
    max_abs = float((a.double() - b.double()).abs().nan_to_num(torch.inf, torch.inf).max())
    return Changed(elements, a.numel(), max_abs, (form, form))


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _batches(names: Sequence[str], forms: Mapping[str, Any]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        dtype, shape = forms[name]
        nbytes = _count(shape) * dtype.itemsize
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        yield batch


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _shown(form: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{str(form[0]).removeprefix('torch.')} {[*form[1]]}"
