"""How far a run is, as it is saved and told."""

from __future__ import annotations

import json

from dtrain.runtime.state import Best, Progress


def test_progress_survives_json_and_copies_stand_alone() -> None:
    progress = Progress(step=7, best=Best(5, 0.5, {"val": {"accuracy": 0.5}}))
    progress.memory["costs"] = {"a": 1.5}
    progress.departed([2, 0])
    copy = progress.copy()
    progress.step = 9
    progress.departed([2])
    progress.memory["costs"] = {"a": 2.5}
    assert copy.departures == {"2": [7], "0": [7]}
    assert copy.memory == {"costs": {"a": 1.5}}
    assert progress.departures == {"2": [7, 9], "0": [7]}
    assert Progress.of(json.loads(json.dumps(progress.as_json()))) == progress
    # One that was saved before these were kept.
    old = {k: v for k, v in progress.as_json().items() if k not in ("departures", "memory")}
    assert Progress.of(old).departures == {}


def test_only_the_newest_departures_are_kept() -> None:
    progress = Progress()
    for progress.step in range(250):
        progress.departed([1])
    assert progress.departures == {"1": [*range(150, 250)]}
