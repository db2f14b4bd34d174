"""Moving load as costs are measured and workers' speeds change: each few steps, with hysteresis.

The vote of every step tells all members what each action took, so that all fit the same costs and
speeds to them, and move the same load at the same step boundary. Only executors and their orders
change: a stage's work goes to workers that hold it already, so nothing is transferred and nobody
regroups. Nobody is left out for being slow; a worker keeps the share that it can finish in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtrain.scheduler.bounds import least_step_ticks
from dtrain.scheduler.costs import TICKS_PER_S, UNIFORM, Cluster, StepCosts
from dtrain.scheduler.fit import median
from dtrain.scheduler.plan import Plan, Table
from dtrain.scheduler.planner import in_order
from dtrain.scheduler.predict import predict
from dtrain.scheduler.search import choose_balance, levelled

_GRAIN = 0.05
_SLACK = 0.05
_ROUNDS = 4

Times = Sequence[Sequence[float]]
"""``[stage][microbatch]``."""


@dataclass(frozen=True)
class StepTimes:
    """What the actions of one step took, and how much work they were.

    ``forward``, ``backward``: seconds, 0 where a microbatch has no seeds. ``work``: of both
    together, by the sizes of the blocks, in any unit that is the same for all workers: seconds on a
    reference, say.
    """

    forward: Times
    backward: Times
    work: Times


def times_on(plan: Plan, costs: StepCosts, cluster: Cluster) -> StepTimes:
    """What the actions of a step would take on a cluster."""

    def seconds(table: Table) -> Times:
        return [
            [ticks * cluster.slow(w) / TICKS_PER_S for ticks, w in zip(row, runs, strict=True)]
            for row, runs in zip(table, plan.executors, strict=True)
        ]

    work = [[ticks / TICKS_PER_S for ticks in row] for row in costs.work()]
    return StepTimes(seconds(costs.forward), seconds(costs.backward), work)


@dataclass(frozen=True)
class BalancePolicy:
    """When load is moved.

    ``every``: steps between two looks. ``gain``: share of the step time that a move must save.
    ``looks``: how many looks in a row must find so; for moves that save less than ``much``, twice
    as many after each of them, up to ``most_looks``. ``deadband``: a slowness within so much of 1
    counts as 1. ``most``: slowness that counts at most. ``search``: look for a better order too,
    which may keep more microbatches in flight than the layout's schedule does, where memory has
    room. ``recompute``: what memory has no room for may be computed again. ``most_rest``: looks to
    leave out at most, twice as many after each search in vain for speeds that are alike.
    """

    every: int = 4
    gain: float = 0.08
    looks: int = 2
    much: float = 0.25
    most_looks: int = 16
    deadband: float = 0.25
    most: float = 20.0
    search: bool = True
    recompute: bool = True
    most_rest: int = 32


@dataclass(frozen=True)
class Move:
    """A better plan for the same members, and the costs and slowness that it was made for.

    ``gain``: the share of the step time that it is predicted to save.
    """

    plan: Plan
    costs: StepCosts
    slowness: Mapping[int, float]
    gain: float
    reason: str


@dataclass
class Balancer:
    """Watches how long the actions of a plan take, and moves load when that pays.

    A pure function of what it is told: members that are told the same say the same.
    """

    policy: BalancePolicy = BalancePolicy()
    _window: list[StepTimes] = field(default_factory=list)
    _streak: int = 0
    _settled: bool = False
    _patience: int = 1
    _in_vain: dict[int, float] | None = None
    _rest: int = 0
    _resting: int = 0

    def observe(
        self,
        plan: Plan,
        times: StepTimes,
        cluster: Cluster = UNIFORM,
        besides: Callable[[], StepCosts | None] = lambda: None,
    ) -> Move | None:
        """Take in a step, and say what to change after it, if anything.

        ``cluster``: with the slowness that ``plan`` was made for. A worker that executed nothing
        tells nothing, and is taken for as slow as it was when it last did. ``besides()``: costs
        whose bytes count besides the measured times; asked for only where it matters.
        """
        self._window.append(times)
        if len(self._window) < self.policy.every:
            return None
        window, self._window = self._window, []
        costs, speeds = fitted(plan, window)
        slowness = self._slowness(plan, speeds, cluster)
        if self._settled and not slowness and not cluster.slowness:
            # The plan was compared with a better one for the costs as measured: nothing has changed
            # since then.
            self._streak = 0
            return None
        if self._resting and self._alike(slowness):
            self._resting -= 1
            return None
        move = self._better(plan, costs, replace(cluster, slowness=slowness), cluster, besides)
        if move is None:
            self._streak, self._settled = 0, True
            longer = min(2 * self._rest + 1, self.policy.most_rest)
            self._rest = self._resting = longer if self._alike(slowness) else 1
            self._in_vain = slowness
            return None
        self._streak += 1
        self._rest = self._resting = 0
        policy = self.policy
        small = move.gain < policy.much
        if self._streak < min(policy.looks * (self._patience if small else 1), policy.most_looks):
            return None
        if small:
            self._patience *= 2
        self._streak, self._settled = 0, True
        return move

    def forget(self) -> None:
        """Work is measured in another unit from now on."""
        self._window.clear()

    def _alike(self, slowness: Mapping[int, float]) -> bool:
        """Whether no worker's speed has changed much since the last search, which was in vain."""
        then, much = self._in_vain, 1.0 + self.policy.deadband
        if then is None:
            return False
        both = {*slowness, *then}
        pairs = [sorted((slowness.get(w, 1.0), then.get(w, 1.0))) for w in both]
        return all(large <= much * small for small, large in pairs)

    def _better(
        self,
        plan: Plan,
        costs: StepCosts,
        wanted: Cluster,
        known: Cluster,
        besides: Callable[[], StepCosts | None],
    ) -> Move | None:
        now = predict(plan, costs, wanted).step_ticks
        # Who has recovered gets its load back even where the step gains nothing by it: what was
        # moved away may matter at the next step's sizes.
        recovered = any(f > 1.0 and w not in wanted.slowness for w, f in known.slowness.items())
        share = 1.0 + _SLACK if recovered else 1.0 - self.policy.gain
        if least_step_ticks(costs, plan.workers, wanted) > share * now:
            return None
        sized = besides()
        if sized is not None:
            costs = costs.with_bytes_of(sized)
            now = predict(plan, costs, wanted).step_ticks
        better, then, how = self._balanced(plan, costs, wanted)
        same = better.executors == plan.executors
        if then > share * now or (same and then > (1.0 - self.policy.gain) * now):
            return None
        told = [f"worker {w} takes {f:.2f} x the time" for w, f in sorted(wanted.slowness.items())]
        said = ", ".join(told) or "all workers are alike"
        reason = f"{said}; {how}: predicted step {now / 1e6:.2f} -> {then / 1e6:.2f} ms"
        plan = replace(better, reason=reason)
        return Move(plan, costs, wanted.slowness, 1.0 - then / now, reason)

    def _balanced(self, plan: Plan, costs: StepCosts, cluster: Cluster) -> tuple[Plan, int, str]:
        """The plan with its load levelled, its step time in ticks, and in what order it is."""
        if self.policy.search:
            choice = choose_balance(plan, costs, cluster)
            again = any(choice.recompute) and not self.policy.recompute
            if not choice.prediction.over and not again:
                return choice.plan, choice.prediction.step_ticks, choice.name
        # In the layout's own order, whose bound on what is in flight the job was made for.
        better = in_order(levelled(plan, costs, cluster, may_hold=False), costs, cluster)
        return better, predict(better, costs, cluster).step_ticks, plan.layout.schedule

    def _slowness(
        self, plan: Plan, speeds: Mapping[int, float], cluster: Cluster
    ) -> dict[int, float]:
        """Slowness of the workers that differ from the ordinary, in steps of 5 %."""
        out: dict[int, float] = {}
        for w in plan.workers:
            value = min(speeds.get(w, cluster.slow(w)), self.policy.most)
            if abs(value - 1.0) > self.policy.deadband:
                out[w] = max(_GRAIN, round(value / _GRAIN) * _GRAIN)
        return out


def fitted(plan: Plan, window: Sequence[StepTimes]) -> tuple[StepCosts, dict[int, float]]:
    """Costs on a worker of slowness 1, and each worker's slowness, from the steps of ``plan``.

    The time of an action is taken as its work times a rate of its stage times the slowness of its
    executor. Rates and slowness are fitted in the logarithm by median polish (Tukey, 1977), so that
    passing hiccups have no say. Only differences between workers that share a stage, or are linked
    by others that do, can be told: of those, the usual one counts as 1.
    """
    seen: dict[tuple[int, int], list[float]] = {}
    shares: list[list[float]] = [[] for _ in plan.executors]
    for times in window:
        for s, runs in enumerate(plan.executors):
            for m, w in enumerate(runs):
                ahead, back, work = times.forward[s][m], times.backward[s][m], times.work[s][m]
                if ahead > 0 and back > 0 and work > 0:
                    seen.setdefault((w, s), []).append(math.log((ahead + back) / work))
                    shares[s].append(ahead / (ahead + back))
    rows = {pair: median(values) for pair, values in seen.items()}
    slow = {w: 0.0 for w, _ in sorted(rows)}
    rates = [0.0] * len(plan.executors)
    for _ in range(_ROUNDS):
        for s in range(len(rates)):
            found = [value - slow[w] for (w, stage), value in sorted(rows.items()) if stage == s]
            rates[s] = median(found) if found else 0.0
        for w in slow:
            slow[w] = median([v - rates[s] for (at, s), v in sorted(rows.items()) if at == w])
    for group, stages in _linked(sorted(rows)):
        usual = sorted(slow[w] for w in group)[(len(group) - 1) // 2]
        for w in group:
            slow[w] -= usual
        for s in stages:
            rates[s] += usual
    forward, backward = [], []
    for s, runs in enumerate(plan.executors):
        share = median(shares[s]) if shares[s] else 0.5
        mean = [sum(t.work[s][m] for t in window) / len(window) for m in range(len(runs))]
        ticks = [TICKS_PER_S * math.exp(rates[s]) * work for work in mean]
        forward.append(tuple(max(1, round(share * t)) for t in ticks))
        backward.append(tuple(max(1, round((1 - share) * t)) for t in ticks))
    costs = StepCosts(tuple(forward), tuple(backward))
    return costs, {w: math.exp(value) for w, value in slow.items()}


def _linked(pairs: Sequence[tuple[int, int]]) -> list[tuple[set[int], set[int]]]:
    """Workers and stages that (worker, stage) pairs link, group by group."""
    groups: list[tuple[set[int], set[int]]] = []
    for worker, stage in pairs:
        met = [g for g in groups if worker in g[0] or stage in g[1]]
        groups = [g for g in groups if g not in met]
        workers, stages = {worker}.union(*(g[0] for g in met)), {stage}.union(*(g[1] for g in met))
        groups.append((workers, stages))
    return groups
