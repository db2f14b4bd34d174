"""The ``faults`` section: defaults, choices, and one clear line for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.config import Config, check_config
from dtrain.errors import DtrainError
from dtrain.faults.spec import HOW, FaultSpec


def config(*faults: dict[str, Any], **train: Any) -> Config:
    raw = {"data": {"store": "x"}, "train": train or {"max_steps": 20}, "faults": list(faults)}
    return check_config(raw, "c.yaml")


@pytest.mark.parametrize("kind", HOW)
def test_a_kind_alone_is_a_fault_and_survives_being_saved(kind: str) -> None:
    made = config({"kind": kind})
    fault = made.faults[0]
    assert fault.how == (HOW[kind][0] if HOW[kind] else None)
    again = Config.model_validate(made.model_dump(mode="json"))
    assert again.faults == made.faults
    assert again.faults[0].digest() == fault.digest()


def test_faults_do_not_decide_the_result() -> None:
    assert config().identity("f") == config({"kind": "crash", "worker": 1}).identity("f")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "crsh"}, "faults.0.kind: expected one of"),
        ({"kind": "crsh"}, "got 'crsh'; did you mean crash?"),
        ({"kind": "crash", "phase": "foward"}, "faults.0.phase: expected one of"),
        ({"kind": "crash", "phase": "foward"}, "got 'foward'; did you mean forward?"),
        ({"kind": "crash", "how": "sigkil"}, "got 'sigkil'; did you mean sigkill?"),
        ({"kind": "slow", "how": "fast"}, "faults.0.how: slow has one way only"),
        ({"kind": "crash", "worker": "one"}, "faults.0.worker: expected a number, random or all"),
        ({"kind": "crash", "worker": -1}, "faults.0.worker: expected a number of at least 0"),
        ({"kind": "crash", "step": "soon"}, "faults.0.step: expected a number or random"),
        ({"kind": "crash", "factor": 3.0}, "faults.0.factor: only for the kinds slow"),
        ({"kind": "numeric", "phase": "vote"}, "faults.0.phase: expected one of send, receive"),
        ({"kind": "disk", "phase": "sum"}, "faults.0.phase: expected checkpoint"),
        ({"kind": "crash", "point": "rename", "phase": "sum"}, "faults.0.point: expected phase"),
        ({"kind": "crash", "phse": "sum"}, "faults.0.phse: unknown field; did you mean phase?"),
        ({"kind": "crash", "options": {"a": 1}}, "faults.0.options: only for a fault of your own"),
        ({"worker": 1}, "faults.0.kind: expected a value, got none"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(DtrainError) as caught:
        config(fault)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text


def test_a_random_step_needs_a_number_of_steps() -> None:
    with pytest.raises(DtrainError, match=r"faults\.0\.step: expected a number where"):
        config({"kind": "crash", "step": "random"}, epochs=3)


def test_a_users_own_fault_takes_options() -> None:
    fault = FaultSpec(kind="my.faults:unplug", options={"port": 3})
    assert fault.is_own
    assert fault.how is None
