"""Faults of a user's own, for tests."""

from __future__ import annotations

import random
from collections.abc import Iterator

from dtrain.faults.context import FaultContext, FaultEvent


def unplug(state: FaultContext, rng: random.Random) -> Iterator[FaultEvent]:
    yield FaultEvent(
        "unplugged",
        f"port {state.options['port']} in {state.phase}",
        {"step": state.step, "drawn": rng.randrange(1000)},
    )


PORT = 3
