"""What a worker tells the next generation of the others' history and of its plan."""

from __future__ import annotations

import json

from dtrain.runtime.generation import Holdings
from dtrain.runtime.state import Progress
from dtrain.scheduler import Layout, Plan, StepCosts, make_plan


def test_only_who_fails_again_and_again_is_a_risk() -> None:
    # Two days of steps of 0.1 s; worker 2 was lost every minute of the last hour.
    steps = 2 * 24 * 36_000
    often = list(range(steps - 36_000, steps, 600))
    progress = Progress(step=steps, seconds=steps * 0.1, departures={"1": [5000], "2": often})
    risk = Holdings(progress).risk()
    assert set(risk) == {2}
    assert 0.0005 <= risk[2] < 0.01
    assert Holdings(Progress()).risk() == {}


def test_the_plan_travels_with_what_it_was_made_for() -> None:
    layout = Layout((0, 1, 2), 4)
    plan, costs = make_plan(layout, range(3), 4), StepCosts.even(layout)
    holdings = Holdings(plan=plan, costs=costs, slowness={1: 2.5})
    told = json.loads(json.dumps(holdings.work()))
    again = Plan.from_json(told["plan"], layout, 4)
    assert (again.workers, again.holders) == (plan.workers, plan.holders)
    assert again.executors == plan.executors
    assert told["slowness"] == [[1, 2.5]]
    assert StepCosts.from_json(told["costs"]) == costs
    assert Holdings().work() is None
