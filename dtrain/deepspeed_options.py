"""What a run may ask of DeepSpeed, checked before anything starts and without importing it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

OPTIMIZERS = ("Adam", "AdamW", "SGD")
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
# The sections and fields that a run is likely to have. Others go to DeepSpeed as they are.
_FIELDS = (
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "zero_optimization",
    "bf16",
    "fp16",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "steps_per_print",
    "wall_clock_breakdown",
)
_TORCH_SWITCHES = ("maximize", "foreach", "differentiable", "fused")
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "capturable", *_TORCH_SWITCHES)
_PARAMS = {
    "adam": (*_ADAM, "torch_adam", "adam_w_mode"),
    "adamw": (*_ADAM, "torch_adam", "adam_w_mode"),
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", *_TORCH_SWITCHES),
}
_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a DeepSpeed configuration asks for."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))


def check_deepspeed(config: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed would not take, what would change the result, what cannot be kept.

    Raises:
        ValueError: one line that begins with the field's name.
    """
    for name in config:
        _known("deepspeed", name, _FIELDS, strict=False)
    stage = _section(config, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2):
        raise ValueError(
            f"deepspeed.zero_optimization.stage: expected 0, 1 or 2, got {stage}; parameters of a "
            "stage stay whole on each holder"
        )
    if _section(config, "fp16").get("enabled"):
        raise ValueError(
            "deepspeed.fp16.enabled: expected false, got true; dynamic loss scaling drops steps, "
            "use bf16"
        )
    _section(config, "bf16")
    _check_number("deepspeed.gradient_clipping", config.get("gradient_clipping", 0.0))
    _check_optimizer(config)
    scheduler = _section(config, "scheduler")
    if scheduler and scheduler.get("type") not in SCHEDULERS:
        raise ValueError(
            f"deepspeed.scheduler.type: expected one of {', '.join(SCHEDULERS)}, got "
            f"{scheduler.get('type')}"
        )


def _check_optimizer(config: Mapping[str, Any]) -> None:
    optimizer = _section(config, "optimizer")
    if not optimizer:
        raise ValueError(
            "deepspeed.optimizer: expected {type: Adam|AdamW|SGD, params: {...}}, got none"
        )
    kind = str(optimizer.get("type"))
    if kind.lower() not in _PARAMS:
        raise ValueError(f"deepspeed.optimizer.type: expected Adam, AdamW or SGD, got {kind}")
    where = "deepspeed.optimizer.params"
    params = _section(optimizer, "params", "deepspeed.optimizer")
    for name, value in params.items():
        _known(where, name, _PARAMS[kind.lower()], strict=True)
        if name in _NOT_NEGATIVE:
            _check_number(f"{where}.{name}", value)
    betas = params.get("betas", (0.9, 0.999))
    fits = isinstance(betas, list | tuple) and len(betas) == 2
    if not fits or any(isinstance(b, str) or not 0 <= b < 1 for b in betas):
        raise ValueError(f"{where}.betas: expected two numbers in [0, 1), got {betas}")


def _section(config: Mapping[str, Any], name: str, where: str = "deepspeed") -> Mapping[str, Any]:
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}.{name}: expected a mapping, got {found!r}")
    return found


def _known(where: str, name: str, names: tuple[str, ...], *, strict: bool) -> None:
    """Refuse an unknown name; one that is not ``strict`` only where it looks like a slip."""
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, 1, 0.6 if strict else 0.8)
    if strict or near:
        hint = f"; did you mean {near[0]}?" if near else f"; expected {', '.join(names)}"
        raise ValueError(f"{where}.{name}: unknown field{hint}")


def _check_number(field: str, value: Any) -> None:
    if isinstance(value, str):
        # YAML takes a number for one only with a dot: 1e-3 is text.
        raise ValueError(f"{field}: expected a number, got the text {value!r}; such as 1.0e-3")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError(f"{field}: expected a number of at least 0, got {value!r}")
