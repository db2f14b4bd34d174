"""Choosing a plan: candidates for assignment and order, compared by their predicted step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dtrain.scheduler.assignment import Assignment
from dtrain.scheduler.bounds import least_step_ticks
from dtrain.scheduler.costs import UNIFORM, Cluster, StepCosts
from dtrain.scheduler.domains import dealt_over_domains
from dtrain.scheduler.order import Policy, longest_first, ranked
from dtrain.scheduler.plan import Layout, Plan
from dtrain.scheduler.planner import (
    assigned,
    checked_members,
    in_order,
    reassigned,
    shared_out,
)
from dtrain.scheduler.predict import (
    Prediction,
    excess_bytes,
    fits_memory,
    longest_sum,
    planned_end,
    predict,
)
from dtrain.scheduler.recompute import hungriest, recomputed

SEARCH_ACTIONS = 50_000
"""Actions that a search puts in order at most, over all candidates but the first."""
REPLAN_ACTIONS = 12_000
"""The same after a fault, when the job stands still meanwhile."""
QUICK_ACTIONS = 8_000
"""Actions that the orders are worked out for after a fault in a run, besides the first order."""
BASELINE = "1f1b in arrival order"

_TRIES = 48
_NEAR = 1.1
_AHEAD = (16, 4, 8, 1)
_NEAR_LEAST = 1.02

_Drafts = Callable[[StepCosts], Sequence[tuple[str, Plan]]]
"""Names and plans whose actions are not yet in order."""


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen, and why.

    ``compared``: predicted step time of every candidate, in ticks, by name; those that do not fit
    in memory are left out. ``recompute[s]``: activations of the stage are to be computed again in
    its backward instead of kept (activation checkpointing), because memory demands it. ``costs``:
    what the plan was chosen for, recomputation included.
    """

    plan: Plan
    prediction: Prediction
    name: str
    compared: dict[str, int]
    recompute: tuple[bool, ...]
    costs: StepCosts

    @property
    def reason(self) -> str:
        """The choice in a line."""
        ticks = self.prediction.step_ticks
        said = f"{self.name}: predicted step {ticks / 1e6:.2f} ms"
        base = self.compared.get(BASELINE)
        if base is not None and base > ticks:
            said += f", {1 - ticks / base:.0%} less than {BASELINE}"
        elif base is not None:
            said += f", the least of {len(self.compared)} compared"
        stages = [s for s, again in enumerate(self.recompute) if again]
        if stages:
            said += f"; stages {stages} recompute activations, which memory has no room for"
        if self.prediction.over:
            said += f"; does not fit in the memory of workers {list(self.prediction.over)}"
        return said


def choose_plan(
    layout: Layout,
    workers: Sequence[int],
    generation: int,
    costs: StepCosts,
    cluster: Cluster = UNIFORM,
    *,
    staged: bool = False,
) -> Choice:
    """The fastest plan found within memory, a pure function of its arguments.

    Assignments: a stage a worker as :func:`make_plan` deals them, dealt in turn or the longest
    first; whole microbatches, where a worker runs all stages of its microbatches; and the first
    with the load levelled over stages. Orders: GPipe, 1F1B, 1F1B with the longest first, list
    scheduling with more in flight, and a local search over the precedence of microbatches. Where
    nothing fits in memory, the stages that keep most recompute their activations.

    A plan of more actions than a search may try a few times is made by the least load alone.

    ``staged``: only the assignments that give no worker another stage's work.

    Raises:
        ValueError: as :func:`make_plan`.
    """
    members = checked_members(workers)

    large = 8 * layout.num_stages * layout.microbatches > SEARCH_ACTIONS

    def drafts(known: StepCosts) -> list[tuple[str, Plan]]:
        plan = assigned(layout, members, generation, known, cluster)
        if large:
            return [("least load", plan)]
        drawn = [("", _dealt_in_turn(plan))]
        if len(members) > 1:
            drawn.append(("least load", plan))
            if layout.num_stages > 1 and not staged:
                drawn.append(("whole microbatches", _whole(plan, members, known, cluster)))
                drawn.append(("levelled over stages", levelled(plan, known, cluster)))
        return drawn

    choice = _choose(drafts, costs, cluster, SEARCH_ACTIONS)
    grid = f"{len(members)} workers over {layout.num_stages} stages"
    plan = replace(choice.plan, reason=f"{grid}: {choice.reason}")
    return replace(choice, plan=plan)


def choose_replan(
    old: Plan,
    workers: Sequence[int],
    generation: int,
    reason: str,
    costs: StepCosts,
    cluster: Cluster = UNIFORM,
) -> Choice:
    """The plan after a change of membership, moving little, in the best order found.

    Raises:
        ValueError: as :func:`replan`.
    """
    members = checked_members(workers)

    def drafts(known: StepCosts) -> list[tuple[str, Plan]]:
        plan = reassigned(old, members, generation, reason, known, cluster)
        return [("", plan), *_whole_again(plan, old, known, cluster)]

    choice = _choose(drafts, costs, cluster, REPLAN_ACTIONS)
    plan = replace(choice.plan, reason=f"{choice.plan.reason}; {choice.reason}")
    return replace(choice, plan=plan)


def reschedule(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> Choice:
    """The best order found for a plan's own executors, for the sizes of one step.

    Holders and executors stay, so nothing moves and nothing is sampled twice: a running job can
    take it at any step boundary.
    """
    return _choose(lambda known: [("", plan)], costs, cluster, REPLAN_ACTIONS)


def choose_balance(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> Choice:
    """The plan with its load levelled for the workers' speeds; members and holders stay.

    Every executor holds its stage already, so that nothing is transferred. Nobody is left out for
    being slow: a worker keeps the share that it can finish in time. Whole microbatches among those
    that hold every stage come first: where others are as fast, nothing is sent.
    """

    def drafts(known: StepCosts) -> list[tuple[str, Plan]]:
        level = levelled(plan, known, cluster, may_hold=False)
        again = _whole_again(level, plan, known, cluster)
        return [*(_whole_held(level, known, cluster) if not again else []), ("", level), *again]

    return _choose(drafts, costs, cluster, REPLAN_ACTIONS)


def _choose(draw: _Drafts, costs: StepCosts, cluster: Cluster, budget: int) -> Choice:
    """The best of all orders of the drafts, with as little recomputation as memory allows."""
    again = [False] * costs.num_stages
    known = costs
    tried: list[Choice] = []
    while True:
        tried.append(_Search(known, cluster, tuple(again), budget).run(draw(known)))
        if not tried[-1].prediction.over:
            return tried[-1]
        if all(again) or not costs.kept_bytes:
            return min(tried, key=lambda choice: excess_bytes(choice.prediction, cluster))
        left = [s for s in range(costs.num_stages) if not again[s]]
        again[hungriest(known, left)] = True
        known = recomputed(costs, again)


def _dealt_in_turn(staged: Plan) -> Plan:
    groups = [sorted(set(runs)) for runs in staged.executors]
    every = range(staged.layout.microbatches)
    executors = tuple(tuple(group[m % len(group)] for m in every) for group in groups)
    return replace(staged, executors=executors)


def levelled(
    plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM, *, may_hold: bool = True
) -> Plan:
    """The plan with its load shared out by the workers' speeds; its actions are not in order yet.

    ``may_hold``: a worker may become a further holder of a stage.
    """
    work = Assignment(plan, plan.workers, costs, cluster)
    work.level(may_hold)
    holders = tuple(tuple(sorted(held)) for held in work.holders)
    executors = tuple(tuple(runs) for runs in work.executors)
    return replace(plan, holders=holders, executors=executors)


def _whole(staged: Plan, workers: Sequence[int], costs: StepCosts, cluster: Cluster) -> Plan:
    """Every microbatch on one of some workers, from the first stage to the last."""
    total = [sum(column) for column in zip(*costs.work(), strict=True)]
    runs = shared_out(total, dealt_over_domains(workers, cluster), cluster)
    held = tuple(tuple(sorted(set(runs) | set(held))) for held in staged.holders)
    return replace(staged, holders=held, executors=(runs,) * costs.num_stages)


def _whole_held(plan: Plan, costs: StepCosts, cluster: Cluster) -> list[tuple[str, Plan]]:
    """Every microbatch on one of the workers that hold all stages, if there are any."""
    able = sorted(set(plan.holders[0]).intersection(*plan.holders[1:]))
    if plan.num_stages == 1 or not able:
        return []
    return [("whole microbatches", _whole(plan, able, costs, cluster))]


def _whole_again(
    plan: Plan, old: Plan, costs: StepCosts, cluster: Cluster
) -> list[tuple[str, Plan]]:
    """``plan`` with whole microbatches moved instead, where the old plan had whole ones only.

    That is done as if there were but one stage, among the workers that hold all of them.
    """
    if plan.num_stages == 1 or any(runs != old.executors[0] for runs in old.executors):
        return []
    able = set(plan.holders[0]).intersection(*plan.holders[1:])
    if not able:
        return []
    sums = replace(
        costs,
        forward=(tuple(map(sum, zip(*costs.forward, strict=True))),),
        backward=(tuple(map(sum, zip(*costs.backward, strict=True))),),
        state_bytes=(),
    )
    members = tuple(sorted(able))
    one = replace(
        old,
        layout=replace(old.layout, cuts=(0, 1)),
        holders=(members,),
        executors=(old.executors[0],),
    )
    work = Assignment(one, members, sums, cluster)
    work.fill_gaps()
    work.level()
    executors = (tuple(work.executors[0]),) * plan.num_stages
    return [("whole microbatches", replace(plan, executors=executors))]


@dataclass(frozen=True)
class _Candidate:
    """An assignment and a policy that fit in memory; ``last``: the microbatch that ends last."""

    ticks: int
    last: int
    assignment: str
    plan: Plan
    policy: Policy


class _Search:
    """The best plan so far."""

    def __init__(
        self, costs: StepCosts, cluster: Cluster, recompute: tuple[bool, ...], budget: int
    ) -> None:
        self.costs, self.cluster, self.recompute = costs, cluster, recompute
        self.size = 2 * costs.num_stages * costs.microbatches
        self.left = budget
        self.compared: dict[str, int] = {}
        self.best: Choice | None = None
        self.ideal = 0.0
        total = [sum(column) for column in zip(*costs.work(), strict=True)]
        self.total = sum(total)
        self.longest = longest_first(costs)
        self.shortest = ranked(sorted(range(len(total)), key=lambda m: (total[m], m)))
        self.found: list[_Candidate] = []

    def policies(self, plan: Plan) -> list[tuple[str, Policy]]:
        """Names and policies to compare: the baseline, then the most promising first.

        Of a plan so large that only one order will be made, one.
        """
        longest = ("1f1b, longest first", Policy(rank=self.longest))
        rank = hardest_first(plan, self.costs, self.cluster)
        hardest = [
            (f"list scheduling, hardest first, {n} more in flight", Policy(True, n, rank, True))
            for n in _AHEAD
        ]
        if self.left < self.size:
            return [longest if self.cluster.memory_bytes else hardest[0]]
        gpipe = ("gpipe", Policy(backwards_first=False))
        listed = [(BASELINE, Policy()), *hardest, longest, gpipe]
        for ahead in (1, 2, 4):
            more = f"list scheduling, {ahead} more in flight"
            listed.append((f"{more}, longest first", Policy(ahead=ahead, rank=self.longest)))
            listed.append((more, Policy(ahead=ahead)))
        listed.append(("1f1b, shortest first", Policy(rank=self.shortest)))
        if self.cluster.memory_bytes:
            listed += [(f"1f1b, {n} less in flight", Policy(ahead=-n)) for n in (1, 2, 4)]
        return listed

    def run(self, drafts: Sequence[tuple[str, Plan]]) -> Choice:
        """Compare all orders of all assignments, then look around the best ones."""
        power = sum(1.0 / self.cluster.slow(w) for w in drafts[0][1].workers)
        self.ideal = self.total / power
        listed = [
            (
                place,
                number,
                f"{name}, {assignment}" if assignment else name,
                assignment,
                plan,
                policy,
            )
            for number, (assignment, plan) in enumerate(drafts)
            for place, (name, policy) in enumerate(self.policies(plan))
        ]
        for _, _, name, assignment, plan, policy in sorted(listed, key=lambda entry: entry[:2]):
            found = self._try(name, plan, policy)
            if found is not None:
                self.found.append(_Candidate(*found, assignment, plan, policy))
        started: set[str] = set()
        for candidate in sorted(self.found, key=lambda c: c.ticks):
            if candidate.assignment not in started:
                started.add(candidate.assignment)
                self._climb(candidate)
        assert self.best is not None
        return self.best

    def _done(self) -> bool:
        """Whether nothing worth the search can be gained any more."""
        if self.best is None or self.best.prediction.over:
            return False
        found = self.best.prediction
        return found.makespan <= 1.005 * max(self.ideal, found.critical_path)

    def _try(self, name: str, plan: Plan, policy: Policy) -> tuple[int, int] | None:
        """The predicted step time of a candidate and the microbatch that ends last.

        None where it does not fit in memory, or where the search is over.
        """
        if self.best is not None:
            if self.left < self.size or self._done():
                return None
            self.left -= self.size
        plan = in_order(plan, self.costs, self.cluster, policy)
        ticks, last = self._step(plan)
        limited = bool(self.cluster.memory_bytes)
        if self.best is None or limited or ticks < self.best.prediction.step_ticks:
            prediction = predict(plan, self.costs, self.cluster)
            if self.best is None or self._key(prediction) < self._key(self.best.prediction):
                compared, again = self.compared, self.recompute
                self.best = Choice(plan, prediction, name, compared, again, self.costs)
            if prediction.over:
                return None
        self.compared[name] = min(ticks, self.compared.get(name, ticks))
        return ticks, last

    def _step(self, plan: Plan) -> tuple[int, int]:
        """The step time that :func:`predict` would give, for a plan ordered for these very costs.

        And the microbatch that ends last.
        """
        makespan, last = planned_end(plan, self.costs, self.cluster)
        return makespan + longest_sum(plan.holders, self.costs) + self.costs.fixed_ticks, last

    def _key(self, prediction: Prediction) -> tuple[int, int]:
        return excess_bytes(prediction, self.cluster), prediction.step_ticks

    def _climb(self, start: _Candidate) -> None:
        """Change the precedence of microbatches as long as that helps.

        Whichever ends last is promoted, or two are exchanged. The choices are a linear congruential
        sequence: the same ones on every member.
        """
        name = "searched order" + (f", {start.assignment}" if start.assignment else "")
        order = _sorted_by(start.policy.rank or range(self.costs.microbatches))
        ticks, last, state = start.ticks, start.last, 1
        for turn in range(_TRIES if len(order) > 1 else 0):
            assert self.best is not None
            if ticks > _NEAR * self.best.prediction.step_ticks or self._done():
                return
            state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            a = (state >> 33) % len(order)
            changed = list(order)
            if turn % 2 and changed.index(last):
                at = changed.index(last)
                changed.insert(a % at, changed.pop(at))
            else:
                b = (a + 1 + (state >> 17) % (len(order) - 1)) % len(order)
                changed[a], changed[b] = changed[b], changed[a]
            found = self._try(name, start.plan, replace(start.policy, rank=ranked(changed)))
            if found is not None and found[0] < ticks:
                (ticks, last), order = found, changed


def hardest_first(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> tuple[int, ...]:
    """Precedence of microbatches that others have to fit in with.

    By the slowness of the slowest worker that they pass, which is the last to be done if it has to
    wait; then by how many workers share them; then by their length.
    """
    chains = [sum(column) for column in zip(*costs.work(), strict=True)]
    columns = list(zip(*plan.executors, strict=True))
    slowest = [0.0] * len(columns)
    if cluster.slowness:
        slowest = [-max(map(cluster.slow, column)) for column in columns]
    shared = [-len(set(column)) for column in columns]
    every = range(len(columns))
    return ranked(sorted(every, key=lambda m: (slowest[m], shared[m], -chains[m])))


def quickly_ordered(plan: Plan, costs: StepCosts, cluster: Cluster = UNIFORM) -> Plan:
    """The plan in the best of a few orders, for when a job stands still and waits for it.

    The first is :func:`in_order`'s own; the others keep more microbatches of a stage in flight, and
    are tried as far as ``QUICK_ACTIONS`` go and one may be much better, if they fit in memory. A
    plan that is too large for that has the most promising order alone.
    """
    rank = hardest_first(plan, costs, cluster)
    tries = QUICK_ACTIONS // (2 * costs.num_stages * costs.microbatches)
    if not tries and not cluster.memory_bytes:
        only = in_order(plan, costs, cluster, Policy(True, _AHEAD[0], rank))
        return replace(only, reason=f"{plan.reason}; hardest first, {_AHEAD[0]} more in flight")
    best = in_order(plan, costs, cluster)
    first, _ = planned_end(best, costs, cluster)
    ticks = first
    enough = _NEAR_LEAST * least_step_ticks(costs, plan.workers, cluster)
    for ahead in _AHEAD[:tries]:
        if ticks <= enough:
            break
        other = in_order(plan, costs, cluster, Policy(True, ahead, rank, True))
        found, _ = planned_end(other, costs, cluster)
        if found < ticks and fits_memory(other, costs, cluster):
            said = f"hardest first, {ahead} more in flight: step {1 - found / first:.0%} shorter"
            best, ticks = replace(other, reason=f"{plan.reason}; {said}"), found
    return best


def _sorted_by(rank: Sequence[int]) -> list[int]:
    return sorted(range(len(rank)), key=lambda m: rank[m])
