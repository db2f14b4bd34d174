"""From a configuration to what the scheduler plans with: layer shapes, block sizes, costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from dtrain.config import Config
from dtrain.data.batches import BatchSource
from dtrain.data.budget import Budget, microbatches_within
from dtrain.data.store import GraphStore
from dtrain.models.build import build_layers
from dtrain.scheduler import Cluster, Layout, Plan, StepCosts, even_cuts
from dtrain.scheduler.balance import BalancePolicy, Balancer, Move, times_on
from dtrain.scheduler.costmodel import BlockSize, CostModel, LayerShape, step_costs
from dtrain.scheduler.costs import TICKS_PER_S
from dtrain.scheduler.cuts import StageCount, choose_stages
from dtrain.scheduler.links import LinkSpeeds
from dtrain.scheduler.overhaul import Overhaul, OverhaulPolicy
from dtrain.scheduler.predict import predict
from dtrain.scheduler.recompute import stages_to_recompute

LEARN_FIRST = 20
"""Steps after which costs are known well enough to plan with."""
_ADAM_BYTES = 16
_SGD_BYTES = 8


def within_memory(config: Config, store: GraphStore) -> tuple[Config, Budget]:
    """The configuration with as many microbatches as ``memory.limit`` asks for, and why it does.

    Raises:
        DtrainError: there is no such number.
    """
    shapes = model_shapes(config, store) if config.memory.limit is not None else []
    budget = microbatches_within(config, store, shapes)
    parallel = config.parallel.model_copy(update={"microbatches": budget.microbatches})
    return config.model_copy(update={"parallel": parallel}), budget


def batch_source(config: Config, store: GraphStore, *, keep: bool = True) -> BatchSource:
    """The microbatches that a run with this configuration trains on; see :class:`BatchSource`.

    ``config``: as :func:`within_memory` gives it.
    """
    return BatchSource(
        store,
        split=config.data.split,
        sampler=config.sampler,
        batch_size=config.train.batch_size,
        microbatches=config.parallel.microbatches,
        num_layers=config.model.layers,
        seed=config.seed,
        keep=keep,
    )


def total_steps(config: Config, source: BatchSource) -> int:
    """The number of steps after which the run is done."""
    limits = []
    if config.train.epochs is not None:
        limits.append(config.train.epochs * source.steps_per_epoch)
    if config.train.max_steps is not None:
        limits.append(config.train.max_steps)
    return min(limits)


def fixed_cuts(config: Config) -> tuple[int, ...] | None:
    """The cuts that the configuration leaves no choice of; None where costs decide."""
    layers, parallel = config.model.layers, config.parallel
    if parallel.stages == "auto":
        return None
    if parallel.cuts is not None:
        return (0, *parallel.cuts, layers)
    return even_cuts(layers, parallel.stages) if parallel.stages in (1, layers) else None


def layout_of(config: Config, cuts: tuple[int, ...]) -> Layout:
    """The configuration's layout with these cuts."""
    parallel = config.parallel
    return Layout(cuts, parallel.microbatches, parallel.redundancy, parallel.schedule)


def job_layout(
    config: Config, source: BatchSource, layers: Sequence[nn.Module], workers: int
) -> tuple[Layout, str]:
    """The layout that all workers of a job compute alike, and why if it was chosen.

    Where there is a choice the costs are the recorded defaults on the blocks of the first step,
    since all must agree before anything was measured.
    """
    cuts = fixed_cuts(config)
    if cuts is not None:
        return layout_of(config, cuts), ""
    sizes = block_sizes(source, 0, config.parallel.microbatches)
    shapes = [layer_shape(layer) for layer in layers]
    found = find_stages(config, CostModel(), "cpu", shapes, sizes, range(workers))
    return found.plan.layout, found.reason


def find_stages(
    config: Config,
    model: CostModel,
    device: str,
    shapes: Sequence[LayerShape],
    sizes: Sequence[Sequence[BlockSize]],
    workers: Sequence[int],
    cluster: Cluster | None = None,
) -> StageCount:
    """The cuts that are predicted fastest within the workers' memory.

    Into as many stages as the configuration says, on a worker each, however many there are; with
    ``auto``, into as many as is fastest.
    """
    parallel = config.parallel
    wanted = None if parallel.stages == "auto" else parallel.stages
    workers = workers if wanted is None else range(wanted)
    return choose_stages(
        lambda cuts: costs_of_sizes(config, model, device, shapes, cuts, sizes),
        config.model.layers,
        parallel.microbatches,
        workers,
        1,
        redundancy=parallel.redundancy,
        schedule=parallel.schedule,
        cluster=cluster or memory_cluster(config, workers),
        recompute=parallel.recompute,
        stages=wanted,
    )


def memory_cluster(config: Config, workers: Sequence[int]) -> Cluster:
    """Workers with the memory that the configuration allows them."""
    limit = config.parallel.memory_mib
    return Cluster(memory_bytes=dict.fromkeys(workers, limit << 20) if limit else {})


def known_cluster(
    config: Config,
    budget: Budget,
    cuts: Sequence[int],
    workers: Sequence[int],
    domains: Mapping[int, tuple[str, ...]],
) -> Cluster:
    """The workers as a run knows them: where they are, and how much memory for what counts.

    :func:`counted` says what counts: under ``memory.limit`` microbatches in flight, where all other
    memory is set aside; else states and activations, for which there is ``parallel.memory_mib``.
    """
    known = replace(memory_cluster(config, workers), domains=domains)
    if budget.limit is None:
        return known
    _, room = budget.in_flight(cuts)
    states = _bytes_per_parameter(config) * budget.parameters
    device = known.memory_bytes
    memory = {w: max(0, min(room, device.get(w, room + states) - states)) for w in workers}
    return replace(known, memory_bytes=memory)


def counted(config: Config, budget: Budget, costs: StepCosts, cuts: Sequence[int]) -> StepCosts:
    """The costs with the bytes that count against the memory of :func:`known_cluster`."""
    if budget.limit is None:
        return costs
    stages, _ = budget.in_flight(cuts)
    kept = tuple((size,) * costs.microbatches for size in stages)
    return replace(costs, kept_bytes=kept, state_bytes=())


def balance_policy(config: Config) -> BalancePolicy | None:
    """How a run shares its work out anew as it goes; None where the configuration forbids it."""
    if not config.parallel.rebalance:
        return None
    return BalancePolicy(recompute=_may_recompute(config))


def overhaul_policy(config: Config) -> OverhaulPolicy | None:
    """When a run goes over to a plan with further holders; None where it never does."""
    if not config.parallel.rebalance:
        return None
    return OverhaulPolicy(recompute=_may_recompute(config))


def _may_recompute(config: Config) -> bool:
    """Whether a run computes activations again where a plan has no room for them.

    What ``memory.limit`` asks for is that microbatches are smaller.
    """
    return config.parallel.recompute == "auto" and config.memory.limit is None


def moves_ahead(
    config: Config,
    budget: Budget,
    plan: Plan,
    costs: Callable[[Plan], StepCosts],
    cluster: Cluster,
    steps: int,
) -> list[tuple[int, Move]]:
    """How a run of ``steps`` steps changes its first plan, by what it comes to measure.

    ``costs(plan)``: of a step under a plan. ``cluster``: as its workers and links are. Returns
    after how many steps, and to which plan.
    """
    moves: list[tuple[int, Move]] = []
    balancing, overhauling = balance_policy(config), overhaul_policy(config)
    cuts, places = plan.layout.cuts, cluster.domains
    if len(plan.workers) == 1 or balancing is None:
        return moves

    def besides() -> StepCosts:
        return counted(config, budget, costs(plan), cuts)

    known = LinkSpeeds().of(known_cluster(config, budget, cuts, plan.workers, places))
    balancer, spent = Balancer(balancing), costs(plan)
    for done in range(1, min(steps, LEARN_FIRST) + 1):
        times = times_on(plan, spent, cluster)
        move = balancer.observe(plan, times, known, besides)
        if done == LEARN_FIRST and cluster.transfers_cost:
            known = replace(cluster, slowness=known.slowness, memory_bytes=known.memory_bytes)
        if move is None and done == LEARN_FIRST and overhauling is not None:
            step_s = predict(plan, spent, cluster).step_ticks / TICKS_PER_S
            left = steps - done
            move = Overhaul(overhauling).look(plan, [times], step_s, left, known, besides)
        if move is not None:
            moves.append((done, move))
            plan, known = move.plan, replace(known, slowness=move.slowness)
            spent = costs(plan)
    return moves


def recomputing(
    config: Config,
    plan: Plan,
    shapes: Sequence[LayerShape],
    sizes: Callable[[], Sequence[Sequence[BlockSize]]],
) -> tuple[bool, ...]:
    """For each stage, whether its activations are computed again in the backward.

    By ``parallel.recompute``, and by ``parallel.memory_mib`` where that is ``auto``. ``sizes()``:
    of a step's blocks, as :func:`block_sizes` gives them.
    """
    parallel = config.parallel
    if parallel.recompute != "auto" or parallel.memory_mib is None:
        return (parallel.recompute == "all",) * plan.num_stages
    costs = costs_of_sizes(config, CostModel(), "cpu", shapes, plan.layout.cuts, sizes())
    return stages_to_recompute(plan, costs, memory_cluster(config, plan.workers).memory_bytes)


def model_shapes(config: Config, store: GraphStore) -> list[LayerShape]:
    """The shape of each of the model's layers."""
    meta = store.meta
    layers = build_layers(config.model, meta.num_features, meta.num_classes, config.seed)
    return [layer_shape(layer) for layer in layers]


def layer_shape(layer: nn.Module) -> LayerShape:
    """The shape of a layer.

    Widths are its ``in_features`` and ``out_features`` where it has them, else those of its largest
    matrix.
    """
    parameters = [p for p in layer.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() == 2]
    widest = max(matrices, key=lambda p: p.numel(), default=None)
    rows, columns = (widest.shape[0], widest.shape[1]) if widest is not None else (1, 1)
    fan_in, fan_out = getattr(layer, "in_features", columns), getattr(layer, "out_features", rows)
    count = sum(p.numel() for p in parameters)
    return LayerShape(type(layer).__name__, int(fan_in), int(fan_out), count)


def block_sizes(source: BatchSource, step: int, microbatches: int) -> list[list[BlockSize]]:
    """The sizes of a step's blocks, ``[microbatch][layer]``, by sampling them."""
    return [
        [
            BlockSize(block.nnz, block.num_src, block.num_dst)
            for block in source.sample(step, m).blocks
        ]
        for m in range(microbatches)
    ]


def costs_of_sizes(
    config: Config,
    model: CostModel,
    device: str,
    shapes: Sequence[LayerShape],
    cuts: Sequence[int],
    sizes: Sequence[Sequence[BlockSize]],
) -> StepCosts:
    """The costs of a step under some cuts."""
    return step_costs(model, device, shapes, cuts, sizes, _bytes_per_parameter(config))


def _bytes_per_parameter(config: Config) -> int:
    optimizer = (config.deepspeed.get("optimizer") or {}).get("type", "Adam")
    return _SGD_BYTES if optimizer == "SGD" else _ADAM_BYTES
