"""Bias and rectifier in plain torch operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def bias_relu(h: Tensor, bias: Tensor) -> Tensor:
    """``h``: float [N, F]; ``bias``: float [F]; returns [N, F]; differentiable."""
    return torch.relu(h + bias)
