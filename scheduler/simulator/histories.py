"""Random histories: clusters of any shape, faults at any moment, then peace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtrain.scheduler.chance import Chance
from dtrain.scheduler.costs import Cluster
from dtrain.scheduler.simulator.errors import InvariantError, require
from dtrain.scheduler.simulator.world import World

PEACE_S = 150.0
"""Seconds without faults within which a cluster must have settled."""
_MOST = 64


def any_world(seed: int) -> World:
    """A cluster whose shape depends on the seed alone."""
    chance = Chance("shape", seed)
    workers = chance.choice([2, 3, 3, 4, 4, 5])
    nodes = chance.random() < 0.5
    return World.small(
        seed,
        workers=workers,
        stages=chance.randint(1, min(3, workers)),
        microbatches=chance.randint(1, 4),
        redundancy=chance.choice([1, 2, 2, 3]),
        min_workers=chance.choice([1, 1, 1, 2, workers]),
        sharded=chance.random() < 0.2,
        closes_on_loss=chance.random() < 0.3,
        compute_s=chance.choice([0.1, 0.2, 0.4]),
        # Up to two workers in a node; some may come that the job was not launched with.
        cluster=Cluster(domains={w: (f"node {w // 2}",) for w in range(_MOST)} if nodes else {}),
        relayout=chance.random() < 0.5,
    )


def any_start(world: World, chance: Chance) -> None:
    """All workers start, some of them late."""
    for worker in range(world.policy.world_size):
        if worker and chance.random() < 0.2:
            late = chance.uniform(0.1, 2.0)
            world.start_late(worker, late)
        else:
            world.start(worker)


def crash_one(world: World, chance: Chance) -> None:
    world.crash(chance.choice(sorted(world.current)))


def crash_leader(world: World, chance: Chance) -> None:
    members = [life.peer.worker for life in world.living if life.course is not None]
    world.crash(min(members or world.current))


def crash_some(world: World, chance: Chance) -> None:
    count = chance.randint(1, len(world.current))
    for worker in chance.sample(sorted(world.current), count):
        world.crash(worker)
        world.run(chance.choice([0.0, 0.0, 0.01, 0.05]))


def crash_on_instruction(world: World, chance: Chance) -> None:
    """A crash right after the next announcement, proposal, answer or entry of somebody."""
    name = chance.choice(["Announce", "Propose", "Answer", "Answer", "Enter", "Enter"])
    life = world.current[chance.choice(sorted(world.current))]
    world.crash_on.append((life.peer.worker, name, life.instructions.get(name, 0) + 1))
    if chance.random() < 0.7:
        crash_one(world, chance)


def crash_in_vote(world: World, chance: Chance) -> None:
    """A crash when the first worker has just seen the full vote, of that worker or another."""
    if world.run(1.5, lambda: any(life.memory.voted for life in world.living)):
        crash_one(world, chance)


def unreachable_newcomers(world: World, chance: Chance) -> None:
    """As many newcomers as the job has workers, which reach the log and each other alone."""
    old = sorted(world.current)
    first = max(old) + 1
    new = list(range(first, first + chance.randint(1, world.policy.world_size)))
    if first > 8:
        return
    world.keep_apart(old, new)
    world.start(*new)
    world.at(world.now + chance.choice([0.5, 2.0, 5.0, 20.0]), world.heal)


def hang(world: World, chance: Chance) -> None:
    """A stop; the supervisor kills it later, or it wakes by itself before or after that."""
    life = world.current[chance.choice(sorted(world.current))]
    world.stop(life.peer.worker)
    after = world.now + chance.uniform(0.1, 6.0)
    if chance.random() < 0.5:
        world.at(after, lambda: world.wake(life))
    else:
        world.at(after, lambda: world.end(life, "is killed by its supervisor"))


def replace(world: World, chance: Chance) -> None:
    """A host is given up and its worker started elsewhere; the old life wakes as a zombie."""
    worker = chance.choice(sorted(world.current))
    old = world.current[worker]
    world.stop(worker)
    world.run(chance.uniform(0.0, 2.0))
    if world.current[worker] is old and not world.active(worker):
        world.start(worker)
        world.at(world.now + chance.uniform(0.0, 3.0), lambda: world.wake(old))


def split(world: World, chance: Chance) -> None:
    workers = sorted(world.current)
    first = {w for w in workers if chance.random() < 0.5}
    if chance.random() < 0.4:
        world.keep_apart(first, set(workers) - first)
    else:
        world.cut(first, set(workers) - first, log_with=chance.randint(0, 1))
    world.at(world.now + chance.choice([0.5, 2.0, 5.0, 12.0]), world.heal)


def lose_the_log(world: World, chance: Chance) -> None:
    """Nobody reaches the log for a while."""
    world.cut(world.current, (), log_with=1)
    world.at(world.now + chance.choice([0.5, 2.0, 5.0, 12.0]), world.heal)


def deafen(world: World, chance: Chance) -> None:
    """Nothing from one worker reaches one other, or anybody."""
    workers = sorted(world.current)
    speaker = chance.choice(workers)
    hearers = workers if chance.random() < 0.5 else [chance.choice(workers)]
    for hearer in hearers:
        if hearer != speaker:
            world.silence(speaker, hearer)
    world.at(world.now + chance.choice([0.5, 2.0, 5.0]), world.heal)


def leave(world: World, chance: Chance) -> None:
    staying = [w for w, life in world.current.items() if not life.leaving]
    if len(staying) > world.policy.min_workers:
        world.leave(chance.choice(sorted(staying)))


def join(world: World, chance: Chance) -> None:
    """A worker that the job was not launched with, or one that had left."""
    back = sorted(world.gone_for_good)
    worker = back[0] if back else max(world.current) + 1
    if len(world.current) < 7 or back:
        world.gone_for_good.discard(worker)
        if worker not in world.current or not world.active(worker):
            world.start(worker)


def restart(world: World, chance: Chance) -> None:
    world.restart_all()


FAULTS: Sequence[Callable[[World, Chance], None]] = (
    [crash_one] * 4
    + [crash_leader] * 2
    + [crash_some] * 2
    + [crash_on_instruction] * 4
    + [hang] * 3
    + [crash_in_vote] * 3
    + [
        unreachable_newcomers,
        replace,
        split,
        split,
        lose_the_log,
        deafen,
        leave,
        join,
        join,
        restart,
    ]
)


def make_peace(world: World, chance: Chance) -> None:
    """No more faults: the network is whole, nobody is stopped, everybody is started."""
    world.crash_on = []
    world.respawns = True
    world.heal()
    for life in list(world.living):
        if life.stopped and chance.random() < 0.5:
            world.wake(life)
        elif life.stopped:
            world.end(life, "is killed by its supervisor")
    for worker in sorted(world.current):
        if not world.current[worker].alive and worker not in world.gone_for_good:
            world.start(worker)


def stays_possible(world: World) -> bool:
    """Whether enough workers are left that do not want to leave."""
    staying = [
        w for w, life in world.current.items() if w not in world.gone_for_good and not life.leaving
    ]
    return len(staying) >= world.policy.min_workers


def any_history(seed: int) -> World:
    """Run one random history to its end.

    Raises:
        InvariantError: an invariant did not hold; the message has the seed, the command that
            plays the history again, and its story.
    """
    chance = Chance("history", seed)
    world = any_world(seed)
    try:
        any_start(world, chance)
        world.run(chance.uniform(0.0, 2.0))
        for _ in range(chance.randint(1, 5)):
            chance.choice(FAULTS)(world, chance)
            world.run(chance.choice([0.0, 0.02, 0.1, 0.3, 1.0, 2.0]))
        make_peace(world, chance)
        settled = world.run(PEACE_S, world.settled)
        require(settled or not stays_possible(world), "no progress after the faults stopped")
    except Exception as error:
        again = f"dtrain simulate --histories 1 --seed {seed}"
        raise InvariantError(f"seed {seed} ({again}): {error!r}\n{world.story()}") from error
    return world
