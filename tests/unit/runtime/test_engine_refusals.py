"""What DeepSpeed refuses is told as bad input, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from dtrain.errors import DtrainError
from dtrain.runtime.engine import refusals_told


@pytest.mark.parametrize(
    ("made", "options", "told"),
    [
        (WarmupLR, {"optimizer": None, "nonsense": 3}, "TypeError: .*'nonsense'"),
        (DeepSpeedZeroConfig, {"reduce_bucket_size": "many"}, "ValidationError: .*reduce_bucket"),
    ],
)
def test_a_refusal_is_one_line(made: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(DtrainError, match=f"^deepspeed: .*{told}") as caught, refusals_told():
        made(**options)
    assert "\n" not in str(caught.value)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="peer"), refusals_told():
        raise RuntimeError("peer")
