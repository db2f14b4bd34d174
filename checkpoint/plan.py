"""Who writes what: DCP's planning, done by every worker alike from everybody's list of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dtrain.checkpoint.errors import CheckpointError

Form = tuple[str, list[int]]
"""A tensor's dtype and shape, as JSON holds them."""

_DTYPE = re.compile(r"[a-z0-9_]+")


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Name to dtype and shape of each tensor, as JSON.

    Raises:
        CheckpointError: one is no dense tensor.
    """
    forms: dict[str, Form] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise CheckpointError(f"{name}: expected a dense tensor")
        forms[name] = (str(tensor.dtype).removeprefix("torch."), [*tensor.shape])
    return forms


def plan_save(forms: Sequence[Mapping[str, Form]]) -> tuple[list[SavePlan], Metadata]:
    """A plan for each worker, in which each tensor is written once, and the metadata of all.

    ``forms``: what each worker holds, by rank. Of the holders of a tensor the one with the fewest
    bytes so far writes it.

    Raises:
        CheckpointError: two workers hold one name with different shapes or dtypes.
    """
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for held in forms:
        for name, (dtype, shape) in held.items():
            form = (dtype, tuple(shape))
            if seen.setdefault(name, form) != form:
                raise CheckpointError(
                    f"{name}: workers disagree on it: {_shown(seen[name])} and {_shown(form)}"
                )
    return create_default_global_save_plan(dedup_save_plans([_local_plan(held) for held in forms]))


def planner_of(tensors: Mapping[str, Tensor]) -> DefaultSavePlanner:
    """DCP's planner for a flat dict of tensors, which looks up what a plan names."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def dtype_of(name: str) -> torch.dtype:
    """The dtype called ``name`` (``float32``).

    Raises:
        CheckpointError: there is none.
    """
    dtype = getattr(torch, name, None) if _DTYPE.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"expected a dtype, got {name!r}")
    return dtype


def _local_plan(held: Mapping[str, Form]) -> SavePlan:
    # Tensors without memory: a plan needs their shapes alone.
    empty = {
        name: torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        for name, (dtype, shape) in held.items()
    }
    return planner_of(empty).create_local_plan()


def _shown(form: tuple[str, Any]) -> str:
    return f"{form[0]} {[*form[1]]}"
